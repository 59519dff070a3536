"""A function as a graph in which the stored weights are known: where they are read, and what they were made from.

Calls are inlined where they read a weight, so that the weight is gathered at its use inside of them.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.dtypes import issubdtype

from jzero.core.dims import dims_in_order
from jzero.core.graph import Graph, Node
from jzero.core.jaxprs import opened
from jzero.core.primitives import CALLS, INLINE, LOOPS, REMAT
from jzero.core.products import row_lookup
from jzero.core.regions import bodies, handed_through, loop_consts, scan_parts
from jzero.core.token_loss_rules import has_loss
from jzero.core.types import Jaxpr, JaxprEqn
from jzero.gather.sharded_weight import ON_SHARD, PIECES, is_cut_on_shard

MOVES = frozenset(("concatenate", "reshape", "broadcast_in_dim", "transpose", "squeeze", "slice", "rev", "copy"))
"""They only move values, so a cast may as well come before them."""


class WeightGraph(Graph):
    """The equations of a jaxpr, some of whose arguments are stored weights.

    Attributes:
      parent: for a value that is a weight after a cast (a transpose, a squeeze, a cut), the weight before it; for a
        weight among the arguments itself.
      split: for each weight the dims that any of its layouts splits; without weights for which that is not known.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        consts: Sequence[Any],
        weights: Sequence[bool],
        split: Sequence[frozenset[int] | None] = (),
        constants: Sequence[bool] = (),
    ):
        """`weights`: which of the arguments are stored weights; `split`: which of their dims are split; `constants`:
        which are weights that were gathered before a loop."""
        self.parent: dict[int, int] = {}
        self.split: dict[int, frozenset[int]] = {}
        self._weights, self._split, self._constants = weights, split, constants
        super().__init__(jaxpr, consts)

    def begin(self) -> None:
        """The weights among the arguments are their own parents."""
        self.parent.update((k, k) for k, w in zip(self.ins, self._weights, strict=True) if w)
        known = zip(self.ins, self._split, strict=False)
        self.split.update((k, dims) for k, dims in known if k in self.parent and dims is not None)

    def stays(self, node: Node) -> bool:
        """True where a weight is not used, only changed or cut on its shard."""
        return node.name in ON_SHARD or is_cut_on_shard(node.eqn, self.split.get(node.ins[0]) if node.ins else None)

    def inlines(self, eqn: JaxprEqn, ins: Sequence[int]) -> bool:
        """A call that reads a weight, or has a tiled loss in it; a remat region stays one."""
        if eqn.primitive.name not in INLINE:
            return False
        return any(i in self.parent for i in ins) or has_loss(opened(eqn.params[CALLS[eqn.primitive.name]])[0])

    def added(self, node: Node) -> None:
        """A weight stays one through what happens on its shard, and through a region that hands it back."""
        weights = [i for i in node.ins if i in self.parent]
        if weights and self.stays(node):
            self.parent.update(dict.fromkeys(node.outs, weights[0]))
            if weights[0] in self.split:
                split = self.split[weights[0]]
                after = frozenset(i for i, dim in enumerate(dims_in_order(node.eqn)) if dim in split)
                self.split.update(dict.fromkeys(node.outs, after))
        if weights and node.name in (*REMAT, "cond", "scan"):
            operands = node.ins[bodies(node.eqn)[1] :]
            find = handed_by_scan if node.name == "scan" else handed_through
            handed = find(node.eqn, [i in self.parent for i in operands])
            pairs = zip(node.outs, handed, strict=True)
            self.parent.update((out, operands[i]) for out, i in pairs if i is not None)

    def root(self, value: int) -> int:
        """The argument that a weight was made from."""
        while self.parent[value] != value:
            value = self.parent[value]
        return value

    def as_given(self, value: int, cast: np.dtype) -> int:
        """What a function returns for a value: the argument itself, if the function hands back its cast unchanged.

        `cast`: the dtype of all arguments that it sees, so that the cast of one to that dtype is the one at its entry.
        """
        at = value
        while self.parent.get(at, at) != at and self.makers[at].name not in (*ON_SHARD, *PIECES):
            at = self.parent[at]
        before = self.parent.get(at, at)
        changed = self.avals[before].dtype != self.avals[at].dtype == cast
        return before if before in self.ins and changed else value

    def inside(self, node: Node, search: Callable[[Any, Sequence[bool]], set[int]]) -> set[int]:
        """The operands of a region, a loop or branches that `search` finds in its bodies."""
        inner, skipped = bodies(node.eqn)
        operands = node.ins[skipped:]
        weights = [i in self.parent for i in operands]
        found = [search(jaxpr, weights) for jaxpr, _ in inner] if any(weights) else []
        return {operands[at] for some in found for at in some}

    def positions(self, values: set[int]) -> set[int]:
        """Which of the arguments these weights were made from."""
        roots = {self.root(i) for i in values}
        return {at for at, i in enumerate(self.ins) if i in roots}

    def weights_of(self, node: Node) -> list[int]:
        """The weights that a node uses, each once; none for one that only changes a stored weight."""
        return [] if self.stays(node) else list(dict.fromkeys(i for i in node.ins if i in self.parent))

    def part(self, value: int) -> float:
        """The fraction of its argument that a weight still holds after cuts; 1 for other values."""
        if value not in self.parent:
            return 1.0
        return math.prod(self.avals[value].shape) / max(math.prod(self.avals[self.root(value)].shape), 1)

    def cut(self, value: int) -> tuple[Any, ...]:
        """What tells a part of a weight from its other parts: the cuts on the way from the argument."""
        found = []
        while self.parent[value] != value:
            node, before = self.makers[value], self.parent[value]
            if self.avals[value].size < self.avals[before].size:
                found.append((node.name, str(node.eqn.params), *(i for i in node.ins if i != before)))
            value = before
        return tuple(found)

    def uses_by_root(self, regions: Sequence[str]) -> tuple[set[int], collections.Counter[int]]:
        """The weights among the arguments that are used here, and how often regions, or the results, take each.

        `regions`: names of primitives.
        """
        used: set[int] = set()
        taken = collections.Counter(self.root(i) for i in self.outs if i in self.parent)
        for node in self.nodes:
            roots = [self.root(i) for i in node.ins if i in self.parent and not self.stays(node)]
            if node.name in regions:
                taken.update(roots)
            else:
                used.update(roots)
        return used, taken

    def data(self) -> set[int]:
        """What is computed from arguments that are not weights: activations, not masks and constants."""
        constants = {i for i, c in zip(self.ins, self._constants, strict=False) if c}
        found = {i for i in self.ins if i not in self.parent and i not in constants}
        for node in self.nodes:
            if any(i in found for i in node.ins):
                found.update(node.outs)
        return found

    def activations(self, node: Node, data: set[int]) -> tuple[int, ...]:
        """The activations that a node reads, each once."""
        return tuple(dict.fromkeys(i for i in node.ins if i in data and self.is_floating(i)))

    def dtypes(self, value: int) -> set[np.dtype]:
        """The dtypes in which a value is read, behind what only moves it."""
        found = {self.avals[value].dtype} if value in self.outs else set()
        for node in (n for n in self.nodes if value in n.ins):
            if node.name == "convert_element_type":
                found.add(self.avals[node.outs[0]].dtype)
            elif node.name in MOVES:
                found |= self.dtypes(node.outs[0])
            else:
                found.add(self.avals[value].dtype)
        return found

    def narrow(self, value: int) -> np.dtype | None:
        """The narrower dtype in which a weight is read everywhere, or None."""
        (dtype, *others), own = self.dtypes(value) or {self.avals[value].dtype}, self.avals[value].dtype
        alike = issubdtype(dtype, np.floating) and issubdtype(own, np.floating)
        return dtype if alike and not others and dtype.itemsize < own.itemsize else None

    def is_floating(self, value: int) -> bool:
        """True for an array of floating numbers."""
        aval = self.avals[value]
        return bool(aval.ndim) and issubdtype(aval.dtype, np.inexact)


def handed_by_scan(eqn: JaxprEqn, weights: Sequence[bool]) -> list[int | None]:
    """For each result of a scan: the stack among its operands whose layers the body returns as they came, or None.

    NNX returns a module's whole state from each layer.
    """
    jaxpr, consts, carry = scan_parts(eqn)
    graph = WeightGraph(jaxpr, [None] * len(jaxpr.constvars), weights)
    stacks = {i: at for at, i in enumerate(graph.ins) if at >= consts + carry}

    def handed(out: int) -> int | None:
        while out in graph.parent and graph.parent[out] != out:
            if graph.makers[out].name in (*ON_SHARD, *PIECES):
                return None
            out = graph.parent[out]
        return stacks.get(out) if out in graph.parent else None

    return [None if at < carry else handed(out) for at, out in enumerate(graph.outs)]


def activation_bytes(jaxpr: Jaxpr, weights: Sequence[bool]) -> int:
    """Bytes, over all devices, of the activations that weight gradients are made from; a loop counts one round."""
    graph = WeightGraph(jaxpr, [None] * len(jaxpr.constvars), weights)
    data, total = graph.data(), 0
    for node in graph.nodes:
        if not graph.weights_of(node):
            continue
        inner, skipped = bodies(node.eqn)
        if inner:  # of branches the first
            inside = [i in graph.parent for i in node.ins[skipped:]]
            total += activation_bytes(inner[0][0], inside)
            continue
        avals = [graph.avals[i] for i in graph.activations(node, data)]
        total += sum(math.prod(x.shape) * x.dtype.itemsize for x in avals)
    return total


def tied_tables(jaxpr: Jaxpr, weights: Sequence[bool]) -> set[int]:
    """Positions of the weights whose rows are looked up and that have another use: [Note: a tied embedding]."""
    graph = WeightGraph(jaxpr, [None] * len(jaxpr.constvars), weights)
    uses: dict[int, list[bool]] = collections.defaultdict(list)  # of each: is it a lookup
    for node in graph.nodes:
        for weight in graph.weights_of(node):
            uses[graph.root(weight)].append(row_lookup(node.eqn))
    return {at for at, i in enumerate(graph.ins) if len(uses[i]) > 1 and any(uses[i])}


def loop_constants(jaxpr: Jaxpr, weights: Sequence[bool]) -> set[int]:
    """Positions of the weights that every round of a loop uses: [Note: a weight that every round uses] in `loops.py`.

    So are stacks whose layer is constant over a loop inside of the scan.
    """
    graph = WeightGraph(jaxpr, [None] * len(jaxpr.constvars), weights)
    found: set[int] = set()
    for node in graph.nodes:
        if node.name in LOOPS:
            found.update(i for i in node.ins[: loop_consts(node.eqn)] if i in graph.parent)
        found |= graph.inside(node, loop_constants)
    return graph.positions(found)


def read_narrow(jaxpr: Jaxpr, weights: Sequence[bool]) -> dict[int, np.dtype]:
    """By position, the dtype of each weight that is read only in one narrower dtype."""
    graph = WeightGraph(jaxpr, [None] * len(jaxpr.constvars), weights)
    found = {at: graph.narrow(i) for at, (i, w) in enumerate(zip(graph.ins, weights, strict=True)) if w}
    return {at: dtype for at, dtype in found.items() if dtype is not None}


def looked_up(jaxpr: Jaxpr, weights: Sequence[bool]) -> set[int]:
    """Positions of the weights whose rows are looked up, in regions and loops too."""
    graph = WeightGraph(jaxpr, [None] * len(jaxpr.constvars), weights)
    found: set[int] = set()
    for node in graph.nodes:
        if graph.weights_of(node):
            found |= (
                {node.ins[0]} & set(graph.parent) if row_lookup(node.eqn) else graph.inside(node, looked_up)
            )
    return graph.positions(found)
