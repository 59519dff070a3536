"""Which arguments of a step belong to the model of a plan, and which to other models (a GAN, an actor and its critic).

[Note: whose leaf]
A leaf is recognized by its path. What is named `params` are params; the state around them, with moments and masters, is
theirs. So in `step(generator, discriminator, batch)` there are two states, though many of their leaves have equal names
and shapes. The plan's own params are those with the most of its names and shapes, among equals those that are laid out
as it says. A copy within the same state, such as an EMA, is not another model. An NNX state has no names: there a tree
is an argument, one with a scalar (a count) is an optimizer, and shapes decide: a plan fits a program with a leaf for
each of its matrices, which no traced update of another model takes.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Collection, Sequence

import jax

from jzero.core.errors import listing
from jzero.layout.leaf_rule import Layout
from jzero.layout.specs import shard_factor
from jzero.layout.state_layouts import named_by
from jzero.proof.arguments import GivenArgument, Keys, result_keys
from jzero.proof.record import record_of
from jzero.sharding import Plan

NAMELESS, STATE = "states", "opt_state"
"""In the path of what `nnx.jit` makes of a module."""


def other_params(given: Sequence[GivenArgument], plan: Plan) -> dict[Keys, int]:
    """The params of models that are not the plan's: the path of each tree of them, and its elements."""
    trees = _trees(given)
    if len(trees) < 2:
        return {}
    own = _own(trees, plan)
    others = {tree: leaves for tree, leaves in trees.items() if not is_of(tree, own) and not is_of(own, tree)}
    return {tree: sum(x.size for x in leaves) for tree, leaves in others.items()}


def other_trained_params(given: Sequence[GivenArgument], compiled: jax.stages.Compiled, plan: Plan) -> dict[Keys, int]:
    """Those of `other_params` that come back: not the frozen weights of a teacher or below a LoRA.

    A path does not say which argument a result replaces: of trees with equal names all come back, or none but the
    plan's.
    """
    others = other_params(given, plan)
    if not others:
        return {}
    back = result_keys(compiled)
    names = {tree: [x.keys[2:] for x in leaves] for tree, leaves in _trees(given).items()}
    alike = collections.Counter(name for some in names.values() for name in some)

    def is_back(tree: Keys) -> bool:
        name = names[tree][0]
        return tree[-1] == NAMELESS or sum(keys[-len(name) :] == name for keys in back) >= alike[name]

    return {tree: size for tree, size in others.items() if is_back(tree)}


def trained_beside(given: Sequence[GivenArgument], known: Collection[int]) -> list[Keys]:
    """The trees of params with an optimizer state beside them, and with none of the arguments of these numbers."""
    keys = [x.keys for x in given]
    named = [tree for tree in _trees(given) if tree[-1] != NAMELESS]
    found = [tree for tree in named if not any(is_of(keys[i], tree) for i in known)]
    return [tree for tree in found if any((*tree[:-1], STATE) == k[: len(tree)] for k in keys)]


def check_plan_fits(
    compiled: jax.stages.Compiled, given: Sequence[GivenArgument], plan: Plan, *, devices: int, trains: bool, where: str
) -> None:
    """Raises ValueError for a program whose state is not that of the plan: what is said of it would be wrong.

    Args:
      compiled: the program.
      given: its arguments.
      plan: the plan.
      devices: how many the program has; a single one says nothing about a mesh.
      trains: it has a backward pass, and so takes all params.
      where: the caller, for the text.
    """
    remedy = "Pass the plan of the state that the step was compiled for: jzero.plan_of(state)."
    if 1 < devices != plan.mesh.size:
        mesh = ", ".join(f"{axis}={size}" for axis, size in plan.mesh.shape.items())
        raise ValueError(
            f"{where}: the program is for {devices} devices, and the mesh of the plan has {plan.mesh.size} ({mesh}). "
            f"{remedy}"
        )
    record = record_of(compiled)
    if record is not None and record.makes(plan):
        return
    trees = _trees(given)
    own = _own(trees, plan) if trees else ()
    shapes = {x.keys[len(own) :]: x.shape for x in trees.get(own, ())}
    wanted = {keys: x.shape for keys, x in plan.by_keys.items()}
    if any(shapes.get(keys) == shape for keys, shape in wanted.items()):
        compared = shapes.keys() | wanted.keys() if trains else shapes.keys() & wanted.keys()
        unlike = sorted(keys for keys in compared if shapes.get(keys) != wanted.get(keys))
    else:  # leaves without names (NNX, a list), or with others than in the plan
        by_name = bool(own) and own[-1] != NAMELESS
        if by_name:
            unlike = [] if _has_a_param(given, plan) else sorted(wanted)
        else:
            unlike = sorted(x.keys for x in _missing(_unclaimed(compiled, given, plan), plan))
    if unlike:
        rows = [("/".join(k), f"program: {shapes.get(k, 'none')}", f"plan: {wanted.get(k, 'none')}") for k in unlike]
        raise ValueError(f"{where}: the plan does not match the params of this program:\n{listing(rows)}\n{remedy}")


def _has_a_param(given: Sequence[GivenArgument], plan: Plan) -> bool:
    """True where some leaf has the name and the shape of a param."""
    return any(
        leaf.shape in (x.shape, x.state_shape) for leaf in given for x in named_by(leaf.keys[2:], plan.by_keys)
    )


def _missing(leaves: Sequence[GivenArgument], plan: Plan) -> list[Layout]:
    """The matrices of a plan for which there is no leaf of the shape; each leaf is one of them."""
    left = collections.Counter(x.shape for x in leaves)
    missing = []
    trained = plan.trained.layouts
    for x in [x for x in trained if not x.vector] or trained:
        shape = next((shape for shape in (x.shape, x.state_shape) if left[shape]), None)
        if shape is None:
            missing.append(x)
        else:
            left[shape] -= 1
    return missing


def _unclaimed(
    compiled: jax.stages.Compiled, given: Sequence[GivenArgument], plan: Plan
) -> Sequence[GivenArgument]:
    """The arguments that may be of the plan: where only other models are updated, theirs are not."""
    record = record_of(compiled)
    if record is None or record.of(plan):
        return given
    theirs = {i for update in record.updates for i in (*update.params, *update.state)}
    return [x for i, x in enumerate(given) if i not in theirs]


def _trees(given: Sequence[GivenArgument]) -> dict[Keys, list[GivenArgument]]:
    """The leaves of each tree of params."""
    trees: dict[Keys, list[GivenArgument]] = collections.defaultdict(list)
    counts = set[Keys]()
    for x in given:
        if tree := _tree_of_params(x.keys):
            trees[tree].append(x)
            if NAMELESS in x.keys and not x.shape:
                counts.add(tree)
    return {tree: leaves for tree, leaves in trees.items() if tree not in counts}


def _own(trees: dict[Keys, list[GivenArgument]], plan: Plan) -> Keys:
    """The tree of the plan's own params."""
    return max(trees, key=lambda tree: _likeness(tree, trees[tree], plan))


def is_of(keys: Keys, tree: Keys) -> bool:
    """True for a leaf of the state that these params are of."""
    return keys[: len(tree) - 1] == tree[:-1]


def _tree_of_params(keys: Keys) -> Keys | None:
    if NAMELESS in keys:
        return keys[: keys.index(NAMELESS) + 1]
    names = keys[2:]  # the first two say which argument it is
    if "params" not in names or STATE in names[: names.index("params")]:  # below it a layer may have any name
        return None
    return keys[: 3 + names.index("params")]


def _likeness(tree: Keys, leaves: Sequence[GivenArgument], plan: Plan) -> tuple[int, int]:
    """How many leaves are params of the plan, and how many of them are laid out as it says."""
    found = [(_layout_of(leaf.keys[len(tree) :], leaf.shape, plan), leaf) for leaf in leaves]
    mine = [(x, leaf) for x, leaf in found if x is not None]
    return len(mine), sum(leaf.sharding is None or _as_stored(x, leaf, plan) for x, leaf in mine)


def _layout_of(keys: Keys, shape: tuple[int, ...], plan: Plan) -> Layout | None:
    x = plan.by_keys.get(keys)
    if x is not None:
        return x if x.shape == shape else None
    named = any(not k.isdigit() for k in keys)
    return None if named else next((x for x in plan.layouts if x.shape == shape), None)


def _as_stored(x: Layout, leaf: GivenArgument, plan: Plan) -> bool:
    return math.prod(leaf.local) == x.size // shard_factor(x.stored, plan.mesh)
