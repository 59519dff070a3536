"""The Flax modules of `benchmarks/catalogue.py`: each computes its loss from a batch, its layers in a scan.

ResNet normalizes over groups of channels, so that a step has no running statistics. What a model computes is close to
the published one in FLOPs and in the sizes of values, no more: nobody trains these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from jzero.cli.presets import attention
from jzero.gather.tiled_loss import tiled_loss as loss_in_tiles

DTYPES: dict[str, Any] = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
Dense, Conv = functools.partial(nn.Dense, **DTYPES), functools.partial(nn.Conv, **DTYPES)
LayerNorm, RMSNorm = functools.partial(nn.LayerNorm, **DTYPES), functools.partial(nn.RMSNorm, **DTYPES)
GroupNorm = functools.partial(nn.GroupNorm, num_groups=32, **DTYPES)


class Attention(nn.Module):
    """`biased`: which of q, k, v and o have a bias."""

    heads: int
    features: int
    kv_heads: int | None = None
    biased: str = ""
    causal: bool = False

    @nn.compact
    def __call__(self, x, other=None, bias=None):
        other, kv = x if other is None else other, self.kv_heads or self.heads
        sizes = {"q": (x, self.heads), "k": (other, kv), "v": (other, kv)}
        q, k, v = (
            Dense(n * self.features, use_bias=name in self.biased, name=name)(y).reshape(*y.shape[:2], n, -1)
            for name, (y, n) in sizes.items()
        )
        out = attention(q, k, v, causal=self.causal, bias=bias).reshape(*x.shape[:2], -1)
        return Dense(x.shape[-1], use_bias="o" in self.biased, name="o")(out)


def stack(block: Callable[..., nn.Module], count: int, remat: bool, name: str, **sizes: Any) -> nn.Module:
    """Layers in a scan: carry x, everything else goes to each of them."""
    block = nn.remat(block, prevent_cse=False) if remat else block
    scan = nn.scan(block, {"params": 0}, split_rngs={"params": True}, in_axes=nn.broadcast, length=count)
    return scan(**sizes, name=name)


def token_loss(x: jax.Array, head: jax.Array, labels: jax.Array, tiled: bool, cap: float | None = None) -> jax.Array:
    """The mean over tokens."""
    if tiled:
        return loss_in_tiles(x, head, labels, soft_cap=cap)
    logits = (x @ head).astype(jnp.float32)
    logits = logits if cap is None else cap * jnp.tanh(logits / cap)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


class Gated(nn.Module):
    """An MLP with a gate, without biases."""

    hidden: int

    @nn.compact
    def __call__(self, x):
        inside = nn.silu(Dense(self.hidden, use_bias=False, name="gate")(x))
        inside *= Dense(self.hidden, use_bias=False, name="up")(x)
        return Dense(x.shape[-1], use_bias=False, name="down")(inside)


class Experts(nn.Module):
    """Each token goes to two of eight experts, of which each takes 5/4 of its share of a sequence."""

    hidden: int
    experts: int = 8

    @nn.compact
    def __call__(self, x):
        width, seq = x.shape[-1], x.shape[1]
        room = -(-5 * 2 * seq // (4 * self.experts))
        weight, chosen = jax.lax.top_k(Dense(self.experts, use_bias=False, name="router")(x), 2)
        place = jax.nn.one_hot(chosen, self.experts, dtype=jnp.int32)  # [batch, seq, 2, experts]
        order = (jnp.cumsum(place.sum(2), 1) - 1)[:, :, None] * place
        sent = jax.nn.one_hot(jnp.where(place > 0, order, -1), room, dtype=x.dtype)  # and the room's places
        taken = jnp.einsum("bskec,bsd->ebcd", sent, x)
        kernels = {"gate": (width, self.hidden), "up": (width, self.hidden), "down": (self.hidden, width)}
        gate, up, down = (
            self.param(name, nn.initializers.lecun_normal(), (self.experts, *shape), jnp.bfloat16)
            for name, shape in kernels.items()
        )
        inside = nn.silu(jnp.einsum("ebcd,edh->ebch", taken, gate)) * jnp.einsum("ebcd,edh->ebch", taken, up)
        out = jnp.einsum("ebch,ehd->ebcd", inside, down)
        return jnp.einsum("bskec,bsk,ebcd->bsd", sent, nn.softmax(weight), out)


class DecoderBlock(nn.Module):
    """Of Gemma 2 (a norm after each part too) or of Mixtral (experts)."""

    heads: int
    features: int
    kv_heads: int
    hidden: int
    experts: bool

    @nn.compact
    def __call__(self, x):
        after = (lambda y, name: y) if self.experts else (lambda y, name: RMSNorm(name=name)(y))
        part = Attention(self.heads, self.features, self.kv_heads, causal=True, name="attention")
        x = x + after(part(RMSNorm(name="norm_1")(x)), "norm_2")
        mlp = (Experts if self.experts else Gated)(self.hidden, name="mlp")
        return x + after(mlp(RMSNorm(name="norm_3")(x)), "norm_4"), None


class Decoder(nn.Module):
    """Gemma 2 (arXiv:2408.00118), with a tied table, or Mixtral (arXiv:2401.04088)."""

    vocab: int
    width: int
    layers: int
    block: Mapping[str, Any]
    remat: bool = True
    tiled_loss: bool = False

    @nn.compact
    def __call__(self, batch):
        embed = nn.Embed(self.vocab, self.width, **DTYPES, name="embed")
        x, _ = stack(DecoderBlock, self.layers, self.remat, "layers", **self.block)(embed(batch["tokens"][:, :-1]))
        x, experts = RMSNorm(name="norm")(x), self.block["experts"]
        kernel = nn.initializers.lecun_normal(), (self.width, self.vocab), jnp.bfloat16
        head = self.param("head", *kernel) if experts else embed.embedding.T
        return token_loss(x, head, batch["tokens"][:, 1:], self.tiled_loss, None if experts else 30.0)


class SidedBlock(nn.Module):
    """A block of an encoder, or with `cross` of a decoder: T5's without biases, Whisper's with."""

    heads: int
    features: int
    hidden: int
    cross: bool
    biased: bool

    @nn.compact
    def __call__(self, x, other, bias):
        norm = LayerNorm if self.biased else RMSNorm
        attend = functools.partial(Attention, self.heads, self.features, biased="qvo" if self.biased else "")
        x = x + attend(causal=self.cross, name="self")(norm(name="norm_self")(x), bias=bias)
        if self.cross:
            x = x + attend(name="cross")(norm(name="norm_cross")(x), other)
        inside = Dense(self.hidden, use_bias=self.biased, name="up")(norm(name="norm_mlp")(x))
        inside = nn.gelu(inside) if self.biased else nn.relu(inside)
        return x + Dense(x.shape[-1], use_bias=self.biased, name="down")(inside), None


class T5(nn.Module):
    """T5 11B (table 14 of arXiv:1910.10683): 24 + 24 layers, 128 heads, positions by a table of 32 distances."""

    remat: bool = True
    tiled_loss: bool = False

    @nn.compact
    def __call__(self, batch):
        embed = nn.Embed(32128, 1024, **DTYPES, name="embed")

        def side(name, tokens, other):
            table = self.param(f"{name}_bias", nn.initializers.normal(0.02), (32, 128), jnp.bfloat16)
            apart = jnp.abs(jnp.arange(tokens.shape[1])[:, None] - jnp.arange(tokens.shape[1])[None])
            bias = jnp.moveaxis(table[jnp.minimum(apart, 31)], -1, 0)
            sizes = {"heads": 128, "features": 128, "hidden": 65536, "cross": other is not None, "biased": False}
            x, _ = stack(SidedBlock, 24, self.remat, name, **sizes)(embed(tokens), other, bias)
            return RMSNorm(name=f"{name}_norm")(x)

        encoded = side("encoder", batch["source"], None)
        decoded = side("decoder", batch["tokens"][:, :-1], encoded)
        return token_loss(decoded, embed.embedding.T, batch["tokens"][:, 1:], self.tiled_loss)


class Whisper(nn.Module):
    """Whisper large (table 1 of arXiv:2212.04356): 30 seconds of sound, 448 tokens."""

    remat: bool = True
    tiled_loss: bool = False

    @nn.compact
    def __call__(self, batch):
        width, sizes = 1280, {"heads": 20, "features": 64, "hidden": 5120, "biased": True}
        x = nn.gelu(Conv(width, (3,), name="conv_1")(batch["sound"]))
        x = nn.gelu(Conv(width, (3,), strides=2, name="conv_2")(x))
        angle = jnp.arange(x.shape[1])[:, None] / 10_000 ** jnp.linspace(0, 1, width // 2)
        x = x + jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1).astype(x.dtype)
        x, _ = stack(SidedBlock, 32, self.remat, "encoder", cross=False, **sizes)(x, None, None)
        encoded, embed = LayerNorm(name="encoder_norm")(x), nn.Embed(51865, width, **DTYPES, name="embed")
        tokens = batch["tokens"]
        x = embed(tokens[:, :-1]) + self.param("positions", nn.initializers.normal(), (448, width), jnp.bfloat16)
        x, _ = stack(SidedBlock, 32, self.remat, "decoder", cross=True, **sizes)(x, encoded, None)
        x = LayerNorm(name="decoder_norm")(x)
        return token_loss(x, embed.embedding.T, tokens[:, 1:], self.tiled_loss)


class ViTBlock(nn.Module):
    """A block of an encoder with all biases."""

    heads: int

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        part = Attention(self.heads, width // self.heads, biased="qkvo", name="attention")
        x = x + part(LayerNorm(name="norm_1")(x))
        inside = nn.gelu(Dense(4 * width, name="up")(LayerNorm(name="norm_2")(x)))
        return x + Dense(width, name="down")(inside), None


def class_loss(x: jax.Array, labels: jax.Array) -> jax.Array:
    """Of ImageNet's 1000 classes; called inside of a module."""
    logits = Dense(1000, name="head")(x).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


class ViT(nn.Module):
    """ViT-H/14 (table 1 of arXiv:2010.11929), images of 224 x 224."""

    remat: bool = True

    @nn.compact
    def __call__(self, batch):
        x = Conv(1280, (14, 14), strides=14, name="patch")(batch["images"])
        x = x.reshape(x.shape[0], -1, 1280)
        first = self.param("cls", nn.initializers.zeros, (1, 1, 1280), jnp.bfloat16)
        x = jnp.concatenate([jnp.broadcast_to(first, (x.shape[0], 1, 1280)), x], 1)
        x = x + self.param("positions", nn.initializers.normal(0.02), (1, 257, 1280), jnp.bfloat16)
        x, _ = stack(ViTBlock, 32, self.remat, "layers", heads=16)(x)
        return class_loss(LayerNorm(name="norm")(x)[:, 0], batch["labels"])


class ResNet(nn.Module):
    """ResNet-50 (table 1 of arXiv:1512.03385), images of 224 x 224."""

    @nn.compact
    def __call__(self, batch):
        conv = functools.partial(Conv, use_bias=False)
        x = nn.relu(GroupNorm(name="stem_norm")(conv(64, (7, 7), strides=2, name="stem")(batch["images"])))
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for level, (count, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512))):
            for i in range(count):
                stride, y = 2 if level and not i else 1, x
                for part, (out, size) in enumerate(((width, 1), (width, 3), (4 * width, 1))):
                    y = conv(out, (size, size), strides=stride if part == 1 else 1)(y)
                    y = GroupNorm()(y)
                    y = nn.relu(y) if part < 2 else y
                if not i:
                    x = GroupNorm()(conv(4 * width, (1, 1), strides=stride)(x))
                x = nn.relu(x + y)
        return class_loss(x.mean((1, 2)), batch["labels"])


class UNetBlock(nn.Module):
    """A transformer block of the U-Net, which reads the text."""

    @nn.compact
    def __call__(self, x, text):
        width = x.shape[-1]
        attend = functools.partial(Attention, width // 64, 64, biased="o")
        x = x + attend(name="self")(LayerNorm(name="norm_0")(x))
        x = x + attend(name="cross")(LayerNorm(name="norm_1")(x), text)
        gate, up = jnp.split(Dense(8 * width, name="up")(LayerNorm(name="norm_2")(x)), 2, -1)
        return x + Dense(width, name="down")(nn.gelu(gate) * up), None


class UNet(nn.Module):
    """The U-Net of Stable Diffusion XL (table 1 of arXiv:2307.01952): latents of 128 x 128."""

    remat: bool = True

    @nn.compact
    def __call__(self, batch):
        def resnet(x, time, out):
            y = Conv(out, (3, 3))(nn.silu(GroupNorm()(x)))
            y = y + Dense(out)(nn.silu(time))[:, None, None]
            y = Conv(out, (3, 3))(nn.silu(GroupNorm()(y)))
            return y + (x if x.shape[-1] == out else Conv(out, (1, 1))(x))

        def part(x, time, out, depth, name):
            x = resnet(x, time, out)
            if not depth:
                return x
            y = Dense(out)(GroupNorm()(x).reshape(x.shape[0], -1, out))
            y, _ = stack(UNetBlock, depth, self.remat, name)(y, batch["text"])
            return x + Dense(out)(y).reshape(x.shape)

        angle = batch["time"][:, None] / 10_000 ** jnp.linspace(0, 1, 160)
        time = jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], -1).astype(jnp.bfloat16)
        time = Dense(1280)(nn.silu(Dense(1280)(time))) + Dense(1280)(nn.silu(Dense(1280)(batch["added"])))
        x = Conv(320, (3, 3), name="conv_in")(batch["latents"])
        skips, levels = [x], tuple(enumerate(((320, 0), (640, 2), (1280, 10))))
        for level, (width, depth) in levels:
            for i in range(2):
                x = part(x, time, width, depth, f"down_{level}_{i}")
                skips.append(x)
            if level < 2:
                x = Conv(width, (3, 3), strides=2)(x)
                skips.append(x)
        x = resnet(part(x, time, 1280, 10, "mid"), time, 1280)
        for level, (width, depth) in reversed(levels):
            for i in range(3):
                x = part(jnp.concatenate([x, skips.pop()], -1), time, width, depth, f"up_{level}_{i}")
            if level:
                larger = (x.shape[0], 2 * x.shape[1], 2 * x.shape[2], width)
                x = Conv(width, (3, 3))(jax.image.resize(x, larger, "nearest"))
        out = Conv(4, (3, 3), name="conv_out")(nn.silu(GroupNorm(name="norm_out")(x)))
        return jnp.mean((out.astype(jnp.float32) - batch["noise"]) ** 2)
