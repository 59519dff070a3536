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
At stage 2 order saves what XLA would keep otherwise, the activations that weight gradients are made from. Where they
are fewer bytes than a bucket it saves nothing, and whole gradients fit better into the donated buffers of old params.

Everything here reads jaxprs alone; `interpreter.py` makes the ties.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.dtypes import issubdtype

from jzero.core import jaxprs
from jzero.core.primitives import INLINE, REMAT
from jzero.core.products import row_lookup
from jzero.gather.sharded_weight import ON_SHARD

LOOPS = ("scan", "while")
CLOSED = (*LOOPS, "cond")

Key = tuple[int, Any]  # a variable, and the number of the jit equation that it was inlined from


@dataclasses.dataclass(frozen=True)
class Step:
    """One equation to evaluate, with the variables of its place; `outer`: the jit equations round it."""

    eqn: Any
    outer: tuple[Any, ...]
    ins: tuple[Any, ...]
    outs: tuple[Key, ...]


@dataclasses.dataclass(frozen=True)
class Flat:
    """A jaxpr with the jit equations that read weights inlined.

    Attributes:
      consts, ins, outs: its constants, arguments and results; a result may be a literal.
      steps: the equations in order.
      known: constants of inlined functions.
      parent: for a variable that is a weight after a cast (a transpose, a squeeze), the weight before it; for a weight
        among the arguments itself.
    """

    consts: tuple[Key, ...]
    ins: tuple[Key, ...]
    outs: tuple[Any, ...]
    steps: tuple[Step, ...]
    known: Mapping[Key, Any]
    parent: Mapping[Key, Key]

    def root(self, key: Key) -> Key:
        """The argument that a weight was made from."""
        while self.parent[key] != key:
            key = self.parent[key]
        return key

    def reads(self, step: Step) -> list[Key]:
        """The weights that a step uses, each once; none for a step that only changes a stored weight."""
        if step.eqn.primitive.name in ON_SHARD:
            return []
        return list(dict.fromkeys(a for a in step.ins if _is_in(a, self.parent)))


@dataclasses.dataclass
class Bucket:
    """Uses that follow each other.

    Attributes:
      steps: positions of its uses.
      weights: what they read.
      early: weights to be gathered ahead of it: all, or of a region those of its first buckets.
      closed: a region or a loop that orders itself inside.
      loop: a loop.
    """

    steps: list[int]
    weights: list[Key]
    early: list[Key]
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
    activations: tuple[Key, ...]
    gather: tuple[Key, ...]
    reduce: tuple[Key, ...]


def flatten(jaxpr, weights: Sequence[bool]) -> Flat:
    """The steps of a jaxpr; `weights` says which of its arguments are stored weights."""
    numbers = itertools.count(1)
    steps: list[Step] = []
    known: dict[Key, Any] = {}
    ins = tuple((0, v) for v in jaxpr.invars)
    parent: dict[Key, Key] = {k: k for k, w in zip(ins, weights, strict=True) if w}

    def inline(jaxpr, number: int, place: dict[Any, Any], outer: tuple[Any, ...]) -> list[Any]:
        def at(atom):
            return atom if jaxprs.is_literal(atom) else place[atom]

        for eqn in jaxpr.eqns:
            atoms = tuple(at(a) for a in eqn.invars)
            weighty = [a for a in atoms if _is_in(a, parent)]
            if weighty and eqn.primitive.name in INLINE:
                inner, consts = jaxprs.opened(eqn.params["jaxpr"])
                own = next(numbers)
                known.update(((own, v), c) for v, c in zip(inner.constvars, consts, strict=True))
                inside = {v: (own, v) for v in inner.constvars} | dict(zip(inner.invars, atoms, strict=True))
                place.update(zip(eqn.outvars, inline(inner, own, inside, (*outer, eqn)), strict=True))
                continue
            outs = tuple((number, v) for v in eqn.outvars)
            if weighty and eqn.primitive.name in ON_SHARD:
                parent[outs[0]] = weighty[0]
            if weighty and eqn.primitive.name in (*REMAT, "cond"):
                bodies, skipped = _region(eqn)
                operands = atoms[skipped:]
                handed = handed_through(bodies, [_is_in(a, parent) for a in operands])
                parent.update((k, operands[i]) for k, i in zip(outs, handed, strict=True) if i is not None)
            steps.append(Step(eqn, outer, atoms, outs))
            place.update(zip(eqn.outvars, outs, strict=True))
        return [at(a) for a in jaxpr.outvars]

    start = {v: (0, v) for v in (*jaxpr.constvars, *jaxpr.invars)}
    outs = tuple(inline(jaxpr, 0, start, ()))
    return Flat(tuple((0, v) for v in jaxpr.constvars), ins, outs, tuple(steps), known, parent)


def activation_bytes(jaxpr, weights: Sequence[bool]) -> int:
    """Bytes of the activations, over all devices, that the gradients of weights are made from; of a loop one turn."""
    flat = flatten(jaxpr, weights)
    data, total = _data(flat), 0
    for step in flat.steps:
        if not flat.reads(step):
            continue
        bodies, skipped = _region(step.eqn)
        if bodies:  # of branches the first
            weighty = [_is_in(a, flat.parent) for a in step.ins[skipped:]]
            total += activation_bytes(jaxprs.opened(bodies[0])[0], weighty)
            continue
        avals = [v.aval for _, v in _activations(step, data)]
        total += sum(math.prod(x.shape) * x.dtype.itemsize for x in avals)
    return total


def tied_tables(jaxpr, weights: Sequence[bool]) -> set[int]:
    """Positions of the weights whose rows are looked up and that have another use: [Note: a tied embedding]."""
    flat = flatten(jaxpr, weights)
    uses: dict[Key, list[bool]] = collections.defaultdict(list)  # of each: is it a lookup
    for step in flat.steps:
        for key in flat.reads(step):
            uses[flat.root(key)].append(row_lookup(step.eqn))
    return {i for i, key in enumerate(flat.ins) if len(uses[key]) > 1 and any(uses[key])}


def _region(eqn) -> tuple[Sequence[Any], int]:
    """The bodies of a region, a loop or branches, and how many leading operands they do not get; none: a plain one."""
    params, name = eqn.params, eqn.primitive.name
    if name == "while":
        return [params["body_jaxpr"]], params["cond_nconsts"]
    if name == "cond":
        return params["branches"], 1
    return ([params["jaxpr"]], 0) if name == "scan" or name in REMAT else ([], 0)


def handed_through(regions: Sequence[Any], weights: Sequence[bool]) -> list[int | None]:
    """For each result of regions (a remat region, branches): which weight all of them return as it came, or None.

    NNX returns a module's whole state from each of its transforms.
    """
    found = []
    for jaxpr, _ in (jaxprs.opened(r) for r in regions):
        index = {v: i for i, v in enumerate(jaxpr.invars) if weights[i]}
        found.append([None if jaxprs.is_literal(v) else index.get(v) for v in jaxpr.outvars])
    return [i[0] if len(set(i)) == 1 else None for i in zip(*found, strict=True)]


def find_buckets(flat: Flat, sizes: Mapping[Key, int], limit: int, prefetch: int) -> list[Bucket]:
    """The buckets of a jaxpr in the order of the program.

    Args:
      flat: its steps.
      sizes: whole bytes of each weight among the arguments.
      limit: bytes that a bucket holds at least; one before a loop or a region may hold less.
      prefetch: of a region, how many of its buckets are gathered ahead of it.
    """
    found: list[Bucket] = []
    held, is_open = 0, False  # bytes of the bucket that takes more uses, if one does
    for at in reversed(range(len(flat.steps))):
        step = flat.steps[at]
        weights = flat.reads(step)
        if not weights:
            continue
        size, name = sum(sizes[flat.root(k)] for k in weights), step.eqn.primitive.name
        if name in CLOSED:
            found.append(Bucket([at], weights, [], closed=True, loop=name in LOOPS))
            is_open = False
        elif name in REMAT and size >= limit:
            early = _first_inside(flat, step, sizes, limit, prefetch)
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


def _first_inside(flat: Flat, step: Step, sizes, limit: int, prefetch: int) -> list[Key]:
    """The weights of the first buckets in a region, as they are called outside."""
    (body,), skipped = _region(step.eqn)
    operands = step.ins[skipped:]
    is_weight = [_is_in(a, flat.parent) for a in operands]
    inner = flatten(jaxprs.opened(body)[0], is_weight)
    outside = {k: a for k, a, w in zip(inner.ins, operands, is_weight, strict=True) if w}
    own = {k: sizes[flat.root(a)] for k, a in outside.items()}
    first = find_buckets(inner, own, limit, prefetch)[:prefetch]
    return list(dict.fromkeys(outside[inner.root(k)] for b in first for k in b.weights))


def find_ties(flat: Flat, buckets: Sequence[Bucket], prefetch: int) -> Iterator[Tie]:
    """The ties of a jaxpr; see [Note: buckets]."""
    data = _data(flat)
    gather: dict[tuple[int, bool], list[Key]] = collections.defaultdict(list)
    reduce: dict[tuple[int, bool], list[Key]] = collections.defaultdict(list)
    for i, bucket in enumerate(buckets):
        loop = max((j for j in range(max(0, i - prefetch), i) if buckets[j].loop), default=None)
        if loop is not None:
            gather[loop, True] += bucket.early
        elif i >= prefetch:
            gather[i - prefetch, False] += bucket.early
        if not bucket.closed:
            before = max(i - 1, 0)
            reduce[before, buckets[before].closed] += bucket.weights
    for i, bucket in enumerate(buckets):
        entry = _entry(flat, bucket, data)
        if entry is not None:
            yield Tie(entry[0], False, entry[1], tuple(gather[i, False]), tuple(reduce[i, False]))
        if bucket.closed:
            at = bucket.steps[0]
            outs = tuple(k for k in flat.steps[at].outs if _floating(k[1]))
            yield Tie(at, True, outs, tuple(gather[i, True]), tuple(reduce[i, True]))


def _entry(flat: Flat, bucket: Bucket, data: set[Key]) -> tuple[int, tuple[Key, ...]] | None:
    """Where a bucket begins, and the activations that its first use, or the next one that reads any, reads.

    A scale is broadcast before it meets an activation: the bucket begins there, if the activations are there by then.
    """
    first = bucket.steps[0]
    made: set[Key] = set()
    for at in range(first, bucket.steps[-1] + 1):
        keys = _activations(flat.steps[at], data)
        if keys:
            return (first if made.isdisjoint(keys) else at), keys
        made.update(flat.steps[at].outs)
    return None


def _activations(step: Step, data: set[Key]) -> tuple[Key, ...]:
    """The activations that a step reads, each once."""
    return tuple(dict.fromkeys(a for a in step.ins if _is_in(a, data) and _floating(a[1])))


def _data(flat: Flat) -> set[Key]:
    """What is computed from arguments that are no weights: activations, not masks and constants."""
    found = {k for k in flat.ins if k not in flat.parent}
    for step in flat.steps:
        if any(_is_in(a, found) for a in step.ins):
            found.update(step.outs)
    return found


def _is_in(atom, keys: Container[Key]) -> bool:
    """One of these variables: weights, activations; a literal is never one."""
    return not jaxprs.is_literal(atom) and atom in keys


def _floating(var) -> bool:
    return bool(np.ndim(var.aval)) and issubdtype(var.aval.dtype, np.inexact)
