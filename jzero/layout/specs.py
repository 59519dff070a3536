"""Reads and makes PartitionSpecs: their mesh axes, sub-axes, and the mesh that they belong to.

[Note: sub-axes]
A NamedSharding cannot split two dims of an array over one mesh axis. A finer mesh can: it has the same devices in the
same order, and one axis per prime factor of n in place of an axis of size n, so a spec on it may give 8 of 64 devices
to one dim and 8 to another. Sub-axes are written `data:0`, `data:1`, ... from the outermost; a prime size has none. In
a spec on the finer mesh all sub-axes of an axis together stand for the axis.

One jit may mix both meshes, but JAX names the layouts that XLA chose for results (a gradient that is returned, an
average of params) after the mesh of the first array argument, and raises IndivisibleError where that mesh has no axes
for them. So a plan that needs sub-axes anywhere lays out everything on the finer mesh, scalars and batch too.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from jax.sharding import Mesh, PartitionSpec

from jzero.core.errors import nearest

P = PartitionSpec
_SUB = re.compile(r"(.+):(\d+)")


def entry_axes(entry: Any) -> tuple[str, ...]:
    """The mesh axes, or sub-axes, that one entry of a PartitionSpec names."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def named_axes(spec: PartitionSpec) -> tuple[str, ...]:
    """All mesh axes and sub-axes that a PartitionSpec names, as it names them."""
    return tuple(a for entry in spec for a in entry_axes(entry))


def spec_axes(spec: PartitionSpec) -> tuple[str, ...]:
    """All axes of the user's mesh that a PartitionSpec names; for sub-axes the axis that they are part of."""
    return tuple(dict.fromkeys(axis_of(a) for a in named_axes(spec)))


def split_dims(*specs: PartitionSpec) -> frozenset[int]:
    """The dims that any of these layouts splits."""
    return frozenset(i for spec in specs for i, entry in enumerate(spec) if entry)


def axis_of(name: str) -> str:
    """The mesh axis that a sub-axis is part of; a mesh axis itself."""
    found = _SUB.fullmatch(name)
    return found[1] if found else name


def is_sub_axis(name: str) -> bool:
    """True for `data:0`: see [Note: sub-axes]."""
    return _SUB.fullmatch(name) is not None


def axis_size(mesh: Mesh, axes: Iterable[str]) -> int:
    """Number of devices along axes or sub-axes of the user's mesh together."""
    return math.prod(_size(mesh, a) for a in axes)


def _size(mesh: Mesh, name: str) -> int:
    found = None if name in mesh.shape else _SUB.fullmatch(name)
    return primes(mesh.shape[found[1]])[int(found[2])] if found else mesh.shape[name]


def check_axes(names: Iterable[str], mesh: Mesh, *, where: str, remedy: str = "") -> None:
    """Raises ValueError for a name that is not an axis of the mesh."""
    for name in names:
        if name not in mesh.shape:
            hint = nearest(name, mesh.axis_names)
            raise ValueError(
                f"{where}: the mesh {dict(mesh.shape)} has no axis {name!r}.{hint} {remedy}".rstrip()
            )


def shard_factor(spec: PartitionSpec, mesh: Mesh) -> int:
    """The number of different pieces into which a layout splits an array."""
    return axis_size(mesh, named_axes(spec))


def divides(spec: PartitionSpec, shape: Sequence[int], mesh: Mesh) -> bool:
    """True if a layout splits an array of this shape into equal pieces."""
    entries = zip(shape, spec, strict=False)
    return all(size % axis_size(mesh, entry_axes(entry)) == 0 for size, entry in entries)


def make_spec(entries: Sequence[tuple[str, ...]]) -> PartitionSpec:
    """Canonical PartitionSpec: single names unpacked, no trailing None."""
    out = [None if not e else e[0] if len(e) == 1 else tuple(e) for e in entries]
    while out and out[-1] is None:
        out.pop()
    return P(*out)


def spec_entries(spec: PartitionSpec, ndim: int) -> list[tuple[str, ...]]:
    """The axes of every dim of an array of `ndim` dims."""
    return [entry_axes(spec[i]) if i < len(spec) else () for i in range(ndim)]


def without_dim(spec: PartitionSpec, ndim: int, dropped: int | None) -> PartitionSpec:
    """The layout of an array of `ndim` dims after one of them is dropped; of None: its own."""
    return make_spec([e for dim, e in enumerate(spec_entries(spec, ndim)) if dim != dropped])


@functools.lru_cache(maxsize=1024)
def primes(n: int) -> tuple[int, ...]:
    """The prime factors of n, ascending: 12 -> (2, 2, 3)."""
    found, p = [], 2
    while p * p <= n:
        while n % p == 0:
            found.append(p)
            n //= p
        p += 1
    return (*found, n) if n > 1 else tuple(found)


def sub_axes(mesh: Mesh, axis: str) -> tuple[str, ...]:
    """The sub-axes of a mesh axis, the outermost first; the axis itself if its size is prime or 1."""
    count = len(primes(mesh.shape[axis]))
    return tuple(f"{axis}:{i}" for i in range(count)) if count > 1 else (axis,)


def joined(entry: Sequence[str], mesh: Mesh) -> tuple[str, ...]:
    """Neighbouring sub-axes that make up an axis become that axis: (data:0, data:1, data:2) -> (data,)."""
    out: list[str] = []
    names = list(entry)
    while names:
        whole = sub_axes(mesh, axis_of(names[0])) if is_sub_axis(names[0]) else ()
        if whole and tuple(names[: len(whole)]) == whole:
            out.append(axis_of(names[0]))
            del names[: len(whole)]
        else:
            out.append(names.pop(0))
    return tuple(out)


@functools.lru_cache(maxsize=256)
def finer_mesh(mesh: Mesh, axes: tuple[str, ...]) -> Mesh:
    """The mesh with these axes replaced by their sub-axes: the same devices in the same order."""
    names = [s for a in mesh.axis_names for s in (sub_axes(mesh, a) if a in axes else (a,))]
    return Mesh(mesh.devices.reshape([_size(mesh, a) for a in names]), tuple(names))


def named_on(spec: PartitionSpec, mesh: Mesh) -> PartitionSpec:
    """A spec in the names of a finer mesh: an axis that the mesh does not have stands for all its sub-axes."""
    if set(named_axes(spec)) <= set(mesh.axis_names):
        return spec
    parts: dict[str, tuple[str, ...]] = {}
    for name in mesh.axis_names:
        parts[axis_of(name)] = (*parts.get(axis_of(name), ()), name)
    entries = [entry_axes(e) for e in spec]
    return make_spec([tuple(s for a in e for s in ((a,) if a in mesh.shape else parts[a])) for e in entries])


@functools.lru_cache(maxsize=256)
def whole_mesh(mesh: Mesh) -> Mesh:
    """The reverse of `finer_mesh`: a mesh without sub-axes."""
    if not any(map(is_sub_axis, mesh.axis_names)):
        return mesh
    shape: dict[str, int] = {}
    for name, size in mesh.shape.items():
        shape[axis_of(name)] = shape.get(axis_of(name), 1) * size
    return Mesh(mesh.devices.reshape(tuple(shape.values())), tuple(shape))
