"""The buffer: a fixed number of frames in one stretch of anonymous memory."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence

import numpy as np

from jzero.core.errors import human_bytes
from jzero.update.on_host.disk.units import PAGE, FileUnit

LEAST = 4  # frames: one is read ahead, one updated, one written behind, and one is free for the next


class Frames:
    """Frames of the largest unit's size: as many as the buffer holds, at most units + 1. Unused pages cost no memory.

    Args:
      units: those of the store.
      buffer_bytes: bytes of all frames together; `check_room` has accepted it.
    """

    def __init__(self, units: Sequence[FileUnit], buffer_bytes: int):
        self.size = max((u.nbytes for u in units), default=PAGE)
        self.count = min(buffer_bytes // self.size, len(units) + 1)
        memory = mmap.mmap(-1, self.size * self.count)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(memory, np.uint8)
        self._free = [whole[i * self.size : (i + 1) * self.size] for i in reversed(range(self.count))]

    @property
    def free(self) -> int:
        """How many frames nobody uses."""
        return len(self._free)

    def take(self) -> np.ndarray:
        """A frame, `uint8[size]`: the one last given back, since its pages are there."""
        return self._free.pop()

    def give(self, frame: np.ndarray) -> None:
        """Takes back what `take` returned."""
        self._free.append(frame)


def check_room(units: Sequence[FileUnit], buffer_bytes: int, *, where: str) -> None:
    """Raises ValueError where a unit is larger than a quarter of the buffer."""
    large = [u for u in units if u.nbytes * LEAST > buffer_bytes]
    if large:
        worst = max(large, key=lambda u: u.nbytes)
        raise ValueError(
            f"{where}: buffer_bytes={buffer_bytes}: {len(large)} of {len(units)} units are larger than a quarter of "
            f"the buffer ({human_bytes(buffer_bytes / LEAST)}); the largest is {worst.name!r} with "
            f"{human_bytes(worst.nbytes)}. One unit is read while one is updated and one is written. Pass "
            f"buffer_bytes={worst.nbytes * LEAST}."
        )
