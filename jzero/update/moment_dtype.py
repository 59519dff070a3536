"""`moment_dtype`: an optax transformation whose moments are stored in another dtype than it computes them in.

[Note: a moment in 16 bits]
A second moment with a decay of 0.999 moves by less than a thousandth of itself in a step. bf16 has 8 bits: rounded to
nearest, it would stall far from its target (from zero, at a third of it), and never decrease. So moments are
rounded up or down with the probabilities that make the mean right. The random bits are a hash of the value itself and
of a count of steps: nothing else is stored for them, and a step can be repeated bit for bit. What bf16 holds exactly
is kept exactly: zeros, padding, and the state of a step that is skipped.

[Note: a count of steps]
Without a count the rounding of one value would always be the same: where gradients repeat themselves, moments would
stop. The state's own count serves if the jaxpr of the update proves that each step raises it. Other integers in a
state (the steps since the last update of `MultiSteps`, those of `apply_if_finite`, a count under a condition) may stay
the same or repeat while moments are rounded. `ZeroState` then has a count of jzero's own, which the update takes as a
keyword argument; an update outside of the program takes its number of updates. A hash of gradients and params cannot
replace the count: a row of an embedding that no example reads has no gradient.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from jzero.core.dependence import raised_inputs, sources_of_outputs
from jzero.core.types import PyTree
from jzero.layout.leaf_rule import Layout
from jzero.sharding import Plan

ROUNDING_COUNT = "rounding_count"
"""The keyword argument with jzero's own count, for chains that need it (`needs_count`)."""


def needs_count(tx: optax.GradientTransformation, plan: Plan, params: PyTree) -> bool:
    """Whether moments are rounded at random and `tx` has no count of steps: see [Note: a count of steps].

    Args:
      tx, plan, params: as for `with_moment_dtype`.
    """
    if plan.config.moment_dtype not in (jnp.bfloat16, jnp.int8):
        return False
    moments = [x.seen for x in leaves_of(tx, plan, params) if x.moment_of]
    return any(seen != jnp.bfloat16 for seen in moments) and not counts_of(tx, params)


def with_moment_dtype(
    tx: optax.GradientTransformation, plan: Plan, params: PyTree
) -> optax.GradientTransformationExtraArgs:
    """The transformation `tx` with its moments stored in `plan.config.moment_dtype`.

    A moment is a floating leaf of the state with the shape of its param and an initial value that does not depend on
    it: averages of gradients and of their squares, momentum, accumulated gradients. Copies of params (schedule-free
    averages, slow weights) are not, nor are factored statistics.

    Args:
      tx: any optax transformation.
      plan: names the dtype and the params.
      params: their tree, abstract, in the dtypes that `tx` sees.

    Returns:
      A transformation whose state has the structure of `tx.init(params)`. `tx` computes in the wider of its own dtype
      and the stored one: gradients, params and all of the state, since a condition or a bound in the chain needs a
      single dtype. Its update takes `rounding_count=` where `needs_count` says so.
    """
    dtype = plan.config.moment_dtype
    extra = optax.with_extra_args_support(tx)
    known = functools.cache(lambda: leaves_of(tx, plan, params))
    counts = functools.cache(lambda: counts_of(tx, params))

    def stored(state, count):
        leaves, tree = jax.tree.flatten(state)
        if count is None:
            count = sum(leaves[i].astype(jnp.uint32) for i in counts())
        salt = jnp.asarray(count).astype(jnp.uint32)
        rows = enumerate(zip(leaves, known(), strict=True))
        return tree.unflatten(
            [rounded(x, dtype, salt + i) if leaf.moment_of else in_dtype(x, leaf.dtype) for i, (x, leaf) in rows]
        )

    def init(params):
        return stored(tx.init(widened(params, dtype)), 0)

    def update(updates, state, params=None, **kwargs):
        count = kwargs.pop(ROUNDING_COUNT, None)
        leaves, tree = jax.tree.flatten(state)
        seen = tree.unflatten([in_dtype(x, leaf.seen) for x, leaf in zip(leaves, known(), strict=True)])
        updates, new = extra.update(widened(updates, dtype), seen, widened(params, dtype), **kwargs)
        return updates, stored(new, count)

    return optax.GradientTransformationExtraArgs(init, update)


def in_dtype(x: Any, dtype: DTypeLike) -> Any:
    """An array, real or abstract, in a dtype."""
    if getattr(x, "dtype", dtype) == dtype:
        return x
    return jax.ShapeDtypeStruct(x.shape, dtype) if isinstance(x, jax.ShapeDtypeStruct) else x.astype(dtype)


def widened(tree: PyTree, dtype: DTypeLike) -> PyTree:
    """Floating leaves in at least this dtype, in fp32 for int8; None stays None."""
    dtype = _computed_in(dtype)
    return jax.tree.map(
        lambda x: in_dtype(x, jnp.promote_types(x.dtype, dtype)) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


class Leaf(NamedTuple):
    """A leaf of a state: the param of a moment, its own dtype, and the one in which `tx` sees it."""

    moment_of: Layout | None
    dtype: DTypeLike
    seen: Any


def leaves_of(tx: optax.GradientTransformation, plan: Plan, params: PyTree) -> list[Leaf]:
    """What is known of each leaf of the state of `tx`."""
    dtype = _computed_in(plan.config.moment_dtype)
    state, wide = (jax.eval_shape(tx.init, p) for p in (params, widened(params, dtype)))
    sources = sources_of_outputs(lambda p: jax.tree.leaves(tx.init(p)), params)
    found = []
    for x, w, copy, of in zip(jax.tree.leaves(state), jax.tree.leaves(wide), plan.copies(state), sources, strict=True):
        copy = copy if x.shape else None  # a hyper-parameter may have the name of a scalar param
        moment = copy is not None and not of and jnp.issubdtype(x.dtype, jnp.floating)
        seen = jnp.promote_types(w.dtype, dtype) if moment else w.dtype
        # numbers such as injected hyperparameters stay as wide as they are seen: a decay of 0.999 is 1 in bf16
        found.append(Leaf(copy if moment else None, w.dtype if copy is None else x.dtype, seen))
    return found


def _computed_in(dtype: DTypeLike) -> Any:
    """The narrowest dtype in which moments stored in `dtype` are computed."""
    return jnp.dtype(jnp.float32) if dtype == jnp.int8 else dtype


def counts_of(tx: optax.GradientTransformation, params: PyTree) -> list[int]:
    """Positions of the state's leaves that every step raises; empty if the update needs more arguments (value=)."""
    first = len(jax.tree.leaves(params))

    def leaves(grads, state, params):
        return jax.tree.leaves(tx.update(grads, state, params)[1])

    raised: Sequence[int | None] = ()
    with contextlib.suppress(Exception):
        raised = raised_inputs(leaves, params, jax.eval_shape(tx.init, params), params)
    return [i for i, source in enumerate(raised) if source == first + i]


def rounded(x: jax.Array, dtype: DTypeLike, salt: jax.Array | None) -> jax.Array:
    """An array in `dtype`; to bf16 it is rounded up or down at random, so that the mean is right.

    See [Note: a moment in 16 bits].

    Args:
      x: floating; inf and nan stay.
      salt: uint32 scalar; another one gives other random bits.
    """
    if jnp.dtype(dtype) != jnp.bfloat16 or x.dtype == jnp.bfloat16:
        return x.astype(dtype)
    x = x.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    # the lower half is what bf16 has no room for: the larger it is, the more often the sum carries into the upper
    up = (bits + (hashed(bits + salt * jnp.uint32(0x9E3779B9)) >> 16)) & jnp.uint32(0xFFFF0000)
    up = jax.lax.bitcast_convert_type(up, jnp.float32)
    return jnp.where(jnp.isfinite(x) & jnp.isfinite(up), up, x).astype(dtype)


def hashed(x: jax.Array) -> jax.Array:
    """Random bits: each depends on every bit of `x` (uint32; the constants of C. Wellons' `lowbias32`)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
