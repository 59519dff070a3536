"""`mesh` makes meshes whose axes follow hosts and slices; `resolve_mesh` finds the mesh of a plan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from jzero.config import ZeroConfig
from jzero.core.errors import listing, nearest, shown
from jzero.layout.explicit import auto_mesh, context_mesh
from jzero.layout.specs import check_axes, whole_mesh
from jzero.layout.topology import grid, hosts_along, span

LEVELS = {"slices": 0, "hosts": 1, "host": 2}  # dims of `topology.grid`


def mesh(
    axes: Mapping[str, int | str] | None = None,
    /,
    *,
    devices: Sequence[Any] | None = None,
    pod: Any = None,
    devices_per_host: int | None = None,
    **sizes: int | str,
) -> Mesh:
    """A mesh whose axes keep to the boundaries of hosts and slices, with Auto axes.

    Devices are ordered slice by slice and host by host, whatever order they come in, and the last axis runs inside of a
    host first. `print(jzero.estimate(plan).network())` says what crosses the network.

    Args:
      axes: size by axis name, from the outermost to the innermost. A size is a number; -1 or "rest", for one axis, what
        the others leave; or a boundary: "host", the devices of one host, "hosts", all hosts (of a slice, where
        another axis has "slices"), or "slices". An axis with a boundary has its place in the mesh there,
        wherever it is listed. None and no keywords: all devices on `"data"`.
      devices: of the mesh. None: `jax.devices()`, or those of `pod`.
      pod: a `jzero.Pod`, to compile for.
      devices_per_host: consecutive devices that share a host. None: those of one process (topology.py says more).
      **sizes: axes as keywords, behind those of `axes`.

    Returns:
      A `jax.sharding.Mesh`, equal on every process.

    Raises:
      TypeError: axes, a size, devices or a pod are of the wrong kind.
      ValueError: the sizes do not multiply to the number of devices, two axes share a boundary, an axis or a device is
        given twice, there is no device, hosts differ in size, the groups of an axis lie unevenly over hosts.

    Example:
      >>> import jax, jzero
      >>> jzero.mesh().shape["data"] == len(jax.devices())
      True
      >>> jzero.mesh(replica="hosts", data="host").axis_names
      ('replica', 'data')
    """
    named = _named(axes, sizes)
    if pod is not None:
        if devices is not None:
            raise ValueError("jzero.mesh: pass devices= or pod=, not both.")
        if not hasattr(pod, "gpus_per_host"):
            raise TypeError(f"jzero.mesh: pod must be a jzero.Pod, not {pod!r}. Pass jzero.pod(...).")
        devices, devices_per_host = pod.devices, devices_per_host or pod.gpus_per_host
    ordered = grid(jax.devices() if devices is None else _devices(devices), devices_per_host=devices_per_host)
    if any(size == "hosts" for size in named.values()) and "slices" not in named.values():
        ordered = ordered.reshape(1, -1, ordered.shape[2])
    shape = _shape(named, ordered.shape)
    made = Mesh(_arranged(named, shape, ordered), tuple(shape), axis_types=(AxisType.Auto,) * len(shape))
    rows = [
        (repr(name), f"groups of {shape[name]}", f"on hosts of {ordered.shape[2]}")
        for name in shape
        if ordered.flat[0].platform != "tpu"  # whose hosts share their slice's network
        and not span(made, [name], devices_per_host=devices_per_host).even
    ]
    if rows:
        raise ValueError(
            f"jzero.mesh: {len(rows)} axes lie unevenly over the {ordered.shape[0] * ordered.shape[1]} hosts:\n"
            f"{listing(rows)}\nSome of their groups would cross the network and others not. Pass sizes that divide "
            "the devices of a host, or are multiples of them (with the axes behind them), or build a jax.sharding.Mesh "
            "yourself."
        )
    return made


def _named(axes: Any, sizes: Mapping[str, int | str]) -> dict[str, int | str]:
    """All axes, the outermost first."""
    if not isinstance(axes, Mapping | None):
        raise TypeError(
            f'jzero.mesh: axes must be a mapping of sizes by name, such as {{"replica": 2, "data": -1}}, not {axes!r}.'
        )
    axes = axes or {}
    for name in axes:
        if not isinstance(name, str) or not name:
            raise TypeError(f"jzero.mesh: an axis is named by a word, not {name!r}.")
    if twice := [name for name in axes if name in sizes]:
        raise ValueError(f"jzero.mesh: axis {twice[0]!r} is given twice, in the mapping and as a keyword.")
    for name in sizes:
        if hint := nearest(name, ("devices", "pod", "devices_per_host"), cutoff=0.85):
            raise TypeError(
                f"jzero.mesh: {name!r} is not an option.{hint} An axis goes into the mapping: "
                f"jzero.mesh({{{name!r}: ...}})."
            )
    named = {**axes, **sizes} or {"data": -1}
    for name, size in named.items():
        if isinstance(size, bool) or not isinstance(size, (int, str)):
            raise TypeError(
                f"jzero.mesh: the size of axis {name!r} must be an int or a word, got {shown(size)}."
            )
    return named


def _devices(devices: Any) -> list[Any]:
    """The devices that were passed, as a list without duplicates."""
    given = np.asarray(devices, dtype=object).ravel().tolist()
    if not given:
        raise ValueError("jzero.mesh: devices is empty. Leave it out for all devices.")
    if wrong := [d for d in given if not hasattr(d, "process_index")]:
        raise TypeError(f"jzero.mesh: devices must be JAX devices (jax.devices()), not {wrong[0]!r}.")
    if (different := len(set(map(id, given)))) < len(given):
        raise ValueError(f"jzero.mesh: {len(given)} devices were passed, {different} different ones.")
    return given


def _shape(named: Mapping[str, int | str], levels: tuple[int, ...]) -> dict[str, int]:
    """The size of every axis as a number."""
    known = (*LEVELS, "rest")
    for name, size in named.items():
        if isinstance(size, str) and size not in known:
            raise ValueError(
                f"jzero.mesh: the size of axis {name!r} is {size!r}.{nearest(size, known)} "
                f"Pass a number, or one of {', '.join(map(repr, known))}."
            )
        if isinstance(size, int) and size < 1 and size != -1:
            raise ValueError(
                f"jzero.mesh: the size of axis {name!r} is {size}; it must be at least 1, or -1."
            )
    for words in (("slices",), ("hosts",), ("host",), ("rest", -1)):
        twice = [name for name, size in named.items() if size in words]
        if len(twice) > 1:
            raise ValueError(
                f"jzero.mesh: {' and '.join(map(repr, twice))} both have {words[0]!r}; only one can."
            )
    rest = [name for name, size in named.items() if size in ("rest", -1)]
    total = math.prod(levels)
    shape = {k: levels[LEVELS[v]] if v in LEVELS else v for k, v in named.items() if k not in rest}
    asked = math.prod(int(n) for n in shape.values())
    left, odd = divmod(total, asked)
    if odd or (left != 1 and not rest):
        text = " x ".join(f"{shape.get(k, '?')} ({k})" for k in named)
        hosts = f"{levels[0] * levels[1]} hosts x {levels[2]}"
        raise ValueError(
            f"jzero.mesh: {text} = {asked} devices, but there are {hosts} = {total}.\n"
            f"The sizes must {'divide' if rest else 'multiply to'} {total}; one of them may be -1, the rest."
        )
    return {k: left if k in rest else int(shape[k]) for k in named}


def _arranged(named: Mapping[str, int | str], shape: Mapping[str, int], ordered: np.ndarray) -> np.ndarray:
    """The devices in the shape of the mesh: axes with a boundary are placed there, the others over what is left."""
    placed = {LEVELS[v]: name for name, v in named.items() if isinstance(v, str) and v in LEVELS}
    free = [name for name in named if name not in placed.values()]
    if set(placed) <= {0} and ordered.flat[0].platform == "tpu":
        return _torus(free, placed.get(0), shape, ordered)
    taken = [placed[level] for level in sorted(placed)]
    last = [level for level in range(3) if level not in placed]
    array = ordered.transpose([*sorted(placed), *last]).reshape([shape[k] for k in (*taken, *free)])
    return array.transpose([[*taken, *free].index(name) for name in named])


def _torus(
    free: Sequence[str], across: str | None, shape: Mapping[str, int], ordered: np.ndarray
) -> np.ndarray:
    """TPUs: inside of a slice JAX lays the axes on its torus; `across`, or else the outermost axis, spans the slices.

    Raises:
      ValueError: the slices do not divide the outermost axis.
    """
    slices, inner = len(ordered), [shape[k] for k in free]
    if across is None:
        if inner[0] % slices:
            raise ValueError(
                f"jzero.mesh: the outermost axis, of {inner[0]} devices, does not divide by {slices} slices. Pass a "
                f'first axis of a multiple of {slices}, such as {{"replica": "slices", ...}}.'
            )
        inner[0] //= slices
    each = [mesh_utils.create_device_mesh(inner, part.ravel().tolist()) for part in ordered]
    if across is None:
        return np.concatenate(each)
    return np.moveaxis(np.stack(each), 0, list(shape).index(across))


def resolve_mesh(mesh: Mesh | None, config: ZeroConfig) -> tuple[Mesh, list[str]]:
    """The mesh of a plan, which has the config's axes and Auto axes only, and notes about it.

    Raises:
      TypeError: `mesh` is not a `jax.sharding.Mesh`.
      ValueError: the config names an axis that the mesh does not have, or needs its axes in another order.
    """
    context = context_mesh()
    if mesh is None and context is not None and set(config.axes) <= set(context.axis_names):
        mesh = context
    if mesh is None:
        axes = config.axes
        if config.gathered_first:
            axes = (*config.cut_axes, *(a for a in axes if a not in config.cut_axes))
        mesh = Mesh(np.array(jax.devices()).reshape([-1] + [1] * (len(axes) - 1)), axes)
    if not isinstance(mesh, Mesh):
        raise TypeError(f"jzero: mesh must be a jax.sharding.Mesh, not {type(mesh).__name__}.")
    mesh = whole_mesh(mesh)  # that of arrays which an earlier plan laid out
    axes = (*config.axes, *config.batch_axes, *config.param_axes)
    check_axes(axes, mesh, where="jzero", remedy="Pass axis= one of its names, or another mesh.")
    _check_order(mesh, config)
    _check_hosts(mesh, config)
    if all(t == AxisType.Auto for t in mesh.axis_types):
        return mesh, []
    note = "the mesh has Explicit axes; without jax.set_mesh arrays lie on a mesh with Auto axes over the same devices."
    return auto_mesh(mesh), [note]


def _check_order(mesh: Mesh, config: ZeroConfig) -> None:
    """Raises ValueError for two hops in which the innermost axis of a weight is not the innermost axis of the mesh.

    XLA makes a reduce-scatter of gradients only where pieces are in the order of the devices.
    """
    order = [a for a in mesh.axis_names if a in config.cut_axes]
    if config.gathered_first and order != list(config.cut_axes):
        rest = iter(config.cut_axes)
        names = [next(rest) if a in config.cut_axes else a for a in mesh.axis_names]
        dims = [mesh.axis_names.index(a) for a in names]
        raise ValueError(
            f"ZeroConfig(gather_dtype=...): weights are gathered over {config.cut_axes[-1]!r} first, so it must come "
            f"after {', '.join(map(repr, config.cut_axes[:-1]))} in the mesh, or XLA all-reduces whole gradients. Pass "
            f"mesh=Mesh(mesh.devices.transpose{tuple(dims)}, {tuple(names)})."
        )


def _check_hosts(mesh: Mesh, config: ZeroConfig) -> None:
    """Raises ValueError where gradients in codes cannot go to devices of the same host first."""
    uneven = [a for a in config.axes if config.reduces_in_codes and hosts_along(mesh, a) is None]
    if uneven:
        raise ValueError(
            f"ZeroConfig(reduce_dtype={config.reduce_dtype}): gradients go to the devices of a host first, but along "
            f"the axis {uneven[0]!r} of {mesh.shape[uneven[0]]} devices hosts have different numbers of them, or their "
            "devices do not follow each other. Make the mesh with jzero.mesh, or leave reduce_dtype out."
        )


def in_shard_map() -> bool:
    """True inside of a `jax.shard_map`: its axes are Manual, and no layout along them can be asked for."""
    return jax.sharding.AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types
