"""Splits a batch over the devices. One process passes the whole batch, several pass a part each."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jzero.core.errors import check_arrays, counted, division, is_numeric, listing, shown, typed_shape
from jzero.core.jaxprs import in_trace, is_tracer
from jzero.core.random_keys import is_key
from jzero.core.types import PyTree
from jzero.layout.explicit import constrained
from jzero.layout.leaf_rule import as_abstract
from jzero.layout.placement import check_rows, is_global
from jzero.layout.specs import P, entry_axes

WHERE = "plan.place_batch"
MICRO = "plan.micro_batches"
MICRO_SCOPE = "jzero.micro_batches_"
"""Followed by k: the named scope in which a step splits its batch."""


def micro_batch_scope(k: int):
    """Around the split of a batch into k micro-batches that each reduce gradients: `param_uses` and `check` read k."""
    return jax.named_scope(f"{MICRO_SCOPE}{k}")


def place_batch(batch: PyTree, sharding: NamedSharding, *, parts: int, axes: tuple[str, ...]) -> PyTree:
    """The batch in its layout. Scalars are replicated; arrays that have this layout already are returned unchanged.

    Args:
      batch: a tree of numpy or JAX arrays.
      sharding: of dim 0 of every leaf.
      parts: into how many parts it splits that dim.
      axes: the batch axes, for errors.

    Raises:
      TypeError: the batch has traced values, lists of numbers or strings.
      ValueError: the axes do not divide dim 0 of a leaf; lists the leaves. Or processes pass unequal numbers of rows.
    """
    _check_batch(batch)
    bad, local = _uneven(batch, sharding, parts)
    if bad:
        raise ValueError(
            f"{WHERE}: {len(bad)} leaves cannot be split over batch axes {axes} "
            f"({local} parts{' in this process' if local != parts else ''}):\n{listing(bad)}\n"
            f"Pass a batch whose leading dim is a multiple of {local}. What is not a batch (running means that a step "
            "takes and returns) goes on the mesh whole: jax.device_put(x, plan.sharding(jax.P()))."
        )
    check_rows(batch, where=WHERE)
    return jax.tree.map(lambda leaf: _place(leaf, sharding), batch)


def micro_batches(batch: PyTree, k: int, sharding: NamedSharding, *, parts: int) -> PyTree:
    """The batch as k micro-batches, `[B, ...] -> [k, B/k, ...]`, each split as the batch is; `Plan.micro_batches`.

    Args:
      batch: a tree of arrays, traced values or `jax.ShapeDtypeStruct`.
      k: micro-batches.
      sharding: of dim 0 of the batch.
      parts: into how many parts it splits that dim.

    Raises:
      TypeError: a leaf is not an array.
      ValueError: dim 0 of a leaf is not a multiple of parts x k; lists the leaves.
    """
    check_arrays(batch, "the batch", where=MICRO, remedy="Pass arrays with a dim of examples.")
    bad, local = _uneven(batch, sharding, parts, k)
    local = parts if in_trace() else local
    if bad:
        raise ValueError(
            f"{MICRO}: {counted(local, 'device')} x {counted(k, 'micro-batch', 'micro-batches')} cannot split "
            f"{len(bad)} of {counted(len(jax.tree.leaves(batch)), 'leaf', 'leaves')} evenly:\n{listing(bad)}\n"
            f"Dim 0 of every leaf must be a multiple of {local * k}; keep out of the batch what has no examples."
        )
    with micro_batch_scope(k):
        return jax.tree.map(lambda x: _micro(x, k, sharding, parts), batch)


def split_rows(x: jax.Array, k: int, sharding: NamedSharding, parts: int) -> jax.Array:
    """One traced array in k micro-batches. Micro-batch i has part i of every device's rows, so that nothing moves.

    A plain reshape to `[k, B/k, ...]` would give each micro-batch the rows of a k-th of the devices.
    """
    x = x.reshape(parts, k, x.shape[0] // (parts * k), *x.shape[1:]).swapaxes(0, 1)
    return constrained(x.reshape(k, parts * x.shape[2], *x.shape[3:]), _of_micro_batches(sharding))


def abstract_batch(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    """The abstract form of a leaf of a batch after it is placed; scalars and random keys are whole.

    Raises:
      ValueError: the sharding does not divide dim 0.
    """
    if np.ndim(leaf) == 0 or is_random_key(leaf):
        sharding = NamedSharding(sharding.mesh, P())
    sharding.shard_shape(leaf.shape)
    weak = getattr(leaf, "weak_type", False)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=weak)


def is_split_over_processes(sharding: NamedSharding, parts: int) -> bool:
    """True if processes hold different parts of a batch; False if each holds all of it."""
    return jax.process_count() > 1 and _local_parts(sharding, parts) < parts


def is_abstract(leaf: Any) -> bool:
    """True for a `jax.ShapeDtypeStruct`."""
    return isinstance(leaf, jax.ShapeDtypeStruct)


def is_random_key(leaf: Any) -> bool:
    """True for a random key, typed or as the two or four uint32 words of the older kind."""
    return is_key(leaf) or (leaf.dtype == np.uint32 and tuple(leaf.shape) in ((2,), (4,)))


def _local_parts(sharding: NamedSharding, parts: int) -> int:
    """How many different parts of the batch the devices of this process hold."""
    index = sharding.addressable_devices_indices_map((parts,))
    return len({i[0].start for i in index.values() if i is not None})


def _micro(x: Any, k: int, sharding: NamedSharding, parts: int) -> Any:
    if is_abstract(x):
        shape, split = (k, x.shape[0] // k, *x.shape[1:]), _of_micro_batches(sharding)
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=split, weak_type=x.weak_type)
    if in_trace():
        return split_rows(jnp.asarray(x), k, sharding, parts)
    placed = place_batch(x, sharding, parts=parts, axes=entry_axes(sharding.spec[0]))
    return _split_rows(placed, k, sharding, parts)


_split_rows = jax.jit(split_rows, static_argnums=(1, 2, 3))


def _of_micro_batches(sharding: NamedSharding) -> NamedSharding:
    return NamedSharding(sharding.mesh, P(None, *sharding.spec))


def _uneven(
    batch: PyTree, sharding: NamedSharding, parts: int, k: int = 0
) -> tuple[list[tuple[str, str, str]], int]:
    """The leaves whose dim 0 the devices (x k micro-batches) do not divide, and the parts of a process's own rows.

    Micro-batches need a dim 0; a batch (k = 0) may have scalars.
    """
    local = parts if jax.process_count() == 1 else _local_parts(sharding, parts)
    bad, traced = [], in_trace()
    for path, x in jax.tree_util.tree_leaves_with_path(batch):
        whole = (k and (traced or is_abstract(x))) or is_global(x)
        into, size = (parts if whole else local) * max(k, 1), np.shape(x)[0] if np.ndim(x) else 0
        if size % into or (k and not size):
            why = division(size, into) if np.ndim(x) else "no dim 0"
            bad.append((jax.tree_util.keystr(path) or "batch", typed_shape(as_abstract(x)), why))
    return bad, local


def _place(leaf: Any, sharding: NamedSharding) -> Any:
    sharding = sharding if np.ndim(leaf) else NamedSharding(sharding.mesh, P())
    if isinstance(leaf, jax.Array) and leaf.sharding == sharding:
        return leaf
    if jax.process_count() > 1 and not is_global(leaf):
        return jax.make_array_from_process_local_data(sharding, np.asarray(leaf))
    return jax.device_put(leaf, sharding)


def _check_batch(batch: PyTree) -> None:
    """Raises TypeError unless all leaves are arrays: no traced values, lists of numbers or strings."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        name = jax.tree_util.keystr(path) or "batch"
        if is_tracer(leaf):
            raise TypeError(
                f"{WHERE}: {name} is a traced value. Place the batch outside of jit, or inside of it use "
                "jax.lax.with_sharding_constraint(batch, plan.batch)."
            )
        in_list = bool(path) and isinstance(path[-1], jax.tree_util.SequenceKey)
        if not is_numeric(leaf):
            raise TypeError(f"{WHERE}: {name} is {shown(leaf)}. Pass arrays of numbers.")
        if in_list and not hasattr(leaf, "shape"):
            raise TypeError(
                f"{WHERE}: {name} is a {type(leaf).__name__} in a list, which would be a scalar of its own. "
                "Pass arrays: np.asarray(the list)."
            )
