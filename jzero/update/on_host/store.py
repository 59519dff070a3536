"""Keeps masters and moments outside of the device, and updates them unit by unit."""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jzero.core.types import PyTree, Shaped
from jzero.stream.schedule import Group
from jzero.update.on_host.chain import Chain
from jzero.update.on_host.host_arrays import Piece, joined
from jzero.update.on_host.units import Unit, Units
from jzero.update.sharded_update import taken_over

RESTORE = "jzero.checkpoint.restore(path, jzero.abstract(create, ...))"
AHEAD = 2  # units that are dispatched before the new params of the first of them go to the device
_follow = jax.jit(taken_over, donate_argnums=1)


class Store:
    """Masters and moments in the memory of the host.

    Attributes:
      chain: the transformation.
      generation: how many updates they have had.
      most: bytes that a unit may have; None: arrays are not cut.
    """

    gives_memory = True
    """New state takes the memory of the old."""

    def __init__(self, chain: Chain, leaves: Sequence[jax.Array | None], most: int | None = None):
        self.chain, self.generation, self.most = chain, 0, most
        self.arrays = [x if k else None for x, k in zip(leaves, chain.kept, strict=True)]
        self.broken = ""
        self._units: dict[Any, Units] = {}

    def leaves(self) -> list[jax.Array | None]:
        """The arrays that are kept, whole; None in the place of a leaf that is not."""
        self.check_whole()
        return list(self.arrays)

    def check_whole(self) -> None:
        """Raises RuntimeError where an update was broken off half-way."""
        if self.broken:
            raise RuntimeError(
                f"jzero: the update of generation {self.generation} was broken off ({self.broken}), and part of the "
                "optimizer state is of the next one already. "
                f"Restore a checkpoint: {RESTORE}."
            )

    def update(
        self, params: Sequence[Callable[[], jax.Array]], changed: Sequence[bool], grads: list[jax.Array | None],
        small: list[jax.Array | None], extra: PyTree,
    ):  # fmt: skip
        """One update in place.

        Args:
          params: functions that return the params on their shards on the host; called when they are needed.
          changed: which of them the user has replaced.
          grads: on their shards on the host, in stored shapes; None where a param has none. The list is emptied, so
            that each gradient is freed once it has been used.
          small: the leaves of the state that the user holds; None where the store has one.
          extra: keyword arguments of the update.

        Yields:
          (number of the param, (its new value or a chunk of it, the chunk or None)), as they come.

        Returns:
          The new `small`, and the new values of single-value params, by number.
        """
        self.check_whole()
        self._touched = False
        try:
            result = yield from self._update(params, changed, grads, small, extra)
        except BaseException as error:
            if self._touched:  # else the state is as it was, and the call can be repeated
                self.broken = f"{type(error).__name__}: {error}"[:200]
            raise
        self.generation += 1
        return result

    def _update(self, params, changed, grads, small, extra):
        self._take_over(params, changed)
        units = self.units_for(grads, extra)
        given, known, numbers = self._arguments(units, params, grads, small, extra)
        grads.clear()

        def fetch(source: int, group: Group):
            if source in given:
                return units.piece(given[source](), group.chunk)
            return self.read(units, source, group)

        units.residents(known, fetch)
        units.scalars(known, fetch)
        small_outs = units.small_outs(known)
        pieces: dict[int, list[Piece]] = {}  # of small results that units compute
        self.before_units(units)
        uses = collections.Counter(s for unit in units.units for s in unit.group.sources)
        waiting: collections.deque[list[tuple[int, Piece]]] = collections.deque()
        for unit in units.units:
            if unit.group.values:
                news = self._run(units, unit, known, fetch, given)
                waiting.append([(numbers[v], (x, unit.group.chunk)) for v, x in news.items() if v in numbers])
                for v in filter(units.is_everywhere, news):
                    pieces.setdefault(v, []).append((news[v], unit.group.chunk))
                uses.subtract(unit.group.sources)
                for s in unit.group.sources:
                    if not uses[s]:
                        given.pop(s, None)
            if len(waiting) > AHEAD:
                yield from waiting.popleft()
        while waiting:
            yield from waiting.popleft()
        small_outs |= {v: joined(some, units.everywhere, units.graph.avals[v].shape) for v, some in pieces.items()}
        return self._small_results(units, numbers, small_outs)

    def units_for(self, grads: Sequence[Shaped], extra: PyTree) -> Units:
        """The units for gradients and keyword arguments of these types."""
        types = _types(grads, extra)
        if str(types) not in self._units:
            self._units[str(types)] = self.chain.units(*types, self.most)
        return self._units[str(types)]

    def cut_as(self, units: Units, grads: Sequence[Shaped], extra: PyTree) -> None:
        """Sets the units for gradients and keyword arguments of these types."""
        self._units[str(_types(grads, extra))] = units

    def frozen_reads(self, grads: Sequence[Shaped], extra: PyTree) -> set[int]:
        """Which of the params without a master an update of these types reads."""
        units = self.units_for(grads, extra)
        groups = (*units.schedule.scalars, *(unit.group for unit in units.units))
        read = {s for group in groups for s in group.sources}
        frozen = [i for i, m in enumerate(self.chain.masters) if m is None]
        rows = zip(frozen, units.graph.ins, strict=False)
        return {i for i, n in rows if n in read or units.graph.avals[n].size <= 1}

    def before_units(self, units: Units) -> None:
        """Called when all norms are known, before the first unit is updated."""

    def read(self, units: Units, source: int, group: Group):
        """An array that is kept, for a group that reads it."""
        return self.arrays[units.kept[source]]

    def write(self, units: Units, unit: Unit, news: dict[int, jax.Array]) -> None:
        """The new arrays of a unit."""
        for source, value in unit.kept:
            if value in news:
                self.arrays[units.kept[source]] = news[value]

    def _run(self, units: Units, unit: Unit, known, fetch, given) -> dict[int, jax.Array]:
        """Dispatches a unit; returns its results by their numbers."""
        group = unit.group
        own = self._own(units, unit, given)
        outs = units.outs_of(group, known, [fetch(s, group) for s in group.sources], own=own)
        news = dict(zip(group.values, outs, strict=True))
        self._touched = True
        self.write(units, unit, news)
        return news

    def _own(self, units: Units, unit: Unit, given) -> list[int]:
        """The sources whose memory results take: new state that of the old, others that of gradients or params."""
        avals, replaced = units.graph.avals, {v: s for s, v in unit.kept if v != s}
        fits = list(replaced.values()) if self.gives_memory else []
        rest = (v for v in unit.group.values if not (self.gives_memory and v in replaced))
        free = collections.Counter((avals[v].shape, avals[v].dtype) for v in rest)
        for s in unit.group.sources:
            form = avals[s].shape, avals[s].dtype
            if s in given and free[form]:
                free[form] -= 1
                fits.append(s)
        return fits

    def _arguments(self, units: Units, params, grads, small, extra):
        """Large arguments as functions, small ones as values, and the number of the param that each result is."""
        chain, graph = self.chain, units.graph
        given: dict[int, Callable[[], jax.Array]] = {}
        known: dict[int, Any] = {}
        numbers = iter(graph.ins)

        def add(x: Callable[[], jax.Array], size: int):
            number = next(numbers)
            if size > 1:
                given[number] = functools.cache(x)
            else:
                known[number] = x()

        for m, x, param in zip(chain.masters, chain.plan.layouts, params, strict=True):
            if m is None:
                add(param, math.prod(x.state_shape))
        for g in grads:
            if g is not None:
                add(lambda g=g: g, g.size)
        for x, mine, k, array in zip(chain.leaves, small, chain.kept, self.arrays, strict=True):
            number = next(numbers)
            if not k or x.size <= 1:
                known[number] = mine if not k else array
        for value, number in zip(jax.tree.leaves(extra), numbers, strict=True):
            known[number] = value
        return given, known, dict(zip(graph.outs, chain.master_leaves, strict=False))

    def _small_results(self, units: Units, numbers: dict[int, int], outs: dict[int, jax.Array]):
        """New values of the small leaves that the user holds, and of small params; small masters are kept."""
        news, values = [], units.graph.outs[len(numbers) :]
        for at, (value, k) in enumerate(zip(values, self.chain.kept, strict=True)):
            if k and value in outs:
                self.arrays[at] = outs[value]
            news.append(None if k else outs[value])
        return news, {numbers[v]: x for v, x in outs.items() if v in numbers}

    def _take_over(self, params, changed) -> None:
        """Masters of params that the user has replaced: see [Note: the master follows the param]."""
        for i, at in self.chain.master_leaves.items():
            if changed[i] and self.arrays[at] is not None:
                self.arrays[at] = _follow(params[i](), self.arrays[at])


def _types(grads: Sequence[Shaped], extra: PyTree) -> tuple[list[jax.ShapeDtypeStruct], Any]:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (list(grads), extra))
