"""Where devices are, on which host and slice, and how many of these the groups of a mesh axis span.

[Note: hosts and slices]
A *host* has the devices of one process, a *slice* those of one `slice_index`: hosts that share a fast network of their
own (a TPU slice, a rack on NVLink). If every process has one device, as with one process per GPU, a slice counts as a
host: jax gives the GPUs of one machine the same `slice_index`. (With a single machine, or without `slice_index`, each
process counts as a host.) `devices_per_host` overrides this.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jzero.core.errors import check_int, counted, listing


@dataclasses.dataclass(frozen=True)
class HostPosition:
    """The slice and the host of a device."""

    slice: int
    host: int


def hosts_of(devices: Sequence[Any], *, devices_per_host: int | None = None) -> list[HostPosition]:
    """The position of every device; see [Note: hosts and slices].

    Args:
      devices: anything with `process_index` and, if the platform has slices, `slice_index`.
      devices_per_host: consecutive devices that share a host. None: those of one process.

    Raises:
      TypeError, ValueError: `devices_per_host` is not an int, is below 1, or does not divide the devices.
    """
    slices = [int(getattr(d, "slice_index", None) or 0) for d in devices]
    if devices_per_host is not None:
        check_int(devices_per_host, "devices_per_host", where="jzero.mesh", low=1)
        if len(devices) % devices_per_host:
            raise ValueError(
                f"jzero.mesh(devices_per_host={devices_per_host}): "
                f"{counted(len(devices), 'device is', 'devices are')} not a multiple of it."
            )
        return [HostPosition(s, i // devices_per_host) for i, s in enumerate(slices)]
    hosts = [int(d.process_index) for d in devices]
    per_process = collections.Counter(hosts).values()
    per_slice = collections.Counter(slices).values()
    if max(per_process) == 1 < max(per_slice) and len(per_slice) > 1:
        hosts = slices
    return [HostPosition(s, h) for s, h in zip(slices, hosts, strict=True)]


def grid(devices: Sequence[Any], *, devices_per_host: int | None = None) -> np.ndarray:
    """The devices as `[slices, hosts of a slice, devices of a host]`, in the order of their indices.

    Raises:
      ValueError: hosts have different numbers of devices, or slices different numbers of hosts; lists them.
    """
    devices = sorted(devices, key=_order)
    by_host: dict[HostPosition, list[Any]] = {}
    for device, place in zip(devices, hosts_of(devices, devices_per_host=devices_per_host), strict=True):
        by_host.setdefault(place, []).append(device)
    ordered = sorted(by_host, key=lambda p: (p.slice, p.host))
    by_slice = collections.Counter(p.slice for p in ordered)
    if len({len(found) for found in by_host.values()}) > 1:
        rows = [(f"host {p.host} of slice {p.slice}", counted(len(by_host[p]), "device")) for p in ordered]
        fewest = min(len(found) for found in by_host.values())
        raise ValueError(
            f"jzero.mesh: the {len(ordered)} hosts have different numbers of devices:\n{listing(rows)}\n"
            f"An axis could not keep to their boundaries. Pass devices= with {fewest} of each host, or build a "
            "jax.sharding.Mesh yourself."
        )
    if len(set(by_slice.values())) > 1:
        rows = [(f"slice {s}", counted(count, "host")) for s, count in by_slice.items()]
        raise ValueError(
            f"jzero.mesh: the {len(by_slice)} slices have different numbers of hosts:\n{listing(rows)}\n"
            f"Pass devices= with {counted(min(by_slice.values()), 'host')} of each."
        )
    flat = [d for p in ordered for d in by_host[p]]
    array = np.empty(len(flat), dtype=object)
    array[:] = flat
    return array.reshape(len(by_slice), next(iter(by_slice.values())), -1)


def _order(device: Any) -> tuple[int, int, int]:
    return int(getattr(device, "slice_index", None) or 0), int(device.process_index), int(device.id)


@dataclasses.dataclass(frozen=True)
class Span:
    """What the groups of devices along some mesh axes span.

    Attributes:
      axes: names of the mesh axes.
      size: devices in a group.
      hosts, slices: the largest number of them that a group spans.
      groups_per_host: the largest number of groups with a device on one host.
      even: every group spans the same number of hosts, with the same number of devices on each.
    """

    axes: tuple[str, ...]
    size: int
    hosts: int
    slices: int
    groups_per_host: int
    even: bool


def span(mesh: Mesh, axes: Sequence[str], *, devices_per_host: int | None = None) -> Span:
    """What the groups along `axes` of a mesh span.

    Args:
      mesh: of any devices.
      axes: names of some of its axes.
      devices_per_host: as for `hosts_of`; devices in the order of slices, processes and ids.
    """
    groups = _groups(mesh, axes, devices_per_host)
    counts = [collections.Counter(group) for group in groups]
    touched = collections.Counter(place for count in counts for place in count)
    return Span(
        tuple(axes), len(groups[0]),
        hosts=max(len(c) for c in counts),
        slices=max(len({p.slice for p in c}) for c in counts),
        groups_per_host=max(touched.values()),
        even=len({tuple(sorted(c.values())) for c in counts}) == 1 and len(set(counts[0].values())) == 1,
    )  # fmt: skip


@functools.cache  # asked for every gradient
def hosts_along(mesh: Mesh, axis: str) -> int | None:
    """On how many hosts the devices along an axis are, neighbours on one host; None if hosts have different numbers."""
    groups = _groups(mesh, [axis])
    count = len(set(groups[0]))
    if any(len(set(group)) != count for group in groups) or mesh.shape[axis] % count:
        return None
    each = mesh.shape[axis] // count
    pieces = [group[at : at + each] for group in groups for at in range(0, mesh.shape[axis], each)]
    return count if all(len(set(piece)) == 1 for piece in pieces) else None


def _groups(mesh: Mesh, axes: Sequence[str], devices_per_host: int | None = None) -> list[list[HostPosition]]:
    """The positions of the devices of every group along some axes, in the order of the mesh."""
    flat = sorted(mesh.devices.flat, key=_order)
    positions = hosts_of(flat, devices_per_host=devices_per_host)
    where = {id(d): position for d, position in zip(flat, positions, strict=True)}  # devices need not be hashable
    along = [mesh.axis_names.index(a) for a in axes]
    last = np.moveaxis(mesh.devices, along, range(-len(along), 0)) if along else mesh.devices[..., None]
    size = int(np.prod([mesh.devices.shape[i] for i in along], dtype=int))
    return [[where[id(d)] for d in group] for group in last.reshape(-1, size)]
