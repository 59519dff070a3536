"""How long a run of train/gpt.py takes to start: real processes on this machine, 8 simulated devices between them.

    python benchmarks/startup.py [--processes 1 2 4]

Seconds from the launch of the processes until process 0 has printed the plan (by then all have imported everything,
met, compared what must be the same, and JAX's runtime is up), until the step is compiled, and until the first step's
loss is there. Each number of processes once with an empty compile cache and once with the cache that this filled
(`JAX_COMPILATION_CACHE_DIR`). CPU seconds are those of all processes up to the end of the run: two steps, a held-out
loss, a checkpoint, a sample.

    python benchmarks/startup.py --tracing

CPU seconds in which an unmodified step of a GPT is traced and lowered, in this process: plain Flax, stages 2 and 3, and
how many times plain Flax that is. Nothing is compiled.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import resource
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]
DEVICES = 8
SHAPES = ((24, True), (48, False), (96, False))
"""Layers, and whether each is under remat, of what is traced."""
FLAGS = (
    *("--preset", "tiny", "--stage", "3", "--steps", "2", "--warmup", "1", "--log-every", "1"),
    *("--eval-windows", "16", "--sample-bytes", "1"),
)
MARKS = {"plan": "bytes to train on", "compiled": "MB per device:", "first step": "step 1/"}


def start(count: int, cache: Path) -> dict[str, float]:
    """Seconds to each mark in what process 0 prints, and CPU seconds of all processes."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = dict(
        os.environ, JAX_PLATFORMS="cpu", JAX_COMPILATION_CACHE_DIR=str(cache), TF_CPP_MIN_LOG_LEVEL="2"
    )
    env |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "PYTHONUNBUFFERED": "1"}
    group = [f"--coordinator=127.0.0.1:{port}", f"--processes={count}"] if count > 1 else []
    with tempfile.TemporaryDirectory() as out:
        command = [
            sys.executable,
            "-m",
            "train.gpt",
            *FLAGS,
            f"--devices={DEVICES // count}",
            f"--out={out}/run",
        ]
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        workers = [
            subprocess.Popen(
                [*command, *group, *([f"--process-id={rank}"] if group else [])],
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                text=True,
                env=env,
                cwd=ROOT,
            )
            for rank in range(count)
        ]
        found: dict[str, float] = {}
        for line in workers[0].stdout or ():
            for name, text in MARKS.items():
                if text in line:
                    found.setdefault(name, time.perf_counter() - began)
        if any(w.wait() for w in workers) or set(found) != set(MARKS):
            sys.exit(f"a process of {count} failed; what was seen: {found}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return found | {"cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def traced(depth: int, remat: bool, stage: int | None) -> tuple[float, int]:
    """CPU seconds to trace and lower a step (None: without jzero), and how many params the model has as leaves."""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp
    import optax
    from flax.training.train_state import TrainState

    import jzero
    from benchmarks.hand import train_step
    from benchmarks.peak import Gpt

    block = nn.remat if remat else lambda block, prevent_cse: block
    model = Gpt(depth, 128, 4, 512, 64, False, "2d", remat=block)

    def create():
        params = model.init(jax.random.key(0), jnp.zeros((1, 64), jnp.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3))

    def step(state, batch):  # a new function for each trace
        return train_step(state, batch)

    tokens = jax.ShapeDtypeStruct((DEVICES, 65), jnp.int32)
    if stage is None:
        state = jax.eval_shape(create)
    else:
        state = jzero.abstract(create, stage=stage, min_shard_bytes=0)
        tokens = jax.ShapeDtypeStruct(tokens.shape, tokens.dtype, sharding=jzero.plan_of(state).batch)
    began = time.process_time()
    jax.jit(step, donate_argnums=0).trace(state, {"tokens": tokens}).lower()
    return time.process_time() - began, len(jax.tree.leaves(state.params))


def tracing() -> None:
    """The table of `--tracing`, as markdown."""
    import jax

    jax.config.update("jax_num_cpu_devices", DEVICES)
    for stage in (None, 2, 3):
        traced(2, True, stage)  # what JAX and Flax do once
    print("| layers | leaves | plain Flax | stage 2 | | stage 3 | |")
    print("|---|---|---|---|---|---|---|")
    for depth, remat in SHAPES:
        plain, leaves = traced(depth, remat, None)
        two, three = (traced(depth, remat, stage)[0] for stage in (2, 3))
        cells = f"{plain:.1f} s | {two:.1f} s | {two / plain:.2f} x | {three:.1f} s | {three / plain:.2f} x"
        print(f"| {depth}{', remat' * remat} | {leaves} | {cells} |", flush=True)


def main() -> None:
    """The table, as markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--tracing", action="store_true")
    given = parser.parse_args()
    if wrong := [n for n in given.processes if n < 1 or DEVICES % n]:
        parser.error(f"--processes {wrong[0]}: must divide {DEVICES}.")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "flax"))
    print(
        f"{time.strftime('%Y-%m-%d')}, Python {platform.python_version()}, {versions}, {os.cpu_count()} cores, load "
        f"{os.getloadavg()[0]:.1f} before; seconds {'of CPU' if given.tracing else 'from launch'}\n"
    )
    if given.tracing:
        tracing()
        return
    print("| processes x devices | compile cache | plan printed | step compiled | first step | CPU s, all |")
    print("|---|---|---|---|---|---|")
    for count in given.processes:
        with tempfile.TemporaryDirectory() as cache:
            for kind in ("empty", "filled"):
                row = start(count, Path(cache))
                cells = [f"{row[k]:.1f}" for k in (*MARKS, "cpu")]
                print(f"| {count} x {DEVICES // count} | {kind} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
