"""Names of primitives by what they do, on the oldest and the newest supported jax. Each kind has one table here."""

from __future__ import annotations

import jax
import jax.numpy as jnp

INLINE = ("jit", "pjit", "closed_call", "core_call")
"""Calls that mean only their body."""
LOSS = "jzero_token_loss"
"""A tiled loss in a trace that is read, beside the jaxpr of the plain one; see `token_loss_rules.py`."""
REMAT = ("remat2", "remat", "checkpoint")
CALLS = {
    **dict.fromkeys((*INLINE, *REMAT), "jaxpr"),
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    LOSS: "jaxpr",
}
"""Equations that compute what their body computes, and the parameter that holds it."""
LOOPS = ("scan", "while")
CONTROL_FLOW = (*LOOPS, "cond")
LAYOUT = ("sharding_constraint", "layout_constraint")
LINEAR_ELEMENTWISE = (
    "neg", "convert_element_type", "copy", "copy_p", "name", "reduce_precision", "real", "imag", "stop_gradient",
)  # fmt: skip
ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bitcast_convert_type cbrt ceil clamp cos cosh digamma
    div eq erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite le lgamma log log1p logistic lt max min
    mul ne nextafter not or population_count pow rem round rsqrt select_n shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square sub tan tanh xor
    """.split()  # noqa: SIM905 - one name per line would fill a page
) | frozenset(LINEAR_ELEMENTWISE)
"""Each value of the result comes from one value of each operand; a predicate or a bound may be a single number."""
KEEPS_ZERO = ("broadcast_in_dim", "convert_element_type", "reshape", "neg", "copy", "squeeze", "transpose")
"""Zero if the first operand is, whatever the others are."""

REDUCING = frozenset(
    (*(f"reduce_{op}" for op in ("sum", "max", "min", "prod", "and", "or", "xor")), "argmax", "argmin")
)
"""Combine the values along the dims that their parameter `axes` names."""
MATRIX_OPS = frozenset(
    """
    cholesky cholesky_update eig eigh geqrf hessenberg householder_product lu lu_pivots_to_permutation qr schur svd
    triangular_solve tridiagonal tridiagonal_solve
    """.split()  # noqa: SIM905 - as above
)
"""Read whole matrices, which lie along the last two dims; the dims before number them."""
MIXES = MATRIX_OPS | frozenset(
    "dot_general conv_general_dilated fft sort top_k cumsum cumprod cummax cummin cumlogsumexp".split()  # noqa: SIM905
)
"""Make each value of the result from many values of an operand, so that a shard of it is not enough."""

DRAWS = ("random_bits", "random_gamma", "rng_bit_generator", "rng_uniform", "threefry2x32")
"""Make random numbers from a key."""

REDUCTIONS = {  # of all values: on a chunk, of two chunks, and the value that changes nothing
    "reduce_sum": (jnp.sum, jax.lax.add, lambda dtype: 0),
    "reduce_max": (jnp.max, jax.lax.max, lambda dtype: _extreme(dtype, -1)),
    "reduce_min": (jnp.min, jax.lax.min, lambda dtype: _extreme(dtype, 1)),
    "reduce_and": (jnp.all, jax.lax.bitwise_and, lambda dtype: True),
    "reduce_or": (jnp.any, jax.lax.bitwise_or, lambda dtype: False),
}


def _extreme(dtype, sign: int):
    """The greatest value of a dtype, or for sign -1 the least."""
    if jnp.issubdtype(dtype, jnp.bool_):
        return sign > 0
    if jnp.issubdtype(dtype, jnp.floating):
        return sign * jnp.inf
    return jnp.iinfo(dtype).max if sign > 0 else jnp.iinfo(dtype).min
