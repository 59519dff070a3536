"""A plan as a table: where every leaf lives, what it costs, and why one stays whole."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jzero.errors import human_bytes, table, typed_shape
from jzero.specs import shard_factor


def _text(spec: PartitionSpec) -> str:
    return str(spec).replace("PartitionSpec", "P")


def describe_plan(plan: Any, tx: Any) -> str:
    """The text of `Plan.describe`."""
    config, mesh = plan.config, plan.mesh
    rows = []
    for x in plan.layouts:
        held = x.nbytes // shard_factor(x.stored, mesh) + x.nbytes // shard_factor(x.grad, mesh)
        specs = [_text(s) for s in (x.stored, x.used, x.grad, x.state)]
        rows.append([x.name, typed_shape(x), *specs, human_bytes(held), x.reason])
    header = ["param", "type", "stored", "used", "grad", "state", "bytes/device", "whole because"]
    axes = ", ".join(f"{k}: {v}" for k, v in mesh.shape.items())
    title = f"stage {config.stage} ({config.row.text}) over {'x'.join(config.axes)} of mesh {{{axes}}}"
    parts = [title, table(header, rows)]
    if tx is not None:
        parts += ["", table(["optimizer state", "type", "layout", "bytes/device"], _state_rows(plan, tx))]
    whole = [x for x in plan.layouts if x.reason and x.stored == x.used]
    bytes_whole = sum(x.nbytes for x in whole)
    parts.append(
        f"{len(plan.layouts)} params, {sum(x.size for x in plan.layouts):,} values, {human_bytes(plan.param_bytes)}; "
        f"{len(whole)} whole over the ZeRO axis ({human_bytes(bytes_whole)})"
    )
    return "\n".join([*parts, *(f"note: {note}" for note in plan.notes)])


def _state_rows(plan: Any, tx: Any) -> list[list[str]]:
    """One row per leaf of the state that `tx` makes for this plan's params."""
    state = jax.eval_shape(tx.init, plan.shapes)
    flat = zip(jax.tree_util.tree_leaves_with_path(state), plan.state_specs(state), strict=True)
    return [
        [
            jax.tree_util.keystr(k),
            typed_shape(x),
            _text(s),
            human_bytes(leaf_bytes(x) // shard_factor(s, plan.mesh)),
        ]
        for (k, x), s in flat
    ]


def leaf_bytes(leaf: Any) -> int:
    """Bytes of a whole array or ShapeDtypeStruct; a PRNG key counts its data."""
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    return math.prod(leaf.shape) * leaf.dtype.itemsize
