"""Which arrays of a step's arguments are rows of its batch: what `jzero.jit` splits.

[Note: rows, or a copy of params]
An array that is on no mesh is taken for rows, unless it is a copy of a param: it has the param's shape, and its path
ends as the param's does. A batch may have such a leaf by chance (`{"x": ...}`, or a tuple beside a list of params), so
the leaf is only taken for a copy if all other params are beside it. An argument that has only such leaves, but not all
params, may be either, and is refused. So is a single array that could be the only param of a plan, if another argument
could be that as well.

[Note: rows, or the same on every process]
With several processes an array on no mesh is this process's part of a global one. Class weights `[C]` would become
`[C x processes]`, and no shape says what they are. The values do: rows differ between processes. An array that is equal
on all of them is refused, unless another leaf of its argument has as many rows and differs. The first call with a
structure compares checksums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jzero.core.errors import counted, listing, typed_shape
from jzero.core.jaxprs import is_tracer
from jzero.core.nnx_modules import has_node
from jzero.core.types import PyTree
from jzero.flax.adapters import is_train_state
from jzero.flax.donation import Key
from jzero.layout.batches import is_random_key, is_split_over_processes
from jzero.layout.leaf_rule import keyed_shapes
from jzero.layout.placement import same_values
from jzero.layout.state_layouts import named_by
from jzero.sharding import Plan


def rows_of(key: Key, given: Mapping[Key, Any], plan: Plan) -> list[bool]:
    """For each leaf of an argument whether it is rows of a batch; see [Note: rows, or a copy of params].

    Raises:
      ValueError: the argument may be a batch or params.
    """
    leaves = jax.tree.leaves(given[key])
    unplaced = [is_unplaced(x) for x in leaves]
    if not any(unplaced) or is_object(given[key]) or is_train_state(given[key]):
        return [False] * len(leaves)
    arrays = [bool(np.ndim(x)) for x in leaves]
    matched = [x is not None for x in plan.copies(given[key])]
    among_all = _among_all(given[key], plan)
    if any(matched) and all(m for m, a in zip(matched, arrays, strict=True) if a):
        only = len(plan.layouts) == 1 and sum(arrays) == 1
        if not any(among_all) or (only and any(k != key and _has_params(given[k], plan) for k in given)):
            raise ValueError(_either(key, given[key]))
        among_all = matched
    elif len(plan.layouts) == 1:
        among_all = [False] * len(leaves)
    return [u and not c for u, c in zip(unplaced, among_all, strict=True)]


def is_object(arg: PyTree) -> bool:
    """True for a tree with NNX objects: modules, optimizers, `nnx.Rngs`. A TrainState is large and is not searched."""
    return not is_train_state(arg) and has_node(arg)


def is_unplaced(x: Any) -> bool:
    """True for an array of one dim or more that is on no mesh: from a data loader, or made by `jnp` on one device."""
    if is_tracer(x) or not hasattr(x, "dtype") or np.ndim(x) == 0 or is_random_key(x):
        return False
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.sharding is None
    return isinstance(x, np.ndarray) or isinstance(x.sharding, jax.sharding.SingleDeviceSharding)


def check_differ(given: Mapping[Key, Any], rows: Mapping[Key, Sequence[bool]], plan: Plan) -> None:
    """See [Note: rows, or the same on every process]. All processes must call.

    Raises:
      ValueError: arrays that are equal on all processes; lists them.
    """
    if not is_split_over_processes(plan.batch, plan.batch_parts):
        return
    groups: dict[tuple[Key, int], list[tuple[str, Any]]] = {}
    for key, wanted in rows.items():
        named = jax.tree_util.tree_leaves_with_path(given[key])
        for (path, x), w in zip(named, wanted, strict=True):
            if w and not isinstance(x, jax.ShapeDtypeStruct):
                groups.setdefault((key, x.shape[0]), []).append((f"[{key!r}]{jax.tree_util.keystr(path)}", x))
    equal = same_values([[x for _, x in group] for group in groups.values()])
    bad = [row for group, e in zip(groups.values(), equal, strict=True) if e for row in group]
    if bad:
        count = jax.process_count()
        listed = [(n, typed_shape(x), f"would become {count * x.shape[0]} rows") for n, x in bad]
        raise ValueError(
            f"jzero.jit: {counted(len(bad), 'array is', 'arrays are')} on no mesh and equal on all {count} processes, "
            f"whose rows would be joined:\n{listing(listed)}\nPut what the step needs whole on the mesh: "
            "jax.device_put(x, plan.sharding(jax.P())). Place rows that happen to be equal: plan.place_batch(x)."
        )


def _among_all(arg: PyTree, plan: Plan) -> list[bool]:
    """For each leaf whether it is a copy of a param, with copies of all other params beside it."""
    beside: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    above: list[list[tuple[str, ...]]] = []
    for keys, shape in keyed_shapes(arg):
        found = [p.keys for p in named_by(keys, plan.by_keys) if p.shape == shape]
        above.append([keys[: len(keys) - len(name)] for name in found])
        for name, node in zip(found, above[-1], strict=True):
            beside.setdefault(node, set()).add(name)
    every = len(plan.layouts), len(plan.trained.layouts)
    return [any(len(beside[k]) in every for k in some) for some in above]


def _has_params(arg: PyTree, plan: Plan) -> bool:
    return is_object(arg) or any(x is not None for x in plan.copies(arg))


def _either(key: Key, arg: PyTree) -> str:
    rows = [
        (f"[{key!r}]{jax.tree_util.keystr(path)}", typed_shape(x))
        for path, x in jax.tree_util.tree_leaves_with_path(arg)
        if np.ndim(x)
    ]
    return (
        f"jzero.jit: the argument {key!r} is on no mesh, and each of its arrays has the name and the shape of a param: "
        f"it may be params or a batch.\n{listing(rows)}\nPlace it: a batch by plan.place_batch(x), and what stays "
        "whole by jax.device_put(x, plan.sharding(jax.P()))."
    )
