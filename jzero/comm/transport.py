"""How values travel: as they are, or encoded before a collective and decoded after it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np


class Transport(Protocol):
    """The form in which the values of an array travel.

    It is not its own derivative: a tangent of an array that travels encoded travels as it is (`WeightGather.tangent`).
    """

    def encode(self, shard: Any) -> Sequence[Any]:
        """The arrays to send for an array; each has its dims, and each device encodes its shard alone."""
        ...

    def decode(self, parts: Sequence[Any], dtype: np.dtype) -> Any:
        """The array in `dtype`, from what was received; the shape of what was encoded, or of the whole of it."""
        ...

    def nbytes(self, shape: Sequence[int], dtype: np.dtype) -> int:
        """Bytes of the arrays that are sent for a whole array of this shape and dtype."""
        ...


@dataclasses.dataclass(frozen=True)
class AsIs:
    """Values travel in the dtype that they have."""

    def encode(self, shard: Any) -> Sequence[Any]:
        """The array itself."""
        return (shard,)

    def decode(self, parts: Sequence[Any], dtype: np.dtype) -> Any:
        """The array itself."""
        return parts[0]

    def nbytes(self, shape: Sequence[int], dtype: np.dtype) -> int:
        """Its bytes."""
        return math.prod(shape) * dtype.itemsize


TRANSPORTS: dict[str, Transport] = {"weights": AsIs()}
"""The transport of each kind of value. A new one is a class with these three methods, entered here."""
