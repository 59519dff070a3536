"""How a function of arrays in host memory is cut into groups that fit into a stated number of bytes.

[Note: groups]
Results that read, or replace, host arrays in common belong together (a master and its moments): they are fetched,
computed and written as one group. Small ones share a group. Only single numbers connect groups (a global norm, a
count, whether all values are finite). They are computed once, before any group writes; whatever else reads host memory
is computed again in every group that needs it. So a norm of the updates reads the state twice and still holds no more
than the bound.

[Note: chunks]
A group above the bound is divided into chunks if all of its operations are elementwise: a chunk is sliced from the host
array, and its result is written to the same place. A dim that n devices share is viewed as [n, size/n], so that a chunk
holds the same part of every shard. Of two consecutive chunks of one array, the second is fetched before the first is
written; chunks of several arrays take turns, and the bus is busy both ways. `chunks.py` says how a padded leaf is cut.

[Note: vectors beside a matrix]
Adafactor keeps a row and a column for each matrix, and computes the whole update from them. They have other shapes than
the master, so no chunk of them belongs to a chunk of the master. If such vectors are small, and their new values depend
only on themselves and on what is on the device, they are fetched and written first and stay on the device to the end of
the step. The matrix is then cut as if it were alone.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

from jzero.core.errors import human_bytes
from jzero.core.graph import Graph, Node
from jzero.core.primitives import ELEMENTWISE, LAYOUT
from jzero.layout.padding import is_end_cut
from jzero.stream.chunks import Chunk, Form, chunks_of
from jzero.stream.placement import DEVICE, Placement

ALIVE = 3  # groups whose bytes may be on the device at once: written, updated, fetched
RESIDENT = 4  # vectors stay on the device up to this part of the bound, each below this part of its matrix
MOST = 3000  # groups that one program may have: XLA takes seconds to minutes for a hundred


@dataclasses.dataclass(frozen=True)
class Group:
    """What is fetched, computed and written together: results, or one chunk of the results of large arrays.

    Attributes:
      values: the numbers of the results.
      sources: the numbers of the host arguments that are fetched.
      nbytes: bytes of host arrays that it holds on one device.
      chunk: the part of the arrays that it takes; None: all of them, whole.
    """

    values: tuple[int, ...]
    sources: tuple[int, ...]
    nbytes: int
    chunk: Chunk | None = None


@dataclasses.dataclass(frozen=True)
class Excess:
    """Results that need more bytes of host arrays at once than the bound, and why they cannot be cut."""

    outs: tuple[int, ...]
    nbytes: int
    because: str


class Schedule:
    """How a function is cut: the groups in the order in which they run, and what does not fit.

    Attributes:
      resident: host arguments that stay on the device once they are fetched; see [Note: vectors beside a matrix].
      first: their group, if there are any.
      groups: the groups of results that live in host memory, or are computed from what lives there.
      scalars: groups that compute single numbers from host memory, which `groups` need; these run before them.
      excess: what needs more than the bound.

    Args:
      most: the largest number of groups, if one program has all of them; None: no limit.
    """

    def __init__(
        self,
        graph: Graph,
        placements: Sequence[Placement],
        out_placements: Sequence[Placement],
        in_flight_bytes: int,
        most: int | None = MOST,
    ):
        self.graph, self.out_placements, self.in_flight_bytes = graph, out_placements, in_flight_bytes
        self.made = dict(zip(graph.outs, out_placements, strict=True))
        self.placements = dict(zip(graph.ins, placements, strict=True))
        self.limit = max(in_flight_bytes // ALIVE, 1)
        hosted = [i for i, h in self.placements.items() if h.sharding is not None]
        self.reads = graph.reads(hosted)
        self.excess: list[Excess] = []
        components = self.components()
        self._check_count(components, most)
        self.first = self._first(components)
        self.resident = frozenset(s for group in self.first for s in group.sources)
        if self.first:
            done = {v for group in self.first for v in group.values}
            self.reads = graph.reads([i for i in hosted if i not in self.resident])
            rest = (tuple(v for v in values if v not in done) for values in components)
            components = [values for values in rest if values]
            self.limit = max((in_flight_bytes - self.first[0].nbytes) // ALIVE, 1)
        self.scalars = [
            group for value in self._needed_scalars() for group in self._groups((value,), self._below(value))
        ]
        small: list[Group] = []
        large: list[list[Group]] = []
        held = 0
        for values in components:
            sources = self.sources_of(values)
            groups = self._groups(values, sources)
            size = self.bytes_of(values, sources)
            if len(groups) > 1 or size > self.limit:
                large.append(groups)
            elif small and held + size <= self.limit:
                held += size
                small[-1] = Group(
                    (*small[-1].values, *values), (*small[-1].sources, *groups[0].sources), held
                )
            else:
                small += groups
                held = size
        self.groups = [*_in_turns(large), *small]

    @property
    def moved(self) -> tuple[int, int]:
        """Bytes of one device that are fetched, and that are written; what the device holds already is neither."""
        fetched = written = 0.0
        for group in (*self.first, *self.scalars, *self.groups):
            share = 1 if group.chunk is None else group.chunk.share
            rows = [(self.placements[s], s) for s in group.sources]
            fetched += share * sum(h.shard_bytes(self.graph.avals[v]) for h, v in rows)
            rows = [(self.placement_of(v), v) for v in group.values]
            written += share * sum(h.shard_bytes(self.graph.avals[v]) for h, v in rows)
        return round(fetched), round(written)

    def _check_count(self, components: list[tuple[int, ...]], most: int | None) -> None:
        """Raises ValueError if the bound is so small that XLA would take too long to compile the groups."""
        total = sum(self.bytes_of(values, self.sources_of(values)) for values in components)
        if most is not None and total > most * self.limit:
            raise ValueError(
                f"Offload(in_flight_bytes={self.in_flight_bytes}): {human_bytes(total)} of state on a device would be "
                f"divided into {total // self.limit} groups; XLA takes too long to compile more than {most}. "
                f"Pass at least {ALIVE * -(-total // most)} bytes, or leave it out for the default."
            )

    def _first(self, components: list[tuple[int, ...]]) -> list[Group]:
        """The one group of [Note: vectors beside a matrix], if any component asks for it; large ones come first."""
        values: list[int] = []
        sources: list[int] = []
        sizes = {c: self.bytes_of(c, self.sources_of(c)) for c in components}
        for component in sorted(components, key=lambda c: -sizes[c]):
            if sizes[component] > self.limit:
                vectors = self._vectors(component)
                new = [v for v in component if self._replaced(v) in vectors]
                if self.bytes_of((*values, *new), (*sources, *vectors)) <= self.in_flight_bytes // RESIDENT:
                    values, sources = values + new, sources + vectors
        return [Group(tuple(values), tuple(sources), self.bytes_of(values, sources))] if sources else []

    def _vectors(self, component: tuple[int, ...]) -> list[int]:
        """A component's small host arguments, if their new values need no larger ones; else an empty list."""
        sources = sorted(self.sources_of(component))
        sizes = {s: self.placements[s].shard_bytes(self.graph.avals[s]) for s in sources}
        small = {s for s in sources if RESIDENT * sizes[s] < max(sizes.values())}
        new = [v for v in component if self._replaced(v) in small]
        through = (o for node in self._needed(new) for o in node.outs)
        read = {s for o in through for s in self.reads.get(o, ()) or self._below(o)}
        return sorted(small) if read <= small else []

    def _replaced(self, value: int) -> int | None:
        """The argument whose buffer a result takes."""
        at = self.placement_of(value).replaces
        return None if at is None else self.graph.ins[at]

    def sources_of(self, values: Iterable[int]) -> frozenset[int]:
        """The host arguments that results are computed from, other than through single numbers."""
        return frozenset().union(*(self.reads.get(v, frozenset()) for v in values))

    def placement_of(self, value: int) -> Placement:
        """The placement of a result."""
        return self.made.get(value, DEVICE)

    def _needed_scalars(self) -> list[int]:
        """Single numbers computed from host memory that results need, each after those that it needs itself."""
        scalars: list[int] = []
        known: set[int] = set(self.placements)
        for out in self.graph.outs:
            for node in self.graph.needed(out, known.__contains__):
                known.update(node.outs)
                scalars += [o for o in node.outs if self.graph.is_small(o) and self._below(o)]
        return scalars

    def _below(self, scalar: int) -> frozenset[int]:
        """The host arguments that a single number is reduced from."""
        node = self.graph.makers.get(scalar)
        return frozenset().union(*(self.reads.get(i, frozenset()) for i in node.ins)) if node else frozenset()

    def components(self) -> list[tuple[int, ...]]:
        """Results that belong together: they read, or replace, host arrays in common."""
        leader: dict[int, int] = {}

        def find(x: int) -> int:
            while leader.setdefault(x, x) != x:
                x = leader[x]
            return x

        members: dict[int, None] = {}
        for value, placement in zip(self.graph.outs, self.out_placements, strict=True):
            own = set(self.reads.get(value, ()))
            if placement.replaces is not None:
                own.add(self.graph.ins[placement.replaces])
            if self.graph.is_small(value) or value in self.placements or not (own or placement.sharding):
                continue  # a single number, an argument passed on, or nothing of the host
            members[value] = None
            for other in own:
                leader[find(other)] = find(value)
        groups: dict[int, list[int]] = {}
        for value in members:
            groups.setdefault(find(value), []).append(value)
        return [tuple(g) for g in groups.values()]

    def bytes_of(self, values: Iterable[int], sources: Iterable[int]) -> int:
        """Bytes of host arrays that a group holds: what it reads, or what it makes where that is more."""
        read = sum(self.placements[s].shard_bytes(self.graph.avals[s]) for s in sources)
        return max(read, sum(self.placement_of(v).shard_bytes(self.graph.avals[v]) for v in values))

    def _groups(self, values: tuple[int, ...], sources: frozenset[int]) -> list[Group]:
        size = self.bytes_of(values, sources)
        whole = Group(values, tuple(sorted(sources)), size)
        if size <= self.limit:
            return [whole]
        starts, reason = values, ""
        if self.graph.is_small(values[0]):  # a number that is reduced from chunks
            node = self.graph.makers[values[0]]
            starts, reason = node.ins[:1], "" if node.reduces_all else node.name
        form = None if reason else self._form(starts, values, sources)
        reason = reason or self.whole_because(starts, form)
        if form is not None and not reason:
            chunks = chunks_of(form, size, self.limit)
            return [dataclasses.replace(whole, nbytes=round(size * c.share), chunk=c) for c in chunks]
        if size > self.in_flight_bytes:
            outs = tuple(j for j, out in enumerate(self.graph.outs) if out in values)
            self.excess.append(Excess(outs, size, reason))
        return [whole]

    def _form(self, starts, values, sources) -> Form | None:
        """The common form of some results and of the host arrays they are computed from; None if there are several."""
        hosted = [(s, self.placements[s]) for s in sources] + [(v, self.placement_of(v)) for v in values]
        hosted = [(v, h) for v, h in hosted if h.sharding is not None]
        forms = {(self.graph.avals[v].shape, h.on_device) for v, h in hosted}
        if len(forms) != 1 or not all(h.divides(self.graph.avals[v].shape) for v, h in hosted):
            return None
        ((stored, layout),) = forms
        shapes = {self.graph.avals[v].shape for v in starts}
        for node in self._needed(starts):
            if node.cuts_end and self.graph.avals[node.ins[0]].shape == stored:
                shapes.add(self.graph.avals[node.outs[0]].shape)
            elif node.pads_end and self.graph.avals[node.outs[0]].shape == stored:
                shapes.add(self.graph.avals[node.ins[0]].shape)
        shapes.discard(stored)
        if len(shapes) > 1 or not all(is_end_cut(shape, stored) for shape in shapes):
            return None
        return Form(shapes.pop() if shapes else stored, stored, layout)

    def whole_because(self, starts, form: Form | None) -> str:
        """Why results cannot be computed by chunks; empty where they can."""
        shapes = () if form is None else (form.shape, form.stored)
        if form is None or any(self.reads.get(v) and self.graph.avals[v].shape not in shapes for v in starts):
            return "arrays of several shapes or layouts"
        for node in self._needed(starts):
            of_form = any(self.graph.avals[o].shape in shapes for o in node.outs)
            if of_form and any(map(self.reads.get, node.outs)) and not self.by_chunks(node, form):
                return node.name
        return ""

    def _needed(self, values: Iterable[int]) -> Iterator[Node]:
        """The nodes that compute these values from the arguments."""
        return itertools.chain.from_iterable(
            self.graph.needed(value, self.placements.__contains__) for value in values
        )

    def made_by_chunks(self, value: int, form: Form) -> bool:
        """True for a value whose chunk is computed from the chunks of others."""
        node = self.graph.makers.get(value)
        of_form = self.graph.avals[value].shape in (form.shape, form.stored)
        return node is not None and of_form and self.by_chunks(node, form)

    def by_chunks(self, node: Node, form: Form) -> bool:
        """True for a node that gives a chunk of its result from the chunks of its operands."""
        out, *shapes = (self.graph.avals[v].shape for v in (node.outs[0], *node.ins))
        if form.padded and (node.cuts_end or node.pads_end):
            return {out, shapes[0]} == {form.shape, form.stored}
        if node.name == "broadcast_in_dim":
            return self.graph.is_small(node.ins[0])
        pointwise = node.name in ELEMENTWISE or node.name in (*LAYOUT, "optimization_barrier")
        return pointwise and all(shape in (out, ()) for shape in shapes)


def _in_turns(large: list[list[Group]]) -> Iterator[Group]:
    """Chunks of up to `ALIVE` arrays in turns, so that one is fetched while another is written; long ones first."""
    waiting = sorted(map(list, large), key=len)
    active: list[list[Group]] = []
    while waiting or active:
        while waiting and len(active) < ALIVE:
            active.append(waiting.pop())
        yield from [groups.pop(0) for groups in active]
        active = [groups for groups in active if groups]
