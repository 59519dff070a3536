"""Small leaves and params on their way between the devices of the plan and the host mesh; arrays from their chunks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jzero.core.random_keys import by_data, is_key
from jzero.layout.host_mesh import moved
from jzero.layout.leaf_rule import Layout
from jzero.layout.padding import unpadded
from jzero.layout.placement import put
from jzero.layout.specs import P
from jzero.sharding import Plan
from jzero.stream.chunks import Chunk, whole_of
from jzero.update.padded_state import pad

Piece = tuple[jax.Array, Chunk | None]
"""An array, or a chunk of one."""


def to_host(x: jax.Array, spec: PartitionSpec, plan: Plan) -> jax.Array:
    """An array that lies in a layout, on the host mesh in memory of its own."""
    return moved(x, plan.update_plan.sharding(spec), copy=plan.update_plan.mesh == plan.mesh)


def on_host(x: Any, plan: Plan) -> Any:
    """A small array on every device of the host mesh, in memory of its own."""
    if is_key(x):
        return by_data(lambda x: on_host(x, plan), x)
    if isinstance(x, jax.Array) and x.sharding.device_set == set(plan.mesh.devices.flat):
        return to_host(put(x, plan.sharding(P())), P(), plan)
    return put(np.array(x), plan.update_plan.sharding(P()))


def on_devices(x: Any, spec: PartitionSpec, plan: Plan) -> Any:
    """The reverse of `on_host`: a small array on the plan's devices in a layout, in memory of its own."""
    if is_key(x):
        return by_data(lambda x: on_devices(x, P(), plan), x)
    return put(moved(x, plan.sharding(P()), copy=plan.update_plan.mesh == plan.mesh), plan.sharding(spec))


def param_on_host(param: Any, x: Layout, plan: Plan) -> jax.Array:
    """A param on the shards of its state on the host, in memory of its own."""
    return to_host(_shard_of(plan, x)(param), x.state, plan)


@functools.lru_cache(maxsize=1024)
def _shard_of(plan: Plan, x: Layout):
    return jax.jit(
        lambda p: pad(plan.constrain(p, x.state), x.state_shape, x.state, plan), out_shardings=plan.sharding(x.state)
    )


def on_plan(value: jax.Array, plan: Plan) -> NamedSharding:
    """The layout of an array of the host mesh on the plan's."""
    sharding: Any = value.sharding
    split = len(sharding.mesh.shape) == len(plan.array_mesh.shape)
    return NamedSharding(plan.array_mesh if split else plan.mesh, sharding.spec)


def joined(pieces: Sequence[Piece], sharding, shape: tuple[int, ...] | None = None) -> jax.Array:
    """A whole array from its chunks, in its stored shape; with `shape` the first values of it along each dim."""
    if len(pieces) == 1 and pieces[0][1] is None:
        return pieces[0][0]
    return _join(tuple(c for _, c in pieces), sharding, shape)([x for x, _ in pieces])


@functools.lru_cache(maxsize=256)
def _join(chunks: tuple[Any, ...], sharding, shape: tuple[int, ...] | None):
    def join(values):
        whole = whole_of(chunks, values)
        return whole if shape is None else unpadded(whole, shape)

    return jax.jit(join, out_shardings=sharding)


@jax.jit
def differ(a, b):
    """True if two arrays differ anywhere."""
    return jnp.any(others(a, b))


def others(a, b):
    """Where two arrays differ; NaN is equal to NaN."""
    return (a != b) & ~((a != a) & (b != b))
