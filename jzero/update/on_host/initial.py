"""A new optimizer state in files: made unit by unit, with only a few masters in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from jzero.layout.state_layouts import FEW
from jzero.update.on_host.chain import Chain
from jzero.update.on_host.disk_tier import DiskTier
from jzero.update.on_host.host_arrays import on_devices
from jzero.update.on_host.running import Running
from jzero.update.on_host.units import Unit, Units
from jzero.update.on_host.update import state_of

Masters = Callable[[Sequence[int]], Mapping[int, jax.Array]]
"""Initial masters of params, by their numbers (the param itself, where it has none), in stored shapes on the host."""


def fresh_handles(masters: Masters, chain: Chain, *, step: jax.Array | int | None = None) -> Any:
    """A new state in files.

    Args:
      masters: asked several times, for those that the next units are made from.
      chain: the transformation.
      step: of the train state; None: 0.
    """
    start = _Start(masters, chain)
    tier = DiskTier.create(chain, start.contents, start.small, step=step)
    rows = zip(start.small, chain.kept, chain.specs, strict=True)
    own = [None if k else on_devices(x, spec, chain.plan) for x, k, spec in rows]
    return state_of(chain, own, Running(tier))


class _Start:
    """The first contents of the files.

    Attributes:
      small: the leaves that are in no unit, None in the place of the others.
    """

    def __init__(self, masters: Masters, chain: Chain):
        self.chain, self.initial, self._make = chain, chain.initial, masters
        self._arrays: dict[int, jax.Array] = {}
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
        rows = zip(values, chain.leaves, chain.kept, strict=True)
        self.small = [v if x.size <= FEW or not kept else None for v, x, kept in rows]

    def _array(self, source: int, order: Sequence[int]) -> Any:
        """A master; loads with it as many of those that follow it in `order` as the buffer could hold."""
        if source not in self._arrays:
            rest = order[order.index(source) :] if source in order else ()
            self._arrays = {}  # the earlier ones have been used
            self._arrays = self._made(self._batch({source}, ({n} for n in rest)))
        return self._arrays[source]

    def _batch(self, needed: set[int], more: Iterable[set[int]]) -> list[int]:
        """The sources needed now, and as many of those needed next (`more`) as the buffer could hold."""
        for other in more:
            if sum(map(self.initial.local_bytes, needed | other)) > self.chain.tier.buffer:
                break
            needed = needed | other
        return sorted(needed)

    def contents(self, units: Units, unit: Unit) -> list[jax.Array]:
        """The arrays of a unit; units come in their order."""
        needed = self._needed(units, unit)
        if not needed <= self._arrays.keys():
            held = [u for u in units.units if u.kept]
            self._arrays = {}  # the earlier ones are in their files
            rest = (self._needed(units, other) for other in held[held.index(unit) + 1 :])
            self._arrays = self._made(self._batch(needed, rest))
        arrays = self._single | self._arrays
        return [self.initial.made(units.kept[s], unit.group.chunk, arrays) for s, _ in unit.kept]

    def _needed(self, units: Units, unit: Unit) -> set[int]:
        return {n for s, _ in unit.kept for n in self.initial.sources_of(units.kept[s])}

    def _made(self, sources: Sequence[int]) -> dict[int, jax.Array]:
        params = [self._params[n] for n in sources]
        if not params:
            return {}
        made, dtypes = self._make(params), [m if m is None else m.dtype for m in self.chain.masters]
        return {
            n: made[i] if dtypes[i] is None else made[i].astype(dtypes[i])
            for n, i in zip(sources, params, strict=True)
        }


__all__ = ["Masters", "fresh_handles"]
