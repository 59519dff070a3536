"""Arrays that a function closes over become arguments: needed where a trace cannot use arrays from outside of it."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

Make = Callable[[Sequence[jax.Array], list[Callable[[], bool]]], Any]


def lift(
    fn: Callable[..., Any], wanted: Callable[[jax.Array], bool]
) -> tuple[list[jax.Array], Callable[[Sequence[jax.Array]], Callable[..., Any]]]:
    """The arrays that a function reaches, and the function with others in their place.

    Looked through are variables of enclosing functions, globals that the function names, defaults, `functools.partial`,
    methods, callable frozen dataclasses, and in them other functions, tuples, lists, dicts and frozen dataclasses.
    Arrays in other objects (an `nnx.Module`) stay where they are. Nothing of the function itself is changed.

    Args:
      fn: any function.
      wanted: says of an array whether it is one of those; others stay where they are.

    Returns:
      The arrays, and `made(arrays)`, a new function. It raises ValueError if the call rebinds one of the variables,
      or changes one of the lists and dicts, that were copied for it: what it stored there would be lost.
    """
    arrays: list[jax.Array] = []
    make = _lifted(fn, wanted, arrays, {})

    def made(new: Sequence[jax.Array]) -> Callable[..., Any]:
        if make is None:
            return fn
        kept: list[Callable[[], bool]] = []
        own = make(new, kept)

        @functools.wraps(fn)
        def run(*args: Any, **kwargs: Any) -> Any:
            out = own(*args, **kwargs)
            if not all(same() for same in kept):
                raise ValueError(
                    f"jzero: {getattr(fn, '__qualname__', fn)} stores values in variables, lists or dicts outside of "
                    "it, and under an Explicit mesh these are lost. Return the values, and pass what they are made of "
                    "as arguments."
                )
            return out

        return run

    return arrays, made


def _lifted(
    x: Any, wanted: Callable[[jax.Array], bool], arrays: list[jax.Array], known: dict[int, Make | None]
) -> Make | None:
    """How `x` is made with other arrays in it; None if it reaches none. `known` holds what was looked at, by id."""
    if isinstance(x, jax.Array):
        if not wanted(x):
            return None
        arrays.append(x)
        at = len(arrays) - 1
        return lambda new, kept: new[at]
    if id(x) in known:
        return known[id(x)]
    known[id(x)] = None  # a function that reaches itself
    found = _parts(x)
    makes = [_lifted(part, wanted, arrays, known) for part in found[0]] if found else []
    if found is None or not any(makes):
        return None
    parts, remade = found
    known[id(x)] = lambda new, kept: remade(
        [p if m is None else m(new, kept) for p, m in zip(parts, makes, strict=True)], kept
    )
    return known[id(x)]


def _parts(x: Any) -> tuple[list[Any], Callable[[list[Any], list[Callable[[], bool]]], Any]] | None:
    """What `x` consists of, and how it is made of other parts; None for what is not looked through."""
    if type(x) in (list, dict):
        keys = list(x) if isinstance(x, dict) else range(len(x))

        def container(parts: list[Any], kept: list[Callable[[], bool]]) -> Any:
            new = dict(zip(keys, parts, strict=True)) if isinstance(x, dict) else list(parts)
            kept.append(lambda: len(new) == len(parts) and all(new[k] is p for k, p in zip(keys, parts, strict=True)))
            return new

        return [x[k] for k in keys], container
    if isinstance(x, tuple):
        plain = type(x) is tuple
        return list(x), lambda parts, _: tuple(parts) if plain else type(x)(*parts)
    if isinstance(x, functools.partial):
        names = list(x.keywords)
        return [x.func, *x.args, *x.keywords.values()], lambda parts, _: functools.partial(
            parts[0], *parts[1 : 1 + len(x.args)], **dict(zip(names, parts[1 + len(x.args) :], strict=True))
        )
    if isinstance(x, types.MethodType):
        return [x.__func__, x.__self__], lambda parts, _: types.MethodType(*parts)
    if isinstance(x, types.FunctionType):
        return _function(x)
    if _is_record(x):
        names = [f.name for f in dataclasses.fields(x) if f.init]
        return [getattr(x, n) for n in names], lambda parts, _: dataclasses.replace(
            x, **dict(zip(names, parts, strict=True))
        )
    return None


def _function(fn: types.FunctionType) -> tuple[list[Any], Callable[[list[Any], list[Callable[[], bool]]], Any]]:
    """The parts of a function: its cells, its defaults, the globals that it names."""
    cells = [c for c in fn.__closure__ or () if _is_filled(c)]
    own = {k: fn.__globals__[k] for k in _names(fn.__code__) if _is_own(fn.__globals__.get(k), fn)}
    defaults, keywords = fn.__defaults__ or (), fn.__kwdefaults__ or {}

    def remade(parts: list[Any], kept: list[Callable[[], bool]]) -> types.FunctionType:
        rest = iter(parts)
        closure = {id(c): types.CellType(next(rest)) for c in cells}
        named = {k: next(rest) for k in own}
        scope = {**fn.__globals__, **named}
        all_cells = tuple(closure.get(id(c), c) for c in fn.__closure__ or ())
        new = types.FunctionType(fn.__code__, scope, fn.__name__, tuple(next(rest) for _ in defaults), all_cells)
        new.__kwdefaults__ = {k: next(rest) for k in keywords}
        new.__qualname__ = fn.__qualname__
        new.__dict__.update(fn.__dict__)
        before = dict(scope), [(c, c.cell_contents) for c in closure.values()]
        kept.append(lambda: all(c.cell_contents is x for c, x in before[1]))
        kept.append(lambda: len(scope) == len(before[0]) and all(scope[k] is x for k, x in before[0].items()))
        return new

    return [*(c.cell_contents for c in cells), *own.values(), *defaults, *keywords.values()], remade


def _is_record(x: Any) -> bool:
    """A frozen dataclass that is a function or a tree."""
    if not dataclasses.is_dataclass(x) or isinstance(x, type):
        return False
    frozen = type(x).__dataclass_params__.frozen  # pyright: ignore
    return frozen and (callable(x) or not jax.tree_util.all_leaves([x]))


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # a variable without a value yet
        return False


def _names(code: types.CodeType) -> Iterator[str]:
    """The globals that code and the functions defined in it may name."""
    yield from dict.fromkeys(code.co_names)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def _is_own(x: Any, fn: types.FunctionType) -> bool:
    """A global that may hold arrays of the user: data, and functions of the module of `fn`."""
    if isinstance(x, types.FunctionType):
        return x.__globals__ is fn.__globals__
    return isinstance(x, (jax.Array, tuple, list, dict, functools.partial))
