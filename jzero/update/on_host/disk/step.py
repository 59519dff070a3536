"""One step: units are read ahead, updated, and written behind, through the frames of the buffer.

[Note: who takes a frame]
Units are read in the order announced, and what is read ahead leaves one frame free. So a unit that was released before
its update can be written without waiting for reads that nobody has asked for yet. The unit asked for now may take the
last frame. When none is left and no write is under way, no frame will become free: that is an error and not a wait.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from jzero.core.errors import check_int, listing
from jzero.update.on_host.disk.frames import Frames
from jzero.update.on_host.disk.record import EMPTY, Record
from jzero.update.on_host.disk.slots import Slots
from jzero.update.on_host.disk.transfers import DiskTransfer

WHERE = 'jzero: Offload(tier="disk")'


class DiskStep:
    """One step of a store, from `DiskStore.begin`; leaving its `with` block without `commit` abandons it.

    It belongs to one thread. An error in a thread of the store is raised by the next call; then only `abandon` is left,
    and the store keeps the generation that it had.
    """

    def __init__(
        self,
        record: Record,
        slots: Slots,
        frames: Frames,
        *,
        commit: Callable[[dict[int, np.ndarray], bytes], None],
        close: Callable[[], None],
        read_only: bool,
    ):
        self._record, self._slots, self._frames = record, slots, frames
        self._commit, self._close, self._read_only = commit, close, read_only
        self._changed = threading.Condition()  # guards all below
        # announced, and not begun
        self._order: collections.OrderedDict[int, None] = collections.OrderedDict()
        self._ahead: dict[int, tuple[DiskTransfer, np.ndarray]] = {}  # begun, and not asked for
        self._held: dict[int, np.ndarray] = {}  # with the caller
        self._writing: dict[int, DiskTransfer] = {}
        self._written: dict[int, np.ndarray] = {}  # digests
        self._error: BaseException | None = None
        self._open = True

    def read_ahead(self, order: Iterable[int]) -> None:
        """Announces which units are read next, in which order; reading begins now, as far as frames are free.

        Raises:
          ValueError: an index out of range, announced twice, held, written in this step, or never written at all.
          OSError, DamagedStore: a read or a write before this call failed.
        """
        with self._changed:
            self._check()
            for i in order:
                self._check_read(i, "read_ahead")
                if i in self._order or i in self._ahead:
                    raise ValueError(f"{WHERE}: read_ahead: {self._name(i)} is announced already.")
                self._order[i] = None
            self._prefetch()

    def read(self, index: int) -> list[np.ndarray]:
        """The arrays of a unit as of the last generation, its checksums checked; waits for the disk.

        They are writable views of a frame, each aligned to 64 bytes. They are valid until `write` or `release` of the
        unit; what aliases them (`jax.device_put` does on CPUs) must be done by then.

        Raises:
          ValueError: the unit is not the next one announced, or `read_ahead` would refuse it.
          RuntimeError: the caller holds all frames.
          OSError, DamagedStore: a read or a write failed; names the file.
        """
        with self._changed:
            self._check()
            self._check_read(index, "read")
            awaited = next(iter(self._ahead), next(iter(self._order), index))
            if index != awaited:
                raise ValueError(
                    f"{WHERE}: read: {self._name(awaited)} was announced next, not {self._name(index)}."
                )
            if index not in self._ahead:
                self._wait_for_frame("read")
                self._order.pop(index, None)
                self._begin(index)
            transfer, frame = self._ahead[index]
        transfer.finished.wait()
        with self._changed:
            self._check()
            del self._ahead[index]
            self._held[index] = frame
            self._prefetch()
            return transfer.unit.views(frame)

    def write(self, index: int, arrays: Sequence[np.ndarray]) -> None:
        """Writes a unit to its free slot, and returns when its arrays have been copied, or are views of its frame.

        Args:
          index: of a unit that was read, or not; once per step.
          arrays: new values; views that `read` returned may have been changed in place and must not be used any more.

        Raises:
          ValueError: an index out of range, other shapes or dtypes, a unit announced but not read or already written in
            this step, or a store opened read-only.
          RuntimeError: the caller holds all frames, or the step has ended.
          OSError, DamagedStore: a read or a write failed; names the file.
        """
        with self._changed:
            self._check()
            self._check_write(index)
            unit, held = self._slots.units[index], self._held.get(index)
            if held is None:
                unit.check(arrays, where=f"{WHERE}: write")
                self._wait_for_frame("write")
                held = self._held[index] = self._frames.take()
        unit.put(held[: unit.nbytes], arrays, where=f"{WHERE}: write")
        with self._changed:
            self._writing[index] = self._slots.write(
                index, self._record.other(index), held, lambda t: self._wrote(index, t, held)
            )
            del self._held[index]

    def release(self, index: int) -> None:
        """Gives back the frame of a unit that was read; raises ValueError for one that is not held."""
        with self._changed:
            self._check()
            if index not in self._held:
                raise ValueError(
                    f"{WHERE}: release: unit {index} is not held: it was not read, or is written."
                )
            self._frames.give(self._held.pop(index))
            self._prefetch()

    def commit(self, extra: bytes = b"") -> None:
        """Waits for all writes and makes them the next generation; units that were not written stay as they are.

        Args:
          extra: kept in the record, under its checksum: small leaves, the number of the step.

        Raises:
          ValueError: a unit has never been written, or the store is read-only.
          OSError, DamagedStore: a read or a write failed; the store still has the generation before.
        """
        with self._changed:
            self._check()
            self._check_commit()
            self._changed.wait_for(lambda: not self._writing)
            self._check()
        self._commit(self._written, bytes(extra))
        self.abandon()

    def abandon(self) -> None:
        """Ends the step; what was not committed never happened. Does nothing after `commit`."""
        if not self._open:
            return
        with self._changed:
            self._open = False
            self._order.clear()
            begun = [*(t for t, _ in self._ahead.values()), *self._writing.values()]
        for transfer in begun:
            transfer.cancel(InterruptedError("abandoned"))
            transfer.finished.wait()
        with self._changed:
            self._changed.wait_for(lambda: not self._writing)
            for frame in [*(f for _, f in self._ahead.values()), *self._held.values()]:
                self._frames.give(frame)
            self._ahead, self._held = {}, {}
        self._close()

    def __enter__(self) -> DiskStep:
        return self

    def __exit__(self, *error) -> None:
        self.abandon()

    # what follows holds the lock

    def _prefetch(self) -> None:
        while self._order and self._frames.free > 1 and self._open and self._error is None:
            self._begin(self._order.popitem(last=False)[0])

    def _begin(self, index: int) -> None:
        frame = self._frames.take()
        slot, digests = self._record.slots[index], self._record.digests[index]
        self._ahead[index] = self._slots.read(index, slot, frame, digests, self._done), frame

    def _wait_for_frame(self, verb: str) -> None:
        self._changed.wait_for(lambda: self._frames.free or not self._writing or self._error)
        self._check()
        if not self._frames.free:
            rows = [(f"unit {i}", self._slots.units[i].name) for i in self._held]
            raise RuntimeError(
                f"{WHERE}: {verb}: all {self._frames.count} frames of the buffer are taken, and no write is under way "
                f"that would free one. {len(self._held)} units were read, and neither written nor released:\n"
                f"{listing(rows)}\nWrite or release one first, or open the store with a larger buffer_bytes."
            )

    # called by the threads of the store

    def _done(self, transfer: DiskTransfer) -> None:
        with self._changed:
            self._error = self._error or transfer.error
            self._changed.notify_all()

    def _wrote(self, index: int, transfer: DiskTransfer, frame: np.ndarray) -> None:
        with self._changed:
            del self._writing[index]
            self._written[index] = transfer.digests
            self._frames.give(frame)
            self._done(transfer)
            self._prefetch()

    # what is refused

    def _check(self) -> None:
        if not self._open:
            raise RuntimeError(f"{WHERE}: this step has ended; begin another one.")
        if self._error is not None:
            raise self._error

    def _check_read(self, index: int, verb: str) -> None:
        check_int(index, "index", where=f"{WHERE}: {verb}", low=0, high=len(self._slots.units) - 1)
        why = None
        if index in self._held:
            why = "is held: write or release it first"
        elif index in self._writing or index in self._written:
            why = "was written in this step, and has no committed value yet"
        elif self._record.slots[index] == EMPTY:
            why = "has never been written: generation 0 has no contents. Write all units, and commit"
        if why is not None:
            raise ValueError(f"{WHERE}: {verb}: {self._name(index)} {why}.")

    def _check_write(self, index: int) -> None:
        check_int(index, "index", where=f"{WHERE}: write", low=0, high=len(self._slots.units) - 1)
        self._check_writable("write")
        if index in self._writing or index in self._written:
            raise ValueError(f"{WHERE}: write: {self._name(index)} was written in this step already.")
        if index in self._ahead or index in self._order:
            raise ValueError(f"{WHERE}: write: {self._name(index)} is announced to be read: read it first.")

    def _check_commit(self) -> None:
        self._check_writable("commit")
        known = {*self._writing, *self._written}
        empty = [i for i, s in enumerate(self._record.slots) if s == EMPTY and i not in known]
        if empty:
            raise ValueError(
                f"{WHERE}: commit: {len(empty)} of {len(self._slots.units)} units have never been written:\n"
                f"{listing([(f'unit {i}', self._slots.units[i].name) for i in empty])}\nThe first step writes all."
            )

    def _check_writable(self, verb: str) -> None:
        if self._read_only:
            raise ValueError(f"{WHERE}: {verb}: {self._slots.folder} was opened with read_only=True.")

    def _name(self, index: int) -> str:
        return f"unit {index} ({self._slots.units[index].name!r})"
