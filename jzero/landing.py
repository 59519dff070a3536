"""The leaf that an update is: opaque, it only lands on its own param. See [Note: an update knows where it lands]."""

from __future__ import annotations

import numpy as np

from jzero.errors import typed_shape
from jzero.layout import Layout


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
        raise AttributeError(
            f"jzero: an update has no {name!r}: it is no array, and only lands on its param. Take norms of the "
            'gradients, or pass ZeroConfig(updates="delta") for plain arrays.'
        )

    def __repr__(self):
        return f"<jzero update of a param {typed_shape(self)}>"


def landing(add, x: Layout):
    """An update leaf that answers `param + leaf` with `add(param)`."""
    return UpdateThatOnlyAddsToItsParam__use_ZeroConfig_updates_delta_for_plain_arrays(add, x.shape, x.dtype)
