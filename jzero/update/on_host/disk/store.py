"""`DiskStore`: units on a local disk, which always holds one whole generation of them."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jzero.core.errors import counted
from jzero.core.folder_lock import FolderLock
from jzero.update.on_host.disk import checks, folders, snapshots
from jzero.update.on_host.disk import record as records
from jzero.update.on_host.disk.frames import Frames, check_room
from jzero.update.on_host.disk.record import Record
from jzero.update.on_host.disk.slots import Slots
from jzero.update.on_host.disk.step import WHERE, DiskStep
from jzero.update.on_host.disk.transfers import DamagedStore
from jzero.update.on_host.disk.units import FileUnit


class DiskStore:
    """Units in a folder, read and written once per step; from `create` or `open`, ended by `close` or a `with` block.

    Each process has a folder of its own in `path`, `process-00000-of-00004`, and a lock on it until it closes.

    Attributes:
      folder: that of this process.

    Cost:
      Twice the bytes of all units on the disk, allocated by `create`. `buffer_bytes` of host memory at most, allocated
      when first used. A step reads and writes each unit once, and flushes once per unit and once per commit
      (up to three times if files are new).

    Example:
      >>> import tempfile, numpy as np
      >>> from jzero.update.on_host.disk import DiskStore, FileUnit
      >>> folder = tempfile.TemporaryDirectory()
      >>> unit = FileUnit("w", (((3,), "float32"),))
      >>> store = DiskStore.create(folder.name + "/state", [unit], identity={"model": "gpt"})
      >>> with store.begin() as step:
      ...     step.write(0, [np.zeros(3, np.float32)])
      ...     step.commit()
      >>> with store.begin() as step:
      ...     step.read_ahead([0])
      ...     (w,) = step.read(0)
      ...     w += 1
      ...     step.write(0, [w])
      ...     step.commit(b"step 1")
      >>> store.generation, store.extra
      (2, b'step 1')
      >>> store.close()
      >>> folder.cleanup()

    References:
      Rajbhandari et al., ZeRO-Infinity, SC21, sections 5.1.2 and 6.3 (the NVMe tier and its pinned buffers).
    """

    def __init__(
        self,
        folder: Path,
        record: Record,
        lock: FolderLock,
        *,
        buffer_bytes: int,
        requests: int,
        read_only: bool,
    ):
        self.folder, self._record, self._lock, self._read_only = folder, record, lock, read_only
        self._slots = Slots(folder, record.units, requests=requests)
        self._frames = Frames(record.units, buffer_bytes)
        self._step: DiskStep | None = None
        self._unsure = self._closed = False

    @classmethod
    def create(
        cls,
        path: str | os.PathLike,
        units: Sequence[FileUnit],
        *,
        identity: Mapping[str, Any],
        process: tuple[int, int] = (0, 1),
        buffer_bytes: int = 2**30,
        requests: int = 4,
    ) -> DiskStore:
        """A new store of generation 0, which has no contents, with both slots of each unit allocated.

        Args:
          path: a folder, made if it is missing; the folder above it must be there.
          units: in the order of their indices.
          identity: JSON that says what the state belongs to, such as the plan and the model.
          process: index and number of the processes that share `path`.
          buffer_bytes: bytes of host memory for units under way; at least four times the largest unit.
          requests: how many reads, and how many writes, of 8 MiB each are in flight.

        Raises:
          ValueError: two units of one name, a unit larger than a quarter of the buffer, folders of another number of
            processes, or a store that is there already: nothing is overwritten.
          TypeError: an identity that JSON cannot hold, or an argument of a wrong type.
          DamagedStore: the folder has records, but none is whole.
          FolderInUse: another run has it open.
          OSError: the disk is full (says what is needed and free), or nothing can be written there.
        """
        where = f"{WHERE}: create"
        units = checks.units_of(units, where=where)
        checks.numbers(buffer_bytes, requests, where=where)
        check_room(units, buffer_bytes, where=where)
        record = Record.first(units, records.plain(identity, where=where))
        folder = folders.of(Path(path), process, where=where)
        folders.make(folder.parent, folder, where=where)
        with contextlib.ExitStack() as undo:
            lock = _locked(folder, where=where)  # first: that a folder is in use matters more than what it holds
            undo.callback(lock.release)
            checks.nothing_there(folder, where=where)
            undo.callback(shutil.rmtree, folder, ignore_errors=True)
            for file in folder.glob("unit-*"):  # of a creation that did not end
                file.unlink()
            store = cls(folder, record, lock, buffer_bytes=buffer_bytes, requests=requests, read_only=False)
            undo.callback(store._slots.close)
            store._slots.preallocate(((i, s) for i in range(len(units)) for s in (0, 1)), where=where)
            store._slots.probe([0] * len(units))
            records.write_first(folder, record)
            undo.pop_all()
        return store

    @classmethod
    def open(
        cls,
        path: str | os.PathLike,
        units: Sequence[FileUnit] | None = None,
        *,
        identity: Mapping[str, Any] | None = None,
        process: tuple[int, int] = (0, 1),
        buffer_bytes: int = 2**30,
        requests: int = 4,
        read_only: bool = False,
    ) -> DiskStore:
        """A store or a snapshot, at the last generation of it that is whole.

        Args:
          path, process, buffer_bytes, requests: as for `create`.
          units, identity: if given, they must be those of the store.
          read_only: writes nothing, and lets others read too. Steps can read, and neither write nor commit.

        Raises:
          FileNotFoundError: there is no store.
          ValueError: other units, another identity or another number of processes than the store was created with; a
            unit larger than a quarter of the buffer; a store of another version.
          FolderInUse: another run has it open.
          DamagedStore: no record is whole.
          OSError: a missing slot cannot be allocated, or a file cannot be read.
        """
        where = f"{WHERE}: open"
        checks.numbers(buffer_bytes, requests, where=where)
        folder = folders.of(Path(path), process, where=where)
        if not folder.is_dir():
            raise FileNotFoundError(f"{where}: there is no optimizer state in {folder}.")
        with contextlib.ExitStack() as undo:
            lock = _locked(folder, shared=read_only, where=where)
            undo.callback(lock.release)
            record = records.load(folder)
            if record is None:
                raise FileNotFoundError(
                    f"{where}: {folder} has no record: its creation did not end. Remove it, and begin again."
                )
            checks.same(record, units, identity, folder, where=where)
            check_room(record.units, buffer_bytes, where=where)
            store = cls(folder, record, lock, buffer_bytes=buffer_bytes, requests=requests, read_only=read_only)
            undo.callback(store._slots.close)
            if not read_only:
                records.settle(folder)
                free = ((i, record.other(i)) for i in range(len(record.units)))
                store._slots.preallocate(free, where=where)
            store._slots.probe([max(s, 0) for s in record.slots])
            undo.pop_all()
        return store

    @property
    def units(self) -> tuple[FileUnit, ...]:
        """What the store was created with."""
        return self._record.units

    @property
    def identity(self) -> dict[str, Any]:
        """What the store was created with."""
        return self._record.identity

    @property
    def generation(self) -> int:
        """How many steps have been committed; 0 is a store without contents."""
        return self._record.generation

    @property
    def extra(self) -> bytes:
        """What was committed with this generation."""
        return self._record.extra

    @property
    def direct(self) -> bool:
        """Reads and writes go past the page cache (O_DIRECT); False where the file system refuses (tmpfs)."""
        return self._slots.direct

    def begin(self) -> DiskStep:
        """A step from this generation to the next. Raises RuntimeError while another one is open, or after `close`."""
        self._check_idle("begin")
        self._step = DiskStep(
            self._record,
            self._slots,
            self._frames,
            commit=self._commit,
            close=self._ended,
            read_only=self._read_only,
        )
        return self._step

    def snapshot(self, dest: str | os.PathLike) -> str:
        """A copy of this generation that later steps do not change; `open` reads it like a store.

        A reflink where the file system can, else a hard link, else a copy of the bytes (another file system). The next
        write to a slot with a hard link makes a new file; from then on the snapshot costs the bytes of a generation.

        Args:
          dest: a folder, made if it is missing; each process makes its own folder in it.

        Returns:
          How: "reflink", "hard link" or "copy".

        Raises:
          RuntimeError: a step is open, or the store has been closed.
          ValueError: generation 0 has no contents, or this process has a snapshot or a store there.
          OSError: the disk is full, or nothing can be written there; what was made is removed.
        """
        where = f"{WHERE}: snapshot"
        self._check_idle("snapshot")
        if self.generation == 0:
            raise ValueError(f"{where}: generation 0 has no contents; commit a step first.")
        folder = Path(dest) / self.folder.name
        if folder.exists():
            raise ValueError(f"{where}: {folder} exists, and nothing is overwritten. Pass another folder.")
        folders.make(Path(dest), where=where)
        files = (self._slots.file(i, s) for i, s in enumerate(self._record.slots))
        return snapshots.take(self._record, files, folder)

    def step_back(self) -> None:
        """Goes back to the previous generation, for a process that committed the last one when others did not.

        The units of the previous generation are kept until the next step writes.

        Raises:
          DamagedStore: that generation is missing, or not whole.
          RuntimeError: while a step is open, or after `close`.
        """
        self._check_idle("step_back")
        before = records.at(self.folder, self.generation - 1)
        if before is None:
            raise DamagedStore(
                f"{WHERE}: step_back: {self.folder} is of generation {self.generation}, and has no whole record of the "
                "one before. Go back to a snapshot or to a checkpoint, and remove the folder."
            )
        records.invalidate(self.folder, self.generation)
        self._record = before

    def close(self) -> None:
        """Abandons an open step, ends the threads and gives the lock up; the second time it does nothing."""
        if not self._closed:
            if self._step is not None:
                self._step.abandon()
            self._closed = True
            self._slots.close()
            self._lock.release()

    def __enter__(self) -> DiskStore:
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def __repr__(self):
        units = counted(len(self.units), "unit")
        return f"<jzero.update.on_host.disk.DiskStore: {units}, generation {self.generation}, {self.folder}>"

    def _commit(self, written: dict[int, np.ndarray], extra: bytes) -> None:
        record = self._record.next(written, extra)
        self._slots.flush_names()
        try:
            records.write(self.folder, record)
        except BaseException:
            self._unsure = True  # the record may be on the disk: no slot of either generation may be written now
            records.invalidate(self.folder, record.generation)
            self._unsure = False
            raise
        self._record = record

    def _ended(self) -> None:
        self._step = None

    def _check_idle(self, verb: str) -> None:
        if self._closed:
            raise RuntimeError(f"{WHERE}: {verb}: the store in {self.folder} has been closed.")
        if self._unsure:
            raise RuntimeError(
                f"{WHERE}: {verb}: a commit failed, and its record cannot be taken back. Close and reopen the store."
            )
        if self._step is not None:
            raise RuntimeError(f"{WHERE}: {verb}: a step is open; commit or abandon it first.")


def _locked(folder: Path, *, shared: bool = False, where: str) -> FolderLock:
    lock = FolderLock(
        folder, where=where, keeps="state", own="delete the state that uses it",
        advice="To read a state while a run goes on, take a snapshot of it.",
    )  # fmt: skip
    lock.acquire(shared=shared)
    return lock
