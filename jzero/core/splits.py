"""How the results of an equation are split over devices, from how its operands are.

[Note: split values]
A value is split where each device holds a shard of it. An equation follows where each device computes its shard of the
result from its shards of the operands: elementwise, along dims that it keeps. It mixes where it combines values along a
split dim; then its results are not known to be split.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jzero.core.dims import dim_in_result
from jzero.core.graph import Graph
from jzero.core.primitives import MIXES, REDUCING
from jzero.core.regions import bodies, scan_parts, while_parts

Split = tuple[tuple[str, ...], ...]
"""The mesh axes that each dim of a value is split over."""
LOOPS = ("scan", "while", "cond")


class NotFollowed(Exception):
    """A body combines values along a split dim."""


def whole(shape: Sequence[int]) -> Split:
    """Of an array that no device shares."""
    return ((),) * len(shape)


def mixing(eqn: Any) -> bool:
    """True for an equation that combines values of its operands along their dims, or has such ones in its bodies."""
    if eqn.primitive.name in MIXES:
        return True
    inner = list(bodies(eqn)[0])
    return any(mixing(node.eqn) for jaxpr, consts in inner for node in Graph(jaxpr, consts).nodes)


def followed(eqn: Any, splits: Sequence[Split]) -> list[Split] | None:
    """How the results of an equation are split where each device computes them from its shards; None where it cannot.

    A reduction over a split dim counts as split: a sum over devices follows it, of the result.
    """
    shapes = [tuple(getattr(v.aval, "shape", ())) for v in eqn.outvars]
    name = eqn.primitive.name
    if not any(map(any, splits)):
        return [whole(s) for s in shapes]
    if name == "optimization_barrier":
        return list(splits)
    if name in LOOPS:
        try:
            return {"scan": _scan, "while": _while, "cond": _cond}[name](eqn, splits)
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


def _program(jaxpr: Any, consts: Sequence[Any], splits: Sequence[Split]) -> list[Split]:
    graph = Graph(jaxpr, consts)
    known = dict(zip(graph.ins, splits, strict=True))
    known.update((v, whole(graph.avals[v].shape)) for v in graph.known)
    for node in graph.nodes:
        outs = followed(node.eqn, [known[i] for i in node.ins])
        if outs is None:
            raise NotFollowed
        known.update(zip(node.outs, outs, strict=True))
    return [known[o] for o in graph.outs]


def _fixed(body, carry: Sequence[Split]) -> list[Split]:
    """The carry of a loop; NotFollowed where a round leaves it split otherwise."""
    carry = list(carry)
    for _ in range(4):
        new = body(carry)
        joined = [a if any(a) else b for a, b in zip(carry, new, strict=True)]
        if any(any(b) and a != b for a, b in zip(joined, new, strict=True)):
            raise NotFollowed
        if joined == carry:
            return carry
        carry = joined
    raise NotFollowed


def _scan(eqn: Any, splits: Sequence[Split]) -> list[Split]:
    _, consts, count = scan_parts(eqn)
    stacks = splits[consts + count :]
    if any(s[0] for s in stacks):
        raise NotFollowed
    inner = bodies(eqn)[0][0]

    def run(carry):
        return _program(*inner, [*splits[:consts], *carry, *(s[1:] for s in stacks)])

    carry = _fixed(lambda c: run(c)[:count], splits[consts : consts + count])
    return [*carry, *(((), *s) for s in run(carry)[count:])]


def _while(eqn: Any, splits: Sequence[Split]) -> list[Split]:
    (_, a), (_, count) = while_parts(eqn)
    own, inner = splits[a : a + count], bodies(eqn)[0][0]
    return _fixed(lambda c: _program(*inner, [*own, *c]), splits[a + count :])


def _cond(eqn: Any, splits: Sequence[Split]) -> list[Split]:
    outs = [_program(*branch, splits[1:]) for branch in bodies(eqn)[0]]
    return [next((s for s in some if any(s)), some[0]) for some in zip(*outs, strict=True)]
