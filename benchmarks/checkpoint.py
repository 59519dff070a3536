"""What checksums cost: jzero.checkpoint against plain orbax, on one state in one run, each in turn.

    python benchmarks/checkpoint.py [--mb 1000] [--rounds 5] [--folder DIR]

The state is random fp32 numbers in leaves of 16 to 128 MB at stage 3 on 8 simulated CPU devices. A round saves with
plain orbax (v1), saves with jzero, restores with plain orbax, restores with jzero, and reads jzero's checksums alone
(`verify`); the order of the two changes from round to round. Every file stays in the file system's cache; before a save
what was written is synced, so that no save pays for the one before. The ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", "32")
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from orbax.checkpoint import v1 as ocp

from jzero import checkpoint

LEAVES_MB = (128, 64, 64, 32, 32, 16, 16)  # repeated until the state is as large as asked for


def make(megabytes: int):
    """A tree of sharded leaves of random numbers, and what describes it."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    sharding = NamedSharding(mesh, jax.P("data"))
    rng, tree, left, i = np.random.default_rng(0), {}, megabytes, 0
    while left > 0:
        size = min(LEAVES_MB[i % len(LEAVES_MB)], left)
        tree[f"leaf{i}"] = jax.device_put(rng.random((size * 256, 1000), np.float32), sharding)
        left, i = left - size, i + 1
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)
    return jax.block_until_ready(tree), like


def timed(run) -> float:
    """Seconds; what is still to be written to the disk is written first."""
    os.sync()
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def measure(folder: Path, megabytes: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each round by what was done; the first round warms up and is left out."""
    tree, like = make(megabytes)
    seconds: dict[str, list[float]] = {}
    plain, sealed = str(folder / "orbax"), folder / "jzero"
    for i in range(rounds + 1):
        saves = {
            "save orbax": lambda: ocp.save(plain, tree),
            "save jzero": lambda: void(checkpoint.save(sealed, tree)),
        }
        loads = {
            "restore orbax": lambda: ocp.load(plain, like),
            "restore jzero": lambda: checkpoint.restore(sealed, like),
        }
        runs = [*saves.items()][:: 1 - 2 * (i % 2)] + [*loads.items()][:: 1 - 2 * (i % 2)]
        for name, run in [*runs, ("verify jzero", lambda: void(checkpoint.verify(sealed)))]:
            took = timed(run)
            if i:
                seconds.setdefault(name, []).append(took)
        for path in (plain, sealed):
            shutil.rmtree(path)
    return seconds


def void(_) -> None:
    """Nothing to wait for."""


def table(seconds: dict[str, list[float]]) -> str:
    """Medians and extremes in seconds, and the ratios."""
    lines = [f"{'':14} {'median':>7} {'least':>7} {'most':>7}   seconds"]
    for name in ("save orbax", "save jzero", "restore orbax", "restore jzero", "verify jzero"):
        took = seconds[name]
        lines.append(f"{name:14} {statistics.median(took):7.2f} {min(took):7.2f} {max(took):7.2f}")
    for what in ("save", "restore"):
        lines.append(f"{what}: {ratio(seconds, what):.2f} x plain orbax")
    return "\n".join(lines)


def ratio(seconds: dict[str, list[float]], what: str) -> float:
    """Of the medians, jzero to orbax."""
    return statistics.median(seconds[f"{what} jzero"]) / statistics.median(seconds[f"{what} orbax"])


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        seconds = measure(folder, args.mb, args.rounds)
    finally:
        shutil.rmtree(folder)
    print(
        f"jax {jax.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {args.mb} MB in {folder.parent}"
    )
    print(table(seconds))


if __name__ == "__main__":
    main()
