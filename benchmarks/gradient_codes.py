"""How to round gradients that travel in codes: to nearest, at random, or with error feedback. What each costs in loss.

    python benchmarks/gradient_codes.py             # 2 to 4 minutes a row on one core; stopped, it goes on
    python benchmarks/gradient_codes.py --rows "8 bits" "8 and 4 bits"   # some rows

The model and the data of train/gpt.py at its default size, in fp32, on one device. A batch is cut into the examples of
8 devices on 2 hosts, and their gradients are summed as `jzero/comm/reduce_in_codes.py` does: encoded by each device,
summed over a host in fp32, encoded again, summed over the hosts. Blocks are runs of the whole gradient, where jzero has
runs of the pieces. Vectors are exact.

The feedback of LoCo (arXiv 2407.04480) adds to a gradient a part of what codes have lost before: `e = beta e + (1 -
beta) lost`, `beta` 0.8, emptied every 1024 steps (the defaults of DeepSpeed's `zeropp_loco_param`). Plain feedback adds
all of what the last step lost. Both need a buffer of the size of what is sent between hosts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
HOSTS, EACH, BLOCK = 2, 4, 256
BETA, RESET = 0.8, 1024


@dataclasses.dataclass(frozen=True)
class Row:
    """The largest code within a host and between hosts (0: not encoded), how values are rounded, and the feedback."""

    within: int
    between: int
    rounding: str = "nearest"
    feedback: str = ""


ROWS = {
    "fp32": Row(0, 0),
    "8 bits": Row(127, 127),
    "8 bits, at random": Row(127, 127, "random"),
    "8 and 4 bits": Row(127, 7),
    "8 and 4 bits, at random": Row(127, 7, "random"),
    "8 and 4 bits, LoCo": Row(127, 7, feedback="LoCo"),
    "8 and 4 bits, plain feedback": Row(127, 7, feedback="plain"),
    "4 bits": Row(7, 7),
}


def rounded(x: jax.Array, levels: int, key: jax.Array | None) -> jax.Array:
    """An array after its codes; with a key they are rounded at random, right on average."""
    if not levels:
        return x
    flat = jnp.pad(jnp.ravel(x), (0, -x.size % BLOCK)).reshape(-1, BLOCK)
    scale = jnp.max(jnp.abs(flat), axis=1, keepdims=True) / levels
    share = flat / jnp.where(scale > 0, scale, 1)
    codes = jnp.round(share) if key is None else jnp.floor(share + jax.random.uniform(key, share.shape))
    return (codes * scale).ravel()[: x.size].reshape(x.shape)


def summed(g: jax.Array, lost: jax.Array, row: Row, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The mean of gradients `[HOSTS * EACH, ...]` as jzero makes it, and the new feedback `[HOSTS, ...]`."""
    if g.ndim < 3:
        return g.mean(0), lost
    keys = jax.random.split(key, HOSTS * EACH + HOSTS) if row.rounding == "random" else [None] * (HOSTS * EACH + HOSTS)
    sent = jnp.stack([rounded(x, row.within, k) for x, k in zip(g, keys, strict=False)])
    hosts = sent.reshape(HOSTS, EACH, *g.shape[1:]).sum(1)
    wanted = hosts + lost if row.feedback else hosts
    came = jnp.stack([rounded(x, row.between, k) for x, k in zip(wanted, keys[HOSTS * EACH :], strict=True)])
    if row.feedback == "LoCo":
        lost = BETA * lost + (1 - BETA) * (wanted - came)
    elif row.feedback:
        lost = wanted - came
    return came.sum(0) / (HOSTS * EACH), lost


def run(row: Row, steps: int, seed: int) -> dict[str, float]:
    """The held-out loss after a run, and the mean relative error of the gradient in its last 100 steps."""
    from train import data, gpt
    from train.config import parse

    config = parse(["--steps", str(steps), "--seed", str(seed)])
    state, sizes = gpt.create_state(config), {"seq": config.model.seq, "batch": config.batch}
    corpus = data.load()
    stream = data.batches(corpus.train, **sizes, seed=seed)
    windows = data.heldout_windows(corpus.heldout, **sizes, most=config.eval_windows)

    @jax.jit
    def step(state, lost, tokens, key):
        parts = tokens.reshape(HOSTS * EACH, -1, tokens.shape[-1])

        def loss(params, tokens):
            return state.apply_fn({"params": params}, *gpt.windows_of({"tokens": tokens}))

        grads, tree = jax.tree.flatten(jax.vmap(jax.grad(loss), (None, 0))(state.params, parts))
        lost = [jnp.where(state.step % RESET, e, 0) for e in lost] if row.feedback == "LoCo" else lost
        keys = jax.random.split(key, len(grads))
        both = [summed(g, e, row, k) for g, e, k in zip(grads, lost, keys, strict=True)]
        off = sum(jnp.sum((new - g.mean(0)) ** 2) for (new, _), g in zip(both, grads, strict=True))
        size = sum(jnp.sum(g.mean(0) ** 2) for g in grads)
        state = state.apply_gradients(grads=tree.unflatten([new for new, _ in both]))
        return state, [e for _, e in both], jnp.sqrt(off / size)

    evaluate: Callable[..., Any] = jax.jit(gpt.eval_step)
    lost = [jnp.zeros((HOSTS, *p.shape)) if row.feedback else jnp.zeros(()) for p in jax.tree.leaves(state.params)]
    errors = []
    for i in range(steps):
        tokens = jnp.asarray(next(stream)["tokens"])
        state, lost, error = step(state, lost, tokens, jax.random.fold_in(jax.random.key(seed), i))
        errors.append(float(error))
    heldout = float(np.mean([evaluate(state, {"tokens": x}) for x in windows]))
    return {"heldout": heldout, "error": float(np.mean(errors[-100:]))}


def table(found: dict[str, list[dict[str, float]]], steps: int) -> str:
    """Held-out losses beside those of fp32 with the same seed."""
    base = [x["heldout"] for x in found["fp32"]]
    lines = [
        "| codes within a host and between hosts | rounding | held-out loss | against fp32 | error of the gradient |",
        "|---|---|---|---|---|",
    ]
    for name, runs in found.items():
        row, values = ROWS[name], [x["heldout"] for x in runs]
        change = "" if name == "fp32" else f"{np.mean([v / b - 1 for v, b in zip(values, base, strict=False)]):+.2%}"
        rounding = {"": row.rounding, "LoCo": "nearest, LoCo", "plain": "nearest, plain feedback"}[row.feedback]
        lines.append(
            f"| {name.split(',')[0]} | {rounding if row.within else ''} | {', '.join(f'{v:.4f}' for v in values)} | "
            f"{change} | {np.mean([x['error'] for x in runs]):.1%} |"
        )
    ran = f"jax {jax.__version__}, Python {platform.python_version()}, {steps} steps. No GPU has run it."
    return "\n".join([*lines, "", f"Printed by `python benchmarks/gradient_codes.py`, {ran}"])


def main() -> None:
    """Run the rows that have no result yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), metavar="NAME", help="all")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gradient_codes.jsonl")
    parser.add_argument("--page", type=Path, help="write the table here too")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    lines = args.out.read_text().splitlines() if args.out.exists() else []
    done = {tuple(key): result for key, result in map(json.loads, lines)}
    found: dict[str, list[dict[str, float]]] = {}
    for name in dict.fromkeys(["fp32", *args.rows]):
        for seed in range(args.seeds):
            key = (name, args.steps, seed)
            if key not in done:
                done[key] = run(ROWS[name], args.steps, seed)
                with args.out.open("a") as file:
                    print(json.dumps([key, done[key]]), file=file)
            found.setdefault(name, []).append(done[key])
            print(f"{name}, seed {seed}: {done[key]}", file=sys.stderr, flush=True)
    text = table(found, args.steps)
    print(text)
    if args.page:
        args.page.write_text(f"# How gradients in codes are rounded\n\n{text}\n")


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT)]
    main()
