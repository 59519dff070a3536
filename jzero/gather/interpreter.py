"""A jaxpr evaluated again with one rule added: a stored weight is gathered where it is used.

[Note: gather on use]
The user's function is traced to a jaxpr and evaluated again with one rule added: where an equation reads a
stored weight, the weight is constrained to its used layout right there. Casts, squeezes and transposes stay
on the shard and come before the gather. `jit` is walked into; so are `scan`, `while` and `cond` bodies
(stacked weights stay stored, the slice of one layer is gathered) and the user's own remat regions.

Outside of a remat region the equation alone is put under `jax.checkpoint`: what it keeps for the backward
pass is its activation, which is needed anyway, and the shard, which is alive anyway. The gathered weight is
never kept; the backward pass gathers again. Inside a remat region the gather is plain: that region is
computed again as a whole, and a second checkpoint in it would gather a third time.

[Note: kept]
A weight of `Plan.kept_gathered` takes the place of its shard in the walk when it is first read: gathered once for all
its uses, before the remat region that reads it and not in it, so that the backward pass has it already.
From there on it is a weight of stage 2, with the same order of reductions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jzero.core import jaxprs
from jzero.core.block_input import BEGIN, begin_again
from jzero.core.graph import Node
from jzero.core.linear import LINEAR
from jzero.core.primitives import REMAT
from jzero.core.products import Product
from jzero.core.regions import bodies, handed_through, loop_consts, remat_with, switch_with
from jzero.core.token_loss_rules import GRADIENTS, LOSS, has_loss
from jzero.core.types import Jaxpr
from jzero.gather import loops
from jzero.gather.sharded_weight import (
    ON_SHARD,
    LoopConstant,
    Weight,
    as_arrays,
    for_region,
    is_cut_on_shard,
    merged,
    pieces,
    unwrap,
)
from jzero.gather.ties import find_ties, tie
from jzero.gather.tiled_loss import loss_on_devices
from jzero.gather.walk import Walk, kept, on_device, on_shards, plain
from jzero.gather.weight_graph import WeightGraph
from jzero.gather.weight_ops import use

Rule = Callable[[Any, list[Any], Walk], list[Any]]


def evaluate(
    walk: Walk, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], *, cast: Any = None
) -> list[Any]:
    """Outputs of the jaxpr; a weight that is passed through stays a weight.

    `cast`: the dtype to which it casts its weights first (`compute_dtype`); one that is passed through is not cast.
    """
    split = [a.split_dims if isinstance(a, Weight) else None for a in args]
    constants = [isinstance(a, LoopConstant) for a in args]
    graph = WeightGraph(jaxpr, consts, [isinstance(a, Weight) for a in args], split, constants)
    env: dict[int, Any] = {**graph.known, **dict(zip(graph.ins, args, strict=True))}
    env.update(_entered(graph, env, walk))
    ties = find_ties(graph, env, walk)
    for number, node in enumerate(graph.nodes):
        for found in ties.get((number, False), ()):
            tie(found, graph, env, walk)
        with node.scope():
            if walk.plan.kept_gathered:
                env.update({i: kept(env[i], walk) for i in _to_keep(node, env)})
            outs = equation(node.eqn, [env[i] for i in node.ins], walk)
        env.update(zip(node.outs, outs, strict=True))
        for found in ties.get((number, True), ()):
            tie(found, graph, env, walk)
    return [env[graph.as_given(i, cast) if cast else i] for i in graph.outs]


def _entered(graph: WeightGraph, env, walk: Walk) -> dict[int, Weight]:
    """The weights among the arguments, as they enter here: see `ShardSource.entered`."""
    used, regions = graph.uses_by_root((*REMAT, "scan"))
    weights = {k: env[k] for k in graph.ins if isinstance(env[k], Weight)}
    return {k: w.entered(walk.comm, used=k in used, regions=regions[k]) for k, w in weights.items()}


def _to_keep(node: Node, env) -> list[int]:
    """The weights that a node is the first to read whole; see [Note: kept].

    Not a stack that a scan takes layer by layer, nor what a loop or a branch may not read. A cast stays on the
    shard; a transpose does not, since the weight may have been read without it.
    """
    name = node.name
    if name in ("convert_element_type", "while", "cond"):
        return []
    ins = node.ins[: loop_consts(node.eqn)] if name == "scan" else node.ins
    return [a for a in dict.fromkeys(ins) if isinstance(env[a], Weight) and env[a].split and env[a].keeps]


def equation(eqn, values: list[Any], walk: Walk) -> list[Any]:
    """One equation: kept on the shard, walked into, or a use.

    Raises:
      ValueError: a param where `jzero.remat` takes the activations.
    """
    name = eqn.primitive.name
    of_weights = any(isinstance(v, Weight) for v in values)
    if not of_weights or name not in REMAT:
        values = as_arrays(values)
    if not of_weights:
        if walk.losses and (name in (LOSS, GRADIENTS) or any(has_loss(body) for body, _ in bodies(eqn)[0])):
            return RULES[name](eqn, values, walk)
        return begin_again(eqn, values[0]) if name == BEGIN else jaxprs.bind(eqn, values)
    if name == BEGIN:
        raise ValueError(
            f"jzero.remat: a param of shape {values[0].shape} was taken for the block's input. Pass the position of "
            "the activations as argnums=; `self` counts as 0."
        )
    changed = None
    if name in ON_SHARD:
        changed = [ON_SHARD[name](eqn, values[0])]
    elif is_cut_on_shard(eqn, values[0].split_dims if isinstance(values[0], Weight) else None):
        changed = pieces(eqn, values[0], walk.plan.config.quantize_block)
    if changed is not None:
        # pinned: the gathered layout would spread back over a cast before a remat region (`compute_dtype`)
        return changed if walk.in_remat else on_shards(changed, walk)
    return RULES.get(name, use)(eqn, values, walk)


def remat(eqn, values: list[Any], walk: Walk) -> list[Any]:
    """The user's own remat region: its inputs are shards, and what it gathers is never saved."""
    flat, rewrap = unwrap(for_region(values))
    size = sum(v.held_bytes for v in values if isinstance(v, Weight))
    inner = dataclasses.replace(walk, in_remat=True, ordered=walk.ordered and size >= walk.plan.bucket_bytes)
    handed = handed_through(eqn, [isinstance(v, Weight) for v in values])
    ((jaxpr, consts),), _ = bodies(eqn)

    def region(*flat):
        outs = inner.run(jaxpr, consts, rewrap(flat))
        return plain(o for o, i in zip(outs, handed, strict=True) if i is None)

    outs = remat_with(eqn, region, flat, lambda policy: policy_of(policy, drops=walk.drops))
    return merged(outs, handed, values)


def cond(eqn, values: list[Any], walk: Walk) -> list[Any]:
    """Branches: each gathers what it uses, when it is taken."""
    given, values = values, [values[0], *on_device(values[1:], walk)]
    flat, rewrap = unwrap(values[1:])
    handed = handed_through(eqn, [isinstance(v, Weight) for v in values[1:]])

    def branch(jaxpr, consts):
        def run(*flat):
            outs = walk.run(jaxpr, consts, rewrap(flat))
            return plain(o for o, i in zip(outs, handed, strict=True) if i is None)

        return run

    outs = switch_with(eqn, [branch(*body) for body in bodies(eqn)[0]], values[0], flat)
    return merged(outs, handed, given[1:])


RULES: dict[str, Rule] = {
    **dict.fromkeys(REMAT, remat), "scan": loops.scan, "while": loops.while_loop, "cond": cond, LOSS: loss_on_devices,
    GRADIENTS: loss_on_devices,
}  # fmt: skip
"""By primitive, what becomes of an equation that reads weights; of all others `use`."""


def policy_of(policy, *, drops: bool):
    """The user's checkpoint policy, applied to the equation that a walked product stands for.

    With `drops` it never saves gathered weights: they are gathered again.
    """
    if policy is None:
        return None

    def decide(prim, *args, **params):
        if prim.name == LINEAR and isinstance(params["fn"], Product):
            product = params["fn"].eqn
            return policy(product.primitive, *args, **product.params)
        if drops and prim.name in ("sharding_constraint", LINEAR):
            return False
        return policy(prim, *args, **params)

    return decide
