"""What checkpoints promise, against faults: each row does harm many times and counts what was lost.

    python benchmarks/reliability.py            # about 10 minutes on two cores
    python benchmarks/reliability.py --quick    # under a minute
    python benchmarks/reliability.py --only flips,kills

Prints a markdown table, and ends with 1 where anything was lost. A row is a function with `@row(promise)` that gets an
empty folder and whether to be quick, and returns what was tried, how often, and how often something was lost, became
wrong in silence, or hung. What the tests check once is done here again and again, by the same helpers.

A full disk is a limit on the size of files (RLIMIT_FSIZE): the system refuses a write in the middle of a file, as a
full disk does, and no rights are needed. Power is not cut: `strace` shows what was flushed before a directory got its
name.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", "32")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/checkpoint")]

import jax

jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp
import test_checkpoint_damage as damage
import test_checkpoint_exit as exits
import test_checkpoint_kill as kill
from fuzz import ACCEPTED, RAW, fuzz
from fuzz_subjects import subjects
from kill_loop import Loop
from layouts import assert_same
from safetensors.numpy import load_file
from saver import state_of

from jzero import checkpoint
from jzero.checkpoint import tensors
from jzero.checkpoint.store import TEMPORARY

BROKEN = (AssertionError, OSError, ValueError, RuntimeError, subprocess.TimeoutExpired)


@dataclasses.dataclass
class Found:
    """What a row did: in words, how often, and how often something was lost; `note`: a reason why it was not done."""

    tried: str
    times: int
    lost: int
    note: str = ""


ROWS: dict[str, tuple[str, Callable[[Path, bool], Found]]] = {}


def row(promise: str) -> Callable[[Callable[[Path, bool], Found]], Callable[[Path, bool], Found]]:
    """Adds a function to the table."""

    def add(function: Callable[[Path, bool], Found]) -> Callable[[Path, bool], Found]:
        ROWS[function.__name__] = (promise, function)
        return function

    return add


def run_python(code: str, *args: Any) -> subprocess.Popen:
    """A process with jzero and the helpers of the tests."""
    folders = (str(ROOT / folder) for folder in ("", "tests", "tests/checkpoint"))
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(folders))
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


# ------------------------------------------------------------------------------------------------------ damage


@row("A damaged checkpoint is never used; the files and leaves are named")
def flips(folder: Path, quick: bool) -> Found:
    """Flips bytes of each file in turn, at random places."""
    tree, rounds, each = damage.make(), 1 if quick else 10, 40 if quick else 200
    path = checkpoint.save(folder / "5", tree)
    refused = sum(damage.flip_and_look(path, tree, seed, each)[0] for seed in range(rounds))
    times = rounds * each
    tried = f"one byte flipped, in every file: {refused} refused by `restore`, {times} seen by `verify`"
    return Found(f"{tried}; the others are in notes that a restore does not read", times, 0)


@row("Exported weights are checked when they are loaded")
def export_flips(folder: Path, quick: bool) -> Found:
    """Flips bits of an exported file; counts those that the format itself would have let through."""
    path = checkpoint.save(folder / "1", {"w": jnp.arange(2000.0), "b": jnp.ones(7)})
    (file,) = checkpoint.export(path, folder / "m.safetensors")
    data, rng, times, lost, unseen = file.read_bytes(), random.Random(0), 50 if quick else 500, 0, 0
    for _ in range(times):
        at = rng.randrange(len(data))
        file.write_bytes(data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :])
        lost += not tensors.damaged([file])
        try:
            load_file(file)
        except Exception:  # whatever the library raises
            continue
        unseen += 1
    tried = f"one bit flipped: all seen by the checksum file; safetensors by itself reads {unseen} of them"
    return Found(tried, times, lost)


# ------------------------------------------------------------------------------------------------------- kills


@row("A wrong argument ends in an error of jzero's own; at most 1 % of such calls in another one")
def wrong_arguments(folder: Path, quick: bool) -> Found:
    """`tests/fuzz.py` on all public functions; lost is what exceeds that share."""
    times = 500 if quick else 7000
    with contextlib.chdir(folder):
        outcomes = [call.outcome for call in fuzz(subjects(), times, 1)]
    raw, accepted = outcomes.count(RAW), outcomes.count(ACCEPTED)
    tried = f"public functions with 1 or 2 wrong arguments of 21 kinds: {raw} raw errors, {accepted} accepted"
    return Found(tried, times, max(0, raw + accepted - times // 100))


@row("A save that is killed is not a checkpoint; those before it are whole")
def kills(folder: Path, quick: bool) -> Found:
    """SIGKILL of a real process, at moments spread over a save."""
    times = 3 if quick else 40
    dirty = kill.kill_again_and_again(folder, times)
    return Found(
        f"SIGKILL while saving, at moments spread over it: {dirty} left files, removed later", times, 0
    )


@row("Of several processes that train, any may be killed")
def kills_of_a_group(folder: Path, quick: bool) -> Found:
    """`tests/kill_loop.py`: another number of processes each time, restored bit for bit."""
    if quick:
        return Found("2 or 4 processes of train/gpt.py, one killed", 0, 0, "not with --quick")
    table = Loop(folder, seed=1, show=False).run(3)
    times = sum("killed" in line for line in table)
    return Found("2 or 4 processes of train/gpt.py, one killed, continued with another number", times, 0)


@row("A process that ends finishes its save, or says that it is lost and ends with 1")
def ends(folder: Path, quick: bool) -> Found:
    """An exception in the loop, a normal end, `Steps` that nobody closed, a full disk, a save that hangs."""
    times, lost = 1 if quick else 5, 0
    for i in range(times):
        started = []
        for name, code in exits.CASES.items():
            path = folder / str(i) / name.replace(" ", "_")
            started.append((name, path, run_python(exits.BEGIN + code, path)))
        for name, path, process in started:
            try:
                process.communicate(timeout=120)
            except subprocess.TimeoutExpired:
                process.kill()
                lost += 1
                continue
            given_up = name in ("abandoned", "full")
            final = path / "1" if "steps" in name else path
            status = 3 if name == "status" else int(given_up or "exception" in name)
            lost += process.returncode != status or final.exists() == given_up
    count = len(exits.CASES)
    return Found(f"{count} ways to end with a save under way, among them an exception", times * count, lost)


# ----------------------------------------------------------------------------------------------------- writers

WRITER = """
import sys, time
import numpy as np
from jzero import checkpoint
folder, name, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
try:
    with checkpoint.Steps(folder, keep=count) as steps:
        for step in range(1, count + 1):
            steps.save(step, {"w": np.full(100_000, name), "step": step}, metrics={"loss": step})
except checkpoint.FolderInUse:
    sys.exit(3)
"""


@row("Two runs with one folder cannot overwrite each other")
def two_writers(folder: Path, quick: bool) -> Found:
    """Two processes that begin together; every step must be that of the one which was let in."""
    times, lost, both = 2 if quick else 15, 0, 0
    for i in range(times):
        there = folder / str(i)
        writers = [run_python(WRITER, there, name, 5) for name in (1, 2)]
        codes = [w.wait(timeout=120) for w in writers]
        like = {"w": jnp.zeros(100_000, jnp.int32), "step": 0}
        steps = checkpoint.Steps(there)
        names = {int(steps.restore(like, step=s, cast=True)["w"][0]) for s in steps.steps}
        if sorted(codes) == [0, 3]:
            lost += names != {1 + codes.index(0)} or len(steps.steps) != 5
        else:  # one had ended before the other began, whose step 1 was behind
            both += 1
            lost += names - {1, 2} != set() or 0 not in codes
    return Found(f"two processes at once: the second is refused ({times - both} met)", times, lost)


@row("Whoever reads changes nothing, and reads whole steps")
def readers(folder: Path, quick: bool) -> Found:
    """Opens, lists and restores, again and again, while a process saves and rotates."""
    count = 20 if quick else 200
    writer = run_python(WRITER.replace("keep=count", "keep=2"), folder, 1, count)
    like = {"w": jnp.zeros(100_000, jnp.int32), "step": 0}
    opened = restored = gone = lost = 0
    while writer.poll() is None:
        with checkpoint.Steps(folder, best="loss") as steps:
            if not steps.steps:
                continue
            opened += 1
            try:
                lost += int(steps.restore(like, cast=True)["w"][0]) != 1
                restored += 1
            except FileNotFoundError:  # removed by the writer
                gone += 1
    _, said = writer.communicate()
    lost += writer.returncode != 0 or checkpoint.Steps(folder).steps != [count - 1, count]
    assert writer.returncode == 0, said
    return Found(
        f"opened beside a run that saves {count} steps and keeps 2: {restored} restored, {gone} gone by then",
        opened,
        lost,
    )


# ------------------------------------------------------------------------------------------------- disk, power


@row("After a full disk the steps before are whole, nothing fills it up, and the next save works")
def full_disk(folder: Path, quick: bool) -> Found:
    """Writes are refused above a random size of a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    times, lost, rng, failed = 5 if quick else 60, 0, random.Random(0), 0
    with checkpoint.Steps(folder, keep=2) as steps:
        steps.save(1, state_of(1))
        steps.wait()
        for step in range(2, times + 2):
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(10 ** rng.uniform(2, 7)), before[0][1]))
            try:
                with contextlib.redirect_stderr(io.StringIO()):  # threads of orbax tell it too
                    steps.save(step, state_of(step))
                    steps.wait()
            except OSError:
                failed += 1
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before[0])
            last = steps.steps[-1]
            lost += bool([p for p in folder.iterdir() if TEMPORARY in p.name])
            assert_same(steps.restore(state_of(0)), state_of(last))
        steps.save(times + 2, state_of(times + 2))
    signal.signal(signal.SIGXFSZ, before[1])
    assert_same(steps.restore(state_of(0)), state_of(times + 2))
    return Found(f"a limit on the size of files, from 100 B to 10 MB: {failed} saves failed", times, lost)


SAVE = """
import sys
import numpy as np
from jzero import checkpoint
with checkpoint.Steps(sys.argv[1] + "/made/run") as steps:
    steps.save(1, {"w": np.ones((100, 100)), "b": np.ones(3)}, metrics={"loss": 0.5})
"""


@row("A finished checkpoint survives a power failure")
def power(folder: Path, quick: bool) -> Found:
    """Every file and folder must be flushed before the rename, and the folder of the new name after it."""
    tried = "`strace` of a save: every file, then every folder, then the rename, then its folder"
    if shutil.which("strace") is None:
        return Found(tried, 0, 0, "no strace here")
    log = folder / "log"
    calls = "trace=fsync,fdatasync,rename,renameat,renameat2"
    env = dict(os.environ, PYTHONPATH=str(ROOT))
    command = [
        "strace",
        "-f",
        "-y",
        "-s",
        "4096",
        "-e",
        calls,
        "-o",
        str(log),
        sys.executable,
        "-c",
        SAVE,
        str(folder),
    ]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        return Found(tried, 0, 0, f"strace may not run here: {done.stderr.strip()[-80:]}")
    final = folder / "made" / "run" / "1"
    return Found(tried, *unflushed(log.read_text().splitlines(), final))


def unflushed(lines: list[str], final: Path) -> tuple[int, int]:
    """How many files and folders a checkpoint has, and how many of them are flushed too late or never."""
    (at,) = (i for i, line in enumerate(lines) if "rename" in line and f'"{final}"' in line)
    staging = next(name for name in re.findall(r'"([^"]*)"', lines[at]) if name != str(final))
    synced: dict[str, int] = {}
    after = False
    for i, line in enumerate(lines):
        found = re.search(r"f(?:data)?sync\(\d+<([^>]*)>", line)
        if found and i < at:
            synced[found[1]] = i
        after |= bool(found) and i > at and found is not None and found[1] == str(final.parent)
    names = [final, *final.rglob("*")]
    late = 0
    for name in names:
        there = staging + str(name).removeprefix(str(final))
        folder_later = name == final or synced.get(there, at) < synced.get(os.path.dirname(there), -1)
        late += there not in synced or not folder_later
    above = [final.parent.parent, final.parent.parent.parent]
    return len(names) + 1 + len(above), late + (not after) + sum(str(f) not in synced for f in above)


# ------------------------------------------------------------------------------------------------------- table


def main() -> None:
    """Runs the rows and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer times, under a minute")
    parser.add_argument("--only", default=",".join(ROWS), help=f"some of {', '.join(ROWS)}")
    given = parser.parse_args()
    names = given.only.split(",")
    if unknown := [name for name in names if name not in ROWS]:
        parser.error(f"there is no row {unknown}; there are {', '.join(ROWS)}")
    print(
        "| what is promised | what was tried | how often | lost | seconds |\n|---|---|---|---|---|",
        flush=True,
    )
    failed = False
    for name in names:
        promise, function = ROWS[name]
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = function(Path(folder), given.quick)
            except BROKEN as error:
                traceback.print_exc()
                found = Found(f"it ended with {type(error).__name__}", 1, 1)
        failed |= bool(found.lost)
        times, lost = (found.times, found.lost) if not found.note else (found.note, "")
        cells = (promise, found.tried, times, lost, f"{time.monotonic() - began:.0f}")
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
