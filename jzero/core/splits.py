"""How the results of an equation are split over devices, from how its operands are.

[Note: split values]
A value is split if each device holds a shard of it. An equation follows if each device computes its shard of the result
from its shards of the operands: elementwise, or along dims that it keeps. It mixes if it combines values along a split
dim; then nothing is known of its results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from jzero.core.dims import dim_in_result
from jzero.core.graph import Graph
from jzero.core.primitives import CONTROL_FLOW, MIXES, REDUCING
from jzero.core.regions import Body, bodies, through_bodies
from jzero.core.types import JaxprEqn

Split = tuple[tuple[str, ...], ...]
"""The mesh axes that each dim of a value is split over."""


class NotFollowed(Exception):
    """A body combines values along a split dim, or a value is split in two ways."""


def whole(shape: Sequence[int]) -> Split:
    """The split of an array that is not split."""
    return ((),) * len(shape)


def mixing(eqn: JaxprEqn) -> bool:
    """True for an equation that combines values of its operands along their dims, itself or in its bodies."""
    if eqn.primitive.name in MIXES:
        return True
    return any(mixing(node.eqn) for body in bodies(eqn)[0] for node in Graph(*body).nodes)


def followed(eqn: JaxprEqn, splits: Sequence[Split]) -> list[Split] | None:
    """How the results of an equation are split if each device computes them from its shards; None if it cannot.

    A reduction over a split dim is possible: the results of the devices are then summed.
    """
    shapes = [tuple(getattr(v.aval, "shape", ())) for v in eqn.outvars]
    name = eqn.primitive.name
    if not any(map(any, splits)):
        return [whole(s) for s in shapes]
    if name == "optimization_barrier":
        return list(splits)
    if name in CONTROL_FLOW:
        try:
            return through_bodies(eqn, splits, _program, _joined, sliced=_sliced, stacked=lambda s: ((), *s))
        except NotFollowed:
            return None
    found: list[list[tuple[str, ...]]] = [[()] * len(s) for s in shapes]
    for at, split in enumerate(splits):
        for dim, axes in enumerate(split):
            if not axes:
                continue
            to = dim_in_result(eqn, at, dim)
            if to is None:
                if name in REDUCING or all(math.prod(s) == 1 for s in shapes):
                    continue
                return None
            if any(set(axes) & set(entry) for f in found for d, entry in enumerate(f) if d != to):
                return None  # a matmul of rows and columns, `x + x.T`
            for k, shape in enumerate(shapes):
                if to < len(shape) and (not found[k][to]):
                    found[k][to] = axes
    return [tuple(f) for f in found]


def _program(body: Body, splits: Sequence[Split]) -> list[Split]:
    graph = Graph(*body)
    known = dict(zip(graph.ins, splits, strict=True))
    known.update((v, whole(graph.avals[v].shape)) for v in graph.known)
    for node in graph.nodes:
        outs = followed(node.eqn, [known[i] for i in node.ins])
        if outs is None:
            raise NotFollowed
        known.update(zip(node.outs, outs, strict=True))
    return [known[o] for o in graph.outs]


def _joined(a: Split, b: Split) -> Split:
    """The split of a value from two branches or rounds; it may be whole in one of them."""
    if any(a) and any(b) and a != b:
        raise NotFollowed
    return a if any(a) else b


def _sliced(stack: Split) -> Split:
    if stack[0]:
        raise NotFollowed
    return stack[1:]
