"""A value and what stands for its gradient, apart and together again.

[Note: no equation]
The derivatives of these functions have no equation for the value: a scan keeps for the backward pass the slice of the
stack that it was given, which is there already, and not a copy. (`jax.lax.stop_gradient` and `jax.custom_jvp` have an
equation.)
"""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

_value_p = Primitive("jzero_value")
_carried_p = Primitive("jzero_carried")


def value_of(x: Any) -> Any:
    """The array without its gradient."""
    return _value_p.bind(x)


def carried(value: Any, carrier: Any) -> Any:
    """The first array, with the gradient of the second; both of one type."""
    return _carried_p.bind(value, carrier)


def _value_jvp(primals, tangents):
    return primals[0], ad.Zero(jax.typeof(primals[0]).to_tangent_aval())


def _carried_jvp(primals, tangents):
    return primals[0], tangents[1]


def _first(value, *_):
    return value


def _first_aval(value, *_):
    return value


def _value_batch(args, dims):
    return value_of(args[0]), dims[0]


def _carried_batch(args, dims):
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    value, carrier = (batching.bdim_at_front(x, d, size) for x, d in zip(args, dims, strict=True))
    return carried(value, carrier), 0


for _p, _jvp, _batch in ((_value_p, _value_jvp, _value_batch), (_carried_p, _carried_jvp, _carried_batch)):
    _p.def_impl(_first)
    _p.def_abstract_eval(_first_aval)
    ad.primitive_jvps[_p] = _jvp
    batching.primitive_batchers[_p] = _batch
    mlir.register_lowering(_p, mlir.lower_fun(_first, multiple_results=False))
