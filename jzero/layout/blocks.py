"""Blocks of values that share a scale, for state and gathered weights in 8 bits.

[Note: blocks do not depend on the plan]
A block is a run of `size` values in row-major order. Runs begin anew at each layer of a stack, and wherever a whole
number of them fills the trailing dims; the last run of a row may be short. So blocks are a function of the shape and
the stack dim, not of the stage or the number of devices: between two plans codes and scales are moved as they are.
A plan that would cut a block keeps the leaf wide; where it may choose, it splits a dim that cuts none (`uncut`).
Weights have the blocks of one layer, which is what is gathered.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jzero.layout.specs import axis_of, axis_size, make_spec, spec_axes, spec_entries, without_dim

if TYPE_CHECKING:
    from jzero.config import ZeroConfig
    from jzero.layout.leaf_rule import Layout

LEAST_QUANTIZED = 4096
"""Leaves of fewer values stay wide: they are few bytes, and often norms and biases (the rule of bitsandbytes)."""
LEAST_RUN = 32
"""Values that a scale must have: the 4 bytes of one for 8 values are half of what codes save."""
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
    blocks = Blocks.of(x.shape, x.scan_dim, plan.config.quantize_block)
    return _never(blocks, x.keys) or _why_cut(x, blocks, (x.state,), plan.mesh)


def _never(blocks: Blocks, keys: Sequence[str]) -> str:
    """Why no plan keeps the moments of a param with these blocks in 8 bits; empty if one may."""
    return _why_few(blocks) or (f"a lookup reads it (its path has {LOOKED_UP!r})" if LOOKED_UP in keys else "")


def _why_few(blocks: Blocks) -> str:
    """Why codes would save little of an array with these blocks; empty if they save much."""
    if math.prod(blocks.shape) < LEAST_QUANTIZED:
        return f"fewer than {LEAST_QUANTIZED} values"
    if blocks.run < min(blocks.size, LEAST_RUN):
        return f"only {blocks.run} of its values in a row belong to one layer"
    return ""


def _why_cut(x: Layout, blocks: Blocks, specs: Sequence[PartitionSpec], mesh: Mesh) -> str:
    """Why the layouts of a param do not keep its blocks whole; empty if they do."""
    if x.padded:
        return f"stored padded to {list(x.state_shape)}"
    cut = any(blocks.spec(spec, mesh) is None for spec in specs)
    return f"its layout would cut blocks of {blocks.size}" if cut else ""


def uncut(
    shape: Sequence[int], keys: Sequence[str], scan_dim: int | None, config: ZeroConfig, mesh: Mesh
) -> Callable[[PartitionSpec], bool] | None:
    """Whether a layout of a param cuts no block of its moments or of the gathered weight; None where it has none."""
    wanted: list[Callable[[PartitionSpec], bool]] = []
    moments = Blocks.of(shape, scan_dim, config.quantize_block)
    of_moments = config.moment_dtype == jnp.int8 and not _never(moments, keys)
    if of_moments or (config.update_dtype is not None and not _why_few(moments)):
        wanted.append(lambda spec: moments.spec(spec, mesh) is not None)
    layer = tuple(n for dim, n in enumerate(shape) if dim != scan_dim)
    if config.gather_dtype is not None and config.row.params and math.prod(layer) >= LEAST_QUANTIZED:
        weights = Blocks.of(layer, None, config.quantize_block)
        wanted.append(lambda spec: weights.spec(without_dim(spec, len(shape), scan_dim), mesh) is not None)
    return (lambda spec: all(fits(spec) for fits in wanted)) if wanted else None


def update_blocks(x: Layout, plan: Any) -> Blocks | None:
    """The blocks of what an update adds to a param; None where the new param travels as it is, or stays."""
    if plan.config.update_dtype is None or x.frozen is not None or x.state == x.stored or why_sent_whole(x, plan):
        return None
    return Blocks.of(x.shape, x.scan_dim, plan.config.quantize_block)


def why_sent_whole(x: Layout, plan: Any) -> str:
    """Why a plan whose updates travel in codes gathers a new param as it is; empty if it does not."""
    if x.dtype != jnp.bfloat16:
        return f"its dtype is {x.dtype}"
    blocks = Blocks.of(x.shape, x.scan_dim, plan.config.quantize_block)
    return _why_few(blocks) or _why_cut(x, blocks, (x.state, x.stored), plan.mesh)


@dataclasses.dataclass(frozen=True)
class Hop:
    """A gather over some axes.

    Attributes:
      before, after: the layouts of the array.
      codes: the dtype in which it travels; None: as it is.
      blocks: of the codes.
    """

    before: PartitionSpec
    after: PartitionSpec
    codes: np.dtype | None = None
    blocks: Blocks | None = None


def hops(
    shape: Sequence[int], stored: PartitionSpec, used: PartitionSpec, config: ZeroConfig, mesh: Mesh, *,
    stack: bool = False,
) -> list[Hop]:  # fmt: skip
    """The gathers that bring a weight from its stored to its used layout; one without codes if these would cut a block.

    Args:
      shape: of the weight.
      stored, used: its layouts.
      config: names the dtypes and the size of blocks.
      mesh: the user's.
      stack: it is a stack of layers along dim 0.
    """
    blocks = Blocks.of(shape, 0 if stack else None, config.quantize_block)
    found, here = [], spec_entries(stored, len(shape))
    goal = spec_entries(used, len(shape))
    kept = {a for e in goal for a in e}
    for dtype, rows in itertools.groupby(config.gathers_in_codes, key=lambda row: row[1]):
        axes = [axis for axis, _ in rows]
        there = [tuple(a for a in e if a in kept or axis_of(a) not in axes) for e in here]
        if there != here:
            found.append(Hop(make_spec(here), make_spec(there), dtype, blocks))
            here = there
    if found and any(blocks.spec(spec, mesh) is None for hop in found for spec in (hop.before, hop.after)):
        return [Hop(stored, used)]
    return [*found, Hop(make_spec(here), used)] if here != goal else found


def why_not_in_codes(x: Layout, plan: Any) -> str:
    """Why a weight that a plan gathers in codes travels as it is; empty if it does not."""
    dtype = plan.config.compute_dtype or x.dtype if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
        return f"its dtype is {dtype}"
    if math.prod(x.layer_shape) < LEAST_QUANTIZED:
        return f"fewer than {LEAST_QUANTIZED} values"
    if not {a for a, _ in plan.config.gathers_in_codes} & (set(spec_axes(x.stored)) - set(spec_axes(x.used))):
        return "it is not split over the axes of gather_dtype"
    found = hops(x.layer_shape, x.of_layer(x.stored), x.of_layer(x.used), plan.config, plan.mesh)
    return "" if any(hop.codes for hop in found) else f"its layout would cut blocks of {plan.config.quantize_block}"
