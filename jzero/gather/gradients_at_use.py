"""Which gradients a walked loss reduces where a weight is used, and in which order, where the plan leaves it open."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from jzero.comm import comm_of
from jzero.comm.routes import USE
from jzero.comm.traced import walk_traced
from jzero.core import jaxprs
from jzero.core.linear import linear
from jzero.gather.weight_graph import activation_bytes, loop_constants, tied_tables, value_wise
from jzero.layout.leaf_rule import Layout
from jzero.sharding import Plan


def is_ordered(plan: Plan, jaxpr, weights: Sequence[bool]) -> bool:
    """More than one bucket, and at stage 2 enough tokens: [Note: few tokens] in `buckets.py`."""
    if not comm_of(plan).gradients.has_buckets:
        return False
    return plan.config.row.params or activation_bytes(jaxpr, weights) >= plan.bucket_bytes * plan.batch_parts


def reduced_alone(plan: Plan, jaxpr, layouts: Sequence[Layout | None]) -> list[Layout | None]:
    """The layouts of weights whose gradients XLA would reduce badly, or wrongly, by itself; None for the others.

    See `GradientReduce.where`. These gradients go straight to the shards of the optimizer state.
    """
    weights, gradients = [y is not None for y in layouts], comm_of(plan).gradients
    alone = tied_tables(jaxpr, weights) | loop_constants(jaxpr, weights) | used_value_by_value(plan, jaxpr, layouts)
    where = functools.partial(gradients.where, in_loop=jaxprs.in_loop())
    here = {i for i, y in enumerate(layouts) if y is not None and where(y, alone=i in alone) == USE}
    return [dataclasses.replace(y, grad=y.state) if y and i in here else None for i, y in enumerate(layouts)]


def used_value_by_value(plan: Plan, jaxpr, layouts: Sequence[Layout | None]) -> set[int]:
    """Positions of weights that are used so, and whose gradients' layouts must not spread back (`_must_not_spread`)."""
    found = {i for i, y in enumerate(layouts) if _must_not_spread(plan, y)}
    return found & value_wise(jaxpr, [y is not None for y in layouts]) if found else found


def telling_the_update(plan: Plan, arrays: Sequence[Any], layouts: Sequence[Layout | None]) -> list[Any]:
    """The same arrays. When the gradients of such weights are traced, the update is told that this loss was walked.

    Not when the loss is traced: an evaluation has no gradients, and the update after it may be that of another loss.
    """

    def back(g):
        walk_traced(plan)
        return [g]

    return [
        linear(lambda p: [p], back, [], [x])[0] if _must_not_spread(plan, y) and jaxprs.is_tracer(x) else x
        for x, y in zip(arrays, layouts, strict=True)
    ]


def _must_not_spread(plan: Plan, y: Layout | None) -> bool:
    """See [Note: what spreads back] in `comm/gradients.py`."""
    return y is not None and not y.vector and comm_of(plan).gradients.spreads_wrongly(y.state)
