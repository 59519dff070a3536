"""What of a run lives in host memory, and what of it crosses PCIe in a step, in closed form."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from jzero.comm import comm_of
from jzero.comm.uses import DEFAULT, Use
from jzero.layout.leaf_rule import Layout
from jzero.layout.specs import shard_factor
from jzero.offload import scheduled
from jzero.optim import init_shapes, zero
from jzero.sharding import HOST, Plan
from jzero.update.masters import split_master
from jzero.update.sharded_update import ShardedUpdate


@dataclasses.dataclass(frozen=True)
class HostBytes:
    """Bytes of one device.

    Attributes:
      params, grads: shards in host memory; with micro-batches the gradients and the sums of them. For an update outside
        of the program all gradients.
      to_device, to_host: over PCIe in a step.
    """

    params: int
    grads: int
    to_device: int
    to_host: int


def host_bytes_of(
    plan: Plan,
    tx: optax.GradientTransformation | None,
    state: int,
    *,
    accumulate: int,
    uses: Mapping[str, Sequence[Use]],
) -> HostBytes:
    """Params and gradients in host memory, and all that crosses PCIe.

    Args:
      plan: says which params live there.
      tx: the optimizer; None for Adam.
      state: bytes of its state there.
      accumulate: micro-batches in a step. Where the sums fit into `in_flight_bytes`, XLA adds gradients to them that
        were never written, and a program moves less.
      uses: by name of a param; one that is not named has one matmul.
    """
    host, hosted = comm_of(plan).host, [x for x in plan.layouts if plan.lives_on_host(x)]
    rows = [host.moved(x, accumulate, uses.get(x.name, DEFAULT)) for x in hosted]
    held = [host.held(x, accumulate) for x in hosted]
    params, trained = (
        sum(x.nbytes // shard_factor(x.stored, plan.mesh) for x in some)
        for some in (hosted, [x for x in hosted if x.frozen is None])
    )
    at_update = sum(total or grad for grad, total in held)
    grads = sum(map(sum, held))
    if plan.config.updates_outside:
        away, fetched = _leave(plan, accumulate)
        grads, written = grads + away, away + trained  # params that live on the host come back by way of the device
    else:
        fetched, written = _of_update(plan, tx, accumulate) or (state + trained + at_update, state + trained)
    return HostBytes(params, grads, fetched + sum(r[0] for r in rows), written + sum(r[1] for r in rows))


def _of_update(
    plan: Plan, tx: optax.GradientTransformation | None, accumulate: int
) -> tuple[int, int] | None:
    """What the update moves, from how it is streamed: a norm reads gradients, or state, once more.

    None where that is not known (no `tx`, or an update that needs more than gradients, state and params): every byte is
    then assumed to be read once and written once.
    """
    if tx is None or not plan.config.streams:
        return None
    with contextlib.suppress(Exception):
        return _streamed(plan, tx, min(accumulate, 2))
    return None


@functools.lru_cache(maxsize=64)
def _streamed(plan: Plan, tx: optax.GradientTransformation, accumulate: int) -> tuple[int, int]:
    """From a trace of the update; more micro-batches than two change nothing."""
    tx = zero(tx, plan)
    update: Any = tx.update
    plan = plan.trained
    state = split_master(init_shapes(tx, plan.shapes), plan.shapes)
    step = ShardedUpdate(update.stored_tx, plan, lambda: update.logical, plan.tree, {}, update.moments)
    grads = [_gradient(x, plan, accumulate) for x in plan.layouts]
    return step.streamed(jax.tree.leaves(plan.shapes), grads, *state, run=scheduled).moved


def _leave(plan: Plan, accumulate: int) -> tuple[int, int]:
    """Of an update outside of the program: gradients that leave device memory for it, and new params that come back."""
    grads = params = 0
    for x in (x for x in plan.layouts if x.frozen is None):
        values = math.prod(x.state_shape) // shard_factor(x.state, plan.mesh)
        params += values * x.dtype.itemsize
        grads += 0 if plan.lives_on_host(x) else values * _gradient(x, plan, accumulate).dtype.itemsize
    return grads, params


def _gradient(x: Layout, plan: Plan, accumulate: int) -> jax.ShapeDtypeStruct:
    dtype = x.dtype if accumulate == 1 else np.promote_types(x.dtype, np.float32)
    layout = plan.sharding(x.state)
    return jax.ShapeDtypeStruct(
        x.shape, dtype, sharding=layout.with_memory_kind(HOST) if plan.lives_on_host(x) else layout
    )
