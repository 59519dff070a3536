"""`master_dtype="remainder"`: an fp32 master as its bf16 param and the 16 bits that the param lacks.

[Note: the pair]
A param is its master rounded to the nearest bf16, ties away from zero: the upper half of `bits + 0x8000`. The lower
half of the bits, read as int16, is what the master has beyond the param: `(param << 16) + remainder` are its bits
again, those of denormals and both zeros too. (With ties to even, one pair would stand for two masters.) The largest
finite masters have an infinite param and a negative remainder. A NaN becomes the pair (0x7fc0, 0).

[Note: pairs that no master has]
They come of params that the user replaced. Only a zero with a negative remainder, or an infinity with a
positive one, would become a NaN: there the remainder counts as 0.

[Note: computed once]
XLA may recompute a value for each of its readers, and round it differently there (where it fuses a product and a sum).
Near a rounding boundary, the halves would then belong to two masters, and their pair would be 2^16 fp32 units off: 11
of 8.4 million values after four steps on a CPU, with most optimizations off. XLA does not duplicate a division, so the
bits are divided by a number that is always 1, which XLA cannot see. On GPUs, both halves come out of one kernel.

The idea is Megatron-LM's (`store_param_remainders` of its distributed optimizer).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

NAN = 0x7FC0
INFINITY = 0x7F80


def split(master: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The bf16 param and the int16 remainder of an fp32 master, each of its shape. See [Note: the pair]."""
    bits = jax.lax.bitcast_convert_type(computed_once(master), jnp.uint32)
    is_nan = (bits & 0x7FFFFFFF) > (INFINITY << 16)
    upper = jnp.where(is_nan, jnp.uint32(NAN), (bits + 0x8000) >> 16)
    lower = jnp.where(is_nan, jnp.uint32(0), bits & 0xFFFF)
    param = jax.lax.bitcast_convert_type(upper.astype(jnp.uint16), jnp.bfloat16)
    return param, jax.lax.bitcast_convert_type(lower.astype(jnp.uint16), jnp.int16)


def computed_once(x: jax.Array) -> jax.Array:
    """An fp32 array that has the same values for all of its readers: see [Note: computed once]."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    bits = jax.lax.div(bits, jnp.where((bits & 0xFFFF) > 0xFFFF, jnp.uint32(2), jnp.uint32(1)))
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def join(param: jax.Array, remainder: jax.Array) -> jax.Array:
    """The fp32 master of a bf16 param and an int16 remainder. See [Note: pairs that no master has]."""
    upper = jax.lax.bitcast_convert_type(param, jnp.uint16).astype(jnp.uint32)
    more = remainder.astype(jnp.int32)
    size = upper & 0x7FFF
    impossible = ((size == 0) & (more < 0)) | ((size == INFINITY) & (more > 0))
    more = jax.lax.bitcast_convert_type(jnp.where(impossible, 0, more), jnp.uint32)
    return jax.lax.bitcast_convert_type((upper << 16) + more, jnp.float32)
