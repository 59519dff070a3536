"""The arguments of a step: which is a param, which is of the optimizer state, and what comes back in its place.

[Note: by record, else by name]
Where jzero has traced the program, the marks of its updates say what an argument is (`record.py`). What they do not
take, an average for one, is a copy of a param where its path ends as that of the param does; without names (NNX) and in
an argument of its own, where it has the shape. For any other program paths and shapes are all there is: params are what
is called so, else the tree that has each of them once; models.py has more of it.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jzero.core.nnx_modules import variable_paths
from jzero.layout.leaf_rule import Frozen, Layout, path_keys, path_name
from jzero.layout.specs import shard_factor
from jzero.layout.state_layouts import named_by
from jzero.proof.arguments import argument_shardings, parameter_numbers
from jzero.proof.hlo import Module, Shape
from jzero.proof.models import is_of, other_params, trained_beside
from jzero.proof.record import TraceRecord
from jzero.sharding import Plan

STATE = "opt_state"
NAMELESS = "states"
"""In the path of what `nnx.jit` makes of a module."""
Keys = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Role:
    """What an argument is.

    Attributes:
      layout: that of the param it is, or is a copy of; else None.
      is_param: True for the param itself.
      in_opt_state: True for a leaf of the plan's optimizer state.
      is_others_param: True for a param of another model that the step trains.
      place: the path in the optimizer state.
    """

    layout: Layout | None = None
    is_param: bool = False
    in_opt_state: bool = False
    is_others_param: bool = False
    place: str = ""

    @property
    def kind(self) -> str:
        """As a field of `records.Memory`."""
        if self.is_param or self.is_others_param:
            return "params"
        return "opt_state" if self.in_opt_state else "rest"


@dataclasses.dataclass(frozen=True)
class Argument:
    """An argument of a step.

    Attributes:
      name: its path in the argument; of a Variable the path in its NNX object.
      shape, itemsize: of the whole array.
      held: bytes on one device; 0 where the program does not use it.
      local: its shape on one device.
      dtype: of its elements.
      number_of_argument: equal for leaves of the same argument.
      donated: True where its buffer is given away.
      on_host: True where it is in pinned host memory.
      layout: that of the param it is, or is a copy of (a moment, a master); else None.
      is_param: True for the param itself.
      returned: bytes on one device of the result that takes its place, None where none does.
      returned_on_host: True where that result is in pinned host memory.
      aliased: True where a result takes its buffer.
      in_opt_state: True for a leaf of the plan's optimizer state.
      place: its path in that state, as `jax.tree_util.keystr` prints it.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    held: int
    donated: bool
    on_host: bool = False
    layout: Layout | None = None
    is_param: bool = False
    returned: int | None = None
    returned_on_host: bool = False
    aliased: bool = False
    in_opt_state: bool = False
    place: str = ""
    local: tuple[int, ...] = ()
    dtype: Any = None
    number_of_argument: tuple[str, ...] = ()

    def planned(self, plan: Plan) -> int | None:
        """Bytes on one device by the plan, None for a leaf that is not a copy of a param."""
        if self.layout is None:
            return None
        spec: PartitionSpec = self.layout.stored if self.is_param else self.layout.state
        shape = self.layout.shape if self.is_param else self.layout.state_shape
        if (
            self.layout.padded
            and self.shape == self.layout.shape
            and not (self.is_param or self.in_opt_state)
        ):
            return math.prod(self.shape) * self.itemsize  # an average: the optimizer state alone is padded
        return math.prod(shape) * self.itemsize // shard_factor(spec, plan.mesh)


def roles_of(rows: Sequence[Any], plan: Plan, record: TraceRecord | None) -> list[Role]:
    """The role of each row of `argument_shardings`; see [Note: by record, else by name]."""
    if record is not None and record.names(plan):
        return _recorded(rows, plan, record)
    paths = [path_keys(path) for path, *_ in rows]
    others = other_params(rows, plan)
    layouts = layouts_of(paths, [tuple(info.shape) for _, info, _ in rows], plan)
    own = [not any(is_of(keys, tree) for tree in others) for keys in paths]
    layouts = [x if mine else None for x, mine in zip(layouts, own, strict=True)]
    home, found = home_of_params(paths, layouts, plan), []
    for (path, *_), keys, x, mine in zip(rows, paths, layouts, own, strict=True):
        is_param = x is not None and prefix(keys, x) == home
        at = keys.index(STATE) + 1 if STATE in keys else len(keys)
        theirs = any(keys[: len(tree)] == tree for tree in others)
        found.append(Role(x, is_param, mine and STATE in keys, theirs, jax.tree_util.keystr(path[at:])))
    return found


def kinds_of(roles: Sequence[Role], *, recorded: bool) -> list[str]:
    """What each argument is, as a field of `records.Memory`.

    Without a record, and where nothing is called the optimizer state, every copy of a param counts as one.
    """
    if recorded or any(role.in_opt_state for role in roles):
        return [role.kind for role in roles]
    return ["opt_state" if role.kind == "rest" and role.layout is not None else role.kind for role in roles]


def _recorded(rows: Sequence[Any], plan: Plan, record: TraceRecord) -> list[Role]:
    first, *_ = record.of(plan)
    known: dict[int | None, Role] = {
        i: Role(x, is_param=True) for i, x in zip(first.params, plan.layouts, strict=True)
    }
    known |= {i: Role(plan.layouts[at], is_param=True) for at, i in record.frozen_of(plan).items()}
    for i, path, x in zip(first.state, first.paths, first.copies(plan), strict=True):
        known[i] = Role(x, in_opt_state=True, place=jax.tree_util.keystr(path))
    for update in record.others(plan):
        known |= {i: Role() for i in update.state} | {i: Role(is_others_param=True) for i in update.params}
    known.pop(None, None)
    paths = [path_keys(path) for path, *_ in rows]
    homes = {paths[i][:2] for i in known if i is not None}  # their arguments
    named = layouts_of(paths, [tuple(info.shape) for _, info, _ in rows], plan)
    theirs = trained_beside(rows, {i for i in known if i is not None})
    own = [(paths[i], role.layout) for i, role in known.items() if i is not None and role.is_param]
    found, beside = [], {prefix(keys, x) for keys, x in own if x is not None}
    for i, (keys, x) in enumerate(zip(paths, named, strict=True)):
        if x is not None and x.frozen is Frozen.APART and prefix(keys, x) in beside and NAMELESS not in keys:
            role = Role(x, is_param=True)  # of a step that has no gather
        elif any(is_of(keys, tree) for tree in theirs):
            role = Role(is_others_param=any(keys[: len(tree)] == tree for tree in theirs))
        else:
            role = Role(None if NAMELESS in keys and keys[:2] in homes else x)
        found.append(known.get(i, role))
    return found


def arguments_of(
    compiled: jax.stages.Compiled, plan: Plan, module: Module, roles: Sequence[Role], results: Sequence[Shape]
) -> list[Argument]:
    """The arguments of a program, with their roles."""
    rows = argument_shardings(compiled)
    paths, found = [path_keys(path) for path, *_ in rows], []
    returned = _returned(paths, compiled, plan, results)
    numbers, variables = parameter_numbers(compiled), variable_paths(compiled.args_info)
    for i, ((path, info, sharding), keys, role, number) in enumerate(zip(rows, paths, roles, numbers, strict=True)):
        itemsize = 0 if jax.dtypes.issubdtype(info.dtype, jax.dtypes.prng_key) else info.dtype.itemsize
        local = info.shape if sharding is None else sharding.shard_shape(info.shape)
        back, back_on_host = returned.get(keys, (None, False))
        found.append(
            Argument(
                name=path_name(variables.get(i, path[2:])) or f"argument {keys[-1]}",
                shape=tuple(info.shape), itemsize=itemsize,
                held=0 if sharding is None else math.prod(local) * itemsize, donated=info.donated,
                on_host=getattr(sharding, "memory_kind", None) == "pinned_host",
                layout=role.layout, is_param=role.is_param, returned=back, returned_on_host=back_on_host,
                aliased=number in module.aliased, in_opt_state=role.in_opt_state,
                place=role.place, local=tuple(local), dtype=info.dtype, number_of_argument=keys[:2],
            )
        )  # fmt: skip
    return found


def _returned(
    paths: Sequence[Keys], compiled: jax.stages.Compiled, plan: Plan, shapes: Sequence[Shape]
) -> Mapping[Keys, tuple[int, bool]]:
    """Bytes of the result that stands where an argument did (their paths end alike), and if it is on the host."""
    outs = [path_keys(k) for k, _ in jax.tree_util.tree_leaves_with_path(compiled.output_shardings)]
    if len(outs) != len(shapes):
        return {}
    by_end: dict[Keys, list[int]] = collections.defaultdict(list)
    for at, keys in enumerate(outs):
        for cut in range(min(3, len(keys))):
            by_end[keys[cut:]].append(at)
    alone = plan.by_keys.get(())  # params that are a bare array have no name, and come back at the top
    if alone is not None:
        sizes = (alone.shape, plan.param_sharding(alone).shard_shape(alone.shape))
        by_end[()] = [i for i, keys in enumerate(outs) if len(keys) < 3 and shapes[i].dims in sizes]
    found, taken = dict[Keys, tuple[int, bool]](), set[int]()
    for keys in sorted(
        paths, key=len, reverse=True
    ):  # a bare tree ends as `state.params` does: it comes later
        ends = (len(keys) > 2 and by_end.get(keys)) or by_end.get(keys[2:], [])
        at = next((i for i in ends if i not in taken), None)
        if at is not None:
            taken.add(at)
            found[keys] = shapes[at].nbytes, shapes[at].on_host
    return found


def layouts_of(paths: Sequence[Keys], shapes: Sequence[tuple[int, ...]], plan: Plan) -> list[Layout | None]:
    """The param that each leaf is or copies: by the end of its path; an NNX state has no names, there by shape."""
    by_keys = plan.by_keys
    matrices = [x for x in plan.layouts if not x.vector]
    by_shape = {
        shape: x for x in matrices for shape in (x.state_shape, x.shape)
    }  # a statistic is shaped like a bias
    found: list[Layout | None] = []
    for keys, shape in zip(paths, shapes, strict=True):
        x = next((x for x in named_by(keys[2:], by_keys) if shape in (x.shape, x.state_shape)), None)
        if x is None and "states" in keys:
            x = by_shape.get(shape)
        found.append(x)
    return found


def prefix(keys: tuple[str, ...], x: Layout) -> tuple[str, ...]:
    """The path of the tree that a copy of a param stands in."""
    above = len(keys) - len(x.keys)
    return keys[:above] if keys[above:] == x.keys else keys[:-1]


def home_of_params(paths, layouts, plan: Plan) -> tuple[str, ...] | None:
    """The path of the params: called so, else the tree that holds each once, else the shortest path, the first."""
    trees = collections.Counter(prefix(k, x) for k, x in zip(paths, layouts, strict=True) if x is not None)
    named, nameless = len(plan.layouts), sum(not x.vector for x in plan.layouts)
    whole = [p for p, n in trees.items() if n >= (nameless if "states" in p else named)]
    return min(whole, key=lambda p: (p[-1:] != ("params",), trees[p], len(p)), default=None)
