"""The arguments of a step: which are params, which are optimizer state, and what comes back in their place.

[Note: by record, else by name]
Where jzero has traced the program, the marks of its updates say what an argument is (`record.py`). An argument
that no update takes, such as an average, is a copy of a param if its path ends as the param's does; without names
(NNX), if it is in an argument of its own and has the shape. For any other program there are only paths and shapes:
params are the tree named `params`, else the tree that has each of them once (see models.py).
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence

import jax

from jzero.core.jaxprs import of_any_leaves
from jzero.core.nnx_modules import variable_paths
from jzero.layout.leaf_rule import Frozen, Layout, path_name
from jzero.layout.specs import shard_factor
from jzero.layout.state_layouts import named_by
from jzero.proof.arguments import GivenArgument, Keys
from jzero.proof.hlo import Module
from jzero.proof.models import NAMELESS, STATE, is_of, other_params, trained_beside
from jzero.proof.record import TraceRecord
from jzero.proof.returned import replaced_by
from jzero.sharding import Plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Role:
    """What an argument is.

    Attributes:
      layout: that of the param it is, or is a copy of (a moment, a master); else None.
      is_param: True for the param itself.
      in_opt_state: True for a leaf of the plan's optimizer state.
      is_others_param: True for a param of another model that the step trains.
      place: its path in that state, as `jax.tree_util.keystr` prints it.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Argument(GivenArgument, Role):
    """An argument of a step.

    Attributes:
      name: its path in the argument; of a Variable the path in its NNX object.
      returned: bytes on one device of the result that takes its place, None where none does.
      returned_on_host: True where that result is in pinned host memory.
      aliased: True where a result takes its buffer.
    """

    name: str
    returned: int | None
    returned_on_host: bool
    aliased: bool

    def planned(self, plan: Plan) -> int | None:
        """Bytes on one device by the plan, None for a leaf that is neither a param nor a copy of one."""
        x = self.layout
        if x is None:
            return None
        if x.padded and self.shape == x.shape and not (self.is_param or self.in_opt_state):
            return self.size * self.dtype.itemsize  # an average: the optimizer state alone is padded
        spec, shape = (x.stored, x.shape) if self.is_param else (x.state, x.state_shape)
        return math.prod(shape) * self.dtype.itemsize // shard_factor(spec, plan.mesh)


def roles_of(given: Sequence[GivenArgument], plan: Plan, record: TraceRecord | None) -> list[Role]:
    """The role of each argument; see [Note: by record, else by name]."""
    if record is not None and record.names(plan):
        return _recorded(given, plan, record)
    others = other_params(given, plan)
    own = [not any(is_of(x.keys, tree) for tree in others) for x in given]
    layouts = [layout if mine else None for layout, mine in zip(layouts_of(given, plan), own, strict=True)]
    params, found = tree_of_params(given, layouts, plan), []
    for x, layout, mine in zip(given, layouts, own, strict=True):
        keys = x.keys
        at = keys.index(STATE) + 1 if STATE in keys else len(keys)
        found.append(Role(
            layout=layout, is_param=layout is not None and prefix(keys, layout) == params,
            in_opt_state=mine and STATE in keys, place=jax.tree_util.keystr(x.path[at:]),
            is_others_param=any(keys[: len(tree)] == tree for tree in others),
        ))  # fmt: skip
    return found


def kinds_of(roles: Sequence[Role], *, recorded: bool) -> list[str]:
    """What each argument is, as a field of `records.Memory`.

    Without a record, and where nothing is called the optimizer state, every copy of a param counts as one.
    """
    if recorded or any(role.in_opt_state for role in roles):
        return [role.kind for role in roles]
    return ["opt_state" if role.kind == "rest" and role.layout is not None else role.kind for role in roles]


def _recorded(given: Sequence[GivenArgument], plan: Plan, record: TraceRecord) -> list[Role]:
    first, *_ = record.of(plan)
    rows = [(i, Role(layout=x, is_param=True)) for i, x in zip(first.params, plan.layouts, strict=True)]
    rows += [(i, Role(layout=plan.layouts[at], is_param=True)) for at, i in record.frozen_of(plan).items()]
    for i, path, x in zip(first.state, first.paths, first.copies(plan), strict=True):
        rows.append((i, Role(layout=x, in_opt_state=True, place=jax.tree_util.keystr(path))))
    for update in record.others(plan):
        rows += [(i, Role()) for i in update.state] + [(i, Role(is_others_param=True)) for i in update.params]
    known = {i: role for i, role in rows if i is not None}
    arguments = {given[i].argument for i in known}
    theirs = trained_beside(given, known)
    own = [(given[i].keys, role.layout) for i, role in known.items() if role.is_param]
    beside = {prefix(k, x) for k, x in own if x is not None}
    found = []
    for i, (leaf, x) in enumerate(zip(given, layouts_of(given, plan), strict=True)):
        k = leaf.keys
        if x is not None and x.frozen is Frozen.APART and prefix(k, x) in beside and NAMELESS not in k:
            role = Role(layout=x, is_param=True)  # of a step that has no gather
        elif any(is_of(k, tree) for tree in theirs):
            role = Role(is_others_param=any(k[: len(tree)] == tree for tree in theirs))
        else:
            role = Role(layout=None if NAMELESS in k and leaf.argument in arguments else x)
        found.append(known.get(i, role))
    return found


def arguments_of(
    compiled: jax.stages.Compiled, given: Sequence[GivenArgument], plan: Plan, module: Module, roles: Sequence[Role]
) -> list[Argument]:
    """The arguments of a program, with their roles."""
    copies = [i for i, role in enumerate(roles) if role.layout is not None and not role.in_opt_state]
    replaced = replaced_by(given, compiled, plan, module.results, copies)
    found = []
    for i, (x, role, name) in enumerate(zip(given, roles, names_of(compiled, given), strict=True)):
        back = module.results[replaced[i]] if i in replaced else None
        found.append(Argument(
            **vars(x), **vars(role), name=name, returned=None if back is None else back.nbytes,
            returned_on_host=back is not None and back.on_host, aliased=x.number in module.aliased,
        ))  # fmt: skip
    return found


def names_of(compiled: jax.stages.Compiled, given: Sequence[GivenArgument]) -> list[str]:
    """The arguments of a program as messages call them."""
    variables = variable_paths(of_any_leaves(lambda: compiled.args_info))
    return [path_name(variables.get(i, x.path[2:])) or f"argument {x.keys[-1]}" for i, x in enumerate(given)]


def layouts_of(given: Sequence[GivenArgument], plan: Plan) -> list[Layout | None]:
    """The param that each leaf is or copies: by the end of its path; an NNX state has no names, there by shape."""
    matrices = [x for x in plan.layouts if not x.vector]  # a statistic is shaped like a bias
    by_shape = {shape: x for x in matrices for shape in (x.state_shape, x.shape)}
    found: list[Layout | None] = []
    for leaf in given:
        keys, shape = leaf.keys, leaf.shape
        x = next((x for x in named_by(keys[2:], plan.by_keys) if shape in (x.shape, x.state_shape)), None)
        found.append(by_shape.get(shape) if x is None and NAMELESS in keys else x)
    return found


def prefix(keys: Keys, x: Layout) -> Keys:
    """The path of the tree that a copy of a param stands in."""
    above = len(keys) - len(x.keys)
    return keys[:above] if keys[above:] == x.keys else keys[:-1]


def tree_of_params(given: Sequence[GivenArgument], layouts: Sequence[Layout | None], plan: Plan) -> Keys | None:
    """The path of the params: named `params`, else the tree that holds each once, else that of the shortest path."""
    rows = zip(given, layouts, strict=True)
    trees = collections.Counter(prefix(leaf.keys, x) for leaf, x in rows if x is not None)
    named, nameless = len(plan.layouts), sum(not x.vector for x in plan.layouts)
    whole = [p for p, n in trees.items() if n >= (nameless if NAMELESS in p else named)]
    return min(whole, key=lambda p: (p[-1:] != ("params",), trees[p], len(p)), default=None)
