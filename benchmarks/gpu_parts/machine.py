"""What machine this is, how a process of a part is set up on it, and how its time and memory are read.

[Note: a peak that is the step's own]
`peak_bytes_in_use` is the most that a process has had, and cannot be set back. So a case that reads it has a
fresh process, in which everything else takes less than the step: the program is compiled before there is any
state (XLA times candidate kernels in buffers of their own), and the state is made of zeros, leaf by leaf,
without jzero's creation program. The peak before the first step is read as well; if it does not rise
during the step, the row says so and is not counted.
"""

from __future__ import annotations

import importlib.metadata
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "torch", "deepspeed")
SIMULATED = 8  # CPU devices of the short form
HOST_SHARE = 0.8  # of the free host memory that may be pinned

DENSE_BF16 = {
    "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12,
    "L40S": 362e12, "L4": 121e12, "A10": 125e12,
}  # fmt: skip
"""FLOP per second in bf16 without sparsity, by a part of the device's name, the longer names first: NVIDIA's
datasheets of these GPUs (SXM where the name does not say otherwise)."""


def environment(tiny: bool, jobs: int = 1, xla: str = "") -> dict[str, str]:
    """Environment of a process that measures, one of `jobs` that share a device. What the user has set stays; XLA gets
    the flags of the part as well."""
    ours = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    }
    defaults = {"TF_CPP_MIN_LOG_LEVEL": "2"}
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:  # the older name: jaxlib refuses both together
        defaults["XLA_CLIENT_MEM_FRACTION"] = f"{0.92 / jobs:.2f}"
    free = host_memory()
    if free:  # JAX pins at most 64 GB unless this is set
        defaults["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"] = str(max(int(HOST_SHARE * free / 2**30), 1))
    if tiny:  # fewer threads than devices can wait for each other; compiled more quickly
        defaults = {"JAX_PLATFORMS": "cpu", "NPROC": "32", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    # steps in flight together starve each other of threads on few cores, and XLA then aborts the process
    defaults |= {
        "JAX_NUM_CPU_DEVICES": str(SIMULATED),
        "JAX_CPU_ENABLE_ASYNC_DISPATCH": "0",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    if xla:
        ours["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), xla]).strip()
    return {**defaults, **os.environ, **ours}


def host_memory() -> int:
    """Bytes of free host memory; 0 if the system does not report it."""
    path = Path("/proc/meminfo")
    rows = dict(line.split(":") for line in path.read_text().splitlines()) if path.exists() else {}
    return int(rows.get("MemAvailable", "0").split()[0]) * 1024


def probe() -> dict[str, Any]:
    """The devices, as jax sees them."""
    import jzero  # noqa: F401, I001  (before jax: it keeps the compile-only plugin out)
    import jax

    devices = jax.local_devices()
    stats = devices[0].memory_stats() or {}
    return {
        "platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices),
        "limit": stats.get("bytes_limit"), "python": sys.version.split()[0], "versions": versions(),
    }  # fmt: skip


def versions() -> dict[str, str]:
    """The packages that matter, as they are installed; "not installed" where one is missing."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def config_of(machine: dict[str, Any], *, tiny: bool, every: bool) -> dict[str, Any]:
    """The config of all parts: the machine, whether sizes are tiny, and whether one case of each kind is enough."""
    on_gpu = machine["platform"] != "cpu"
    return {"machine": machine, "on_gpu": on_gpu, "tiny": tiny or not on_gpu, "short": not (on_gpu or every)}


def flops_limit(kind: str) -> float | None:
    """Dense bf16 FLOP per second of a kind of device; None where the table does not have it."""
    return next((rate for name, rate in DENSE_BF16.items() if name.lower() in kind.lower()), None)


def used_peak() -> int | None:
    """The most bytes that any device has had in use in this process; None if devices keep no count."""
    import jax

    stats = [d.memory_stats() for d in jax.local_devices()]
    return max(s["peak_bytes_in_use"] for s in stats) if all(stats) else None


def zeros_like(abstract: Any) -> Any:
    """Arrays for abstract values with shardings, one leaf after another: see [Note: a peak that is the step's own]."""
    import jax
    import jax.numpy as jnp

    def make(x):
        made = jax.jit(lambda: jnp.zeros(x.shape, x.dtype), out_shardings=x.sharding)()
        return jax.block_until_ready(made)

    return jax.tree.map(make, abstract)


class Program:
    """A compiled step over a list of leaves, which programs of one layout may share.

    Attributes:
      name: for tables.
      compiled: takes leaves and a batch; returns leaves and the loss.
      box: a list with the current leaves in it; donated to each step and put back.
    """

    def __init__(self, name: str, compiled: Any, box: list[Any], batch: Any):
        self.name, self.compiled, self.box, self.batch = name, compiled, box, batch

    def step(self) -> float:
        """One step, waited for; its loss."""
        import jax

        self.box[0], loss = self.compiled(self.box[0], self.batch)
        return float(jax.block_until_ready((self.box[0], loss))[1])

    def seconds(self) -> float:
        """Time of one step, in seconds."""
        import jax

        start = time.perf_counter()
        self.box[0], loss = self.compiled(self.box[0], self.batch)
        jax.block_until_ready((self.box[0], loss))
        return time.perf_counter() - start


def in_turns(programs: Sequence[Program], rounds: int) -> list[list[float]]:
    """Seconds per step of each program, one per round: they take turns, in an order that is swapped each time."""
    times: list[list[float]] = [[] for _ in programs]
    for p in programs:
        p.seconds(), p.seconds()
    for i in range(rounds):
        for k in range(len(programs)) if i % 2 == 0 else reversed(range(len(programs))):
            times[k].append(programs[k].seconds())
    return times


def median_ratio(first: Sequence[float], second: Sequence[float]) -> float:
    """The median over rounds of `first` divided by `second`."""
    return statistics.median(a / b for a, b in zip(first, second, strict=True))


def time_of(fn: Callable[[], Any], rounds: int) -> float:
    """Median seconds of a call, its result waited for, after two that do not count."""
    import jax

    times = []
    for _ in range(rounds + 2):
        start = time.perf_counter()
        jax.block_until_ready(fn())
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])
