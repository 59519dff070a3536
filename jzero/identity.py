"""When are two functions the same? `same_key` answers by code and captured values, not by `id`.

Optax builds a fresh closure at every call, so two states made by the same code have unequal tree structures
and a jitted step compiles twice. Two functions made from the same code object over equal captured values
compute the same.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import jax
import numpy as np

from jzero.jaxprs import is_tracer

_PLAIN = (int, float, complex, str, bytes, bool, type(None), np.dtype, types.BuiltinFunctionType, type)


class _ById:
    """Equal to itself alone; keeps what it stands for alive, so that its id is not used again."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return isinstance(other, _ById) and self.value is other.value

    def __hash__(self):
        return id(self.value)


def same_key(value: Any) -> Any:
    """A hashable key: equal keys mean the same computation; unequal keys mean nothing.

    Functions are compared by code, defaults and captured values; bound methods by their object; tuples,
    partials and arrays on the host by content. Mutable captured values (lists, dicts) and anything else
    compare by identity.
    """
    return _key(value, ())


def _key(value: Any, above: tuple[int, ...]) -> Any:
    if isinstance(value, _PLAIN):
        return (type(value), repr(value) if isinstance(value, float) else value)
    if id(value) in above:
        return ("recursive", above.index(id(value)))
    above = (*above, id(value))
    if isinstance(value, tuple):
        return (type(value), *(_key(v, above) for v in value))
    if isinstance(value, functools.partial):
        keywords = tuple((k, _key(v, above)) for k, v in sorted(value.keywords.items()))
        return ("partial", _key(value.func, above), _key(value.args, above), keywords)
    if isinstance(value, types.MethodType):
        return ("method", value.__func__, _hashable(value.__self__))
    if isinstance(value, types.FunctionType):
        return _function_key(value, above)
    if isinstance(value, (np.ndarray, np.generic)) and value.nbytes <= 4096:
        return ("array", str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, jax.Array) and not is_tracer(value) and value.is_fully_addressable:
        return _key(np.asarray(value), above) if value.nbytes <= 4096 and not _is_key(value) else _ById(value)
    return _hashable(value)


def _function_key(f: types.FunctionType, above) -> Any:
    cells = tuple(_cell_key(c, above) for c in f.__closure__ or ())
    defaults = _key(f.__defaults__ or (), above)
    keywords = tuple((k, _key(v, above)) for k, v in sorted((f.__kwdefaults__ or {}).items()))
    return ("function", f.__code__, id(f.__globals__), cells, defaults, keywords)


def _cell_key(cell, above) -> Any:
    try:
        return _key(cell.cell_contents, above)
    except ValueError:  # an empty cell
        return "empty"


def _is_key(value) -> bool:
    return jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)


def _hashable(value: Any) -> Any:
    """The value itself where it compares by content and cannot change; else its identity."""
    params = getattr(type(value), "__dataclass_params__", None)
    if params is None or not (params.frozen or params.unsafe_hash):  # Flax linen modules hash by their fields
        return _ById(value)
    try:
        hash(value)
    except TypeError:
        return _ById(value)
    return value
