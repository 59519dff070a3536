"""Loops in a function of stored weights.

[Note: a weight that every round uses]
A stack of layers stays stored, and each round gathers its own layer. A weight that is constant over the loop would be
gathered, and its gradient reduced, in every round: 96 Psi for 32 rounds of `tanh(h @ w)`. So it is gathered once before
the loop and once more before the backward loop. In between only its shard is kept (`core/made_twice.py`); inside of a
remat region the region does that. The backward loop sums the whole gradient, which is reduced once after it: 3 Psi.

The gradient is constrained to its used layout first, then to its shard: XLA's pass `while-loop-all-reduce-code-motion`
then moves the all-reduce out of the loop, where it becomes a reduce-scatter. Constrained to the shard at once the
gradient is reduced in every round (32 Psi). The pass moves it out of one loop only (jaxlib 0.10 to 0.12; openxla/xla
pull request 46440 is about nested ones): a gradient of nested loops is reduced once per round of the outer one.

[Note: a cast in a loop]
Where a loop casts a constant weight (an LSTM with fp32 params that computes in bf16), it is cast on its shard before
the loop too: the cast in the loop then changes nothing. Otherwise XLA all-reduces the sum of the gradients in bf16 and
casts it before each device takes its shard, which makes no reduce-scatter: 1 Psi in place of 1/2.

The weights that a loop holds whole are bounded (`loop_bytes`): beyond that the largest are gathered in every round. So
are tables whose rows are looked up in the loop: the pass added their gradients wrongly (openxla/xla issue 49143).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from jzero.comm.routes import LOOP, ROUNDS, Maker
from jzero.core.made_twice import made_twice
from jzero.core.ordering import after
from jzero.core.regions import bodies, loop_consts, rounds, scan_parts, scan_with, while_with
from jzero.gather.sharded_weight import LoopConstant, Weight, for_region, merged, unwrap
from jzero.gather.walk import Walk, before_loop, gathered, on_device, on_shards, plain
from jzero.gather.weight_graph import handed_by_scan, looked_up, read_narrow


def scan(eqn, values: list[Any], walk: Walk) -> list[Any]:
    """A scan: stacked weights stay stored; those in the carry and constant ones are gathered before it."""
    body, consts, carry = scan_parts(eqn)
    is_weight = [isinstance(v, Weight) for v in values]
    given, values = values, for_region(values)
    handed = handed_by_scan(eqn, is_weight)
    values[consts : consts + carry] = [gathered(v, walk) for v in values[consts : consts + carry]]
    is_weight = [isinstance(v, Weight) for v in values]
    several = rounds(eqn) > 1
    chosen = constants(values[:consts], walk, but=looked_up(body, is_weight)) if several else []
    values = _for_body(values, consts, chosen, walk)
    weights, dtypes = [values[i] for i in chosen], _cast_dtypes(eqn, values, chosen, walk)
    flat, rewrap = unwrap([v for i, v in enumerate(values) if i not in chosen])

    def run(wholes: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        rest, found = iter(rewrap(others)), dict(zip(chosen, wholes, strict=True))
        given = [LoopConstant(found[i]) if i in found else next(rest) for i in range(len(values))]
        return _scan(eqn, given, handed, walk)

    if not (walk.drops and any(w.moves for w in weights)) or walk.in_remat:
        wholes = [before_loop(w, walk, dtype) for w, dtype in zip(weights, dtypes, strict=True)]
        return merged(run(wholes, flat), handed, given)
    outs = made_twice(
        run,
        lambda i, shard: before_loop(dataclasses.replace(weights[i], shard=shard), walk, dtypes[i]),
        lambda shards, cotangents: _late(shards, cotangents, weights, walk),
        [w.shard for w in on_shards(weights, walk)],
        flat,
    )
    return merged(outs, handed, given)


def _for_body(values: Sequence[Any], consts: int, but: Collection[int], walk: Walk) -> list[Any]:
    """The values for a scan: weights in host memory are fetched, except those in `but` and stacks."""

    def stays(i: int, value: Any) -> bool:
        if not isinstance(value, Weight) or value.source.direct or i in but:
            return True
        return i >= consts and value.source.sliceable

    return [v if stays(i, v) else on_device([v], walk)[0] for i, v in enumerate(values)]


def _cast_dtypes(eqn, values: Sequence[Any], chosen: Sequence[int], walk: Walk) -> list[Any]:
    """Of the chosen weights, the narrower dtype that the loop casts them to, or None; see [Note: a cast in a loop]."""
    config = walk.plan.config
    if config.reduce_dtype is not None and not config.reduces_in_codes:
        return [None] * len(chosen)
    narrow = read_narrow(scan_parts(eqn)[0], [isinstance(v, Weight) for v in values])
    return [narrow.get(i) for i in chosen]


def _scan(eqn, values: list[Any], handed: Sequence[int | None], walk: Walk) -> list[Any]:
    """A scan of arrays, and of weights that are gathered in it; without what it hands back as it came."""
    _, consts, carry = scan_parts(eqn)
    ((jaxpr, known),), _ = bodies(eqn)
    flat, rewrap = unwrap(values)

    def body(args):
        outs = walk.run(jaxpr, known, rewrap(args, consts + carry, walk.plan.config.quantize_block))
        return plain(o for o, i in zip(outs, handed, strict=True) if i is None)

    return scan_with(eqn, body, flat)


def while_loop(eqn, values: list[Any], walk: Walk) -> list[Any]:
    """A while loop: the carry and constant weights are gathered before it. It has no backward pass."""
    consts = loop_consts(eqn)
    chosen = set(constants(values[:consts], walk))
    values = [gathered(v, walk) if i in chosen or i >= consts else v for i, v in enumerate(values)]
    return while_with(eqn, lambda *part: plain(walk.run(*part)), on_device(values, walk))


def constants(consts: Sequence[Any], walk: Walk, but: Collection[int] = ()) -> list[int]:
    """Positions of the constant weights to gather before a loop, the smallest first, within `loop_bytes`.

    One whose gradient is to be made in a wider dtype (`reduce_dtype`) is not: the loop sums it in its own.
    """
    weights = {i: v for i, v in enumerate(consts) if isinstance(v, Weight) and (v.moves or v.is_reduced)}
    left, found = walk.comm.weights.loop_bytes, []
    for i, weight in sorted(weights.items(), key=lambda row: row[1].nbytes):
        if i not in but and walk.route(weight, Maker(ROUNDS, weight.dtype)).where == LOOP:
            left -= weight.nbytes
            if left >= 0:
                found.append(i)
    return sorted(found)


def _late(shards, cotangents, weights: Sequence[Weight], walk: Walk):
    """The shards, available only when the backward pass has reached the loop."""
    shards, cotangents = after(shards, cotangents)
    pairs = zip(shards, weights, strict=True)
    return [walk.plan.constrain(x, w.stored) if w.source.direct else x for x, w in pairs], cotangents
