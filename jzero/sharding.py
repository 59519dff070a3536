"""Shapes to layouts: the leaf rule and the `Plan`. Pure functions of shapes; no array is needed.

[Note: two layouts]
Every param has a *stored* layout, the one its array has between steps, and a *used* layout, the one the
model's arithmetic sees (whole, or split by tensor parallelism alone). Gradients and optimizer state have
one each. Where two of them differ, a collective stands: grads used -> grads stored is a reduce-scatter,
state -> params is an all-gather. A stage is a row of `jzero.config.STAGES` that says which of the stored
layouts carries the ZeRO axis; no other code asks for the number of the stage.

[Note: which dim]
The first dim that the axis divides, left to right: a split of a leading dim is contiguous in memory, so a
collective needs no relayout copy (measured on an H200 compile: 17.6 against 26.4 GB at stage 2 for a 7.5B
scanned GPT). The dim that a scan runs over is skipped: splitting it makes XLA gather the whole stack
before the loop. Shapes alone tell it: all leaves below one node of the tree share their leading dim.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jzero.config import ZeroConfig
from jzero.errors import human_bytes, listing, nearest, typed_shape

P = PartitionSpec
KeyPath = tuple[Any, ...]


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


def without_axes(spec: PartitionSpec, axes: Sequence[str]) -> PartitionSpec:
    """The spec with some mesh axes taken out."""
    return _spec([tuple(a for a in entry_axes(e) if a not in axes) for e in spec])


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
            return _spec(entries)
    return None


def _spec(entries: Sequence[tuple[str, ...]]) -> PartitionSpec:
    """Canonical PartitionSpec: single names unpacked, no trailing None."""
    out = [None if not e else e[0] if len(e) == 1 else tuple(e) for e in entries]
    while out and out[-1] is None:
        out.pop()
    return P(*out)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Where every leaf of a train state lives: decided from shapes, before any array exists. Hashable.

    Attributes:
      config: the choices it was made from.
      mesh: the mesh of the layouts; its axes are Auto.
      layouts: one `Layout` per param, in the order of the tree.
      notes: what a reader should know: leaves that stay whole, a mesh that was converted.
    """

    config: ZeroConfig
    mesh: Mesh
    layouts: tuple[Layout, ...]
    notes: tuple[str, ...] = ()

    def __hash__(self):
        return hash((self.config, self.mesh, len(self.layouts)))

    @property
    def n(self) -> int:
        """Number of devices that share the optimizer state."""
        return axis_size(self.mesh, self.config.axes)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Mesh axes that split the batch."""
        return self.config.batch_axes

    @property
    def param_bytes(self) -> int:
        """Bytes of all params, whole, in their stored dtype: 1 Psi on the wire is (N-1)/N of it."""
        return sum(x.nbytes for x in self.layouts)

    @property
    def batch(self) -> NamedSharding:
        """The sharding of a batch: dim 0 split over the batch axes, `[B, ...] -> [B/N, ...]` per device."""
        return self.sharding(_spec([self.batch_axes]))

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        """A spec on this plan's mesh."""
        return NamedSharding(self.mesh, spec)

    @property
    def batch_parts(self) -> int:
        """Into how many parts the batch is split."""
        return axis_size(self.mesh, self.batch_axes)

    def constrain(self, x: Any, spec: PartitionSpec) -> Any:
        """An array with a layout: a wish to the compiler inside of a trace, a placement outside of one."""
        return jax.lax.with_sharding_constraint(x, self.sharding(spec))

    def match(self, params: Any, *, where: str) -> list[tuple[Any, Layout]]:
        """The leaves of a param tree, each with its layout.

        Raises:
          ValueError: the tree is not the one that the plan was made for; lists the leaves.
        """
        leaves = jax.tree.leaves(params)
        if len(leaves) == len(self.layouts) and all(
            tuple(np.shape(a)) == b.shape for a, b in zip(leaves, self.layouts, strict=True)
        ):
            return list(zip(leaves, self.layouts, strict=True))
        raise ValueError(self._mismatch(params, where))

    def _mismatch(self, tree: Any, where: str) -> str:
        got = {jax.tree_util.keystr(k): typed_shape(_abstract(v)) for k, v in jax.tree_util.tree_leaves_with_path(tree)}
        want = {x.name: typed_shape(x) for x in self.layouts}
        rows = [(name, want.get(name, "absent"), got.get(name, "absent")) for name in {**want, **got}]
        rows = [r for r in rows if r[1].split("[")[-1] != r[2].split("[")[-1]]
        text = listing([("leaf", "plan", "given"), *rows])
        return (
            f"{where}: this tree is not the one that the plan was made for ({len(got)} leaves, the plan has "
            f"{len(want)}):\n{text}\nMake a plan for this tree with jzero.make_plan(tree, config, mesh=mesh); "
            "if it is a batch, use plan.place_batch(batch)."
        )

    def place(self, tree: Any) -> Any:
        """Params laid out as stored: a copy of each leaf, split over the mesh.

        Args:
          tree: the params (numpy or JAX arrays, whole or in another layout) the plan was made for.

        Returns:
          The same tree of `jax.Array`, each with its stored layout.

        Raises:
          ValueError: another tree, e.g. a batch (that is `place_batch`).
        """
        pairs = self.match(tree, where="plan.place")
        placed = [put(leaf, self.sharding(x.stored)) for leaf, x in pairs]
        return jax.tree.unflatten(jax.tree.structure(tree), placed)

    def place_batch(self, batch: Any) -> Any:
        """A batch split over the batch axes: numpy or JAX arrays in, global arrays out.

        With one process every leaf is the whole batch `[B, ...]`; with several each process passes its own
        part, and the parts are joined in the order of the processes. Arrays that are split already are
        returned as they are; scalars are replicated.

        Raises:
          ValueError: a leaf whose leading dim the batch axes do not divide; lists the leaves.
        """
        parts = self.batch_parts
        local = parts if jax.process_count() == 1 else self._local_parts()
        bad = [
            (jax.tree_util.keystr(k) or "batch", typed_shape(_abstract(x)), f"{np.shape(x)[0]} = {np.shape(x)[0] // local} x {local} + {np.shape(x)[0] % local}")
            for k, x in jax.tree_util.tree_leaves_with_path(batch)
            if np.ndim(x) and np.shape(x)[0] % (parts if _is_global(x) else local)
        ]  # fmt: skip
        if bad:
            raise ValueError(
                f"plan.place_batch: {len(bad)} leaves cannot be split over batch axes {self.batch_axes} "
                f"({local} parts{' in this process' if local != parts else ''}):\n{listing(bad)}\n"
                f"Pass a batch whose leading dim is a multiple of {local}."
            )
        return jax.tree.map(self._place_batch_leaf, batch)

    def _local_parts(self) -> int:
        """How many different parts of the batch the devices of this process hold."""
        index = self.batch.addressable_devices_indices_map((self.batch_parts,))
        return len({i[0].start for i in index.values()}) if index else 1

    def _place_batch_leaf(self, leaf):
        sharding = self.batch if np.ndim(leaf) else self.sharding(P())
        if isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
            return leaf
        if jax.process_count() > 1 and not _is_global(leaf):
            return jax.make_array_from_process_local_data(sharding, np.asarray(leaf))
        return jax.device_put(leaf, sharding)

    def state_specs(self, state: Any) -> list[PartitionSpec]:
        """The layout of every leaf of an optimizer state (or an EMA tree), in the order of its leaves.

        A leaf of the shape of a param, at a path that ends as the param's does, is laid out as that param's
        moments; one with extra leading dims (a history of params) keeps them whole; any other leaf is laid
        out from its own shape.
        """
        by_keys = {x.keys: x for x in self.layouts}
        return [self._state_spec(path_keys(k), x, by_keys) for k, x in jax.tree_util.tree_leaves_with_path(state)]

    def _state_spec(self, keys, leaf, by_keys) -> PartitionSpec:
        shape = tuple(np.shape(leaf))
        for start in range(len(keys) + 1):
            x = by_keys.get(keys[start:])
            if x is not None and shape == x.shape:
                return x.state
            if x is not None and x.shape and shape[-len(x.shape) :] == x.shape:
                return _spec([()] * (len(shape) - len(x.shape)) + [entry_axes(e) for e in x.state])
        return self.own_spec(shape, leaf.dtype)

    def copy_specs(self, tree: Any) -> list[PartitionSpec]:
        """The layout of every leaf of what is neither params nor optimizer state: copies of params split, else whole."""
        copies = {x.keys: x for x in self.layouts}
        flat = [(path_keys(k), tuple(np.shape(x))) for k, x in jax.tree_util.tree_leaves_with_path(tree)]
        found = [next((copies[k[i:]] for i in range(len(k)) if k[i:] in copies), None) for k, _ in flat]
        return [x.state if x is not None and x.shape == s else P() for x, (_, s) in zip(found, flat, strict=True)]

    def own_spec(self, shape: tuple[int, ...], dtype) -> PartitionSpec:
        """The layout of a state leaf that is no copy of a param, from its shape alone."""
        if not self.config.row.state or jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
            return P()
        if math.prod(shape) * jnp.dtype(dtype).itemsize < max(self.config.min_shard_bytes, 1):
            return P()
        return add_axes(shape, P(), self.config.axes, self.mesh) or P()

    def describe(self, tx: Any = None) -> str:
        """The plan as a table: one row per param, and one per optimizer-state leaf where `tx` is given."""
        return ""


def make_plan(
    params: Any, config: ZeroConfig | None = None, *, mesh: Mesh | None = None, param_specs: Any = None, **fields
) -> Plan:
    """The layout of every param, gradient and optimizer-state leaf, from shapes.

    Args:
      params: the param tree: arrays or `jax.ShapeDtypeStruct`. A NamedSharding on a leaf, Flax partitioning
        metadata round it, or `param_specs` give a layout to keep (tensor parallelism); the ZeRO axis is
        added on a free dim, or shares one.
      config: a `ZeroConfig`; or pass its fields as keywords.
      mesh: the devices. None: all devices on one axis with the name of `config.axis`. Explicit axes are laid
        out on an Auto mesh over the same devices.
      param_specs: a tree of PartitionSpec like `params` (or a prefix of it).

    Returns:
      A `Plan`, hashable, valid for any tree of the same shapes.

    Raises:
      ValueError: an axis that the mesh has not, empty or integer params, `uneven="error"` and a leaf that no
        dim divides.
      TypeError: params that are no arrays.

    Example:
      >>> import jax, jzero
      >>> shapes = {"w": jax.ShapeDtypeStruct((1024, 512), "bfloat16")}
      >>> jzero.make_plan(shapes, stage=2).layouts[0].state
      PartitionSpec('data',)
    """
    from jzero.config import make_config

    config = make_config(config, fields, where="jzero.make_plan")
    mesh, notes = resolve_mesh(mesh, config)
    flat = named_leaves(params)
    _check_params(flat)
    bases = base_specs(params, flat, param_specs, mesh)
    scanned = scanned_paths([(path_keys(k), tuple(np.shape(x))) for k, x in flat])
    layouts = [_layout(k, x, b, config, mesh, path_keys(k) in scanned) for (k, x), b in zip(flat, bases, strict=True)]
    _check_uneven(layouts, config, mesh)
    if axis_size(mesh, config.axes) == 1:
        notes.append(f"mesh axis {config.axis!r} has one device: nothing is shared, every stage holds the whole state.")
    return Plan(config, mesh, tuple(layouts), tuple(notes))


def _layout(path, leaf, base, config: ZeroConfig, mesh: Mesh, scanned: bool) -> Layout:
    leaf = _abstract(leaf)
    shape, row = tuple(leaf.shape), config.row
    over, reason = _split(shape, leaf.dtype, base, config.axes, config, mesh, scanned)
    over_params = over if config.param_axes == config.axes else None
    if over_params is None and over is not base:
        over_params, _ = _split(shape, leaf.dtype, base, config.param_axes, config, mesh, scanned)
    return Layout(
        name=path_name(path), keys=path_keys(path), shape=shape, dtype=jnp.dtype(leaf.dtype),
        stored=(over_params or base) if row.params else base, used=base,
        grad=over if row.grads else base, state=over if row.state else base,
        scanned=scanned, reason=reason if row.state else f"stage {config.stage} splits nothing",
    )  # fmt: skip


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


def resolve_mesh(mesh: Mesh | None, config: ZeroConfig) -> tuple[Mesh, list[str]]:
    """The mesh with Auto axes that the config's axes are names of, and what to tell about it.

    Raises:
      TypeError: not a `jax.sharding.Mesh`.
      ValueError: an axis the mesh has not; or a mesh with Explicit axes that is also the context's mesh.
    """
    if mesh is None:
        mesh = Mesh(np.array(jax.devices()).reshape([-1] + [1] * (len(config.axes) - 1)), config.axes)
    if not isinstance(mesh, Mesh):
        raise TypeError(f"jzero: mesh must be a jax.sharding.Mesh, not {type(mesh).__name__}.")
    for name in dict.fromkeys(config.axes + config.batch_axes + config.param_axes):
        if name not in mesh.axis_names:
            shown = ", ".join(f"{k!r}: {v}" for k, v in mesh.shape.items())
            raise ValueError(
                f"jzero: axis {name!r} is not in the mesh {{{shown}}}.{nearest(name, mesh.axis_names)} "
                "Pass axis= one of its names, or another mesh."
            )
    if all(t == AxisType.Auto for t in mesh.axis_types):
        return mesh, []
    check_context_mesh()
    note = "the mesh has Explicit axes; arrays are laid out on a mesh with Auto axes over the same devices."
    return Mesh(mesh.devices, mesh.axis_names), [note]


def check_context_mesh() -> None:
    """Raises ValueError where `jax.set_mesh` has made axes Explicit: constraints would be types there."""
    context = jax.sharding.get_abstract_mesh()
    explicit = [n for n, t in zip(context.axis_names, context.axis_types, strict=True) if t == AxisType.Explicit]
    if explicit:
        raise ValueError(
            f"jzero: the context mesh (jax.set_mesh) has Explicit axes {explicit}; jzero needs Auto axes, where "
            "layouts are constraints and the model stays as it is. Make it with jax.make_mesh(shape, names, "
            "axis_types=(jax.sharding.AxisType.Auto,) * len(names)), or leave jax.set_mesh out."
        )


def base_specs(params, flat, param_specs, mesh: Mesh) -> list[PartitionSpec]:
    """The layout that each param brings: `param_specs`, else Flax metadata, else its NamedSharding, else whole."""
    if param_specs is not None:
        given = jax.tree.map(
            lambda spec, sub: jax.tree.map(lambda _: spec, sub),
            param_specs, params, is_leaf=lambda x: isinstance(x, PartitionSpec) or x is None,
        )  # fmt: skip
        specs = jax.tree.leaves(given, is_leaf=lambda x: isinstance(x, PartitionSpec) or x is None)
    else:
        boxed = jax.tree.leaves(params, is_leaf=metadata_spec)
        specs = [s for box in boxed for s in [metadata_spec(box)] for _ in jax.tree.leaves(box)]
    out = [_array_spec(x, mesh) if s is None else s for (_, x), s in zip(flat, specs, strict=True)]
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


def _array_spec(leaf, mesh: Mesh) -> PartitionSpec:
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding) and set(spec_axes(sharding.spec)) <= set(mesh.axis_names):
        return sharding.spec
    return P()


def _checked_base(path, leaf, spec: PartitionSpec, mesh: Mesh) -> PartitionSpec:
    """The spec in canonical form; names that are no mesh axes and dims that do not divide are refused."""
    where = f"jzero.make_plan: {jax.tree_util.keystr(path)} {typed_shape(_abstract(leaf))} with {spec}"
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
            raise ValueError(f"{where}: {size} is not divisible by {axis_size(mesh, entry_axes(entry))} ({entry!r}).")
    return _spec([entry_axes(e) for e in spec])


def named_leaves(tree: Any) -> list[tuple[KeyPath, Any]]:
    """The leaves of a tree with their key paths."""
    return jax.tree_util.tree_leaves_with_path(tree)


def path_keys(path: KeyPath) -> tuple[str, ...]:
    """A key path as plain strings; a box's own attribute (`.value`) is not part of it."""
    keys = [str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path]
    return tuple(keys[:-1] if keys and isinstance(path[-1], jax.tree_util.GetAttrKey) and keys[-1] == "value" else keys)


def path_name(path: KeyPath) -> str:
    """A key path as text, without a box's own attribute."""
    name = jax.tree_util.keystr(path)
    return name.removesuffix(".value") if name != ".value" else name


def put(leaf, sharding: NamedSharding) -> jax.Array:
    """One leaf on its devices; across processes every process must hold the value it needs."""
    if isinstance(leaf, jax.Array) and leaf.sharding == sharding:
        return leaf
    if jax.process_count() == 1:
        return jax.device_put(leaf, sharding)
    if _is_global(leaf):
        return jax.jit(lambda x: x, out_shardings=sharding)(leaf)
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = put(jax.random.key_data(leaf), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    host = np.asarray(leaf)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def _is_global(leaf) -> bool:
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def _abstract(leaf):
    """Something with `.shape` and `.dtype` for arrays, ShapeDtypeStructs and Python scalars."""
    return leaf if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else np.asarray(leaf)


def _check_params(flat) -> None:
    if not flat:
        raise ValueError("jzero.make_plan: the params are empty. Pass the tree of params, e.g. variables['params'].")
    rows, odd = [], []
    for path, leaf in flat:
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            odd.append((jax.tree_util.keystr(path), type(leaf).__name__))
        elif not jnp.issubdtype(leaf.dtype, jnp.inexact):
            rows.append((jax.tree_util.keystr(path), typed_shape(leaf)))
    if odd:
        raise TypeError(
            f"jzero.make_plan: {len(odd)} of {len(flat)} leaves of the params are no arrays:\n{listing(odd)}\n"
            "Pass arrays or jax.ShapeDtypeStruct; for an Equinox module, eqx.filter(model, eqx.is_inexact_array)."
        )
    if rows:
        raise ValueError(
            f"jzero.make_plan: {len(rows)} of {len(flat)} params are not floating-point and have no gradient:\n"
            f"{listing(rows)}\nKeep them outside of the params (another collection, a field of the state)."
        )


def _check_uneven(layouts: Sequence[Layout], config: ZeroConfig, mesh: Mesh) -> None:
    bad = [x for x in layouts if x.reason.startswith("no dim")]
    if config.uneven != "error" or not bad:
        return
    n = axis_size(mesh, config.axes)
    cost = sum(x.size * 12 * (n - 1) / n for x in bad)
    raise ValueError(
        f"jzero.make_plan: {len(bad)} of {len(layouts)} leaves cannot be split over mesh axis "
        f"{config.axis!r} (size {n}):\n{listing([(x.name, typed_shape(x), x.reason) for x in bad])}\n"
        f'Pass ZeroConfig(uneven="replicate") (costs {human_bytes(cost)} more per device with an Adam-like state).'
    )
