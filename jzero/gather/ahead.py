"""Block inputs in host memory come back one block ahead: each is fetched while the block behind it runs backward.

[Note: one block ahead]
JAX hands nothing but cotangents from the backward pass of one block to that of the block before. So the input of a
block travels as one: every block takes a slot from the block before and gives one to the next, zeros that nothing
reads; the cotangent of the slot is the input. Forward, block i + 1 sends the input of block i to the host; backward it
fetches it, from its own start on, and its result is what block i runs again from. In the body of a scan XLA starts
that copy first and waits for it last. Blocks whose inputs are alike make one chain; a scan has its own, in its carry.

The last input has no block behind it: an identity over all results of the function, or of the scan, fetches it. Over
all of them, because a backward pass leaves out what has no cotangent: the result of the last block may be unused, and
the blocks before it would be handed zeros for their inputs. But every cotangent comes from some result.

The values are those of `jax.checkpoint`. Forward mode through a block is not there (`jax.custom_vjp`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jzero.core import jaxprs
from jzero.core.block_input import BEGIN, KeepsInputs, Kept
from jzero.core.primitives import REMAT


@dataclasses.dataclass(frozen=True)
class Kind:
    """Of inputs that are alike: the slot of one fits another."""

    kept: Kept
    shape: tuple[int, ...]
    dtype: Any


class Chain(NamedTuple):
    """What a block hands to the next of its kind: the slot, and its input, which is to be sent to the host."""

    slot: Any
    previous: Any


def empty(kind: Kind) -> Chain:
    """Before the first turn of a loop."""
    zeros = jnp.zeros(kind.shape, kind.dtype)
    return Chain(zeros, zeros)


def offloaded(eqn) -> tuple[int, Kind] | None:
    """The number and the kind of the input that a remat region keeps on the host and may fetch ahead; else None."""
    if eqn.primitive.name not in REMAT:
        return None
    policy = eqn.params["policy"]
    if not (isinstance(policy, KeepsInputs) and policy.policy is None and policy.ahead):
        return None
    jaxpr, _ = jaxprs.opened(eqn.params["jaxpr"])
    begins = [e for e in jaxpr.eqns if e.primitive.name == BEGIN]
    if len(begins) != 1 or begins[0].invars[0] not in jaxpr.invars:
        return None
    kept, source = begins[0].params["kept"], begins[0].invars[0]
    if not kept.host or kept.refused:
        return None
    return jaxpr.invars.index(source), Kind(kept, tuple(source.aval.shape), source.aval.dtype)


def fetches(jaxpr) -> bool:
    """True for a function with blocks in it, or in its scans, whose inputs may be fetched ahead."""
    bodies = [e.params["jaxpr"] for e in jaxpr.eqns if e.primitive.name == "scan"]
    return any(offloaded(e) for e in jaxpr.eqns) or any(fetches(jaxprs.opened(b)[0]) for b in bodies)


def run(
    region: Callable[..., list[Any]],
    values: Sequence[Any],
    at: int,
    kind: Kind,
    chain: Chain | None,
    *,
    in_loop: bool,
) -> tuple[list[Any], Chain]:
    """A block: its results, and what the next one takes.

    Args:
      region: the block as a function of arrays to a list of arrays.
      values: its arguments.
      at, kind: which of them is the input, and what it is like.
      chain: of the block before; None for the first one.
      in_loop: the body of a loop, where XLA writes and fetches in each turn by itself.
    """
    kept = kind.kept
    if in_loop and kept.loop_limit:
        raise NotImplementedError(kept.loop_limit)
    floating = [_floating(v) for v in values]

    @jax.custom_vjp
    def block(values, slot, previous):
        pinned = [kept.pinned(v) if i == at else v for i, v in enumerate(values)]
        return region(*pinned), empty(kind).slot

    def forward(values, slot, previous):
        outs, new = block(values, slot, previous)
        rest = [None if i == at else v for i, v in enumerate(values)]
        if previous is None:
            return (outs, new), (rest, None)
        copy = kept.store(previous)[1]
        if not in_loop:  # the results wait for the copy: it is written while the block runs
            outs, copy = jax.lax.optimization_barrier((outs, copy))
        return (outs, new), (rest, copy)

    def backward(saved, cotangents):
        (rest, copy), (given, x) = saved, cotangents
        fetched = None
        if copy is not None:
            if not in_loop:
                copy, given = jax.lax.optimization_barrier((copy, given))
            fetched = kept.fetched(copy)
        moving = [x if i == at else v for i, v in enumerate(rest)]
        if in_loop:
            moving[at], given = jax.lax.optimization_barrier((x, given))
        else:
            moving, given = jax.lax.optimization_barrier((moving, given))
        moving[at] = kept.whole(moving[at])

        def again(*some):
            some = iter(some)
            return region(*[next(some) if f else v for f, v in zip(floating, moving, strict=True)])

        with jax.named_scope("rematted_computation"):  # as jax.checkpoint calls it: `explain` counts by that
            _, transposed = jax.vjp(again, *[v for f, v in zip(floating, moving, strict=True) if f])
        grads = iter(transposed(given))
        return [next(grads) if f else None for f in floating], fetched, None

    block.defvjp(forward, backward)
    taken = (None, None) if chain is None else (chain.slot, jax.lax.stop_gradient(chain.previous))
    outs, slot = block(list(values), *taken)
    return outs, Chain(slot, kept.pinned(values[at]))


def finish(outs: Sequence[Any], chains: Mapping[Kind, Chain]) -> list[Any]:
    """The results of a function, with the fetch of its last inputs on the way back: see [Note: one block ahead]."""
    floating = [i for i, o in enumerate(outs) if _floating(o)]

    @jax.custom_vjp
    def identity(values, slots, previous):
        return values

    def forward(values, slots, previous):
        return values, [kind.kept.store(x)[1] for kind, x in zip(chains, previous, strict=True)]

    def backward(copies, cotangents):
        return cotangents, [kind.kept.fetched(x) for kind, x in zip(chains, copies, strict=True)], None

    identity.defvjp(forward, backward)
    slots, previous = ([c[i] for c in chains.values()] for i in range(2))
    values = identity([outs[i] for i in floating], slots, jax.lax.stop_gradient(previous))
    done = dict(zip(floating, values, strict=True))
    return [done.get(i, o) for i, o in enumerate(outs)]


def _floating(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, np.inexact)
