"""Known language models by name, so that a plan needs no file of the user: their sizes, and a Flax model.

[Note: attention of the presets]
cuDNN attention needs a real GPU to compile. The presets compute attention for 256 queries at a time and again
in the backward pass, so that only a strip of the scores is stored at a time: the memory is close to that of
flash attention, and the collectives are the same.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jzero.core.types import PyTree
from jzero.flax.shard import plan_of
from jzero.gather.tiled_loss import tiled_loss
from jzero.gradients.value_and_grad import value_and_grad
from jzero.proof.transformer import Transformer

QUERIES = 256


@dataclasses.dataclass(frozen=True)
class Preset:
    """The sizes of a decoder-only language model.

    `gated`: SwiGLU, RMSNorm, rotary positions, no biases. `tiled_loss`: its loss is `jzero.tiled_loss`.
    `remat`: every block is under remat.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq: int
    gated: bool
    tied: bool
    source: str
    tiled_loss: bool = False
    remat: bool = True

    def transformer(self, *, seq: int, batch: int) -> Transformer:
        """The sizes that `jzero.estimate` counts activations from."""
        return Transformer(
            layers=self.layers, width=self.width, heads=self.heads, seq=seq, batch=batch, vocab=self.vocab,
            ffn=self.ffn * 3 // 2 if self.gated else self.ffn, flash=True, tiled_loss=self.tiled_loss,
            remat=self.remat,
        )  # fmt: skip


def _gpt(layers, width, heads, source, vocab=50257):
    return Preset(layers, width, heads, heads, 4 * width, vocab, 1024, False, True, source)


def _llama(layers, width, heads, kv_heads, ffn, vocab, seq, source):
    return Preset(layers, width, heads, kv_heads, ffn, vocab, seq, True, False, source)


_GPT2 = "Radford et al., 2019; openai/gpt-2"
_LLAMA3 = "Dubey et al., arXiv:2407.21783, table 3"
PRESETS = {
    "gpt2-small": _gpt(12, 768, 12, _GPT2),
    "gpt2-medium": _gpt(24, 1024, 16, _GPT2),
    "gpt2-large": _gpt(36, 1280, 20, _GPT2),
    "gpt2-xl": _gpt(48, 1600, 25, _GPT2),
    "gpt-7.5b": _gpt(36, 4096, 32, "Rajbhandari et al., arXiv:1910.02054 (7.5B of its table 1)", 50304),
    "gpt-1t": _gpt(128, 25600, 256, "Rajbhandari et al., arXiv:2104.07857 (1T of its table 1)", 50304),
    "llama3-8b": _llama(32, 4096, 32, 8, 14336, 128256, 8192, _LLAMA3),
    "llama2-13b": _llama(40, 5120, 40, 40, 13824, 32000, 4096, "Touvron et al., arXiv:2307.09288"),
    "llama3-70b": _llama(80, 8192, 64, 8, 28672, 128256, 8192, _LLAMA3),
}


def train_step(state: PyTree, batch: PyTree, *, accumulate: int = 1) -> tuple[PyTree, jax.Array]:
    """One step of next-token prediction on batch["tokens"], i32[batch, seq + 1]; plain Flax but for micro-batches."""
    loss, grads = gradient_step(state, batch, accumulate=accumulate)
    return state.apply_gradients(grads=grads), loss


def gradient_step(state: PyTree, batch: PyTree, *, accumulate: int = 1) -> tuple[jax.Array, PyTree]:
    """The loss and the gradients of `train_step`, for an update outside of the program."""

    def loss_of(params, batch):
        return state.apply_fn({"params": params}, batch["tokens"][:, :-1], batch["tokens"][:, 1:])

    if accumulate == 1:
        return jax.value_and_grad(loss_of)(state.params, batch)
    return value_and_grad(loss_of, plan_of(state), accumulate=accumulate)(state.params, batch)


def creator(preset: Preset, *, seq: int) -> Callable[[], PyTree]:
    """A function that creates its TrainState: bf16 params, AdamW, layers in a scan."""
    import flax.linen as nn
    from flax.training.train_state import TrainState

    p = preset
    dtypes: Any = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    dense = functools.partial(nn.Dense, use_bias=not p.gated, **dtypes)
    norm: Any = functools.partial(nn.RMSNorm if p.gated else nn.LayerNorm, **dtypes)
    head = p.width // p.heads

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            y = norm(name="norm_attention")(x)
            widths = (p.heads * head, p.kv_heads * head, p.kv_heads * head)
            if p.gated:
                q, k, v = (dense(w, name=n)(y) for w, n in zip(widths, "qkv", strict=True))
            else:
                q, k, v = jnp.split(dense(sum(widths), name="qkv")(y), 3, axis=-1)
            q, k, v = (t.reshape(*t.shape[:2], -1, head) for t in (q, k, v))
            if p.gated:
                q, k = _rotated(q), _rotated(k)
            x = x + dense(p.width, name="out")(attention(q, k, v).reshape(x.shape))
            y = norm(name="norm_mlp")(x)
            hidden = dense(p.ffn, name="up")(y)
            hidden = nn.silu(dense(p.ffn, name="gate")(y)) * hidden if p.gated else nn.gelu(hidden)
            return x + dense(p.width, name="down")(hidden), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens, labels):
            embed = nn.Embed(p.vocab, p.width, **dtypes, name="embed")
            x = embed(tokens)
            if not p.gated:
                table = self.param("positions", nn.initializers.normal(0.02), (seq, p.width), jnp.bfloat16)
                x = x + table[: x.shape[1]]
            block = nn.remat(Block, prevent_cse=False) if p.remat else Block
            stack = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=p.layers)
            x, _ = stack(name="layers")(x, None)
            x = norm(name="norm_out")(x)
            kernel = nn.initializers.lecun_normal(), (p.width, p.vocab), jnp.bfloat16
            head = embed.embedding.T if p.tied else self.param("head", *kernel)
            if p.tiled_loss:
                return tiled_loss(x, head, labels)
            logits = (x @ head).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    model, tx = Model(), optax.adamw(3e-4)

    def create():
        tokens = jnp.zeros((1, seq), jnp.int32)
        params = model.init(jax.random.key(0), tokens, tokens)["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    return create


def _rotated(x: jax.Array) -> jax.Array:
    """Rotary positions (Su et al., arXiv:2104.09864) of x[batch, seq, heads, features]."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None, None] * 500_000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool = True, bias: jax.Array | None = None
) -> jax.Array:
    """Attention of [batch, positions, heads, features], a strip of queries at a time.

    See [Note: attention of the presets]. `bias`: [heads, queries, keys], added to the scores.
    """
    seq = q.shape[1]
    strip = QUERIES if seq % QUERIES == 0 else seq

    @jax.checkpoint
    def attend(first, part):
        seen = jnp.arange(k.shape[1])[None, :] <= first + jnp.arange(strip)[:, None]
        mask = seen[None, None] if causal else None
        added = None if bias is None else jax.lax.dynamic_slice_in_dim(bias, first, strip, 1)[None]
        return jax.nn.dot_product_attention(part, k, v, bias=added, mask=mask, implementation="xla")

    if strip == seq:
        return attend(0, q)
    strips = jnp.moveaxis(q.reshape(q.shape[0], seq // strip, strip, *q.shape[2:]), 1, 0)
    _, out = jax.lax.scan(lambda _, x: (None, attend(*x)), None, (jnp.arange(0, seq, strip), strips))
    return jnp.moveaxis(out, 0, 1).reshape(q.shape)
