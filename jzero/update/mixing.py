"""Where an optimizer mixes the dims of a matrix: the parts of a traced update that cannot be computed on shards.

[Note: regions]
An equation mixes where it combines values along a dim that devices share: a matmul, a decomposition, a sort, or a loop
or a `cond` with one of them. Equations that mix and feed one another, with all that lies between them, are one region:
Newton-Schulz of one matrix, or of a stack of them. Around it the update is elementwise and stays on shards.

[Note: what a region takes in]
A region begins at the values that it reads. It takes in the equations that make such a value in three cases: its
layout is not known (a reshape that merges a split dim with another); it is made from one array and a number reduced
from that array (`x / norm(x)`); or several inputs are made from one array (`x.T`, `0.1 * x`). The owner then computes
these values, and they are not sent.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence

from jzero.core.dims import dim_in_result
from jzero.core.graph import Graph, Node
from jzero.core.primitives import CONTROL_FLOW, ELEMENTWISE, REDUCING
from jzero.core.random_keys import is_key
from jzero.core.regions import bodies
from jzero.core.splits import Split, followed, mixing, whole
from jzero.core.types import Aval

FURTHER = 32  # equations that a region may take in before an input or after a result


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """Equations that are computed on whole matrices.

    Attributes:
      nodes: in order.
      ins: the values that they read, of the graph's arguments or made by other equations.
      outs: the values that others read.
    """

    nodes: tuple[Node, ...]
    ins: tuple[int, ...]
    outs: tuple[int, ...]


class Mixing:
    """The regions of a graph: see the notes.

    Attributes:
      graph: the update, all calls inlined.
      split: how every value is split; a region's result comes back split like the value of its shape that it read.
      branches: for each `cond` that is not a region as a whole, the `Mixing` of each of its branches.
      regions: in no order.
    """

    def __init__(self, graph: Graph, splits: Sequence[Split], wanted: Sequence[Split]):
        """`splits` are those of the arguments, `wanted` those of the results."""
        self.graph = graph
        self.split: dict[int, Split] = dict(zip(graph.ins, splits, strict=True))
        self.split.update((v, whole(graph.avals[v].shape)) for v in graph.known)
        self._wanted = self._backwards(wanted)
        self._readers: dict[int, list[Node]] = collections.defaultdict(list)
        self._unknown: set[int] = set()
        self._order = {node: k for k, node in enumerate(graph.nodes)}
        self.branches: dict[Node, list[Mixing]] = {}
        seeds: list[Node] = []
        for node in graph.nodes:
            for i in set(node.ins):
                self._readers[i].append(node)
            if not self._follow(node):
                seeds.append(node)
        self.regions = self._regions(seeds)

    # --- how values are split ------------------------------------------------------------------------------------

    def _follow(self, node: Node) -> bool:
        """Note how the results are split; False where the node mixes."""
        splits = [self.split[i] for i in node.ins]
        found = followed(node.eqn, splits)
        mixes = found is None and mixing(node.eqn) and not self._has_branches(node)
        for k, out in enumerate(node.outs):
            if found is not None:
                self.split[out] = found[k]
            else:
                self.split[out] = self._returned(node, out)
                if node not in self.branches:
                    self._unknown.add(out)
        return not mixes

    def _has_branches(self, node: Node) -> bool:
        """True for a `cond` whose branches have regions of their own: on more than one matrix, or with random keys.

        Keys do not go to owners.
        """
        if node.name != "cond":
            return False
        splits = [self.split[i] for i in node.ins[1:]]
        wanted = [self._wanted.get(o, whole(self.graph.avals[o].shape)) for o in node.outs]
        inner = [Mixing(Graph(*branch), splits, wanted) for branch in bodies(node.eqn)[0]]
        if max(len(m.regions) for m in inner) > (not any(is_key(self.graph.avals[o]) for o in node.outs)):
            self.branches[node] = inner
        return node in self.branches

    def _returned(self, node: Node, out: int) -> Split:
        """How a region's result is split when it comes back: as it is stored, else like what it was made from."""
        shape = self.graph.avals[out].shape
        if out in self._wanted:
            return self._wanted[out]
        like = [self.split[i] for i in node.ins if any(self.split[i])]
        same = [self.split[i] for i in node.ins if self.graph.avals[i].shape == shape and any(self.split[i])]
        if same or not shape:
            return same[0] if same else ()
        axes = tuple(a for entry in like[0] for a in entry)
        at = max(range(len(shape)), key=lambda d: (shape[d] > 1, -d)) if max(shape) > 1 else 0
        return tuple(axes if d == at and shape[d] > 1 else () for d in range(len(shape)))

    def _backwards(self, wanted: Sequence[Split]) -> dict[int, Split]:
        """The layouts of the results, and of the values that they are made from elementwise."""
        found = {v: w for v, w in zip(self.graph.outs, wanted, strict=True) if any(w)}
        for node in reversed(self.graph.nodes):
            known = next((found[o] for o in node.outs if o in found), None)
            if known is None:
                continue
            for at, i in enumerate(node.ins):
                shape = self.graph.avals[i].shape
                if node.name in CONTROL_FLOW or i in found or i in self.graph.known:
                    continue
                moved = {d: dim_in_result(node.eqn, at, d) for d in range(len(shape)) if shape[d] > 1}
                to = {d: t for d, t in moved.items() if t is not None}
                if to == moved and {d for d, e in enumerate(known) if e} <= set(to.values()):
                    found[i] = tuple(known[to[d]] if d in to else () for d in range(len(shape)))
        return found

    # --- regions --------------------------------------------------------------------------------------------------

    def _regions(self, seeds: list[Node]) -> list[Region]:
        merged = _merged([self._grown(set(group)) for group in self._connected(seeds)])
        return [self._region(sorted(nodes, key=self._order.__getitem__)) for nodes in merged]

    def _connected(self, seeds: list[Node]) -> list[list[Node]]:
        """Seeds that feed one another through arrays, with all nodes between them."""
        above: dict[int, int] = collections.defaultdict(int)  # of a value, the seeds before it, as bits
        by_arrays: dict[int, int] = collections.defaultdict(int)
        number = {node: k for k, node in enumerate(seeds)}
        leader = list(range(len(seeds)))

        def find(k: int) -> int:
            while leader[k] != k:
                k = leader[k]
            return k

        for node in self.graph.nodes:
            through, arrays = 0, 0
            for i in node.ins:
                through |= above[i]
                arrays |= by_arrays[i]
            if node in number:
                for k in _bits(arrays):
                    leader[find(k)] = find(number[node])
                through |= 1 << number[node]
                arrays |= 1 << number[node]
            for out in node.outs:
                above[out] = through
                by_arrays[out] = 0 if self.graph.is_small(out) or node in self.branches else arrays
        below: dict[Node, int] = {}
        after: dict[int, int] = collections.defaultdict(int)
        for node in reversed(self.graph.nodes):
            below[node] = (1 << number[node] if node in number else 0) | _any(after[o] for o in node.outs)
            for i in node.ins:
                after[i] |= below[node]
        members: dict[int, int] = collections.defaultdict(int)
        for k in range(len(seeds)):
            members[find(k)] |= 1 << k
        groups: dict[int, list[Node]] = {k: [] for k in members}
        for node in self.graph.nodes:
            own = 1 << number[node] if node in number else 0
            before, behind = own | _any(above[i] for i in node.ins), below[node]
            if before and behind:
                for k in {find(b) for b in _bits(before)} & {find(b) for b in _bits(behind)}:
                    groups[k].append(node)
        return list(groups.values())

    def _grown(self, nodes: set[Node]) -> set[Node]:
        """A region's nodes, and those that [Note: what a region takes in] adds.

        After `_from_known` the layouts of all inputs are known; it runs again after each of the next two. After
        `_reduced_from_one` no input is made from one array and a number reduced from it. After `_from_the_same` no two
        inputs are made from one array. `_to_known` does for the results what `_from_known` does for the inputs.
        """
        nodes |= self._from_known(nodes)
        for i in self._inputs(nodes):
            nodes |= self._reduced_from_one(i, nodes)
        nodes |= self._from_known(nodes)
        nodes |= self._from_the_same(nodes)
        nodes |= self._from_known(nodes)
        for o in [o for node in nodes for o in node.outs]:
            nodes |= self._to_known(o, nodes)
        return nodes

    def _from_known(self, region: set[Node]) -> set[Node]:
        """The nodes between a region's inputs and the nearest values before them whose layouts are known."""
        taken: set[Node] = set()
        pending = self._inputs(region)
        while pending:
            i = pending.pop()
            nodes = [maker] if (maker := self.graph.makers.get(i)) else []
            while nodes and nodes[-1].name == "transpose" and (maker := self.graph.makers.get(nodes[-1].ins[0])):
                nodes.append(maker)
            new = [node for node in nodes if node not in region | taken]
            if new and not self._unknown.isdisjoint(nodes[-1].outs):
                taken.update(new)
                pending += [i for node in new for i in node.ins]
        return taken

    def _to_known(self, value: int, region: set[Node]) -> set[Node]:
        """The nodes from a region's result to a value whose layout is known, if it is made from the result alone.

        Failing that, the nodes to a part of the result (a slice along a split dim): less is sent.
        """
        taken: set[Node] = set()
        part: set[Node] = set()
        while value not in self._wanted and len(taken) < FURTHER:
            readers = [r for r in self._readers[value] if r not in region]
            arrays = {i for r in readers for i in r.ins if any(self.split[i])}
            if len(readers) != 1 or len(readers[0].outs) != 1 or arrays - {value} or mixing(readers[0].eqn):
                return part
            taken.add(readers[0])
            value = readers[0].outs[0]
            part = set(taken) if value in self._unknown else part
        return taken

    def _reduced_from_one(self, value: int, region: set[Node]) -> set[Node]:
        """The nodes between a value and the one array that it is computed from, with a reduction or transpose of it."""
        taken: dict[Node, None] = {}
        frontier = {value}
        reduced = False
        while len(taken) < FURTHER:
            arrays = {i for i in frontier if any(self.split[i])}
            if reduced and len(arrays) == 1:
                own = arrays.pop()
                ok = _size(self.graph.avals[own]) <= _size(self.graph.avals[value]) and own != value
                return set(taken) if ok and self._private(taken, region) else set()
            makers = [self.graph.makers[i] for i in frontier if i in self.graph.makers]
            makers = [m for m in makers if m.name in ELEMENTWISE or m.name in _LIGHT]
            if not makers:
                return set()
            last = max(makers, key=self._order.__getitem__)
            taken[last] = None
            reduced |= last.name in REDUCING and any(any(self.split[i]) for i in last.ins)
            reduced |= any(o in self._unknown for o in last.outs)  # `x + x.T`
            frontier = (frontier - set(last.outs)) | {i for i in last.ins if i not in self.graph.known}
        return set()

    def _from_the_same(self, region: set[Node]) -> set[Node]:
        """The nodes from one array to several inputs of a region (its transpose, a multiple): it is sent once."""
        inputs = self._inputs(region)
        chains = [self._chain(i, inputs, region) for i in inputs]
        origins = [origin for origin, _ in chains]
        return {node for origin, nodes in chains if origins.count(origin) > 1 for node in nodes}

    def _chain(self, value: int, inputs: Sequence[int], region: set[Node]) -> tuple[int, list[Node]]:
        """The array that an input is computed from, elementwise or by a transpose, and the nodes between."""
        taken: list[Node] = []
        while not taken or value not in inputs:
            maker = self.graph.makers.get(value)
            if maker is None or not (maker.name in ELEMENTWISE or maker.name == "transpose"):
                break
            arrays = {i for i in maker.ins if any(self.split[i])}
            if len(arrays) != 1 or not self._private([maker, *taken], region):
                break
            taken.append(maker)
            value = arrays.pop()
        return value, taken

    def _private(self, taken: Iterable[Node], region: set[Node]) -> bool:
        """True where only the region reads what the nodes make."""
        own = {*taken, *region}
        outs = set(self.graph.outs)
        return all(o not in outs and all(r in own for r in self._readers[o]) for n in taken for o in n.outs)

    def _inputs(self, nodes: set[Node]) -> list[int]:
        made = {o for node in nodes for o in node.outs}
        read = (i for node in nodes for i in node.ins)
        return sorted({i for i in read if i not in made and i not in self.graph.known})

    def _region(self, nodes: list[Node]) -> Region:
        own, results = set(nodes), set(self.graph.outs)
        outs = [
            o for n in nodes for o in n.outs if o in results or any(r not in own for r in self._readers[o])
        ]
        return Region(tuple(nodes), tuple(self._inputs(own)), tuple(outs))


_LIGHT = REDUCING | {"broadcast_in_dim", "reshape", "squeeze", "transpose"}


def _merged(groups: list[set[Node]]) -> list[set[Node]]:
    """Groups that share nodes as one."""
    merged: list[set[Node]] = []
    for group in groups:
        shared = [g for g in merged if g & group]
        merged = [g for g in merged if not g & group] + [group.union(*shared)]
    return merged


def _bits(number: int) -> Iterator[int]:
    while number:
        low = number & -number
        yield low.bit_length() - 1
        number ^= low


def _any(numbers: Iterable[int]) -> int:
    found = 0
    for number in numbers:
        found |= number
    return found


def _size(aval: Aval) -> int:
    return math.prod(aval.shape) * aval.dtype.itemsize
