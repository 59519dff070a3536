"""Peak memory of one step of a 7.5B GPT on 64 H100, per stage, scanned and unrolled, with 2-D and with 3-D kernels.

    python benchmarks/peak.py                                # all twelve cells: about 10 minutes on two cores, no GPU
    python benchmarks/peak.py --stages 2 --layers scan --kernels 3d --depth 12
    python benchmarks/peak.py --stages 3 --layers unrolled --kernels 2d --depth 12 --prefetch 1 2 4 8
    python benchmarks/peak.py --model moe --depth 4 --dim 2048          # 8 experts, top-2; --model conv: convolutions
    python benchmarks/peak.py --stages 2 --layers unrolled --kernels 3d --seq 128 --clip --options plan   # few tokens

The model and the step know nothing of jzero: tied embedding, bf16 params, blocks under the usual `nn.remat`, AdamW,
one sequence of 1024 tokens per device (conv: 4 images of 64 x 64). Total is arguments + outputs - aliased + temp of
the compiled program; ideal is the model states of the stage, gradients counted in.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path[:0] = [str(Path(__file__).parents[1])]

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import jzero

BF16 = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}


class Experts(nn.Module):
    """A mixture of MLPs, two per token, each expert with room for 1.25 times its share of a sequence's tokens."""

    count: int

    @nn.compact
    def __call__(self, x):
        rows, seq, dim = x.shape
        room = seq * 2 * 5 // (4 * self.count)
        gates = nn.softmax(nn.Dense(self.count, use_bias=False, **BF16)(x).astype(jnp.float32))
        weights, chosen = jax.lax.top_k(gates, 2)  # [rows, seq, 2]
        weights = weights / weights.sum(-1, keepdims=True)
        one_hot = jax.nn.one_hot(chosen, self.count)  # [rows, seq, 2, experts]
        flat = one_hot.swapaxes(1, 2).reshape(rows, 2 * seq, self.count)  # first choices before second ones
        place = (jnp.cumsum(flat, 1) * flat - 1).reshape(rows, 2, seq, self.count).swapaxes(1, 2)
        slot = jax.nn.one_hot(
            place, room, dtype=jnp.bfloat16
        )  # [rows, seq, 2, experts, room]; no slot: all zero
        combine = (slot * weights.astype(jnp.bfloat16)[..., None, None]).sum(2)
        init = nn.initializers.lecun_normal(batch_axis=(0,))
        up = self.param("up", init, (self.count, dim, 4 * dim), jnp.bfloat16)
        down = self.param("down", init, (self.count, 4 * dim, dim), jnp.bfloat16)
        y = jnp.einsum("bsec,bsd->ebcd", slot.sum(2), x)
        y = jnp.einsum("ebcf,efd->ebcd", nn.gelu(jnp.einsum("ebcd,edf->ebcf", y, up)), down)
        return jnp.einsum("bsec,ebcd->bsd", combine, y)


class Block(nn.Module):
    """Pre-norm attention and MLP; the projections are `nn.Dense` ("2d") or Flax's own attention module ("3d")."""

    heads: int
    kernels: str
    experts: int

    @nn.compact
    def __call__(self, x, _=None):
        x = x + self.attention(nn.LayerNorm(**BF16)(x))
        y = nn.LayerNorm(**BF16)(x)
        if self.experts:
            return x + Experts(self.experts)(y), None
        y = nn.Dense(4 * x.shape[-1], **BF16)(y)
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
    """A decoder with learned positions and a tied embedding; with `experts`, a mixture of them in every block."""

    depth: int
    dim: int
    heads: int
    vocab: int
    seq: int
    scan: bool
    kernels: str
    experts: int = 0
    remat: Callable[..., type] = nn.remat

    def batch(self, devices):
        """One sequence per device."""
        tokens = jax.ShapeDtypeStruct((devices, self.seq), jnp.int32)
        return {"x": tokens, "y": tokens}

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(self.vocab, self.dim, **BF16)
        positions = self.param("positions", nn.initializers.normal(0.02), (self.seq, self.dim), jnp.bfloat16)
        x = embed(tokens) + positions
        block = self.remat(Block, prevent_cse=not self.scan)
        if self.scan:
            stack = nn.scan(
                block, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.depth
            )
            x, _ = stack(self.heads, self.kernels, self.experts, name="blocks")(x, None)
        else:
            for i in range(self.depth):
                x, _ = block(self.heads, self.kernels, self.experts, name=f"block_{i}")(x)
        return embed.attend(nn.LayerNorm(**BF16)(x))


class ConvBlock(nn.Module):
    """Two 3 x 3 convolutions round a residual."""

    @nn.compact
    def __call__(self, x, _=None):
        y = x
        for _ in range(2):
            y = nn.Conv(x.shape[-1], (3, 3), **BF16)(nn.gelu(nn.LayerNorm(**BF16)(y)))
        return x + y, None


class Conv(nn.Module):
    """A residual net: three groups of `depth / 3` blocks; dim / 4, dim / 2, dim channels on 16, 8, 4 pixels squared."""

    depth: int
    dim: int
    scan: bool

    def batch(self, devices):
        """Four images per device."""
        rows = 4 * devices
        images = jax.ShapeDtypeStruct((rows, 64, 64, 3), jnp.bfloat16)
        return {"x": images, "y": jax.ShapeDtypeStruct((rows,), jnp.int32)}

    @nn.compact
    def __call__(self, x):
        block = nn.remat(ConvBlock, prevent_cse=not self.scan)
        for group, width in enumerate((self.dim // 4, self.dim // 2, self.dim)):
            step = 2 if group else 4
            x = nn.Conv(width, (step, step), (step, step), **BF16)(x)
            if self.scan:
                variables = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
                x, _ = nn.scan(block, length=self.depth // 3, **variables)(name=f"group_{group}")(x, None)
            else:
                for i in range(self.depth // 3):
                    x, _ = block(name=f"block_{group}_{i}")(x)
        return nn.Dense(1000, **BF16)(nn.LayerNorm(**BF16)(x.mean((1, 2))))


def create(model: Gpt | Conv, tx):
    """A fresh TrainState."""
    example = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), model.batch(1)["x"])
    params = model.init(jax.random.key(0), example)["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def train_step(state, batch):
    """The user's step."""

    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def compiled(
    model: Gpt | Conv, stage: int, hosts: int, clip: bool, options: Sequence[str] = (), buffers: bool = False,
    **fields: Any,
) -> tuple[Any, Any, Any, float]:
    """The plan, the program, its report and the seconds that the compiler took.

    Args:
      options: XLA's, each "name=value"; or "plan", the plan's own.
      buffers: as of `pod.compile`.
      fields: more of the config.
    """
    tx = optax.adamw(3e-4)
    tx = optax.chain(optax.clip_by_global_norm(1.0), tx) if clip else tx
    pod = jzero.pod("h100", hosts=hosts)
    mesh = pod.mesh({"data": 8 * hosts})
    state = jzero.abstract(lambda: create(model, tx), stage=stage, mesh=mesh, **fields)
    plan = jzero.plan_of(state)
    own = plan.compiler_options if "plan" in options else {}
    for name, value in (o.split("=", 1) for o in options if o != "plan"):
        own = own | {name: {"true": True, "false": False}.get(value, value)}
    start = time.perf_counter()
    program = pod.compile(
        train_step, state, model.batch(8 * hosts), donate_argnums=0, compiler_options=own or None, buffers=buffers
    )
    return plan, program, jzero.explain(program, plan), time.perf_counter() - start


def collectives(report) -> str:
    """How many collectives of each kind a step runs, those in loops counted once per trip."""
    counts: dict[str, int] = {}
    for c in report.collectives:
        counts[c.op] = counts.get(c.op, 0) + c.count * c.trips
    return ", ".join(f"{n} {op}" for op, n in sorted(counts.items()))


def gathered_ahead(report) -> str:
    """Bytes of weights that a step gathers beside other work, of all that it gathers."""
    gathers = [c for c in report.collectives if c.op == "all-gather"]
    total, ahead = (sum(c.bytes * c.count * c.trips for c in gathers if c.overlapped or n) for n in (1, 0))
    return f"{ahead / 1e9:.2f} of {total / 1e9:.2f} GB"


def ideal(stage: int, count: int, n: int) -> float:
    """Bytes of the model states: 2 for a param, 2 for its gradient, 12 for master and moments; / N where split."""
    split = {0: 0, 1: 12, 2: 14, 3: 16}[stage]
    return (16 - split + split / n) * count


def build(args, layers: str, kernels: str) -> Gpt | Conv:
    """The model that the command line names."""
    if args.model == "conv":
        return Conv(args.depth, args.dim, layers == "scan")
    experts = 8 if args.model == "moe" else 0
    return Gpt(args.depth, args.dim, args.heads, args.vocab, args.seq, layers == "scan", kernels, experts)


def arguments() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="gpt", choices=["gpt", "moe", "conv"])
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--layers", nargs="+", default=["unrolled", "scan"], choices=["unrolled", "scan"])
    parser.add_argument("--kernels", nargs="+", default=["2d", "3d"], choices=["2d", "3d"])
    parser.add_argument("--depth", type=int, default=36)
    parser.add_argument("--dim", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=50304)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--hosts", type=int, default=8, help="of 8 H100 each")
    parser.add_argument(
        "--prefetch", type=int, nargs="+", default=[1], help="stage 3: uses ahead that a weight is gathered"
    )
    parser.add_argument("--offload", choices=["host"], help="optimizer state in host memory")
    parser.add_argument("--clip", action="store_true", help="clip_by_global_norm before AdamW")
    parser.add_argument("--min-shard-bytes", type=int, help="smaller leaves stay whole")
    parser.add_argument("--bucket-bytes", type=int)
    parser.add_argument("--save", type=Path, help="folder for the programs' text and pages (docs/report.md)")
    parser.add_argument("--options", nargs="*", default=[], help="of XLA, name=value; `plan`: the plan's own")
    return parser.parse_args()


def main() -> None:
    os.environ["JZERO_POD_CACHE"] = "off"  # the seconds of compiling are printed
    args = arguments()
    print(
        "| stage | layers | kernels | prefetch | total | ideal | total / ideal | held | temp | temp / param | wire | "
        "gathered ahead | collectives per step | compiled in |"
    )
    print(f"|{'---|' * 14}")
    own = {"min_shard_bytes": args.min_shard_bytes, "bucket_bytes": args.bucket_bytes}
    own = {name: value for name, value in own.items() if value is not None}
    cells = itertools.product(args.stages, args.kernels, args.layers, args.prefetch)
    for stage, kernels, layers, prefetch in cells:
        model = build(args, layers, kernels)
        plan, program, report, seconds = compiled(
            model, stage, args.hosts, args.clip, args.options, bool(args.save), prefetch=prefetch, offload=args.offload,
            **own,
        )  # fmt: skip
        held, count = report.memory, plan.param_bytes // 2
        least = ideal(stage, count, 8 * args.hosts)
        print(
            f"| {stage} | {layers} | {kernels} | {prefetch} | {held.total / 1e9:.3f} GB | {least / 1e9:.3f} GB | "
            f"{held.total / least:.3f} | {held.arguments / 1e9:.3f} GB | {held.temp / 1e9:.3f} GB | "
            f"{held.temp / count:.2f} B | {report.wire.psi:.3f} Psi | {gathered_ahead(report)} | "
            f"{collectives(report)} | {seconds:.0f} s |",
            flush=True,
        )
        if args.save:
            args.save.mkdir(parents=True, exist_ok=True)
            name = f"{args.model}-s{stage}-{layers}-{kernels}-d{args.depth}-n{8 * args.hosts}-t{args.seq}-p{prefetch}"
            (args.save / f"{name}.hlo").write_text(program.as_text())
            (args.save / f"{name}.txt").write_text(str(report))
            jzero.write_html(args.save / f"{name}.html", program, plan, title=name)
    print(
        f"\n{count / 1e9:.3f}B parameters, bf16 with fp32 masters, AdamW, {8 * args.hosts} H100; jax {jax.__version__}."
    )


if __name__ == "__main__":
    main()
