"""Which arguments of a step belong to the model of a plan, and which to other models (a GAN, an actor and its critic).

[Note: whose leaf]
A leaf is recognized by its path. What is named `params` are params; the state around them, with moments and masters, is
theirs. So in `step(generator, discriminator, batch)` there are two states, though many of their leaves have equal names
and shapes. The plan's own params are those with the most of its names and shapes, among equals those that are laid out
as it says. A copy within the same state, such as an EMA, is not another model. An NNX state has no names: there a tree
is an argument, one with a scalar (a count) is an optimizer, and shapes decide.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Collection, Sequence
from typing import Any

from jzero.core.errors import listing
from jzero.layout.leaf_rule import Layout, path_keys
from jzero.layout.specs import shard_factor
from jzero.layout.state_layouts import named_by
from jzero.sharding import Plan

Keys = tuple[str, ...]
Row = tuple[Any, Any, Any]  # path, shape and dtype, sharding: as of `argument_shardings`


def other_params(rows: Sequence[Row], plan: Plan) -> dict[Keys, int]:
    """The params of models that are not the plan's: the path of each tree of them, and its elements."""
    trees = _trees(rows)
    if len(trees) < 2:
        return {}
    own = _own(trees, plan)
    return {
        tree: sum(math.prod(info.shape) for _, info, _ in leaves)
        for tree, leaves in trees.items()
        if not is_of(tree, own) and not is_of(own, tree)
    }


def other_trained_params(rows: Sequence[Row], results: Sequence[Any], plan: Plan) -> dict[Keys, int]:
    """Those of `other_params` that come back: not the frozen weights of a teacher or below a LoRA.

    Args:
      rows: the arguments.
      results: the paths of the results. A path does not say which argument a leaf replaces: of trees with equal names
        all come back, or none but the plan's.
      plan: the plan.
    """
    back = [path_keys(path) for path in results]
    first = {
        tree: leaves[0][0][2:] for tree, leaves in _trees(rows).items()
    }  # the name of a leaf of each tree
    alike = collections.Counter(keys[2:] for leaves in _trees(rows).values() for keys, _, _ in leaves)

    def is_back(tree: Keys) -> bool:
        name = first[tree]
        return tree[-1] == "states" or sum(keys[-len(name) :] == name for keys in back) >= alike[name]

    return {tree: size for tree, size in other_params(rows, plan).items() if is_back(tree)}


def trained_beside(rows: Sequence[Row], known: Collection[int]) -> list[Keys]:
    """The trees of params that have an optimizer state beside them and none of the rows of these numbers in them."""
    paths = [path_keys(path) for path, *_ in rows]
    own = [paths[i] for i in known]
    found = [
        tree for tree in _trees(rows) if tree[-1] != "states" and not any(is_of(keys, tree) for keys in own)
    ]
    return [tree for tree in found if any((*tree[:-1], "opt_state") == keys[: len(tree)] for keys in paths)]


def check_plan_fits(rows: Sequence[Row], plan: Plan, *, devices: int, trains: bool, where: str) -> None:
    """Raises ValueError where a program is not of the state that a plan is of: what it says of them would be wrong.

    Args:
      rows: the arguments of the program.
      plan: the plan.
      devices: those of the program; one of a single device says nothing of a mesh.
      trains: it has a backward pass, and so needs all params.
      where: the caller, for the text.
    """
    remedy = "Pass the plan of the state that the step was compiled for: jzero.plan_of(state)."
    if 1 < devices != plan.mesh.size:
        mesh = ", ".join(f"{axis}={size}" for axis, size in plan.mesh.shape.items())
        raise ValueError(
            f"{where}: the program is for {devices} devices, and the mesh of the plan has {plan.mesh.size} ({mesh}). "
            f"{remedy}"
        )
    trees = _trees(rows)
    own = _own(trees, plan) if trees else ()
    shapes = {keys[len(own) :]: tuple(info.shape) for keys, info, _ in trees.get(own, ())}
    wanted = {keys: x.shape for keys, x in plan.by_keys.items()}
    if any(shapes.get(keys) == shape for keys, shape in wanted.items()):
        compared = shapes.keys() | wanted.keys() if trains else shapes.keys() & wanted.keys()
        unlike = sorted(keys for keys in compared if shapes.get(keys) != wanted.get(keys))
    else:  # leaves without names (NNX, a list), or with others than in the plan
        by_name = bool(own) and own[-1] != "states"
        unlike = [] if _has_params(rows, plan, by_name=by_name) else sorted(wanted)
    if unlike:
        text = [
            ("/".join(k), f"program: {shapes.get(k, 'none')}", f"plan: {wanted.get(k, 'none')}")
            for k in unlike
        ]
        raise ValueError(
            f"{where}: the plan is not of the params of this program:\n{listing(text)}\n{remedy}"
        )


def _has_params(rows: Sequence[Row], plan: Plan, *, by_name: bool) -> bool:
    """True where some leaf has the shape of a param, and with `by_name` its name."""
    for path, info, _ in rows:
        keys, shape = path_keys(path), tuple(info.shape)
        alike = named_by(keys[2:], plan.by_keys) if by_name else plan.layouts
        if any(shape in (x.shape, x.state_shape) for x in alike):
            return True
    return False


def _trees(rows: Sequence[Row]) -> dict[Keys, list[Row]]:
    """The leaves of each tree of params, with paths as keys."""
    trees: dict[Keys, list[Row]] = collections.defaultdict(list)
    counts = set()
    for path, info, sharding in rows:
        keys = path_keys(path)
        if tree := _tree_of_params(keys):
            trees[tree].append((keys, info, sharding))
            if "states" in keys and not info.shape:
                counts.add(tree)
    return {tree: leaves for tree, leaves in trees.items() if tree not in counts}


def _own(trees: dict[Keys, list[Row]], plan: Plan) -> Keys:
    """The tree of the plan's own params."""
    return max(trees, key=lambda tree: _likeness(tree, trees[tree], plan))


def is_of(keys: Keys, tree: Keys) -> bool:
    """True for a leaf of the state that these params are of."""
    return keys[: len(tree) - 1] == tree[:-1]


def _tree_of_params(keys: Keys) -> Keys | None:
    if "states" in keys:
        return (*keys[: keys.index("states")], "states")
    names = keys[2:]  # the first two say which argument it is
    return keys[: 3 + names.index("params")] if "params" in names and "opt_state" not in names else None


def _likeness(tree: Keys, leaves: Sequence[Row], plan: Plan) -> tuple[int, int]:
    """How many leaves are params of the plan, and how many of them are laid out as it says."""
    found = [(_layout_of(keys[len(tree) :], info.shape, plan), sharding) for keys, info, sharding in leaves]
    mine = [(x, sharding) for x, sharding in found if x is not None]
    return len(mine), sum(sharding is None or _as_stored(x, sharding, plan) for x, sharding in mine)


def _layout_of(keys: Keys, shape: tuple[int, ...], plan: Plan) -> Layout | None:
    x = plan.by_keys.get(keys)
    if x is not None:
        return x if x.shape == tuple(shape) else None
    named = any(not k.isdigit() for k in keys)
    return None if named else next((x for x in plan.layouts if x.shape == tuple(shape)), None)


def _as_stored(x: Layout, sharding, plan: Plan) -> bool:
    return math.prod(sharding.shard_shape(x.shape)) == x.size // shard_factor(x.stored, plan.mesh)
