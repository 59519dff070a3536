"""Which arrays of an optimizer state are in which file, and the pieces of them that this process keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jzero.core.errors import counted, human_bytes, listing, warn
from jzero.layout.host_mesh import bounds_of
from jzero.offload import available_memory
from jzero.stream.schedule import Group
from jzero.update.on_host.chain import Chain
from jzero.update.on_host.disk import FileUnit
from jzero.update.on_host.units import Unit, Units

FRAMES = 8  # units that the buffer holds


class FileLayout:
    """Which arrays are in which file."""

    def __init__(self, chain: Chain):
        self.chain, plan = chain, chain.plan
        assert chain.tier.path is not None
        mine = [d for d in plan.update_plan.mesh.devices.flat if d.process_index == jax.process_index()]
        buffer = chain.tier.buffer
        self.path, self.buffer, self.most = chain.tier.path, buffer, max(1, buffer // FRAMES // max(len(mine), 1))
        self.options = {"process": (jax.process_index(), jax.process_count()), "buffer_bytes": buffer}
        self.types = [jax.ShapeDtypeStruct(x.state_shape, x.dtype) for x in plan.layouts]
        self.extra = chain.count(jax.ShapeDtypeStruct((), np.dtype(np.int32)))
        try:
            self.units = chain.units(self.types, self.extra, self.most)
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
        """Warns of numbers that need whole arrays of more bytes than a frame of the buffer; lists them.

        Raises:
          MemoryError: the host has too little free memory for them and the buffer.
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
        warn(f"{text}\nThe update is correct.")

    def _row(self, row: tuple[Group, int]) -> tuple[str, str, str]:
        group, size = row
        names = [self.chain.names[self.units.kept[s]] for s in group.sources if s in self.units.kept]
        more = f" and {len(names) - 3} more" if names[3:] else ""
        return ", ".join(names[:3]) + more, human_bytes(size), self.units.graph.makers[group.values[0]].name

    def _forms(self, unit: Unit) -> list[Any]:
        """The types of a unit's arrays; for units of `held` only, since others number their arrays differently."""
        return [self.units.form(s, unit.group.chunk) for s, _ in unit.kept]

    def _file_arrays(self, unit: Unit) -> tuple[Any, ...]:
        return tuple(
            (tuple(b - a for a, b in bounds), form.dtype.name) for form in self._forms(unit) for bounds in _local(form)
        )

    def arrays(self, unit: Unit, pieces: Sequence[np.ndarray], *, copy: bool = False) -> list[jax.Array]:
        """Arrays on the host mesh from the pieces of a file; they share memory with the pieces unless `copy`."""
        rest, out = iter(pieces), []
        for form in self._forms(unit):
            local = {bounds: next(rest) for bounds in _local(form)}
            devices = form.sharding.addressable_devices_indices_map(form.shape)
            placed = [
                jax.device_put(np.array(x) if copy else x, d)
                for d, x in ((d, local[bounds_of(index, form.shape)]) for d, index in devices.items())
            ]
            out.append(jax.make_array_from_single_device_arrays(form.shape, form.sharding, placed))
        return out

    def pieces(self, unit: Unit, arrays: Sequence[jax.Array]) -> list[np.ndarray]:
        """The reverse."""
        out = []
        for form, x in zip(self._forms(unit), arrays, strict=True):
            by_bounds = {bounds_of(s.index, form.shape): s.data for s in x.addressable_shards}
            out += [np.asarray(by_bounds[bounds]) for bounds in _local(form)]
        return out

    def number(self, units: Units, unit: Unit) -> int:
        """The number of the file that holds `unit`, one of `units`."""
        return self._numbers[self._key(units, unit)]

    def _key(self, units: Units, unit: Unit) -> Any:
        return tuple(units.kept[s] for s, _ in unit.kept), unit.group.chunk


def _local(form: Any) -> list[tuple[tuple[int, int], ...]]:
    """The bounds of this process's pieces of an array, each once."""
    devices = form.sharding.addressable_devices_indices_map(form.shape)
    return list(dict.fromkeys(bounds_of(index, form.shape) for index in devices.values()))
