"""Params and gradients between host and device memory (ZeRO-Infinity); the optimizer state has `stream/` for that."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jzero.layout.placement import HOST, memory_kind
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

    def fetch(self, shard: Any, spec: PartitionSpec) -> Any:
        """A shard in device memory; `spec`: its layout."""
        with jax.named_scope(self.FETCH):
            # pinned, or the gathered layout would spread back to the copy, and to the array in host memory
            return self.plan.constrain(jax.device_put(shard, SPACE.Device), spec)

    def write(self, grad: Any, spec: PartitionSpec) -> Any:
        """A gradient in host memory, from the device; `spec`: its layout."""
        if memory_kind(grad) == HOST:
            return grad
        with jax.named_scope(self.WRITE):
            grad = self.plan.constrain(grad, spec)
            return jax.device_put(grad, SPACE.Host)

    def added(self, grads: Sequence[Any], spec: PartitionSpec) -> Any:
        """The sum of gradients in host memory, taken in device memory: XLA would add them where they lie."""
        first, *rest = (self.fetch(g, spec) for g in grads)
        for grad in rest:
            first = first + grad
        return self.write(first, spec)
