"""Peak memory of one step of a 7.5B GPT on 64 H100, per stage, scanned and unrolled, with 2-D and with 3-D kernels.

    python benchmarks/peak.py                                # all twelve cells: about 10 minutes on two cores, no GPU
    python benchmarks/peak.py --stages 2 --layers scan --kernels 3d --depth 12

The model and the step know nothing of jzero: tied embedding, bf16 params, blocks under the usual `nn.remat`, AdamW,
one sequence of 1024 tokens per device. Total is arguments + outputs - aliased + temp of the compiled program.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path[:0] = [str(Path(__file__).parents[1])]

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import jzero

BF16 = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}


class Block(nn.Module):
    """Pre-norm attention and MLP; the projections are `nn.Dense` ("2d") or Flax's own attention module ("3d")."""

    heads: int
    kernels: str

    @nn.compact
    def __call__(self, x, _=None):
        x = x + self.attention(nn.LayerNorm(**BF16)(x))
        y = nn.Dense(4 * x.shape[-1], **BF16)(nn.LayerNorm(**BF16)(x))
        return x + nn.Dense(x.shape[-1], **BF16)(nn.gelu(y)), None

    def attention(self, y):
        """Causal, softmax over the scores."""
        causal = nn.make_causal_mask(jnp.ones(y.shape[:2]))
        if self.kernels == "3d":
            return nn.MultiHeadDotProductAttention(num_heads=self.heads, **BF16)(y, mask=causal)
        q, k, v = (
            t.reshape(*t.shape[:2], self.heads, -1)
            for t in jnp.split(nn.Dense(3 * y.shape[-1], **BF16)(y), 3, -1)
        )
        mixed = nn.dot_product_attention(q, k, v, mask=causal, dtype=jnp.bfloat16)
        return nn.Dense(y.shape[-1], **BF16)(mixed.reshape(y.shape))


class Gpt(nn.Module):
    """A decoder with learned positions and a tied embedding."""

    depth: int
    dim: int
    heads: int
    vocab: int
    seq: int
    scan: bool
    kernels: str

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(self.vocab, self.dim, **BF16)
        positions = self.param("positions", nn.initializers.normal(0.02), (self.seq, self.dim), jnp.bfloat16)
        x = embed(tokens) + positions
        block = nn.remat(Block, prevent_cse=not self.scan)
        if self.scan:
            stack = nn.scan(
                block, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.depth
            )
            x, _ = stack(self.heads, self.kernels, name="blocks")(x, None)
        else:
            for i in range(self.depth):
                x, _ = block(self.heads, self.kernels, name=f"block_{i}")(x)
        return embed.attend(nn.LayerNorm(**BF16)(x))


def create(model: Gpt, tx):
    """A fresh TrainState."""
    params = model.init(jax.random.key(0), jnp.zeros((1, model.seq), jnp.int32))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def train_step(state, batch):
    """The user's step."""

    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def compiled(model: Gpt, stage: int, hosts: int, clip: bool, options=None):
    """The plan, the program, its report and the seconds that the compiler took."""
    tx = optax.adamw(3e-4)
    tx = optax.chain(optax.clip_by_global_norm(1.0), tx) if clip else tx
    pod = jzero.pod("h100", hosts=hosts)
    state = jzero.abstract(lambda: create(model, tx), stage=stage, mesh=pod.mesh({"data": 8 * hosts}))
    plan = jzero.plan_of(state)
    tokens = jax.ShapeDtypeStruct((8 * hosts, model.seq), jnp.int32)
    start = time.perf_counter()
    program = pod.compile(
        train_step, state, {"x": tokens, "y": tokens}, donate_argnums=0, compiler_options=options
    )
    return plan, program, jzero.explain(program, plan), time.perf_counter() - start


def collectives(report) -> str:
    """How many collectives of each kind a step runs, those in loops counted once per trip."""
    counts: dict[str, int] = {}
    for c in report.collectives:
        counts[c.op] = counts.get(c.op, 0) + c.count * c.trips
    return ", ".join(f"{n} {op}" for op, n in sorted(counts.items()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--layers", nargs="+", default=["unrolled", "scan"], choices=["unrolled", "scan"])
    parser.add_argument("--kernels", nargs="+", default=["2d", "3d"], choices=["2d", "3d"])
    parser.add_argument("--depth", type=int, default=36)
    parser.add_argument("--dim", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=50304)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--hosts", type=int, default=8, help="of 8 H100 each")
    parser.add_argument("--clip", action="store_true", help="clip_by_global_norm before AdamW")
    parser.add_argument("--save", type=Path, help="folder for the programs' text")
    parser.add_argument("--options", nargs="*", default=[], help="XLA options, name=value")
    args = parser.parse_args()
    options = {
        k: {"true": True, "false": False}.get(v, v) for k, v in (o.split("=", 1) for o in args.options)
    } or None
    print(
        "| stage | layers | kernels | total | states | temp | bytes/param | wire | collectives per step | compiled in |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for stage in args.stages:
        for kernels in args.kernels:
            for layers in args.layers:
                model = Gpt(args.depth, args.dim, args.heads, args.vocab, args.seq, layers == "scan", kernels)
                plan, program, report, seconds = compiled(model, stage, args.hosts, args.clip, options)
                held, count = report.memory, plan.param_bytes // 2
                print(
                    f"| {stage} | {layers} | {kernels} | {held.total / 1e9:.2f} GB | {held.arguments / 1e9:.2f} GB | "
                    f"{held.temp / 1e9:.2f} GB | {held.temp / count:.2f} | {report.wire.psi:.3f} Psi | "
                    f"{collectives(report)} | {seconds:.0f} s |",
                    flush=True,
                )
                if args.save:
                    args.save.mkdir(parents=True, exist_ok=True)
                    (args.save / f"s{stage}-{layers}-{kernels}.hlo").write_text(program.as_text())
                    (args.save / f"s{stage}-{layers}-{kernels}.txt").write_text(str(report))
    print(
        f"\n{count / 1e9:.3f}B parameters, bf16 with fp32 masters, AdamW, {8 * args.hosts} H100; jax {jax.__version__}."
    )


if __name__ == "__main__":
    main()
