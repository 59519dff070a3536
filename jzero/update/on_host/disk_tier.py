"""Masters and moments in files: the update of `Store`, with each unit read before it runs and written after it.

Each process keeps its own devices' pieces of every leaf, each once. Small leaves, which the user holds, are
committed with every generation, so that a folder is a whole optimizer state; its masters give the params. With them
goes the step that the train state was at when the files were made; each generation is one step more.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jzero.core.processes import everywhere
from jzero.stream.chunks import Chunk
from jzero.stream.schedule import Group
from jzero.update.on_host.chain import Chain
from jzero.update.on_host.disk import DiskStore
from jzero.update.on_host.disk.step import WHERE
from jzero.update.on_host.file_layout import FileLayout
from jzero.update.on_host.host_arrays import Piece, differ, joined, on_host
from jzero.update.on_host.small_leaves import first_step, packed, unpacked
from jzero.update.on_host.store import Store
from jzero.update.on_host.units import Unit, Units
from jzero.update.sharded_update import taken_over

_follow = jax.jit(taken_over)  # donates nothing: the old master lies in a frame of the buffer


class DiskTier(Store):
    """Masters and moments in the files of a `DiskStore`."""

    gives_memory = False  # what is read lies in the frames of the buffer

    def __init__(self, chain: Chain, disk: DiskStore, layout: FileLayout, small: Sequence[jax.Array | None]):
        super().__init__(chain, [None] * len(chain.leaves), layout.most)
        self.cut_as(layout.units, layout.types, layout.extra)
        self.generation, self.first_step = disk.generation - 1, first_step(disk.extra)
        self.disk, self.layout = disk, layout
        for at in layout.tiny:
            self.arrays[at] = on_host(small[at], chain.plan)
        self._step: Any = None
        # file, its arrays, all that its unit computed
        self._waiting: tuple[int, list[jax.Array], list[jax.Array]] | None = None
        self._read: dict[int, dict[int, jax.Array]] = {}
        self._in_norms = False
        self._since_trim = 0  # bytes that were written

    @property
    def train_step(self) -> int:
        """The step of the train state that has had all of its updates."""
        return self.first_step + self.generation

    @classmethod
    def create(
        cls, chain: Chain, contents: Callable[[Units, Unit], Sequence[jax.Array]], small: Sequence[jax.Array | None],
        *, step: jax.Array | int | None = None,
    ) -> DiskTier:  # fmt: skip
        """A new folder.

        Args:
          chain: the transformation.
          contents: gives the arrays that a unit keeps.
          small: all leaves, or None for those that are in a unit.
          step: of the train state; None: 0.
        """
        layout, at_step = FileLayout(chain), 0 if step is None else int(step)
        layout.units.check()
        small = [None if at in layout.filed else x for at, x in enumerate(small)]

        def made():
            layout.report()
            return DiskStore.create(layout.path, layout.files, identity=layout.identity, **layout.options)

        def removed(disk):
            disk.close()
            shutil.rmtree(disk.folder, ignore_errors=True)

        disk = everywhere(made, f"make the folders in {layout.path}", where=WHERE, undo=removed)
        try:
            with disk.begin() as first:
                for file, unit in enumerate(layout.held):
                    first.write(file, layout.pieces(unit, contents(layout.units, unit)))
                first.commit(packed(small, at_step))
            trim()
        except BaseException:
            removed(disk)  # it has no contents
            raise
        return cls(chain, disk, layout, small)

    @classmethod
    def open(cls, chain: Chain) -> tuple[DiskTier, list[jax.Array]]:
        """The folder of an earlier run, and the small leaves that belong to its generation.

        Raises:
          FileNotFoundError: no folder, or the run ended before its first generation was whole.
          ValueError: the processes are more than one generation apart.
          TypeError, ValueError, RuntimeError, OSError: as for `FileLayout` and `DiskStore.open`.
        """
        layout = FileLayout(chain)

        def opened():
            disk = DiskStore.open(layout.path, layout.files, identity=layout.identity, **layout.options)
            if disk.generation > 0:
                return disk
            disk.close()
            raise FileNotFoundError(
                f"{WHERE}: {disk.folder} is of generation 0: the run that made it ended before its initial state was "
                "written. Nothing can be restored: remove the folder, and begin with jzero.shard."
            )

        disk = everywhere(opened, f"open the folders in {layout.path}", where=WHERE, undo=DiskStore.close)
        try:
            _agree(disk)
            small = unpacked(disk.extra, chain)
        except BaseException:
            disk.close()
            raise
        return cls(chain, disk, layout, small), small

    @classmethod
    def copy(cls, chain: Chain, source: Path) -> None:
        """Makes the folder of `chain` from a snapshot of one, without a copy of bytes where the file system can."""
        layout = FileLayout(chain)
        given: dict[str, Any] = {"identity": layout.identity, **layout.options, "read_only": True}

        def copied():
            with DiskStore.open(source, layout.files, **given) as disk:
                disk.snapshot(layout.path)
                return Path(layout.path) / disk.folder.name

        def removed(folder):
            shutil.rmtree(folder, ignore_errors=True)

        everywhere(copied, f"copy {source} to {layout.path}", where=WHERE, undo=removed)

    def close(self) -> None:
        """Gives the folder up."""
        self.disk.close()

    def __del__(self):
        disk = getattr(self, "disk", None)
        if disk is not None and not sys.is_finalizing():  # then the lock goes with the process
            disk.close()

    def leaves(self) -> list[jax.Array | None]:
        """All arrays whole, in the memory of the host."""
        found: dict[int, list[Piece]] = {}
        for at, x, chunk in self.every(range(len(self.chain.leaves))):
            found.setdefault(at, []).append((x, chunk))
        return [self._whole(at, found[at]) if at in found else None for at in range(len(self.chain.leaves))]

    def _whole(self, at: int, pieces: list[Piece]) -> jax.Array:
        return joined(pieces, self.chain.plan.update_plan.sharding(self.chain.specs[at]))

    def every(self, leaves: Collection[int]) -> Iterator[tuple[int, jax.Array, Chunk | None]]:
        """(leaf, array, chunk) of all that is kept of some leaves, in memory of its own."""
        with self.disk.begin() as step:
            step.read_ahead(range(len(self.layout.held)))
            for file, unit in enumerate(self.layout.held):
                arrays = self.layout.arrays(unit, step.read(file), copy=True)
                jax.block_until_ready(arrays)
                step.release(file)
                for (source, _), x in zip(unit.kept, arrays, strict=True):
                    if self.layout.units.kept[source] in leaves:
                        yield self.layout.units.kept[source], x, unit.group.chunk
        for at in self.layout.tiny:
            if at in leaves and (x := self.arrays[at]) is not None:
                yield at, x, None

    def small_leaves(self) -> list[jax.Array]:
        """The leaves that the user holds as the last update left them, on the devices; they are in the record."""
        small = unpacked(self.disk.extra, self.chain)
        return [x for x, kept in zip(small, self.chain.kept, strict=True) if not kept]

    def differing(self, asked: Mapping[int, Callable[[], jax.Array]]) -> set[int]:
        """The masters, by leaf, whose casts are not the given params.

        Args:
          asked: functions that return the params on their shards on the host, one of which is held at a time.
        """
        found: set[int] = set()
        last, param = -1, None
        for at, x, chunk in self.every(set(asked)):
            if at in found:
                continue
            if at != last:
                last, param = at, asked[at]()
            assert param is not None
            if bool(differ(x.astype(param.dtype), self.layout.units.piece(param, chunk))):
                found.add(at)
        return found

    def update(self, params, changed, grads, small, extra):
        """As `Store.update`; after an error, files and tier are at the last generation: the update can be retried."""
        tiny: dict[int, jax.Array] = {at: jax.tree.map(jax.numpy.copy, self.arrays[at]) for at in self.layout.tiny}
        try:
            return (yield from super().update(params, changed, grads, small, extra))
        except BaseException:
            if self.disk.generation == self.generation + 1:
                self.broken, self._waiting, self._read = "", None, {}
                for at, x in tiny.items():
                    self.arrays[at] = x
            raise

    def _update(self, params, changed, grads, small, extra):
        units = self.units_for(grads, extra)
        self.layout.check(units)
        with self.disk.begin() as step:
            self._step, self._waiting, self._read, self._in_norms = step, None, {}, True
            self._replaced = {
                at: params[i] for i, at in self.chain.master_leaves.items() if changed[i] and self.arrays[at] is None
            }
            out = yield from super()._update(params, changed, grads, small, extra)
            self._written()
            small = [self.arrays[at] if x is None else x for at, x in enumerate(out[0])]
            step.commit(packed(small, self.first_step))
        return out

    def before_units(self, units: Units) -> None:
        """Forgets the units that norms of the state have read, and starts to read all of them for the update."""
        self._read, self._in_norms = {}, False
        self._step.read_ahead(file for file, unit in enumerate(self.layout.held) if unit.group.values)

    def read(self, units: Units, source: int, group: Group):
        """An array of the unit that is updated now; or of any, whole or a chunk, for a number that is made from it."""
        owners = [units.units[k] for k in units.owners[source]]
        if not self._in_norms:
            return self._in_frame(units, next(u for u in owners if u.group.chunk == group.chunk))[source]
        asked = [u for u in owners if group.chunk in (None, u.group.chunk)]
        pieces = [(self._copied(units, u)[source], u.group.chunk) for u in asked]
        return pieces[0][0] if group.chunk is not None else self._whole(units.kept[source], pieces)

    def _in_frame(self, units: Units, unit: Unit) -> dict[int, jax.Array]:
        """The arrays of a unit in its frame of the buffer, until they are written."""
        file = self.layout.number(units, unit)
        if file not in self._read:
            self._read[file] = self._taken_over(units, unit, file)
        return self._read[file]

    def _copied(self, units: Units, unit: Unit) -> dict[int, jax.Array]:
        """The arrays of a unit, which keep no frame of the buffer; those that were read last stay for the next call."""
        file = self.layout.number(units, unit)
        if file not in self._read:
            self._read = {}
            self._read[file] = self._taken_over(units, unit, file, copy=True)
            self._step.release(file)
        return self._read[file]

    def _taken_over(self, units: Units, unit: Unit, file: int, *, copy: bool = False) -> dict[int, jax.Array]:
        """The arrays of a unit by their numbers, with what the user has changed in the params."""
        arrays = self.layout.arrays(self.layout.held[file], self._step.read(file), copy=copy)
        found = dict(zip((s for s, _ in unit.kept), arrays, strict=True))
        for source, x in found.items():
            param = self._replaced.get(units.kept[source])
            if param is not None:
                found[source] = _follow(units.piece(param(), unit.group.chunk), x)
        return found

    def write(self, units: Units, unit: Unit, news: dict[int, jax.Array]) -> None:
        """The new arrays of a unit go to its file once the next one is on its way."""
        if unit.kept:
            old = self._in_frame(units, unit)  # nothing of it has been read where new state is made of gradients alone
            file = self.layout.number(units, unit)
            del self._read[file]
            self._written()
            self._waiting = file, [news[v] if v in news else old[s] for s, v in unit.kept], list(news.values())

    def _written(self) -> None:
        """Writes the unit that waits, once all devices are done with its frame.

        Copying an array to the file waits only for the device that the piece is taken from. Other devices that hold the
        same piece read it from the same frame, maybe later.
        """
        if self._waiting is not None:
            file, arrays, news = self._waiting
            jax.block_until_ready((arrays, news))
            pieces = self.layout.pieces(self.layout.held[file], arrays)
            self._step.write(file, pieces)
            self._waiting = None
            self._since_trim += sum(x.nbytes for x in pieces)
            if self._since_trim > self.layout.buffer // 2:
                self._since_trim = 0
                trim()


def _agree(disk: DiskStore) -> None:
    """All processes at one generation: each commits by itself, so that a kill may leave some of them one ahead."""
    if jax.process_count() == 1:
        return
    found = multihost_utils.process_allgather(np.int32(disk.generation)).tolist()
    if max(found) - min(found) > 1:
        raise ValueError(
            f"{WHERE}: the folders in {disk.folder.parent} are of generations {found}, process by "
            "process. A killed run leaves them at most one apart. Restore a checkpoint into another folder."
        )
    ahead = disk.generation > min(found)
    everywhere(lambda: disk.step_back() if ahead else None, f"go back to generation {min(found)}", where=WHERE)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


def trim() -> None:
    """Gives freed memory back to the system.

    glibc keeps what is freed in arrays below 32 MiB, in each of its arenas: beside a store of 7 GB on a disk that was
    1.7 GiB more than jzero had in use (benchmarks/host_update.py --rss).
    """
    if (give := _malloc_trim()) is not None:
        give(0)
