"""`master_dtype="remainder"`: an fp32 master as its bf16 param and the 16 bits that this lacks.

[Note: the pair]
A param is its master rounded to the nearest bf16, ties away from zero: the upper half of `bits + 0x8000`. The lower
half of the bits, read as int16, is what the master has beyond the param: `(param << 16) + remainder` are its bits
again, those of denormals and both zeros too. (With ties to even, one pair would stand for two masters.) The largest
finite masters have an infinite param and a negative remainder. A NaN becomes the pair (0x7fc0, 0).

[Note: pairs that no master has]
A param that the user replaced cannot be told from one that the update made: its master is the param plus the old
remainder, at most half a unit in the last place away. Only beside zeros and infinities would that leave the finite
numbers (a negative remainder of a zero, a positive one of an infinity): there the remainder counts as 0.

[Note: computed once]
XLA may compute a value anew for each of its readers, and round it in other ways there (where it joins a product and a
sum). Next to a bound, the halves would then be those of two masters and their pair 2^16 units of fp32 away: 11 of 8.4
million values after four steps on a CPU, with most optimizations off. XLA makes no second copy of a division, so there
is one: by a number that is always 1, which XLA does not see and LLVM does. On GPUs, both halves come out of one kernel.

The idea is Megatron-LM's (`store_param_remainders` of its distributed optimizer).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

NAN = 0x7FC0
INFINITY = 0x7F80


def split(master: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The bf16 param and the int16 remainder of an fp32 master, each of its shape. See [Note: the pair]."""
    bits = jax.lax.bitcast_convert_type(master, jnp.uint32)
    bits = jax.lax.div(bits, jnp.where((bits & 0xFFFF) > 0xFFFF, jnp.uint32(2), jnp.uint32(1)))  # [Note: computed once]
    is_nan = (bits & 0x7FFFFFFF) > (INFINITY << 16)
    upper = jnp.where(is_nan, jnp.uint32(NAN), (bits + 0x8000) >> 16)
    lower = jnp.where(is_nan, jnp.uint32(0), bits & 0xFFFF)
    param = jax.lax.bitcast_convert_type(upper.astype(jnp.uint16), jnp.bfloat16)
    return param, jax.lax.bitcast_convert_type(lower.astype(jnp.uint16), jnp.int16)


def join(param: jax.Array, remainder: jax.Array) -> jax.Array:
    """The fp32 master of a bf16 param and an int16 remainder. See [Note: pairs that no master has]."""
    upper = jax.lax.bitcast_convert_type(param, jnp.uint16).astype(jnp.uint32)
    more = remainder.astype(jnp.int32)
    size = upper & 0x7FFF
    impossible = ((size == 0) & (more < 0)) | ((size == INFINITY) & (more > 0))
    more = jax.lax.bitcast_convert_type(jnp.where(impossible, 0, more), jnp.uint32)
    return jax.lax.bitcast_convert_type((upper << 16) + more, jnp.float32)
