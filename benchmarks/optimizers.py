"""Which optimizers mix the dims of a matrix, and what their update sends and needs with owners and without.

    python benchmarks/optimizers.py --out /tmp/optimizers.jsonl           # about 15 minutes on two busy cores, no GPU
    python benchmarks/optimizers.py --out /tmp/optimizers.jsonl muon soap # some of them
    python benchmarks/optimizers.py --out /tmp/optimizers.jsonl --table   # what is there, without compiling

What is compiled is a line of `--out` and is not compiled again: a run that was stopped goes on. Compiled for 8 H200:
eight blocks x + down(gelu(up(norm(x)))), width 512 and 2048 inside, bf16 params with fp32 masters. Psi is (N-1)/N times
the bytes of all params. "Without owners" patches jzero: XLA gathers the shards for every matmul.

Closed form of an optimizer that mixes, beside the 2 or 3 Psi of the stage: what a matrix [m, n] and its preconditioners
send to the owner and back, in fp32, an N-th of it per device.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import jzero  # noqa: I001  (before jax)
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from shampoo_soap import shampoo, soap
from programs import QUICK, MlpBlock, Stack
from test_parity import OPTIMIZERS, TAKES_VALUE

from benchmarks.resumed import resumed
from jzero.update import owners, sharded_update

N, WIDTH, WIDER, LAYERS = 8, 512, 4, 8
WRAPPERS = list(OPTIMIZERS).index(
    "clip_chain"
)  # what comes from there on are chains of the optimizers before
TABLE: dict[str, Callable[[], Any]] = {
    **dict(list(OPTIMIZERS.items())[:WRAPPERS]),
    "Shampoo (textbook)": lambda: shampoo(1e-3),
    "SOAP (textbook)": lambda: soap(1e-3),
}


def sides() -> float:
    """(m^2 + n^2) / mn of a matrix."""
    return WIDER + 1 / WIDER


EXCHANGED = {  # fp32 values per value of the matrix
    "muon": lambda: 2,  # the momentum, the update
    "galore": lambda: 2,  # G, the update; what has rank 4 is left out
    "Shampoo (textbook)": lambda: (
        4 + 4 * sides()
    ),  # G for each of both sums and the product; sums, roots there and back
    "SOAP (textbook)": lambda: (
        5 + 4 * sides()
    ),  # G, both moments, the update, a moment; averages, bases there and back
}


def closed(name: str, stage: int) -> float | None:
    """Psi of a step; None where nobody wrote it down. Vectors, 0.2 % of the params, are left out."""
    base = 3 if stage == 3 else 2
    return base + EXCHANGED[name]() * 4 / 2 / N if name in EXCHANGED else None


class Counted(owners.Mixing):
    """Notes how many regions the last update had."""

    regions_of_last = 0

    def __init__(self, *args: Any):
        super().__init__(*args)
        Counted.regions_of_last += len(self.regions)


def measure(name: str, stage: int, owned: bool) -> dict[str, Any]:
    """One row."""
    model = Stack(functools.partial(MlpBlock, WIDTH, jnp.bfloat16, WIDER), LAYERS)
    tx = TABLE[name]()

    def create():
        params = model.init(jax.random.key(0), jnp.zeros((1, WIDTH), jnp.bfloat16))["params"]
        params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def step(state, x):
        def loss_of(params):
            return (state.apply_fn({"params": params}, x).astype(jnp.float32) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        more = {"value": loss} if name in TAKES_VALUE else {}
        if name in ("lbfgs",):
            more = {"value": loss, "grad": grads, "value_fn": loss_of}
        updates, opt_state = state.tx.update(grads, state.opt_state, state.params, **more)
        return state.replace(params=optax.apply_updates(state.params, updates), opt_state=opt_state), loss

    pod = jzero.pod("h200")
    Counted.regions_of_last = 0
    owners.Mixing = Counted
    sharded_update.on_owners = owners.on_owners if owned else (lambda update, plan: update)
    state = jzero.abstract(create, stage=stage, mesh=pod.mesh({"data": N}))
    plan = jzero.plan_of(state)
    x = jax.ShapeDtypeStruct((16 * N, WIDTH), jnp.bfloat16)
    program = pod.compile(step, state, x, donate_argnums=0, plan=plan, compiler_options=QUICK)
    report = jzero.explain(program, plan)
    assert report.memory is not None
    psi = report.wire.total / (plan.param_bytes * (N - 1) / N)
    return {"psi": psi, "temp": report.memory.temp / 1e6, "mixes": Counted.regions_of_last > 0}


def measured_or_error(*key: Any) -> dict[str, Any]:
    """`measure(*key)`; an error is a row of its own, since the others are still wanted."""
    try:
        found = measure(*key)
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"}
    print(*key, found, file=sys.stderr, flush=True)
    return found


def rows(names: list[str], out: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every optimizer with its figures, by "stage" and "stage, without"; what `out` holds is not compiled again."""
    measured = resumed(out, measured_or_error)
    for name in names:
        found: dict[str, Any] = {}
        for stage, owned in ((2, True), (3, True), (2, False), (3, False)):
            if not owned and not found.get("2", {}).get("mixes"):
                continue
            found[str(stage) if owned else f"{stage}, without"] = measured(name, stage, owned)
        yield name, found


def table(names: list[str], out: Path) -> Iterator[str]:
    """The lines of the page."""
    heads = (
        "optimizer",
        "mixes dims",
        "stage",
        "wire, Psi",
        "closed form",
        "temp, MB",
        "wire without owners",
        "temp without",
    )
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for name, found in rows(names, out):
        for stage in (2, 3):
            mine, bare = found[str(stage)], found.get(f"{stage}, without")
            if "error" in mine:
                yield f"| {name} | | {stage} | {mine['error']} | | | | |"
                continue
            asked = closed(name, stage) if mine["mixes"] else stage if stage == 3 else 2
            form = "" if asked is None else f"{asked:.2f}"
            end = "| |" if not bare else bare.get("error") or f"{bare['psi']:.2f} | {bare['temp']:.1f} |"
            mixes = "yes" if mine["mixes"] else "no"
            yield f"| {name} | {mixes} | {stage} | {mine['psi']:.2f} | {form} | {mine['temp']:.1f} | {end}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="of optimizers; all where left out")
    parser.add_argument("--out", type=Path, required=True, help="a file of JSON lines")
    parser.add_argument("--table", action="store_true", help="only what --out holds")
    args = parser.parse_args()
    names = args.names or list(TABLE)
    if args.table:
        there = {json.loads(line)[0][0] for line in args.out.read_text().splitlines()}
        names = [n for n in names if n in there]
    for line in table(names, args.out):
        print(line, flush=True)


if __name__ == "__main__":
    main()
