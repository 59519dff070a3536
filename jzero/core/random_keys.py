"""Arrays of typed random keys. They have no bytes of their own: operations go through their key data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def is_key(x: Any) -> bool:
    """True for typed random keys: arrays, traced or not, and abstract ones."""
    return hasattr(x, "dtype") and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def may_be_keys(x: Any) -> bool:
    """True for typed random keys, and for what may be keys of the older kind: rows of two uint32 words."""
    return is_key(x) or (x.dtype == "uint32" and x.shape[-1:] == (2,))


def data(x: Any) -> Any:
    """`x`; of random keys the key data."""
    return jax.random.key_data(x) if is_key(x) else x


def key_impl(x: Any) -> Any:
    """The generator of typed random keys, which may be abstract: `jax.random.key_impl` wants arrays."""
    found = []
    jax.eval_shape(lambda keys: found.append(jax.random.key_impl(keys)), x)
    return found[0]


def by_data(act: Callable[..., Any], *arrays: Any) -> Any:
    """`act(*arrays)`; for random keys it is applied to their key data."""
    if not is_key(arrays[0]):
        return act(*arrays)
    return jax.random.wrap_key_data(act(*map(jax.random.key_data, arrays)), impl=key_impl(arrays[0]))
