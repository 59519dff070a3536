"""Optimizer state in host memory: what the compiled program holds and moves, and what a GPU makes of it.

    python benchmarks/offload.py                       # compiled for 8 H200, no GPU needed: 10 minutes on two cores
    python benchmarks/offload.py --depth 4 --dim 1024  # a smaller model: 2 minutes
    python benchmarks/offload.py --gpu                 # on one GPU: writes benchmarks/offload_<gpu>_<date>.md
    python benchmarks/offload.py --gpu --largest       # and looks for the largest GPT that trains, with and without

The model is that of benchmarks/peak.py: a GPT, bf16 params, fp32 masters, AdamW after clipping by the global norm,
blocks under `nn.remat`; its loss is in bf16. `naive` is what is usually written: device_put the whole state, update,
device_put it back.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import os
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
if "--gpu" not in sys.argv:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import peak

import jzero

HOST = "pinned_host"
CHAIN = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))
WAYS = {
    "no offload": None,
    "naive": None,
    "host": jzero.Offload(),
    "host, prefetch": jzero.Offload(prefetch=True),
    "update on the host": jzero.Offload(update="host"),
}


def to_host(state, plan):
    """The optimizer state of a train state, or its abstract values, in host memory by hand: the naive way."""
    del plan

    def move(x):
        if x.size <= 1:
            return x
        sharding = x.sharding.with_memory_kind(HOST)
        if isinstance(x, jax.ShapeDtypeStruct):
            return x.update(sharding=sharding)
        return jax.device_put(x, sharding)

    return state.replace(opt_state=jax.tree.map(move, state.opt_state))


def naive_step(state, batch):
    """Fetch all, update, write all."""
    home = jax.tree.map(lambda x: HOST if x.size > 1 else "device", state.opt_state)
    spaces = {HOST: jax.memory.Space.Host, "device": jax.memory.Space.Device}
    state = state.replace(opt_state=jax.device_put(state.opt_state, jax.memory.Space.Device))
    state, loss = peak.train_step(state, batch)
    put = jax.tree.map(lambda x, kind: jax.device_put(x, spaces[kind]), state.opt_state, home)
    return state.replace(opt_state=put), loss


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
                state, step = to_host(state, plan), naive_step
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


# ------------------------------------------------------------------------------------------------------------
# On a GPU
# ------------------------------------------------------------------------------------------------------------


def seconds(step, state, batch, repeats):
    """Median time of a step, the state after it and the losses; the first two steps are not counted."""
    times, losses = [], []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        state, loss = step(state, batch)
        losses.append(float(loss))  # waits
        times.append(time.perf_counter() - start)
    return float(np.median(times[2:])), state, losses


def bandwidth(nbytes=2**30):
    """Bytes per second of one pinned copy to the device and one to the host, alone."""
    device = jax.devices()[0]
    kinds = (jax.sharding.SingleDeviceSharding(device, memory_kind=k) for k in ("device", HOST))
    here, there = kinds
    x = jax.device_put(jnp.zeros(nbytes // 4, jnp.float32), there)
    found = []
    for way, source in ((here, x), (there, jax.device_put(x, here))):
        copy = functools.partial(jax.device_put, device=way)
        copy(source).block_until_ready()
        start = time.perf_counter()
        for _ in range(4):
            copy(source).block_until_ready()
        found.append(4 * nbytes / (time.perf_counter() - start))
    return found


def started(model, way, stage):
    """A state on the device for a way, its jitted step, and its plan."""
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1], axis_types=(jax.sharding.AxisType.Auto,))
    state = jzero.shard(lambda: peak.create(model, CHAIN), stage=stage, mesh=mesh, offload=WAYS[way])
    plan, step = jzero.plan_of(state), peak.train_step
    if way == "naive":
        state, step = to_host(state, plan), naive_step
    return state, jax.jit(step, donate_argnums=0), plan


def a_batch(model, rows, vocab):
    tokens = np.random.default_rng(0).integers(0, vocab, (rows, model.seq + 1), dtype=np.int32)
    return {"x": jnp.asarray(tokens[:, :-1]), "y": jnp.asarray(tokens[:, 1:])}


def measured_rows(args):
    """Step times of all ways at growing batches, beside the PCIe floor; losses against those without offload."""
    model = peak.build(args, "scan" if args.scan else "unrolled", "2d")
    down, up = bandwidth()
    yield f"Pinned copies alone: {down / 1e9:.1f} GB/s to the device, {up / 1e9:.1f} GB/s to the host.\n"
    yield "| batch | way | step | ratio to no offload | PCIe floor | hidden | losses differ by, in 20 steps |"
    yield "|---|---|---|---|---|---|---|"
    for rows in args.batches:
        plain, want = None, None
        for way in WAYS:
            try:
                state, step, plan = started(model, way, args.stages[0])
                took, state, losses = seconds(step, state, a_batch(model, rows, args.vocab), 18)
            except Exception as error:
                yield f"| {rows} | {way} | fails: {str(error).splitlines()[0][:90]} | | | | |"
                continue
            moved = jzero.estimate(plan, tx=CHAIN).host if way != "naive" else None
            del state
            if plain is None:
                plain, want = took, losses
            floor = "" if not moved else f"{moved / min(down, up) * 1e3:.0f} ms"
            over = "" if not moved else f"{1 - max(took - plain, 0) / (moved / down + moved / up):.0%}"
            worst = max(abs(a - b) for a, b in zip(losses, want, strict=True))
            yield f"| {rows} | {way} | {took * 1e3:.1f} ms | {took / plain:.2f} | {floor} | {over} | {worst:.1e} |"


def largest(args):
    """The deepest GPT of this width that makes a step at stage 1, with and without offload, by bisection."""
    for way in ("no offload", "host"):
        good, bad = 0, None
        depth = args.depth
        while bad is None or bad - good > max(good // 8, 1):
            args.depth = depth
            try:
                model = peak.build(args, "scan", "2d")
                state, step, plan = started(model, way, 1)
                seconds(step, state, a_batch(model, 1, args.vocab), 1)
                good, count = depth, plan.param_bytes // 2
                del state
            except Exception:
                bad = depth
            depth = (good + bad) // 2 if bad else depth * 2
        yield (
            f"- {way}: {good} layers of width {args.dim}, {count / 1e9:.2f}B parameters"
            if good
            else f"- {way}: none"
        )


def write_page(args) -> None:
    device, today = jax.devices()[0].device_kind, datetime.date.today().isoformat()
    lines = [
        f"# Offload on one {device}, {today}\n",
        f"`python benchmarks/offload.py {' '.join(sys.argv[1:])}`; jax {jax.__version__}, jaxlib "
        f"{jax.lib.__version__}. Stage {args.stages[0]}, {args.depth} layers of width {args.dim}.\n",
    ]
    for line in measured_rows(args):
        print(line, flush=True)
        lines.append(line)
    if args.largest:
        lines.append("\n## The largest GPT that trains\n")
        for line in largest(args):
            print(line, flush=True)
            lines.append(line)
    name = f"offload_{device.split()[-1].lower()}_{today}.md"
    page = args.out / name
    page.write_text("\n".join(lines) + "\n")
    print(f"written {page}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--gpu", action="store_true", help="run on the first device instead of compiling for 8 H200"
    )
    parser.add_argument("--largest", action="store_true", help="with --gpu: look for the largest GPT as well")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64], help="with --gpu")
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=50304)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--hosts", type=int, default=1, help="of 8 H200 each")
    parser.add_argument("--scan", action="store_true", help="layers in a scan")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    args = parser.parse_args()
    args.model = "gpt"
    write_page(args) if args.gpu else print_compiled(args)


if __name__ == "__main__":
    main()
