"""Is a traced layer position-wise: may its input be cut along a dim, and its result be joined along the same?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jzero.core.batched import Classes
from jzero.core.graph import Graph, Node
from jzero.core.jaxprs import every_equation, is_literal, is_tracer, opened, place_of
from jzero.core.primitives import CALLS, DRAWS, ELEMENTWISE
from jzero.core.random_keys import is_key
from jzero.core.regions import bodies
from jzero.core.token_loss import TILE_BYTES
from jzero.core.traces import planned
from jzero.core.types import JaxprEqn

WHERE = "jzero.tiled"


class PositionWise:
    """A traced layer that is to be cut along a dim; `Classes` tells what keeps positions apart.

    Attributes:
      name: of the layer.
      graph: the trace.
      rows: which of its arguments are cut, along `dim`.
      keys: which of its arguments are random keys with one value for each tile.
      outs: how many of its results are joined; the others are state.

    Raises:
      ValueError: it is not position-wise, changes its state by its input, or draws from a key that tiles share.
    """

    def __init__(self, name: str, jaxpr, consts, rows: Sequence[int], keys: Sequence[int], dim: int, outs: int):
        self.name, self.body, self.dim, self.outs = name, (jaxpr, consts), dim, outs
        self.graph = graph = Graph(jaxpr, consts)
        self.nodes = _read(graph)
        self.classes = classes = Classes(graph, self.nodes, graph.ins, graph.outs, free=DRAWS)
        cells = {i: [classes.class_of(c) for c in classes.cells[i]] for i in classes.cells}
        cut = [graph.ins[i] for i in rows]
        self.along = {cells[i][dim] for i in cut}
        self.cells = cells
        whole = [i for i in graph.ins if i not in cut]
        apart = all(dim in classes.independent(i) for i in cut) and not any(self._touches(i) for i in whole)
        made = [i for i in graph.outs[:outs] if not (graph.avals[i].ndim > dim and cells[i][dim] in self.along)]
        if not apart or made or any(dim not in classes.independent(i) for i in graph.outs[:outs]):
            self._refuse(f"its result is not computed position by position{self._where()}")
        if pairs := [node for node in self.nodes if any(map(self._pairs_positions, node.outs))]:
            self._refuse(f"it computes a number for each pair of positions{_at(pairs[0])}")
        if any(map(self._touches, graph.outs[outs:])):
            self._refuse("it changes its state by what it is given")
        self._check_draws(keys)

    def _touches(self, value: int) -> bool:
        """Some dim of the value numbers positions."""
        return not self.along.isdisjoint(self.cells[value])

    def _pairs_positions(self, value: int) -> bool:
        """Two dims of the value number positions: of those in a tile a tile has pairs, of no others."""
        return sum(c in self.along for c in self.cells[value]) > 1

    def _refuse(self, why: str) -> None:
        raise ValueError(
            f"{WHERE}: {self.name} cannot be computed in tiles along dim {self.dim}: {why}. Tile a part of it that "
            "treats each position alike (an MLP, a norm, a projection), and pass what depends on positions as an "
            "argument that is cut: one with the dims [batch, sequence], or named in argnums=."
        )

    def _where(self) -> str:
        """The first equation that combines positions, or adds numbers of its own along them."""
        node = self.classes.mixed_by(self.along)
        ends = (n for n in self.nodes if any(map(self._touches, n.ins)) and not any(map(self._touches, n.outs)))
        node = node or next(ends, None)
        return "" if node is None else _at(node)

    def _check_draws(self, keys: Sequence[int]) -> None:
        """Raises for random numbers along the dim that would be the same in every tile."""
        own = {self.graph.ins[i] for i in keys}
        for node in self.nodes:
            if any(i in own for i in node.ins):
                own.update(node.outs)
                continue
            inner = [eqn.primitive.name for body, _ in bodies(node.eqn)[0] for eqn in every_equation(body)]
            if {node.name, *inner} & set(DRAWS):
                self._refuse(
                    f"it draws random numbers{_at(node)} from a key that is the same for all tiles; pass a "
                    "typed key, jax.random.key(...), as an argument of its own"
                )

    def tiles(self, asked: int | None, size: int) -> int:
        """How many: as asked, or by the bytes of all values along the dim on one device."""
        if asked is not None:
            if size % asked:
                near = [n for n in range(1, size + 1) if size % n == 0]
                best = min(near, key=lambda n: (abs(n - asked), n))
                raise ValueError(
                    f"{WHERE}(tiles={asked}): dim {self.dim} of the input of {self.name} has {size} positions, which "
                    f"{asked} does not divide. Pass tiles={best}, or pad the input."
                )
            return asked
        values = {i for node in self.nodes for i in node.outs if self._touches(i)}
        avals = [self.graph.avals[i] for i in values]
        total = sum(math.prod(x.shape) * x.dtype.itemsize for x in avals if hasattr(x.dtype, "itemsize"))
        parts = planned.value.batch_parts if planned.value is not None and self.dim > 0 else 1
        wanted = min(-(-total // (parts * TILE_BYTES)), size)
        found = next(n for n in range(max(wanted, 1), size + 1) if size % n == 0)
        if found > 4 * max(wanted, 1):
            raise ValueError(
                f"{WHERE}: {self.name} needs {wanted} tiles, and no number near that divides the {size} positions of "
                f"its input. Pad the input, or pass tiles=."
            )
        return found

    def equals(self, n: int, *tile: Any) -> None:
        """Raises if the layer computes something else for one of n tiles (a body): it knows how many there are."""
        if not _alike(self.body, tile):
            self._refuse("for fewer positions it has other equations or other numbers: it reads how many there are")
        outs = [(v.aval.shape, w.aval.shape) for v, w in zip(self.body[0].outvars, tile[0].outvars, strict=True)]
        for whole, part in outs[: self.outs]:
            if whole != (*part[: self.dim], n * part[self.dim], *part[self.dim + 1 :]):
                self._refuse(f"its result is {list(part)} for a tile and {list(whole)} for all positions")


def _at(node: Node) -> str:
    """` (dot_general at model.py:31 (loss))`; without the place where jax knows none."""
    place = place_of(node.eqn)
    return f" ({node.name} at {place})" if place else f" ({node.name})"


def _read(graph: Graph) -> list[Node]:
    """The nodes that results are computed from: a sum that is only sown for a collection nobody asked for is not."""
    wanted, found = set(graph.outs), list[Node]()
    for node in reversed(graph.nodes):
        if not wanted.isdisjoint(node.outs) or node.eqn.effects:
            wanted.update(node.ins)
            found.append(node)
    return found[::-1]


def _alike(one: Any, other: Any) -> bool:
    """The same equations with the same numbers, in two bodies for arguments of other sizes."""
    (a, consts), (b, others) = one, other
    if len(a.eqns) != len(b.eqns) or len(consts) != len(others) or not all(map(_equal, consts, others)):
        return False
    for x, y in zip(a.eqns, b.eqns, strict=True):
        if x.primitive.name != y.primitive.name or len(x.invars) != len(y.invars) or _numbers(x) != _numbers(y):
            return False
        folds = x.primitive.name == "random_fold_in"  # linen counts the keys that it makes, in each trace
        for v, w in zip(x.invars, y.invars, strict=True):
            if is_literal(v) and not folds and not (is_literal(w) and _equal(v.val, w.val)):
                return False
        held = CALLS.get(x.primitive.name, "")
        inner = [[opened(e.params[held])] if held in e.params else bodies(e)[0] for e in (x, y)]
        if len(inner[0]) != len(inner[1]) or not all(map(_alike, *inner)):
            return False
    return True


def _numbers(eqn: JaxprEqn) -> dict[str, Any]:
    """The parameters that are numbers and not sizes: an exponent, how often a loop runs."""
    own = eqn.primitive.name in ELEMENTWISE
    return {k: v for k, v in eqn.params.items() if k == "length" or (own and not k.endswith("sharding"))}


def _equal(a: Any, b: Any) -> bool:
    if is_tracer(a) or is_tracer(b) or is_key(a):
        return a is b
    return np.shape(a) == np.shape(b) and bool(np.all((a == b) | ((a != a) & (b != b))))
