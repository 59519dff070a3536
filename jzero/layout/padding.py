"""Zeros at the end of dims that do not divide into equal pieces; see [Note: padding] in `split.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def padded(x: Any, shape: Sequence[int]) -> Any:
    """An array with zeros at the end of its dims, up to `shape`; a numpy array stays one."""
    if tuple(np.shape(x)) == tuple(shape):
        return x
    ends = [(0, new - old) for old, new in zip(np.shape(x), shape, strict=True)]
    return np.pad(x, ends) if isinstance(x, np.ndarray) else jnp.pad(x, ends)


def unpadded(x: Any, shape: Sequence[int]) -> Any:
    """The reverse: the first values along every dim."""
    return x if tuple(np.shape(x)) == tuple(shape) else jax.lax.slice(x, [0] * len(shape), tuple(shape))


def is_end_cut(shape: Sequence[int], stored: Sequence[int]) -> bool:
    """True if an array of the first shape may be stored padded in the second."""
    return len(shape) == len(stored) and all(new >= old for old, new in zip(shape, stored, strict=True))
