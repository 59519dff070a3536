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

import abc
import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from jzero.core.linear import linear
from jzero.core.made_twice import made_twice
from jzero.core.ordering import after
from jzero.core.regions import bodies, loop_consts, rounds, scan_parts, scan_with, while_with
from jzero.gather.sharded_weight import Weight, for_region, merged, unwrap
from jzero.gather.weight_graph import handed_by_scan, looked_up, read_narrow
from jzero.gather.weight_ops import WeightOps


class LoopOps(WeightOps, abc.ABC):
    """How weights are used in the loops of a function."""

    @abc.abstractmethod
    def inner(self) -> Any:
        """An interpreter for the body of a loop or a branch."""

    def plain(self, outs: Iterable[Any]) -> list[Any]:
        """Results that leave a region are arrays: a weight that is passed through leaves as its shard."""
        return [o.leaving if isinstance(o, Weight) else o for o in outs]

    def scan_(self, eqn, values: list[Any]) -> list[Any]:
        """A scan: stacked weights stay stored; those in the carry and constant ones are gathered before it."""
        _, consts, carry = scan_parts(eqn)
        given, values = values, for_region(values)
        handed = handed_by_scan(eqn, [isinstance(v, Weight) for v in values])
        values[consts : consts + carry] = map(self.gathered, values[consts : consts + carry])
        several = rounds(eqn) > 1
        chosen = self.before_loop(values[:consts], but=self._tables(eqn, values)) if several else []
        values = self._for_body(values, consts, chosen)
        weights, narrow = [values[i] for i in chosen], self._narrow(eqn, values)
        dtypes = [narrow.get(i) for i in chosen]
        flat, rewrap = unwrap([v for i, v in enumerate(values) if i not in chosen])

        def run(wholes: Sequence[Any], others: Sequence[Any]) -> list[Any]:
            rest, found = iter(rewrap(others)), dict(zip(chosen, wholes, strict=True))
            return self._scan(eqn, [found[i] if i in found else next(rest) for i in range(len(values))], handed)

        if not (self.drops and any(w.moves for w in weights)) or self.in_remat:
            return merged(run(list(map(self.whole, weights, dtypes)), flat), handed, given)
        outs = made_twice(
            run,
            lambda i, shard: self.whole(dataclasses.replace(weights[i], shard=shard), dtypes[i]),
            lambda shards, cotangents: self._late(shards, cotangents, weights),
            [w.shard for w in self.on_shards(weights)],
            flat,
        )
        return merged(outs, handed, given)

    def _for_body(self, values: Sequence[Any], consts: int, but: Collection[int]) -> list[Any]:
        """What the body of a scan reads: of weights in host memory only stacks, which it takes layer by layer."""

        def stays(i: int, value: Any) -> bool:
            if not isinstance(value, Weight) or value.host is None or i in but:
                return True
            return i >= consts and value.host.only_casts

        return [v if stays(i, v) else self.on_device([v])[0] for i, v in enumerate(values)]

    def _tables(self, eqn, values: Sequence[Any]) -> set[int]:
        """Positions of the weights whose rows are looked up in the loop."""
        return looked_up(scan_parts(eqn)[0], [isinstance(v, Weight) for v in values])

    def _narrow(self, eqn, values: Sequence[Any]) -> dict[int, Any]:
        """By position of a weight, the narrower dtype that the loop casts it to; see [Note: a cast in a loop]."""
        if self.plan.config.reduce_dtype is not None:
            return {}
        return read_narrow(scan_parts(eqn)[0], [isinstance(v, Weight) for v in values])

    def _scan(self, eqn, values: list[Any], handed: Sequence[int | None]) -> list[Any]:
        """A scan of arrays, and of weights that are gathered in it; without what it hands back as it came."""
        _, consts, carry = scan_parts(eqn)
        ((jaxpr, known),), _ = bodies(eqn)
        flat, rewrap = unwrap(values)

        def body(args):
            outs = self.inner().run(jaxpr, known, rewrap(args, sliced_from=consts + carry))
            return self.plain(o for o, i in zip(outs, handed, strict=True) if i is None)

        return scan_with(eqn, body, flat)

    def while_(self, eqn, values: list[Any]) -> list[Any]:
        """A while loop: the carry and constant weights are gathered before it. It has no backward pass."""
        consts = loop_consts(eqn)
        chosen = set(self.before_loop(values[:consts]))
        values = [self.gathered(v) if i in chosen or i >= consts else v for i, v in enumerate(values)]
        values = self.on_device(values)
        return while_with(eqn, lambda *part: self.plain(self.inner().run(*part)), values)

    def before_loop(self, consts: Sequence[Any], but: Collection[int] = ()) -> list[int]:
        """Positions of the constant weights to gather before a loop, the smallest first, within `loop_bytes`.

        One whose gradient is to be made in a wider dtype (`reduce_dtype`) is not: the loop sums it in its own.
        """
        weights = {i: v for i, v in enumerate(consts) if isinstance(v, Weight) and (v.moves or v.is_reduced)}
        left, found = self.comm.weights.loop_bytes, []
        for i, weight in sorted(weights.items(), key=lambda row: row[1].nbytes):
            if i not in but and self.wide(weight) is None:
                left -= weight.nbytes
                if left >= 0:
                    found.append(i)
        return sorted(found)

    def whole(self, weight: Weight, dtype: Any = None) -> Any:
        """A weight for all rounds of a loop, the sum of whose gradients is reduced once; `dtype`: that of a cast."""
        if dtype is not None:
            weight = weight.fetched(self.comm)
            shard = weight.shard.astype(dtype)
            return self.whole(dataclasses.replace(weight, shard=shard, narrow=None)).astype(weight.shard.dtype)
        weight = weight.fetched(self.comm)
        gather, used = self.comm.weights, weight.used
        self.warn_of_dtype(weight)

        def reduce(grad):
            return [self.comm.gradients.by_layout(grad, used, weight.grad, whole_first=True)]

        if not weight.split:
            return linear(lambda x: [x], reduce, [], [weight.shard])[0]
        return linear(
            lambda x: [gather(x, weight.stored, used, weight.narrow)], reduce, [], [weight.shard],
            tangent=lambda x: [gather.tangent(x, weight.stored, used)],
        )[0]  # fmt: skip

    def _late(self, shards, cotangents, weights: Sequence[Weight]):
        """Shards that are there only when the backward pass has come to the loop."""
        shards, cotangents = after(shards, cotangents)
        pairs = zip(shards, weights, strict=True)
        return [x if w.host else self.plan.constrain(x, w.stored) for x, w in pairs], cotangents
