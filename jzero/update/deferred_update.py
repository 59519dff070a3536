"""Leaves of an update that are not arrays of differences: `param + leaf` is the new param.

A leaf is opaque and meant for its own param; the sum checks shape and dtype alone. See [Note: an update knows its
param] in `optim.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jzero.core.errors import typed_shape
from jzero.layout.leaf_rule import Layout


class UpdateThatOnlyAddsToItsParam__use_ZeroConfig_updates_delta_for_plain_arrays:
    """A leaf of updates: `param + leaf` is the new param. Opaque on purpose; its name is all that JAX prints."""

    __array_ufunc__ = None  # numpy params: let __radd__ answer

    def __init__(self, add, shape, dtype):
        self._add, self.shape, self.dtype = add, shape, dtype

    def __radd__(self, param):
        fits = hasattr(param, "dtype") and tuple(np.shape(param)) == self.shape and param.dtype == self.dtype
        if not fits:
            got = typed_shape(param) if hasattr(param, "dtype") else repr(param)
            raise TypeError(
                f"jzero: this update lands on a param {typed_shape(self)} and cannot be added to {got}. Add it to "
                'its param by optax.apply_updates, or pass ZeroConfig(updates="delta") for plain arrays.'
            )
        return self._add(param)

    def __add__(self, other):
        raise TypeError(
            "jzero: an update stands on the right of the sum, param + update, as in optax.apply_updates; "
            'pass ZeroConfig(updates="delta") for plain arrays.'
        )

    def __getattr__(self, name):
        raise AttributeError(_no_array(name))

    def __repr__(self):
        return f"<jzero update of a param {typed_shape(self)}>"


def _no_array(asked: str) -> str:
    return (
        f"jzero: an update is not an array, and has no {asked!r}: it can only be added to its param. Take norms of "
        "the gradients, optax.global_norm(grads), scale inside the chain that jzero.zero wraps (optax.chain), or pass "
        'ZeroConfig(updates="delta") for plain arrays.'
    )


def _refused(name: str):
    def refuse(self, *others):
        raise TypeError(_no_array(name))

    return refuse


for _name in [
    "mul", "rmul", "sub", "rsub", "truediv", "rtruediv", "matmul", "rmatmul", "pow", "neg", "abs", "getitem",
]:  # fmt: skip
    setattr(
        UpdateThatOnlyAddsToItsParam__use_ZeroConfig_updates_delta_for_plain_arrays,
        f"__{_name}__", _refused(f"__{_name}__"),
    )  # fmt: skip


def deferred(add: Callable[[Any], Any], x: Layout | jax.Array) -> Any:
    """An update leaf that answers `param + leaf` with `add(param)`, for params of the shape and dtype of `x`."""
    return UpdateThatOnlyAddsToItsParam__use_ZeroConfig_updates_delta_for_plain_arrays(add, x.shape, x.dtype)
