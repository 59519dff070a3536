"""Conversions between dtypes that the caller asked for: rounding is fine, another number is not."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jzero.core.errors import short_dtype


def convertible(stored: np.dtype, wanted: np.dtype) -> bool:
    """False if every conversion changes the number: complex to real."""
    return not (stored.kind == "c" and wanted.kind != "c")


def to_check(stored: np.dtype, wanted: np.dtype) -> bool:
    """True if it depends on the values whether a conversion to an integer or a bool keeps the numbers."""
    if stored == wanted or not _whole(wanted):
        return False
    return not (_whole(stored) and np.can_cast(stored, wanted))


def loses(stored: np.dtype, wanted: np.dtype, value: Any) -> bool:
    """True if a float in a smaller dtype is infinite or NaN now, and may have been a number before."""
    if not (_floating(stored) and _floating(wanted)):
        return False
    smaller = float(jnp.finfo(wanted).max) < float(jnp.finfo(stored).max) / 2
    return smaller and not bool(jnp.isfinite(value).all())


def converted(value: np.ndarray, wanted: np.dtype, where: str) -> np.ndarray:
    """An array in another dtype; values are rounded, but do not become other numbers.

    Raises:
      ValueError: the dtype cannot hold some numbers.
    """
    wanted = np.dtype(wanted)
    value = np.asarray(value)
    if value.dtype == wanted:
        return value
    with np.errstate(all="ignore"):
        made = value.astype(wanted)
        lost = _lost(value, made) if convertible(value.dtype, wanted) else np.ones(value.shape, bool)
    if lost.any():
        first = value[lost].reshape(-1)[0] if value.ndim else value[()]
        raise ValueError(
            f"{where}: {int(lost.sum())} of {value.size} values of {short_dtype(value.dtype)} cannot be held by "
            f"{short_dtype(wanted)}, the first is {first}. Use a dtype that holds them."
        )
    return made


def _lost(value: np.ndarray, made: np.ndarray) -> np.ndarray:
    """Where the number changed; a fraction that an integer drops does not count."""
    if made.dtype == bool:
        return (value != 0) & (value != 1)
    if _whole(made.dtype):
        info = jnp.iinfo(made.dtype)
        if _whole(value.dtype):
            return (value < info.min) | (value > info.max)
        number = np.trunc(value.astype(np.float64))
        return ~((number >= float(info.min)) & (number < float(info.max) + 1))
    exact = np.complex128 if made.dtype.kind == "c" else np.float64
    return np.isfinite(value.astype(exact)) & ~np.isfinite(made.astype(exact))


def _whole(dtype: np.dtype) -> bool:
    return dtype.kind == "b" or jnp.issubdtype(dtype, jnp.integer)


def _floating(dtype: np.dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)
