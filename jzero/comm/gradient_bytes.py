"""Bytes of gradients on the wire: what `GradientReduce` sends for a param in a step, in closed form."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from jzero.comm.reduce_in_codes import exchanges, within_hosts_first
from jzero.comm.reduce_scatter import scatter_steps
from jzero.comm.routes import UPDATE
from jzero.comm.uses import Use
from jzero.comm.weights import ring
from jzero.layout.leaf_rule import Layout
from jzero.layout.specs import axis_of, axis_size, shard_factor, spec_axes
from jzero.sharding import Plan

if TYPE_CHECKING:
    from jzero.comm.gradients import GradientReduce

Sent = tuple[tuple[str, ...], float]
"""Mesh axes, and the bytes that one device sends over them."""


def wire(gradients: GradientReduce, x: Layout, accumulate: int, uses: Sequence[Use]) -> Iterator[Sent]:
    """See `GradientReduce.wire`."""
    if x.frozen is not None:
        return
    row, uses = gradients.plan.config.row, [use for use in uses if use.has_gradient]
    if not row.grads or gradients.where(x) == UPDATE:
        parts = [uses] if row.state else _by_lookup(uses)
        whole = [[dataclasses.replace(use, part=1.0) for use in some] for some in parts if some]
        uses = [max(some, key=lambda use: sum(size for _, size in _one(gradients, x, use))) for some in whole]
    for use in uses:
        for axes, size in _one(gradients, x, use):
            yield axes, accumulate * size


def _one(gradients: GradientReduce, x: Layout, use: Use) -> Iterator[Sent]:
    """What one reduction sends."""
    if gradients.in_codes(x, x.layer_shape):
        yield from _one_in_codes(gradients, x, use)
        return
    plan, mesh, taken = gradients.plan, gradients.plan.mesh, spec_axes(x.used)
    split = tuple(a for a in spec_axes(x.state) if a not in taken)
    whole = tuple(a for a in plan.batch_axes if a not in split and a not in taken)
    itemsize, steps = _itemsize(plan, x, use), [split]
    size = math.prod(x.state_shape) * use.part * itemsize / shard_factor(x.used, mesh)
    scattered = gradients.is_scattered(x.shape, x.state)
    if scattered and not x.vector:
        steps = [own for _, own in scatter_steps(len(x.shape), x.state, plan)]
    elif scattered:  # all-reduced and sliced, see [Note: vectors first whole] in `gradients.py`
        steps, whole = [], tuple(a for a in plan.batch_axes if a not in taken)
    elif use.rows and split:
        size = min(size, _rows_bytes(gradients, x, use, itemsize))
    for own in steps:
        yield tuple(map(axis_of, own)), ring(axis_size(mesh, own)) * size
        size /= axis_size(mesh, own)
    yield whole, 2 * ring(axis_size(mesh, whole)) * size


def _one_in_codes(gradients: GradientReduce, x: Layout, use: Use) -> Iterator[Sent]:
    """The same, where values travel in codes: exchange by exchange, then among replicas in the dtype they have."""
    plan, taken = gradients.plan, spec_axes(x.used)
    values = math.prod(x.state_shape) * use.part / shard_factor(x.used, plan.mesh)
    for _, own in within_hosts_first(scatter_steps(len(x.shape), x.state, plan, but=taken), plan):
        for _, exchange in exchanges(own, plan):
            yield (axis_of(exchange.axis),), ring(exchange.devices) * exchange.message_bytes(values, plan)
            values /= exchange.devices
    cut = set(map(axis_of, spec_axes(x.state)))
    whole = tuple(a for a in plan.batch_axes if a not in cut and a not in taken)
    yield whole, 2 * ring(axis_size(plan.mesh, whole)) * values * _itemsize(plan, x, use)


def _rows_bytes(gradients: GradientReduce, x: Layout, use: Use, itemsize: int) -> float:
    """Bytes of a lookup's cotangents: XLA sends these in place of the gradient if they are fewer.

    If the table is split by rows, every device needs all cotangents; if by columns, only its own columns of them.
    Infinite if the gradient is constrained to the used layout first: then XLA sends the gradient.
    """
    if x.stored != x.used and gradients.is_shared(x.stored, x.state):
        return math.inf
    by_columns = bool(x.state and not x.state[0])
    return use.rows * x.shape[-1] * itemsize / (shard_factor(x.state, gradients.plan.mesh) if by_columns else 1)


def _itemsize(plan: Plan, x: Layout, use: Use) -> int:
    """Bytes per value of a gradient that travels as it is: of the dtype that was asked for, or in which it is made."""
    config = plan.config
    asked = None if config.reduces_in_codes else config.reduce_dtype
    return (asked or use.dtype or config.compute_dtype or x.dtype).itemsize


def _by_lookup(uses: Sequence[Use]) -> list[list[Use]]:
    """The uses in two lists, lookups and others; without empty lists."""
    parts = ([use for use in uses if (use.kind == "lookup") == wanted] for wanted in (True, False))
    return [some for some in parts if some]
