"""Losses that use their weights in many ways."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

DIM, ROWS, LAYERS = 32, 16, 3


WEIGHTS = {"a": (DIM, 48), "b": (48, DIM), "c": (DIM, 48), "d": (DIM, DIM), "stack": (LAYERS, DIM, DIM)}


def weights():
    rng = np.random.default_rng(0)
    return {k: jnp.asarray(rng.standard_normal(s) / 6, jnp.float32) for k, s in WEIGHTS.items()}


def data():
    return np.random.default_rng(1).standard_normal((ROWS, DIM), dtype=np.float32)


@jax.custom_vjp
def clipped_matmul(x, w):
    """A product whose backward pass is its own: the cotangent is clipped, so that JAX's own one would differ."""
    return x @ w


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def norm_matmul(x, w, eps):
    """As fused kernels have it: what the backward pass needs is not what the forward pass takes."""
    return norm_forward(x, w, eps)[0]


def norm_forward(x, w, eps):
    scale = jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + eps)
    return (x * scale) @ w, (x * scale, scale, w)


@jax.custom_jvp
def squared_matmul(x, w):
    return (x @ w) ** 2


def kernel(x_ref, w_ref, o_ref):
    o_ref[...] = x_ref[...] @ w_ref[...]


def call_kernel(x, w):
    out = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype)
    return pl.pallas_call(kernel, out_shape=out, interpret=True)(x, w)


@jax.custom_vjp
def pallas_matmul(x, w):
    """A Pallas kernel forward and two of them backward."""
    return call_kernel(x, w)


def through(product):
    """The same product three times, with an activation that has a `custom_jvp` between."""
    return lambda p, x: product(jax.nn.silu(product(jax.nn.relu(product(x, p["a"])), p["b"])), p["c"])


def branches(p, x):
    """Other weights in each branch; one of them is used again after it."""
    h = jnp.tanh(x @ p["a"])
    h = jax.lax.cond(h.mean() > 0, lambda h: h @ p["b"], lambda h: jnp.tanh(h @ p["b"]) @ p["d"], h)
    return h @ p["d"]


def switch(p, x):
    index = (x.sum() > 1e6).astype(jnp.int32) + 1
    return jax.lax.switch(
        index, [lambda h: h, lambda h: h @ p["d"], lambda h: h @ p["a"] @ p["b"]], jnp.tanh(x)
    )


def while_loop(p, x):
    """No derivative goes through a while loop; what it reads is a constant of it."""
    start = jax.lax.stop_gradient((x, 0))
    d = jax.lax.stop_gradient(p["d"])
    h, _ = jax.lax.while_loop(lambda s: s[1] < 3, lambda s: (jnp.tanh(s[0] @ d), s[1] + 1), start)
    return (x + h) @ p["a"]


def fori_loop(p, x):
    """A loop of known length is a scan; each turn takes its slice of a stack and one weight of all turns."""
    return jax.lax.fori_loop(0, LAYERS, lambda i, h: jnp.tanh(h @ p["stack"][i] + h @ p["d"]), x)


def scan(p, x):
    """A scan with a stack, a constant, and remat inside."""

    @jax.checkpoint
    def layer(h, w):
        return jnp.tanh(h @ w + h @ p["d"]), h.mean()

    h, means = jax.lax.scan(layer, x, p["stack"])
    return h + means.sum()


def scan_in_scan(p, x):
    def outer(h, _):
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, p["stack"])[0], None

    return jax.lax.scan(outer, x, None, length=2)[0]


def mapped(p, x):
    """`vmap` over rows inside of the loss, and a weight of each example's own."""
    return jax.vmap(lambda row: jnp.tanh(row @ p["a"]) @ p["b"])(x)


def tied(p, x):
    """One weight three times, once transposed."""
    return jnp.tanh(x @ p["d"]) @ p["d"] @ p["d"].T


def cut(p, x):
    """Parts of weights, along dims that are split and others that are not."""
    first, second, third = p["stack"]
    left, right = jnp.split(p["a"], 2, axis=1)
    top, bottom = jnp.split(p["b"], 2, axis=0)
    h = jnp.tanh(x @ first) * (x @ second) + (x @ left) @ top
    h = h @ p["stack"][1] + (h @ right) @ bottom + h @ third[:, ::-1]
    return h + (h @ p["c"][:, :16]) @ p["d"][16:]


def unused(p, x):
    """A loss that reads one weight alone: the others have a gradient of zero."""
    return x @ p["a"]


CASES = {
    "custom_vjp": through(clipped_matmul),
    "custom_vjp with residuals of its own": through(lambda x, w: norm_matmul(x, w, 1e-6)),
    "custom_jvp": through(squared_matmul),
    "pallas": through(pallas_matmul),
    "cond": branches,
    "switch": switch,
    "while": while_loop,
    "fori_loop": fori_loop,
    "scan": scan,
    "scan in scan": scan_in_scan,
    "vmap": mapped,
    "tied": tied,
    "cut": cut,
    "unused": unused,
}


def clipped_backward(saved, g):
    x, w = saved
    g = jnp.clip(g, -1e-4, 1e-4)
    return g @ w.T, x.T @ g


clipped_matmul.defvjp(lambda x, w: (x @ w, (x, w)), clipped_backward)


def norm_backward(eps, saved, g):
    y, scale, w = saved
    dy = g @ w.T
    return scale * (dy - y * (dy * y).mean(-1, keepdims=True)), y.T @ g


norm_matmul.defvjp(norm_forward, norm_backward)


@squared_matmul.defjvp
def squared_matmul_jvp(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    y = x @ w
    return y**2, 3 * y * (dx @ w + x @ dw)  # three: a rule of its own


pallas_matmul.defvjp(
    lambda x, w: (call_kernel(x, w), (x, w)),
    lambda saved, g: (call_kernel(g, saved[1].T), call_kernel(saved[0].T, g)),
)
