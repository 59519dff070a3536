"""What a function leaves behind in Python objects: the key of a random number generator that a loss advances.

`jax.grad` runs a loss in the trace around it. A key that the loss stores, as in `self.rng, key = split(self.rng)`, can
be used afterwards. jzero traces a function to a jaxpr first, in a trace of its own, and JAX refuses a value of that
trace outside of it (UnexpectedTracerError). So while the trace is open, jzero looks for its keys and integers in what
the function reaches: variables, attributes of objects, short lists and mappings, at most `_MOST` of them. Globals are
left out: what a jitted step stores there is lost without jzero, too. So are floats: those of params cannot be used
after `jax.grad` either.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax._src.core import trace_ctx

from jzero.core.jaxprs import is_tracer
from jzero.core.types import PyTree

_DEPTH = 6  # from a wrapped loss to the attribute of an object in a variable of it
_LONG = 100  # a longer list or mapping holds data
_MOST = 10_000  # places


@dataclasses.dataclass(frozen=True)
class StoredValues:
    """A place that holds keys or integers of the current trace.

    Attributes:
      name: `JaxRNG.rng` for an attribute, else the variable.
      values: the values, more than one for a tuple.
      put: writes new values there.
    """

    name: str
    values: list[jax.Array]
    put: Callable[[Sequence[jax.Array]], None]


def left_behind(fn: Callable[..., Any]) -> list[StoredValues]:
    """The places that `fn` reaches and that hold keys or integers of the current trace, once `fn` has run in it."""
    found: list[StoredValues] = []
    seen: set[int] = set()
    todo: list[tuple[Any, int]] = [(fn, 0)]
    while todo and len(seen) < _MOST:
        holder, depth = todo.pop(0)
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        for name, value, put in _places(holder):
            leaves, tree = jax.tree.flatten(value, is_leaf=lambda x: not isinstance(x, tuple))
            own = [_is_own(x) for x in leaves]
            if any(own):
                found.append(_stored(name, leaves, own, tree, put))
            elif depth < _DEPTH:
                todo += [(x, depth + 1) for x in leaves if _may_change(x)]
    return found


def _is_own(x: Any) -> bool:
    """A key or an integer of the current trace."""
    return is_tracer(x) and x._trace is trace_ctx.trace and not jax.dtypes.issubdtype(x.dtype, np.inexact)


def _stored(name: str, leaves: list[Any], own: list[bool], tree: PyTree, put: Callable[[Any], None]) -> StoredValues:
    def filled(values: Sequence[Any]) -> None:
        new = iter(values)
        put(tree.unflatten([next(new) if o else x for x, o in zip(leaves, own, strict=True)]))

    return StoredValues(name, [x for x, o in zip(leaves, own, strict=True) if o], filled)


def _may_change(x: Any) -> bool:
    """True for functions, lists, mappings, and objects with attributes that can be set."""
    if isinstance(x, (jax.Array, type, types.ModuleType)):
        return False
    if isinstance(x, (list, dict, collections.deque)):
        return len(x) <= _LONG
    frozen = dataclasses.is_dataclass(x) and type(x).__dataclass_params__.frozen  # pyright: ignore
    return callable(x) or ((hasattr(x, "__dict__") or any(_slots(x))) and not frozen)


def _slots(x: Any) -> Iterator[str]:
    """The names of attributes that an object has without a `__dict__`."""
    if type(x).__module__ != "builtins":
        for cls in type(x).__mro__:
            names = cls.__dict__.get("__slots__", ())
            yield from (name for name in ((names,) if isinstance(names, str) else names) if hasattr(x, name))


def _places(holder: Any) -> Iterator[tuple[str, Any, Callable[[Any], None]]]:
    """The places of an object: (name, what is there, a function that writes there)."""
    if isinstance(holder, (list, dict, collections.deque)):
        for key, value in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
            yield f"[{key!r}]", value, functools.partial(holder.__setitem__, key)
        return
    if isinstance(holder, types.FunctionType):
        for name, cell in zip(holder.__code__.co_freevars, holder.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # not filled yet
                yield name, cell.cell_contents, functools.partial(setattr, cell, "cell_contents")
    parts = ("__self__", "__func__", "func", "args", "keywords", "__defaults__", "__kwdefaults__")
    for name in parts if callable(holder) else ():
        yield name, getattr(holder, name, None), lambda _: None  # these cannot be set, but what they hold can
    for name, value in list(getattr(holder, "__dict__", {}).items()):
        yield f"{type(holder).__name__}.{name}", value, functools.partial(vars(holder).__setitem__, name)
    for name in list(_slots(holder)):
        if not name.startswith("__"):
            yield f"{type(holder).__name__}.{name}", getattr(holder, name), functools.partial(setattr, holder, name)
