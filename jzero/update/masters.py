"""Masters beside an optimizer state: their initial values, and the state with and without them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jzero.core.types import PyTree
from jzero.layout.leaf_rule import Layout
from jzero.layout.specs import P
from jzero.sharding import Plan
from jzero.update.padded_state import align, pad
from jzero.update.pairs import pair_of
from jzero.update.zero_state import Quantized, ZeroState, inner_of, scales_of


def seen_dtype(x: Layout, plan: Plan) -> Any:
    """The dtype in which the wrapped transformation sees a param and its gradient.

    It is the same for a frozen param, which has no master: a chain may keep its gradient as state, and no update may
    change the dtype of state.
    """
    return plan.config.master_for(x.dtype) or x.dtype


def widen(values: PyTree, params: PyTree, plan: Plan) -> PyTree:
    """Initial masters: `values` on their shards, in the dtype that the wrapped transformation sees."""
    rows = zip(jax.tree.leaves(values), plan.layouts, strict=True)
    leaves = [plan.constrain(v.astype(seen_dtype(x, plan)), x.state) for v, x in rows]
    return jax.tree.structure(params).unflatten(leaves)


def widen_abstract(params: PyTree, plan: Plan) -> PyTree:
    """Shapes of the params in the dtype that the wrapped transformation sees."""
    leaves = [jax.ShapeDtypeStruct(x.shape, seen_dtype(x, plan)) for x in plan.layouts]
    return jax.tree.structure(params).unflatten(leaves)


def with_master(
    inner: PyTree, wide: PyTree, params: PyTree, frozen: Sequence[bool], counts: bool, plan: Plan
) -> PyTree:
    """`ZeroState` if any param needs a master, or the state a count or scales; else `inner`."""
    masters = [
        pad(as_stored(w, x, plan), x.state_shape, x.state, plan) if plan.config.master_for(x.dtype) and not f else None
        for w, x, f in zip(jax.tree.leaves(wide), plan.layouts, frozen, strict=True)
    ]
    scales = scales_of(inner)
    if all(m is None for m in masters) and not counts and scales is None:
        return inner
    count = plan.constrain(jnp.zeros((), jnp.int32), P()) if counts else None
    return ZeroState(inner_of(inner), jax.tree.structure(params).unflatten(masters), count, scales)


def as_stored(master: jax.Array, x: Layout, plan: Plan) -> jax.Array:
    """The initial master of a param, as the state stores it.

    What is stored beside a param is zero, and not computed from the param: XLA may skip the rounding of a param that
    the same program makes.
    """
    pair = pair_of(plan.config, x.dtype)
    return master if pair is None else plan.constrain(jnp.zeros(master.shape, pair.dtype), x.state)


def split_master(state: PyTree, params: PyTree) -> tuple[PyTree, list[jax.Array | None]]:
    """The inner state, with its scales if it has any, and one master or None per param."""
    if isinstance(state, ZeroState):
        inner = state.inner if state.moment_scales is None else Quantized(state.inner, state.moment_scales)
        return inner, align(state.master, params, where="jzero.zero: the master")
    return state, [None] * len(jax.tree.leaves(params))


def state_specs(state: PyTree, plan: Plan) -> list[PartitionSpec]:
    """The layout of every array of an optimizer state with its masters."""
    if not isinstance(state, ZeroState):
        return plan.state_specs(state)
    known = plan.tree.flatten_up_to(state.master)
    masters = [x.state for m, x in zip(known, plan.layouts, strict=True) if m is not None]
    count = [] if state.rounding_count is None else [P()]
    scales = [] if state.moment_scales is None else plan.state_specs(Quantized(None, state.moment_scales))
    return [*plan.state_specs(state.inner), *masters, *count, *scales]
