"""How values travel: as they are, or encoded before a collective and decoded after it.

[Note: codes of weights]
A block of values has one scale, which its largest magnitude sets: codes of int8 are evenly spaced multiples of it,
those of float8_e4m3fn keep more of small values and less of large ones. (Moments have another map, see
`int8_moments.py`: an update divides by them.) A block with a value that is not finite has a scale of NaN: it arrives
as NaN, and the loss shows it.

[Note: scales that round nothing]
What an update adds to a param is decoded twice, by the shard that keeps what the codes have lost and by all devices,
in programs that XLA fuses differently. With a power of two as scale, codes of 64 to 127 for the largest value of a
block, their product is exact, so that both add the same number; and codes of what was decoded are the same codes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jzero.layout.blocks import Blocks, Hop

SCALE = np.dtype(np.float32)


class Transport(Protocol):
    """The form in which the values of one array travel.

    An encoding need not be linear, so the tangent of an array that travels in codes travels as it is.
    """

    def encode(self, shard: jax.Array) -> Sequence[jax.Array]:
        """The arrays to send for an array; each device encodes its shard alone."""
        ...

    def decode(self, received: Sequence[jax.Array], dtype: np.dtype) -> jax.Array:
        """The array in `dtype`, from what was received."""
        ...

    @property
    def layouts(self) -> Sequence[tuple[PartitionSpec, PartitionSpec]]:
        """Of each array that is sent, the layouts before and after."""
        ...

    @property
    def sent_bytes(self) -> int:
        """Bytes of the arrays that are sent for the whole array."""
        ...


@dataclasses.dataclass(frozen=True)
class AsIs:
    """Values travel in the dtype that they have.

    Attributes:
      shape, dtype: of the whole array.
      before, after: its layouts.
    """

    shape: Sequence[int]
    dtype: np.dtype
    before: PartitionSpec
    after: PartitionSpec

    def encode(self, shard: jax.Array) -> Sequence[jax.Array]:
        """The array itself."""
        return (shard,)

    def decode(self, received: Sequence[jax.Array], dtype: np.dtype) -> jax.Array:
        """The array itself."""
        return received[0]

    @property
    def layouts(self) -> Sequence[tuple[PartitionSpec, PartitionSpec]]:
        """Its own."""
        return ((self.before, self.after),)

    @property
    def sent_bytes(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class InCodes:
    """Values travel as codes of 8 bits with one scale per block: see [Note: codes of weights].

    Attributes:
      blocks: of the whole array.
      codes: int8, float8_e4m3fn, or int4, of which the arrays are int8.
      before, after: layouts of the array, which cut no block.
      mesh: the user's.
      exact: scales are powers of two: see [Note: scales that round nothing].
    """

    blocks: Blocks
    codes: np.dtype
    before: PartitionSpec
    after: PartitionSpec
    mesh: Mesh
    exact: bool = False

    def encode(self, shard: jax.Array) -> Sequence[jax.Array]:
        """Codes in the shape of the array, and scales."""
        values = self.blocks.cut(shard.astype(SCALE))
        largest = jnp.max(jnp.abs(values), axis=-1)
        if self.exact:
            power = jax.lax.bitcast_convert_type(largest, jnp.uint32) & 0x7F800000
            scales = jax.lax.bitcast_convert_type(power, SCALE) * 2.0 ** -math.floor(math.log2(_largest(self.codes)))
        else:  # a product with a constant, as XLA would make of the quotient in some programs: equal codes in all
            scales = largest * (1 / _largest(self.codes))
        scales = jnp.where(jnp.all(jnp.isfinite(values), axis=-1), scales, jnp.nan)
        share = shard.astype(SCALE) / self.blocks.spread(jnp.where(scales > 0, scales, 1))
        share = jnp.clip(share, -_largest(self.codes), _largest(self.codes))  # a scale that is subnormal is rounded
        whole = jnp.issubdtype(self.codes, jnp.integer)
        return (jnp.round(share).astype(jnp.int8) if whole else share.astype(self.codes)), scales

    def decode(self, received: Sequence[jax.Array], dtype: np.dtype) -> jax.Array:
        """Codes times scales."""
        codes, scales = received
        return (codes.astype(SCALE) * self.blocks.spread(scales)).astype(dtype)

    @property
    def layouts(self) -> Sequence[tuple[PartitionSpec, PartitionSpec]]:
        """Of codes and scales."""
        before, after = (self.blocks.spec(spec, self.mesh) for spec in (self.before, self.after))
        assert before is not None
        assert after is not None
        return (self.before, self.after), (before, after)

    @property
    def sent_bytes(self) -> int:
        """Of codes and scales."""
        return math.prod(self.blocks.shape) * self.codes.itemsize + math.prod(self.blocks.scales_shape) * SCALE.itemsize


def _largest(codes: np.dtype) -> float:
    """The largest magnitude of a code; int8 has none for -128, and int4 none for -8."""
    return float(jnp.iinfo(codes).max if jnp.issubdtype(codes, jnp.integer) else jnp.finfo(codes).max)


def transport_of(hop: Hop, shape: Sequence[int], dtype: np.dtype, mesh: Mesh) -> Transport:
    """The form in which an array of this shape and dtype is gathered in a hop."""
    wide = jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize > 1  # else it is cast before the gather
    if hop.codes is None or hop.blocks is None or not wide:
        return AsIs(tuple(shape), np.dtype(dtype), hop.before, hop.after)
    return InCodes(hop.blocks, hop.codes, hop.before, hop.after, mesh)


def sent(transport: Transport, x: jax.Array, constrain: Callable[[jax.Array, PartitionSpec], jax.Array]) -> jax.Array:
    """An array in the layout that a transport brings it to, from the layout that it has."""
    whole = []
    for part, (before, after) in zip(transport.encode(x), transport.layouts, strict=True):
        # pinned behind the encoding too, or the partitioner would gather first
        whole.append(constrain(part if part is x else constrain(part, before), after))
    found = transport.decode(whole, x.dtype)
    return found if found is whole[0] else constrain(found, transport.layouts[0][1])
