"""Arrays to their devices: one leaf in a layout; with one process or several."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import NamedSharding

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
