"""Which gradients a walked loss reduces where a weight is used, and in which order, where the plan leaves it open."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from jzero.comm import comm_of
from jzero.comm.routes import USE
from jzero.core import jaxprs
from jzero.gather.weight_graph import activation_bytes, loop_constants, tied_tables
from jzero.layout.leaf_rule import Layout
from jzero.sharding import Plan


def is_ordered(plan: Plan, jaxpr, weights: Sequence[bool]) -> bool:
    """Whether there is more than one bucket and, at stage 2, enough tokens: [Note: few tokens] in `buckets.py`."""
    if not comm_of(plan).gradients.has_buckets:
        return False
    return plan.config.row.params or activation_bytes(jaxpr, weights) >= plan.bucket_bytes * plan.batch_parts


def reduced_alone(plan: Plan, jaxpr, layouts: Sequence[Layout | None]) -> list[Layout | None]:
    """The layouts of weights whose gradients XLA would reduce badly, or wrongly, by itself; None for the others.

    See `GradientReduce.where`. These gradients go straight to the shards of the optimizer state.
    """
    weights, gradients = [y is not None for y in layouts], comm_of(plan).gradients
    spread = {i for i, y in enumerate(layouts) if y and not y.vector and gradients.spreads_wrongly(y.state)}
    alone = tied_tables(jaxpr, weights) | loop_constants(jaxpr, weights) | spread
    where = functools.partial(gradients.where, in_loop=jaxprs.in_loop())
    here = {i for i, y in enumerate(layouts) if y is not None and where(y, alone=i in alone) == USE}
    return [dataclasses.replace(y, grad=y.state) if y and i in here else None for i, y in enumerate(layouts)]
