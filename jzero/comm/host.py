"""Params and gradients between host and device memory (ZeRO-Infinity); the optimizer state has `stream/` for that."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
from jax.sharding import PartitionSpec

from jzero.comm.uses import GATHERS, Use
from jzero.layout.leaf_rule import Layout
from jzero.layout.placement import HOST, memory_kind
from jzero.layout.specs import shard_factor
from jzero.sharding import Plan

SPACE = jax.memory.Space


@dataclasses.dataclass(frozen=True)
class HostTransfer:
    """Shards of weights to the device, and shards of gradients back.

    Attributes:
      plan: gives the mesh.
    """

    plan: Plan

    FETCH = "jzero.fetch_weight"
    WRITE = "jzero.write_gradient"
    """`named_scope`s of the copies."""

    def fetch(self, shard: jax.Array, spec: PartitionSpec) -> jax.Array:
        """A shard in device memory; `spec`: its layout."""
        with jax.named_scope(self.FETCH):
            # pinned, or the gathered layout would spread back to the copy, and to the array in host memory
            shard = jax.device_put(shard, SPACE.Device) if memory_kind(shard) == HOST else shard
            return self.plan.constrain(shard, spec)

    def write(self, grad: jax.Array, spec: PartitionSpec) -> jax.Array:
        """A gradient in host memory, from the device; `spec`: its layout."""
        if memory_kind(grad) == HOST:
            return grad
        with jax.named_scope(self.WRITE):
            grad = self.plan.constrain(grad, spec)
            return jax.device_put(grad, SPACE.Host)

    def moved(self, x: Layout, accumulate: int, uses: Sequence[Use]) -> tuple[int, int]:
        """Bytes of one device over PCIe in a step, without the update: to the device, and to the host.

        Args:
          x: the layouts of the param.
          accumulate: micro-batches in a step. Each fetches the weights and writes their gradients. The sums of these,
            in at least fp32, are written as zeros, then fetched and written in each and once more to be divided.
          uses: what the param is used for: it is fetched whenever it is gathered.
        """
        if not self.plan.lives_on_host(x):
            return 0, 0
        shard, grad, sums = x.nbytes // shard_factor(x.stored, self.plan.mesh), *self.held(x, accumulate)
        fetched = accumulate * sum(GATHERS[use.kind] for use in uses) * shard
        if not sums:
            return fetched, grad
        return fetched + accumulate * (grad + sums) + sums, accumulate * (grad + sums) + 2 * sums

    def held(self, x: Layout, accumulate: int = 1) -> tuple[int, int]:
        """Bytes of one device's shard of a gradient in host memory, and with micro-batches of the sum of them.

        A frozen param has none.
        """
        if not self.plan.lives_on_host(x) or x.frozen is not None:
            return 0, 0
        shape = x.state_shape if x.grad != x.used else x.shape
        size = math.prod(shape) // shard_factor(x.grad, self.plan.mesh)
        return size * x.dtype.itemsize, 0 if accumulate == 1 else size * max(4, x.dtype.itemsize)

    def added(self, grads: Sequence[jax.Array], spec: PartitionSpec) -> jax.Array:
        """The sum of gradients in host memory, taken in device memory: XLA would add them where they lie."""
        first, *rest = (self.fetch(g, spec) for g in grads)
        for grad in rest:
            first = first + grad
        return self.write(first, spec)
