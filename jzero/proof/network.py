"""What crosses the network: the hosts that each axis of a mesh spans, and what a plan's step sends over it."""

from __future__ import annotations

from jax.sharding import Mesh

from jzero.comm import comm_of
from jzero.core.errors import check_int, counted, human_bytes, table
from jzero.layout.specs import whole_mesh
from jzero.layout.topology import Span, span
from jzero.sharding import Plan


def describe_mesh(subject: Mesh | Plan, *, accumulate: int = 1, devices_per_host: int | None = None) -> str:
    """A table of what stays inside of a host and what crosses the network.

    One row per axis of the mesh: its size, how many hosts (and slices) a group of devices along it spans, and whether
    its collectives stay within a host, cross between hosts of a slice, or cross between slices. For a plan, one row
    more per set of axes that its step sends over, with the bytes that a device sends in a step and those that
    leave a host.

    Args:
      subject: a `jax.sharding.Mesh`, or a `Plan`.
      accumulate: micro-batches in a step, as in `estimate`.
      devices_per_host: as in `mesh`.

    Returns:
      The text. Bytes that leave a host assume rings, as `estimate` does: a ring over several hosts leaves each of them
      once, with the bytes that one device sends.

    Raises:
      TypeError: `subject` is neither a mesh nor a plan, or a number is not an integer.
      ValueError: `accumulate` is below 1; `devices_per_host` as in `mesh`.

    Example:
      >>> import jzero
      >>> print(jzero.describe_mesh(jzero.mesh()).splitlines()[0])
      {'data': 8} over 1 host x 8 devices: cpu
    """
    if not isinstance(subject, (Mesh, Plan)):
        raise TypeError(
            f"jzero.describe_mesh: needs a mesh or a plan, got {type(subject).__name__}. Pass jzero.plan_of(state)."
        )
    check_int(accumulate, "accumulate", where="jzero.describe_mesh", low=1)
    mesh = whole_mesh(subject.mesh if isinstance(subject, Plan) else subject)

    def spanned(axes) -> Span:
        return span(mesh, axes, devices_per_host=devices_per_host)

    every = spanned(mesh.axis_names)
    rows = [[axis, found.size, *_facts(found)] for axis in mesh.axis_names for found in [spanned([axis])]]
    out = [_title(mesh, every), table(["axis", "size", "a group is on", "its collectives"], rows)]
    if isinstance(subject, Plan):
        sent, total = [], 0
        for name, size in comm_of(subject).wire_by_axes(accumulate=accumulate).items():
            found = spanned(name.split("+"))
            leaves = size * found.groups_per_host if found.hosts > 1 else 0
            total += leaves
            sent.append([name, found.size, *_facts(found), human_bytes(size), human_bytes(leaves)])
        header = ["sent over", "size", "a group is on", "its collectives", "a device sends", "leaves a host"]
        out += ["", table(header, sent), f"{human_bytes(total)} leave each host in a step"]
    return "\n".join(out)


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


__all__ = ["describe_mesh"]
