"""Masters and moments in files: the update of `Store`, with each unit read before it runs and written after it.

What is kept of a leaf are the pieces of this process's devices, each once. Small leaves, which the user holds, are
committed with every generation, so that a folder is a whole optimizer state; its masters give the params. With them
goes the step that the train state was at when the files were made; each generation is one step more.
"""

from __future__ import annotations

import ctypes
import functools
import io
import json
import shutil
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jzero.core.errors import counted, human_bytes, listing
from jzero.offload import available_memory
from jzero.stream.schedule import Group
from jzero.update.on_host.disk import DiskStore, FileUnit
from jzero.update.on_host.store import Chain, Store, on_host
from jzero.update.on_host.units import Unit, Units, joined
from jzero.update.sharded_update import taken_over

FRAMES = 8  # units that the buffer holds


class DiskTier(Store):
    """Masters and moments in the files of a `DiskStore`."""

    place = "disk"
    gives_memory = False  # what is read lies in the frames of the buffer

    def __init__(self, chain: Chain, disk: DiskStore, layout: FileLayout, small: Sequence[Any]):
        super().__init__(chain, [None] * len(chain.leaves))
        self.generation, self.first_step = disk.generation - 1, first_step(disk.extra)
        self.disk, self.layout = disk, layout
        for at in layout.tiny:
            self.arrays[at] = on_host(small[at], chain.plan)
        self._step: Any = None
        self._waiting: tuple[int, list[Any], list[Any]] | None = None  # file, its arrays, all that its unit computed
        self._read: dict[int, dict[int, Any]] = {}
        self._in_norms = False
        self._since_trim = 0  # bytes that were written

    @property
    def train_step(self) -> int:
        """The step of the train state that has had all of its updates."""
        return self.first_step + self.generation

    @classmethod
    def create(
        cls, chain: Chain, contents: Callable[[Units, Unit], Sequence[Any]], small: Sequence[Any], *, step: Any = None
    ) -> DiskTier:
        """A new folder.

        Args:
          chain: the transformation.
          contents: the arrays of a unit, of what it keeps.
          small: all leaves, or None for those that are in a unit.
          step: of the train state; None: 0.
        """
        layout, at_step = FileLayout(chain), 0 if step is None else int(step)
        layout.units.check()
        layout.report()
        small = [None if at in layout.filed else x for at, x in enumerate(small)]
        disk = DiskStore.create(layout.path, layout.files, identity=layout.identity, **layout.options)
        try:
            with disk.begin() as first:
                for file, unit in enumerate(layout.held):
                    first.write(file, layout.pieces(unit, contents(layout.units, unit)))
                first.commit(packed(small, at_step))
            trim()
        except BaseException:
            disk.close()
            shutil.rmtree(disk.folder, ignore_errors=True)  # it has no contents
            raise
        return cls(chain, disk, layout, small)

    @classmethod
    def open(cls, chain: Chain) -> tuple[DiskTier, list[Any]]:
        """The folder of an earlier run, and the small leaves that belong to its generation.

        Raises:
          FileNotFoundError: the run ended before its first generation was whole.
        """
        layout = FileLayout(chain)
        disk = DiskStore.open(layout.path, layout.files, identity=layout.identity, **layout.options)
        if disk.generation == 0:
            disk.close()
            raise FileNotFoundError(
                f'jzero: Offload(tier="disk"): {disk.folder} is of generation 0: the run that made it ended before its '
                "initial state was written. Nothing can be restored: remove the folder, and begin with jzero.shard."
            )
        _agree(disk)
        small = unpacked(disk.extra, chain)
        return cls(chain, disk, layout, small), small

    @classmethod
    def copy(cls, chain: Chain, source: Path) -> None:
        """Makes the folder of `chain` from a snapshot of one, without a copy of bytes where the file system can."""
        layout = FileLayout(chain)
        given: dict[str, Any] = {"identity": layout.identity, **layout.options, "read_only": True}
        with DiskStore.open(source, layout.files, **given) as disk:
            disk.snapshot(layout.path)

    def close(self) -> None:
        """Gives the folder up."""
        self.disk.close()

    def __del__(self):
        disk = getattr(self, "disk", None)
        if disk is not None and not sys.is_finalizing():  # then the lock goes with the process
            disk.close()

    def leaves(self) -> list[Any]:
        """All arrays whole, in the memory of the host."""
        found: dict[int, list[tuple[Any, Any]]] = {}
        for at, x, chunk in self.every(range(len(self.chain.leaves))):
            found.setdefault(at, []).append((x, chunk))
        out: list[Any] = [None] * len(self.chain.leaves)
        for at, pieces in found.items():
            out[at] = joined(pieces, self.chain.leaves[at], self.chain.plan.home.sharding(self.chain.specs[at]))
        return out

    def every(self, leaves: Collection[int]) -> Iterator[tuple[int, Any, Any]]:
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
            if at in leaves:
                yield at, self.arrays[at], None

    def update(self, params, changed, grads, small, extra):
        """As that of `Store`; after an error the files and this are of the generation before: it can be tried again."""
        tiny: dict[int, Any] = {at: jax.tree.map(jax.numpy.copy, self.arrays[at]) for at in self.layout.tiny}
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

    def units_for(self, grads, extra) -> Units:
        """Those of the files; others are cut as they are, or refused."""
        types = [None if g is None else jax.ShapeDtypeStruct(g.shape, g.dtype) for g in grads]
        if len(jax.tree.leaves(extra)) == len(self.chain.count(0)) and self.layout.fits(types):
            return self.layout.units
        return super().units_for(grads, extra)

    @property
    def most(self) -> int | None:
        """Bytes that a unit may have."""
        return self.layout.most

    def before_units(self, units: Units) -> None:
        """Norms of the state have read units, which are read again."""
        self._read, self._in_norms = {}, False
        self._step.read_ahead(file for file, unit in enumerate(self.layout.held) if unit.group.values)

    def read(self, units: Units, source: int, group: Group):
        """An array of the unit that is updated now; or of any, whole or a chunk, for a number that is made from it."""
        owners = [units.units[k] for k in units.owners[source]]
        if not self._in_norms:
            unit = next(u for u in owners if u.group.chunk == group.chunk)
            file = self.layout.number(units, unit)
            if file not in self._read:
                self._read[file] = self._taken_over(units, unit, file)
            return self._read[file][source]
        asked = [u for u in owners if group.chunk in (None, u.group.chunk)]
        pieces = [(self._copied(units, u)[source], u.group.chunk) for u in asked]
        return pieces[0][0] if group.chunk is not None else joined(pieces, *self._whole(units, source))

    def _whole(self, units: Units, source: int) -> tuple[Any, Any]:
        at = units.kept[source]
        return self.chain.leaves[at], self.chain.plan.home.sharding(self.chain.specs[at])

    def _copied(self, units: Units, unit: Unit) -> dict[int, Any]:
        """The arrays of a unit, which keep no frame of the buffer; those that were read last stay for the next call."""
        file = self.layout.number(units, unit)
        if file not in self._read:
            self._read = {}
            self._read[file] = self._taken_over(units, unit, file, copy=True)
            self._step.release(file)
        return self._read[file]

    def _taken_over(self, units: Units, unit: Unit, file: int, *, copy: bool = False) -> dict[int, Any]:
        """The arrays of a unit by their numbers, with what the user has changed in the params."""
        arrays = self.layout.arrays(self.layout.held[file], self._step.read(file), copy=copy)
        found = dict(zip((s for s, _ in unit.kept), arrays, strict=True))
        for source, x in found.items():
            param = self._replaced.get(units.kept[source])
            if param is not None:
                found[source] = _follow(units.piece(param(), unit.group.chunk), x)
        return found

    def write(self, units: Units, unit: Unit, news: dict[int, Any]) -> None:
        """The new arrays of a unit go to its file once the next one is on its way."""
        if unit.kept:
            file = self.layout.number(units, unit)
            old = self._read.pop(file)
            self._written()
            self._waiting = file, [news[v] if v in news else old[s] for s, v in unit.kept], list(news.values())

    def _written(self) -> None:
        """Writes the unit that waits, once all devices are done with its frame.

        To copy an array to the file waits for the one device that the piece is taken from; where others hold the same
        piece, they read it from the same frame, and may come later.
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
            f'jzero: Offload(tier="disk"): the folders in {disk.folder.parent} are of generations {found}, process by '
            "process, and no step of a run leaves them so. Restore a checkpoint into another folder."
        )
    if disk.generation > min(found):
        disk.step_back()


@jax.jit
def _follow(param, master):
    return taken_over(param, master)


class FileLayout:
    """Which arrays are in which file."""

    def __init__(self, chain: Chain):
        self.chain, plan = chain, chain.plan
        tier = plan.config.tier
        assert tier is not None
        assert tier.path is not None
        mine = [d for d in plan.home.mesh.devices.flat if d.process_index == jax.process_index()]
        buffer = tier.buffer
        self.path, self.buffer, self.most = tier.path, buffer, max(1, buffer // FRAMES // max(len(mine), 1))
        self.options = {"process": (jax.process_index(), jax.process_count()), "buffer_bytes": buffer}
        self.types = [jax.ShapeDtypeStruct(x.state_shape, x.dtype) for x in plan.layouts]
        try:
            self.units = chain.units(self.types, chain.count(jax.ShapeDtypeStruct((), np.int32)), self.most)
        except TypeError as error:
            raise TypeError(
                f'jzero: Offload(tier="disk"): the update of this optimizer cannot be traced from gradients, state and '
                f"params alone: {error}. Files are laid out before the first update, so an optimizer that must have "
                'keyword arguments (value=) cannot run from them. Pass Offload(update="host").'
            ) from error
        self.held = [u for u in self.units.units if u.kept]
        self.files = [FileUnit(self._name(k, u), self._file_arrays(u)) for k, u in enumerate(self.held)]
        self._numbers = {self._key(self.units, u): k for k, u in enumerate(self.held)}
        self.filed = set(self.units.kept.values())  # the leaves that are in units
        self.tiny = [at for at, k in enumerate(chain.kept) if k and at not in self.filed]  # single values
        self.identity = {
            "devices": {k: int(v) for k, v in plan.mesh.shape.items()},
            "params": [[x.name, list(x.shape), x.dtype.name] for x in plan.layouts],
            "state": [[list(x.shape), x.dtype.name, str(s)] for x, s in zip(chain.leaves, chain.specs, strict=True)],
        }

    def fits(self, types: Sequence[Any]) -> bool:
        """True for gradients of the types that the units were made for."""
        return all(
            (a is None) == (b is None) and (a is None or b is None or (a.shape, a.dtype) == (b.shape, b.dtype))
            for a, b in zip(types, self.types, strict=True)
        )

    def check(self, units: Units) -> None:
        """Raises ValueError where gradients of other dtypes, or keyword arguments, cut the state differently."""
        def cuts(units):
            return [([units.kept[s] for s, _ in u.kept], u.group.chunk) for u in units.units if u.kept]

        if cuts(units) != cuts(self.units):
            raise ValueError(
                "jzero: with these gradients the update is cut into other units than the files hold. Pass gradients of "
                "all params, of at most 32 bits, and no keyword arguments that change what is computed together."
            )

    def _name(self, k: int, unit: Unit) -> str:
        names = [self.chain.names[self.units.kept[s]] for s, _ in unit.kept]
        return f"{k}: {names[0]}" + (f" and {counted(len(names) - 1, 'array')} with it" if names[1:] else "")

    def report(self) -> None:
        """Warns of numbers that need arrays whole, which the buffer does not hold; names them.

        Raises:
          MemoryError: the memory of the host does not hold them either.
        """
        rows = [(group, size) for group, size in self.units.whole_for_numbers() if size > self.buffer // FRAMES]
        if not rows:
            return
        worst, free = max(size for _, size in rows), available_memory()
        text = (
            f'jzero: Offload(tier="disk"): {counted(len(rows), "number")} of the update (norms, products of arrays) '
            f"cannot be added up part by part: up to {human_bytes(worst)} of state are in host memory at once, besides "
            f"the buffer of {human_bytes(self.buffer)}:\n"
            + listing([("arrays", "bytes", "made by"), *map(self._row, rows)])
        )
        if free is not None and worst + self.buffer > free:
            raise MemoryError(f"{text}\n{human_bytes(free)} are free.")
        warnings.warn(f"{text}\nThe update is correct.", stacklevel=2)

    def _row(self, row: tuple[Group, int]) -> tuple[str, str, str]:
        group, size = row
        names = [self.chain.names[self.units.kept[s]] for s in group.sources if s in self.units.kept]
        more = f" and {len(names) - 3} more" if names[3:] else ""
        return ", ".join(names[:3]) + more, human_bytes(size), self.units.graph.makers[group.values[0]].name

    def _forms(self, unit: Unit) -> list[Any]:
        """Of a unit of `held`: other units number their arrays in another way."""
        return [self.units.form(s, unit.group.chunk) for s, _ in unit.kept]

    def _file_arrays(self, unit: Unit) -> tuple[Any, ...]:
        return tuple(
            (tuple(b - a for a, b in bounds), form.dtype.name) for form in self._forms(unit) for bounds in _local(form)
        )

    def arrays(self, unit: Unit, pieces: Sequence[np.ndarray], *, copy: bool = False) -> list[jax.Array]:
        """Arrays on the host mesh from the pieces of a file; they alias these unless told to copy."""
        rest, out = iter(pieces), []
        for form in self._forms(unit):
            local = {bounds: next(rest) for bounds in _local(form)}
            devices = form.sharding.addressable_devices_indices_map(form.shape)
            placed = [
                jax.device_put(np.array(x) if copy else x, d)
                for d, x in ((d, local[_bounds(index, form.shape)]) for d, index in devices.items())
            ]
            out.append(jax.make_array_from_single_device_arrays(form.shape, form.sharding, placed))
        return out

    def pieces(self, unit: Unit, arrays: Sequence[jax.Array]) -> list[np.ndarray]:
        """The reverse."""
        out = []
        for form, x in zip(self._forms(unit), arrays, strict=True):
            by_bounds = {_bounds(s.index, form.shape): s.data for s in x.addressable_shards}
            out += [np.asarray(by_bounds[bounds]) for bounds in _local(form)]
        return out

    def number(self, units: Units, unit: Unit) -> int:
        """Which file has a unit of these units."""
        return self._numbers[self._key(units, unit)]

    def _key(self, units: Units, unit: Unit) -> Any:
        return tuple(units.kept[s] for s, _ in unit.kept), unit.group.chunk


def _bounds(index: tuple[slice, ...], shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return tuple((s.indices(n)[0], s.indices(n)[1]) for s, n in zip(index, shape, strict=True))


def _local(form: Any) -> list[tuple[tuple[int, int], ...]]:
    """The bounds of this process's pieces of an array, each once."""
    devices = form.sharding.addressable_devices_indices_map(form.shape)
    return list(dict.fromkeys(_bounds(index, form.shape) for index in devices.values()))


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


def packed(small: Sequence[Any], first: int = 0) -> bytes:
    """The leaves that the user holds, as bytes, keys as their data; and the step that the first generation is of."""
    arrays = {str(i): _data(x) for i, x in enumerate(small) if x is not None}
    file = io.BytesIO()
    types = {k: x.dtype.name for k, x in arrays.items()}
    columns: dict[str, Any] = {k: _plain(x) for k, x in arrays.items()}
    types_text = np.frombuffer(json.dumps(types).encode(), np.uint8)
    np.savez(file, types=types_text, first_step=np.int64(first), **columns)
    return file.getvalue()


def _data(x) -> np.ndarray:
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def _plain(x: np.ndarray) -> np.ndarray:
    return x if x.dtype.kind in "biufc" else np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def first_step(data: bytes) -> int:
    """The step that the first generation is of; 0 in files that do not say."""
    with np.load(io.BytesIO(data)) as file:
        return int(file["first_step"]) if "first_step" in file else 0


def unpacked(data: bytes, chain: Chain) -> list[Any]:
    """The reverse, on the devices of the plan."""
    out: list[Any] = [None] * len(chain.leaves)
    with np.load(io.BytesIO(data)) as file:
        types: Mapping[str, str] = json.loads(bytes(file["types"]).decode())
        for k, name in types.items():
            leaf, x = chain.leaves[int(k)], file[k]
            x = x if x.dtype.name == name else x.view(jax.numpy.dtype(name)).reshape(leaf.shape)
            if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                x = jax.random.wrap_key_data(x, impl=jax.random.key_impl(leaf))
            out[int(k)] = x
    return [None if x is None else _placed(x, spec, chain) for x, spec in zip(out, chain.specs, strict=True)]


def _placed(x, spec, chain: Chain):
    return jax.device_put(x, chain.plan.sharding(spec))


__all__ = ["DiskTier", "FileLayout", "packed", "unpacked"]
