"""A batch split over the devices: with one process the whole of it, with several each process's own part."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jzero.core.errors import division, is_numeric, listing, shown, typed_shape
from jzero.core.jaxprs import is_tracer
from jzero.layout.leaf_rule import as_abstract
from jzero.layout.placement import check_rows, is_global
from jzero.layout.specs import P

WHERE = "plan.place_batch"


def place_batch(batch: Any, sharding: NamedSharding, *, parts: int, axes: tuple[str, ...]) -> Any:
    """The batch in its layout; scalars are replicated, arrays that lie so already are returned as they are.

    Args:
      batch: a tree of numpy or JAX arrays.
      sharding: of dim 0 of every leaf.
      parts: into how many parts that is.
      axes: the batch axes, for errors.

    Raises:
      TypeError: traced values, lists of numbers, strings.
      ValueError: a leaf whose dim 0 the axes do not divide; lists the leaves.
    """
    _check_batch(batch)
    local = parts if jax.process_count() == 1 else _local_parts(sharding, parts)
    bad = []
    for path, x in jax.tree_util.tree_leaves_with_path(batch):
        into = parts if is_global(x) else local
        if np.ndim(x) and np.shape(x)[0] % into:
            arithmetic = division(np.shape(x)[0], into)
            bad.append((jax.tree_util.keystr(path) or "batch", typed_shape(as_abstract(x)), arithmetic))
    if bad:
        raise ValueError(
            f"{WHERE}: {len(bad)} leaves cannot be split over batch axes {axes} "
            f"({local} parts{' in this process' if local != parts else ''}):\n{listing(bad)}\n"
            f"Pass a batch whose leading dim is a multiple of {local}. What is no batch (running means that a step "
            "takes and returns) goes on the mesh whole: jax.device_put(x, plan.sharding(jax.P()))."
        )
    check_rows(batch, where=WHERE)
    return jax.tree.map(lambda leaf: _place(leaf, sharding), batch)


def abstract_batch(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    """A leaf of a batch as it is once placed, without its values; scalars and random keys are whole.

    Raises:
      ValueError: the sharding does not divide dim 0.
    """
    if np.ndim(leaf) == 0 or is_random_key(leaf):
        sharding = NamedSharding(sharding.mesh, P())
    sharding.shard_shape(leaf.shape)
    weak = getattr(leaf, "weak_type", False)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=weak)


def is_split_over_processes(sharding: NamedSharding, parts: int) -> bool:
    """True where processes hold different parts of a batch, and not each of them the whole."""
    return jax.process_count() > 1 and _local_parts(sharding, parts) < parts


def is_random_key(leaf: Any) -> bool:
    """True for a random key, typed or as the two or four uint32 words of the older kind."""
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return True
    return leaf.dtype == np.uint32 and tuple(leaf.shape) in ((2,), (4,))


def _local_parts(sharding: NamedSharding, parts: int) -> int:
    """How many different parts of the batch the devices of this process hold."""
    index: Any = sharding.addressable_devices_indices_map((parts,))
    return len({i[0].start for i in index.values()})


def _place(leaf: Any, sharding: NamedSharding) -> Any:
    sharding = sharding if np.ndim(leaf) else NamedSharding(sharding.mesh, P())
    if isinstance(leaf, jax.Array) and leaf.sharding == sharding:
        return leaf
    if jax.process_count() > 1 and not is_global(leaf):
        return jax.make_array_from_process_local_data(sharding, np.asarray(leaf))
    return jax.device_put(leaf, sharding)


def _check_batch(batch: Any) -> None:
    """Raises TypeError for what is no batch of arrays: traced values, lists of numbers, strings."""
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
