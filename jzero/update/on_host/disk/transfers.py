"""Transfers: a unit between its frame and a slot, in requests that several threads carry out, checksums included."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path

import numpy as np
import xxhash

from jzero.core.errors import counted
from jzero.update.on_host.disk.units import FileUnit

BLOCK = 4 * 2**20  # bytes under one checksum
REQUEST = 2 * BLOCK  # bytes that one thread reads or writes at a time


class DamagedStore(RuntimeError):
    """A disk returned other bytes than were committed."""


class DiskTransfer:
    """One unit on its way; `finished` is set when all of its requests are done, or skipped after an error.

    Args:
      unit, file: what, and from or to where.
      frame: `uint8[unit.nbytes]`, which nobody else touches meanwhile.
      direct: past the page cache.
      done: called by the thread that carries out the last request.

    Attributes:
      digests: `uint64` of each block, xxh3.
      error: what went wrong, with the file.
    """

    flags = os.O_RDONLY
    verb = ""

    def __init__(
        self,
        unit: FileUnit,
        file: Path,
        frame: np.ndarray,
        *,
        direct: bool,
        done: Callable[[DiskTransfer], None],
    ):
        self.unit, self.file, self.frame = unit, file, frame
        self.digests = np.zeros(-(-frame.size // BLOCK), np.uint64)
        self.error: BaseException | None = None
        self.finished = threading.Event()
        self._flags = self.flags | (os.O_DIRECT if direct else 0)
        self._done, self._lock, self._handle = done, threading.Lock(), -1

    def start(self, threads: Executor) -> None:
        """Queues the requests."""
        starts = range(0, self.frame.size, REQUEST)
        self._left = len(starts)
        for at in starts:
            threads.submit(self._request, at)

    def cancel(self, reason: BaseException) -> None:
        """Leaves out the requests that no thread has begun."""
        self.error = self.error or reason

    def _request(self, at: int) -> None:
        self._try(lambda: self._move(self._open(), at, self.frame[at : at + REQUEST]))
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            if self._handle >= 0:
                self._try(lambda: self._end(self._handle))
                os.close(self._handle)
            try:
                self._done(self)
            finally:
                self.finished.set()  # after `done`, so that whoever waits sees the error

    def _try(self, act: Callable[[], None]) -> None:
        if self.error is not None:
            return
        try:
            act()
        except OSError as error:
            what = f"{error.strerror}: jzero.update.on_host.disk could not {self.verb} unit {self.unit.name!r}"
            self.error = OSError(error.errno, what, str(self.file))
        except Exception as error:
            self.error = error

    def _open(self) -> int:
        with self._lock:
            if self._handle < 0:
                self._prepare()
                self._handle = os.open(self.file, self._flags)
            return self._handle

    def _prepare(self) -> None:
        """Before the file is opened."""

    def _move(self, handle: int, at: int, part: np.ndarray) -> None:
        raise NotImplementedError

    def _end(self, handle: int) -> None:
        """After the last request, before the file is closed."""

    def _hash(self, at: int, part: np.ndarray) -> slice:
        """Fills in the checksums of a request; returns which blocks these are. Other threads run meanwhile."""
        blocks = slice(at // BLOCK, -(-(at + part.size) // BLOCK))
        parts = (part[i : i + BLOCK] for i in range(0, part.size, BLOCK))
        self.digests[blocks] = [xxhash.xxh3_64_intdigest(p.data) for p in parts]
        return blocks


class Read(DiskTransfer):
    """From a slot; what is read must have the checksums `expected`."""

    verb = "read"

    def __init__(self, *args, expected: np.ndarray, **fields):
        super().__init__(*args, **fields)
        self.expected = expected

    def _move(self, handle: int, at: int, part: np.ndarray) -> None:
        moved = 0
        while moved < part.size:
            count = os.preadv(handle, [part[moved:].data], at + moved)
            if count == 0:
                raise DamagedStore(
                    f"{self._where()} ends after {at + moved} bytes of {self.frame.size}. {_REMEDY}"
                )
            moved += count
        blocks = self._hash(at, part)
        bad = np.flatnonzero(self.digests[blocks] != self.expected[blocks]) + blocks.start
        if bad.size:
            begin = int(bad[0]) * BLOCK
            raise DamagedStore(
                f"{self._where()} has another checksum than was committed in block {bad[0]}, bytes {begin} to "
                f"{min(begin + BLOCK, self.frame.size)}"
                + (f", and in {counted(bad.size - 1, 'more block')}" if bad.size > 1 else "")
                + f". {_REMEDY}"
            )

    def _where(self) -> str:
        return f"jzero: unit {self.unit.name!r}: {self.file}"


class Write(DiskTransfer):
    """To a slot, which `before` makes ready; it is finished when the disk has it."""

    flags, verb = os.O_WRONLY, "write"

    def __init__(self, *args, before: Callable[[], None], **fields):
        super().__init__(*args, **fields)
        self._before = before

    def _prepare(self) -> None:
        self._before()

    def _move(self, handle: int, at: int, part: np.ndarray) -> None:
        self._hash(at, part)
        moved = 0
        while moved < part.size:
            moved += os.pwritev(handle, [part[moved:].data], at + moved)

    def _end(self, handle: int) -> None:
        # O_DIRECT bypasses neither the disk's own cache nor the file system's record of which extents are written
        os.fdatasync(handle)


_REMEDY = "The disk returned other bytes than were written: go back to a snapshot or to a checkpoint."
