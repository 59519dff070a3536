"""Buckets (C_B): which weights of a function are gathered together, and have their gradients reduced together.

[Note: buckets]
A jaxpr is read as a row of *uses*, equations that read a stored weight for arithmetic. From the last to the first they
are put into buckets of at least `bucket_bytes`: a small message costs as much time as a larger one, so small weights
share one; a weight that is larger than that has one of its own. Whole bytes count, not those of a shard, so a bucket
holds the same weights whatever the number of devices. XLA joins the collectives of one bucket; it cannot join two,
since values of the program tie them to different places:

- *forward*, a bucket's weights are gathered no earlier than `prefetch` buckets ahead of their use;
- *on the way back*, the cotangents that leave a bucket wait until the gradients of the bucket behind it are reduced, so
  that one reduction runs beside the matmuls of one bucket, and no more than two buckets of whole gradients are alive.

A remat region of at least `bucket_bytes` has buckets of its own inside; so has the body of a loop. What comes after
one of them waits for its end on the way back, and after a loop on the way forward as well: a weight must not lie
gathered, nor a gradient whole, while all layers of a scan run.

[Note: few tokens]
At stage 2 the order saves the activations that weight gradients are made from, which XLA would otherwise keep. If they
are smaller than a bucket, this saves nothing, and whole gradients fit better into the donated buffers of old params.

This module only reads jaxprs; `ties.py` makes the ties.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence

from jzero.core.graph import Node
from jzero.core.primitives import CONTROL_FLOW, LOOPS, REMAT
from jzero.core.regions import bodies
from jzero.gather.weight_graph import WeightGraph


@dataclasses.dataclass
class Bucket:
    """Uses of weights that follow each other.

    Attributes:
      steps: positions of its uses.
      weights: what they read.
      early: weights to be gathered ahead of it: all, or of a region those of its first buckets.
      closed: a region or a loop that orders itself inside.
      loop: a loop.
    """

    steps: list[int]
    weights: list[int]
    early: list[int]
    closed: bool = False
    loop: bool = False


@dataclasses.dataclass(frozen=True)
class Tie:
    """Weights bound to activations, before the step at `at` or after it.

    Attributes:
      activations: floating variables.
      gather: weights to be gathered only when the first of them is there.
      reduce: weights whose gradients are reduced before the cotangents of these go on.
    """

    at: int
    after: bool
    activations: tuple[int, ...]
    gather: tuple[int, ...]
    reduce: tuple[int, ...]


def find_buckets(graph: WeightGraph, sizes: Mapping[int, int], limit: int, prefetch: int) -> list[Bucket]:
    """The buckets of a jaxpr in the order of the program.

    Args:
      graph: its nodes.
      sizes: whole bytes of each weight among the arguments.
      limit: bytes that a bucket holds at least; one before a loop or a region may hold less.
      prefetch: of a region, how many of its buckets are gathered ahead of it.
    """
    found: list[Bucket] = []
    held, is_open = 0, False  # bytes of the bucket that takes more uses, if one does
    for at in reversed(range(len(graph.nodes))):
        node = graph.nodes[at]
        weights = graph.weights_of(node)
        if not weights:
            continue
        size, name = sum(sizes[graph.root(k)] * graph.part(k) for k in weights), node.name
        if name in CONTROL_FLOW:
            found.append(Bucket([at], weights, [], closed=True, loop=name in LOOPS))
            is_open = False
        elif name in REMAT and size >= limit:
            early = _first_inside(graph, node, sizes, limit, prefetch)
            found.append(Bucket([at], weights, early, closed=True))
            is_open = False
        else:
            if not is_open:
                found.append(Bucket([], [], []))
                held, is_open = 0, True
            found[-1].steps.insert(0, at)
            found[-1].weights[:0] = weights
            found[-1].early = found[-1].weights
            held += size
            is_open = held < limit
    found.reverse()
    if is_open and len(found) > 1 and not found[1].closed:  # what is left over goes with its neighbour
        first, second = found[:2]
        merged = first.weights + second.weights
        found[:2] = [Bucket(first.steps + second.steps, merged, merged)]
    return found


def _first_inside(graph: WeightGraph, node: Node, sizes, limit: int, prefetch: int) -> list[int]:
    """The weights of the first buckets in a region, by their numbers in the graph outside."""
    (body,), skipped = bodies(node.eqn)
    operands = node.ins[skipped:]
    is_weight = [i in graph.parent for i in operands]
    inner = WeightGraph(*body, is_weight)
    outside = {k: a for k, a, w in zip(inner.ins, operands, is_weight, strict=True) if w}
    own = {k: sizes[graph.root(a)] for k, a in outside.items()}
    first = find_buckets(inner, own, limit, prefetch)[:prefetch]
    return list(dict.fromkeys(outside[inner.root(k)] for b in first for k in b.weights))


def find_ties(
    graph: WeightGraph, buckets: Sequence[Bucket], prefetch: int, written: Collection[int] = ()
) -> Iterator[Tie]:
    """The ties of a jaxpr; see [Note: buckets].

    `written`: arguments whose gradients are written to host memory (`HostSource`). Cotangents wait for these even
    where they come from regions.
    """
    data = graph.data()
    gather: dict[tuple[int, bool], list[int]] = collections.defaultdict(list)
    reduce: dict[tuple[int, bool], list[int]] = collections.defaultdict(list)
    for i, bucket in enumerate(buckets):
        loop = max((j for j in range(max(0, i - prefetch), i) if buckets[j].loop), default=None)
        if loop is not None:
            gather[loop, True] += bucket.early
        elif i >= prefetch:
            gather[i - prefetch, False] += bucket.early
        before = max(i - 1, 0)
        reduce[before, buckets[before].closed] += [
            k for k in bucket.weights if not bucket.closed or graph.root(k) in written
        ]
    for i, bucket in enumerate(buckets):
        entry = _entry(graph, bucket, data)
        if entry is not None:
            yield Tie(entry[0], False, entry[1], tuple(gather[i, False]), tuple(reduce[i, False]))
        if bucket.closed:
            at = bucket.steps[0]
            outs = tuple(k for k in graph.nodes[at].outs if graph.is_floating(k))
            yield Tie(at, True, outs, tuple(gather[i, True]), tuple(reduce[i, True]))


def _entry(graph: WeightGraph, bucket: Bucket, data: set[int]) -> tuple[int, tuple[int, ...]] | None:
    """Where a bucket begins, and the activations that its first use, or the next one that reads any, reads.

    A scale is broadcast before it meets an activation: the bucket begins there, if the activations are there by then.
    """
    first = bucket.steps[0]
    made: set[int] = set()
    for at in range(first, bucket.steps[-1] + 1):
        keys = graph.activations(graph.nodes[at], data)
        if keys:
            return (first if made.isdisjoint(keys) else at), keys
        made.update(graph.nodes[at].outs)
    return None
