"""Arrays of random keys, which have no bytes of their own: what is done to them goes by way of their data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def is_key(x: Any) -> bool:
    """True for what has the dtype of typed random keys: an array, traced or abstract, too."""
    return hasattr(x, "dtype") and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def may_be_keys(x: Any) -> bool:
    """True for typed random keys, and for what may be keys of the older kind: rows of two uint32 words."""
    return is_key(x) or (x.dtype == "uint32" and x.shape[-1:] == (2,))


def by_data(act: Callable[..., Any], *arrays: Any) -> Any:
    """What a function makes of arrays; of random keys by way of their data."""
    if not is_key(arrays[0]):
        return act(*arrays)
    return jax.random.wrap_key_data(act(*map(jax.random.key_data, arrays)), impl=jax.random.key_impl(arrays[0]))
