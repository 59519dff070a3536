"""Units: which arrays are read and written together, and where each begins in a frame and in a file."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

from jzero.core.errors import check_dtype, check_ints, check_kind, shown

PAGE = 4096  # bytes: O_DIRECT wants memory, offsets and lengths aligned to disk sectors, 512 or 4096
ALIGNED = 64  # bytes: where an array of a unit begins, a cache line


@dataclasses.dataclass(frozen=True)
class FileUnit:
    """Arrays that are read and written together.

    Args:
      name: for messages; no other unit of the store has it.
      arrays: a shape and the name of a dtype for each, those of ml_dtypes too: `(((1600, 30), "bfloat16"),)`.

    Raises:
      TypeError, ValueError: the name is not a string, a shape has a size that is not an integer of at least 0, or a
        dtype is unknown.
    """

    name: str
    arrays: tuple[tuple[tuple[int, ...], str], ...]

    def __post_init__(self):
        where = "jzero.update.on_host.disk.FileUnit"
        check_kind(self.name, "name", str, "a string", where=where)
        pairs = isinstance(self.arrays, Sequence) and all(
            isinstance(x, Sequence) and not isinstance(x, str) and len(x) == 2 for x in self.arrays
        )
        if not pairs:
            raise TypeError(
                f"{where}(arrays={shown(self.arrays)}): arrays must be pairs of a shape and a dtype."
            )
        arrays = []
        for shape, dtype in self.arrays:
            sizes = check_ints(tuple(shape), "shape", where=where, low=0)
            arrays.append((sizes, check_dtype(dtype, "dtype", where=where, floating=False).name))
        object.__setattr__(self, "arrays", tuple(arrays))

    @functools.cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Of each array: the byte it begins at, and its number of bytes."""
        spans, at = [], 0
        for shape, dtype in self.arrays:
            count = math.prod(shape) * np.dtype(dtype).itemsize
            spans.append((at, count))
            at += -(-count // ALIGNED) * ALIGNED
        return tuple(spans)

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of the unit in a frame or in a file: whole pages, at least one."""
        end = max((at + count for at, count in self.spans), default=0)
        return max(-(-end // PAGE), 1) * PAGE

    @property
    def described(self) -> str:
        """`'w': float32[3,4], bfloat16[7]`."""
        return f"{self.name!r}: {_typed(self.arrays) or 'no array'}"

    def views(self, frame: np.ndarray) -> list[np.ndarray]:
        """The arrays as views of a frame, a `uint8[nbytes]`."""
        return [
            frame[at : at + count].view(dtype).reshape(shape)
            for (at, count), (shape, dtype) in zip(self.spans, self.arrays, strict=True)
        ]

    def check(self, arrays: Sequence[np.ndarray], *, where: str) -> None:
        """Raises ValueError for another number of arrays, or another shape or dtype."""
        found = tuple((x.shape, x.dtype.name) for x in arrays)
        if found != self.arrays:
            raise ValueError(f"{where}: unit {self.described}, and {_typed(found) or 'nothing'} was passed.")

    def put(self, frame: np.ndarray, arrays: Sequence[np.ndarray], *, where: str) -> None:
        """Copies arrays into a frame, unless they are its views; what lies between them becomes zero.

        Raises:
          ValueError: as `check`; nothing has been copied.
        """
        self.check(arrays, where=where)
        own = self.views(frame)
        moved = [(a, x) for a, x in zip(own, arrays, strict=True) if not _same(a, x)]
        # a view of another array's place in this frame would change while that one is written
        moved = [(a, x.copy() if np.may_share_memory(x, frame) else x) for a, x in moved]
        for a, x in moved:
            a[...] = x
        ends = [*(at for at, _ in self.spans[1:]), frame.size]
        for (at, count), end in zip(self.spans, ends, strict=True):
            frame[at + count : end] = 0


def _same(a: np.ndarray, x: np.ndarray) -> bool:
    return a.ctypes.data == x.ctypes.data and a.strides == x.strides


def _typed(arrays: Sequence[tuple[tuple[int, ...], str]]) -> str:
    return ", ".join(f"{dtype}[{','.join(map(str, shape))}]" for shape, dtype in arrays)
