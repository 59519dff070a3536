"""Arrays that a function closes over become arguments: needed where a trace cannot use arrays from outside of it.

Functions are not rebuilt: while one runs, the places where it finds its arrays hold others. So what shares a variable,
compares by identity or is its own key sees what it would see without jzero.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

_GONE = object()


@dataclasses.dataclass(frozen=True)
class HeldPlace:
    """A variable, an entry or a field that holds arrays, by itself or in tuples."""

    get: Callable[[], Any]
    put: Callable[[Any], None]


def lift(
    fn: Callable[..., Any], wanted: Callable[[jax.Array], bool]
) -> tuple[list[jax.Array], Callable[[Sequence[jax.Array]], Callable[..., Any]]]:
    """The arrays that a function reaches, and the function with others in their place.

    Looked through are variables of enclosing functions, globals that the function names, defaults, `functools.partial`,
    methods, and in them other functions, tuples, lists, dicts, and dataclasses that are functions or trees. Arrays in
    other objects (an `nnx.Module`) stay where they are.

    Args:
      fn: any function.
      wanted: says of an array whether it is one of those; others stay where they are.

    Returns:
      The arrays, and `made(arrays)`, a function. While it runs the places hold these arrays, for other threads, too.

    Raises:
      ValueError: from the new function, if `fn` stores something in such a place: it would be lost.
    """
    places, arrays = _found(fn, wanted)

    def made(new: Sequence[jax.Array]) -> Callable[..., Any]:
        if not places:
            return fn
        others = {id(x): y for x, y in zip(arrays, new, strict=True)}

        @functools.wraps(fn)
        def run(*args: Any, **kwargs: Any) -> Any:
            before = [place.get() for place in places]
            inside = [_replaced(x, others) for x in before]
            try:
                for place, x in zip(places, inside, strict=True):
                    place.put(x)
                out = fn(*args, **kwargs)
                kept = all(place.get() is x for place, x in zip(places, inside, strict=True))
            finally:
                for place, x in zip(places, before, strict=True):
                    place.put(x)
            if not kept:
                raise ValueError(
                    f"jzero: {getattr(fn, '__qualname__', fn)} stores values in place of arrays outside of it, and "
                    "under an Explicit mesh these are lost. Return the values, and pass the arrays as arguments."
                )
            return out

        return run

    return arrays, made


def _found(fn: Callable[..., Any], wanted: Callable[[jax.Array], bool]) -> tuple[list[HeldPlace], list[jax.Array]]:
    """The places that a function reaches and that hold wanted arrays, and these, each once."""
    places, arrays, todo, seen = [], {}, [fn], set()
    while todo:
        holder = todo.pop()
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        for place in _places(holder):
            leaves = list(_leaves(place.get()))
            own = {id(x): x for x in leaves if isinstance(x, jax.Array) and wanted(x)}
            if own:
                places.append(place)
                arrays |= own
            todo += [x for x in leaves if not isinstance(x, jax.Array)]
    return places, list(arrays.values())


def _is_tuple(x: Any) -> bool:
    """A tuple or a named one, and not another subclass, which may hold more than its elements."""
    return type(x) is tuple or (type(x).__base__ is tuple and hasattr(x, "_fields"))


def _leaves(x: Any) -> Iterator[Any]:
    if not _is_tuple(x):
        yield x
        return
    for part in x:
        yield from _leaves(part)


def _replaced(x: Any, others: dict[int, jax.Array]) -> Any:
    """The value of a place with other arrays in it; what holds none is the same object."""
    if not _is_tuple(x):
        return others.get(id(x), x)
    parts = [_replaced(part, others) for part in x]
    if all(a is b for a, b in zip(parts, x, strict=True)):
        return x
    return tuple(parts) if type(x) is tuple else type(x)._make(parts)


def _places(holder: Any) -> Iterator[HeldPlace]:
    """The places of an object."""
    if type(holder) in (list, dict):
        for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
            yield _entry(holder, key)
    elif isinstance(holder, types.FunctionType):
        yield from (_field(c, "cell_contents") for c in holder.__closure__ or () if _is_filled(c))
        names = dict.fromkeys(_names(holder.__code__))
        yield from (_entry(holder.__globals__, k) for k in names if _is_own(holder.__globals__.get(k), holder))
        yield from (_field(holder, name) for name in ("__defaults__", "__kwdefaults__"))
    elif isinstance(holder, types.MethodType):
        yield from (*_places(holder.__func__), *_places(holder.__self__))
    elif type(holder) is functools.partial:
        yield from (*_places(holder.func), *_places(holder.keywords))
        yield HeldPlace(
            lambda: holder.args,
            lambda args: holder.__setstate__((holder.func, args, holder.keywords, holder.__dict__)),  # pyright: ignore
        )
    elif _is_record(holder):
        yield from (_field(holder, f.name) for f in dataclasses.fields(holder) if hasattr(holder, f.name))


def _is_record(x: Any) -> bool:
    """A dataclass that is a function or a tree."""
    return (
        dataclasses.is_dataclass(x)
        and not isinstance(x, type)
        and (callable(x) or not jax.tree_util.all_leaves([x]))
    )


def _entry(holder: Any, key: Any) -> HeldPlace:
    def get() -> Any:
        try:
            return holder[key]
        except (KeyError, IndexError):
            return _GONE

    return HeldPlace(get, functools.partial(holder.__setitem__, key))


def _field(holder: Any, name: str) -> HeldPlace:
    return HeldPlace(lambda: getattr(holder, name, _GONE), functools.partial(object.__setattr__, holder, name))


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # a variable without a value yet
        return False


def _names(code: types.CodeType) -> Iterator[str]:
    """The globals that code and the functions defined in it may name."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def _is_own(x: Any, fn: types.FunctionType) -> bool:
    """A global that may hold arrays of the user: data, and functions of the module of `fn`."""
    if isinstance(x, types.FunctionType):
        return x.__globals__ is fn.__globals__
    return isinstance(x, (jax.Array, functools.partial)) or type(x) in (list, dict) or _is_tuple(x)
