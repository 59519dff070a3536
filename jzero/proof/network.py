"""What crosses the network: the hosts that each axis of a mesh spans, and what a plan's step sends over it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jax.sharding import Mesh

from jzero.core.errors import counted, human_bytes, table
from jzero.layout.specs import whole_mesh
from jzero.layout.topology import Span, span


def what_crosses(mesh: Mesh, sent: Mapping[str, int], *, devices_per_host: int | None = None) -> str:
    """`Estimate.network` as text; `sent`: bytes that one device sends, by mesh axes.

    Raises:
      TypeError, ValueError: `devices_per_host`, as in `jzero.mesh`.
    """
    mesh = whole_mesh(mesh)

    def spanned(axes: Sequence[str]) -> Span:
        return span(mesh, axes, devices_per_host=devices_per_host)

    every = spanned(mesh.axis_names)
    rows = [[axis, found.size, *_facts(found)] for axis in mesh.axis_names for found in [spanned([axis])]]
    out = [_title(mesh, every), table(["axis", "size", "a group is on", "its collectives"], rows)]
    if not sent:
        return "\n".join(out)
    moved, total = [], 0
    for name, size in sent.items():
        found = spanned(name.split("+"))
        leaves = _leaving(size, found)
        total += leaves
        moved.append([name, found.size, *_facts(found), human_bytes(size), human_bytes(leaves)])
    header = ["sent over", "size", "a group is on", "its collectives", "a device sends", "leaves a host"]
    return "\n".join([*out, "", table(header, moved), f"{human_bytes(total)} leave each host in a step"])


def seconds_of(
    mesh: Mesh, sent: Mapping[str, int], within_host: float, between_hosts: float, *, devices_per_host: int | None
) -> float:
    """`Estimate.wire_seconds`; `sent`: bytes that one device sends, by mesh axes.

    Raises:
      TypeError, ValueError: `devices_per_host`, as in `jzero.mesh`.
    """
    mesh, total = whole_mesh(mesh), 0.0
    for name, size in sent.items():
        found = span(mesh, name.split("+"), devices_per_host=devices_per_host)
        total += max(size / within_host, _leaving(size, found) / between_hosts)
    return total


def _leaving(size: int, found: Span) -> int:
    """Bytes that leave a host where each of its devices sends `size`: once for each group on it."""
    return size * found.groups_per_host if found.hosts > 1 else 0


def _title(mesh: Mesh, every: Span) -> str:
    axes = ", ".join(f"{k!r}: {v}" for k, v in mesh.shape.items())
    slices = f" in {counted(every.slices, 'slice')}" if every.slices > 1 else ""
    kind = getattr(mesh.devices.flat[0], "device_kind", "device")
    each = mesh.devices.size / every.hosts
    return (
        f"{{{axes}}} over {counted(every.hosts, 'host')} x {each:g} device{'s' * (each != 1)}{slices}: {kind}"
    )


def _facts(found: Span) -> tuple[str, str]:
    """On how many hosts a group is, and what its collectives cross."""
    where = counted(found.hosts, "host")
    where += f", {counted(found.slices, 'slice')}" if found.slices > 1 else ""
    where += "" if found.even else ", unevenly"
    if found.slices > 1:
        return where, "cross between slices"
    return where, "cross between hosts" if found.hosts > 1 else "stay within a host"

