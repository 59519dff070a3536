"""Memory and wire of a loss over a large vocabulary, plain and in tiles, compiled for H200 GPUs.

    python benchmarks/tiles.py loss                 # the loss alone: hidden states and head in, gradients out
    python benchmarks/tiles.py layer --ways plain layers   # an MLP alone, under remat and in tiles
    python benchmarks/tiles.py weights --hosts 8 --stages 3 --ways plain pieces whole tiled   # 256000 x 8192
    python benchmarks/tiles.py step                 # a whole step of the model, each block under remat, AdamW
    python benchmarks/tiles.py --help

The shapes are those of Llama-3 8B: 4096 features, a vocabulary of 128256, bf16; each device has one sequence. No GPU is
needed, and none has run these programs. Temp and wire are bytes of one device in one step; "own" is temp without the
gathered head and, in tiles, its fp32 gradient, if the head is whole.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import jzero  # noqa: I001  (before jax)
from jzero import sharding
from jzero.config import WHOLE_BYTES
from jzero.proof.fitting.flops import flops_of
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import tyro
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

QUERIES = 512
BF16 = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16, "use_bias": False}


@dataclasses.dataclass(frozen=True)
class Config:
    """What is compiled."""

    part: tyro.conf.Positional[Literal["loss", "layer", "weights", "step"]] = "loss"
    hosts: tuple[int, ...] = (0, 8)
    """Hosts of 8 GPUs; 0 is one GPU."""
    tokens: tuple[int, ...] = (8192, 32768)
    """Per device."""
    stages: Annotated[tuple[int, ...], tyro.conf.arg(help="ZeRO stages")] = (2, 3)
    width: int = 4096
    classes: int = 128256
    layers: int = 32
    ways: tuple[str, ...] = ("plain", "tiled", "recompute")
    """Of the loss; "layers": tiled, and each MLP in tiles too. Of weights: "plain" and "pieces" with a plain loss,
    "whole" and "tiled" with one in tiles, whose head is whole or in pieces."""


def attention(q, k, v):
    """Causal attention of [batch, tokens, heads, features] whose scores are never whole, as in cuDNN's."""
    rows, tokens, heads, size = q.shape
    groups, count = k.shape[2], tokens // QUERIES

    @jax.checkpoint
    def one(args):
        i, q, k, v = args  # [batch, heads of a group, queries, size], [batch, tokens, size]
        scores = jnp.einsum("bhqd,bkd->bhqk", q, k, preferred_element_type=jnp.float32) / size**0.5
        seen = jnp.arange(tokens) <= (i * QUERIES + jnp.arange(QUERIES))[:, None]
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e30)).astype(v.dtype)
        return jnp.einsum("bhqk,bkd->bhqd", weights, v)

    def group(args):
        q, k, v = args
        cut = jnp.moveaxis(q.reshape(rows, count, QUERIES, heads // groups, size), (1, 3), (0, 2))
        out = jax.lax.map(lambda row: one((*row, k, v)), (jnp.arange(count), cut))
        return jnp.moveaxis(out, (0, 2), (1, 3)).reshape(rows, tokens, heads // groups, size)

    q = jnp.moveaxis(q.reshape(rows, tokens, groups, heads // groups, size), 2, 0)
    return jnp.moveaxis(jax.lax.map(group, (q, jnp.moveaxis(k, 2, 0), jnp.moveaxis(v, 2, 0))), 0, 2)


class Block(nn.Module):
    """As in Llama-3 8B: 32 heads, 8 of keys, a gated MLP of 14336 features."""

    width: int
    tiled: bool

    @nn.compact
    def __call__(self, x, _=None):
        y, head = nn.RMSNorm(**{k: BF16[k] for k in ("dtype", "param_dtype")})(x), self.width // 32
        q, k, v = (
            nn.Dense(n * head, name=name, **BF16)(y).reshape(*y.shape[:2], n, head)
            for n, name in ((32, "q"), (8, "k"), (8, "v"))
        )
        x = x + nn.Dense(self.width, name="out", **BF16)(attention(q, k, v).reshape(x.shape))
        mlp = jzero.tiled(Mlp) if self.tiled else Mlp
        return x + mlp(self.width, name="mlp")(x), None


class Mlp(nn.Module):
    """A norm and a gated MLP."""

    width: int

    @nn.compact
    def __call__(self, x):
        y = nn.RMSNorm(**{k: BF16[k] for k in ("dtype", "param_dtype")})(x)
        wide = int(3.5 * self.width)
        y = nn.silu(nn.Dense(wide, name="gate", **BF16)(y)) * nn.Dense(wide, name="up", **BF16)(y)
        return nn.Dense(self.width, name="down", **BF16)(y)


class Trunk(nn.Module):
    """Token ids to hidden states."""

    config: Config
    tiled: bool

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(self.config.classes, self.config.width, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)(tokens)
        block = nn.remat(Block, prevent_cse=False)
        scan = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.config.layers)
        return scan(self.config.width, self.tiled)(x, None)[0]


def loss_of(way: str, hidden, head, labels):
    """The mean cross-entropy."""
    if way in ("plain", "pieces"):
        logits = (hidden @ head).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return jzero.tiled_loss(hidden, head, labels, recompute=True if way == "recompute" else None)


def main(config: Config) -> None:
    """Prints a line for each program."""
    print("GPUs stage tokens way            temp GB  own GB  wire / Psi  TFLOP")
    for hosts in config.hosts:
        pod = jzero.pod("h200", hosts=max(hosts, 1), **({} if hosts else {"gpus_per_host": 1}))
        for stage in config.stages:
            for tokens in config.tokens:
                for way in config.ways:
                    print(line(config, pod, stage, tokens, way), flush=True)


def made(config: Config, pod: jzero.Pod, stage: int, tokens: int, way: str) -> tuple[jzero.Plan, Any, tuple]:
    """The plan, the function that is compiled, and its arguments."""
    n = len(pod.devices)
    sharding.WHOLE_BYTES = 2**60 if way in ("plain", "whole") else WHOLE_BYTES
    if config.part == "weights":
        config = dataclasses.replace(config, width=8192, classes=256000)
    mesh, trunk = pod.mesh({"data": n}), Trunk(config, way == "layers")

    def create():
        if config.part == "layer":
            params = Mlp(config.width).init(jax.random.key(0), jnp.zeros((1, 8, config.width), jnp.bfloat16))["params"]
            return TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-4))
        params = {"head": jnp.zeros((config.width, config.classes), jnp.bfloat16)}
        if config.part == "weights":
            params["embed"] = jnp.zeros((config.classes, config.width), jnp.bfloat16)
        if config.part == "step":
            params["trunk"] = trunk.init(jax.random.key(0), jnp.zeros((1, QUERIES), int))["params"]
        return TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-4))

    state = jzero.abstract(create, stage=stage, mesh=mesh)
    plan, rows = jzero.plan_of(state), NamedSharding(mesh, P("data"))
    ids = jax.ShapeDtypeStruct((n, tokens), jnp.int32, sharding=rows)
    hidden = jax.ShapeDtypeStruct((n, tokens, config.width), jnp.bfloat16, sharding=rows)

    def of_loss(params, hidden, labels):
        return loss_of(way, hidden, params["head"], labels)

    def layer(params, hidden, labels):
        mlp = jzero.tiled(Mlp) if way == "layers" else nn.remat(Mlp)

        def fn(params, hidden):
            return (mlp(config.width).apply({"params": params}, hidden).astype(jnp.float32) ** 2).mean()

        grads = jax.grad(jzero.gather_on_use(fn, plan), argnums=(0, 1))(params, hidden)
        shards = plan.tree.unflatten([NamedSharding(mesh, x.state) for x in plan.layouts])
        return jax.lax.with_sharding_constraint(grads[0], shards), grads[1]

    def alone(params, hidden, labels):
        loss, grads = jax.value_and_grad(jzero.gather_on_use(of_loss, plan), argnums=(0, 1))(params, hidden, labels)
        shard = NamedSharding(mesh, plan.layouts[0].state)
        grads[0]["head"] = jax.lax.with_sharding_constraint(grads[0]["head"], shard)
        return loss, grads

    def of_vocabulary(state, ids):
        def fn(params, ids):
            return loss_of(way, jnp.tanh(params["embed"][ids]), params["head"], ids)

        loss, grads = jzero.value_and_grad(fn, plan)(state.params, ids)
        return state.apply_gradients(grads=grads), loss

    def step(state, ids):
        def fn(params, ids):
            return of_loss(params, trunk.apply({"params": params["trunk"]}, ids), ids)

        loss, grads = jzero.value_and_grad(fn, plan)(state.params, ids)
        return state.apply_gradients(grads=grads), loss

    fn = {"loss": alone, "layer": layer, "weights": of_vocabulary, "step": step}[config.part]
    args = (state, ids) if config.part in ("weights", "step") else (state.params, hidden, ids)
    return plan, fn, args


def line(config: Config, pod: jzero.Pod, stage: int, tokens: int, way: str) -> str:
    """One program. Its FLOPs are those at stage 0, where all matmuls stand in the trace."""
    n, (plan, fn, args) = len(pod.devices), made(config, pod, stage, tokens, way)
    program = pod.compile(fn, *args, donate_argnums=0 if config.part in ("weights", "step") else ())
    report = jzero.explain(program, plan)
    large = config.part == "weights" or 2 * config.width * config.classes > WHOLE_BYTES
    pieces = way == "tiled" and stage == 3 and large
    head = config.width * config.classes if config.part in ("loss", "step") and not pieces else 0
    own = report.memory.temp - 2 * head * (n > 1 and stage == 3) - 4 * head * (way != "plain")
    wire = report.wire.total / plan.param_bytes / ((n - 1) / n) if n > 1 else 0
    _, at_0, like = made(config, pod, 0, tokens, "recompute" if pieces else way)
    flops = flops_of(jax.make_jaxpr(at_0)(*like).jaxpr) / 1e12 / n
    temp = report.memory.temp
    return f"{n:4} {stage:5} {tokens:6} {way:10} {temp / 1e9:11.2f} {own / 1e9:7.2f} {wire:10.3f} {flops:6.1f}"


if __name__ == "__main__":
    main(tyro.cli(Config))
