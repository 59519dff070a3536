"""Slots: the two files of each unit, preallocated, and never written to while a snapshot shares them."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from jzero.core import durable
from jzero.core.errors import counted, human_bytes
from jzero.update.on_host.disk.transfers import DiskTransfer, Read, Write
from jzero.update.on_host.disk.units import PAGE, FileUnit

Done = Callable[[DiskTransfer], None]


class Slots:
    """The files of a folder, and the threads that read and write them.

    Args:
      folder, units: where, and what.
      requests: how many reads, and how many writes, are in flight at most.

    Attributes:
      direct: reads and writes go past the page cache (O_DIRECT); False where the file system refuses (tmpfs).
    """

    def __init__(self, folder: Path, units: Sequence[FileUnit], *, requests: int):
        self.folder, self.units, self.direct = folder, units, False
        self._readers = ThreadPoolExecutor(requests, "jzero disk read")
        self._writers = ThreadPoolExecutor(requests, "jzero disk write")
        self._renewed = False

    def file(self, index: int, slot: int) -> Path:
        """Where a slot lies."""
        return self.folder / f"unit-{index:05d}.{slot}"

    def preallocate(self, slots: Iterable[tuple[int, int]], *, where: str) -> None:
        """Makes those files that are missing or of another size, so that a full disk is found now.

        Raises:
          OSError: ENOSPC, with the bytes needed and free; what was made is removed.
        """
        wanted = [(self.file(i, slot), self.units[i].nbytes) for i, slot in slots]
        missing = [(f, size) for f, size in wanted if not (f.exists() and f.stat().st_size == size)]
        needed, made = sum(size for _, size in missing), []
        try:
            found = os.statvfs(self.folder)
            if needed > found.f_bavail * found.f_frsize:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            for file, size in missing:
                made.append(file)
                _allocate(file, size)
        except OSError as error:
            for file in made:
                file.unlink(missing_ok=True)
            found = os.statvfs(self.folder)
            what = (
                f"{error.strerror}: {where} needs {human_bytes(needed)} for {counted(len(missing), 'file')}, and "
                f"{human_bytes(found.f_bavail * found.f_frsize)} are free"
            )
            raise OSError(error.errno, what, str(self.folder)) from error
        if made:
            durable.flush(self.folder)

    def probe(self, slot_of: Sequence[int]) -> None:
        """Finds out whether the file system takes O_DIRECT: some refuse at open, some at the first read."""
        known = next(((i, s) for i, s in enumerate(slot_of) if self.file(i, s).exists()), None)
        if known is None:
            return
        page = np.empty(2 * PAGE, np.uint8)
        page = page[-page.ctypes.data % PAGE :][:PAGE]
        try:
            handle = os.open(self.file(*known), os.O_RDONLY | os.O_DIRECT)
            try:
                os.preadv(handle, [page.data], 0)
            finally:
                os.close(handle)
            self.direct = True
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
            self.direct = False

    def read(
        self, index: int, slot: int, frame: np.ndarray, expected: np.ndarray, done: Done
    ) -> DiskTransfer:
        """Starts to read a slot into the first bytes of a frame."""
        unit, file = self.units[index], self.file(index, slot)
        transfer = Read(unit, file, frame[: unit.nbytes], expected=expected, direct=self.direct, done=done)
        transfer.start(self._readers)
        return transfer

    def write(self, index: int, slot: int, frame: np.ndarray, done: Done) -> DiskTransfer:
        """Starts to write the first bytes of a frame to a slot that no generation needs."""
        unit, file = self.units[index], self.file(index, slot)
        ready = functools.partial(self._renew, file, unit.nbytes)
        transfer = Write(unit, file, frame[: unit.nbytes], direct=self.direct, done=done, before=ready)
        transfer.start(self._writers)
        return transfer

    def _renew(self, file: Path, size: int) -> None:
        """A file that a snapshot shares stays the snapshot's; the slot becomes a new one."""
        with contextlib.suppress(FileNotFoundError):
            found = file.stat()
            if found.st_nlink == 1 and found.st_size == size:
                return
            file.unlink()
        self._renewed = True
        _allocate(file, size)

    def flush_names(self) -> None:
        """Flushes the folder where slots have become new files: before a record names them."""
        if self._renewed:
            durable.flush(self.folder)
            self._renewed = False

    def close(self) -> None:
        """Ends the threads, after what they have been given."""
        self._readers.shutdown()
        self._writers.shutdown()


def _allocate(file: Path, size: int) -> None:
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        os.posix_fallocate(handle, 0, size)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from error
    finally:
        os.close(handle)
