"""Which arguments of a step its results replace: what `jzero.jit` donates.

[Note: what replaces what]
An argument is replaced if the step returns a tree of its form (structure, shapes and dtypes) that keeps some of its
values. Gradients have the form of the params too, but an argument that reaches them only through products, sums or
lookups (`NOT_KEPT`) was only read by a model.

If several arguments have one form (a reference, a target network) and fewer come back, the form does not say which, and
the data flow alone does not either: the new params are made from both. So an argument counts as replaced if it reaches
every leaf of the result that is made from any of them, and one that no other argument of this form reaches: the step
count, a moment. Every leaf of an average of two trees is made from both, so none of these is donated. Deleting the
wrong one would not be noticed before the next step.

NNX objects are changed in place: `nnx.jit` returns the state of all of them, so all may be donated, and are where the
step replaces optimizer state.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jzero.core.dependence import data_sources
from jzero.core.errors import is_argument, table, warn
from jzero.core.jaxprs import of_any_leaves
from jzero.core.nnx_modules import Apart, has_node, has_variable, owned_arrays
from jzero.core.primitives import MIXES
from jzero.core.types import PyTree, PyTreeDef

Key = int | str
Form = tuple[PyTreeDef, tuple[Any, ...]]
NOT_KEPT = MIXES | {"reduce_sum", "gather"}
"""Primitives after which an array no longer has its own values. See [Note: what replaces what]."""


def replaced(
    given: Mapping[Key, Any], traced: jax.stages.Traced, is_candidate: Callable[[Any], bool], static: Sequence[Key]
) -> list[Key]:
    """The arguments, by position or name, that the step replaces; warns if it cannot tell.

    Args:
      given: all arguments; positions are numbers.
      traced: the traced step.
      is_candidate: whether an argument may be donated.
      static: the positions and names of static arguments.
    """
    forms = {k: form_of(arg) for k, arg in given.items() if jax.tree.leaves(arg)}
    returned = _returned(of_any_leaves(lambda: traced.out_info), set(forms.values()))
    found: list[Key] = []
    for form in dict.fromkeys(f for k, f in forms.items() if f in returned and is_candidate(given[k])):
        keys = [k for k, f in forms.items() if f == form]
        if len(keys) == len(returned[form]):
            kept = _reached(given, traced, static, NOT_KEPT)
            found += [k for k in keys if any(k in kept[i] for result in returned[form] for i in result)]
            continue
        reached = _reached(given, traced, static)
        sure = [k for k in keys if any(_is_made_of(k, keys, result, reached) for result in returned[form])]
        if not sure:
            _warn(keys, len(returned[form]))
        found += sure
    return [k for k in given if k in found]


def check_unshared(given: Mapping[Key, Any], donated: Sequence[Key]) -> None:
    """Raises RuntimeError if an array of a donated argument occurs twice, in it or in another one: JAX may crash."""
    if not donated:
        return
    owners: dict[int, tuple[Key, Any, Any]] = {}
    for key, arg in given.items():
        for path, owner, x in owned_arrays(arg):
            other, place, first = owners.setdefault(id(x), (key, path, owner))
            one = owner is first and (owner is not x or (other, place) == (key, path))  # of one Variable, one array
            if one or (key not in donated and other not in donated):
                continue
            name = jax.tree_util.keystr(path)
            what = f"arguments {other!r} and {key!r} share an array ({name} of {key!r})"
            if other == key:
                what = f"argument {key!r} holds an array twice ({jax.tree_util.keystr(place)} and {name})"
            raise RuntimeError(
                f"jzero.jit: the {what}, and the step replaces one of them: its arrays are donated. Pass a copy as the "
                "other: jax.tree.map(jnp.copy, x), also for what nnx.clone or nnx.state returned."
            )


def beside_objects(
    step: Callable[..., Any], given: Mapping[Key, Any], is_candidate: Callable[[Any], bool], static: Sequence[Key]
) -> list[Key]:
    """`replaced` for a step with NNX objects among its arguments: which of the other arguments it replaces.

    The step is traced for this only if one of them may be donated. Trees of Variables (`nnx.State`) may not: `nnx.jit`
    returns the old ones, too.
    """
    trees_of_arrays = [k for k, x in given.items() if k not in static and not has_node(x) and not has_variable(x)]
    others = [k for k in trees_of_arrays if is_candidate(given[k])]
    if not others:
        return []
    apart = Apart([*given.values()], None, where="jzero.jit")
    keys = [*given, len(given)]  # the last one is the state of the objects
    trees = [jax.tree.flatten(x) for x in (*apart.trees, apart.state)]
    taken = [[k not in static and is_argument(x) for x in leaves] for k, (leaves, _) in zip(keys, trees, strict=True)]

    def call(values):
        named = dict(zip(given, values, strict=True))
        return step(*(x for k, x in named.items() if isinstance(k, int)),
                    **{k: x for k, x in named.items() if isinstance(k, str)})  # fmt: skip

    def pure(*arrays):
        filled = []
        for some, (leaves, tree), take in zip(arrays, trees, taken, strict=True):
            new = iter(some)
            own = [next(new) if t else x for x, t in zip(leaves, take, strict=True)]
            filled.append(jax.tree.unflatten(tree, own))
        *parts, state = filled
        return apart.call(call, (parts,), (), state)[0]

    rows = [zip(leaves, take, strict=True) for (leaves, _), take in zip(trees, taken, strict=True)]
    arrays = [[x for x, t in row if t] for row in rows]
    try:
        traced = jax.jit(pure).trace(*arrays)
    except Exception:  # the step itself raises it, or adds Variables to an object
        return []
    forms: dict[Key, Any] = {i: given[k] if k in others else arrays[i] for i, k in enumerate(keys)}
    found = replaced(forms, traced, lambda x: any(x is given[k] for k in others), ())
    return [k for i, k in enumerate(keys) if i in found]


def described(step: Callable[..., Any], given: Mapping[Key, Any], why: Mapping[Key, str], rows: Sequence[Key]) -> str:
    """A table of the arguments of a step: which are donated, and why.

    Args:
      step: the function, whose parameters name positional arguments.
      given: all arguments; positions are numbers.
      why: of those that are donated.
      rows: the arguments that are a batch.
    """
    names = list(inspect.signature(step).parameters)

    def why_not(k: Key) -> str:
        if k in rows:
            return "rows of a batch"
        state = has_variable(given[k]) and not has_node(given[k])
        return "nnx.jit returns the old Variables, too: nnx.as_pure(x)" if state else "no result replaces it"

    cells = [
        (
            names[k] if isinstance(k, int) and k < len(names) else str(k),
            type(x).__name__,
            "donated" if k in why else "kept",
            why.get(k) or why_not(k),
        )
        for k, x in given.items()
    ]
    return table(("argument", "type", "", "why"), cells)


def form_of(tree: PyTree) -> Form:
    """The structure of a tree and the type of each leaf."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((np.shape(x), getattr(x, "dtype", type(x))) for x in leaves)


def subtrees(out: PyTree) -> Iterator[PyTree]:
    """A result, and the parts of it if it is a tuple, list or dict."""
    yield out
    for part in _parts(out):
        yield from subtrees(part)


def named_arguments(step: Callable[..., Any], options: Mapping[str, Any], what: str, count: int) -> list[Key]:
    """The arguments that options of `jax.jit` make "static" or "donate", in a call with `count` positional arguments.

    Positions below `count`, and names. Where one option is given, JAX infers the other from the signature.
    """
    numbers, names = options.get(f"{what}_argnums"), options.get(f"{what}_argnames")
    one_given = (numbers is None) != (names is None)
    numbers = (numbers,) if isinstance(numbers, int) else numbers or ()
    names = (names,) if isinstance(names, str) else names or ()
    if one_given:
        parameters = enumerate(inspect.signature(step).parameters.values())
        either = [(i, p.name) for i, p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        both = [(i, name) for i, name in either if i in numbers or name in names]
        numbers, names = (*numbers, *(i for i, _ in both)), dict.fromkeys((*names, *(name for _, name in both)))
    return [*sorted({n % count for n in numbers if -count <= n < count}), *names]


def _parts(out: PyTree) -> Sequence[PyTree]:
    if isinstance(out, dict):
        return list(out.values())
    return out if isinstance(out, (tuple, list)) else ()


def _returned(out: PyTree, forms: set[Form]) -> dict[Form, list[list[int]]]:
    """The results of these forms, each as the numbers of its leaves. Parts of such a result do not count."""
    found: dict[Form, list[list[int]]] = {}
    leaves, tree = jax.tree.flatten(out)

    def look(part: PyTree, numbers: PyTree) -> None:
        form = form_of(part)
        if form in forms:
            found.setdefault(form, []).append(jax.tree.leaves(numbers))
            return
        for a, b in zip(_parts(part), _parts(numbers), strict=True):
            look(a, b)

    look(out, jax.tree.unflatten(tree, range(len(leaves))))
    return found


def _reached(
    given: Mapping[Key, Any], traced: jax.stages.Traced, static: Sequence[Key], ends: Collection[str] = ()
) -> list[frozenset[Key]]:
    """For each leaf of the result the arguments whose values are in it; not through equations named in `ends`."""
    names = sorted(of_any_leaves(lambda: traced.args_info)[1])  # as JAX flattens them; without static ones
    keys = [k for k in given if isinstance(k, int) and k not in static] + names
    sources = [frozenset((k,)) for k in keys for _ in jax.tree.leaves(given[k])]
    return data_sources(traced.jaxpr.jaxpr, traced.jaxpr.consts, sources, ends)


def _is_made_of(key: Key, keys: Sequence[Key], result: Sequence[int], reached: Sequence[frozenset[Key]]) -> bool:
    """See [Note: what replaces what]."""
    among = [reached[i].intersection(keys) for i in result]
    return all(key in some for some in among if some) and {key} in among


def _warn(keys: Sequence[Key], count: int) -> None:
    named = ", ".join(map(repr, keys))
    trees = "one such tree" if count == 1 else f"{count} such trees"
    option = "donate_argnames" if isinstance(keys[0], str) else "donate_argnums"
    warn(
        f"jzero.jit: the arguments {named} have the same structure, shapes and dtypes, the step returns {trees}, and "
        "its data flow does not tell which of them that replaces. None is donated: the old and the new one are in "
        f"memory together. Name all arguments that the step replaces, the optimizer state too: jzero.jit(step, plan, "
        f"{option}=...); () donates none.",
    )
