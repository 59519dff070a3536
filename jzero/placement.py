"""Arrays to their devices: one leaf in a layout; with one process or several."""

from __future__ import annotations

import zlib
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jzero.errors import listing, typed_shape
from jzero.jaxprs import is_tracer


def put(leaf, sharding: NamedSharding) -> jax.Array:
    """One leaf on its devices; across processes every process must hold the value it needs."""
    if isinstance(leaf, jax.Array) and leaf.sharding == sharding:
        return leaf
    if jax.process_count() == 1:
        return jax.device_put(leaf, sharding)
    if is_global(leaf):
        return jax.jit(lambda x: x, out_shardings=sharding)(leaf)
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = put(jax.random.key_data(leaf), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    host = np.asarray(leaf)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def on_device(x):
    """An array from host memory in the same layout in device memory; anything else as it is."""
    kind = getattr(getattr(x, "sharding", None), "memory_kind", None)
    if not isinstance(x, jax.Array) or is_tracer(x) or kind in (None, "device"):
        return x
    return jax.device_put(x, x.sharding.with_memory_kind("device"))


def is_global(leaf) -> bool:
    """True for an array that spans several processes."""
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def check_same(tree: Any, *, where: str) -> None:
    """Every process brings the same values: asked before arrays that lie on each of them become one.

    A seed that depends on the process would give a state of which every process trains another one. Arrays that span
    the processes are not looked at. All processes must call.

    Raises:
      ValueError: the trees differ between processes, or the values of a leaf; lists the leaves.

    Cost:
      Across processes a checksum of every byte on the CPU (some GB/s); 4 bytes per leaf and process are sent.
    """
    if jax.process_count() == 1:
        return
    named = [(jax.tree_util.keystr(k), x) for k, x in jax.tree_util.tree_leaves_with_path(tree)]
    named = [(name, _data(x)) for name, x in named if not is_global(x)]
    outline = "\n".join(f"{name} {typed_shape(x)}" for name, x in named)
    if len(set(_gathered([zlib.crc32(outline.encode())])[:, 0].tolist())) > 1:
        raise ValueError(
            f"{where}: the processes bring trees of other paths, shapes or dtypes; this one, process "
            f"{jax.process_index()}, has {len(named)} leaves that lie on each process alone. Build the same state on "
            "every process, or pass the function that creates it."
        )
    sums = _gathered([zlib.crc32(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data) for _, x in named])
    rows = [
        (name, typed_shape(x), f"process {other} differs from process 0")
        for (name, x), column in zip(named, sums.T, strict=True)
        for other in np.flatnonzero(column != column[0])[:1]
    ]
    if rows:
        raise ValueError(
            f"{where}: the processes bring different values for {len(rows)} of {len(named)} leaves:\n{listing(rows)}\n"
            "Use the same seed (and the same file) on every process, or pass the function that creates the state: it "
            "runs once, over all of them."
        )


def _data(leaf) -> np.ndarray:
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def _gathered(numbers: list[int]) -> np.ndarray:
    """`[processes, numbers]` of what each process passes, in the order of the processes."""
    from jax.experimental import multihost_utils

    return np.atleast_2d(multihost_utils.process_allgather(np.array(numbers, np.uint32)))
