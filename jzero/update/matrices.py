"""The matrices of an update that have owners, grouped by what is computed from them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jzero.comm.exchange import Pieces
from jzero.core import jaxprs
from jzero.core.batched import Classes
from jzero.core.dims import dot_dims
from jzero.core.graph import Graph
from jzero.core.primitives import MATRIX_OPS
from jzero.core.regions import bodies, rounds
from jzero.core.types import Jaxpr
from jzero.layout.specs import axis_size
from jzero.sharding import Plan
from jzero.update.mixing import Mixing, Region

DECOMPOSITION = 10  # operations of a decomposition, over n^3 for an n x n matrix (a matmul has 2)
SMALL = 1 / 16  # an operand goes whole to all owners if that sends at most this part of the largest


@dataclasses.dataclass(frozen=True, eq=False)
class Matrix:
    """One matrix: a region, or one layer of a region on stacks.

    Attributes:
      region: its equations.
      at: the index along every dim that numbers matrices, by class of dims.
      dims: for each value that the region reads or makes, which of its dims number matrices, with their classes.
      ins, outs: how each value that the region reads or makes is cut into pieces; None for one that every device has.
      of_region: how many matrices the region has.
    """

    region: Region
    at: dict[int, int]
    dims: dict[int, dict[int, int]]
    ins: tuple[Pieces | None, ...]
    outs: tuple[Pieces, ...]
    of_region: int


class Part(NamedTuple):
    """What the exchange sends of a value: its dtype, and the number of elements in a piece."""

    dtype: np.dtype
    size: int


@dataclasses.dataclass(frozen=True, eq=False)
class Kind:
    """Matrices for which the same is computed.

    Attributes:
      run: computes the results of one matrix from its whole operands.
      axes: the mesh axes that the matrices are split over.
      ins, outs: dtype and piece length of each value; None for a value that every device has, which is not exchanged.
      flops: operations for one matrix, in matmuls and decompositions.
      matrices: all of them.
    """

    run: Callable[[Sequence[Any]], list[Any]]
    axes: tuple[str, ...]
    ins: tuple[Part | None, ...]
    outs: tuple[Part, ...]
    flops: float
    matrices: list[Matrix]


class Matrices:
    """The matrices of regions of an update."""

    def __init__(self, mixing: Mixing, plan: Plan):
        self.mixing, self.graph, self.plan = mixing, mixing.graph, plan

    def kinds(self, regions: Sequence[Region]) -> list[Kind]:
        """The matrices of regions, by what is computed of them."""
        found: dict[Any, Kind] = {}
        for region in regions:
            classes = Classes(self.graph, region.nodes, region.ins, region.outs)
            split = [v for v in (*region.ins, *region.outs) if any(self.mixing.split[v])]
            axes = self._axes(split)
            numbered = self._numbered(classes, region, split)
            single = frozenset(numbered)
            dims = {v: self._dims(classes, v, single) for v in (*region.ins, *region.outs)}
            avals = [self._one(v, dims[v]) for v in region.ins]
            run = functools.partial(classes.run, single)
            jaxpr, consts = jaxprs.trace(lambda *xs, run=run: run(xs), *avals)
            ins = tuple(
                self._pieces(v, dims[v], axes) if any(self.mixing.split[v]) else None for v in region.ins
            )
            outs = tuple(self._pieces(v, dims[v], axes) for v in region.outs)
            rows = zip(region.ins, ins, strict=True)
            parts = tuple(p and self._part(v, p) for v, p in rows), tuple(map(self._part, region.outs, outs))
            key = str(jaxpr), axes, tuple(map(_constant, consts)), str(parts)
            kind = found.setdefault(key, Kind(run, axes, *parts, flops(jaxpr), []))
            for index in np.ndindex(*numbered.values()):
                at = dict(zip(numbered, map(int, index), strict=True))
                kind.matrices.append(Matrix(region, at, dims, ins, outs, math.prod(numbered.values())))
        alike = {k: sorted(kind.matrices, key=lambda m: repr((m.ins, m.outs))) for k, kind in found.items()}
        return [dataclasses.replace(kind, matrices=alike[k]) for k, kind in found.items()]

    def _part(self, value: int, pieces: Pieces) -> Part:
        return Part(self.graph.avals[value].dtype, math.prod(pieces.block))

    def _axes(self, values: Sequence[int]) -> tuple[str, ...]:
        used = {a for v in values for entry in self.mixing.split[v] for a in entry}
        return tuple(a for a in self.plan.array_mesh.axis_names if a in used)

    def _numbered(self, classes: Classes, region: Region, split: Sequence[int]) -> dict[int, int]:
        """The classes of dims that number the matrices of a region, with their sizes.

        A small operand without these dims (coefficients that are stored split, say) goes to every owner.
        """
        size = {v: math.prod(self.graph.avals[v].shape) for v in (*split, *region.outs)}
        shared: dict[int, int] | None = None
        for v in sorted(size, key=lambda v: -size[v]):
            own = {
                c: self.graph.avals[v].shape[d]
                for d, c in classes.independent(v).items()
                if self.graph.avals[v].shape[d] > 1 and not self.mixing.split[v][d]
            }
            left = own if shared is None else {c: n for c, n in shared.items() if c in own}
            sent = size[v] * math.prod((shared or {}).values())
            if v in region.outs or sent > SMALL * max(size.values()):
                shared = left
        return {c: shared[c] for c in sorted(shared)} if shared else {}

    def _dims(self, classes: Classes, value: int, single: frozenset[int]) -> dict[int, int]:
        return {
            d: classes.class_of(c)
            for d, c in enumerate(classes.cells[value])
            if classes.class_of(c) in single
        }

    def _one(self, value: int, dims: dict[int, int]) -> jax.ShapeDtypeStruct:
        aval = self.graph.avals[value]
        return jax.ShapeDtypeStruct([1 if d in dims else s for d, s in enumerate(aval.shape)], aval.dtype)

    def _pieces(self, value: int, dims: dict[int, int], axes: tuple[str, ...]) -> Pieces:
        shape, split = self._one(value, dims).shape or (1,), self.mixing.split[value]
        if {a for entry in split for a in entry} != set(axes):
            at = max(range(len(shape)), key=lambda d: shape[d])
            split = tuple(axes if d == at else () for d in range(len(shape)))
        return Pieces(tuple(shape), split, axes, tuple(axis_size(self.plan.mesh, [a]) for a in axes))


def _constant(value: Any) -> Any:
    """A key that is equal for equal constants."""
    if jaxprs.is_tracer(value):
        return id(value)
    value = np.asarray(value)
    return value.shape, str(value.dtype), value.tobytes()


def flops(jaxpr: Jaxpr) -> float:
    """Operations of the matmuls and decompositions of a jaxpr; a `scan` body once per step, of branches the dearest."""
    total = 0.0
    for node in Graph(jaxpr, [None] * len(jaxpr.constvars)).nodes:
        inner = [flops(body) for body, _ in bodies(node.eqn)[0]]
        if node.name == "dot_general":
            dims = dot_dims(node.eqn)
            summed = math.prod(node.eqn.invars[0].aval.shape[d] for d in dims.contract[0])
            total += 2 * math.prod(node.eqn.outvars[0].aval.shape) * summed
        elif node.name in MATRIX_OPS:
            total += DECOMPOSITION * max(math.prod(v.aval.shape) * v.aval.shape[-1] for v in node.eqn.invars)
        elif inner:
            total += max(inner) * (rounds(node.eqn) if node.name == "scan" else 1)
    return total
