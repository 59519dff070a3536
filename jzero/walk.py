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

[Note: prefetch]
In straight-line code nothing keeps XLA from gathering every weight at the start. An optimization barrier
ties each gather to the output of an earlier use: with `prefetch=1` a weight (or all weights of a remat
region) can be gathered while the use before it runs, and not earlier. The barrier's result is constrained to
the stored layout again, or the partitioner would move the gather in front of it.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jzero import jaxprs
from jzero.layout import P
from jzero.sharding import Plan


@dataclasses.dataclass(frozen=True)
class Weight:
    """A stored weight on its way to a use: the shard, and its two layouts."""

    shard: Any
    stored: PartitionSpec
    used: PartitionSpec


class Walk:
    """One evaluation of a jaxpr with the gather rule.

    Attributes:
      plan: gives the mesh and the prefetch distance.
      in_remat: inside a region that is computed again as a whole.
      recent: outputs of the last uses, oldest first, to tie the next gathers to.
    """

    def __init__(self, plan: Plan, *, in_remat: bool = False):
        self.plan, self.in_remat = plan, in_remat
        self.recent: collections.deque[Any] = collections.deque(maxlen=plan.config.prefetch + 1)

    def run(self, jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """Outputs of the jaxpr; a weight that is passed through stays a weight."""
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))

        def read(atom):
            return atom.val if jaxprs.is_literal(atom) else env[atom]

        for eqn in jaxpr.eqns:
            values = [read(a) for a in eqn.invars]
            with jaxprs.scope_of(eqn):
                outs = self.equation(eqn, values)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(a) for a in jaxpr.outvars]

    def equation(self, eqn, values: list[Any]) -> list[Any]:
        """One equation: kept on the shard, walked into, or a use."""
        if not any(isinstance(v, Weight) for v in values):
            return jaxprs.bind(eqn, values)
        name = eqn.primitive.name
        if name in _ON_SHARD:
            kept = _ON_SHARD[name](self, eqn, values[0])
            return self.use(eqn, values) if kept is None else [kept]
        if name in jaxprs.INLINE:
            return self.run(*jaxprs.opened(eqn.params["jaxpr"]), values)
        if name in jaxprs.REMAT:
            return self.remat(eqn, values)
        if name in ("scan", "while", "cond"):
            return getattr(self, f"{name}_")(eqn, values)
        return self.use(eqn, values)

    def use(self, eqn, values: list[Any]) -> list[Any]:
        """Gather the weights that the equation reads, bind it, and let go of them."""
        flat, rewrap = _unwrap(self.tied(values))

        def on_gathered(*flat):
            return jaxprs.bind(eqn, [self.gathered(v) for v in rewrap(flat)])

        outs = on_gathered(*flat) if self.in_remat else jax.checkpoint(on_gathered)(*flat)
        self.remember(outs)
        return list(outs)

    def tied(self, values: list[Any]) -> list[Any]:
        """See [Note: prefetch]: weights that cannot be gathered before an earlier use is done."""
        if self.in_remat or len(self.recent) < self.plan.config.prefetch + 1:
            return values
        shards, rewrap = _unwrap(values)
        split = [i for i, v in enumerate(values) if isinstance(v, Weight) and v.stored != v.used]
        if not split:
            return values
        *late, _ = jax.lax.optimization_barrier((*(shards[i] for i in split), self.recent[0]))
        for i, shard in zip(split, late, strict=True):
            shards[i] = self.plan.constrain(shard, values[i].stored)
        return rewrap(shards)

    def remember(self, outs: Sequence[Any]) -> None:
        """An output that says when this use is done."""
        done = [o for o in outs if not isinstance(o, Weight) and np.ndim(o)]
        if done and not self.in_remat:
            self.recent.append(done[0])

    def gathered(self, value: Any) -> Any:
        """The used layout of a weight; anything else as it is."""
        if not isinstance(value, Weight):
            return value
        if value.stored == value.used:
            return value.shard
        with jax.named_scope("jzero.gather_weight"):
            return self.plan.constrain(self.plan.constrain(value.shard, value.stored), value.used)

    def remat(self, eqn, values: list[Any]) -> list[Any]:
        """The user's own remat region: its inputs are shards, and what it gathers is never saved."""
        flat, rewrap = _unwrap(self.tied(values))
        inner = Walk(self.plan, in_remat=True)

        def region(*flat):
            return inner.plain(inner.run(*jaxprs.opened(eqn.params["jaxpr"]), rewrap(flat)))

        policy = never_save_gathered(eqn.params["policy"])
        outs = jax.checkpoint(region, prevent_cse=eqn.params["prevent_cse"], policy=policy)(*flat)
        self.remember(outs)
        return list(outs)

    def plain(self, outs: Sequence[Any]) -> list[Any]:
        """Results that leave a region are arrays: a weight that is passed through leaves as its shard."""
        return [o.shard if isinstance(o, Weight) else o for o in outs]

    def scan_(self, eqn, values: list[Any]) -> list[Any]:
        """A scan: constants and stacked weights stay stored; a weight in the carry is gathered before it."""
        p = eqn.params
        consts, carry = jaxprs.scan_counts(p)
        flat, rewrap = _unwrap(
            values[:consts]
            + [self.gathered(v) for v in values[consts : consts + carry]]
            + values[consts + carry :]
        )

        def body(state, xs):
            inner = Walk(self.plan, in_remat=self.in_remat)
            args = rewrap([*flat[:consts], *state, *xs], sliced_from=consts + carry)
            outs = inner.plain(inner.run(*jaxprs.opened(p["jaxpr"]), args))
            return outs[:carry], outs[carry:]

        state, ys = jax.lax.scan(
            body, list(flat[consts : consts + carry]), list(flat[consts + carry :]),
            length=p["length"], reverse=p["reverse"], unroll=p["unroll"],
        )  # fmt: skip
        return [*state, *ys]

    def while_(self, eqn, values: list[Any]) -> list[Any]:
        """A while loop: constants stay stored, the carry is gathered before it."""
        p = eqn.params
        a, b = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
        carry = [self.gathered(v) for v in values[b:]]

        def run(jaxpr, consts, state):
            inner = Walk(self.plan, in_remat=self.in_remat)
            return inner.plain(inner.run(*jaxprs.opened(jaxpr), [*consts, *state]))

        return jax.lax.while_loop(
            lambda s: run(p["cond_jaxpr"], values[:a], s)[0],
            lambda s: run(p["body_jaxpr"], values[a:b], s),
            carry,
        )

    def cond_(self, eqn, values: list[Any]) -> list[Any]:
        """Branches: each gathers what it uses, when it is taken."""
        flat, rewrap = _unwrap(values[1:])

        def branch(closed):
            def run(*flat):
                inner = Walk(self.plan, in_remat=self.in_remat)
                return inner.plain(inner.run(*jaxprs.opened(closed), rewrap(flat)))

            return run

        index = values[0].astype(np.int32) if np.dtype(values[0].dtype) == bool else values[0]
        return list(jax.lax.switch(index, [branch(c) for c in eqn.params["branches"]], *flat))


def _unwrap(values: Sequence[Any]):
    """Arrays for values, and a function that makes weights of them again.

    `rewrap(flat, sliced_from=i)`: from position i on, the arrays have lost their leading (scanned) dim.
    """

    def rewrap(flat, sliced_from: int | None = None):
        out = []
        for i, (new, old) in enumerate(zip(flat, values, strict=True)):
            if isinstance(old, Weight):
                cut = int(sliced_from is not None and i >= sliced_from)
                new = Weight(new, P(*old.stored[cut:]), P(*old.used[cut:]))
            out.append(new)
        return out

    return [v.shard if isinstance(v, Weight) else v for v in values], rewrap


def _cast(walk: Walk, eqn, weight: Weight):
    return dataclasses.replace(weight, shard=jaxprs.bind(eqn, [weight.shard])[0])


def _transpose(walk: Walk, eqn, weight: Weight):
    order = eqn.params["permutation"]
    stored, used = (P(*(_padded(s, len(order))[i] for i in order)) for s in (weight.stored, weight.used))
    return Weight(jaxprs.bind(eqn, [weight.shard])[0], stored, used)


def _squeeze(walk: Walk, eqn, weight: Weight):
    gone = eqn.params["dimensions"]
    keep = [i for i in range(np.ndim(weight.shard)) if i not in gone]
    stored, used = (
        P(*(_padded(s, np.ndim(weight.shard))[i] for i in keep)) for s in (weight.stored, weight.used)
    )
    return Weight(jaxprs.bind(eqn, [weight.shard])[0], stored, used)


def _padded(spec: PartitionSpec, ndim: int) -> list[Any]:
    return [spec[i] if i < len(spec) else None for i in range(ndim)]


_ON_SHARD: dict[str, Callable[[Walk, Any, Weight], Weight | None]] = {
    "convert_element_type": _cast,
    "copy": _cast,
    "transpose": _transpose,
    "squeeze": _squeeze,
}


def never_save_gathered(policy):
    """The user's checkpoint policy, minus gathered weights: those are gathered again."""
    if policy is None:
        return None

    def without_gathered(prim, *args, **params):
        return False if prim.name == "sharding_constraint" else policy(prim, *args, **params)

    return without_gathered
