"""The update on the host against a copy of as many bytes, and beside it torch's and DeepSpeed's; then from the disk.

    python benchmarks/host_update.py                                    # 200M params, bf16 and fp32: 2 minutes
    python benchmarks/host_update.py --torch-python ~/torch/bin/python  # beside torch, and DeepSpeed if it has it
    python benchmarks/host_update.py --folder /nvme/bench               # and with the state on a disk
    python benchmarks/host_update.py --params 1000 --devices 4 --dtypes bfloat16
    python benchmarks/host_update.py --rss --params 500 --folder /nvme/bench   # resident memory of a run from the disk

AdamW after `clip_by_global_norm`, on simulated CPU devices. Each round runs all ways in turn, so that other load
on the machine meets all of them; the figures are medians. An update reads gradients, masters and two moments, and
writes masters, moments and params: 14 bytes per param each with bf16 params, 16 with fp32. `copy` is
`numpy.copyto` of as many bytes (so it reads and writes as much) by a thread per core, into memory that is there.
`apply_gradients` is the user's call, until all new params are there; on simulated devices it copies the gradients
first, which is the transfer from a GPU elsewhere: `gradients` is that alone. `torch` and `DeepSpeed` are a step of
their fused optimizers on fp32 params and gradients; with bf16 params also with what belongs to it: gradients cast
to fp32, clipped, and params cast back. The disk tier reads and writes 12 bytes per param.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax.training.train_state import TrainState

import jzero
from jzero.layout.host_mesh import moved

COPY = 2**28  # bytes that a thread copies at a time: far more than caches hold


@dataclasses.dataclass(frozen=True)
class Config:
    """What is updated."""

    params: Annotated[int, tyro.conf.arg(help="millions of params")] = 200
    leaf: Annotated[int, tyro.conf.arg(help="millions of params of a leaf")] = 16
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    devices: Annotated[int, tyro.conf.arg(help="simulated, of one process")] = 1
    rounds: int = 7
    torch_python: Annotated[str, tyro.conf.arg(help="an interpreter with torch")] = ""
    folder: Annotated[Path | None, tyro.conf.arg(help="on the disk; needs 24 bytes per param")] = None
    buffer_gib: float = 1
    amsgrad: Annotated[bool, tyro.conf.arg(help="three moments in place of two, of the disk tier's memory")] = False
    rss: Annotated[bool, tyro.conf.arg(help="resident memory of the disk tier, nothing else")] = False

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Of the leaves."""
        count = max(1, round(self.params / self.leaf))
        return [(self.params * 1000 // count // 8 * 8, 1000)] * count

    @property
    def count(self) -> int:
        """How many params."""
        return sum(a * b for a, b in self.shapes)


def copies(nbytes: int, count: int) -> Callable[[], None]:
    """`numpy.copyto` of so many bytes by so many threads."""
    pairs = [(np.ones(COPY, np.uint8), np.ones(COPY, np.uint8)) for _ in range(count)]
    shares = [nbytes // count] * count

    def work(source: np.ndarray, target: np.ndarray, left: int) -> None:
        while left > 0:
            np.copyto(target[:left], source[:left])
            left -= COPY

    def run() -> None:
        threads = [threading.Thread(target=work, args=(*p, n)) for p, n in zip(pairs, shares, strict=True)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()

    return run


class Training:
    """A state and its gradients."""

    def __init__(self, config: Config, dtype: str, offload: jzero.Offload):
        def create():
            params = {f"w{i:03}": jnp.full(s, 0.5, dtype) for i, s in enumerate(config.shapes)}
            adam = optax.amsgrad(1e-3) if config.amsgrad else optax.adamw(1e-3)
            tx = optax.chain(optax.clip_by_global_norm(1.0), adam)
            return TrainState.create(apply_fn=None, params=params, tx=tx)

        self.state = jzero.shard(create, stage=2, offload=offload)
        self.plan = jzero.plan_of(self.state)
        where = [self.plan.sharding(x.state) for x in self.plan.layouts]
        flat = jax.jit(
            lambda: [jnp.full(x.state_shape, 1e-3, dtype) for x in self.plan.layouts], out_shardings=where
        )
        self.grads = self.plan.tree.unflatten(jax.block_until_ready(flat()))

    def apply(self) -> None:
        """What the user calls."""
        self.state = self.state.apply_gradients(grads=self.grads)
        jax.block_until_ready(self.state)

    def copy_gradients(self) -> None:
        """What `apply` does first, on simulated devices."""
        jax.block_until_ready([moved(g, g.sharding, copy=True) for g in jax.tree.leaves(self.grads)])


OTHERS = """
import json, os, sys, time
import torch
shapes, dtype, kind = json.loads(sys.argv[1])
narrow = [torch.full(s, 0.5, dtype=torch.bfloat16) for s in shapes] if dtype == "bfloat16" else []
params = [torch.nn.Parameter(torch.full(s, 0.5)) for s in shapes]
grads = [torch.full_like(p, 1e-3, dtype=getattr(torch, dtype)) for p in params]
if kind == "torch":
    optimizer = torch.optim.AdamW(params, lr=1e-3, fused=True)
else:
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    optimizer = DeepSpeedCPUAdam(params, lr=1e-3)
for p in params:
    p.grad = torch.full_like(p, 1e-3)
def alone():
    optimizer.step()
@torch.no_grad()
def whole():
    for p, g in zip(params, grads):
        p.grad.copy_(g)
    torch.nn.utils.clip_grad_norm_(params, 1.0)
    optimizer.step()
    for p, n in zip(params, narrow):
        n.copy_(p)
ways = {"alone": alone, "whole": whole}
for way in (alone, whole):
    way()
print(json.dumps([torch.__version__, torch.get_num_threads()]), flush=True)
for line in sys.stdin:
    begin = time.perf_counter()
    ways[line.strip()]()
    print(time.perf_counter() - begin, flush=True)
"""


class Other:
    """An optimizer of torch in a process of its own, which steps when it is told."""

    def __init__(self, config: Config, dtype: str, kind: str):
        words = json.dumps([config.shapes, dtype, kind])
        path = os.pathsep.join(
            [str(Path(config.torch_python).parent), os.environ["PATH"]]
        )  # ninja, for DeepSpeed
        self.process = subprocess.Popen(
            [config.torch_python, "-c", OTHERS, words], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, env=dict(os.environ, PATH=path),
        )  # fmt: skip
        self.lines = (x.strip() for x in self.process.stdout or ())
        self.about = next((x for x in self.lines if x.startswith('["')), "")
        if not self.about:
            said = (self.process.stderr.read() if self.process.stderr else "").strip().splitlines()
            print(f"{kind} is left out: {said[-1] if said else 'it ended without a word'}", flush=True)

    def seconds(self, way: str) -> float:
        """Of one step."""
        assert self.process.stdin
        self.process.stdin.write(way + "\n")
        self.process.stdin.flush()
        return float(next(self.lines))

    def close(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.communicate()


def timed(call: Callable[[], None]) -> Callable[[], float]:
    """The seconds that a call takes."""

    def run() -> float:
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    return run


def ways_of(config: Config, dtype: str, others: dict[str, Other]) -> dict[str, Callable[[], float]]:
    """What is measured for params of a dtype."""
    width = 12 + jnp.dtype(dtype).itemsize
    training = Training(config, dtype, jzero.Offload(update="host"))
    ways = {
        "copy": timed(copies(width * config.count, os.cpu_count() or 1)),
        "copy, one thread": timed(copies(width * config.count, 1)),
        "apply_gradients": timed(training.apply),
        "gradients": timed(training.copy_gradients),
    }
    if config.folder is not None:
        tier = jzero.Offload(
            tier="disk", path=config.folder / dtype, buffer_bytes=int(config.buffer_gib * 2**30)
        )
        ways["apply_gradients, disk"] = timed(Training(config, dtype, tier).apply)
    for kind, other in others.items():
        if other.about:
            ways[kind] = lambda other=other: other.seconds("alone")
            ways[f"{kind}, whole"] = lambda other=other: other.seconds("whole")
    return ways


def measured(config: Config, dtype: str) -> dict[str, list[float]]:
    """Seconds of each way in each round."""
    others = {k: Other(config, dtype, k) for k in ("torch", "DeepSpeed") if config.torch_python}
    try:
        ways = ways_of(config, dtype, others)
        for way in ways.values():  # compiles, and touches memory
            way(), way()
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(config.rounds):
            for name in list(ways) if number % 2 == 0 else reversed(ways):
                seconds[name].append(ways[name]())
        for kind, other in others.items():
            if other.about:
                version, threads = json.loads(other.about)
                print(f"{kind}: torch {version}, {threads} threads", flush=True)
    finally:
        for other in others.values():
            other.close()
    return seconds


def table(config: Config, dtype: str, seconds: dict[str, list[float]]) -> None:
    """Prints a row for each way."""
    width = 12 + jnp.dtype(dtype).itemsize
    rows = zip(seconds["apply_gradients"], seconds["gradients"], strict=True)
    seconds = seconds | {"apply_gradients - gradients": [a - g for a, g in rows]}
    print(
        f"\n{dtype}, {config.count / 1e6:.0f}M params in {len(config.shapes)} leaves, {config.devices} device(s)\n"
    )
    print(
        "| way | seconds, median | fastest to slowest | G params/s | GB/s read and written | `copy` / way |"
    )
    print("|---|---|---|---|---|---|")
    for name, found in seconds.items():
        middle = statistics.median(found)
        bytes_each = 24 if "disk" in name else 2 * (width - 12) if name == "gradients" else 2 * width
        ratio = statistics.median(a / b for a, b in zip(seconds["copy"], found, strict=True))
        print(
            f"| {name} | {middle:.3f} | {min(found):.3f} to {max(found):.3f} | {config.count / middle / 1e9:.3f} "
            f"| {bytes_each * config.count / middle / 1e9:.1f} | {ratio:.2f} |",
            flush=True,
        )


def resident(field: str) -> int:
    """`VmRSS` or, at most so far, `VmHWM`, in bytes."""
    rows = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(rows[field].split()[0]) * 1024


def print_resident(config: Config, dtype: str) -> None:
    """Peaks of a run whose state is on the disk: while it is born, and while it trains."""
    assert config.folder is not None
    width, gib = jnp.dtype(dtype).itemsize, 2**30
    buffer = int(config.buffer_gib * gib)
    before = resident("VmRSS")
    training = Training(
        config, dtype, jzero.Offload(tier="disk", path=config.folder / dtype, buffer_bytes=buffer)
    )
    born = resident("VmHWM")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    for _ in range(3):
        training.apply()
    peak, own, state = resident("VmHWM"), width * config.count, training.state.opt_state
    print(
        f"\n{dtype}, {config.count / 1e6:.0f}M params, {state.master.total / 1e9:.1f} GB of state on the disk. "
        f"Resident GiB: {before / gib:.2f} at the start, {born / gib:.2f} at most while born, {peak / gib:.2f} at most "
        f"in three steps.\nParams and gradients {own / gib:.2f} each, buffer {buffer / gib:.2f}: {2 * own / gib:.2f} + "
        f"{buffer / gib:.2f} + 1 = {(2 * own + buffer) / gib + 1:.2f}. Simulated devices are in the same memory: with "
        f"the host's copies of gradients and the new params beside the old {(4 * own + buffer) / gib + 1:.2f}.",
        flush=True,
    )


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    jax.config.update("jax_num_cpu_devices", config.devices)
    if not config.torch_python and not config.rss:
        print("torch and DeepSpeed are left out: pass --torch-python, an interpreter that has them")
    if config.folder is None:
        print("the disk is left out: pass --folder")
    else:
        config.folder.mkdir(parents=True, exist_ok=True)
    print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, jax {jax.__version__}, numpy {np.__version__}"
    )
    try:
        for dtype in config.dtypes:
            if config.rss:
                print_resident(config, dtype)
            else:
                table(config, dtype, measured(config, dtype))
    finally:
        if config.folder is not None:
            for dtype in config.dtypes:
                shutil.rmtree(config.folder / dtype, ignore_errors=True)


if __name__ == "__main__":
    main()
