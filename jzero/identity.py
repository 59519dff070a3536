"""When are two functions the same? `same_key` answers by what they compute, not by `id`.

Optax builds a fresh closure at every call, so two states made by the same code have unequal tree structures
and a jitted step compiles twice. Two functions made from the same code object over equal captured values and
equal globals compute the same. A wrong "same" would reuse the program of another optimizer, silently: whatever
is not known to compare by content compares by identity.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any

import jax
import numpy as np

from jzero.jaxprs import is_tracer

_PLAIN = (int, float, complex, str, bytes, bool, type(None), np.dtype, types.BuiltinFunctionType)
# libraries whose own functions and classes do not change under a run: their globals are not looked into
_LIBRARIES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "numpy",
    "jzero",
    "chex",
    "equinox",
    "typing",
    "functools",
    "builtins",
)


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

    Functions are compared by code, defaults, captured values and the globals they read; bound methods and
    frozen dataclasses (Flax linen modules too) by their class and every field; tuples, partials and small
    arrays by content. Mutable values (lists, dicts) and anything else compare by identity.
    """
    return _key(value, ())


def _key(value: Any, above: tuple[int, ...]) -> Any:
    if isinstance(value, _PLAIN):
        return (type(value), repr(value) if isinstance(value, (float, complex)) else value)
    if id(value) in above:
        return ("recursive", above.index(id(value)))
    above = (*above, id(value))
    if isinstance(value, tuple):
        return (type(value), *(_key(v, above) for v in value))
    if isinstance(value, functools.partial):
        keywords = tuple((k, _key(v, above)) for k, v in sorted(value.keywords.items()))
        return ("partial", _key(value.func, above), _key(value.args, above), keywords)
    if isinstance(value, types.MethodType):
        return ("method", _key(value.__func__, above), _key(value.__self__, above))
    if isinstance(value, types.FunctionType):
        return _function_key(value, above)
    if isinstance(value, type):
        return _class_key(value, above)
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        return _array_key(value)
    return _object_key(value, above)


def _array_key(value) -> Any:
    small = not is_tracer(value) and value.dtype != object and value.nbytes <= 4096
    if isinstance(value, jax.Array) and small:
        small = value.is_fully_addressable and not jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
    if not small:
        return _ById(value)
    host = np.asarray(value)
    return ("array", str(host.dtype), host.shape, host.tobytes())


def _function_key(f: types.FunctionType, above) -> Any:
    cells = tuple(_cell_key(c, above) for c in f.__closure__ or ())
    defaults = _key(f.__defaults__ or (), above)
    keywords = tuple((k, _key(v, above)) for k, v in sorted((f.__kwdefaults__ or {}).items()))
    return ("function", f.__code__, cells, defaults, keywords, _globals_key(f, above))


def _globals_key(f: types.FunctionType, above) -> Any:
    """The globals that a function reads, by name and content; those of a library are taken as fixed."""
    if _of_library(f.__module__):
        return id(f.__globals__)
    found = []
    for name in sorted(_names(f.__code__)):
        if name in f.__globals__:
            value = f.__globals__[name]
            found.append((name, _ById(value) if isinstance(value, types.ModuleType) else _key(value, above)))
    return tuple(found)


def _names(code: types.CodeType) -> set[str]:
    inner = [_names(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return set(code.co_names).union(*inner)


def _class_key(cls: type, above) -> Any:
    """A class, and what the methods that its author wrote read."""
    if _of_library(cls.__module__):
        return _ById(cls)
    methods = [(k, v) for k, v in sorted(vars(cls).items()) if isinstance(v, types.FunctionType)]
    bases = tuple(_key(b, above) for b in cls.__bases__)
    return ("class", _ById(cls), bases, tuple((k, _key(v, above)) for k, v in methods))


def _of_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES


def _cell_key(cell, above) -> Any:
    try:
        return _key(cell.cell_contents, above)
    except ValueError:  # an empty cell
        return "empty"


def _object_key(value: Any, above) -> Any:
    """A frozen dataclass (a Flax linen module is as good as one) field by field; else its identity."""
    params = getattr(type(value), "__dataclass_params__", None)
    if params is None or not (params.frozen or params.unsafe_hash):
        return _ById(value)
    fields = [(f.name, getattr(value, f.name, None)) for f in dataclasses.fields(value)]
    return (_key(type(value), above), *((name, _key(v, above)) for name, v in fields))
