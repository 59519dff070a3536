"""What each precision policy sends and holds, read from the train step compiled for 8 H200. No GPU is needed.

python benchmarks/precision.py                  # every policy at stages 1, 2 and 3
python benchmarks/precision.py --stages 3 --policies fp32,flax-bf16
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import sys
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: import from the repository
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import jzero

N, DIM, LAYERS, HEADS, VOCAB, TOKENS = 8, 1024, 6, 8, 4096, 1024


@dataclasses.dataclass(frozen=True)
class Policy:
    """Dtypes of a model and of its state.

    Attributes:
      params: dtype of the params.
      compute: dtype that Flax's layers are asked to compute in; None: that of the params and the input.
      fields: of `ZeroConfig`.
      scaled: the loss is scaled (fp16).
      reduce: of `value_and_grad`.
    """

    params: Any
    compute: Any
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    scaled: bool = False
    reduce: str = "auto"


F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16
POLICIES = {
    "fp32": Policy(F32, F32),
    "fp32 params, layers in bf16": Policy(F32, BF16),
    "fp32 params, layers in bf16, reduce_dtype=fp32": Policy(F32, BF16, {"reduce_dtype": F32}),
    "fp32 params, layers in bf16, reduce_dtype=bf16": Policy(F32, BF16, {"reduce_dtype": BF16}),
    "fp32 params, compute_dtype=bf16": Policy(F32, None, {"compute_dtype": BF16}),
    "fp32, reduce_dtype=bf16": Policy(F32, F32, {"reduce_dtype": BF16}),
    "bf16 params": Policy(BF16, BF16),
    "bf16 params, gather_dtype=int8": Policy(BF16, BF16, {"gather_dtype": "int8"}),
    "bf16 params, gather_dtype=float8_e4m3fn": Policy(BF16, BF16, {"gather_dtype": "float8_e4m3fn"}),
    "bf16 params, reduce_dtype=int8": Policy(BF16, BF16, {"reduce_dtype": "int8"}),
    "bf16 params, gather_dtype=int8, reduce_dtype=int8": Policy(
        BF16, BF16, {"gather_dtype": "int8", "reduce_dtype": "int8"}
    ),
    "bf16 params, update_dtype=int8": Policy(BF16, BF16, {"update_dtype": "int8"}),
    "bf16 params, reduce_dtype=int8, update_dtype=int8": Policy(
        BF16, BF16, {"reduce_dtype": "int8", "update_dtype": "int8"}
    ),
    "bf16 params, reduce_dtype=fp32": Policy(BF16, BF16, {"reduce_dtype": F32}),
    'the same, reduce="microbatch"': Policy(BF16, BF16, {"reduce_dtype": F32}, reduce="microbatch"),
    "bf16 params, moment_dtype=bf16": Policy(BF16, BF16, {"moment_dtype": BF16}),
    "the same, master_dtype=remainder": Policy(BF16, BF16, {"moment_dtype": BF16, "master_dtype": "remainder"}),
    "fp16 params, LossScale": Policy(F16, F16, {}, scaled=True),
}


class Block(nn.Module):
    """A pre-norm transformer block."""

    policy: Policy

    @nn.compact
    def __call__(self, x):
        kw: Any = {"dtype": self.policy.compute, "param_dtype": self.policy.params}
        y = nn.LayerNorm(**kw)(x)
        x = x + nn.MultiHeadDotProductAttention(HEADS, use_bias=False, **kw)(y)
        y = nn.Dense(4 * DIM, **kw)(nn.LayerNorm(**kw)(x))
        return x + nn.Dense(DIM, **kw)(nn.gelu(y))


class GPT(nn.Module):
    """Unrolled blocks under the usual remat, and an output head of its own."""

    policy: Policy

    @nn.compact
    def __call__(self, tokens):
        kw: Any = {"dtype": self.policy.compute, "param_dtype": self.policy.params}
        x = nn.Embed(VOCAB, DIM, **kw)(tokens)
        for i in range(LAYERS):
            x = nn.remat(Block)(self.policy, name=f"block_{i}")(x)
        return nn.Dense(VOCAB, use_bias=False, **kw)(nn.LayerNorm(**kw)(x))


class State(TrainState):
    """A train state with a loss scale, or None in its place."""

    scale: Any = None


def create(policy: Policy) -> State:
    """A fresh state; only its shapes are asked for."""
    model = GPT(policy)
    params = model.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))
    scale = None
    if policy.scaled:
        tx, scale = optax.apply_if_finite(tx, 10**6), jzero.LossScale()
    return State.create(apply_fn=model.apply, params=params, tx=tx, scale=scale)


def compiled(policy: Policy, stage: int):
    """(the compiled step, its plan)."""
    pod = jzero.pod("h200", hosts=1, gpus_per_host=N)
    state = jzero.abstract(lambda: create(policy), stage=stage, mesh=pod.mesh({"data": N}), **policy.fields)
    plan = jzero.plan_of(state)

    def step(state, tokens):
        def loss_fn(params, tokens):
            logits = state.apply_fn({"params": params}, tokens[:, :-1]).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        vg = jzero.value_and_grad(loss_fn, plan, scale=state.scale, reduce=policy.reduce)
        loss, grads = vg(state.params, tokens)
        state = state.apply_gradients(grads=grads)
        if state.scale is not None:
            state = state.replace(scale=state.scale.update(state.opt_state))
        return state, loss

    tokens = jax.ShapeDtypeStruct((N, TOKENS + 1), jnp.int32)
    return pod.compile(jax.jit(step, donate_argnums=0), state, tokens), plan


KINDS = {"all-gather": "gathered"} | dict.fromkeys(("reduce-scatter", "all-reduce", "all-to-all"), "reduced")


def row(name: str, stage: int) -> str:
    """One line of the table; bytes on the wire per parameter, by kind and dtype."""
    program, plan = compiled(POLICIES[name], stage)
    report, memory = jzero.explain(program, plan), program.memory_analysis()
    count = sum(x.size for x in plan.layouts)
    unit = count * (N - 1) / N
    sent: dict[tuple[str, str], float] = collections.defaultdict(float)
    for c in report.collectives:
        sent[KINDS.get(c.op, c.op), c.dtype] += c.total_wire_bytes / unit
    parts = [f"{size:.2f} {kind} {dtype}" for (kind, dtype), size in sorted(sent.items()) if size > 0.01]
    found = {f.kind for f in jzero.findings(program, plan)}
    held, closed = memory.argument_size_in_bytes / count, jzero.estimate(plan).wire / unit
    return (
        f"| {name} | {stage} | {held:.2f} | {memory.temp_size_in_bytes / count:.2f} | "
        f"{report.wire.total / unit:.2f} | {closed:.2f} | {', '.join(parts)} | {', '.join(sorted(found)) or 'none'} |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--stages", default="1,2,3")
    parser.add_argument("--policies", default="all", help="names with commas between, or parts of them")
    args = parser.parse_args()
    names = [n for n in POLICIES if args.policies == "all" or any(p in n for p in args.policies.split(","))]
    print(
        "| policy | stage | held, B / param | temp, B / param | wire, B / param | closed form | of it | findings |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in names:
        for stage in map(int, args.stages.split(",")):
            if stage < 3 and "compute_dtype" in POLICIES[name].fields:
                continue  # a field of stage 3
            print(row(name, stage), flush=True)
    print(
        f"\n{LAYERS} layers, d {DIM}, vocabulary {VOCAB}, {TOKENS} tokens per device, {N} H200; jax {jax.__version__}"
    )


if __name__ == "__main__":
    main()
