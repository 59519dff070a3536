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

[Note: reduced on the way back]
Without more, XLA computes the gradients of the weights when it likes. With 1024 tokens per device it runs the
whole backward pass first and all weight gradients after it, their inputs kept (7 GB of a 7.5B GPT), and joins
reductions until one carries 2 GB of whole gradients. So each use of a large weight is tied on its way back: the
cotangent of the activation goes on only when the gradient of the weight is on its shard. Its reduction can run
beside the matmul that makes that cotangent. The small weights of a remat region (biases, norm scales), whose
gradients would keep their activations until the end, are tied together to the input of the region. Both ties
are the identity with a transpose of its own: nothing changes forward. A tie must be between values: XLA sees
through a barrier with a constant in it. 36 layers on 64 H100, stage 2 unrolled: 23.4 GB without ties, 18.7
with those of large weights, 17.2 with both.

[Note: a lookup on the way back]
The gradient of an embedding lookup is added into zeros of the size of the whole table, which XLA may make long
before. Here a loop makes it some columns at a time, and reduces these.
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
from jzero.layout import LARGE, P, spec_axes
from jzero.sharding import Plan


@dataclasses.dataclass(frozen=True)
class Weight:
    """A stored weight on its way to a use: the shard, its two layouts, and that of its reduced gradient."""

    shard: Any
    stored: PartitionSpec
    used: PartitionSpec
    grad: PartitionSpec

    @property
    def split(self) -> bool:
        """It has to be gathered before it is used."""
        return self.stored != self.used

    @property
    def nbytes(self) -> int:
        """Bytes of the whole weight."""
        return self.shard.size * self.shard.dtype.itemsize

    @property
    def large(self) -> bool:
        """Its gradient is reduced on its own: see [Note: reduced on the way back]."""
        return self.grad != self.used and self.nbytes >= LARGE

    def map(self, shard: Any, change: Callable[[PartitionSpec], PartitionSpec]) -> Weight:
        """Another array in its place, with each layout changed alike."""
        return Weight(shard, change(self.stored), change(self.used), change(self.grad))


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
        if jaxprs.row_lookup(eqn) and isinstance(values[0], Weight) and values[0].large:
            return self.lookup(eqn, *self.tied(values))
        large = [v for v in values if isinstance(v, Weight) and v.large]
        flat, rewrap = _unwrap(self.tied(self.tied_back(values, large)))

        def on_gathered(*flat):
            return jaxprs.bind(eqn, [self.gathered(v) for v in rewrap(flat)])

        plain = self.in_remat or not self.plan.config.row.params
        outs = on_gathered(*flat) if plain else jax.checkpoint(on_gathered)(*flat)
        self.remember(outs, values)
        return list(outs)

    def lookup(self, eqn, table: Weight, index: Any) -> list[Any]:
        """Rows of a table: see [Note: a lookup on the way back]."""
        rows, width = table.shard.shape
        columns_are_split = bool(spec_axes(P(*table.grad[1:])))
        parts = 1 if columns_are_split else _parts(width, table.nbytes // (4 * LARGE))

        def fn(index, shard):
            return jaxprs.bind(eqn, [self.gathered(dataclasses.replace(table, shard=shard)), index])

        def back(index, cotangent):
            def part(i, grad):
                some = jax.lax.dynamic_slice_in_dim(cotangent, i * (width // parts), width // parts, axis=-1)
                some = self.plan.constrain(jaxprs.lookup_gradient(eqn, index, some, rows), table.grad)
                return jax.lax.dynamic_update_slice_in_dim(grad, some, i * (width // parts), axis=1)

            zeros = self.plan.constrain(jax.numpy.zeros((rows, width), cotangent.dtype), table.grad)
            return [self.plan.constrain(jax.lax.fori_loop(0, parts, part, zeros), table.grad)]

        outs = jaxprs.linear(fn, back, [index], [table.shard])
        self.remember(outs, [table, index])
        return outs

    def tied_back(self, values: list[Any], weights: Sequence[Weight]) -> list[Any]:
        """See [Note: reduced on the way back]: activations whose cotangents wait for the gradients of weights."""
        flat, rewrap = _unwrap(values)
        waiting = [i for i, v in enumerate(values) if not isinstance(v, Weight) and _has_cotangent(v)]
        first = [i for i, v in enumerate(values) if any(v is w for w in weights)]
        if not waiting or not first:
            return values

        def back(*cotangents):
            grads = [self.reduced(c, values[i]) for i, c in zip(first, cotangents, strict=False)]
            return list(jax.lax.optimization_barrier((*grads, *cotangents[len(first) :])))

        both = first + waiting
        for i, v in zip(
            both, jaxprs.linear(lambda *x: list(x), back, [], [flat[i] for i in both]), strict=True
        ):
            flat[i] = v
        return rewrap(flat)

    def reduced(self, grad: Any, weight: Weight) -> Any:
        """The gradient of a weight, reduced: on its shard, or whole where that of a vector has to be."""
        vector = np.ndim(grad) <= 1 and not weight.split
        return self.plan.constrain(grad, weight.used if vector else weight.grad)

    def tied(self, values: list[Any]) -> list[Any]:
        """See [Note: prefetch]: weights that cannot be gathered before an earlier use is done."""
        if self.in_remat or len(self.recent) < self.plan.config.prefetch + 1:
            return values
        shards, rewrap = _unwrap(values)
        split = [i for i, v in enumerate(values) if isinstance(v, Weight) and v.split]
        if not split:
            return values
        *late, _ = jax.lax.optimization_barrier((*(shards[i] for i in split), self.recent[0]))
        for i, shard in zip(split, late, strict=True):
            shards[i] = self.plan.constrain(shard, values[i].stored)
        return rewrap(shards)

    def remember(self, outs: Sequence[Any], values: Sequence[Any]) -> None:
        """An output that says when this use is done; one that reads no activation (a reshape, a lookup) says nothing.

        What the first of them reads comes first: it says when all before it is done.
        """
        read = [v for v in values if not isinstance(v, Weight) and _has_cotangent(v)]
        done = [o for o in outs if not isinstance(o, Weight) and np.ndim(o)]
        if done and read and not self.in_remat:
            self.recent.extend([done[0]] if self.recent else [read[0], done[0]])

    def remember_loop(self, outs: Sequence[Any]) -> None:
        """A loop is many uses: what is gathered after it waits for its end, whatever the prefetch distance."""
        done = [o for o in outs if _has_cotangent(o)]
        if done and not self.in_remat:
            self.recent.extend(done[:1] * (self.plan.config.prefetch + 1))

    def gathered(self, value: Any) -> Any:
        """The used layout of a weight; anything else as it is."""
        if not isinstance(value, Weight):
            return value
        if not value.split:
            return value.shard

        def gather(shard):
            with jax.named_scope("jzero.gather_weight"):
                return [self.plan.constrain(self.plan.constrain(shard, value.stored), value.used)]

        # By way of the used layout XLA joins an all-reduce and a slice to a reduce-scatter, where all devices of the
        # batch share the gradient. With replicas or hpZ it would all-reduce whole gradients: straight to the shard
        # (not always: with few tokens XLA may then move activations).
        shared_by_all = value.grad == value.stored and set(self.plan.batch_axes) <= set(spec_axes(value.grad))

        def reduce(grad):
            first = value.used if shared_by_all or np.ndim(grad) <= 1 else value.grad
            return [self.plan.constrain(self.plan.constrain(grad, first), value.grad)]

        return jaxprs.linear(gather, reduce, [], [value.shard])[0]

    def remat(self, eqn, values: list[Any]) -> list[Any]:
        """The user's own remat region: its inputs are shards, and what it gathers is never saved."""
        small = [v for v in values if isinstance(v, Weight) and not v.large]
        if not self.in_remat and any(isinstance(v, Weight) and v.large for v in values):
            values = self.tied_back(values, small)
        flat, rewrap = _unwrap(self.tied(values))
        inner = Walk(self.plan, in_remat=True)

        def region(*flat):
            return inner.plain(inner.run(*jaxprs.opened(eqn.params["jaxpr"]), rewrap(flat)))

        policy = eqn.params["policy"]
        policy = never_save_gathered(policy) if self.plan.config.row.params else policy
        outs = jax.checkpoint(region, prevent_cse=eqn.params["prevent_cse"], policy=policy)(*flat)
        self.remember(outs, values)
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
        self.remember_loop([*state, *ys])
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
                new = old.map(new, lambda spec, cut=cut: P(*spec[cut:]))
            out.append(new)
        return out

    return [v.shard if isinstance(v, Weight) else v for v in values], rewrap


def _cast(walk: Walk, eqn, weight: Weight):
    return dataclasses.replace(weight, shard=jaxprs.bind(eqn, [weight.shard])[0])


def _transpose(walk: Walk, eqn, weight: Weight):
    order = eqn.params["permutation"]
    shard = jaxprs.bind(eqn, [weight.shard])[0]
    return weight.map(shard, lambda spec: P(*(_padded(spec, len(order))[i] for i in order)))


def _squeeze(walk: Walk, eqn, weight: Weight):
    ndim = np.ndim(weight.shard)
    keep = [i for i in range(ndim) if i not in eqn.params["dimensions"]]
    shard = jaxprs.bind(eqn, [weight.shard])[0]
    return weight.map(shard, lambda spec: P(*(_padded(spec, ndim)[i] for i in keep)))


def _padded(spec: PartitionSpec, ndim: int) -> list[Any]:
    return [spec[i] if i < len(spec) else None for i in range(ndim)]


def _has_cotangent(value: Any) -> bool:
    return bool(np.ndim(value)) and jax.numpy.issubdtype(value.dtype, jax.numpy.inexact)


def _parts(width: int, wanted: int) -> int:
    """The smallest divisor of `width` that is at least `wanted`."""
    return next((n for n in range(max(wanted, 1), min(width, 1024) + 1) if width % n == 0), 1)


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
        return False if prim.name in ("sharding_constraint", jaxprs.LINEAR) else policy(prim, *args, **params)

    return without_gathered
