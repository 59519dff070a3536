"""How a function of arrays in host memory is cut into units that fit into a stated number of bytes.

[Note: units]
Results that read, or replace, host arrays in common belong together (a master and its moments): they are fetched,
computed and written as one unit. Small ones share a unit. What couples units are single numbers (a global norm, a
count, whether all is finite): they are computed once, before any unit writes; whatever else reads host memory is
computed again in every unit that needs it. So a norm of the updates reads the state twice and still holds no more
than the bound.

[Note: pieces]
A unit above the bound is taken in pieces, where everything on the way is elementwise: a piece is sliced from the host
array, and its result put in its place there. Arrays are seen as [n, size/n] in a dim that n devices share, so that a
piece is a piece of every shard. In one array the fetch of a piece waits for the write of the one before; pieces of
several arrays take turns, and the bus is busy both ways. A padded leaf is not cut: the optimizer sees another shape
than is stored.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jzero.graph import ELEMENTWISE, REDUCTIONS, Graph, Node
from jzero.specs import make_spec, shard_factor, spec_entries

ALIVE = 3  # units whose bytes may be on the device at once: written, updated, fetched


@dataclasses.dataclass(frozen=True)
class Home:
    """Where an argument or a result lives.

    Attributes:
      sharding: its layout in host memory; None: device memory, in any layout.
      replaces: of a result, the argument whose buffer it takes; None: a new one.
    """

    sharding: NamedSharding | None = None
    replaces: int | None = None

    @property
    def mesh(self) -> Mesh:
        """The devices of a home in host memory."""
        assert self.sharding is not None
        assert isinstance(self.sharding.mesh, Mesh)
        return self.sharding.mesh

    @property
    def on_device(self) -> NamedSharding:
        """The same layout in device memory."""
        assert self.sharding is not None
        return self.sharding.with_memory_kind("device")

    def of(self, layout: NamedSharding) -> NamedSharding:
        """A layout in the memory of this home."""
        kind = "device" if self.sharding is None else str(self.sharding.memory_kind)
        return layout.with_memory_kind(kind)

    def take(self, x, layout: NamedSharding | None = None):
        """An array from device memory, in this home; `layout`: of a piece of it, in device memory."""
        if self.sharding is None:
            return x
        layout = layout or self.on_device
        x = jax.lax.with_sharding_constraint(x, layout)  # a copy to the host alone does not pin a layout
        return jax.device_put(x, self.of(layout))


DEVICE = Home()


@dataclasses.dataclass(frozen=True)
class Piece:
    """Part of an array seen as `view`: where it begins there, its shape, and the layout of it in device memory."""

    view: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]
    layout: NamedSharding

    def of(self, x):
        """The piece of an array."""
        end = [a + b for a, b in zip(self.start, self.shape, strict=True)]
        return jax.lax.slice(jnp.reshape(x, self.view), self.start, end)


@dataclasses.dataclass(frozen=True)
class Unit:
    """What is fetched, computed and written together: results, or one piece of the results of large arrays.

    Attributes:
      values: the numbers of the results.
      sources: the numbers of the host arguments that are fetched.
      piece: None: whole.
    """

    values: tuple[int, ...]
    sources: tuple[int, ...]
    piece: Piece | None = None


@dataclasses.dataclass(frozen=True)
class Excess:
    """Results that need more bytes of host arrays at once than the bound, and why they cannot be cut."""

    outs: tuple[int, ...]
    nbytes: int
    because: str


def shard_bytes(aval, home: Home) -> int:
    """Bytes of one device's shard of an array in host memory; 0 for an array in device memory."""
    if home.sharding is None:
        return 0
    size = math.prod(aval.shape) * aval.dtype.itemsize
    return size // shard_factor(home.sharding.spec, home.mesh)


class Cut:
    """How a function is cut: the units in the order in which they run, and what does not fit.

    Attributes:
      units: of the results that live in host memory or read what does.
      scalars: units of the single numbers that they need from host memory; these run first.
      excess: what needs more than the bound.
    """

    def __init__(
        self,
        graph: Graph,
        homes: Sequence[Home],
        out_homes: Sequence[Home],
        in_flight_bytes: int,
        *,
        whole: bool = False,
    ):
        self.graph, self.out_homes, self.in_flight_bytes = graph, out_homes, in_flight_bytes
        self.whole = whole
        self.made = dict(zip(graph.outs, out_homes, strict=True))
        self.homes = dict(zip(graph.ins, homes, strict=True))
        self.limit = max(in_flight_bytes // ALIVE, 1)
        self.reads = graph.reads([i for i, h in self.homes.items() if h.sharding is not None])
        self.excess: list[Excess] = []
        self.scalars = [
            unit for value in self._needed_scalars() for unit in self._cut((value,), self._below(value))
        ]
        small: list[Unit] = []
        large: list[list[Unit]] = []
        held = 0
        for values in self._components():
            sources = frozenset().union(*(self.reads.get(v, frozenset()) for v in values))
            units = self._cut(values, sources)
            size = self._bytes(values, sources)
            if len(units) > 1 or size > self.limit:
                large.append(units)
            elif small and held + size <= self.limit:
                small[-1] = Unit((*small[-1].values, *values), (*small[-1].sources, *units[0].sources))
                held += size
            else:
                small += units
                held = size
        self.units = [*_in_turns(large), *small]

    def home_of(self, value: int) -> Home:
        """The home of a result."""
        return self.made.get(value, DEVICE)

    def _needed_scalars(self) -> list[int]:
        """Single numbers computed from host memory that results need, each after those that it needs itself."""
        found: list[int] = []
        known: set[int] = set(self.homes)
        for out in self.graph.outs:
            for node in self.graph.needed(out, known):
                known.update(node.outs)
                found += [o for o in node.outs if self.graph.is_small(o) and self._below(o)]
        return found

    def _below(self, scalar: int) -> frozenset[int]:
        """The host arguments that a single number is reduced from."""
        node = self.graph.makers.get(scalar)
        return frozenset().union(*(self.reads.get(i, frozenset()) for i in node.ins)) if node else frozenset()

    def _components(self) -> list[tuple[int, ...]]:
        """Results that belong together: they read, or replace, host arrays in common."""
        leader: dict[int, int] = {}

        def find(x: int) -> int:
            while leader.setdefault(x, x) != x:
                x = leader[x]
            return x

        members: dict[int, None] = {}
        for value, home in zip(self.graph.outs, self.out_homes, strict=True):
            own = set(self.reads.get(value, ()))
            if home.replaces is not None:
                own.add(self.graph.ins[home.replaces])
            if self.graph.is_small(value) or value in self.homes or not (own or home.sharding):
                continue  # a single number, an argument passed on, or nothing of the host
            members[value] = None
            for other in own:
                leader[find(other)] = find(value)
        groups: dict[int, list[int]] = {}
        for value in members:
            groups.setdefault(find(value), []).append(value)
        return [tuple(g) for g in groups.values()]

    def _bytes(self, values: Iterable[int], sources: Iterable[int]) -> int:
        """Bytes of host arrays that a unit holds: what it reads, or what it makes where that is more."""
        read = sum(shard_bytes(self.graph.avals[s], self.homes[s]) for s in sources)
        return max(read, sum(shard_bytes(self.graph.avals[v], self.home_of(v)) for v in values))

    def _cut(self, values: tuple[int, ...], sources: frozenset[int]) -> list[Unit]:
        whole, size = Unit(values, tuple(sorted(sources))), self._bytes(values, sources)
        if size <= self.limit:
            return [whole]
        homes = [*(self.homes[s] for s in sources), *(self.home_of(v) for v in values)]
        shardings = list(dict.fromkeys(h.sharding for h in homes if h.sharding is not None))
        starts, reason = values, "update on the host" if self.whole else ""
        if self.graph.is_small(values[0]):  # a number that is reduced from pieces
            node = self.graph.makers[values[0]]
            starts, reason = node.ins[:1], reason if reduces_all(node, self.graph) else node.name
        shape = self.graph.avals[starts[0]].shape
        reason = reason or self._whole_because(starts, sources, shape, shardings)
        if not reason:
            found = pieces(shape, Home(shardings[0]), size, self.limit)
            return [dataclasses.replace(whole, piece=p) for p in found]
        if size > self.in_flight_bytes:
            self.excess.append(Excess(tuple(self._named(values)), size, reason))
        return [whole]

    def _whole_because(self, starts, sources, shape: tuple[int, ...], shardings) -> str:
        """Why results cannot be computed by pieces of a shape; empty where they can."""
        if {self.graph.avals[v].shape for v in (*sources, *starts)} != {shape} or len(shardings) != 1:
            return "arrays of several shapes or layouts"
        for start in starts:
            for node in self.graph.needed(start, self.homes):
                of_shape = any(self.graph.avals[o].shape == shape for o in node.outs)
                if of_shape and self.reads.get(node.outs[0]) and not self.by_pieces(node, shape):
                    return node.name
        return ""

    def _named(self, values: tuple[int, ...]) -> Iterator[int]:
        """The positions of results in the list of all."""
        for j, out in enumerate(self.graph.outs):
            if out in values:
                yield j

    def made_by_pieces(self, value: int, shape: tuple[int, ...]) -> bool:
        """True for a value whose piece is computed from the pieces of others."""
        node = self.graph.makers.get(value)
        return node is not None and self.graph.avals[value].shape == shape and self.by_pieces(node, shape)

    def by_pieces(self, node: Node, shape: tuple[int, ...]) -> bool:
        """True for a node that gives a piece of its result from the pieces of its operands."""
        if node.name == "broadcast_in_dim":
            return self.graph.is_small(node.ins[0])
        return node.name in ELEMENTWISE and all(self.graph.avals[i].shape in (shape, ()) for i in node.ins)


def reduces_all(node: Node, graph: Graph) -> bool:
    """True for a reduction of all dims of one array to a number, by an operation that REDUCTIONS has."""
    if node.name not in REDUCTIONS or len(node.ins) != 1:
        return False
    return len(node.eqn.params["axes"]) == len(graph.avals[node.ins[0]].shape)


def _in_turns(large: list[list[Unit]]) -> Iterator[Unit]:
    """Pieces of up to `ALIVE` arrays in turns, so that one is fetched while another is written."""
    for start in range(0, len(large), ALIVE):
        some = large[start : start + ALIVE]
        for i in range(max(map(len, some), default=0)):
            yield from (units[i] for units in some if i < len(units))


def pieces(shape: tuple[int, ...], home: Home, size: int, limit: int) -> list[Piece]:
    """An array in pieces: see [Note: pieces].

    Args:
      shape: of the array.
      home: its layout in host memory, which divides every dim.
      size: bytes of one device's shards of all arrays that are cut alike.
      limit: bytes of one piece of them; a single row of the last dims may have more.
    """
    view: list[int] = []
    entries: list[tuple[str, ...]] = []
    for dim, axes in zip(shape, spec_entries(home.on_device.spec, len(shape)), strict=True):
        n = shard_factor(make_spec([axes]), home.mesh)
        view += [n, dim // n] if n > 1 else [dim]
        entries += [axes, ()] if n > 1 else [()]
    local = [1 if axes else dim for dim, axes in zip(view, entries, strict=True)]
    per_value = size / math.prod(local)
    layout = NamedSharding(home.mesh, make_spec(entries), memory_kind="device")

    def boxes(at: int, start: tuple[int, ...], extent: tuple[int, ...]) -> Iterator[Piece]:
        row = math.prod(local[at + 1 :]) * per_value
        if at == len(view) or local[at] * row <= limit:
            yield Piece(tuple(view), (*start, *(0 for _ in view[at:])), (*extent, *view[at:]), layout)
        elif entries[at]:
            yield from boxes(at + 1, (*start, 0), (*extent, view[at]))
        elif row <= limit:
            count = math.ceil(view[at] / (limit // row))
            rows = math.ceil(view[at] / count)
            for i in range(0, view[at], rows):
                rest = view[at + 1 :]
                box = (*extent, min(rows, view[at] - i), *rest)
                yield Piece(tuple(view), (*start, i, *(0 for _ in rest)), box, layout)
        else:
            for i in range(view[at]):
                yield from boxes(at + 1, (*start, i), (*extent, 1))

    return list(boxes(0, (), ()))
