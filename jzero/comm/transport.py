"""How values travel: as they are, or encoded before a collective and decoded after it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np


class Transport(Protocol):
    """The form in which the values of one array travel.

    An encoding need not be linear, so the tangent of an encoded array travels unencoded (`WeightGather.tangent`).

    Args:
      shape, dtype: of the whole array.
      parts: how many equal shards of it travel.
    """

    def __init__(self, shape: Sequence[int], dtype: np.dtype, parts: int): ...

    def encode(self, shard: jax.Array) -> Sequence[jax.Array]:
        """The arrays to send for an array; each has its dims, and each device encodes its shard alone."""
        ...

    def decode(self, received: Sequence[jax.Array], dtype: np.dtype) -> jax.Array:
        """The array in `dtype`, from what was received; the shape of what was encoded, or of the whole of it."""
        ...

    @property
    def sent_bytes(self) -> int:
        """Bytes of the arrays that are sent for the whole array."""
        ...

    @property
    def held_bytes(self) -> int:
        """Bytes of the whole array once it is decoded."""
        ...


@dataclasses.dataclass(frozen=True)
class AsIs:
    """Values travel in the dtype that they have."""

    shape: Sequence[int]
    dtype: np.dtype
    parts: int

    def encode(self, shard: Any) -> Sequence[Any]:
        """The array itself."""
        return (shard,)

    def decode(self, received: Sequence[Any], dtype: np.dtype) -> Any:
        """The array itself."""
        return received[0]

    @property
    def sent_bytes(self) -> int:
        """Its bytes."""
        return self.held_bytes

    @property
    def held_bytes(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


TRANSPORTS: dict[str, type[Transport]] = {"weights": AsIs}
"""The transport of each kind of value. A new one is a class like `AsIs`, entered here."""
