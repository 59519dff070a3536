"""Blocks of values that share a scale, for state in 8 bits.

[Note: blocks do not depend on the plan]
A block is a run of `size` values in row-major order. Runs begin anew at each layer of a stack, and wherever a whole
number of them fills the trailing dims; the last run of a row may be short. So blocks are a function of the shape and
the stack dim, not of the stage or the number of devices: between two plans codes and scales are moved as they are.
A plan that would cut a block keeps the leaf wide; where it may choose, it splits a dim that cuts none (`uncut`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jzero.layout.specs import axis_size, make_spec, spec_entries

if TYPE_CHECKING:
    from jzero.config import ZeroConfig
    from jzero.layout.leaf_rule import Layout

LEAST_QUANTIZED = 4096
"""Leaves of fewer values stay wide: they are few bytes, and often norms and biases (the rule of bitsandbytes)."""
LOOKED_UP = "embedding"
"""The name that Flax gives to a table that lookups read. Most of its rows get no gradient in a step."""


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How an array is cut into blocks.

    Attributes:
      shape: of the array.
      lead: leading dims that the blocks do not cross; the array of scales has them too.
      size: values of a block.
    """

    shape: tuple[int, ...]
    lead: int
    size: int

    @classmethod
    def of(cls, shape: Sequence[int], scan_dim: int | None, size: int) -> Blocks:
        """The blocks of an array: see [Note: blocks do not depend on the plan]."""
        first = 0 if scan_dim is None else scan_dim + 1
        fits = (k for k in range(len(shape) - 1, first, -1) if math.prod(shape[k:]) % size == 0)
        return cls(tuple(shape), next(fits, first), size)

    @classmethod
    def between(cls, shape: Sequence[int], scales_shape: Sequence[int]) -> Blocks:
        """The blocks of an array whose scales have this shape."""
        lead = len(scales_shape) - 1
        run, size = math.prod(shape[lead:]), 1
        while -(-run // size) > scales_shape[lead]:
            size *= 2
        return cls(tuple(shape), lead, size)

    @property
    def run(self) -> int:
        """Values behind the leading dims."""
        return math.prod(self.shape[self.lead :])

    @property
    def scales_shape(self) -> tuple[int, ...]:
        """The shape of the array of scales."""
        return (*self.shape[: self.lead], -(-self.run // self.size))

    def spec(self, spec: PartitionSpec, mesh: Mesh) -> PartitionSpec | None:
        """The layout of the scales of an array of this layout; None if it cuts a block."""
        entries = spec_entries(spec, len(self.shape))
        behind = [d for d in range(self.lead, len(self.shape)) if self.shape[d] > 1]
        cut = [d for d in range(self.lead, len(self.shape)) if entries[d]]
        if not cut:
            return make_spec([tuple(e) for e in entries[: self.lead]])
        # the pieces of the first dim behind the leading ones are runs; those of a later one are not
        if cut != behind[:1] or self.run % (axis_size(mesh, entries[cut[0]]) * self.size):
            return None
        return make_spec([tuple(e) for e in (*entries[: self.lead], entries[cut[0]])])

    def cut(self, x: jax.Array) -> jax.Array:
        """The array as (leading dims, blocks, values); the last block is filled with zeros."""
        flat = x.reshape(*self.shape[: self.lead], self.run)
        short = -self.run % self.size
        if short:
            flat = jnp.pad(flat, [(0, 0)] * self.lead + [(0, short)])
        return flat.reshape(*self.scales_shape, self.size)

    def spread(self, scales: jax.Array) -> jax.Array:
        """The scale of every value, in the shape of the array."""
        wide = jnp.broadcast_to(scales[..., None], (*self.scales_shape, self.size))
        flat = wide.reshape(*self.shape[: self.lead], -1)
        return flat[..., : self.run].reshape(self.shape)


def blocks_of(x: Layout, plan: Any) -> Blocks | None:
    """The blocks of the moments of a param; None where they are not in 8 bits."""
    if plan.config.moment_dtype != jnp.int8 or why_wide(x, plan):
        return None
    return Blocks.of(x.shape, x.scan_dim, plan.config.quantize_block)


def why_wide(x: Layout, plan: Any) -> str:
    """Why a plan with 8-bit moments keeps those of a param wide; empty if it does not."""
    if never := _never(x.shape, x.keys):
        return never
    if x.padded:
        return f"stored padded to {list(x.state_shape)}"
    size = plan.config.quantize_block
    cut = Blocks.of(x.shape, x.scan_dim, size).spec(x.state, plan.mesh) is None
    return f"its layout would cut blocks of {size}" if cut else ""


def _never(shape: Sequence[int], keys: Sequence[str]) -> str:
    """Why no plan keeps the moments of a param in 8 bits; empty if one may."""
    if math.prod(shape) < LEAST_QUANTIZED:
        return f"fewer than {LEAST_QUANTIZED} values"
    return f"a lookup reads it (its path has {LOOKED_UP!r})" if LOOKED_UP in keys else ""


def uncut(
    shape: Sequence[int], keys: Sequence[str], scan_dim: int | None, config: ZeroConfig, mesh: Mesh
) -> Callable[[PartitionSpec], bool] | None:
    """Whether a layout of the moments of a param cuts no block; None where they are not in 8 bits anyway."""
    if config.moment_dtype != jnp.int8 or _never(shape, keys):
        return None
    blocks = Blocks.of(shape, scan_dim, config.quantize_block)
    return lambda spec: blocks.spec(spec, mesh) is not None
