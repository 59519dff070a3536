"""`moment_dtype`: an optax transformation whose moments are stored in another dtype than it computes them in.

[Note: a moment in 16 bits]
A second moment with a decay of 0.999 moves by less than a thousandth of itself in a step. bf16 has 8 bits: rounded to
nearest it would stop far from where it should go (at a third of it, from zero), and never fall again. So moments are
rounded up or down with the probabilities that make the mean right. The random bits are a hash of the value itself and
of the counts in the state: nothing is stored for them, and a step can be repeated bit by bit. What bf16 holds exactly
is kept exactly: zeros, padding, and the state of a step that is skipped.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jzero.core.dependence import independent_outputs
from jzero.sharding import Plan


def with_moment_dtype(tx: Any, plan: Plan, params: Any) -> optax.GradientTransformationExtraArgs:
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
      and the stored one.
    """
    dtype = plan.config.moment_dtype
    extra = optax.with_extra_args_support(tx)

    @functools.cache
    def dtypes() -> tuple[Any, ...]:
        """For each leaf of the state the dtype that `tx` sees, or None where it is stored as it is."""
        state = jax.eval_shape(tx.init, params)
        copies = plan.copies(state)
        free = independent_outputs(lambda p: jax.tree.leaves(tx.init(p)), params)
        rows = zip(jax.tree.leaves(state), copies, free, strict=True)
        return tuple(
            jnp.promote_types(x.dtype, dtype)
            if copy and f and jnp.issubdtype(x.dtype, jnp.floating)
            else None
            for x, copy, f in rows
        )

    def stored(state):
        leaves, tree = jax.tree.flatten(state)
        salt = _counts(leaves)
        rows = zip(leaves, dtypes(), strict=True)
        return tree.unflatten(
            [x if d is None else rounded(x, dtype, salt + i) for i, (x, d) in enumerate(rows)]
        )

    def init(params):
        return stored(tx.init(params))

    def update(updates, state, params=None, **kwargs):
        leaves, tree = jax.tree.flatten(state)
        seen = [x if d is None else x.astype(d) for x, d in zip(leaves, dtypes(), strict=True)]
        updates, new = extra.update(updates, tree.unflatten(seen), params, **kwargs)
        return updates, stored(new)

    return optax.GradientTransformationExtraArgs(init, update)


def _counts(leaves: Sequence[Any]) -> Any:
    """A number that changes from step to step, where the state counts them."""
    counts = [x for x in leaves if jnp.ndim(x) == 0 and jnp.issubdtype(x.dtype, jnp.integer)]
    return sum((x.astype(jnp.uint32) for x in counts), jnp.uint32(0))


def rounded(x: Any, dtype: Any, salt: Any) -> Any:
    """An array in `dtype`; from fp32 to bf16 up or down at random, right in the mean. See the note above.

    Args:
      x: floating; inf and nan stay.
      salt: uint32 scalar; another one gives other random bits.
    """
    if jnp.dtype(dtype) != jnp.bfloat16 or x.dtype == jnp.bfloat16:
        return x.astype(dtype)
    x = x.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    # the lower half is what bf16 has no room for: the larger it is, the more often the sum carries into the upper
    up = (bits + (_hash(bits + salt * jnp.uint32(0x9E3779B9)) >> 16)) & jnp.uint32(0xFFFF0000)
    up = jax.lax.bitcast_convert_type(up, jnp.float32)
    return jnp.where(jnp.isfinite(x) & jnp.isfinite(up), up, x).astype(dtype)


def _hash(x: Any) -> Any:
    """Every bit of the result depends on every bit of `x` (uint32; the constants of C. Wellons' `lowbias32`)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
