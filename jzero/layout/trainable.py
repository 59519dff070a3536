"""Which params are trained, and trees of the trained ones among all.

[Note: the params that an optimizer takes]
An optimizer that trains some of the params knows only these: no moments, no masters, no norm over frozen weights. It
takes a tree of them in one form: with None in place of each frozen leaf, or without the frozen leaves, as NNX has it. A
step may hand it all params, or the trained ones in either form. Shapes and paths tell which it is, and the result has
the form that was given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jzero.core.errors import shown, typed_shape
from jzero.core.types import PyTree, PyTreeDef
from jzero.layout.leaf_rule import Frozen, as_abstract, path_keys

KINDS = (
    "a function (path, leaf) -> bool, or a tree of bools like the params; for an NNX model any nnx filter, such as "
    "nnx.LoRAParam"
)


def trained_by(trainable: Any, params: PyTree, *, where: str) -> list[bool]:
    """For each param whether a filter names it.

    Args:
      trainable: a function of the path (a tuple of strings) and the leaf, abstract; or a tree of bools.
      params: the tree.
      where: the caller, for errors.

    Raises:
      TypeError: the filter is of another kind, or an answer is not a bool.
      ValueError: a tree of bools does not fit the params, or the filter names no param.
    """
    flat = jax.tree_util.tree_leaves_with_path(params)
    if callable(trainable) and not isinstance(trainable, type):
        found = [trainable(path_keys(k), _abstract(x)) for k, x in flat]
    elif isinstance(trainable, (bool, np.bool_)) or _holds_bools(trainable):
        found = _broadcast(trainable, params, where)
    else:
        raise TypeError(f"{where}: trainable must be {KINDS}, not {shown(trainable)}.")
    return checked_answers(found, [(jax.tree_util.keystr(k), x) for k, x in flat], where=where)


def checked_answers(found: Sequence[Any], named: Sequence[tuple[str, Any]], *, where: str) -> list[bool]:
    """The answers of a filter, for params with their names.

    Raises:
      TypeError: an answer is not a bool.
      ValueError: no param is trained.
    """
    for answer, (name, leaf) in zip(found, named, strict=True):
        if not isinstance(answer, (bool, np.bool_)):
            raise TypeError(
                f"{where}: trainable must answer with a bool, and for {name} {typed_shape(as_abstract(leaf))} it "
                f"answers {shown(answer)}."
            )
    if not any(found):
        names = ", ".join(name for name, _ in named[:3])
        raise ValueError(
            f"{where}: trainable names none of the {len(named)} params ({names}, ...): there is nothing to train. A "
            'path is a tuple of strings, such as ("layers", "lora_a").'
        )
    return [bool(answer) for answer in found]


def _abstract(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(np.shape(x), as_abstract(x).dtype)


def _holds_bools(tree: PyTree) -> bool:
    leaves = jax.tree.leaves(tree)
    return bool(leaves) and all(isinstance(x, (bool, np.bool_)) for x in leaves)


def _broadcast(tree: PyTree, params: PyTree, where: str) -> list[Any]:
    try:
        return jax.tree.leaves(jax.tree.map(lambda t, some: jax.tree.map(lambda _: t, some), tree, params))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{where}: trainable is not a tree like the params, nor the top of one: {error}"
        ) from None


def without(params: PyTree, trained: Sequence[bool]) -> PyTreeDef:
    """The structure of a tree with None in place of each frozen leaf."""
    tree = jax.tree.structure(params)
    return jax.tree.structure(tree.unflatten([0 if t else None for t in trained]))


def left_out(params: PyTree, trained: Sequence[bool]) -> PyTreeDef:
    """The structure of a tree without its frozen leaves: mappings lose their keys, as those of NNX do."""
    flags = jax.tree.structure(params).unflatten(list(trained))

    def trained_only(node: Any, within: type = dict) -> Any:
        if not isinstance(node, Mapping):
            return jax.tree.map(lambda t: t or None, node)
        some = {k: trained_only(v, type(node)) for k, v in node.items() if any(jax.tree.leaves(v))}
        # `nnx.State` and `FrozenDict` hold plain dicts, and return them as their own class
        return some if type(node) is within else type(node)(some)  # pyright: ignore[reportCallIssue]

    return jax.tree.structure(trained_only(flags))


def numbers(params: PyTree, plan: Any, *, where: str) -> list[int | None]:
    """For each leaf of a tree its number among the params that the optimizer takes, None for a frozen one.

    Args:
      params: all params, or those that are trained.
      plan: a `Plan`.
      where: the caller, for errors.

    Raises:
      ValueError: the tree is neither of them; lists the leaves.
    """
    flat, own = jax.tree_util.tree_leaves_with_path(params), plan.trained
    shapes = [tuple(np.shape(x)) for _, x in flat]
    if own is plan or shapes == [x.shape for x in plan.layouts]:
        plan.match(params, where=where)
        count = iter(range(len(own.layouts)))
        return [None if x.frozen is Frozen.APART else next(count) for x in plan.layouts]
    if jax.tree.structure(params) != own.tree or shapes != [x.shape for x in own.layouts]:
        found = [plan.by_keys.get(path_keys(k)) for k, _ in flat]
        fits = all(x is not None and x.shape == s for x, s in zip(found, shapes, strict=True))
        if not fits or [x for x in found if x.frozen is not Frozen.APART] != list(own.layouts):
            own.match(params, where=where)
        count = iter(range(len(own.layouts)))
        return [None if x is None or x.frozen is Frozen.APART else next(count) for x in found]
    return list(range(len(flat)))


def picked(leaves: Sequence[Any], at: Sequence[int | None]) -> list[Any]:
    """The leaves that the optimizer takes; `at`: from `numbers`."""
    return [x for x, i in zip(leaves, at, strict=True) if i is not None]


def trained_part(params: PyTree, plan: Any, *, where: str) -> PyTree:
    """The tree that the optimizer takes, from all params or from the trained ones in any form."""
    if plan.trained is plan:
        return params
    return plan.trained.tree.unflatten(picked(jax.tree.leaves(params), numbers(params, plan, where=where)))


def with_rest(leaves: Sequence[Any], at: Sequence[int | None], rest: Callable[[int], Any]) -> list[Any]:
    """The reverse of `picked`; `rest(i)` gives frozen leaf i."""
    return [rest(k) if i is None else leaves[i] for k, i in enumerate(at)]
