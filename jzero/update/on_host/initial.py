"""A new optimizer state in files: made unit by unit, from masters of which a few are in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jzero.update.on_host.disk_tier import DiskTier
from jzero.update.on_host.running import Running
from jzero.update.on_host.store import Chain, on_devices
from jzero.update.on_host.units import Unit, Units
from jzero.update.on_host.update import state_of

Masters = Callable[[Sequence[int]], Mapping[int, Any]]
"""Initial masters of params, by their numbers (the param itself, where it has none), in stored shapes on the host."""


def fresh_handles(masters: Masters, chain: Chain, *, step: Any = None) -> Any:
    """A new state in files.

    Args:
      masters: asked several times, for those that the next units are made from.
      chain: the transformation.
      step: of the train state; None: 0.
    """
    start = _Start(masters, chain)
    tier = DiskTier.create(chain, start.contents, start.small, step=step)
    own = [None if k else x for k, x in zip(chain.kept, start.small, strict=True)]
    specs = zip(own, chain.specs, strict=True)
    return state_of(chain, [None if x is None else on_devices(x, s, chain.plan) for x, s in specs], Running(tier))


class _Start:
    """The first contents of the files.

    Attributes:
      small: the leaves that are in no unit, None in the place of the others.
    """

    def __init__(self, masters: Masters, chain: Chain):
        self.chain, self.initial, self._make = chain, chain.initial, masters
        self._arrays: dict[int, Any] = {}
        ins = self.initial.graph.ins
        self._params = {n: i for i, n in enumerate(ins)}
        self._single = self._made([n for n in ins if self.initial.graph.avals[n].size <= 1])
        numbers = [s for group in self.initial.number_groups() for s in group.sources]
        self.initial.scalars(self._single, lambda source, _: self._array(source, numbers))
        small = self._single | self.initial.small_outs(self._single)
        for at, v in enumerate(self.initial.graph.outs):
            if self.initial.is_everywhere(v) and v not in small:  # a few values, made from large arrays
                few = {s: self._array(s, []) for s in self.initial.sources_of(at)}
                small[v] = self.initial.made(at, None, self._single | few)
        self._arrays = {}
        values = [small.get(v) for v in self.initial.graph.outs]
        rows = zip(values, chain.leaves, strict=True)
        self.small = [v if v is not None and x.size <= 16 else None for v, x in rows]

    def _array(self, source: int, order: Sequence[int]) -> Any:
        """A master, and while the buffer could hold them those that are asked for after it in this order."""
        if source not in self._arrays:
            batch = {source}
            for other in order[order.index(source) :] if source in order else ():
                if sum(map(self.initial.local_bytes, batch | {other})) > self._buffer:
                    break
                batch.add(other)
            self._arrays = {}  # the earlier ones have been used
            self._arrays = self._made(sorted(batch))
        return self._arrays[source]

    @property
    def _buffer(self) -> int:
        tier = self.chain.plan.config.tier
        assert tier is not None
        return tier.buffer

    def contents(self, units: Units, unit: Unit) -> list[Any]:
        """The arrays of a unit; units come in their order."""
        if not self._needed(units, unit) <= self._arrays.keys():
            self._arrays = {}  # the earlier ones are in their files
            self._arrays = self._made(self._next(units, unit))
        arrays = self._single | self._arrays
        return [self.initial.made(units.kept[s], unit.group.chunk, arrays) for s, _ in unit.kept]

    def _needed(self, units: Units, unit: Unit) -> set[int]:
        return {n for s, _ in unit.kept for n in self.initial.sources_of(units.kept[s])}

    def _next(self, units: Units, unit: Unit) -> list[int]:
        """What the next units are made from: of this one, and of others while the buffer could hold it."""
        held = [u for u in units.units if u.kept]
        needed = self._needed(units, unit)
        for other in held[held.index(unit) + 1 :]:
            more = needed | self._needed(units, other)
            if sum(map(self.initial.local_bytes, more)) > self._buffer:
                break
            needed = more
        return sorted(needed)

    def _made(self, sources: Sequence[int]) -> dict[int, Any]:
        params = [self._params[n] for n in sources]
        if not params:
            return {}
        made, dtypes = self._make(params), [m if m is None else m.dtype for m in self.chain.masters]
        return {
            n: made[i] if dtypes[i] is None else made[i].astype(dtypes[i])
            for n, i in zip(sources, params, strict=True)
        }


__all__ = ["Masters", "fresh_handles"]
