"""Order between weights and activations in a walk, made by ties.

[Note: ties]
In straight-line code nothing keeps XLA from gathering every weight at the start, and from computing the gradients of
the weights when it likes. With 1024 tokens per device it runs the whole backward pass first and all weight gradients
after it, their inputs kept (7 GB of a 7.5B GPT), and joins reductions until one carries 2 GB of whole gradients. So
weights are tied to activations, bucket by bucket (`buckets.py` says which to which):

- An optimization barrier ties the shard to an activation before it is gathered. The barrier's result is constrained
  to the stored layout again, or the partitioner would move the gather in front of it.
- The identity with a transpose of its own ties on the way back: the cotangent of an activation goes on only when the
  gradients of the weights are on their shards. Nothing changes forward.

A tie must be between values: XLA sees through a barrier with a constant in it.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jzero.core import jaxprs
from jzero.core.linear import linear
from jzero.core.ordering import after
from jzero.gather import buckets
from jzero.gather.sharded_weight import Weight
from jzero.gather.source import Carrier
from jzero.gather.walk import Walk, reduced
from jzero.gather.weight_graph import WeightGraph


def carriers(weights: Mapping[int, tuple[Weight, bool]]) -> list[tuple[int, Carrier]]:
    """The carriers of weights, by their keys; each with whether its gradient is reduced in the tie."""
    found: list[tuple[int, Carrier]] = []
    origins: list[Any] = []
    for key, (weight, is_reduced) in weights.items():
        origin = weight.source.origin
        if any(origin is o for o in origins):
            continue
        carrier = weight.source.carrier(weight.shard, is_reduced)
        if carrier is not None:
            found.append((key, carrier))
            origins += [] if origin is None else [origin]
    return found


def find_ties(graph: WeightGraph, env, walk: Walk) -> dict[tuple[int, bool], list[buckets.Tie]]:
    """The ties of a function by the number of their step, and whether they come after it."""
    found: dict[tuple[int, bool], list[buckets.Tie]] = collections.defaultdict(list)
    if walk.ordered:
        config, limit = walk.plan.config, walk.plan.bucket_bytes
        sizes = {k: env[k].held_bytes for k in graph.ins if isinstance(env[k], Weight)}
        rows = buckets.find_buckets(graph, sizes, limit, config.prefetch)
        written = {k for k in sizes if not env[k].source.direct}
        for tie in buckets.find_ties(graph, rows, config.prefetch, written):
            found[tie.at, tie.after].append(tie)
    return found


def tie(found: buckets.Tie, graph: WeightGraph, env, walk: Walk) -> None:
    """See [Note: ties]: weights and activations in `env` are replaced by tied ones."""

    def here(key):  # a weight under the name that it has by now
        while key not in env:
            key = graph.parent[key]
        return key

    activations = [k for k in found.activations if not isinstance(env[k], Weight)]
    gather, reduce = (dict.fromkeys(map(here, keys)) for keys in (found.gather, found.reduce))
    reduce = {k: None for k in reduce if env[k].trained}
    late = [k for k in gather if env[k].moves]
    # a round of a loop fetches what it reads; what a tie makes of it would be kept for the backward loop
    as_they_are = jaxprs.in_differentiated_loop() and not walk.in_remat
    values = [] if as_they_are else [k for k in late if not env[k].source.direct]
    # frozen weights only wait: as linear arguments they would get a tangent of zeros, and from it a gradient
    frozen = [k for k in late if env[k].source.direct and not env[k].trained]
    values += frozen
    weights = {
        k: (env[k], k in reduce)
        for k in gather | reduce
        if (k in late or k in reduce) and (env[k].trained or not env[k].source.direct)
    }
    rows = carriers(weights)
    if not activations or not (rows or values):
        return
    waiting = [i for i, (k, _) in enumerate(rows) if k in late and env[k].source.direct]
    specs = [env[k].stored if k in frozen else None for k in values]
    run = _Tied(walk, {k: env[k] for k in weights}, rows, waiting, frozenset(reduce), specs)
    out = linear(
        run.forward, run.back, [env[k].shard for k in values],
        [c.array for _, c in rows] + [env[k] for k in activations],
        tangent=run.tangent if values or not all(w.source.direct for w, _ in weights.values()) else None,
        fixed_outs=len(values),
    )  # fmt: skip
    for (key, carrier), array in zip(rows, out, strict=False):
        env[key] = carrier.put(env[key], array)
    env.update(zip(activations, out[len(rows) :], strict=False))
    for key, value in zip(values, out[len(out) - len(values) :], strict=True):
        env[key] = dataclasses.replace(env[key], shard=value)


@dataclasses.dataclass(frozen=True, eq=False)
class _Tied:
    """What a tie does, forward and on the way back.

    Attributes:
      walk: gives the plan and the reduction.
      weights: by key, as they come to the tie.
      rows: the carriers, each with the key of its weight.
      waiting: positions of the carriers that are gathered late.
      reduced: keys of the weights whose gradients are reduced here.
      specs: layouts of the arrays that only wait, which are the first arguments and the last results. None for a weight
        that is fetched late; the others are frozen weights.
    """

    walk: Walk
    weights: dict[int, Weight]
    rows: list[tuple[int, Carrier]]
    waiting: list[int]
    reduced: frozenset[int]
    specs: list[Any]

    @property
    def values(self) -> int:
        """How many arrays only wait."""
        return len(self.specs)

    def forward(self, *flat):
        """The values, the carriers and the activations, tied."""
        return self._tied(flat[: self.values], flat[self.values :], lambda c: c.forward)

    def tangent(self, *flat):
        """The tangents of the carriers and the activations."""
        return self._tied((), flat[self.values :], lambda c: c.tangent)

    def _tied(self, values: Sequence[Any], flat: Sequence[Any], move: Callable[[Carrier], Callable]) -> list[Any]:
        first = len(self.rows)
        flat = [move(c)(x) for (_, c), x in zip(self.rows, flat, strict=False)] + list(flat[first:])
        if values or self.waiting:
            found, (flat[first],) = after([*values, *(flat[i] for i in self.waiting)], [flat[first]])
            values, shards = found[: len(values)], found[len(values) :]
            rows = zip(values, self.specs, strict=False)
            values = [x if spec is None else self.walk.plan.constrain(x, spec) for x, spec in rows]
            for i, shard in zip(self.waiting, shards, strict=True):
                flat[i] = self.walk.plan.constrain(shard, self.weights[self.rows[i][0]].stored)
        return [*flat, *values]

    def back(self, *flat):
        """The cotangents of the activations, only when the gradients of the weights are reduced."""
        cotangents, first = flat[self.values :], len(self.rows)
        grads = [c.back(g, self._reduction(k)) for (k, c), g in zip(self.rows, cotangents, strict=False)]
        is_done = [k in self.reduced for k, _ in self.rows]
        if not any(is_done):
            return [*grads, *cotangents[first:]]
        done, waited = after([g for g, d in zip(grads, is_done, strict=True) if d], cotangents[first:])
        own = iter(done)
        return [next(own) if d else g for g, d in zip(grads, is_done, strict=True)] + waited

    def _reduction(self, key: int) -> Callable[[Any], Any]:
        if key not in self.reduced:
            return lambda grad: grad
        return lambda grad: reduced(grad, self.weights[key], self.walk)
