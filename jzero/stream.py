"""A function of arrays in host memory, evaluated so that a stated number of their bytes is on the device at once.

[Note: streaming]
XLA schedules copies as early as it can: fetch a whole state, update it, write it back, and all of it is on the device.
So the function is cut into units, each with the results that belong together (a master and its moments). The arrays of
a unit are fetched, its results computed and written back, and a barrier makes the fetches of unit i wait for what unit
i-2 wrote: while one unit is updated, the one before it is written and the next one fetched. On the program compiled for
an H200 a barrier over arrays in host memory costs nothing: it moves no bytes and the buffers stay in place.

What couples units are single numbers (a global norm, a count, whether all is finite). They are computed once, before
any unit writes; whatever else reads host memory is computed again in every unit that needs it. So a norm of the updates
reads the state twice and still holds no more than the bound.

[Note: pieces]
An array above the size of a unit is taken in pieces, where everything on the way is elementwise: the piece is sliced
from the host array, and its result put in its place there. Arrays are seen as [n, size/n] in a dim that n devices
share, so that a piece is a piece of every shard. In one array the fetch of a piece waits for the write of the one
before; pieces of several arrays take turns, and the bus is busy both ways.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jzero import jaxprs
from jzero.graph import ELEMENTWISE, REDUCTIONS, Graph, Node, on_piece
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

    def take(self, x, layout: NamedSharding | None = None):
        """An array from device memory, in this home; `layout`: of a piece of it."""
        if self.sharding is None:
            return x
        return jax.device_put(x, (layout or self.sharding).with_memory_kind(str(self.sharding.memory_kind)))


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


def stream(
    fn: Callable[..., Sequence[Any]],
    args: Sequence[Any],
    homes: Sequence[Home],
    out_homes: Callable[[], Sequence[Home]],
    *,
    in_flight_bytes: int,
    gate: Sequence[int] = (),
    on_excess: Callable[[list[Excess]], None] = lambda found: None,
) -> list[Any]:
    """The results of `fn`, with its host arguments fetched unit by unit and its host results written back.

    Args:
      fn: a function of flat arrays, all in device memory, to a flat list.
      args: its arguments; those with a home in host memory lie there.
      homes: where they live.
      out_homes: where the results live; called once `fn` has been traced.
      in_flight_bytes: bytes of host arrays, of one device, that may be on the device at once.
      gate: arguments that must be there before the first fetch.
      on_excess: called with what does not fit, before anything is computed.

    Returns:
      The results, each in its home. See [Note: streaming].
    """
    if args and not any(jaxprs.is_tracer(a) for a in args):
        run = functools.partial(_stream, fn, homes, out_homes, in_flight_bytes, gate, on_excess)
        return jax.jit(lambda *flat: run(flat))(*args)
    return _stream(fn, homes, out_homes, in_flight_bytes, gate, on_excess, args)


def _stream(fn, homes, out_homes, in_flight_bytes, gate, on_excess, args) -> list[Any]:
    graph = Graph(fn, [_on_device(a, h) for a, h in zip(args, homes, strict=True)])
    cut = Cut(graph, homes, out_homes(), in_flight_bytes)
    if cut.excess:
        on_excess(cut.excess)
    return _Run(cut, args, gate).results()


def _on_device(arg, home: Home):
    if home.sharding is None:
        return arg
    return jax.ShapeDtypeStruct(np.shape(arg), arg.dtype, sharding=home.on_device)


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

    def __init__(self, graph: Graph, homes: Sequence[Home], out_homes: Sequence[Home], in_flight_bytes: int):
        self.graph, self.out_homes, self.in_flight_bytes = graph, out_homes, in_flight_bytes
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
        return self.out_homes[self.graph.outs.index(value)] if value in self.graph.outs else DEVICE

    def _needed_scalars(self) -> list[int]:
        """Single numbers computed from host memory that results need, each after those that it needs itself."""
        found: dict[int, None] = {}
        for out in dict.fromkeys(self.graph.outs):
            for node in self.graph.needed(out, self.homes):
                found.update((o, None) for o in node.outs if self.graph.is_small(o) and self._below(o))
        return list(found)

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
        starts, reason = values, ""
        if self.graph.is_small(values[0]):  # a number that is reduced from pieces
            node = self.graph.makers[values[0]]
            starts, reason = node.ins[:1], "" if reduces_all(node, self.graph) else node.name
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
        """The positions of results in the list of all; of a single number those of all that need it."""
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


class _Run:
    """One evaluation: the values that are known, the host arrays as they are after the last write, and the ties."""

    def __init__(self, cut: Cut, args: Sequence[Any], gate: Sequence[int]):
        self.cut, self.graph = cut, cut.graph
        self.values: dict[int, Any] = dict(self.graph.known)
        self.host: dict[int, Any] = {}
        for number, arg in zip(self.graph.ins, args, strict=True):
            (self.values if cut.homes[number].sharding is None else self.host)[number] = arg
        self.gate = [self.graph.ins[i] for i in gate]
        self.written: dict[int, Any] = {}  # results of units: in their home, as far as pieces have come
        self.wrote: list[tuple[int, ...]] = []  # for every unit that ran, its results
        self.filled: dict[int, int] = {}  # arguments whose buffer is filled, by pieces, with a result

    def results(self) -> list[Any]:
        """All results, each in its home."""
        for unit in (*self.cut.scalars, *self.cut.units):
            self._run(unit)
        return [self._result(v, h) for v, h in zip(self.graph.outs, self.cut.out_homes, strict=True)]

    def _result(self, value: int, home: Home):
        if value in self.written:
            return self.written[value].reshape(self.graph.avals[value].shape)
        if value in self.host:
            return self.host[value] if home.sharding else self._to_device(self.host[value], value, None)
        found = self._evaluate(value, self.values)
        return home.take(found)

    def _run(self, unit: Unit) -> None:
        tie = _Tie(self)
        with jax.named_scope("jzero.fetch"):
            found = tie.after([self._source(s, unit.piece) for s in unit.sources])
            env = {s: self._to_device(x, s, unit.piece) for s, x in zip(unit.sources, found, strict=True)}
        if unit.piece is None:
            outs = [self._evaluate(v, env, None if unit.sources else tie) for v in unit.values]
        else:
            outs = [self._piece(v, env, unit.piece, None if unit.sources else tie) for v in unit.values]
        with jax.named_scope("jzero.write_back"):
            for value, out in zip(unit.values, outs, strict=True):
                self._write(value, out, unit.piece)
        self.wrote.append(unit.values)

    def _source(self, source: int, piece: Piece | None):
        """A host argument, or its piece as it is now."""
        at = self.filled.get(source)
        x = self.host[source] if at is None else self.written[at]
        return x if piece is None else piece.of(x)

    def _to_device(self, x, source: int, piece: Piece | None):
        return jax.device_put(x, self.cut.homes[source].on_device if piece is None else piece.layout)

    def _evaluate(self, value: int, env: dict[int, Any], tie: _Tie | None = None, *, keep: bool = False):
        """A whole value; what reads no host argument, and single numbers, is kept for other units.

        With a `tie` what begins here waits for it, and is not kept unless asked for.
        """
        begun: set[int] = set()
        for node in self.graph.needed(value, collections.ChainMap(env, self.values)):
            operands = [env[i] if i in env else self.values[i] for i in node.ins]
            large = not self.graph.is_small(node.outs[0])
            if tie is not None and large and not begun.intersection(node.ins):
                operands = tie.after(operands)
            begun.update(node.outs if large else ())
            for out, result in zip(node.outs, node.run(operands), strict=True):
                everywhere = self.graph.is_small(out) or keep or not (self.cut.reads.get(out) or tie)
                (self.values if everywhere else env)[out] = result
        return env[value] if value in env else self.values[value]

    def _piece(self, value: int, env: dict[int, Any], piece: Piece, tie: _Tie | None):
        """A piece of a value, or the part of a single number that comes from that piece."""
        if self.graph.is_small(value):
            node = self.graph.makers[value]
            return REDUCTIONS[node.name][0](self._piece(node.ins[0], env, piece, tie))
        shape = self.graph.avals[value].shape

        def operand(v: int):
            if v not in env:
                at = self.filled.get(v)
                whole = self._evaluate(v, {}, tie, keep=True) if at is None else self.written[at]
                whole = whole if tie is None else tie.after([whole])[0]
                if self.graph.is_small(v):
                    return whole
                env[v] = piece.of(whole)
            return env[v]

        given = _Given(lambda v: v in env or not self.cut.made_by_pieces(v, shape))
        for node in self.graph.needed(value, given):
            results = on_piece(node, [operand(i) for i in node.ins], piece.shape)
            env.update(zip(node.outs, results, strict=True))
        return operand(value)

    def _write(self, value: int, out, piece: Piece | None) -> None:
        home = self.cut.home_of(value)
        if self.graph.is_small(value):
            if piece is not None and value in self.values:
                out = REDUCTIONS[self.graph.makers[value].name][1](self.values[value], out)
            self.values[value] = out
        elif piece is None:
            self.written[value] = home.take(out)
        else:
            out = home.take(jax.lax.with_sharding_constraint(out, piece.layout), piece.layout)
            self.written[value] = jax.lax.dynamic_update_slice(self._buffer(value, piece), out, piece.start)

    def _buffer(self, value: int, piece: Piece):
        """What the pieces of a result fill: the array that it replaces, a gradient of its type, or a new one."""
        if value in self.written:
            return self.written[value]
        home, aval = self.cut.home_of(value), self.graph.avals[value]
        if home.replaces is not None:
            source = self.graph.ins[home.replaces]
            self.filled[source] = value
            return jnp.reshape(self.host[source], piece.view)
        for source in self.gate:
            same = self.graph.avals[source]
            if source not in self.filled and (same.shape, same.dtype) == (aval.shape, aval.dtype):
                self.filled[source] = value
                return jnp.reshape(self.values[source], piece.view)
        new = jnp.zeros(piece.view, aval.dtype)
        new = jax.lax.with_sharding_constraint(new, piece.layout)
        return home.take(new, piece.layout)  # XLA makes that an allocation on the host


class _Given:
    """A set of values by a rule."""

    def __init__(self, rule: Callable[[int], bool]):
        self.rule = rule

    def __contains__(self, value: int) -> bool:
        return self.rule(value)


class _Tie:
    """What makes arrays wait until the unit before the last has written; the first units wait for the gate."""

    def __init__(self, run: _Run):
        self.run = run
        self.waits_for = run.gate if len(run.wrote) < ALIVE - 1 else run.wrote[1 - ALIVE]

    def after(self, arrays: list[Any]) -> list[Any]:
        """The same arrays, there only once what they wait for is."""
        if not self.waits_for or not arrays:
            return arrays
        run = self.run
        stores = [run.written if v in run.written else run.values for v in self.waits_for]
        others = [store[v] for store, v in zip(stores, self.waits_for, strict=True)]
        arrays, others = jax.lax.optimization_barrier((list(arrays), others))
        for store, v, other in zip(stores, self.waits_for, others, strict=True):
            store[v] = other  # both results are used, or XLA drops the barrier
        return arrays
