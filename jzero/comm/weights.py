"""Weights on their way from the stored to the used layout (stage 3)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jzero.comm.traced import gather_traced
from jzero.comm.transport import TRANSPORTS, AsIs, Transport
from jzero.comm.uses import GATHERS, Use
from jzero.layout.leaf_rule import Layout
from jzero.layout.specs import shard_factor, spec_axes
from jzero.sharding import Plan

LOOP_BYTES = 2**30
"""Whole bytes of the weights that are constant over a loop: enough for the output head of a model of 8 billion bf16
params (128256 x 4096). With as much again for its gradient that is 2.6 % of an 80 GB device."""
LOOP_BUCKETS = 8  # times `bucket_bytes`, if that is more than `LOOP_BYTES`


@dataclasses.dataclass(frozen=True)
class WeightGather:
    """The all-gather of a stored weight.

    Attributes:
      plan: gives the mesh.
      transport: the form in which weights travel.
    """

    plan: Plan
    transport: type[Transport] = dataclasses.field(default_factory=lambda: TRANSPORTS["weights"])

    SCOPE = "jzero.gather_weight"
    """`named_scope` of its operations, by which `explain` and `check` know them."""

    def __call__(
        self, shard: Any, stored: PartitionSpec, used: PartitionSpec, narrow: np.dtype | None = None
    ) -> Any:
        """The weight in its used layout and in the dtype of the shard.

        Args:
          shard: laid out as `stored`.
          stored, used: the two layouts.
          narrow: a dtype that holds its values, in which it travels. XLA itself puts a cast behind the gather in the
            forward pass, and in front of it in the backward pass.
        """
        if narrow is not None:
            return self(shard.astype(narrow), stored, used).astype(shard.dtype)
        constrain = self.plan.constrain
        transport = self.form(shard.shape, shard.dtype, stored, used)
        gather_traced(self.plan)
        with jax.named_scope(self.SCOPE):
            shard = constrain(shard, stored)
            # pinned behind the encoding too, or the partitioner would gather first
            parts = [
                part if part is shard else constrain(part, stored) for part in transport.encode(shard)
            ]
            whole = [constrain(part, used) for part in parts]
            found = transport.decode(whole, shard.dtype)
            return found if found is whole[0] else constrain(found, used)

    @property
    def loop_bytes(self) -> int:
        """The most bytes of whole weights that are gathered before a loop; others are gathered in each round."""
        return max(LOOP_BYTES, LOOP_BUCKETS * self.plan.bucket_bytes)

    def tangent(self, shard: Any, stored: PartitionSpec, used: PartitionSpec) -> Any:
        """The same for a tangent of the weight, which travels as it is: the gather is linear, an encoding is not."""
        return dataclasses.replace(self, transport=AsIs)(shard, stored, used)

    def form(self, shape: Sequence[int], dtype: np.dtype, stored: PartitionSpec, used: PartitionSpec) -> Transport:
        """The form in which a whole weight travels from its stored to its used layout."""
        split, taken = (shard_factor(spec, self.plan.mesh) for spec in (stored, used))
        return self.transport(tuple(shape), np.dtype(dtype), split // taken)

    def dtype(self, x: Layout, use: Use) -> np.dtype:
        """The dtype in which a param is gathered: the narrowest of its own, `compute_dtype` and that of its use."""
        known = [d for d in (x.dtype, self.plan.config.compute_dtype, use.dtype) if d is not None]
        return min(known, key=lambda dtype: dtype.itemsize)

    def held_bytes(self, x: Layout) -> int:
        """Bytes of a gathered param on one device, of one layer of a stack; 0 for one that is not gathered."""
        if x.stored == x.used:
            return 0
        form = self.form(x.shape, self.plan.config.compute_dtype or x.dtype, x.stored, x.used)
        return form.held_bytes // shard_factor(x.used, self.plan.mesh) // x.layers

    def wire(
        self, x: Layout, accumulate: int, uses: Sequence[Use]
    ) -> Iterator[tuple[tuple[str, ...], float]]:
        """(mesh axes, bytes that one device sends) of the gathers of a param in one step.

        Args:
          x: the layouts of the param.
          accumulate: micro-batches in a step; each gathers.
          uses: what the param is used for. With `reshard_after_forward=False` uses under `jax.grad` share one gather.
        """
        axes = tuple(a for a in spec_axes(x.stored) if a not in spec_axes(x.used))
        times = [(GATHERS[use.kind] * use.part, use) for use in uses]
        if not self.plan.config.reshard_after_forward:  # each forward pass gathers it once
            first = next((use for use in uses if use.has_gradient), None)
            times = [row for row in times if not row[1].has_gradient] + ([(1, first)] if first else [])
        whole = sum(n * self.form(x.shape, self.dtype(x, use), x.stored, x.used).sent_bytes for n, use in times)
        stored, used = (shard_factor(spec, self.plan.mesh) for spec in (x.stored, x.used))
        yield axes, accumulate * ring(stored / used) * whole / used


def ring(n: float) -> float:
    """The part of an array that a device sends in an all-gather or a reduce-scatter over n devices."""
    return (n - 1) / n
