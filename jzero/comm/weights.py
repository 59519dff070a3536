"""Weights on their way from the stored to the used layout (stage 3)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jzero.comm.traced import gather_traced
from jzero.comm.transport import Transport, sent, transport_of
from jzero.comm.uses import GATHERS, Use
from jzero.layout.blocks import Hop, hops, why_not_in_codes
from jzero.layout.gathered import gathered_bytes, is_in_pieces
from jzero.layout.leaf_rule import Layout
from jzero.layout.specs import make_spec, shard_factor, spec_axes, spec_entries
from jzero.sharding import Plan

LOOP_BYTES = 2**30
"""Whole bytes of the weights that are constant over a loop: enough for the output head of a model of 8 billion bf16
params (128256 x 4096). With as much again for its gradient that is 2.6 % of an 80 GB device."""
STACK = -1
"""In an order of dims, the one along which layers are stacked: it comes first."""
LOOP_BUCKETS = 8  # times `bucket_bytes`, if that is more than `LOOP_BYTES`


@dataclasses.dataclass(frozen=True)
class WeightGather:
    """The all-gather of a stored weight.

    Attributes:
      plan: gives the mesh, and the form in which weights travel.
    """

    plan: Plan

    SCOPE = "jzero.gather_weight"
    """`named_scope` of its operations, by which `explain` and `check` know them."""

    def __call__(
        self, shard: jax.Array, stored: PartitionSpec, used: PartitionSpec, narrow: np.dtype | None = None,
        order: Sequence[int] | None = None,
    ) -> jax.Array:  # fmt: skip
        """The weight in its used layout and in the dtype of the shard.

        Args:
          shard: laid out as `stored`.
          stored, used: the two layouts.
          narrow: a dtype that holds its values, in which it travels. XLA itself puts a cast behind the gather in the
            forward pass, and in front of it in the backward pass.
          order: of a weight that travels in codes: see `Weight.order`. None: it travels as it is.
        """
        if narrow is not None:
            return self(shard.astype(narrow), stored, used, order=order).astype(shard.dtype)
        constrain = self.plan.constrain
        gather_traced(self.plan)
        with jax.named_scope(self.SCOPE):
            shard = constrain(shard, stored)
            if order is None:
                return constrain(shard, used)
            ways, dims = self._of_param(shard, stored, used, order)
            whole = jax.lax.transpose(shard, dims)
            for way in ways:
                whole = sent(way, whole, constrain)
            return constrain(jax.lax.transpose(whole, np.argsort(dims)), used)

    def _of_param(
        self, shard: jax.Array, stored: PartitionSpec, used: PartitionSpec, order: Sequence[int]
    ) -> tuple[list[Transport], list[int]]:
        """The hops of a weight whose dims are in the order of the param, and its dims in that order.

        Blocks are those of the param, so that all uses of a weight see the same values, transposed or not.
        """
        dims = in_order_of_param(order)
        shape = [shard.shape[i] for i in dims]
        before, after = (
            make_spec([entries[i] for i in dims])
            for entries in (spec_entries(spec, len(dims)) for spec in (stored, used))
        )
        found = hops(shape, before, after, self.plan.config, self.plan.mesh, stack=STACK in order)
        return [transport_of(hop, shape, shard.dtype, self.plan.mesh) for hop in found], dims

    @property
    def loop_bytes(self) -> int:
        """The most bytes of whole weights that are gathered before a loop; others are gathered in each round."""
        return max(LOOP_BYTES, LOOP_BUCKETS * self.plan.bucket_bytes)

    def order(self, x: Layout) -> tuple[int, ...] | None:
        """The dims of a param, as `Weight.order` has them; None if it travels as it is."""
        if self.plan.config.gather_dtype is None or x.stored == x.used or why_not_in_codes(x, self.plan):
            return None
        return tuple(STACK if dim == x.scan_dim else dim for dim in range(len(x.shape)))

    def dtype(self, x: Layout, use: Use) -> np.dtype:
        """The dtype in which a param is gathered as it is: the narrowest of its own, `compute_dtype` and its use's."""
        known = [d for d in (x.dtype, self.plan.config.compute_dtype, use.dtype) if d is not None]
        return min(known, key=lambda dtype: dtype.itemsize)

    def held_bytes(self, x: Layout) -> int:
        """Bytes of a gathered param on one device, of one layer of a stack; 0 for one that is not gathered."""
        if x.stored == x.used:
            return 0
        if is_in_pieces(x, self.plan):
            return self.plan.whole_bytes // 2  # two of four, see `gather/large_weights.py`
        return gathered_bytes(x, self.plan)

    def wire(
        self, x: Layout, accumulate: int, uses: Sequence[Use]
    ) -> Iterator[tuple[tuple[str, ...], float]]:
        """(mesh axes, bytes that one device sends) of the gathers of a param in one step.

        Args:
          x: the layouts of the param.
          accumulate: micro-batches in a step; each gathers.
          uses: what the param is used for. Uses of one that stays gathered share a gather under `jax.grad`.
        """
        in_pieces = is_in_pieces(x, self.plan)
        times = [(2 if in_pieces and use.kind == "loss" else GATHERS[use.kind], use) for use in uses]
        times = [(n * use.part, use) for n, use in times]
        if x.name in self.plan.kept_gathered:  # each forward pass gathers it once
            first = next((use for use in uses if use.has_gradient), None)
            times = [row for row in times if not row[1].has_gradient] + ([(1, first)] if first else [])
        layer = x.layer_shape, x.of_layer(x.stored), x.of_layer(x.used)
        layers = x.layers * shard_factor(layer[2], self.plan.mesh) / shard_factor(x.used, self.plan.mesh)  # a device's
        codes = self.order(x) is not None
        found = hops(*layer, self.plan.config, self.plan.mesh) if codes else [Hop(*layer[1:])]
        for hop in found:
            before, after = (shard_factor(spec, self.plan.mesh) for spec in (hop.before, hop.after))
            ways = ((n, transport_of(hop, x.layer_shape, self.dtype(x, use), self.plan.mesh)) for n, use in times)
            whole = layers * sum(n * way.sent_bytes for n, way in ways)
            axes = tuple(a for a in spec_axes(hop.before) if a not in spec_axes(hop.after))
            yield axes, accumulate * ring(before / after) * whole / after


def in_order_of_param(order: Sequence[int]) -> list[int]:
    """The dims of a weight in the order that they have in its param, the dim of a stack first; see `Weight.order`."""
    return [int(i) for i in np.argsort(order)]


def ring(n: float) -> float:
    """The part of an array that a device sends in an all-gather or a reduce-scatter over n devices."""
    return (n - 1) / n
