"""Which arguments of a step its results replace: what `jzero.jit` donates.

[Note: what replaces what]
An argument is replaced where the step returns a tree of its form (structure, shapes and dtypes). If several arguments
have one form (a state and a reference, a target network, a teacher) and fewer come back, the form does not say which,
and neither does the data flow alone: the new params are made from both. So an argument counts as replaced if it
reaches every leaf of the result, and one leaf that no other argument of this form reaches: the step count, a moment. An
average of two trees is a leaf of both, and of such trees none is donated. Deleting the wrong one would be noticed at
the next step at the earliest.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jzero.core.dependence import data_sources

Key = int | str
Form = tuple[Any, tuple[Any, ...]]


def replaced(
    given: Mapping[Key, Any], traced: Any, is_candidate: Callable[[Any], bool], static: Sequence[int]
) -> list[Key]:
    """The arguments, by position or name, that the step replaces; warns where that cannot be told.

    Args:
      given: all arguments; positions are numbers.
      traced: the traced step.
      is_candidate: whether an argument may be donated at all.
      static: the positions of static arguments.
    """
    forms = {k: form_of(arg) for k, arg in given.items() if jax.tree.leaves(arg)}
    returned = _returned(traced.out_info, set(forms.values()))
    found: list[Key] = []
    for form in dict.fromkeys(f for k, f in forms.items() if f in returned and is_candidate(given[k])):
        keys = [k for k, f in forms.items() if f == form]
        if len(keys) == len(returned[form]):
            found += keys
            continue
        reached = _reached(given, traced, static)
        sure = [k for k in keys if any(_is_made_of(k, keys, result, reached) for result in returned[form])]
        if not sure:
            _warn(keys, len(returned[form]))
        found += sure
    return [k for k in given if k in found]


def check_unshared(given: Mapping[Key, Any], donated: Sequence[Key]) -> None:
    """Raises RuntimeError for a donated argument of which another one has an array: on the CPU JAX may crash."""
    if not donated:
        return
    owners: dict[int, Key] = {}
    for key, arg in given.items():
        for path, x in jax.tree_util.tree_leaves_with_path(arg):
            other = owners.setdefault(id(x), key) if isinstance(x, jax.Array) else key
            if other != key and (key in donated or other in donated):
                raise RuntimeError(
                    f"jzero.jit: the arguments {other!r} and {key!r} share an array ({jax.tree_util.keystr(path)} of "
                    f"{key!r}), and the step replaces one of them: its arrays are donated. Pass arrays of their own as "
                    "the other: jax.tree.map(jnp.copy, x)."
                )


def form_of(tree: Any) -> Form:
    """The structure of a tree and the type of each leaf."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((np.shape(x), getattr(x, "dtype", type(x))) for x in leaves)


def subtrees(out: Any) -> Iterator[Any]:
    """A result and what it is a tuple, list or dict of."""
    yield out
    for part in _parts(out):
        yield from subtrees(part)


def static_positions(step: Callable[..., Any], options: Mapping[str, Any], count: int) -> list[int]:
    """Which of `count` positional arguments are static by the options of `jax.jit`."""
    numbers, names = options.get("static_argnums", ()), options.get("static_argnames", ())
    positions = {n % count for n in ((numbers,) if isinstance(numbers, int) else numbers or ())}
    parameters = list(inspect.signature(step).parameters) if names else []
    asked = (names,) if isinstance(names, str) else names or ()
    return sorted(positions | {parameters.index(n) for n in asked if n in parameters})


def _parts(out: Any) -> Sequence[Any]:
    if isinstance(out, dict):
        return list(out.values())
    return out if isinstance(out, (tuple, list)) else ()


def _returned(out: Any, forms: set[Form]) -> dict[Form, list[list[int]]]:
    """The results of these forms, each as the numbers of its leaves; what is part of such a result is none itself."""
    found: dict[Form, list[list[int]]] = {}
    leaves, tree = jax.tree.flatten(out)

    def look(part: Any, numbers: Any) -> None:
        form = form_of(part)
        if form in forms:
            found.setdefault(form, []).append(jax.tree.leaves(numbers))
            return
        for a, b in zip(_parts(part), _parts(numbers), strict=True):
            look(a, b)

    look(out, tree.unflatten(range(len(leaves))))
    return found


def _reached(given: Mapping[Key, Any], traced: Any, static: Sequence[int]) -> list[frozenset[Key]]:
    """For each leaf of the result the arguments whose values are in it."""
    names = sorted(traced.args_info[1])  # as JAX flattens them; those of static arguments are not there
    keys = [k for k in given if isinstance(k, int) and k not in static] + names
    sources = [frozenset((k,)) for k in keys for _ in jax.tree.leaves(given[k])]
    return data_sources(traced.jaxpr.jaxpr, traced.jaxpr.consts, sources)


def _is_made_of(key: Key, keys: Sequence[Key], result: Sequence[int], reached: Sequence[frozenset[Key]]) -> bool:
    """See [Note: what replaces what]."""
    among = [reached[i].intersection(keys) for i in result]
    return all(key in some for some in among) and {key} in among


def _warn(keys: Sequence[Key], count: int) -> None:
    named = ", ".join(map(repr, keys))
    trees = "one such tree" if count == 1 else f"{count} such trees"
    option = "donate_argnames" if isinstance(keys[0], str) else "donate_argnums"
    warnings.warn(
        f"jzero.jit: the arguments {named} have the same structure, shapes and dtypes, the step returns {trees}, and "
        "its data flow does not tell which of them that replaces. None is donated: the old and the new one are in "
        f"memory together. Name all arguments that the step replaces, the optimizer state too: jzero.jit(step, plan, "
        f"{option}=...); () donates none.",
        stacklevel=7,
    )
