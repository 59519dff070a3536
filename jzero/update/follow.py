"""Masters follow their params; those in host memory do so although the params stay on the device.

[Note: the master follows the param]
A param that is not `cast(master)` was replaced by the user (a loaded checkpoint, pruning). The master takes
it over, element by element, at the next update. The comparison reads the shard alone.

[Note: fingerprints]
With `update="host"` a param would go to the host in every step only to be compared with its master. Instead the host
sends a fingerprint of `cast(master)`, a number for every shard, and the device compares it with that of the param. A
loop of no round, or of one where any differs, sends the params and takes them over. The state holds nothing for it.

A fingerprint is the sum, modulo 2^32, of a number for every element, mixed from its bits and its place. The mixing
is a bijection of the bits, so that one element of a shard that differs is always seen. Several in one shard are missed
with a probability of 2^-32, in k shards of 2^-32k. What is sent is then compared element by element as ever: a
fingerprint that differs for no reason (-0 for 0) costs time and changes nothing.

[Note: a loop, not a cond]
Compiled for an H200 a `lax.cond` copies all masters in the branch that returns them as they are. A `while` loop carries
them in place, and what it sends is of its body alone. In a loop XLA brings the results of a host computation back over
the device, so the leaves take turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jzero.core import jaxprs
from jzero.core.graph import FlatFunction
from jzero.layout.specs import spec_entries
from jzero.stream.chunks import Form, pieces
from jzero.stream.streaming import run_on_host

BITS = {1: np.uint8, 2: np.uint16}
ODD = (0x9E3779B1, 0x85EBCA77)
TAKE_OVER = "jzero.take_over"
MIX = ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1))  # the finalizer of MurmurHash3


def taken_over(param, master):
    """The master with what is new in its param: see [Note: the master follows the param]."""
    return jnp.where(master.astype(param.dtype) == param, master, param.astype(master.dtype))


def followed(
    params: Sequence[Any], masters: Sequence[Any], forms: Sequence[Form], *, gate: Sequence[Any] = ()
) -> list[Any]:
    """Masters in host memory, with what the user has changed in the params since; see [Note: fingerprints].

    Args:
      params: on the device, on the shards of their masters.
      masters: in host memory, as they are stored.
      forms: how that is.
      gate: arrays that must be there before the program asks whether a param was replaced.
    """

    def run(params, masters, gate):
        params = [f.pad(p) for p, f in zip(params, forms, strict=True)]
        with jax.named_scope("jzero.fingerprint"):
            there = _of_masters(masters, [p.dtype for p in params], forms)
            here = [fingerprint(p, f.layout) for p, f in zip(params, forms, strict=True)]
            changed = jnp.any(jnp.stack([jnp.any(a != b) for a, b in zip(here, there, strict=True)]))
        changed, _ = jax.lax.optimization_barrier((changed, gate))
        with jax.named_scope(TAKE_OVER):
            rounds = changed.astype(np.int32)
            return jax.lax.fori_loop(0, rounds, lambda _, kept: _sent(params, kept, forms), masters)

    args = (list(params), list(masters), list(gate))
    traced = any(jaxprs.is_tracer(a) for a in jax.tree.leaves(args))
    return run(*args) if traced else jax.jit(run)(*args)


def _sent(params: Sequence[Any], masters: Sequence[Any], forms: Sequence[Form]) -> list[Any]:
    """The masters with what is new in the params, which go to the host one after the other."""
    new: list[Any] = []
    for p, m, form in zip(params, masters, forms, strict=True):
        if new:
            p, new[-1] = jax.lax.optimization_barrier((p, new[-1]))
        p = jax.device_put(p, jax.memory.Space.Host)
        (m,) = _computed_on_host(lambda p, m: [taken_over(p, m)], p, m)
        new.append(jax.lax.with_sharding_constraint(m, form.layout.with_memory_kind("pinned_host")))
    return new


def _of_masters(masters: Sequence[Any], dtypes: Sequence[Any], forms: Sequence[Form]) -> list[Any]:
    """The fingerprints of masters, cast, computed by the host and sent to the device."""

    def all_of(*masters):
        rows = zip(masters, dtypes, forms, strict=True)
        return [fingerprint(m.astype(dtype), f.layout) for m, dtype, f in rows]

    return [jax.device_put(x, jax.memory.Space.Device) for x in _computed_on_host(all_of, *masters)]


def _computed_on_host(fn, *args) -> list[Any]:
    """A function of arrays in host memory to a flat list, computed there."""
    graph = FlatFunction(fn, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args])

    def run(*args):
        return run_on_host(graph, graph.outs, dict(zip(graph.ins, args, strict=True)))

    return jaxprs.on_host(run)(*args)


def fingerprint(x, layout: NamedSharding):
    """A number for every shard of an array, in which any element that changes alone shows."""
    whole = pieces(Form(x.shape, x.shape, layout), 1, 2**62)[0]
    entries = spec_entries(whole.layout.spec, len(whole.view))
    x = jax.lax.with_sharding_constraint(jnp.reshape(x, whole.view), whole.layout)
    bits = jax.lax.bitcast_convert_type(x, BITS.get(x.dtype.itemsize, np.uint32)).astype(np.uint32)
    inside = [d for d in range(bits.ndim) if d >= len(entries) or not entries[d]]
    place, step = jnp.zeros(bits.shape, np.uint32), 1
    for d in reversed(inside):
        place += jax.lax.broadcasted_iota(np.uint32, bits.shape, d) * np.uint32(step % 2**32)
        step *= bits.shape[d]
    mixed = bits * np.uint32(ODD[0]) + place * np.uint32(ODD[1])
    for shift, factor in MIX:
        mixed = (mixed ^ (mixed >> np.uint32(shift))) * np.uint32(factor)
    return jnp.sum(mixed, axis=inside, dtype=np.uint32)
