"""jzero.update.on_host.disk against the disk itself: reads and writes at once, bytes per second of both together.

    python benchmarks/disk.py --folder /nvme/bench                  # 8 GiB on the disk, five rounds: a minute
    python benchmarks/disk.py --folder /nvme/bench --update add     # and adds 1 to one array of each unit
    python benchmarks/disk.py --folder /nvme/bench --state-gib 64 --unit-mib 256 --buffer-gib 4 --requests 8

Each round runs all ways in turn, so that other load on the machine meets all of them. `step` is a whole step of a
DiskStore: every unit read, its checksums checked, perhaps changed, hashed, written, flushed and committed. `threads`
reads one file and writes another by as many threads, with requests of the same size, O_DIRECT, without checksums, and
one flush at the end. `dd` is two processes of it, one request each; `fio`, where it is installed, has as many requests
as `step`. The last column is the median of the quotients of each round. All files are removed in the end.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
import tyro

from jzero.update.on_host.disk import DiskStore, FileUnit
from jzero.update.on_host.disk.frames import Frames
from jzero.update.on_host.disk.transfers import REQUEST


@dataclasses.dataclass(frozen=True)
class Config:
    """What is read and written."""

    folder: Annotated[Path, tyro.conf.arg(help="made if it is missing; needs four times the state")]
    state_gib: float = 2
    unit_mib: Annotated[int, tyro.conf.arg(help="three float32 arrays of a third each")] = 96
    buffer_gib: float = 1
    requests: Annotated[int, tyro.conf.arg(help="reads, and writes, in flight")] = 4
    rounds: int = 5
    update: Literal["nothing", "add"] = "nothing"

    @property
    def units(self) -> list[FileUnit]:
        shape = (self.unit_mib * 2**20 // 12,)
        count = max(1, round(self.state_gib * 2**30 / (12 * shape[0])))
        return [FileUnit(f"unit {i}", ((shape, "float32"),) * 3) for i in range(count)]

    @property
    def nbytes(self) -> int:
        """Of the state, in whole requests."""
        return -(-sum(u.nbytes for u in self.units) // REQUEST) * REQUEST


def step(store: DiskStore, config: Config) -> None:
    """One step of the store."""
    with store.begin() as current:
        order = range(len(store.units))
        current.read_ahead(order)
        for i in order:
            arrays = current.read(i)
            if config.update == "add":
                arrays[0] += 1
            current.write(i, arrays)
        current.commit()


def filled(config: Config) -> DiskStore:
    """A store after two steps: both slots of each unit have been written."""
    units, rng = config.units, np.random.default_rng(0)
    store = DiskStore.create(
        config.folder / "store",
        units,
        identity={},
        buffer_bytes=int(config.buffer_gib * 2**30),
        requests=config.requests,
    )
    with store.begin() as first:
        for i, unit in enumerate(units):
            first.write(i, [rng.random(shape, np.float32) for shape, _ in unit.arrays])
        first.commit()
    step(store, config)
    return store


def fill(file: Path, count: int) -> None:
    """A file of random bytes that is allocated as the store's are."""
    data = np.random.default_rng(0).bytes(REQUEST)
    with open(file, "wb", buffering=0) as out:
        os.posix_fallocate(out.fileno(), 0, count)
        for _ in range(0, count, REQUEST):
            out.write(data)
        os.fsync(out.fileno())
        os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def threads(config: Config, files: list[Path]) -> None:
    """Reads one file and writes the other, by `requests` threads each."""
    handles = os.open(files[0], os.O_RDONLY | os.O_DIRECT), os.open(files[1], os.O_WRONLY | os.O_DIRECT)
    places = [itertools.count(0, REQUEST) for _ in handles]  # next() is atomic
    frames = Frames([FileUnit(f"{i}", (((REQUEST,), "uint8"),)) for i in range(2 * config.requests)], 2**62)

    def work(handle: int, at: Iterator[int], move: Callable, buffer: np.ndarray) -> None:
        for offset in iter(lambda: next(at), None):
            if offset >= config.nbytes:
                return
            assert move(handle, [buffer.data], offset) == REQUEST

    running = [
        threading.Thread(target=work, args=(handle, at, move, frames.take()))
        for handle, at, move in zip(handles, places, (os.preadv, os.pwritev), strict=True)
        for _ in range(config.requests)
    ]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    os.fdatasync(handles[1])
    for handle in handles:
        os.close(handle)


def dd(config: Config, files: list[Path]) -> None:
    """Two processes of dd."""
    same = [f"bs={REQUEST}", f"count={config.nbytes // REQUEST}", "status=none"]
    ways = [f"if={files[0]}", "of=/dev/null", "iflag=direct"], [
        "if=/dev/zero", f"of={files[1]}", "oflag=direct", "conv=notrunc,fdatasync",
    ]  # fmt: skip
    running = [subprocess.Popen(["dd", *way, *same]) for way in ways]
    assert [process.wait() for process in running] == [0, 0]


def fio(config: Config, files: list[Path]) -> None:
    """One process of fio with a job that reads and one that writes."""
    same = [
        "--direct=1",
        f"--bs={REQUEST}",
        f"--iodepth={config.requests}",
        "--ioengine=libaio",
        f"--size={config.nbytes}",
    ]
    jobs = [f"--name={way}" for way in ("read", "write")]
    words = [[job, f"--rw={job[7:]}", f"--filename={file}"] for job, file in zip(jobs, files, strict=True)]
    command = ["fio", *words[0], *same, *words[1], *same, "--end_fsync=1"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def measured(config: Config) -> dict[str, list[float]]:
    """Seconds of each way in each round."""
    files = [config.folder / f"raw.{i}" for i in range(2)]
    with filled(config) as store:
        print(f"{store.folder}: O_DIRECT {'taken' if store.direct else 'refused: buffered'}", flush=True)
        for file in files:
            fill(file, config.nbytes)
        ways: dict[str, Callable[[], None]] = {
            "step": lambda: step(store, config),
            "threads": lambda: threads(config, files),
            "dd": lambda: dd(config, files),
        }
        if shutil.which("fio"):
            ways["fio"] = lambda: fio(config, files)
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(config.rounds):
            names = list(ways)
            for name in names if number % 2 == 0 else reversed(names):
                begin = time.perf_counter()
                ways[name]()
                seconds[name].append(time.perf_counter() - begin)
            files.reverse()
    return seconds


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    config.folder.mkdir(parents=True, exist_ok=True)
    try:
        seconds = measured(config)
    finally:
        shutil.rmtree(config.folder / "store", ignore_errors=True)
        for i in range(2):
            (config.folder / f"raw.{i}").unlink(missing_ok=True)
    moved = 2 * sum(u.nbytes for u in config.units) / 1e9
    print("| way | GB/s, median | slowest to fastest | `step` / way |\n|---|---|---|---|")
    for name, found in seconds.items():
        speeds = sorted(moved / s for s in found)
        ratio = statistics.median(a / b for a, b in zip(found, seconds["step"], strict=True))
        print(
            f"| {name} | {statistics.median(speeds):.2f} | {speeds[0]:.2f} to {speeds[-1]:.2f} | {ratio:.2f} |"
        )
    print(
        f"\n{len(config.units)} units of {config.units[0].nbytes / 1e6:.1f} MB, buffer {config.buffer_gib} GiB, "
        f"{config.requests} reads and {config.requests} writes of {REQUEST / 1e6:.1f} MB in flight, "
        f"update: {config.update}."
    )


if __name__ == "__main__":
    main()
