"""Whole matrices and their shards: an all-to-all that brings each matrix to one device, its owner, and one back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jzero.core.splits import Split
from jzero.layout.padding import padded
from jzero.layout.specs import axis_size
from jzero.sharding import Plan


@dataclasses.dataclass(frozen=True)
class Pieces:
    """How an array is cut into the pieces of its devices.

    Attributes:
      shape: of the whole array, `(1,)` for a scalar. `padded` rounds up each dim that its axes do not divide.
      split: for each dim, the axes that split it.
      axes: all axes, in the order of the exchange.
      sizes: the sizes of the axes.
    """

    shape: tuple[int, ...]
    split: Split
    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def padded(self) -> tuple[int, ...]:
        """The shape that the pieces of equal size make."""
        return tuple(n * b for n, b in zip(self._counts(), self.block, strict=True))

    @property
    def block(self) -> tuple[int, ...]:
        """The shape of a piece."""
        return tuple(-(-s // n) for s, n in zip(self.shape, self._counts(), strict=True))

    def _counts(self) -> list[int]:
        by_name = dict(zip(self.axes, self.sizes, strict=True))
        return [math.prod(by_name[a] for a in entry) for entry in self.split]

    def joined(self, rows: jax.Array) -> jax.Array:
        """The array, from its pieces as rows (devices, values of a piece)."""
        ordered = jnp.reshape(rows, (*self.sizes, *self.block))
        dims: list[int] = []
        for dim, entry in enumerate(self.split):
            dims += [*(self.axes.index(a) for a in entry), len(self.axes) + dim]
        found = jnp.reshape(jnp.transpose(ordered, dims), self.padded)
        return found if self.padded == self.shape else found[tuple(slice(s) for s in self.shape)]

    def rows(self, x: jax.Array) -> jax.Array:
        """The reverse."""
        x = padded(jnp.reshape(x, self.shape), self.padded)
        by_name = dict(zip(self.axes, self.sizes, strict=True))
        view: list[int] = []
        at: dict[str, int] = {}
        blocks: list[int] = []
        for entry, block in zip(self.split, self.block, strict=True):
            for axis in entry:
                at[axis] = len(view)
                view.append(by_name[axis])
            blocks.append(len(view))
            view.append(block)
        ordered = jnp.transpose(jnp.reshape(x, view), [*(at[a] for a in self.axes), *blocks])
        return jnp.reshape(ordered, (math.prod(self.sizes), -1))


@dataclasses.dataclass(frozen=True)
class MatrixExchange:
    """Pieces to owners and back; used inside of a `jax.shard_map` over `axes`.

    Attributes:
      plan: gives the mesh.
      axes: the mesh axes that the matrices are split over.
    """

    plan: Plan
    axes: tuple[str, ...]

    SCOPE = "jzero.exchange"
    """`named_scope` of its operations."""

    @property
    def devices(self) -> int:
        """How many devices exchange."""
        return axis_size(self.plan.mesh, self.axes)

    def __call__(self, rows: jax.Array) -> jax.Array:
        """Sends row j to device j, and returns in row j what device j sent.

        Args:
          rows: (devices, values): on the way there, this device's pieces of the matrix of every owner; on the way back,
            the pieces that this owner has of its matrix.
        """
        with jax.named_scope(self.SCOPE):
            # flattened: XLA's CPU backend may give rows [1, n] different layouts, and then rejects its own program
            flat = jax.lax.all_to_all(jnp.reshape(rows, -1), self.axes, 0, 0, tiled=True)
            return jnp.reshape(flat, rows.shape)

    def wire(self, widths: Mapping[np.dtype, int]) -> float:
        """Bytes that one device sends in one exchange; `widths`: by dtype the length of a row."""
        return (self.devices - 1) * sum(width * dtype.itemsize for dtype, width in widths.items())
