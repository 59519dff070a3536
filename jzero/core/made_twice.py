"""A function of arrays that are made for it, and made again for its backward pass instead of being kept.

[Note: not jax.checkpoint]
A checkpoint whose policy keeps everything except these arrays would also keep what the user's own remat regions inside
of the function drop, since the outer policy decides. Without a policy it would run the whole function twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from jzero.core import jaxprs
from jzero.core.graph import Graph
from jzero.core.linear import linear
from jzero.core.primitives import INLINE

Arrays = Sequence[Any]


def made_twice(
    fn: Callable[[Arrays, Arrays], Arrays],
    make: Callable[[int, jax.Array], jax.Array],
    again: Callable[[Arrays, Arrays], tuple[Arrays, Arrays]],
    sources: Arrays,
    others: Arrays,
) -> list[Any]:
    """`fn(made, others)`; its backward pass makes again what it reads of the made arrays.

    Args:
      fn: does not close over traced arrays.
      make: `make(i, sources[i])`, differentiable, linear except for rounding.
      again: `again(sources, cotangents)` returns both, but the sources only when the cotangents are there.
      sources, others: arrays.
    """
    count = len(sources)

    def made(some: Arrays) -> list[Any]:
        return [make(i, x) for i, x in enumerate(some)]

    @jax.custom_jvp
    def call(*flat):
        return list(fn(made(flat[:count]), flat[count:]))

    def jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
        moves = [i for i, t in enumerate(tangents) if type(t) is not SymbolicZero]
        split = sum(i < count for i in moves)
        run = _Linearized(fn, count, moves, [*made(primals[:count]), *primals[count:]])

        def move(*flat):
            fixed, moved = flat[: -len(moves)], list(flat[-len(moves) :])
            for k, i in enumerate(moves[:split]):
                moved[k] = jax.jvp(functools.partial(make, i), (fixed[i],), (moved[k],))[1]
            return run.tangents(made(fixed[:count]), fixed[count:])(*moved)

        def back(*flat):
            fixed, cotangents = flat[: count + len(run.kept)], flat[count + len(run.kept) :]
            late, cotangents = again(fixed[:count], cotangents)
            pairs = [jax.vjp(functools.partial(make, i), x) for i, x in enumerate(late)]
            lin = run.tangents([x for x, _ in pairs], fixed[count:])
            found = list(jax.linear_transpose(lambda *ts: list(lin(*ts)), *run.moving)(list(cotangents)))
            return [pairs[i][1](g)[0] for i, g in zip(moves[:split], found, strict=False)] + found[split:]

        moved = iter(linear(move, back, [*primals[:count], *run.kept], [tangents[i] for i in moves]))
        return run.outs, [next(moved) if _moves(x) else _no_tangent(x) for x in run.outs]

    call.defjvp(jvp, symbolic_zeros=True)
    return call(*sources, *others)


class _Linearized:
    """A function at one point.

    Attributes:
      outs: its results.
      kept: the values that its derivative reads, except those computed only from the first `count` arguments.
      moving: the types of the arguments in which it is linearized.
    """

    def __init__(self, fn, count: int, moves: Sequence[int], args: Arrays):
        self.count = count
        self.moving = [jax.typeof(args[i]) for i in moves]
        trees = []

        def both(*args):
            def moved(*some):
                new = dict(zip(moves, some, strict=True))
                flat = [new.get(i, x) for i, x in enumerate(args)]
                outs = list(fn(flat[:count], flat[count:]))
                return [x for x in outs if _moves(x)], outs

            _, lin, outs = jax.linearize(moved, *(args[i] for i in moves), has_aux=True)
            leaves, tree = jax.tree.flatten(lin)
            trees.append((tree, len(outs)))
            return [*outs, *leaves]

        self.graph = _Inlined(*jaxprs.trace(both, *args))
        self.tree, size = trees[0]
        env = self._run(self.graph.nodes, args)
        self.outs, residuals = [env[k] for k in self.graph.outs[:size]], self.graph.outs[size:]
        others = set(self.graph.ins[count:])
        nodes = {k: self.graph.needed(k, lambda _: False) for k in residuals}
        self.made = {  # computed from the first arguments alone
            k: own for k, own in nodes.items()
            if k not in others and k not in self.graph.known and others.isdisjoint(i for n in own for i in n.ins)
        }  # fmt: skip
        self.residuals = residuals
        self.kept = [env[k] for k in residuals if k not in self.made]

    def tangents(self, made: Arrays, kept: Arrays) -> Callable[..., Any]:
        """The derivative, with the first arguments made again."""
        nodes = dict.fromkeys(n for own in self.made.values() for n in own)
        env = self._run([n for n in self.graph.nodes if n in nodes], made)
        rest = iter(kept)
        return self.tree.unflatten([env[k] if k in self.made else next(rest) for k in self.residuals])

    def _run(self, nodes, args: Arrays) -> dict[int, Any]:
        env = {**self.graph.known, **dict(zip(self.graph.ins, args, strict=False))}
        for node in nodes:
            env.update(zip(node.outs, node.run([env[i] for i in node.ins]), strict=True))
        return env


class _Inlined(Graph):
    """Inlines calls that mean only their body, but not remat regions."""

    def inlines(self, eqn, ins) -> bool:
        return eqn.primitive.name in INLINE


def _moves(x) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _no_tangent(x):
    return np.zeros(np.shape(x), jax.dtypes.float0)
