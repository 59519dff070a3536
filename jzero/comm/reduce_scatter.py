"""A sum over devices that ends on pieces along several dims, or along padded ones.

[Note: pieces along several dims]
XLA joins an all-reduce and a slice to a reduce-scatter where the pieces are equal and lie along one dim alone. Of 4096
x 4096 on 24 GPUs no dim is a multiple of 24, and the gradient is all-reduced whole
(benchmarks/results/2026-11-22-peak.md has what was tried). So such a gradient is made in a `jax.shard_map`, of a
device's own rows, and reduce-scattered there dim by dim: padded first, as the optimizer state is stored. The first
scatter carries the most, and goes over the innermost axes, which are closest together.

[Note: beside other axes]
A value that tensor parallelism splits stays split: each of its devices scatters its part. A dim that both cut does
not: a part of a part would be taken for that of another device. XLA gathers such a value over the other axes first.

[Note: bf16 on CPUs]
XLA for CPUs sums bf16 over devices in fp32 (its pass `all-reduce-promotion`), and aborts the process where the mesh has
axes that the `jax.shard_map` leaves automatic: "Invalid binary instruction opcode copy", jaxlib 0.10 to 0.12. There
jzero casts by itself; the numbers are the same. Programs for GPUs sum in bf16 as before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jzero.comm.reduce_in_codes import scatter_in_codes, within_hosts_first
from jzero.core.jaxprs import is_tracer
from jzero.layout.explicit import typed_mesh
from jzero.layout.mesh import in_shard_map
from jzero.layout.padding import padded, unpadded
from jzero.layout.specs import axis_size, entry_axes, make_spec, spec_axes, spec_entries
from jzero.sharding import Plan

SCOPE = "jzero.reduce_grads"
"""`named_scope` of gradient reductions; it distinguishes them from collectives that users write."""


def needs_scatter(shape: Sequence[int], spec: PartitionSpec, plan: Plan) -> bool:
    """True if XLA has no reduce-scatter for this layout, and this module has one."""
    entries = [entry_axes(e) for e in spec]
    pieces = [axis_size(plan.mesh, e) for e in entries]
    odd = any(size % n for size, n in zip(shape, pieces, strict=False))
    return (odd or len(scatter_steps(len(shape), spec, plan)) > 1) and is_of_batch(spec, plan)


def is_of_batch(spec: PartitionSpec, plan: Plan) -> bool:
    """No dim is cut over axes of the batch and others (tensor parallelism) together: their order would be lost."""
    batch = set(batch_axes(plan))
    own = [set(entry_axes(e)) for e in plan.sharding(spec).spec]
    return all(axes <= batch or not axes & batch for axes in own)


def batch_axes(plan: Plan) -> tuple[str, ...]:
    """The axes that split the batch, as the mesh of the plan's arrays names them."""
    return entry_axes(plan.batch.spec[0])


def of_batch(spec: PartitionSpec, plan: Plan) -> PartitionSpec:
    """The part of a layout that a `shard_map` over the batch axes names: the other axes stay automatic."""
    axes = batch_axes(plan)
    return make_spec([tuple(a for a in entry_axes(e) if a in axes) for e in plan.sharding(spec).spec])


def reduce_scatter(
    value: jax.Array, spec: PartitionSpec, plan: Plan, *, but: Sequence[str] = (), codes: np.dtype | None = None
) -> jax.Array:
    """Inside of a `shard_map` over the batch axes: this device's piece of the sum of all devices' values.

    Args:
      value: whole; padded here where pieces would be unequal.
      spec: of the sum.
      plan: gives the mesh; axes of the batch that `spec` does not name hold the same piece.
      but: axes that are not summed over.
      codes: the dtype in which values travel, see `reduce_in_codes.py`; among replicas they travel as they are.
    """
    axes = tuple(a for a in batch_axes(plan) if a not in but)
    steps = scatter_steps(np.ndim(value), spec, plan, but=but)
    steps = steps if codes is None else within_hosts_first(steps, plan)
    even = list(value.shape)
    for dim, own in steps:
        even[dim] += -even[dim] % axis_size(plan.array_mesh, own)
    rest = tuple(a for a in axes if not any(a in own for _, own in steps))

    def scatter(value):
        dtype = value.dtype
        for dim, own in steps:
            if codes is None:
                value = jax.lax.psum_scatter(value, own, scatter_dimension=dim, tiled=True)
            else:
                value = scatter_in_codes(value, dim, own, codes, plan)
        return jax.lax.psum(value.astype(dtype), rest) if rest else value.astype(dtype)

    batch, entries = set(batch_axes(plan)), plan.sharding(spec).spec
    # see [Note: beside other axes]
    beside = make_spec([() if batch & set(entry_axes(e)) else entry_axes(e) for e in entries])
    with jax.named_scope(SCOPE):
        if any(beside):  # XLA would gather the value over these axes: it knows no reduce-scatter of a split operand
            scatter = jax.shard_map(
                scatter, mesh=jax.sharding.get_abstract_mesh(), in_specs=beside, out_specs=beside,
                axis_names=set(spec_axes(beside)), check_vma=False,
            )  # fmt: skip
        return _in_fp32_on_cpus(scatter, padded(value, even), plan)


def sum_over_devices(value: jax.Array, plan: Plan) -> jax.Array:
    """Inside of a `shard_map` over the batch axes: the sum of all devices' values, whole on each."""
    return _in_fp32_on_cpus(lambda value: jax.lax.psum(value, batch_axes(plan)), value, plan)


def _in_fp32_on_cpus(total: Callable[[jax.Array], jax.Array], value: jax.Array, plan: Plan) -> jax.Array:
    """`total(value)`, a sum over devices: see [Note: bf16 on CPUs]."""
    partial = set(batch_axes(plan)) != set(plan.array_mesh.axis_names)
    if value.dtype == jnp.bfloat16 and partial and plan.mesh.devices.flat[0].platform == "cpu":
        return total(value.astype(jnp.float32)).astype(value.dtype)
    return total(value)


def scatter_steps(
    ndim: int, spec: PartitionSpec, plan: Plan, *, but: Sequence[str] = ()
) -> list[tuple[int, tuple[str, ...]]]:
    """The dims to scatter, in order, each with its axes of the batch: innermost axes first."""
    names = plan.array_mesh.axis_names
    entries = spec_entries(of_batch(spec, plan), ndim)
    found = [(dim, tuple(a for a in e if a not in but)) for dim, e in enumerate(entries)]
    return sorted((x for x in found if x[1]), key=lambda x: -max(map(names.index, x[1])))


def summed(
    make: Callable[..., jax.Array], rows: Sequence[jax.Array], dims: Sequence[int], spec: PartitionSpec, plan: Plan,
    codes: np.dtype | None = None,
) -> jax.Array | None:  # fmt: skip
    """`make(*rows)`, linear in examples, made of each device's own and reduced to the pieces of `spec`.

    Args:
      make: from arrays with some examples to their gradient, in the shape of the weight.
      rows: arrays with all examples.
      dims: of each of them, the dim of the examples.
      spec: layout of the result; its pieces may be unequal.
      plan: gives mesh and batch axes.
      codes: the dtype in which values travel; None: as they are.

    Returns:
      The gradient in the shape of the weight, or None where that is not possible: outside of a trace, inside of a
      `shard_map`, or where devices do not divide the examples.
    """
    parts = plan.batch_parts
    if not all(map(is_tracer, rows)) or in_shard_map():
        return None
    if any(np.shape(x)[d] % parts or not np.shape(x)[d] for x, d in zip(rows, dims, strict=True)):
        return None
    axes = batch_axes(plan)
    shape = jax.eval_shape(make, *rows).shape

    def own(*rows):
        return reduce_scatter(make(*rows), spec, plan, codes=codes)

    run = jax.shard_map(
        own, mesh=typed_mesh(plan.array_mesh), in_specs=tuple(make_spec([()] * d + [axes]) for d in dims),
        out_specs=of_batch(spec, plan), axis_names=set(axes), check_vma=False,
    )  # fmt: skip
    return plan.constrain(unpadded(run(*rows), shape), spec)
