"""A state as named leaves in the shapes that model and optimizer know, whatever its layout.

What is stored is a tree `{params, opt_state, step, master, ...}`: `opt_state` is that of the plain transformation, so
that a run without masters stores the names that plain orbax stores of an ordinary TrainState, and one with masters the
same names and `master` beside them. Its names, shapes, dtypes and values do not depend on the stage, the number
of devices or the tier. (Orbax notes in `_sharding` how each array lay; only a load without any target reads that.)

[Note: a padded leaf is laid out again]
In its logical shape, a leaf that is stored padded has no equal pieces along the padded dim. For the save it is laid out
over the devices as far as its dims divide: an all-to-all of that leaf, and no device holds more than it must. First,
a separate program makes the axes that leave a dim its minor ones: where the major part of a dim moves to another dim
and the minor part stays, the partitioner of jaxlib 0.12 ends the process ("Could not slice dimension").

[Note: what a model needs]
Besides its params a model computes with statistics (BatchNorm's, power iterations') and, in NNX, with weights that are
not trained (below a LoRA). They lie in collections of a TrainState (`batch_stats/BatchNorm_0/mean`), and in NNX in the
modules (`norm/mean`). The name tells nothing else, so jzero takes every array at that depth except random keys, their
counts and copies of params: an average is another model. Of an abstract module it takes keys and counts, too, since no
program takes a module with abstract leaves. (A variable of an NNX model's root is as deep as a field of a TrainState;
where the state itself is there, it counts.)
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jzero.core.errors import counted, listing, typed_shape, warn
from jzero.core.types import PyTree
from jzero.flax import adapters
from jzero.flax.adapters import Parts
from jzero.layout.leaf_rule import path_keys
from jzero.layout.padding import unpadded
from jzero.layout.placement import on_device
from jzero.layout.specs import finer_mesh, make_spec, named_on, spec_axes, spec_entries, whole_mesh
from jzero.layout.state_layouts import SCALES
from jzero.optim import ZeroState, as_held, is_wrapped
from jzero.update.pairs import PAIRS, pair_of
from jzero.update.zero_state import inner_of

Name = tuple[str, ...]
MASTER = "master"
COUNT = "rounding_count"
TAKEN = ("params", "opt_state", "step", MASTER, *PAIRS, COUNT, SCALES)
"""The first keys of names that a rest may not use."""


@dataclasses.dataclass(frozen=True)
class NamedLeaf:
    """One array of a state.

    Attributes:
      name: its path in the stored tree.
      value: the array, or what stands in for it.
      shape: its logical shape; `value` may be padded.
    """

    name: Name
    value: Any
    shape: tuple[int, ...]

    @property
    def padded(self) -> bool:
        """Stored padded by the plan of the state."""
        return tuple(np.shape(self.value)) != self.shape

    @property
    def empty(self) -> bool:
        """Has no elements: orbax cannot store such a leaf, so it is left out."""
        return 0 in self.shape

    def nothing(self) -> Any:
        """The value of an empty leaf."""
        made = np.zeros(np.shape(self.value), self.value.dtype)
        sharding = getattr(self.value, "sharding", None)
        return made if isinstance(self.value, np.ndarray) else jax.device_put(made, sharding)


def needed_by_model(
    leaves: Mapping[Name, tuple[tuple[int, ...], Any]], *, least: int = 2, whole: Collection[Name] = ()
) -> set[Name]:
    """The leaves of a state that its model needs besides its params; see [Note: what a model needs].

    Args:
      leaves: shape and dtype of every leaf, by name.
      least: how many keys a name must have.
      whole: names at which random keys and their counts are needed, too.
    """
    shapes = {name: tuple(shape) for name, (shape, _) in leaves.items()}
    params = {name[1:]: shape for name, shape in shapes.items() if name[0] == "params"}
    rest = {name: shape for name, shape in shapes.items() if name[0] not in TAKEN}
    copies = {name: [name[:i] for i in range(1, len(name)) if params.get(name[i:]) == s] for name, s in rest.items()}
    # all params, or half of them and at least two: a statistic may have the name and the shape of one
    held = collections.Counter(prefix for prefixes in copies.values() for prefix in prefixes)
    averages = {prefix for prefix, n in held.items() if n == len(params) or (n > 1 and 2 * n >= len(params))}
    wanted = {name for name in rest if name in whole or not _is_random(name, *leaves[name])}
    return {name for name in wanted if len(name) >= least and averages.isdisjoint(copies[name])}


def _is_random(name: Name, shape: tuple[int, ...], dtype: DTypeLike) -> bool:
    """A key or its count. Keys are stored as two or four numbers each; packed weights are uint32, too."""
    numbers = dtype == np.uint32 and (tuple(shape) in ((), (2,), (4,)) or name[-1] in ("key", "count"))
    return numbers or jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def of_model(leaves: Sequence[NamedLeaf], state: PyTree) -> list[NamedLeaf]:
    """The leaves of a state that its model needs besides its params."""
    pair = adapters.is_pair(state)
    described = {leaf.name: (leaf.shape, leaf.value.dtype) for leaf in leaves if hasattr(leaf.value, "dtype")}
    abstract = {leaf.name for leaf in leaves if pair and isinstance(leaf.value, jax.ShapeDtypeStruct)}
    needed = needed_by_model(described, least=1 if pair else 2, whole=abstract)
    return [leaf for leaf in leaves if leaf.name in needed]


def warn_if_absent(absent: Sequence[NamedLeaf], what: str, where: str) -> None:
    """Warns about arrays that a model needs and does not get."""
    if absent:
        rows = [("/".join(leaf.name), typed_shape(leaf.value)) for leaf in absent]
        warn(
            f"{where}: {what} lacks {counted(len(rows), 'array', 'arrays')} that the model needs besides its params "
            f"(statistics, weights that are not trained). They stay as they are:\n{listing(rows)}",
        )


def apart(state: PyTree, tx: optax.GradientTransformation | None, where: str) -> Parts:
    """The parts of a state of any kind: also of a mapping with `params` and `opt_state`, or of any other tree.

    Raises:
      TypeError: `tx` with a state that has its own, or with a tree that names no `params` and `opt_state`.
    """
    try:
        parts = adapters.take_apart(state, where=where)
    except TypeError:
        return _mapping_apart(state, tx, where)
    if tx is not None:
        raise TypeError(f"{where}: tx= is for a mapping of params and opt_state; this state has its own.")
    return parts


def _mapping_apart(state: PyTree, tx: optax.GradientTransformation | None, where: str) -> Parts:
    known: Mapping[str, Any] = state if isinstance(state, Mapping) else {}
    named = {"params", "opt_state"} <= set(known)
    if tx is not None and not named:
        raise TypeError(
            f"{where}: with tx= pass a mapping with 'params' and 'opt_state', not {type(state).__name__}."
        )
    if tx is None and any(isinstance(x, ZeroState) for x in _zero_states(state)):
        raise TypeError(
            f"{where}: this tree holds the state of a transformation from jzero.zero. Pass a mapping "
            "{'params': ..., 'opt_state': ...} and tx=, the transformation."
        )
    if jax.tree_util.all_leaves([state]):
        kind = "a function" if callable(state) else f"{type(state).__name__}"
        raise TypeError(
            f"{where}: pass a state, a tree of arrays, or jzero.abstract(create, ...), not {kind}."
        )
    if not named:
        return Parts(None, None, None, state, None, None)
    rest = {k: v for k, v in known.items() if k not in ("params", "opt_state")}
    return adapters.whole(Parts(known["params"], known["opt_state"], None, rest, tx, None))


def _zero_states(tree: PyTree) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, ZeroState))


def together(state: PyTree, parts: Parts) -> Any:
    """A state like `state` of these parts; an NNX pair is changed in place."""
    if parts.tx is not None and not isinstance(state, Mapping):
        return adapters.put_together(state, parts)
    if parts.params is None:
        return parts.rest
    return {**parts.rest, "params": parts.params, "opt_state": as_held(parts.opt_state, parts.params, parts.tx)}


def tree_of(parts: Parts) -> Any:
    """The tree that is stored; its leaves are `NamedLeaf`, named by where they stand in it."""
    rest = parts.rest if parts.rest is not None else {}
    if parts.params is None:
        return _named(_leaves(rest))
    rest = {"rest": rest} if _boxed(rest) else rest
    return _named({**_leaves({**rest, "params": parts.params, "step": parts.step}), **_opt_parts(parts)})


def _boxed(rest: Any) -> bool:
    """True for a rest whose own names would clash with those of the other parts: it is stored under `rest`."""
    return not isinstance(rest, Mapping) or any(str(k) in (*TAKEN, "rest") for k in rest)


def _opt_parts(parts: Parts) -> dict[str, Any]:
    """Optimizer state, and masters and the count where there are any; every leaf with its logical shape."""
    state = parts.opt_state
    inner = inner_of(state)
    if not is_wrapped(parts.tx):
        return {"opt_state": _leaves(inner)}
    found = {"opt_state": _leaves(inner, [x.shape for x in jax.tree.leaves(inner_of(parts.tx.update.logical))])}
    if not isinstance(state, ZeroState):
        return found
    tree = jax.tree.structure(parts.taken)
    known = tree.flatten_up_to(state.master)
    if any(m is not None for m in known):
        rows = zip(known, parts.tx.init.plan.trained.layouts, strict=True)
        found[_kind(parts)] = tree.unflatten([None if m is None else NamedLeaf((), m, x.shape) for m, x in rows])
    if state.rounding_count is not None:
        found[COUNT] = NamedLeaf((), state.rounding_count, ())
    if state.moment_scales is not None:
        found[SCALES] = _leaves(state.moment_scales)
    return found


def _kind(parts: Parts) -> str:
    """What the masters of a state are stored as."""
    plan = parts.tx.init.plan.trained
    pairs = {pair.name for x in plan.layouts if (pair := pair_of(plan.config, x.dtype))}
    return next(iter(pairs), MASTER)  # a plan has no masters of several kinds


def _leaves(tree: PyTree, shapes: Sequence[tuple[int, ...]] | None = None) -> Any:
    values, structure = jax.tree.flatten(tree)
    shapes = [np.shape(x) for x in values] if shapes is None else shapes
    return structure.unflatten([NamedLeaf((), x, tuple(s)) for x, s in zip(values, shapes, strict=True)])


def _named(tree: PyTree) -> Any:
    return jax.tree_util.tree_map_with_path(lambda k, x: dataclasses.replace(x, name=path_keys(k)), tree)


def refuse_collisions(leaves: Sequence[NamedLeaf], where: str) -> None:
    """Raises ValueError where two leaves would be stored under one name: orbax joins the names of a path by dots."""
    by_name: dict[str, list[NamedLeaf]] = {}
    for leaf in leaves:
        by_name.setdefault(".".join(leaf.name), []).append(leaf)
    double = {name: found for name, found in by_name.items() if len(found) > 1}
    if double:
        rows = [
            (name, "  and  ".join(str(list(leaf.name)) for leaf in found)) for name, found in double.items()
        ]
        raise ValueError(
            f"{where}: {counted(len(double), 'name')} would be that of several leaves:\n{listing(rows)}\nA path is "
            "stored as its keys joined by dots, and keys as text. Rename one of the keys."
        )


def trained_of(parts: Parts) -> list[str] | None:
    """The names of the params that the optimizer takes, where it does not take all."""
    if parts.trained is None:
        return None
    flat = jax.tree_util.tree_leaves_with_path(parts.params)
    return ["/".join(path_keys(k)) for (k, _), t in zip(flat, parts.trained, strict=True) if t]


def filled(parts: Parts, values: Mapping[Name, Any]) -> Parts:
    """The parts with every leaf replaced by the value of its name."""
    tree = jax.tree.map(lambda leaf: values[leaf.name], tree_of(parts))
    if parts.params is None:
        return parts.replace(rest=tree)
    opt_state = tree.pop("opt_state")
    if isinstance(parts.opt_state, ZeroState) and is_wrapped(parts.tx):
        master = tree.pop(_kind(parts), parts.opt_state.master)
        opt_state = ZeroState(opt_state, master, tree.pop(COUNT, None), tree.pop(SCALES, None))
    params, step = tree.pop("params"), tree.pop("step")
    rest = tree.pop("rest") if _boxed(parts.rest) else tree
    return parts.replace(
        params=params, opt_state=opt_state, step=step, rest=rest if parts.rest is not None else None
    )


def to_store(leaf: NamedLeaf) -> Any:
    """The array of a leaf in its logical shape; see [Note: a padded leaf is laid out again]."""
    if leaf.empty:
        return None
    if isinstance(leaf.value, (bool, complex, np.generic)):
        return np.asarray(leaf.value)  # of single numbers orbax stores Python's int and float alone
    if not leaf.padded:
        return leaf.value
    x = on_device(leaf.value)
    sharding: Any = x.sharding
    mesh, spec = even(leaf.shape, sharding.spec, sharding.mesh)
    now, then = (spec_entries(s, len(leaf.shape)) for s in (named_on(sharding.spec, mesh), spec))
    leaving_last = [sorted(had, key=lambda name: name not in kept) for had, kept in zip(now, then, strict=True)]
    if leaving_last != list(map(list, now)):
        x = _cut(x.shape, NamedSharding(mesh, make_spec([tuple(e) for e in leaving_last])))(x)
    return _cut(leaf.shape, NamedSharding(mesh, spec))(x)


@functools.lru_cache(maxsize=1024)
def _cut(shape: tuple[int, ...], sharding: NamedSharding):
    return jax.jit(lambda x: unpadded(x, shape), out_shardings=sharding)


def even(shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh) -> tuple[Mesh, PartitionSpec]:
    """A layout in equal pieces, as many as the dims allow, on a mesh of the prime factors of its axes."""
    mesh = whole_mesh(mesh)
    fine = finer_mesh(mesh, spec_axes(spec))
    entries: list[list[str]] = [[] for _ in shape]
    parts, spare = [1] * len(shape), []
    for dim, names in enumerate(spec_entries(named_on(spec, fine), len(shape))):
        for name in names:
            if shape[dim] % (parts[dim] * fine.shape[name]):
                spare.append(name)
            else:
                entries[dim].append(name)
                parts[dim] *= fine.shape[name]
    for name in spare:
        fits = [d for d in range(len(shape)) if shape[d] % (parts[d] * fine.shape[name]) == 0]
        if fits:
            dim = max(fits, key=lambda d: shape[d] // parts[d])
            entries[dim].append(name)
            parts[dim] *= fine.shape[name]
    return fine, make_spec([tuple(e) for e in entries])
