"""Params and gradients in host memory (ZeRO-Infinity): what the compiled program holds and moves.

    python benchmarks/infinity.py pod     # a GPT of 7.5B on 64 H100, beside stage 3 as it is: 5 minutes on two cores
    python benchmarks/infinity.py one     # one H100 of 80 GB: from 24 to 96 layers of width 8192: 20 minutes
    python benchmarks/infinity.py one --depth 2 4 --dim 1024 --heads 8     # a minute

Compiled for GPUs that are not there; jaxlib 0.11.2 or newer. The model is that of benchmarks/peak.py: bf16 params, fp32
masters, AdamW after clipping by the global norm, layers in a scan under remat. What is measured is kept in
`--out` as it comes, and not measured again. No GPU has run these programs: they say bytes, not seconds.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from pathlib import Path
from typing import Annotated

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import optax
import peak
import tyro
from resumed import resumed

import jzero

CHAIN = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))
WAYS = {"device": None, "state on the host": jzero.Offload(), "all on the host": jzero.Offload(params="host")}
HOST_BYTES = 14 + 2  # per parameter: bf16 param, fp32 master and moments; the gradient during the step
TERABYTE = 10**12
OUT = Path("runs/infinity.jsonl")


@dataclasses.dataclass(frozen=True)
class Pod:
    """A GPT of 7.5B on many GPUs."""

    hosts: Annotated[int, tyro.conf.arg(help="of 8 GPUs each")] = 8
    depth: int = 36
    dim: int = 4096
    heads: int = 32
    vocab: int = 50304
    seq: int = 1024
    out: Path = OUT


@dataclasses.dataclass(frozen=True)
class One:
    """One GPU of 80 GB, one sequence; device memory by the number of layers."""

    depth: tuple[int, ...] = (24, 48, 96)
    dim: int = 8192
    heads: int = 64
    vocab: int = 50304
    seq: int = 2048
    in_flight_gib: Annotated[float, tyro.conf.arg(help="of the optimizer's state on the device at once")] = 6
    offload_inputs: Annotated[bool, tyro.conf.arg(help='and with jzero.remat(offload="host")')] = True
    out: Path = OUT


def model_of(config: Pod | One, depth: int, remat=None) -> peak.Gpt:
    sizes = {name: getattr(config, name) for name in ("dim", "heads", "vocab", "seq")}
    model = peak.Gpt(depth=depth, scan=True, kernels="2d", **sizes)
    return model if remat is None else dataclasses.replace(model, remat=remat)


def measured(
    pod: jzero.Pod, config: Pod | One, depth: int, offload, offload_inputs: bool = False
) -> dict[str, float]:
    """Bytes of one device of a step at stage 3."""
    n = pod.hosts * pod.gpus_per_host
    fields = {"stage": 3, "mesh": pod.mesh({"data": n}), "offload": offload}
    model = model_of(config, depth)
    if offload_inputs:
        plan = jzero.plan_of(jzero.abstract(lambda: peak.create(model, CHAIN), **fields))
        model = model_of(config, depth, functools.partial(jzero.remat, plan=plan, offload="host"))
    state = jzero.abstract(lambda: peak.create(model, CHAIN), **fields)
    plan = jzero.plan_of(state)
    program = pod.compile(peak.train_step, state, model.batch(n), donate_argnums=0)
    report, held = jzero.explain(program, plan), program.memory_analysis()
    assert report.memory is not None
    to = {way: [t for t in report.transfers if t.to == way] for way in ("device", "host")}
    return {
        "values": sum(x.size for x in plan.layouts),
        "device": report.memory.total,
        "host": held.host_argument_size_in_bytes + held.host_temp_size_in_bytes,
        **{f"to {way}": sum(t.total_bytes for t in some) for way, some in to.items()},
        "waits": sum(t.total_bytes for some in to.values() for t in some if not t.asynchronous),
        "psi": report.wire.psi or 0.0,
    }


def gb(size: float) -> str:
    return f"{size / 1e9:.3f} GB"


def print_pod(config: Pod) -> None:
    pod = jzero.pod("h100", hosts=config.hosts)
    n = pod.hosts * pod.gpus_per_host
    known = resumed(config.out, lambda *key: measured(pod, config, key[2], WAYS[key[-1]]))
    sizes = (config.depth, config.dim, config.heads, config.vocab, config.seq)
    print("| where | device | host | to device | to host | of it waited for | wire |\n|---|---|---|---|---|---|---|")
    for way in WAYS:
        row = known("pod", n, *sizes, jax.__version__, way)
        cells = (gb(row[name]) for name in ("device", "host", "to device", "to host", "waits"))
        print(f"| {way} | {' | '.join(cells)} | {row['psi']:.2f} Psi |", flush=True)
    print(
        f"\n{row['values'] / 1e9:.2f}B params, {config.depth} layers of width {config.dim}, {n} H100, {config.seq} "
        f"tokens each; params of a device {gb(2 * row['values'] / n)}, and as much of gradients; jax {jax.__version__}."
    )


def print_one(config: One) -> None:
    pod = jzero.pod("h100", hosts=1, gpus_per_host=1)
    offload = jzero.Offload(params="host", in_flight_bytes=round(config.in_flight_gib * 2**30))
    sizes = (config.dim, config.heads, config.vocab, config.seq, config.in_flight_gib)
    known = resumed(config.out, lambda *key: measured(pod, config, key[1], offload, key[-1]))
    titles = ["layers", "block inputs", "params", "device", "more per layer", "host", "to device", "to host"]
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}")
    for on_host in (False, True)[: 1 + config.offload_inputs]:
        before: tuple[int, float] | None = None
        for depth in config.depth:
            row = known("one", depth, *sizes, jax.__version__, on_host)
            more = "" if before is None else f"{(row['device'] - before[1]) / (depth - before[0]) / 1e6:.2f} MB"
            before = depth, row["device"]
            moved = (f"{row[name] / row['values']:.2f} B / param" for name in ("to device", "to host"))
            place = "host" if on_host else "device"
            cells = (f"{row['values'] / 1e9:.1f}B", gb(row["device"]), more, gb(row["host"]), *moved)
            print(f"| {depth} | {place} | {' | '.join(cells)} |", flush=True)
    print(
        f"\nOne H100, {config.seq} tokens, width {config.dim}, an input of a block is "
        f"{2 * config.seq * config.dim / 1e6:.2f} MB; jax {jax.__version__}."
    )
    for size in (1, 2):
        most = size * TERABYTE / HOST_BYTES / 1e9
        print(f"With {size} TB of host memory at {HOST_BYTES} bytes per parameter: {most:.0f}B params.")


def main() -> None:
    Config = Annotated[Pod, tyro.conf.subcommand("pod")] | Annotated[One, tyro.conf.subcommand("one")]
    config = tyro.cli(Config, description=__doc__)  # pyright: ignore[reportArgumentType, reportCallIssue]
    config.out.parent.mkdir(parents=True, exist_ok=True)
    (print_pod if isinstance(config, Pod) else print_one)(config)


if __name__ == "__main__":
    main()
