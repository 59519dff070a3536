"""Gradients to the shards of their optimizer state, and new params from there to their stored layouts."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jzero.comm import comm_of
from jzero.layout.leaf_rule import Layout
from jzero.layout.placement import memory_kind, on_device
from jzero.sharding import Plan
from jzero.stream.chunks import whole_of
from jzero.update.on_host.host_arrays import Piece, joined
from jzero.update.padded_state import cut, pad


def on_shards(grads: Sequence[jax.Array], plan: Plan) -> list[jax.Array]:
    """Gradients on the shards of their state, in stored shapes; those that lie there already as they are."""
    grads = [jnp.asarray(g) if isinstance(g, np.ndarray) else g for g in grads]
    rows = enumerate(zip(grads, plan.layouts, strict=True))
    away = [i for i, (g, x) in rows if g is not None and not _on_shard(g, x, plan)]
    if not away:
        return list(grads)
    layouts = tuple(plan.layouts[i] for i in away)
    out = dict(zip(away, _reduce(plan, layouts)([on_device(grads[i]) for i in away]), strict=True))
    return [out.get(i, g) for i, g in enumerate(grads)]


def _on_shard(g: jax.Array, x: Layout, plan: Plan) -> bool:
    """True for a gradient that lies, in whatever memory, as its state does."""
    there = plan.sharding(x.state).with_memory_kind(memory_kind(g))
    return x.state_shape == g.shape and g.sharding.is_equivalent_to(there, g.ndim)


@functools.lru_cache(maxsize=64)
def _reduce(plan: Plan, layouts: tuple[Layout, ...]):
    comm = comm_of(plan).gradients

    def reduce(grads):
        own = [comm.one_at_update(g, x) for g, x in zip(grads, layouts, strict=True)]
        return [pad(g, x.state_shape, x.state, plan) for g, x in zip(own, layouts, strict=True)]

    return jax.jit(reduce, out_shardings=[plan.sharding(x.state) for x in layouts])


def whole_once_complete(pieces: list[Piece], x: Layout, plan: Plan) -> list[Piece]:
    """The chunks of a param, joined once all are there: to hold both for all params at once takes twice the memory."""
    chunks = [chunk for _, chunk in pieces if chunk is not None]
    if sum(math.prod(chunk.shape) for chunk in chunks) < math.prod(chunks[0].view):
        return pieces
    return [(joined(pieces, plan.sharding(x.state)), None)]


def landed(found: dict[int, list[Piece]], plan: Plan) -> list[jax.Array | None]:
    """New params in their stored layouts, from their shards, which may be in chunks; None if unchanged."""
    out: list[jax.Array | None] = [None] * len(plan.layouts)
    rest = {}
    for i, pieces in found.items():
        x = plan.layouts[i]
        (value, chunk), *more = pieces
        same = not more and chunk is None and x.stored == x.state and tuple(value.shape) == x.shape
        if same and not plan.lives_on_host(x):
            out[i] = value
        else:
            rest[i] = [v for v, _ in pieces], tuple(c for _, c in pieces)
    if rest:
        key = tuple((i, chunks) for i, (_, chunks) in rest.items())
        news = _land(plan, key)([values for values, _ in rest.values()])
        for i, value in zip(rest, news, strict=True):
            out[i] = value
    return out


@functools.lru_cache(maxsize=64)
def _land(plan: Plan, rows: tuple[Any, ...]):
    layouts = [plan.layouts[i] for i, _ in rows]

    def land(values):
        gather = comm_of(plan).updates
        with jax.named_scope(gather.SCOPE):
            parts = zip(values, rows, layouts, strict=True)
            return [_stored(gather, v, chunks, x, plan) for v, (_, chunks), x in parts]

    return jax.jit(land, out_shardings=[plan.param_sharding(x) for x in layouts])


def _stored(gather, values: list, chunks: tuple[Any, ...], x: Layout, plan: Plan):
    if chunks[0] is None:
        (whole,) = values
    else:
        whole = plan.constrain(whole_of(chunks, values), x.state)
    return plan.constrain(gather(cut(whole, x.shape, x.state, plan), x), x.stored)
