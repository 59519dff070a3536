"""The `Plan`: where every leaf of a train state lives, decided from shapes before any array exists.

[Note: two layouts]
Every param has a *stored* layout, that of its array between steps, and a *used* layout, the one that the model's
arithmetic sees (whole, or only split by tensor parallelism). Gradients and optimizer state have one layout each. Where
two layouts differ there is a collective: used -> grad is a reduce-scatter, state -> stored an all-gather. A stage is a
row of `jzero.config.STAGES` that says which of the layouts have the ZeRO axis; no other code asks for its number.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jzero.config import (
    BUCKET_BYTES,
    BUCKETS,
    GATHERED_BUCKET_BYTES,
    LEAST_BUCKET,
    WHOLE_BYTES,
    ZeroConfig,
    make_config,
)
from jzero.core.errors import check_arrays, check_int, check_kind, check_transformation, is_array, typed_shape
from jzero.core.jaxprs import is_tracer
from jzero.core.random_keys import is_key
from jzero.core.types import PyTree, PyTreeDef
from jzero.core.xla_options import compiler_options, params_on_host_limit, warn_of_pipelined_offload
from jzero.layout.aliasing import HeldMemory
from jzero.layout.batches import micro_batches, place_batch
from jzero.layout.describe import describe_plan
from jzero.layout.explicit import constrained, typed_mesh
from jzero.layout.gathered import kept_gathered
from jzero.layout.host_mesh import host_mesh
from jzero.layout.leaf_rule import Frozen, Layout, path_keys
from jzero.layout.mesh_pickling import to_mesh, to_numbers
from jzero.layout.param_checks import check_pairs, mismatch
from jzero.layout.placement import HOST, check_same, put
from jzero.layout.specs import (
    P,
    axis_size,
    check_axes,
    divides,
    finer_mesh,
    make_spec,
    named_on,
    shard_factor,
    spec_axes,
)
from jzero.layout.state_layouts import FEW, copies, named_by, state_form
from jzero.layout.trainable import trained_by, without
from jzero.layout.tree_layouts import tree_layouts

LEAST_IN_FLIGHT = 64 * 2**20
MOST_IN_FLIGHT = 2**30
FIELD = r"(?:\.|\[')(params|opt_state)\b"


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """Where every leaf of a train state lives: decided from shapes, before any array exists. Hashable.

    Attributes:
      config: the choices it was made from.
      mesh: the mesh of the layouts; its axes are Auto.
      layouts: one `Layout` per param, in the order of the tree.
      notes: what a reader should know: a mesh that was converted, an axis of one device.
      tree: the structure of the param tree.
      min_shard_bytes: leaves of fewer bytes stay whole; for "auto" the number that it came to.
      trained_tree: the structure of the params that the optimizer takes, if it does not take all of them.
      whole: for the plan of only these (`trained`), the plan of all params.
    """

    config: ZeroConfig
    mesh: Mesh
    layouts: tuple[Layout, ...]
    notes: tuple[str, ...] = dataclasses.field(compare=False)
    tree: PyTreeDef = dataclasses.field(compare=False, repr=False)
    min_shard_bytes: int = 0
    trained_tree: PyTreeDef | None = dataclasses.field(default=None, compare=False, repr=False)
    whole: Plan | None = dataclasses.field(default=None, compare=False, repr=False)

    def __hash__(self):
        return hash((self.config, self.mesh, len(self.layouts)))

    def __repr__(self):
        return self.describe()

    def __getstate__(self) -> dict[str, Any]:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**fields, "mesh": to_numbers(self.mesh, where="jzero.Plan")}

    def __setstate__(self, fields: dict[str, Any]) -> None:
        self.__dict__.update({**fields, "mesh": to_mesh(fields["mesh"])})

    @property
    def title(self) -> str:
        """The stage and the devices in a few words: `stage 2 over data=8`."""
        return f"stage {self.config.stage} over " + ", ".join(
            f"{a}={self.mesh.shape[a]}" for a in self.config.axes
        )

    @property
    def n(self) -> int:
        """Number of devices that share the optimizer state."""
        return axis_size(self.mesh, self.config.axes)

    @functools.cached_property
    def trained(self) -> Plan:
        """The plan of the params that the optimizer takes: this plan, unless `trainable` leaves some out."""
        if self.trained_tree is None:
            return self
        layouts = tuple(x for x in self.layouts if x.frozen is not Frozen.APART)
        return dataclasses.replace(self, layouts=layouts, tree=self.trained_tree, trained_tree=None, whole=self)

    @functools.cached_property
    def bucket_bytes(self) -> int:
        """Bytes of whole weights that share a collective; see `ZeroConfig`."""
        if self.config.bucket_bytes is not None:
            return self.config.bucket_bytes
        share = self.param_bytes // BUCKETS
        if self.config.row.params:
            return max(min(GATHERED_BUCKET_BYTES, share), 1)
        return min(BUCKET_BYTES, max(share, LEAST_BUCKET))

    @functools.cached_property
    def kept_gathered(self) -> frozenset[str]:
        """Names of the params that stay gathered from the forward to the backward pass, at stage 3."""
        return kept_gathered(self.whole or self)

    @property
    def whole_bytes(self) -> int:
        """Bytes of the largest weight that stage 3 gathers whole for a matmul, a lookup or a tiled loss."""
        return max(WHOLE_BYTES, 8 * self.bucket_bytes)

    @property
    def compiler_options(self) -> dict[str, int]:
        """XLA options for `jax.jit(step, compiler_options=...)`: collectives in buckets, beside compute.

        For GPUs; empty elsewhere and at stage 0. They only change speed, and peak memory a little.
        """
        if not self.config.row.state or self.n == 1:
            return {}
        platform = self.mesh.devices.flat[0].platform
        gathers = self.config.row.params
        return compiler_options(platform=platform, bucket_bytes=self.bucket_bytes, n=self.n, gathers=gathers)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Mesh axes that split the batch."""
        return self.config.batch_axes

    @property
    def own_axes(self) -> tuple[str, ...]:
        """Mesh axes that split the state or the batch; the others are tensor parallelism's."""
        return tuple(dict.fromkeys((*self.config.axes, *self.batch_axes)))

    @functools.cached_property
    def param_bytes(self) -> int:
        """Bytes of all params, whole, in their stored dtype: 1 Psi on the wire is (N-1)/N of it."""
        return sum(x.nbytes for x in self.layouts)

    @property
    def shapes(self) -> PyTree:
        """The params as a tree of `jax.ShapeDtypeStruct` with their stored shardings."""
        leaves = (jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.param_sharding(x)) for x in self.layouts)
        return self.tree.unflatten(leaves)

    @property
    def batch(self) -> NamedSharding:
        """The sharding of a batch: dim 0 split over the batch axes, `[B, ...] -> [B/N, ...]` per device."""
        return self.sharding(make_spec([self.batch_axes]))

    def kind_of(self, path: str, shape: tuple[int, ...] | None = None) -> str:
        """What an argument of a step is: "params", "opt_state" or "rest", from its path (`[0][0].params['w']`).

        A leaf with the name of a param is one, or its state, by what stands before that name: the first attribute or
        key `params` or `opt_state`, else nothing (a param) or anything (its state). Params that are a bare array have
        no name; with `shape`, an argument of another shape is neither a param nor its state.
        """
        check_kind(path, "path", str, "the path of a leaf, a string", where="plan.kind_of")
        inner = re.sub(r"^\[\d+\]\[[^\]]+\]", "", path)
        names = [x.name for x in self.layouts if x.keys or shape in (None, x.shape, x.state_shape)]
        named = [name for name in names if inner.endswith(name)]
        before = inner[: len(inner) - max(map(len, named), default=0)]  # a layer may have any name, `opt_state` too
        argument = path[: len(path) - len(inner)]
        field = re.search(FIELD, before) or re.search(FIELD, argument)
        if field:
            return field[1]
        return "rest" if not named else "opt_state" if before else "params"

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        """A spec on the mesh of this plan's arrays; under an Explicit mesh (`jax.set_mesh`) on that mesh.

        Raises:
          TypeError: `spec` is not a PartitionSpec.
          ValueError: the mesh has no such axis, or the context is an Explicit mesh of other axes.
        """
        check_kind(spec, "spec", PartitionSpec, "a jax.sharding.PartitionSpec", where="plan.sharding")
        check_axes(spec_axes(spec), self.mesh, where=f"plan.sharding(spec={spec})")
        return NamedSharding(typed_mesh(self.array_mesh), named_on(spec, self.array_mesh))

    def lives_on_host(self, x: Layout) -> bool:
        """True if the shard of a param, and that of its gradient, live in host memory; small ones do not.

        Raises:
          TypeError: `x` is not a `Layout`.
        """
        check_kind(x, "x", Layout, "a Layout, one of plan.layouts", where="plan.lives_on_host")
        return self.config.params_on_host and x.size > FEW and x.nbytes >= self.min_shard_bytes

    def param_sharding(self, x: Layout) -> NamedSharding:
        """The stored layout of a param, with the memory that it lives in.

        Raises:
          TypeError: `x` is not a `Layout`.
        """
        check_kind(x, "x", Layout, "a Layout, one of plan.layouts", where="plan.param_sharding")
        sharding = self.sharding(x.stored)
        return sharding.with_memory_kind(HOST) if self.lives_on_host(x) else sharding

    @functools.cached_property
    def array_mesh(self) -> Mesh:
        """The mesh that arrays are laid out on: `mesh`, or a finer one over the same devices ([Note: sub-axes])."""
        several = any(x.several_dims for x in (self.whole or self).layouts)
        return finer_mesh(self.mesh, self.config.axes) if several else self.mesh

    @property
    def batch_parts(self) -> int:
        """Into how many parts the batch is split."""
        return axis_size(self.mesh, self.batch_axes)

    def constrain(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        """An array with a layout: inside of a trace a constraint for the compiler, outside of one a placement.

        Pieces of unequal size only exist inside of a trace; outside of one such an array stays where it is.

        Raises:
          TypeError: `x` is not an array, or `spec` not a PartitionSpec.
          ValueError: the mesh has no such axis, or the spec has more dims than the array.
        """
        sharding = self.sharding(spec)
        if not is_array(x) or isinstance(x, jax.ShapeDtypeStruct) or len(spec) > len(x.shape):
            kind, what = (ValueError, typed_shape(x)) if is_array(x) else (TypeError, type(x).__name__)
            raise kind(f"plan.constrain: {what} cannot be laid out as {spec}. Pass an array, and a spec of its dims.")
        if not is_tracer(x) and not divides(spec, np.shape(x), self.mesh):
            return x
        return constrained(x, sharding)

    def match(self, params: PyTree, *, where: str) -> list[tuple[Any, Layout]]:
        """The leaves of a param tree, each with its layout.

        Raises:
          ValueError: the tree is not the one that the plan was made for; lists the leaves.
        """
        leaves = jax.tree.leaves(params)
        if len(leaves) == len(self.layouts) and all(
            tuple(np.shape(a)) == b.shape for a, b in zip(leaves, self.layouts, strict=True)
        ):
            return list(zip(leaves, self.layouts, strict=True))
        raise ValueError(mismatch(params, self.layouts, where=where))

    def place(self, tree: PyTree) -> PyTree:
        """Params in their stored layout, split over the mesh.

        A leaf that is there already is copied, so that a donated step does not delete the given array.

        Args:
          tree: the params (numpy or JAX arrays, whole or in another layout) the plan was made for.

        Returns:
          The same tree of `jax.Array`, each with its stored layout.

        Raises:
          ValueError: another tree, e.g. a batch (that is `place_batch`); across processes, values that differ.
        """
        pairs = self.match(tree, where="plan.place")
        check_same(tree, where="plan.place")
        given = HeldMemory(tree)
        return jax.tree.structure(tree).unflatten(given.apart(put(leaf, self.param_sharding(x))) for leaf, x in pairs)

    def place_batch(self, batch: PyTree) -> PyTree:
        """A batch split over the batch axes: numpy or JAX arrays in, global arrays out.

        With one process every leaf is the whole batch `[B, ...]`. With several each process passes its own part, all of
        the same number of rows, and the parts are joined in the order of the processes. (Processes that hold the same
        part, as with tensor parallelism across them, each pass it.) Arrays that are split already are returned
        unchanged; scalars are replicated.

        Raises:
          TypeError: a leaf is a traced value, a number in a list, or text.
          ValueError: the batch axes do not divide the leading dim of a leaf; lists the leaves. Or processes pass
            unequal numbers of rows (checked for each number that is new to this process).
        """
        return place_batch(batch, self.batch, parts=self.batch_parts, axes=self.batch_axes)

    def micro_batches(self, batch: PyTree, k: int) -> PyTree:
        """A batch as k micro-batches, for a loop of your own: each of them lies on all devices of the batch axes.

        `x.reshape(k, B // k, ...)` would not do: dim 0 of a batch is split over N devices, so its first k-th lies on
        N/k of them. Instead micro-batch i takes part i of every device's rows, and nothing moves. The order of the
        examples changes, as it does with `jzero.value_and_grad(accumulate=k)`, which splits in the same way.

        Args:
          batch: a tree of arrays `[B, ...]`: traced ones inside of `jax.jit`, those of `place_batch` outside of it
            (numpy arrays are placed first), or `jax.ShapeDtypeStruct`.
          k: number of micro-batches.

        Returns:
          The tree with leaves `[k, B/k, ...]`, dim 1 split over the batch axes: `[k, B/(k N), ...]` per device.

        Raises:
          TypeError: a leaf is not an array, or k is not an int.
          ValueError: dim 0 of a leaf is not a multiple of N x k (lists the leaves), or k is below 1.

        Cost:
          No bytes on the wire; one copy of the batch.

        Example:
          >>> import jax, jax.numpy as jnp, jzero
          >>> plan = jzero.make_plan({"w": jnp.ones((64, 64))}, stage=2)
          >>> plan.micro_batches(jax.ShapeDtypeStruct((1024, 64), "float32"), 4).shape
          (4, 256, 64)
        """
        check_int(k, "k", where="plan.micro_batches", low=1, remedy="Pass the number of micro-batches.")
        return micro_batches(batch, k, self.batch, parts=self.batch_parts)

    def state_specs(self, state: PyTree) -> list[PartitionSpec]:
        """The layout of every leaf of an optimizer state (or an EMA tree), in the order of its leaves.

        A leaf of the shape of a param, at a path that ends as the param's does, is laid out as that param's
        moments; one with extra leading dims (a history of params) keeps them whole; any other leaf is laid
        out from its own shape.
        """
        return [spec for spec, _ in self.state_forms(state)]

    def state_shardings(self, state: PyTree) -> list[NamedSharding]:
        """The sharding of every leaf of an optimizer state, with the memory that it lives in.

        With `offload` that is host memory, except for single numbers, keys, and arrays of a few values that belong to
        no param (the coefficients of Muon). All groups of the state may read these, and would become one group.
        """
        leaves = zip(jax.tree_util.tree_leaves_with_path(state), self.state_specs(state), strict=True)
        return [self._in_its_memory(path_keys(k), x, self.sharding(spec)) for (k, x), spec in leaves]

    @functools.cached_property
    def update_plan(self) -> Plan:
        """The plan by which the update runs: this one; for an update outside of the program, the same on the host mesh.

        Raises:
          RuntimeError: a process has fewer CPU devices than devices of the mesh.
        """
        if not self.config.updates_outside:
            return self
        return dataclasses.replace(self, mesh=host_mesh(self.mesh))

    def offloaded(self, state: PyTree) -> list[bool]:
        """For each leaf of an optimizer state whether it lives outside of the device, which needs `offload`."""
        check_arrays(state, "the optimizer state", where="plan.offloaded", remedy="Pass what tx.init(params) returns.")
        leaves = jax.tree_util.tree_leaves_with_path(state)
        return [self.config.offload_options is not None and self._is_large(path_keys(k), x) for k, x in leaves]

    def _is_large(self, keys: tuple[str, ...], leaf: Any) -> bool:
        size = math.prod(np.shape(leaf))
        own = (x for x in named_by(keys, self.by_keys) if x.keys or x.shape == np.shape(leaf))
        few = size <= FEW and next(own, None) is None
        return size > 1 and not few and not is_key(leaf)

    def _in_its_memory(self, keys: tuple[str, ...], leaf: Any, sharding: NamedSharding) -> NamedSharding:
        if self.config.offload_options is None or not self._is_large(keys, leaf):
            return sharding
        if self.config.updates_outside:
            return self.update_plan.sharding(sharding.spec)
        return sharding.with_memory_kind(HOST)

    @property
    def in_flight_bytes(self) -> int:
        """With `offload`: bytes of state, of one device, that are on the device at once; see `Offload`."""
        asked = None if self.config.offload_options is None else self.config.offload_options.in_flight_bytes
        if asked is not None:
            return asked
        adam = (math.prod(x.state_shape) * self.config.adam_bytes(x.dtype) // shard_factor(x.state, self.mesh)
                for x in self.trained.layouts)  # fmt: skip
        return min(max(sum(adam) // 64, LEAST_IN_FLIGHT), MOST_IN_FLIGHT)

    def state_forms(self, state: PyTree) -> list[tuple[PartitionSpec, tuple[int, ...]]]:
        """For every leaf of an optimizer state its layout (`state_specs`) and the shape in which it is stored.

        The given leaves may have the shape that the optimizer sees, or the stored one, which may be padded.
        """
        remedy = "Pass what tx.init(params) returns."
        check_arrays(state, "the optimizer state", where="plan.state_forms", remedy=remedy)
        flat = jax.tree_util.tree_leaves_with_path(state)
        return [state_form(path_keys(k), x, self) for k, x in flat]

    @functools.cached_property
    def by_keys(self) -> dict[tuple[str, ...], Layout]:
        """The layouts by the path of their param."""
        return {x.keys: x for x in self.layouts}

    def copy_specs(self, tree: PyTree) -> list[PartitionSpec]:
        """The layout of every leaf of the rest of a state: that of the moments for copies of params, else whole."""
        return [x.state if x is not None and not x.padded else P() for x in self.copies(tree)]

    def copies(self, tree: PyTree) -> list[Layout | None]:
        """For each leaf the param of the same shape with whose path the leaf's path ends, else None."""
        return copies(tree, self.by_keys)

    def describe(self, tx: optax.GradientTransformation | None = None) -> str:
        """The plan as a table: one row per param, and with `tx` one per leaf of its optimizer state.

        `tx` is the wrapped transformation (`state.tx`); a plain one is shown as it would be without masters.

        Columns: path, dtype and shape, PartitionSpec of the stored and the used param, of the reduced gradient
        and of the optimizer state, bytes per device of param and gradient, and why a leaf stays whole. Then the
        totals and the notes.

        Raises:
          TypeError: `tx` is not an optax transformation.
        """
        if tx is not None:
            check_transformation(tx, where="plan.describe")
        return describe_plan(self, tx)


def make_plan(
    params: PyTree,
    config: ZeroConfig | None = None,
    *,
    mesh: Mesh | None = None,
    param_specs: PyTree = None,
    scan_axes: Mapping[str, int | None] | None = None,
    trainable: Any = None,
    **fields,
) -> Plan:
    """The layout of every param, gradient and optimizer-state leaf, from shapes.

    Args:
      params: the param tree: arrays or `jax.ShapeDtypeStruct`. A NamedSharding on a leaf, Flax partitioning
        metadata round it, or `param_specs` give a layout to keep (tensor parallelism); the ZeRO axis is
        added on a free dim, or shares one.
      config: a `ZeroConfig`; or pass its fields as keywords.
      mesh: the devices. None: the mesh that `param_specs` or the params are split on, else that of `jax.set_mesh` if it
        has the config's axes, else all devices on one axis with the name of `config.axis`. Without `jax.set_mesh`
        arrays of a mesh with Explicit axes are laid out on an Auto mesh over the same devices.
      param_specs: a tree of PartitionSpec or NamedSharding like `params` (or a prefix of it); or a tree of NNX
        Variables that hold them, as `nnx.get_partition_spec` and `nnx.get_named_sharding` return for a model, its
        state, or the pair of model and optimizer. Only layouts of params are read.
      scan_axes: which params are stacks of layers that a scan runs over, and along which dim, which is then not split.
        Maps paths (`"layers"`, `"layers/mlp/kernel"`, `"*/experts"`: a path or the beginning of one, with `*` for any
        text) to the dim, or to None for no stack. The first match decides; params without a match are not stacks. `{}`:
        there are no stacks. None: jzero guesses from shapes, and `describe()` names the guesses.
      trainable: which params are trained: a function `(path, leaf) -> bool`, path a tuple of strings such as
        `("layers", "lora_a")`, or a tree of bools like `params` (or a prefix of it). The others are frozen:
        `jzero.zero` hands the optimizer the trained ones alone. None: all of them.

    Returns:
      A `Plan`, hashable, valid for any tree of the same shapes.

    Raises:
      ValueError: the mesh has no such axis, the params are empty, integers are trained, no dim of a leaf divides and
        `uneven="error"`, `trainable` names no param or is not a tree like the params.
      TypeError: the params are not arrays, `scan_axes` does not map paths to dims, `trainable` is of another kind or an
        answer of it is not a bool.
      NotImplementedError: params in host memory on GPUs, with jaxlib before 0.11.2.

    Example:
      >>> import jax, jzero
      >>> shapes = {"w": jax.ShapeDtypeStruct((1024, 512), "bfloat16")}
      >>> jzero.make_plan(shapes, stage=2).layouts[0].state
      P('data',)
    """
    config = make_config(config, fields, where="jzero.make_plan")
    given: Any = {"mesh": mesh, "param_specs": param_specs, "scan_axes": scan_axes, "stacks": {}}
    if trainable is None:
        return plan_for(params, config, **given)
    trained = trained_by(trainable, params, where="jzero.make_plan")
    frozen = [None if t else Frozen.APART for t in trained]
    return plan_for(params, config, trained_tree=without(params, trained), frozen=frozen, **given)


def plan_for(params: PyTree, config: ZeroConfig, *, trained_tree: PyTreeDef | None = None, **given: Any) -> Plan:
    """`make_plan` for a checked config; `given` are the other arguments of `tree_layouts`.

    `trained_tree`: the structure of the params that the optimizer takes; None if it takes all.

    Raises:
      TypeError, ValueError: as `make_plan`.
      NotImplementedError: params in host memory, on GPUs with jaxlib before 0.11.2.
    """
    layouts, mesh, least, notes = tree_layouts(params, config, **given)
    check_pairs([x for x in layouts if x.frozen is None], config)
    limit = params_on_host_limit(mesh.devices.flat[0].platform, 'Offload(params="host")')
    check_copies(config, mesh)
    if config.params_on_host and limit:
        raise NotImplementedError(f"jzero: {limit}")
    if all(x.frozen is not Frozen.APART for x in layouts):
        trained_tree = None
    return Plan(config, mesh, layouts, notes, jax.tree.structure(params), least, trained_tree)


def check_copies(config: ZeroConfig, mesh: Mesh, options: Mapping[str, Any] | None = None) -> None:
    """Warns where a program with a state in host memory is compiled so that XLA may pipeline its copies.

    `options`: of the compilation; None: those of the process.
    """
    if config.streams or config.params_on_host:
        warn_of_pipelined_offload(mesh.devices.flat[0].platform, "state", options)


def check_plan(plan: Any, *, where: str, optional: bool = False) -> None:
    """Raises TypeError unless the value is a `Plan`."""
    remedy = "Pass jzero.plan_of(state), or what jzero.make_plan(params, ...) returned."
    check_kind(plan, "plan", Plan, "a jzero.Plan", where=where, optional=optional, remedy=remedy)
