"""Layers of random models as plain functions of a dict of params, for every flavour; and Flax's own layers by name.

A block maps activations [B, T, D] to the same shape; models add half of it to their input. No block has a gradient that
is zero but for rounding (a bias before a norm): Adam-like optimizers would divide by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

VOCABULARY, OUT, TIME, DEPTH = 11, 5, 3, 3


def normal(key, shape, dtype):
    """Weights that keep the size of activations."""
    fan = shape[-2] if len(shape) > 1 else 1
    return (jax.random.normal(key, shape) * 0.7 / fan**0.5).astype(dtype)


def constant(value):
    """Leaves of one value: several of one shape are then equal at the start."""
    return lambda key, shape, dtype: jnp.full(shape, value, dtype)


class Block(NamedTuple):
    """Params by name, with their shapes for width d, and the function `run(params, h, tokens)`."""

    shapes: Callable[[int], dict[str, tuple[int, ...]]]
    run: Callable[..., Any]
    init: Mapping[str, Any] = MappingProxyType({})


def matmul(p, h, tokens):
    return jnp.tanh(h @ p["w"] + p["b"])


def heads(p, h, tokens):
    inner = jax.nn.gelu(jnp.einsum("btd,dhk->bthk", h, p["up"]))
    return jnp.einsum("bthk,hkd->btd", inner, p["down"])


def twice(p, h, tokens):
    return jnp.tanh(jnp.sin(h @ p["w"]) @ p["w"])


def indexed(p, h, tokens):
    first, second = p["w"]
    return jax.nn.gelu(h @ first) * (h @ p["w"][1]) + h @ second[:, :3].sum(1, keepdims=True)


def scan(p, h, tokens):
    def layer(h, row):
        return h + 0.3 * jnp.tanh(h @ row["w"] + row["b"]), None

    return jax.lax.scan(layer, h, p)[0]


def scan_remat(p, h, tokens):
    @jax.checkpoint
    def layer(h, w):
        return h + 0.3 * jnp.tanh(h @ w), None

    return jax.lax.scan(layer, h, p["w"])[0]


def nested(p, h, tokens):
    def inner(h, w):
        return h + 0.3 * jnp.tanh(h @ w), None

    def outer(h, ws):
        return jax.lax.scan(inner, h, ws)[0], None

    return jax.lax.scan(outer, h, p["w"])[0]


def remat(p, h, tokens):
    @partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
    def mlp(p, h):
        return jax.nn.gelu(h @ p["up"]) @ p["down"]

    return mlp(p, h)


def cond(p, h, tokens):
    positive = jax.lax.stop_gradient(p["gate"][0]) > 0
    return jax.lax.cond(positive, lambda h: jnp.tanh(h @ p["w"]), lambda h: jnp.sin(h @ p["v"]), h)


@jax.custom_vjp
def tanh_matmul(h, w):
    return jnp.tanh(h @ w)


def _tanh_matmul_fwd(h, w):
    out = jnp.tanh(h @ w)
    return out, (h, w, out)


def _tanh_matmul_bwd(kept, g):
    h, w, out = kept
    g = (g * (1 - out * out)).astype(h.dtype)
    return g @ w.T, jnp.einsum("btd,bte->de", h, g).astype(w.dtype)


tanh_matmul.defvjp(_tanh_matmul_fwd, _tanh_matmul_bwd)


def custom(p, h, tokens):
    return tanh_matmul(h, p["w"])


def experts(p, h, tokens):
    return jax.vmap(lambda w: jnp.tanh(h @ w))(p["w"]).mean(0)


def lora(p, h, tokens):
    return jnp.tanh(h @ (jax.lax.stop_gradient(p["base"]) + p["a"] @ p["b"]))


def lora_side(p, h, tokens):
    return jnp.tanh(h @ jax.lax.stop_gradient(p["base"]) + (h @ p["a"]) @ p["b"])


def norm(p, h, tokens):
    wide = h.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-3)).astype(h.dtype) * p["scale"]


def loop(p, h, tokens):
    def cell(c, x):
        c = jnp.tanh(c @ p["w"] + x @ p["u"])
        return c, c

    return jax.lax.scan(cell, jnp.zeros_like(h[:, 0]), h.swapaxes(0, 1))[1].swapaxes(0, 1)


def twins(p, h, tokens):
    return jnp.tanh(h @ p["a"]) * 0.5 + jnp.sin(h @ p["b"]) @ p["c"]


def odd(p, h, tokens):
    return (jax.nn.silu(h @ p["w"]) @ p["v"]) * p["s"]


def weight_norm(p, h, tokens):
    scale = p["g"] * jax.lax.rsqrt(jnp.sum(p["v"].astype(jnp.float32) ** 2, 0) + 1e-3).astype(p["g"].dtype)
    return jnp.tanh(h @ (p["v"] * scale))


def lookup(rows, tokens):
    """Rows of a table; under an Explicit mesh laid out as the tokens are, which JAX does not guess."""
    spec = jax.typeof(tokens).sharding.spec
    if all(entry is None for entry in spec):
        return rows[tokens]
    return rows.at[tokens].get(out_sharding=jax.P(*spec, *[None] * (tokens.ndim - len(spec)), None))


def table(p, h, tokens):
    return jnp.tanh(lookup(p["e"], tokens)) * h


def symmetric(p, h, tokens):
    return jnp.sin(h @ (p["w"] + p["w"].T))


def convolution(p, h, tokens):
    return jnp.tanh(jax.lax.conv_general_dilated(h, p["k"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")))


def elementwise(p, h, tokens):
    return jnp.tanh(h * p["scale"] + p["shift"])


def sliced(p, h, tokens):
    q, k = jnp.split(p["qk"], 2, axis=1)
    return jnp.tanh(h @ q) * jnp.sin(h @ k)


def while_loop(p, h, tokens):
    return jax.lax.fori_loop(0, DEPTH, lambda i, h: h + 0.3 * jnp.tanh(h @ p["w"]), h)


BLOCKS = {
    "matmul": Block(lambda d: {"w": (d, d), "b": (d,)}, matmul),
    "heads": Block(lambda d: {"up": (d, 3, 4), "down": (3, 4, d)}, heads),
    "twice": Block(lambda d: {"w": (d, d)}, twice),
    "indexed": Block(lambda d: {"w": (2, d, d)}, indexed),
    "scan": Block(lambda d: {"w": (DEPTH, d, d), "b": (DEPTH, d)}, scan),
    "scan_remat": Block(lambda d: {"w": (DEPTH, d, d)}, scan_remat),
    "nested": Block(lambda d: {"w": (2, 2, d, d)}, nested),
    "remat": Block(lambda d: {"up": (d, 2 * d), "down": (2 * d, d)}, remat),
    "cond": Block(lambda d: {"w": (d, d), "v": (d, d), "gate": (1,)}, cond, {"gate": constant(1)}),
    "custom": Block(lambda d: {"w": (d, d)}, custom),
    "experts": Block(lambda d: {"w": (2, d, d)}, experts),
    "lora": Block(lambda d: {"base": (d, d), "a": (d, 2), "b": (2, d)}, lora, {"b": constant(0.1)}),
    "lora_side": Block(lambda d: {"base": (d, d), "a": (d, 2), "b": (2, d)}, lora_side, {"b": constant(0.1)}),
    "norm": Block(lambda d: {"scale": (d,)}, norm, {"scale": constant(1)}),
    "loop": Block(lambda d: {"w": (d, d), "u": (d, d)}, loop),
    "twins": Block(lambda d: dict.fromkeys("abc", (d, d)), twins, {n: constant(0.05) for n in "abc"}),
    "odd": Block(lambda d: {"w": (d, 2 * d + 1), "v": (2 * d + 1, d), "s": ()}, odd, {"s": constant(0.5)}),
    "weight_norm": Block(lambda d: {"v": (d, d), "g": (d,)}, weight_norm, {"g": constant(1)}),
    "table": Block(lambda d: {"e": (VOCABULARY, d)}, table),
    "symmetric": Block(lambda d: {"w": (d, d)}, symmetric),
    "convolution": Block(lambda d: {"k": (3, d, d)}, convolution),
    "elementwise": Block(lambda d: {"scale": (d,), "shift": (d,)}, elementwise, {"scale": constant(0.5)}),
    "sliced": Block(lambda d: {"qk": (d, 2 * d)}, sliced),
    "while_loop": Block(lambda d: {"w": (d, d)}, while_loop),
}

FLAX = (
    "Dense", "Conv", "Attention", "LayerNorm", "BatchNorm", "Dropout", "Scan", "Remat", "Einsum", "GRU",
)  # fmt: skip
"""Layers of Flax itself, which linen and NNX have in a form of their own."""

STATEFUL = ("BatchNorm", "Dropout")
"""Layers that hold state besides params, or that draw random numbers."""

TILED = {
    "matmul", "heads", "twice", "remat", "cond", "custom", "experts", "lora", "lora_side", "norm", "twins", "odd",
    "weight_norm", "symmetric", "elementwise", "sliced",
}  # fmt: skip
"""Blocks that treat each position alike, and have no stack of layers, which would be a loop in a loop."""

UNROLLED_SCANS = {"while_loop"}
"""Blocks whose loop has no reverse rule unless its length is known."""


def params_of(kind: str, width: int, key, dtype) -> dict[str, Any]:
    """The params of one block."""
    block, out = BLOCKS[kind], {}
    for i, (name, shape) in enumerate(block.shapes(width).items()):
        out[name] = block.init.get(name, normal)(jax.random.fold_in(key, i), shape, dtype)
    return out


def cross_entropy(logits, batch):
    """Mean over all tokens, in fp32."""
    logits = logits.astype(jnp.float32)
    picked = jnp.sum(logits * jax.nn.one_hot(batch["labels"], VOCABULARY), -1)
    return mean_of(jax.nn.logsumexp(logits, -1) - picked, batch)


def squared_error(out, batch):
    """Mean over all values, in fp32."""
    return mean_of((out.astype(jnp.float32) - batch["y"]) ** 2, batch)


def mean_of(values, batch):
    """The mean of `values [B, ...]`, over the rows of the batch's mask if it has one; NaN where it has no row."""
    if "mask" not in batch:
        return jnp.mean(values)
    rows = jnp.mean(values.reshape(values.shape[0], -1), 1)
    return jnp.sum(rows * batch["mask"]) / jnp.sum(batch["mask"])
