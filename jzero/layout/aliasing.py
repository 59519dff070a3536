"""Which memory arrays lie in: what is laid out for training shares none with the arrays that the caller has.

`jax.device_put` reuses buffers if it can: an array that is there already, the part of the first device, the memory of
numpy arrays on the CPU. A donated step would then delete the caller's arrays too.
"""

from __future__ import annotations

import bisect
from typing import Any

import jax
import numpy as np

from jzero.core.random_keys import by_data, is_key
from jzero.core.types import PyTree


class HeldMemory:
    """The memory of the JAX and numpy arrays of a tree."""

    def __init__(self, tree: PyTree):
        spans = [span for leaf in jax.tree.leaves(tree) for span in _spans(leaf)]
        self.known = all(start is not None for start, _ in spans)
        self.starts, self.ends = [], []
        for start, size in sorted((start, size) for start, size in spans if start is not None and size):
            self.starts.append(start)
            self.ends.append(max(start + size, self.ends[-1] if self.ends else 0))

    def apart(self, x: jax.Array) -> jax.Array:
        """The array itself if it lies elsewhere, else a copy in the same layout."""
        if not self.shares(x):
            return x
        return by_data(lambda x: jax.device_put(x, x.sharding, may_alias=False), x)

    def taken(self, x: jax.Array) -> jax.Array:
        """As `apart`; the result is held from then on too, so that no two leaves of a state share memory."""
        x = self.apart(x)
        for start, size in _spans(x):
            self.known = self.known and start is not None
            if start is not None and size:
                at = bisect.bisect_left(self.starts, start)
                self.starts.insert(at, start)
                self.ends.insert(at, max(start + size, self.ends[at - 1] if at else 0))
        return x

    def shares(self, x: jax.Array) -> bool:
        """True if a part of an array lies in this memory, or if the platform does not tell."""
        return any(start is None or (size and self._holds(start)) for start, size in _spans(x))

    def _holds(self, at: int) -> bool:
        i = bisect.bisect_right(self.starts, at) - 1
        return not self.known or (i >= 0 and at < self.ends[i])


def _spans(leaf: Any) -> list[tuple[int | None, int]]:
    """Start and bytes of each part of an array in this process; None for a start that the platform does not tell."""
    if isinstance(leaf, np.ndarray):
        low, high = np.lib.array_utils.byte_bounds(leaf)
        return [(low, high - low)]
    if not isinstance(leaf, jax.Array):
        return []
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    return [(_start(shard.data), shard.data.nbytes) for shard in leaf.addressable_shards]


def _start(data: jax.Array) -> int | None:
    try:
        return data.unsafe_buffer_pointer()
    except (jax.errors.JaxRuntimeError, NotImplementedError, AttributeError):
        return None
