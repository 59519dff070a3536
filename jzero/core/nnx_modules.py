"""NNX modules as arguments of a function of arrays: taken apart on the way in, put together again on the way out.

Flax is never imported for a function that does not use it: a module is known by its class, once `flax.nnx` is loaded.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import jax
from jax.tree_util import KeyPath

from jzero.core.types import PyTree

_TAG = "jzero.gather_on_use"


def is_module_class(x: Any, package: str = "flax.nnx") -> TypeGuard[type]:
    """True for a class of modules of `flax.nnx` or `flax.linen`."""
    flax = sys.modules.get(package)
    return flax is not None and isinstance(x, type) and issubclass(x, flax.Module)


def is_module(x: object) -> bool:
    """True for an `nnx.Module`."""
    return is_module_class(type(x))


def has_module(tree: PyTree) -> bool:
    """True for a tree with an `nnx.Module` in it."""
    return any(is_module(x) for x in jax.tree.leaves(tree, is_leaf=is_module))


def is_node(x: object) -> bool:
    """True for an object of `flax.nnx` that holds Variables: a module, `nnx.Rngs`, a metric; not for an `nnx.State`."""
    flax: Any = sys.modules.get("flax.nnx")
    return flax is not None and flax.graphlib.is_graph_node(x) and not isinstance(x, flax.Variable)


def has_node(tree: PyTree) -> bool:
    """True for a tree with such an object in it."""
    return "flax.nnx" in sys.modules and any(map(is_node, jax.tree.leaves(tree, is_leaf=is_node)))


def jit_of(args: Any) -> Callable[..., Any]:
    """`nnx.jit` for a function of such objects, `jax.jit` for any other."""
    flax: Any = sys.modules.get("flax.nnx")
    return flax.jit if has_node(args) else jax.jit


def is_variable(x: object) -> bool:
    """True for an `nnx.Variable`."""
    flax: Any = sys.modules.get("flax.nnx")
    return flax is not None and isinstance(x, flax.Variable)


def is_state(x: object) -> bool:
    """True for an `nnx.State`."""
    flax: Any = sys.modules.get("flax.nnx")
    return flax is not None and isinstance(x, flax.State)


def has_variable(tree: PyTree) -> bool:
    """True for a tree with a Variable in it, of an object or of an `nnx.State`."""
    return any(map(is_variable, jax.tree.leaves(tree, is_leaf=is_variable)))


def owned_arrays(tree: PyTree) -> list[tuple[KeyPath, Any, jax.Array]]:
    """The arrays of a tree, each with its path and what it belongs to: its Variable, or itself."""
    found = []
    for path, owner in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_variable):
        found += [(path, owner, x) for x in jax.tree.leaves(owner) if isinstance(x, jax.Array)]
    return found


def whole_objects(trees: PyTree) -> PyTree:
    """Trees in which the objects that `nnx.jit` splits are put together again."""
    if "flax.nnx" not in sys.modules:
        return trees
    from flax import nnx

    return nnx.from_tree(
        trees, merge_fn=lambda context, path, prefix, leaf: context.unflatten(leaf.graphdef, *leaf.states)
    )


def variable_paths(trees: PyTree) -> dict[int, Any]:
    """The path of each leaf's Variable in its object, by the leaf's number.

    For trees of objects, whole or as `nnx.jit` splits them. A Variable of several objects has its path in the first of
    them. Leaves outside of objects have none.
    """
    if "flax.nnx" not in sys.modules:
        return {}
    from flax import nnx

    leaves, tree = jax.tree.flatten(trees)
    numbered = whole_objects(jax.tree.unflatten(tree, range(len(leaves))))
    _, state = nnx.split([x for x in jax.tree.leaves(numbered, is_leaf=is_node) if is_node(x)])
    return {number: path[1:] for path, number in jax.tree_util.tree_leaves_with_path(state)}


def abstract(tree: PyTree) -> PyTree:
    """The tree with `jax.ShapeDtypeStruct` for arrays, also inside of modules and optimizers; other leaves stay."""

    def leaf(x: Any) -> Any:
        if not isinstance(x, jax.Array):
            return x
        weak = getattr(x, "weak_type", False)  # a random key has none
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding, weak_type=weak)

    if not has_node(tree):
        return jax.tree.map(leaf, tree)
    from flax import nnx

    graph, arrays = nnx.split(tree)
    return nnx.merge(graph, jax.tree.map(leaf, arrays))


def call(evaluate: Callable[..., Any], fn: Callable[..., Any], *args) -> Any:
    """`fn(*args)` by way of `evaluate(pure, *trees)`, which calls the pure function once, with other arrays.

    As in Flax's own transforms, modules that `fn` changes (statistics, counts of random keys, sown values) are the same
    objects afterwards, with the new values, and a Variable that two of them share is one array.

    Args:
      evaluate: `evaluate(pure, *trees)`; `pure` and `trees` are `fn` and `args` with modules as trees of arrays.
      fn: a function of trees with modules in them.
      *args: its arguments.
    """
    from flax import nnx

    def holds_arrays(x: Any) -> bool:
        return is_node(x) or is_variable(x)

    def pure(*trees):
        inner = nnx.from_tree(trees, ctxtag=_TAG, is_inner=True)
        out = fn(*inner)
        nodes = jax.tree.map(lambda x: x if holds_arrays(x) else None, inner, is_leaf=holds_arrays)
        return nnx.to_tree((nodes, out), ctxtag=_TAG)

    with nnx.update_context(_TAG):
        outs = evaluate(pure, *nnx.to_tree(args, ctxtag=_TAG))
        return nnx.from_tree(outs, ctxtag=_TAG, is_inner=False)[1]


def without_root(keys: tuple[str, ...]) -> tuple[str, ...]:
    """The path of a leaf inside of its module, from its path in a tree that `evaluate` gets."""
    return keys[keys.index("states") + 2 :] if "states" in keys else keys


@dataclasses.dataclass(frozen=True)
class _Place:
    """Stands in a tree for its n-th object."""

    number: int

    def __repr__(self):
        return "an NNX object"


class Apart:
    """Trees with their NNX objects taken apart: params, the rest of their state, and a function that needs neither.

    Unlike `call` above, whose trees are bound to one trace of Flax, the state can be the carry of a loop.

    Attributes:
      trees: the trees, with placeholders for the objects.
      params: those Variables of the first object that `is_param` takes, as a tree of arrays. None without `is_param`.
      state: the leaves of all other Variables.
      paths: the paths of these leaves; the number of the object comes first.
    """

    def __init__(self, trees: PyTree, is_param: Callable[[tuple[str, ...]], bool] | None, *, where: str):
        """Take them apart.

        Args:
          trees: any trees.
          is_param: whether a path in the first object is that of a param; None if it has no params.
          where: the caller, for errors.
        """
        from flax import nnx

        self._where = where

        leaves, tree = jax.tree.flatten(trees, is_leaf=is_node)
        self._nodes = tuple(x for x in leaves if is_node(x))
        numbers = iter(range(len(leaves)))
        self.trees = tree.unflatten([_Place(next(numbers)) if is_node(x) else x for x in leaves])

        def wanted(path, _):
            return is_param is not None and path[0] == 0 and is_param(tuple(map(str, path[1:])))

        self._wanted = wanted
        self._graph, params, rest = nnx.split(self._nodes, wanted, ...)
        named, self._rest = jax.tree_util.tree_flatten_with_path(rest)
        self.state = [x for _, x in named]
        self.paths = [k for k, _ in named]
        self._params = jax.tree.structure(params)
        own = params[0] if 0 in params else nnx.State({})
        self._own = jax.tree.structure(own)
        self.params = None if is_param is None else nnx.as_pure(own)

    def call(
        self, fn: Callable[..., Any], trees: PyTree, params: PyTree, state: Sequence[Any]
    ) -> tuple[Any, list[Any], list[Any]]:
        """(`fn(*trees)`, the params, the state after it), with objects of these values in place of the placeholders.

        Raises:
          ValueError: `fn` changes the structure of the objects: it adds Variables, or sets other attributes.
        """
        from flax import nnx

        nodes = nnx.merge(self._graph, self._params.unflatten(jax.tree.leaves(params)), self._rest.unflatten(state))
        out = fn(*jax.tree.map(lambda x: nodes[x.number] if isinstance(x, _Place) else x, trees))
        graph, new_params, new = nnx.split(nodes, self._wanted, ...)
        if graph != self._graph or jax.tree.structure(new) != self._rest:
            raise ValueError(self._changed(new))
        return out, jax.tree.leaves(new_params), jax.tree.leaves(new)

    def update(self, state: Sequence[Any]) -> None:
        """Gives the objects a new state, in place."""
        from flax import nnx

        nnx.update(self._nodes, self._rest.unflatten(state))

    def as_params(self, leaves: Sequence[Any]) -> PyTree:
        """Leaves in the order of the params as an `nnx.State`, like that of `nnx.grad`."""
        return self._own.unflatten(leaves)

    def _changed(self, new: PyTree) -> str:
        after = [k for k, _ in jax.tree_util.tree_flatten_with_path(new)[0]]
        before, now = ({jax.tree_util.keystr(k[1:]).split(".value")[0] for k in some} for some in (self.paths, after))
        names = sorted(before ^ now)
        what = f"the Variables {', '.join(names[:8])}" if names else "attributes that are not Variables"
        return (
            f"{self._where}: the loss adds, removes or replaces {what} of an NNX object. From micro-batch to "
            "micro-batch its structure must stay the same: return such values as aux (has_aux=True), or create the "
            "Variables with the module."
        )
