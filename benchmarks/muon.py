"""What unmodified `optax.contrib.muon` costs under jzero, compiled for H200, beside AdamW: wire, memory, FLOPs.

    python benchmarks/muon.py                              # about 20 minutes on two cores, no GPU
    python benchmarks/muon.py --devices 8 --layers scan --stages 2 --depth 8

A GPT of 24 layers and width 1024 with its own head, bf16 with fp32 masters, blocks under `nn.remat`, 4 x 128 tokens per
device. Psi is (N-1)/N times the bytes of all params. FLOPs are those of the matmuls of the update in the compiled
program, loops times their rounds, of a conditional the dearest branch; `share` is their part of those of all matrices
together, times N: 1.0 is a perfect balance. `moved` counts collectives of a matrix in the update that are not
part of the exchange.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]

import jzero  # noqa: I001  (before jax)
import jax
import optax
from wire import compiled, gpt

from jzero.proof.hlo import Instruction, Module, parse
from jzero.update.matrices import flops

MATRIX = 2**16  # values: no vector of these models has as many


def muon() -> optax.GradientTransformation:
    """Muon for every matrix, and for every layer of a stack."""
    dims = {2: optax.contrib.MuonDimensionNumbers(), 3: optax.contrib.MuonDimensionNumbers(1, 2)}
    return optax.contrib.muon(
        1e-3, muon_weight_dimension_numbers=lambda tree: jax.tree.map(lambda x: dims.get(x.ndim), tree)
    )


def compiled_flops(module: Module) -> float:
    """FLOPs of the matmuls of the update in a compiled program."""

    @functools.cache
    def of(name: str) -> float:
        return sum(map(one, module.computations[name].instructions.values()))

    def one(i: Instruction) -> float:
        if i.opcode == "dot" and "jzero.update" in i.op_name:
            return _dot(module, i)
        if i.opcode == "conditional":
            return max(
                map(of, i.callees("branch_computations", "true_computation", "false_computation")),
                default=0.0,
            )
        if i.opcode == "while":
            return (i.trips or 1) * of(i.callees("body")[0])
        return sum(map(of, i.callees("calls", "to_apply"))) if i.opcode in ("fusion", "call") else 0.0

    return of(module.entry)


def _dot(module: Module, dot: Instruction) -> float:
    home = next(c for c in module.computations.values() if c.instructions.get(dot.name) is dot)
    left = home.instructions[dot.operands[0]].shapes[0].dims
    summed = dot.attrs.partition("lhs_contracting_dims={")[2].partition("}")[0]
    return 2.0 * dot.shapes[0].size * math.prod(left[int(d)] for d in summed.split(","))


def whole_flops(tx: optax.GradientTransformation, params: Any) -> float:
    """FLOPs of the matmuls of an update of whole matrices."""
    state = jax.eval_shape(tx.init, params)
    return flops(jax.make_jaxpr(tx.update)(params, state, params).jaxpr)


def moved(report: jzero.Report) -> int:
    """Collectives of a matrix in the optimizer's own arithmetic."""
    found = [
        c for c in report.collectives if c.phase == "update" and c.scope in ("update", "exchange")
    ]
    return sum(c.count for c in found if c.op != "all-to-all" and c.bytes > MATRIX)


def row(n: int, stage: int, layers: str, depth: int, *, tied: bool = False) -> str:
    """One row of the table."""
    case = gpt(1024, depth, heads=8, scan=layers == "scan", tied=tied, dtype="bfloat16", remat=True)
    program, plan, estimate = compiled(case, stage, n, tx=muon(), min_shard_bytes="auto")
    ours = jzero.explain(program, plan)
    adamw = jzero.explain(*compiled(case, stage, n, min_shard_bytes="auto")[:2])
    share = n * compiled_flops(parse(program.as_text() or "")) / whole_flops(muon(), plan.shapes)
    found = ", ".join(f.kind for f in jzero.findings(program, plan)) or "-"
    temp = [r.memory.temp / 1e6 if r.memory else 0.0 for r in (ours, adamw)]
    return (
        f"| {n} | {stage} | {layers} | {ours.wire.psi:.2f} | {estimate.wire_psi:.2f} | {adamw.wire.psi:.2f} | "
        f"{temp[0]:.0f} | {temp[1]:.0f} | {share:.2f} | {moved(ours)} | {found} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--layers", nargs="+", default=["unrolled", "scan"], choices=["unrolled", "scan"])
    parser.add_argument("--depth", type=int, default=24)
    parser.add_argument("--tied", action="store_true", help="the embedding is the head too")
    args = parser.parse_args()
    print(
        "| GPUs | stage | layers | wire, Psi | closed form | AdamW | temp, MB | AdamW | FLOPs, share | moved | check |"
        "\n|---|---|---|---|---|---|---|---|---|---|---|"
    )
    for n in args.devices:
        for layers in args.layers:
            for stage in args.stages:
                print(row(n, stage, layers, args.depth, tied=args.tied), flush=True)


if __name__ == "__main__":
    main()
