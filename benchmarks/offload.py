"""Optimizer state in host memory: what the compiled program holds and moves.

    python benchmarks/offload.py                       # compiled for 8 H200, no GPU needed: 10 minutes on two cores
    python benchmarks/offload.py --depth 4 --dim 1024  # a smaller model: 2 minutes

The model is that of benchmarks/peak.py: a GPT, bf16 params, fp32 masters, AdamW after clipping by the global norm,
blocks under `nn.remat`; its loss is in bf16. `naive` is what is usually written: device_put the whole state, update,
device_put it back. What a GPU makes of it: `python benchmarks/gpu.py --parts offload`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import optax
import peak
from hand import naive, to_host

import jzero

CHAIN = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))
WAYS = {
    "no offload": None,
    "naive": None,
    "host": jzero.Offload(),
    "host, prefetch": jzero.Offload(prefetch=True),
}


def compiled_rows(model, stages, hosts):
    """One row for every stage and way, of programs compiled for H200."""
    pod = jzero.pod("h200", hosts=hosts)
    mesh = pod.mesh({"data": 8 * hosts})
    for stage in stages:
        for way, tier in WAYS.items():
            state = jzero.abstract(lambda: peak.create(model, CHAIN), stage=stage, mesh=mesh, offload=tier)
            plan = jzero.plan_of(state)
            step = peak.train_step
            if way == "naive":
                state, step = to_host(state), naive(step)
            start = time.perf_counter()
            try:
                program = pod.compile(step, state, model.batch(8 * hosts), donate_argnums=0)
            except Exception as error:
                yield f"| {stage} | {way} | does not compile: {str(error).splitlines()[0][:80]} |"
                continue
            report, held = jzero.explain(program, plan), program.memory_analysis()
            moved = {to: [t for t in report.transfers if t.to == to] for to in ("device", "host")}
            bytes_ = {to: sum(t.total_bytes for t in some) for to, some in moved.items()}
            late = sum(t.total_bytes for some in moved.values() for t in some if t.asynchronous)
            share = late / sum(bytes_.values()) if any(bytes_.values()) else 0
            yield (
                f"| {stage} | {way} | {report.memory.total / 1e9:.2f} GB | {report.memory.temp / 1e9:.2f} GB | "
                f"{held.host_argument_size_in_bytes / 1e9:.2f} GB | {held.host_temp_size_in_bytes / 1e9:.2f} GB | "
                f"{bytes_['device'] / 1e9:.2f} GB | {bytes_['host'] / 1e9:.2f} GB | {share:.0%} | "
                f"{report.wire.psi:.2f} Psi | {time.perf_counter() - start:.0f} s |"
            )


def print_compiled(args) -> None:
    model = peak.build(args, "scan" if args.scan else "unrolled", "2d")
    print(
        "| stage | way | device total | temp | on the host | host temp | to device / step | to host / step | "
        "asynchronous | wire | compiled in |\n|---|---|---|---|---|---|---|---|---|---|---|"
    )
    for row in compiled_rows(model, args.stages, args.hosts):
        print(row, flush=True)
    print(f"\n{args.depth} layers of width {args.dim}, {8 * args.hosts} H200; jax {jax.__version__}.")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=50304)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--hosts", type=int, default=1, help="of 8 H200 each")
    parser.add_argument("--scan", action="store_true", help="layers in a scan")
    args = parser.parse_args()
    args.model = "gpt"
    print_compiled(args)


if __name__ == "__main__":
    main()
