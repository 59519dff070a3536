"""Losses that use a weight in every round of a loop."""

from __future__ import annotations

import jax
import jax.numpy as jnp

DIM, ROWS, STEPS = 64, 16, 5


def params():
    keys = jax.random.split(jax.random.key(0), 3)
    w, v = (jax.random.normal(k, (DIM, DIM)) / DIM**0.5 for k in keys[:2])
    return {"w": w, "v": v, "b": 0.1 * jnp.ones(DIM), "table": jax.random.normal(keys[2], (8, DIM))}


def data():
    return jax.random.normal(jax.random.key(1), (ROWS, DIM))


def scan(p, x):
    return jax.lax.scan(lambda h, _: (jnp.tanh(h @ p["w"] + p["b"]), h.mean()), x, None, length=STEPS)


def cast(p, x):
    """The backward pass reads the cast weight, which is computed from the gathered one alone."""
    half = jnp.bfloat16

    def body(h, _):
        return jnp.tanh(h.astype(half) @ p["w"].astype(half)).astype(jnp.float32), None

    return jax.lax.scan(body, x, None, length=STEPS)[0]


def remat_inside(p, x):
    body = jax.checkpoint(lambda h, i: (jnp.tanh(h @ p["w"]) * (i % 2 + 1), i))
    h, counts = jax.lax.scan(body, x, jnp.arange(STEPS))
    return h @ p["v"], counts


def remat_outside(p, x):
    return jax.checkpoint(lambda p, x: scan(p, x)[0] @ p["v"])(p, x)


def nested(p, x):
    @jax.checkpoint
    def outer(h, _):
        return scan(p, h)[0] @ p["v"], None

    return jax.lax.scan(outer, x, None, length=2)[0]


def while_loop(p, x):
    """Only a `while` has a condition that is computed; a weight in it has no gradient."""
    q = jax.lax.stop_gradient(p)

    def more(state):
        h, i = state
        return (i < STEPS) & (jnp.abs(h @ q["v"]).sum() > 1e-3)

    h, _ = jax.lax.while_loop(more, lambda s: (jnp.tanh(s[0] @ q["w"]), s[1] + 1), (jax.lax.stop_gradient(x), 0))
    return (x + h) @ p["w"]


def with_keys(p, x):
    def body(carry, i):
        h, key = carry
        kept = jax.random.bernoulli(jax.random.fold_in(key, i), 0.5, h.shape)
        return (jnp.where(kept, jnp.tanh(h @ p["w"]), h), key), None

    return jax.lax.scan(body, (x, jax.random.key(3)), jnp.arange(STEPS))[0][0]


def lookup(p, x):
    """A table whose rows are looked up stays out of it."""

    def body(h, i):
        return jnp.tanh(h @ p["w"]) + p["table"][jnp.argmax(h[:, :8], axis=-1) + 0 * i], None

    return jax.lax.scan(body, x, jnp.arange(STEPS))[0]


CASES = {
    "scan": lambda p, x: scan(p, x)[0], "cast": cast, "remat inside": lambda p, x: remat_inside(p, x)[0],
    "remat outside": remat_outside, "nested": nested, "while": while_loop, "keys": with_keys, "lookup": lookup,
}  # fmt: skip


def loss(case):
    return lambda p, x: (CASES[case](p, x) ** 2).mean()
