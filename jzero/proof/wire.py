"""What a step sends, in closed form: bytes that one device sends, by the mesh axes that they cross."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from jzero.comm.reduce_scatter import needs_scatter, scatter_steps
from jzero.gather.transform import walks
from jzero.layout.leaf_rule import Layout
from jzero.layout.specs import axis_of, axis_size, shard_factor, spec_axes
from jzero.sharding import Plan

GATHERS = {"matmul": 2, "lookup": 1}
"""By use, how often a weight is gathered for it: forward and backward. The gradient of a lookup needs no weight."""


def wire_by_axes(
    plan: Plan, *, accumulate: int = 1, uses: Mapping[str, Sequence[str]] | None = None
) -> dict[str, int]:
    """Bytes that one device sends in a step, rings assumed, by axes ("data", "replica+data").

    Args:
      plan: of the state.
      accumulate: micro-batches in a step. Where gradients stay whole (stages 0 and 1) they are reduced once,
        after the loop; where they are split, once per micro-batch. Gathers on use happen in each.
      uses: by name of a param, what it is used for; each use is gathered and reduced by itself where that happens on
        use. A param that is not named has one matmul.
    """
    total: dict[str, float] = {}
    for x in plan.layouts:
        for axes, size in _of_leaf(x, plan, accumulate, (uses or {}).get(x.name, ("matmul",))):
            if size:
                name = "+".join(a for a, n in plan.mesh.shape.items() if a in axes and n > 1)
                total[name] = total.get(name, 0.0) + size
    return {axes: round(size) for axes, size in total.items()}


def _of_leaf(
    x: Layout, plan: Plan, accumulate: int, uses: Sequence[str]
) -> Iterable[tuple[tuple[str, ...], float]]:
    """(mesh axes, bytes) of each collective of one param: gradients, new params, weights gathered on use."""
    mesh, taken = plan.mesh, spec_axes(x.used)
    used, stored = (x.nbytes / shard_factor(s, mesh) for s in (x.used, x.stored))
    split = tuple(a for a in spec_axes(x.state) if a not in taken)
    whole = tuple(a for a in plan.batch_axes if a not in split and a not in taken)
    dtype = plan.config.compute_dtype or x.dtype
    cast = dtype.itemsize / x.dtype.itemsize
    reduced = used * _reduced_itemsize(dtype, plan) / x.dtype.itemsize
    rounds = accumulate * len(uses) if plan.config.row.grads else 1
    steps = [split]
    if needs_scatter(x.shape, x.state, plan):
        if plan.config.row.grads and walks(plan) and not x.vector:
            steps = [own for _, own in scatter_steps(len(x.shape), x.state, plan)]
        else:  # all-reduced and sliced, see [Note: several dims] in `split.py`
            steps, whole = [], tuple(a for a in plan.batch_axes if a not in taken)
    for own in steps:
        yield tuple(map(axis_of, own)), rounds * _ring(axis_size(mesh, own)) * reduced
        reduced /= axis_size(mesh, own)
    yield whole, rounds * 2 * _ring(axis_size(mesh, whole)) * reduced
    kept = spec_axes(x.stored)
    yield (
        tuple(a for a in spec_axes(x.state) if a not in (*kept, *taken)),
        _ring(shard_factor(x.state, mesh) / shard_factor(x.stored, mesh)) * stored,
    )
    gathered = tuple(a for a in kept if a not in taken)
    times = accumulate * (1 if plan.config.keeps_gathered else sum(GATHERS[use] for use in uses))
    yield gathered, times * _ring(axis_size(mesh, gathered)) * used * cast


def _reduced_itemsize(dtype, plan: Plan) -> int:
    """Bytes per value of a gradient on the wire, of a weight that the model computes with in `dtype`."""
    asked = plan.config.reduce_dtype
    if asked is None:
        return dtype.itemsize
    # gathered on use a gradient is reduced in the dtype of the matmul that makes it, or in a wider one
    return max(asked.itemsize, dtype.itemsize) if plan.config.row.params else asked.itemsize


def _ring(n: float) -> float:
    return (n - 1) / n
