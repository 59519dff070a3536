"""Moves arrays between the plan's mesh and the host mesh, shard by shard; no shard crosses processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jzero.core.errors import counted


def host_mesh(mesh: Mesh) -> Mesh:
    """A mesh of the same shape, of CPU devices of the same processes.

    Raises:
      RuntimeError: a process has fewer CPU devices than devices of the mesh.
    """
    if mesh.devices.flat[0].platform == "cpu":
        return mesh
    cpus: dict[int, list[Any]] = {}
    for d in jax.devices("cpu"):
        cpus.setdefault(d.process_index, []).append(d)
    taken: dict[int, int] = {}
    out = np.empty(mesh.devices.shape, dtype=object)
    for at, d in np.ndenumerate(mesh.devices):
        nth = taken.get(d.process_index, 0)
        taken[d.process_index] = nth + 1
        own = cpus.get(d.process_index, [])
        out[at] = own[nth] if nth < len(own) else None
    most = max(taken.values())
    if any(d is None for d in out.flat):
        raise RuntimeError(
            f"jzero: an update on the host needs one CPU device for each of the {counted(most, 'device')} of a process."
            f' Before JAX is first used: jax.config.update("jax_num_cpu_devices", {most}), and where JAX_PLATFORMS is '
            "set, cpu among its platforms."
        )
    return Mesh(out, mesh.axis_names, axis_types=mesh.axis_types)


def moved(x: jax.Array, target: NamedSharding, *, copy: bool = False) -> jax.Array:
    """An array on another mesh of the same shape, in the same layout.

    Args:
      x: its layout splits it into the same pieces as `target`, on devices in the same order.
      target: a layout on the other mesh, and a memory kind.
      copy: the result shares no memory with `x`.
    """
    if not x.size:  # what JAX has jitted lies whole on every device, whatever its layout says
        return jax.make_array_from_callback(x.shape, target, lambda index: np.zeros(x.shape, x.dtype)[index])
    pieces = {s.device: s.data for s in x.addressable_shards}
    sources = x.sharding.devices_indices_map(x.shape)
    wanted = target.devices_indices_map(x.shape)
    by_index: dict[Any, list[Any]] = {}
    for d, index in sources.items():
        if d in pieces:
            by_index.setdefault(bounds_of(index, x.shape), []).append(d)
    turns: dict[Any, int] = {}
    placed = []
    for d, index in wanted.items():
        if d.process_index != jax.process_index():
            continue
        key = bounds_of(index, x.shape)
        holders = by_index[key]
        turn = turns.get(key, 0)
        turns[key] = turn + 1
        piece = pieces[holders[turn % len(holders)]]
        sharding = jax.sharding.SingleDeviceSharding(d, memory_kind=target.memory_kind)
        placed.append(jax.device_put(piece, sharding, may_alias=False if copy else None))
    return jax.make_array_from_single_device_arrays(x.shape, target, placed)


def all_moved(xs: Sequence[jax.Array], mesh: Mesh) -> list[jax.Array]:
    """Several arrays on another mesh of the same shape, each in its own layout."""
    layouts: list[Any] = [x.sharding for x in xs]
    return [moved(x, NamedSharding(mesh, s.spec)) for x, s in zip(xs, layouts, strict=True)]


def bounds_of(index: tuple[slice, ...], shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Where a piece of an array begins and ends along each dim, in a form that can be hashed."""
    return tuple((s.indices(n)[0], s.indices(n)[1]) for s, n in zip(index, shape, strict=True))
