"""NNX modules as arguments of a function of arrays: taken apart on the way in, put together again on the way out.

Flax is never imported for a function that does not use it: a module is known by its class, once `flax.nnx` is there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax

_TAG = "jzero.gather_on_use"


def is_module_class(x: Any, package: str = "flax.nnx") -> bool:
    """True for a class of modules of `flax.nnx` or `flax.linen`."""
    flax = sys.modules.get(package)
    return flax is not None and isinstance(x, type) and issubclass(x, flax.Module)


def is_module(x: Any) -> bool:
    """True for an `nnx.Module`."""
    return is_module_class(type(x))


def has_module(tree: Any) -> bool:
    """True for a tree with an `nnx.Module` in it."""
    return any(is_module(x) for x in jax.tree.leaves(tree, is_leaf=is_module))


def abstract(tree: Any) -> Any:
    """The tree with `jax.ShapeDtypeStruct` for arrays, in modules and optimizers too; what is no array stays."""

    def leaf(x):
        if not isinstance(x, jax.Array):
            return x
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding, weak_type=x.weak_type)

    flax: Any = sys.modules.get("flax.nnx")
    if flax is None or not any(map(flax.graphlib.is_graph_node, _nodes(tree, flax))):
        return jax.tree.map(leaf, tree)
    graph, arrays = flax.split(tree)
    return flax.merge(graph, jax.tree.map(leaf, arrays))


def _nodes(tree: Any, flax: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=flax.graphlib.is_graph_node)


def call(evaluate: Callable[..., Any], fn: Callable[..., Any], *args) -> Any:
    """`fn(*args)` by way of `evaluate(pure, *trees)`, which calls the pure function once, with other arrays.

    As flax's own transforms do it: modules that `fn` changes (statistics, counts of random keys, sown values) are the
    same objects with the new values afterwards, and a Variable that two of them share is one array.

    Args:
      evaluate: `evaluate(pure, *trees)`; `pure` and `trees` are `fn` and `args` with modules as trees of arrays.
      fn: a function of trees with modules in them.
      *args: its arguments.
    """
    from flax import nnx

    def is_node(x):
        return isinstance(x, nnx.Variable) or nnx.graphlib.is_graph_node(x)

    def pure(*trees):
        inner = nnx.from_tree(trees, ctxtag=_TAG, is_inner=True)
        out = fn(*inner)
        nodes = jax.tree.map(lambda x: x if is_node(x) else None, inner, is_leaf=is_node)
        return nnx.to_tree((nodes, out), ctxtag=_TAG)

    with nnx.update_context(_TAG):
        outs = evaluate(pure, *nnx.to_tree(args, ctxtag=_TAG))
        return nnx.from_tree(outs, ctxtag=_TAG, is_inner=False)[1]


def without_root(keys: tuple[str, ...]) -> tuple[str, ...]:
    """The path of a leaf inside of its module, from its path in a tree that `evaluate` gets."""
    return keys[keys.index("states") + 2 :] if "states" in keys else keys
