"""What small models send in a step, in units of Psi, beside the closed form: loops, odd device counts, dtypes.

    python benchmarks/wire.py                  # about 5 minutes on two cores, no GPU
    python benchmarks/wire.py loops            # 1 minute
    python benchmarks/wire.py devices dtypes
    python benchmarks/wire.py grid --out page.md     # 210 programs, 45 minutes; begun again it goes on from the page
    python benchmarks/wire.py grid --closed          # their closed forms alone, 8 minutes

Compiled for H200. Psi is (N-1)/N times the bytes of all params: 2, 2 and 3 at stages 1, 2 and 3. `loops`: a weight that
every round of a loop uses. `devices`: counts that are not a power of two. `dtypes`: 16-bit
params with fp32 compute, and the reverse.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import jzero  # noqa: I001  (before jax)
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from train.model import GPT, Model

DIM, SEQ = 512, 128


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and its batch.

    Attributes:
      apply: `apply(params, x)`.
      init: makes the params.
      loss: of what `apply` returns, and the batch.
      example: the shape of one example, and its dtype.
      rows: of the batch, per device.
    """

    apply: Callable[..., Any]
    init: Callable[[], Any]
    loss: Callable[[Any, Any], Any]
    example: jax.ShapeDtypeStruct
    rows: int = 2


def squares(out, x):
    """A loss of activations."""
    del x
    return (out.astype(jnp.float32) ** 2).mean()


def step_of(case: Case) -> Callable[..., Any]:
    """The train step."""

    def step(state, x):
        loss, grads = jax.value_and_grad(lambda p: case.loss(state.apply_fn(p, x), x))(state.params)
        return state.apply_gradients(grads=grads), loss

    return step


def prepared(
    case: Case, stage: int, n: int = 8, tx: optax.GradientTransformation | None = None, **fields: Any
):
    """A pod of `n` H200, the abstract state and batch of a case, and its estimate; AdamW unless another is given."""
    hosts = max(n // 8, 1) if n % 8 == 0 or n < 8 else n // 4
    pod = jzero.pod("h200", hosts=hosts, gpus_per_host=n // hosts)

    def create():
        return TrainState.create(apply_fn=case.apply, params=case.init(), tx=tx or optax.adamw(1e-3))

    state = jzero.abstract(
        create, stage=stage, mesh=pod.mesh({"data": n}), **{"min_shard_bytes": 0, **fields}
    )
    batch = jax.ShapeDtypeStruct((case.rows * n, *case.example.shape), case.example.dtype)
    uses = jzero.param_uses(step_of(case), state, batch)
    return pod, state, batch, jzero.estimate(jzero.plan_of(state), tx=state.tx, uses=uses)


def compiled(case: Case, stage: int, n: int = 8, **fields: Any):
    """The step compiled, its plan and its estimate; the arguments are those of `prepared`."""
    pod, state, batch, closed = prepared(case, stage, n, **fields)
    plan = jzero.plan_of(state)
    step = functools.partial(pod.compile, step_of(case), state, batch, donate_argnums=0, plan=plan)
    try:
        program = step()
    except jax.errors.JaxRuntimeError as error:  # XLA's Triton finds no tiles for some matmuls 96 wide
        if "output tile sizes" not in str(error):
            raise
        program = step(compiler_options={"xla_gpu_enable_triton_gemm": False})
    return program, plan, closed


def recurrent(rounds: int = 32, *, remat: bool = False) -> Case:
    """Rounds of `tanh(h @ w)`."""

    def apply(params, x):
        def body(h, _):
            return jnp.tanh(h @ params["w"]), None

        return jax.lax.scan(jax.checkpoint(body) if remat else body, x, None, length=rounds)[0]

    return Case(
        apply, lambda: {"w": jnp.ones((DIM, DIM))}, squares, jax.ShapeDtypeStruct((DIM,), jnp.float32)
    )


def gated(layers: int = 3) -> Case:
    """Gated MLPs in remat regions, whose two input kernels are one param, `w[0]` and `w[1]` (Gemma's einsum)."""

    @jax.checkpoint
    def block(x, w):
        return x + (jax.nn.gelu(x @ w["in"][0]) * (x @ w["in"][1])) @ w["out"]

    def apply(params, x):
        for w in params:
            x = block(x, w)
        return x

    def init():
        return [{"in": jnp.ones((2, DIM, 4 * DIM)), "out": jnp.ones((4 * DIM, DIM))} for _ in range(layers)]

    return Case(apply, init, squares, jax.ShapeDtypeStruct((SEQ, DIM), jnp.float32))


def nested() -> Case:
    """Four rounds in each of three rounds that are rematerialized."""

    def apply(params, x):
        @jax.checkpoint
        def outer(h, _):
            h, _ = jax.lax.scan(lambda h, _: (jnp.tanh(h @ params["w"]), None), h, None, length=4)
            return h @ params["v"], None

        return jax.lax.scan(outer, x, None, length=3)[0]

    one = jax.ShapeDtypeStruct((DIM,), jnp.float32)
    return Case(apply, lambda: {"w": jnp.ones((DIM, DIM)), "v": jnp.ones((DIM, DIM))}, squares, one)


def flat() -> Case:
    """The same in one loop."""

    def apply(params, x):
        @jax.checkpoint
        def body(h, i):
            h = jnp.tanh(h @ params["w"])
            return jnp.where(i % 4 == 3, h @ params["v"], h), None

        return jax.lax.scan(body, x, jnp.arange(12))[0]

    return dataclasses.replace(nested(), apply=apply)


def lstm(steps: int = 64, **dtypes: Any) -> Case:
    """An LSTM of Flax."""
    model = nn.RNN(nn.OptimizedLSTMCell(DIM, **dtypes))
    one = jax.ShapeDtypeStruct((steps, DIM), jnp.float32)
    return Case(model.apply, lambda: model.init(jax.random.key(0), jnp.zeros((1, 2, DIM))), squares, one)


def table(way: str, rounds: int = 16, rows: int = 4096, dim: int = 256) -> Case:
    """Rounds that look up rows of a table, which the round before chose: "in" the loop, "before" it, or "one-hot"."""

    def apply(params, x):
        def body(carry, chosen):
            h, mine = carry
            row = chosen
            if way == "in":
                row = params["table"][mine]
            if way == "one-hot":
                row = jax.nn.one_hot(mine, rows) @ params["table"]
            h = jnp.tanh(h @ params["w"] + row)
            return (h, jnp.argmax(h, -1).astype(jnp.int32)), None

        h = jnp.zeros((x.shape[0], dim))
        before = params["table"][x].swapaxes(0, 1) if way == "before" else jnp.zeros(rounds)
        return jax.lax.scan(body, (h, x[:, 0]), before)[0][0]

    one = jax.ShapeDtypeStruct((rounds,), jnp.int32)
    return Case(apply, lambda: {"w": jnp.ones((dim, dim)), "table": jnp.ones((rows, dim))}, squares, one, 4)


class ChunkedHead(nn.Module):
    """Cross-entropy in checkpointed chunks of the tokens, so that the logits of all are never there."""

    chunks: int = 8
    vocab: int = 2048
    dim: int = 256

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(self.vocab, self.dim)(tokens)
        for _ in range(2):
            up = nn.relu(nn.Dense(4 * self.dim, use_bias=False)(x))
            x = x + nn.Dense(self.dim, use_bias=False)(up)
        head = self.param("head", nn.initializers.lecun_normal(), (self.dim, self.vocab))
        rows = tokens.shape[0]
        xs = x.reshape(rows, self.chunks, -1, self.dim).swapaxes(0, 1)
        ys = jnp.roll(tokens, -1, 1).reshape(rows, self.chunks, -1).swapaxes(0, 1)

        @jax.checkpoint
        def chunk(total, xy):
            losses = optax.softmax_cross_entropy_with_integer_labels(xy[0] @ head, xy[1])
            return total + losses.sum(), None

        return jax.lax.scan(chunk, 0.0, (xs, ys))[0] / tokens.size


def chunked() -> Case:
    """The same."""
    model, one = ChunkedHead(), jax.ShapeDtypeStruct((64,), jnp.int32)
    return Case(
        model.apply,
        lambda: model.init(jax.random.key(0), jnp.zeros((1, 64), jnp.int32)),
        lambda out, x: out,
        one,
    )


def gpt(width: int = 128, layers: int = 4, heads: int = 4, **fields: Any) -> Case:
    """The GPT of train/, on bytes."""
    model = GPT(Model(width=width, layers=layers, heads=heads, seq=SEQ, **fields))

    def loss(logits, x):
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], x[:, 1:]).mean()

    one = jax.ShapeDtypeStruct((SEQ,), jnp.int32)
    return Case(
        model.apply, lambda: model.init(jax.random.key(0), jnp.zeros((1, SEQ), jnp.int32)), loss, one, 4
    )


def wider(preferred: bool = False) -> Case:
    """Matmuls of bf16 weights whose results are fp32: as the activations are, or as `preferred_element_type` says."""

    def apply(params, x):
        for w in params.values():
            x = x.astype(jnp.bfloat16) if preferred else x
            x = jnp.tanh(jax.lax.dot(x, w, preferred_element_type=jnp.float32))
        return x

    one, shape = jax.ShapeDtypeStruct((DIM,), jnp.float32), (DIM, DIM)
    return Case(apply, lambda: {f"w{i}": jnp.ones(shape, jnp.bfloat16) for i in range(4)}, squares, one, 64)


LOOPS = {
    "32 rounds": recurrent, "32 rounds, remat": lambda: recurrent(remat=True), "nested, 3 x 4 rounds": nested,
    "the same in one loop": flat,
    "LSTM, 64 steps": lstm, "the same, bf16 compute": lambda: lstm(dtype=jnp.bfloat16),
    "cross-entropy, 8 chunks": chunked,
    "table, rows looked up in 16 rounds": lambda: table("in"),
    "table, looked up before them": lambda: table("before"),
    "table, one-hot matmuls": lambda: table("one-hot"),
}  # fmt: skip
DEVICES = [
    (24, 128, {}),
    (24, 128, {"scan": True, "layers": 12}),
    (6, 128, {}),
    (7, 192, {}),
    (7, 768, {"heads": 12}),
]
WIDE: dict[str, Any] = {"width": DIM, "layers": 2, "dtype": "float32", "param_dtype": "bfloat16"}
MIXED = {**WIDE, "dtype": "bfloat16", "param_dtype": "float32"}


def loops() -> Iterator[tuple[str, Case, int, dict[str, Any]]]:
    """Rows of the first table."""
    yield from ((name, make(), 8, {}) for name, make in LOOPS.items())


def devices() -> Iterator[tuple[str, Case, int, dict[str, Any]]]:
    """Rows of the second."""
    for n, width, fields in DEVICES:
        form = f", scan of {fields['layers']}" if "scan" in fields else ""
        yield f"GPT, width {width}, {n} GPUs{form}", gpt(width, **fields), n, {"min_shard_bytes": "auto"}


def dtypes() -> Iterator[tuple[str, Case, int, dict[str, Any]]]:
    """Rows of the third."""
    yield "bf16 params, fp32 compute", gpt(**WIDE), 8, {}
    yield "the same, reduce_dtype=bf16", gpt(**WIDE), 8, {"reduce_dtype": "bfloat16"}
    yield "fp32 params, bf16 compute", gpt(**MIXED), 8, {}
    yield "bf16 weights, fp32 activations", wider(), 8, {}
    yield "bf16 weights, preferred_element_type=fp32", wider(preferred=True), 8, {}


def grid() -> Iterator[tuple[str, Case, int, dict[str, Any]]]:
    """Rows of the whole grid, the small ones first."""
    for width, n, scan in itertools.product(
        (96, 128, 192, 768, 1536), (3, 5, 6, 7, 12, 24, 48), (False, True)
    ):
        label = f"GPT, width {width}, {n} GPUs{', scan' if scan else ''}"
        yield label, gpt(width, scan=scan), n, {"min_shard_bytes": "auto"}


TABLES = {"loops": loops, "devices": devices, "dtypes": dtypes, "grid": grid}
HEAD = "| program | stage | wire, Psi | closed form, Psi | temp, MB | check |\n|---|---|---|---|---|---|"


def closed_row(label: str, case: Case, n: int, stage: int, fields: dict[str, Any]) -> str:
    """A line of a table, nothing compiled."""
    return f"| {label} | {stage} | | {prepared(case, stage, n, **fields)[-1].wire_psi:.2f} | | |"


def row(label: str, case: Case, n: int, stage: int, fields: dict[str, Any]) -> str:
    """A line of a table."""
    program, plan, closed = compiled(case, stage, n, **fields)
    report, kinds = jzero.explain(program, plan), ", ".join(f.kind for f in jzero.findings(program, plan))
    temp = report.memory.temp / 1e6 if report.memory else 0
    return f"| {label} | {stage} | {report.wire.psi:.2f} | {closed.wire_psi:.2f} | {temp:.1f} | {kinds} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="*", choices=[*TABLES, []], default=["loops", "devices", "dtypes"])
    parser.add_argument(
        "--out", type=Path, help="a page that rows are added to; those that it has are not made again"
    )
    parser.add_argument("--closed", action="store_true", help="the closed form alone: nothing is compiled")
    args = parser.parse_args()
    done = args.out.read_text(encoding="utf-8") if args.out and args.out.exists() else ""
    print(HEAD)
    for label, case, n, fields in itertools.chain(*(TABLES[name]() for name in args.tables)):
        for stage in (1, 2, 3):
            if (stage == 1 and "reduce_dtype" in fields) or f"| {label} | {stage} |" in done:
                continue
            line = (closed_row if args.closed else row)(label, case, n, stage, fields)
            print(line, flush=True)
            if args.out:
                with args.out.open("a", encoding="utf-8") as page:
                    page.write(line + "\n")


if __name__ == "__main__":
    main()
