"""The GPT of all parts, in Flax linen: it knows nothing of devices, meshes or ZeRO. `torch_gpt.py` has it in torch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from hand import P, train_step

from gpu_parts.machine import Program


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A GPT: pre-norm blocks, learned positions, tied embedding; AdamW after clipping by the global norm."""

    depth: int
    dim: int
    heads: int
    vocab: int = 50304
    seq: int = 1024
    rows: int = 8  # sequences per device
    scan: bool = True
    dtype: str = "bfloat16"
    param_dtype: str = "bfloat16"
    attention: str = "xla"  # or "cudnn"

    @property
    def params(self) -> int:
        """Numbers in the matrices, which is all but 0.2 %."""
        return 12 * self.depth * self.dim**2 + (self.vocab + self.seq) * self.dim

    @property
    def flops_per_token(self) -> int:
        """Of a model's forward and backward pass: 6 per number of a matrix that a token meets, 12 d T per
        layer for the attention, the causal half not left out; what remat computes again is not counted."""
        met = 12 * self.depth * self.dim**2 + self.vocab * self.dim
        return 6 * met + 12 * self.depth * self.dim * self.seq


TINY = Sizes(depth=2, dim=64, heads=2, vocab=256, seq=32, rows=2)
ABOUT_1B = Sizes(depth=18, dim=2048, heads=16)
SMALL = Sizes(depth=8, dim=1024, heads=8, rows=4)


def sizes(config: dict[str, Any], large: Sizes, **fields: Any) -> Sizes:
    """The sizes that a part asks for; in the short form the tiny ones, in the same dtypes and form."""
    if config["tiny"]:
        fields = {k: v for k, v in fields.items() if k not in ("depth", "rows")}
    return dataclasses.replace(TINY if config["tiny"] else large, **fields)


class Block(nn.Module):
    """Causal attention and an MLP."""

    c: Sizes

    @nn.compact
    def __call__(self, x, _=None):
        c = self.c
        types: Any = {"dtype": c.dtype, "param_dtype": c.param_dtype}
        dense = functools.partial(nn.Dense, use_bias=False, **types)
        y = dense(3 * c.dim, name="qkv")(nn.LayerNorm(**types)(x))
        q, k, v = (t.reshape(*t.shape[:2], c.heads, -1) for t in jnp.split(y, 3, -1))
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=c.attention)  # type: ignore
        x = x + dense(c.dim, name="out")(mixed.reshape(x.shape))
        y = dense(4 * c.dim, name="up")(nn.LayerNorm(**types)(x))
        return x + dense(c.dim, name="down")(nn.gelu(y)), None


class Gpt(nn.Module):
    """i32[rows, seq] -> logits f32[rows, seq, vocab]; `region`: what a block is wrapped in."""

    c: Sizes
    region: Callable[..., Any]

    @nn.compact
    def __call__(self, tokens):
        c = self.c
        types: Any = {"dtype": c.dtype, "param_dtype": c.param_dtype}
        small = nn.initializers.normal(0.02)
        embed = nn.Embed(c.vocab, c.dim, embedding_init=small, name="embed", **types)
        x = embed(tokens) + self.param("positions", small, (c.seq, c.dim), jnp.dtype(c.param_dtype)).astype(
            c.dtype
        )
        block = self.region(Block)
        if c.scan:
            split = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            x, _ = nn.scan(block, length=c.depth, **split)(c, name="layers")(x, None)
        else:
            for i in range(c.depth):
                x, _ = block(c, name=f"layer_{i}")(x)
        return embed.attend(nn.LayerNorm(name="norm", **types)(x)).astype(jnp.float32)


def remat(scan: bool) -> Callable[..., Any]:
    """`nn.remat`, as it is usually used."""
    return functools.partial(nn.remat, prevent_cse=not scan)


def creator(c: Sizes, region: Callable[..., Any] | None = None) -> Callable[[], TrainState]:
    """A function that creates the state; model and optimizer are made once, so that all its states are alike."""
    model, tx = Gpt(c, region or remat(c.scan)), chain()

    def create() -> TrainState:
        params = model.init(jax.random.key(0), jnp.zeros((1, c.seq), jnp.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    return create


def chain() -> optax.GradientTransformation:
    """The optimizer."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))


def mesh_of(devices: int) -> jax.sharding.Mesh:
    """A mesh of the first devices."""
    return jax.sharding.Mesh(np.array(jax.local_devices()[:devices]), ("data",))


def batch_of(c: Sizes, mesh: jax.sharding.Mesh) -> dict[str, jax.Array]:
    """Random tokens, `rows` sequences for every device."""
    tokens = np.random.default_rng(0).integers(0, c.vocab, (c.rows * mesh.size, c.seq + 1), dtype=np.int32)
    return {"tokens": jax.device_put(tokens, jax.sharding.NamedSharding(mesh, P("data")))}


def compiled(
    state: Any, batch: Any, step: Callable = train_step, shardings: Any = None, options: Any = None
) -> Any:
    """The step over the state's leaves, compiled; `state` may be abstract.

    Args:
      shardings: `in_shardings` and `out_shardings`, as `hand.by_hand` gives them.
      options: XLA's.
    """
    tree = jax.tree.structure(state)

    def on_leaves(leaves, batch):
        new, loss = step(jax.tree.unflatten(tree, leaves), batch)
        return jax.tree.leaves(new), loss

    said = {k: (jax.tree.leaves(first), rest) for k, (first, rest) in (shardings or {}).items()}
    lowered = jax.jit(on_leaves, donate_argnums=0, **said).lower(jax.tree.leaves(state), batch)
    return lowered.compile(compiler_options=options or None)


def program(name: str, state: Any, batch: Any, step: Callable = train_step, **how: Any) -> Program:
    """A compiled step with its state; `how`: as for `compiled`."""
    return Program(name, compiled(state, batch, step, **how), [jax.tree.leaves(state)], batch)
