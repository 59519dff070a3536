"""Block inputs in host memory come back one block ahead: each is fetched while the block behind it runs backward.

[Note: one block ahead]
JAX hands nothing but cotangents from the backward pass of one block to that of the block before. So the input of a
block travels as one: every block takes a slot from the block before and gives one to the next, zeros that nothing
reads; the cotangent of the slot is the input. Forward, block i + 1 sends the input of block i to the host; backward it
fetches it, from its own start on, and its result is what block i runs again from. In the body of a scan XLA starts
that copy first and waits for it last. The last input has no block behind it: it is fetched by the identity behind them.

The values are those of `jax.checkpoint`. Forward mode through a block is not there (`jax.custom_vjp`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jzero import jaxprs
from jzero.boundary import BEGIN, KeepsInputs, Kept


@dataclasses.dataclass(frozen=True)
class Input:
    """What a remat region keeps on the host: its argument number `at`, an array of this shape and dtype."""

    at: int
    kept: Kept
    shape: tuple[int, ...]
    dtype: Any

    def follows(self, other: Input) -> bool:
        """Blocks of one kind: the slot of one fits the other."""
        return (self.kept, self.shape, self.dtype) == (other.kept, other.shape, other.dtype)

    def empty(self) -> tuple[Any, Any]:
        """The slot and the input before the first turn of a loop."""
        zeros = jnp.zeros(self.shape, self.dtype)
        return zeros, zeros


@dataclasses.dataclass(frozen=True)
class Chain:
    """What a block hands to the next: the slot, and its input, which is to be sent to the host."""

    input: Input
    slot: Any
    previous: Any


def offloaded(eqn) -> Input | None:
    """The input that a remat region keeps on the host and that may be fetched ahead; else None."""
    if eqn.primitive.name not in jaxprs.REMAT:
        return None
    policy = eqn.params["policy"]
    if not (isinstance(policy, KeepsInputs) and policy.policy is None and policy.ahead):
        return None
    jaxpr, _ = jaxprs.opened(eqn.params["jaxpr"])
    begins = [e for e in jaxpr.eqns if e.primitive.name == BEGIN]
    if len(begins) != 1 or begins[0].invars[0] not in jaxpr.invars:
        return None
    kept, aval = begins[0].params["kept"], begins[0].invars[0].aval
    if not kept.host or kept.refused:
        return None
    return Input(jaxpr.invars.index(begins[0].invars[0]), kept, tuple(aval.shape), aval.dtype)


def fetches(jaxpr) -> bool:
    """True for a function with blocks in it, or in its scans, whose inputs may be fetched ahead."""
    bodies = [e.params["jaxpr"] for e in jaxpr.eqns if e.primitive.name == "scan"]
    return any(offloaded(e) for e in jaxpr.eqns) or any(fetches(jaxprs.opened(b)[0]) for b in bodies)


def run(
    region: Callable[..., list[Any]],
    values: Sequence[Any],
    source: Input,
    chain: Chain | None,
    *,
    in_loop: bool,
) -> tuple[list[Any], Chain]:
    """A block: its results, and what the next one takes.

    Args:
      region: the block as a function of arrays to a list of arrays.
      values: its arguments.
      source: which of them is the input.
      chain: of the block before; None for the first one.
      in_loop: the body of a loop, where XLA writes and fetches in each turn by itself.
    """
    kept = source.kept
    floating = [jnp.issubdtype(jnp.result_type(v), np.inexact) for v in values]

    @jax.custom_vjp
    def block(values, slot, previous):
        pinned = [kept.pinned(v) if i == source.at else v for i, v in enumerate(values)]
        return region(*pinned), jnp.zeros(source.shape, source.dtype)

    def forward(values, slot, previous):
        outs, new = block(values, slot, previous)
        rest = [None if i == source.at else v for i, v in enumerate(values)]
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
            fetched = split(kept, copy)
        moving = [x if i == source.at else v for i, v in enumerate(rest)]
        if in_loop:
            moving[source.at], given = jax.lax.optimization_barrier((x, given))
        else:
            moving, given = jax.lax.optimization_barrier((moving, given))
        moving[source.at] = kept.whole(moving[source.at])

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
    return outs, Chain(source, slot, kept.pinned(values[source.at]))


def finish(value: Any, chain: Chain) -> Any:
    """What comes out of the last block, with the fetch of its input on the way back."""
    kept = chain.input.kept

    @jax.custom_vjp
    def identity(value, slot, previous):
        return value

    identity.defvjp(
        lambda value, slot, previous: (value, kept.store(previous)[1]),
        lambda copy, cotangent: (cotangent, split(kept, copy), None),
    )
    return identity(value, chain.slot, jax.lax.stop_gradient(chain.previous))


def split(kept: Kept, copy: Any) -> Any:
    """The copy on the device, split as it was kept; the block before gathers it."""
    x = kept.fetched(copy)
    return x if kept.axes is None else kept.constrain(x, kept.axes)
