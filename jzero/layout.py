"""Layouts of one array: what a PartitionSpec says, the leaf rule, and which layout an array brings along.

Everything here is a pure function of shapes, specs and a mesh.

[Note: which dim]
The first dim that the axis divides, left to right: a split of a leading dim is contiguous in memory, so a
collective needs no relayout copy (measured on an H200 compile: 17.6 against 26.4 GB at stage 2 for a 7.5B
scanned GPT). The dim that a scan runs over is skipped: splitting it makes XLA gather the whole stack
before the loop. Shapes alone tell it: all leaves below one node of the tree share their leading dim.

[Note: padding]
XLA stores no array in pieces of unequal size. Where no dim divides, the optimizer state is stored with one dim
padded by zeros, and cut to its logical shape inside of the step, where pieces may be unequal: the wrapped optimizer
sees what it would see without sharding, and on an H200 compile the cut costs neither a collective nor a buffer.
The gradient of such a leaf is all-reduced and sliced (XLA joins the two into a reduce-scatter for equal pieces
alone), and its param stays whole at stage 3, since the model sees its shape.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jzero.config import ZeroConfig
from jzero.errors import human_bytes, nearest, typed_shape

P = PartitionSpec
KeyPath = tuple[Any, ...]
LARGE = 16 * 2**20  # bytes: what is smaller is not worth a collective or a loop of its own


@dataclasses.dataclass(frozen=True)
class Layout:
    """The layouts of one param and of what belongs to it.

    Attributes:
      name: its path in the param tree, as `jax.tree_util.keystr` prints it.
      keys: the same path as plain strings, to find its leaves in an optimizer state.
      shape, dtype: of the whole param.
      stored: PartitionSpec of the param between steps.
      used: PartitionSpec that the model's arithmetic sees.
      grad: PartitionSpec of its reduced gradient.
      state: PartitionSpec of its master, its moments and its update.
      state_shape: shape in which master and moments are stored: that of the param, or one dim of it padded.
      scanned: True where the leading dim is that of a scan over layers.
      reason: why it stays whole over the ZeRO axis; empty where it does not.
    """

    name: str
    keys: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    stored: PartitionSpec
    used: PartitionSpec
    grad: PartitionSpec
    state: PartitionSpec
    state_shape: tuple[int, ...]
    scanned: bool
    reason: str

    @property
    def size(self) -> int:
        """Number of elements of the whole param."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole param in its stored dtype."""
        return self.size * self.dtype.itemsize

    @property
    def padded(self) -> bool:
        """Its optimizer state is stored with one dim padded; see [Note: padding]."""
        return self.state_shape != self.shape

    @property
    def large(self) -> bool:
        """Big enough for a collective or a loop of its own; of a stack for a scan, one layer counts."""
        return self.nbytes // (self.shape[0] if self.scanned else 1) >= LARGE


def axis_size(mesh: Mesh, axes: Iterable[str]) -> int:
    """Number of devices along mesh axes together."""
    return math.prod(mesh.shape[a] for a in axes)


def entry_axes(entry) -> tuple[str, ...]:
    """The mesh axes that one entry of a PartitionSpec names."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def spec_axes(spec: PartitionSpec) -> tuple[str, ...]:
    """All mesh axes that a PartitionSpec names."""
    return tuple(a for entry in spec for a in entry_axes(entry))


def shard_factor(spec: PartitionSpec, mesh: Mesh) -> int:
    """Into how many different pieces a layout cuts an array."""
    return axis_size(mesh, spec_axes(spec))


def add_axes(
    shape: Sequence[int], base: PartitionSpec, axes: Sequence[str], mesh: Mesh, *, skip: Sequence[int] = ()
) -> PartitionSpec | None:
    """`base` with `axes` added to one dim: the first free dim that divides, else the first that can be shared.

    Args:
      shape: shape of the whole array.
      base: its layout without the ZeRO axis (tensor parallelism).
      axes: the axes to add, together, to one dim.
      mesh: gives the sizes.
      skip: dims never to split (a scan's); they are taken if nothing else divides and they are free.

    Returns:
      The new spec, or None where no dim divides.
    """
    entries = [entry_axes(base[i]) if i < len(base) else () for i in range(len(shape))]
    n = axis_size(mesh, axes)
    free = [d for d in range(len(shape)) if not entries[d] and d not in skip]
    shared = [d for d in range(len(shape)) if entries[d] and d not in skip]
    for dim in free + shared:
        if shape[dim] and shape[dim] % (n * axis_size(mesh, entries[dim])) == 0:
            entries[dim] = (*entries[dim], *axes)
            return make_spec(entries)
    return None


def make_spec(entries: Sequence[tuple[str, ...]]) -> PartitionSpec:
    """Canonical PartitionSpec: single names unpacked, no trailing None."""
    out = [None if not e else e[0] if len(e) == 1 else tuple(e) for e in entries]
    while out and out[-1] is None:
        out.pop()
    return P(*out)


def make_layout(path, leaf, base, config: ZeroConfig, mesh: Mesh, scanned: bool) -> Layout:
    """The layouts of one param, its gradient and its state, from its shape and what it brings along."""
    leaf = as_abstract(leaf)
    shape, row = tuple(leaf.shape), config.row
    # the axes that share params first: a shard of the state is then a part of the shard of the param
    axes = (*config.param_axes, *(a for a in config.axes if a not in config.param_axes))
    over, reason = _split(shape, leaf.dtype, base, axes, config, mesh, scanned)
    over_params = over if config.param_axes == config.axes else None
    if over_params is None and over is not base:
        over_params, _ = _split(shape, leaf.dtype, base, config.param_axes, config, mesh, scanned)
    state_shape = shape
    if row.state and reason.startswith("no dim") and config.uneven == "pad":
        over, state_shape = pad_dim(shape, base, axes, mesh, skip=(0,) if scanned else ())
        if state_shape != shape:
            reason = f"{reason}: param whole, state padded to {list(state_shape)}" if row.params else ""
    return Layout(
        name=path_name(path), keys=path_keys(path), shape=shape, dtype=jnp.dtype(leaf.dtype),
        stored=(over_params or base) if row.params else base, used=base,
        grad=over if row.grads else base, state=over if row.state else base, state_shape=state_shape,
        scanned=scanned, reason=reason if row.state else f"stage {config.stage} splits nothing",
    )  # fmt: skip


def pad_dim(
    shape: Sequence[int], base: PartitionSpec, axes: Sequence[str], mesh: Mesh, *, skip: Sequence[int] = ()
) -> tuple[PartitionSpec, tuple[int, ...]]:
    """`base` with `axes` added to the dim that needs the least padding, and the padded shape.

    Args:
      shape, base, axes, mesh, skip: as for `add_axes`.

    Returns:
      (base, shape) for an array without a dim to split.
    """
    entries = [entry_axes(base[i]) if i < len(base) else () for i in range(len(shape))]
    n = axis_size(mesh, axes)
    best = None
    for dim in (d for d in range(len(shape)) if d not in skip and shape[d]):
        pieces = n * axis_size(mesh, entries[dim])
        size = -(-shape[dim] // pieces) * pieces
        cost = (size / shape[dim], bool(entries[dim]))
        if best is None or cost < best[0]:
            best = cost, dim, size
    if best is None:
        return base, tuple(shape)
    _, dim, size = best
    entries[dim] = (*entries[dim], *axes)
    return make_spec(entries), (*shape[:dim], size, *shape[dim + 1 :])


def _split(shape, dtype, base, axes, config, mesh, scanned) -> tuple[PartitionSpec, str]:
    n, nbytes = axis_size(mesh, axes), math.prod(shape) * jnp.dtype(dtype).itemsize
    taken = [a for a in axes if a in spec_axes(base)]
    if n == 1:
        return base, f"axis {'x'.join(axes)} has one device"
    if taken:
        return base, f"already split over {', '.join(map(repr, taken))} by its own layout"
    if nbytes < config.min_shard_bytes:
        return base, f"{human_bytes(nbytes)} < min_shard_bytes {human_bytes(config.min_shard_bytes)}"
    spec = add_axes(shape, base, axes, mesh, skip=(0,) if scanned else ())
    return (spec, "") if spec is not None else (base, f"no dim divisible by {n}")


def scanned_paths(leaves: Sequence[tuple[tuple[str, ...], tuple[int, ...]]]) -> set[tuple[str, ...]]:
    """The paths of params that are stacked for a scan over layers, told from shapes.

    A node of the tree is a stack when it has at least two leaves, all of them share their leading dim and
    have another one, one has three or more, and the leading dim is not the largest dim of them all (a
    plain `[d, d]` projection would share it too).
    """
    groups: dict[tuple[str, ...], list[tuple[tuple[str, ...], tuple[int, ...]]]] = {}
    for keys, shape in leaves:
        for depth in range(1, len(keys)):
            groups.setdefault(keys[:depth], []).append((keys, shape))
    found: set[tuple[str, ...]] = set()
    for members in groups.values():
        shapes = [s for _, s in members]
        if len(shapes) < 2 or any(len(s) < 2 for s in shapes) or max(map(len, shapes)) < 3:
            continue
        if len({s[0] for s in shapes}) == 1 and shapes[0][0] < max(d for s in shapes for d in s[1:]):
            found |= {keys for keys, _ in members}
    return found


def base_specs(params, flat, param_specs, mesh: Mesh, axes: Sequence[str]) -> list[PartitionSpec]:
    """The layout that each param brings: `param_specs`, else Flax metadata, else its NamedSharding, else whole."""
    if param_specs is not None:
        given = jax.tree.map(
            lambda spec, sub: jax.tree.map(lambda _: spec, sub),
            param_specs, params, is_leaf=lambda x: isinstance(x, PartitionSpec) or x is None,
        )  # fmt: skip
        specs = jax.tree.leaves(given, is_leaf=lambda x: isinstance(x, PartitionSpec) or x is None)
    else:
        boxed = jax.tree.leaves(params, is_leaf=lambda x: metadata_spec(x) is not None)
        specs = [s for box in boxed for s in [metadata_spec(box)] for _ in jax.tree.leaves(box)]
    out = [_array_spec(x, mesh, axes) if s is None else s for (_, x), s in zip(flat, specs, strict=True)]
    return [_checked_base(k, x, s, mesh) for (k, x), s in zip(flat, out, strict=True)]


def metadata_spec(box) -> PartitionSpec | None:
    """What Flax partitioning metadata says: a linen box (`get_partition_spec`) or an NNX Variable (`sharding`)."""
    if hasattr(box, "get_partition_spec"):
        return box.get_partition_spec()
    if hasattr(box, "get_metadata"):
        names = [box.get_metadata().get(k) for k in ("out_sharding", "sharding", "sharding_names")]
        names = [n for n in names if n]
        return None if not names else names[0] if isinstance(names[0], PartitionSpec) else P(*names[0])
    return None


def _array_spec(leaf, mesh: Mesh, axes: Sequence[str]) -> PartitionSpec:
    """The layout of an array without the ZeRO axes: a split over those is an earlier run's, not the model's."""
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding) and set(spec_axes(sharding.spec)) <= set(mesh.axis_names):
        return make_spec([tuple(a for a in entry_axes(e) if a not in axes) for e in sharding.spec])
    return P()


def mesh_of(tree: Any) -> Mesh | None:
    """The mesh that the arrays of a tree are laid out on, if any of them is split."""
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None)
        if (
            isinstance(sharding, NamedSharding)
            and spec_axes(sharding.spec)
            and isinstance(sharding.mesh, Mesh)
        ):
            return sharding.mesh
    return None


def _checked_base(path, leaf, spec: PartitionSpec, mesh: Mesh) -> PartitionSpec:
    """The spec in canonical form; names that are no mesh axes and dims that do not divide are refused."""
    where = f"jzero.make_plan: {jax.tree_util.keystr(path)} {typed_shape(as_abstract(leaf))} with {spec}"
    unknown = [a for a in spec_axes(spec) if a not in mesh.axis_names]
    if unknown:
        raise ValueError(
            f"{where}: {unknown[0]!r} is no axis of the mesh {dict(mesh.shape)}.{nearest(unknown[0], mesh.axis_names)} "
            "Translate logical names first (flax.linen.logical_to_mesh), or pass param_specs=."
        )
    if len(spec) > len(np.shape(leaf)):
        raise ValueError(f"{where}: the layout has more dims than the array.")
    for size, entry in zip(np.shape(leaf), spec, strict=False):
        if size % axis_size(mesh, entry_axes(entry)):
            raise ValueError(
                f"{where}: {size} is not divisible by {axis_size(mesh, entry_axes(entry))} ({entry!r})."
            )
    return make_spec([entry_axes(e) for e in spec])


def path_keys(path: KeyPath) -> tuple[str, ...]:
    """A key path as plain strings; a box's own attribute (`.value`) is not part of it."""
    keys = [str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path]
    return tuple(
        keys[:-1] if keys and isinstance(path[-1], jax.tree_util.GetAttrKey) and keys[-1] == "value" else keys
    )


def path_name(path: KeyPath) -> str:
    """A key path as text, without a box's own attribute."""
    name = jax.tree_util.keystr(path)
    return name.removesuffix(".value") if name != ".value" else name


def as_abstract(leaf):
    """Something with `.shape` and `.dtype` for arrays, ShapeDtypeStructs and Python scalars."""
    return leaf if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else np.asarray(leaf)
