"""Separates a value from its gradient, which a second array carries, and joins the two again.

[Note: no equation]
The derivatives of these functions have no equation for the value: for the backward pass a scan keeps the slice of the
stack that it was given, which exists already, and no copy. (`jax.lax.stop_gradient` and `jax.custom_jvp` have an
equation.)
"""

from __future__ import annotations

import jax
from jax.interpreters import ad, batching

from jzero.core.custom_primitive import custom_primitive


def value_of(x: jax.Array) -> jax.Array:
    """The array without its gradient."""
    return _value_p.bind(x)


def carried(value: jax.Array, carrier: jax.Array) -> jax.Array:
    """The first array, with the gradient of the second; both of the same type."""
    return _carried_p.bind(value, carrier)


def _first(value, *_):
    return value


def _value_jvp(primals, tangents):
    return primals[0], ad.Zero(jax.typeof(primals[0]).to_tangent_aval())


def _carried_batch(args, dims):
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    return carried(*(batching.bdim_at_front(x, d, size) for x, d in zip(args, dims, strict=True))), 0


_value_p = custom_primitive(
    "jzero_value", _first, jvp=_value_jvp, several=False, batch=lambda args, dims: (value_of(args[0]), dims[0])
)
_carried_p = custom_primitive(
    "jzero_carried", _first, jvp=lambda primals, tangents: (primals[0], tangents[1]), several=False,
    batch=_carried_batch,
)  # fmt: skip
