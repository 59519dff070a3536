"""Shampoo and SOAP as in their papers, plain optax transformations: optimizers that mix the dims of every matrix.

Leaves that do not have two dims are left as they are by Shampoo and get Adam from SOAP. They know nothing of jzero.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class ShampooState(NamedTuple):
    """Of every matrix [m, n]: the sums of G G^T and G^T G, and their inverse fourth roots; None of other leaves."""

    count: Any
    left: Any
    right: Any
    left_root: Any
    right_root: Any


def scale_by_shampoo(every: int = 1, eps: float = 1e-2) -> optax.GradientTransformation:
    """L^-1/4 G R^-1/4, the roots computed anew at every `every`-th step, all in one `lax.cond`.

    References: Gupta, Koren, Singer, arXiv 1802.09568, algorithm 1.
    """

    def init(params):
        def side(dim, scale):
            return _matrices(lambda p: scale * jnp.eye(p.shape[dim], dtype=p.dtype), params)

        return ShampooState(jnp.zeros([], jnp.int32), side(0, eps), side(1, eps), side(0, 1.0), side(1, 1.0))

    def update(grads, state, params=None):
        del params
        left = _matrices(lambda g, a: a + g @ g.T, grads, state.left)
        right = _matrices(lambda g, a: a + g.T @ g, grads, state.right)
        roots = jax.lax.cond(
            state.count % every == 0,
            lambda sums, _: jax.tree.map(_inverse_fourth_root, sums),
            lambda _, old: old,
            (left, right),
            (state.left_root, state.right_root),
        )
        new = jax.tree.map(lambda g, a, b: g if a is None else a @ g @ b, grads, *roots)
        return new, ShampooState(state.count + 1, left, right, *roots)

    return optax.GradientTransformation(init, update)


def _inverse_fourth_root(x):
    values, vectors = jnp.linalg.eigh(x)
    return (vectors * jnp.maximum(values, 1e-30) ** -0.25) @ vectors.T


class SoapState(NamedTuple):
    """Momentum, second moments in the eigenbasis, and of every matrix averages of G G^T and G^T G and their bases."""

    count: Any
    mu: Any
    nu: Any
    left: Any
    right: Any
    left_basis: Any
    right_basis: Any


def scale_by_soap(
    every: int = 1, b1: float = 0.95, b2: float = 0.95, eps: float = 1e-8, damping: float = 0.1
) -> optax.GradientTransformation:
    """Adam in the eigenbasis of Shampoo's preconditioner; each basis one step of power iteration and QR from the last.

    The bases are computed anew at every `every`-th step, those of each matrix in a `lax.cond` of their own. The
    averages begin at `damping` times the identity: from zero they have no inverse at first, and of a part of the
    space any basis is as good as another, so that rounding decides.

    References: Vyas et al., arXiv 2409.11321, algorithms 3 and 4.
    """

    def init(params):
        def side(dim, make):
            return _matrices(lambda p: make(p.shape[dim], dtype=p.dtype), params)

        def zeros():
            return jax.tree.map(jnp.zeros_like, params)

        averages = [side(dim, lambda n, dtype: damping * jnp.eye(n, dtype=dtype)) for dim in (0, 1)]
        bases = [side(dim, jnp.eye) for dim in (0, 1)]
        return SoapState(jnp.zeros([], jnp.int32), zeros(), zeros(), *averages, *bases)

    def update(grads, state, params=None):
        del params
        count = state.count + 1
        mu = jax.tree.map(lambda g, m: b1 * m + (1 - b1) * g, grads, state.mu)
        left = _matrices(lambda g, a: b2 * a + (1 - b2) * g @ g.T, grads, state.left)
        right = _matrices(lambda g, a: b2 * a + (1 - b2) * g.T @ g, grads, state.right)

        def basis(average, old):
            fresh = lambda: jnp.linalg.qr(average @ old)[0]  # noqa: E731
            return jax.lax.cond(state.count % every == 0, fresh, lambda: old)

        ql, qr = (
            jax.tree.map(basis, *sides) for sides in ((left, state.left_basis), (right, state.right_basis))
        )
        turned = jax.tree.map(lambda g, a, b: g if a is None else a.T @ g @ b, grads, ql, qr)
        nu = jax.tree.map(lambda g, v: b2 * v + (1 - b2) * g**2, turned, state.nu)

        def step(m, v, a, b):
            m = m if a is None else a.T @ m @ b
            new = (m / (1 - b1**count)) / (jnp.sqrt(v / (1 - b2**count)) + eps)
            return new if a is None else a @ new @ b.T

        return jax.tree.map(step, mu, nu, ql, qr), SoapState(count, mu, nu, left, right, ql, qr)

    return optax.GradientTransformation(init, update)


def _matrices(fn, tree, *rest):
    """`fn` of the leaves with two dims, None for the others."""
    return jax.tree.map(lambda x, *more: fn(x, *more) if x.ndim == 2 else None, tree, *rest)


def shampoo(rate: float, *, every: int = 1) -> optax.GradientTransformation:
    """Shampoo with a constant learning rate."""
    return optax.chain(scale_by_shampoo(every), optax.scale(-rate))


def soap(rate: float, *, every: int = 1) -> optax.GradientTransformation:
    """SOAP with a constant learning rate."""
    return optax.chain(scale_by_soap(every), optax.scale(-rate))
