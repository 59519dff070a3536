"""What jzero assumes about JAX, XLA, Flax and orbax, one named check each: `python tests/canary.py`.

The page to open on release day: it runs on any jax, also one that jzero does not support yet. Each check
(tests/canaries/) states one assumption, names the files of jzero that rely on it, and looks at what the installed
versions do, most of them with jax alone. An exception fails its check alone. The checks that compile for GPUs run in
one process, the others in a second one; if XLA aborts a process, the check that was running has failed, and a new
process runs the rest.

No GPU is needed. Without the extra `pod` (JAX's CUDA plugin and ptxas) what takes a GPU's compiler is `not looked at`,
which is never ok. The exit status is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from canaries import CHECKS, SKIPPED, programs  # noqa: E402

SUBJECTS = (  # in the order of the table
    "imported_names", "equations", "tracing", "program_text", "collectives", "optimizations", "host_memory",
    "flax_objects", "orbax_files",
)  # fmt: skip
for subject in SUBJECTS:
    importlib.import_module(f"canaries.{subject}")
PACKAGES = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "flax", "optax", "orbax-checkpoint")
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "NPROC": "32",
    "JZERO_POD_CACHE": "off", "TF_CPP_MIN_LOG_LEVEL": "3",
}  # fmt: skip
PATIENCE = 900  # seconds for one process: after that the check that it is at hangs


def run_here(wanted: Sequence[str], to: Path) -> None:
    """The checks in this process, and a line in a file when one has ended."""
    if any(CHECKS[n].gpu for n in wanted):
        with contextlib.suppress(Exception):  # jax's plugin starts before `import jzero` hides it
            programs.topology("h100")
    with to.open("a", buffering=1) as file:
        for name in wanted:
            start = time.monotonic()
            result = CHECKS[name].result()
            file.write(json.dumps([name, " ".join(result.split()), time.monotonic() - start]) + "\n")


def run_apart(wanted: Sequence[str]) -> Iterator[tuple[str, str, float]]:
    """(name, result, seconds) of each check, made in another process; in a new one after a check that ended it."""
    left = list(wanted)
    while left:
        with tempfile.TemporaryDirectory() as folder:
            to, errors = Path(folder) / "results", Path(folder) / "errors"
            to.touch()
            with errors.open("w") as log:
                words = [sys.executable, __file__, "--to", str(to), "--only", *left]
                process = subprocess.Popen(words, stdout=log, stderr=log, env=os.environ | ENVIRONMENT)
                try:
                    code: Any = process.wait(PATIENCE)
                except subprocess.TimeoutExpired:
                    process.kill()
                    code = f"none in {PATIENCE} s"
            done = [json.loads(line) for line in to.read_text().splitlines()]
            said = [x for x in errors.read_text(errors="replace").splitlines() if x.strip()]
        yield from ((name, result, seconds) for name, result, seconds in done)
        left = left[len(done) :]
        if left:
            last = said[-1][:200] if said else ""
            yield left.pop(0), f"the process ended (exit status {code}): {last}", 0.0


def versions() -> str:
    """The versions of what is installed."""
    found = {"Python": ".".join(map(str, sys.version_info[:3]))}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return ", ".join(f"{k} {v}" for k, v in found.items())


def run(wanted: Sequence[str]) -> dict[str, tuple[str, float]]:
    """(result, seconds) by name; the checks that compile for GPUs run beside the others."""
    found: dict[str, tuple[str, float]] = {}

    def work(some: list[str]) -> None:
        found.update((name, (result, seconds)) for name, result, seconds in run_apart(some))

    groups = ([n for n in wanted if CHECKS[n].gpu is gpu] for gpu in (True, False))
    threads = [threading.Thread(target=work, args=(some,)) for some in groups]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return {n: found[n] for n in wanted}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=sorted(CHECKS), metavar="NAME", help="some checks")
    parser.add_argument(
        "--assumptions", action="store_true", help="print what each check assumes, and check nothing"
    )
    parser.add_argument("--seconds", action="store_true", help="print how long each check took")
    parser.add_argument("--to", type=Path, help=argparse.SUPPRESS)  # the process that checks
    args = parser.parse_args()
    wanted = [n for n in CHECKS if not args.only or n in args.only]
    if args.to:
        run_here(wanted, args.to)
        return 0
    if args.assumptions:
        for name in wanted:
            print(f"{name}\n    {CHECKS[name].assumes}\n    relied on in {CHECKS[name].files}")
        return 0
    print(versions(), flush=True)
    found, width = run(wanted), max(map(len, wanted))
    for name, (result, seconds) in found.items():
        took = f"{seconds:6.1f} s  " if args.seconds else ""
        print(f"  {name:<{width}}  {took}{result:<4}  {CHECKS[name].files}")
        if result != "ok" and not result.startswith(SKIPPED):
            print(f"  {'':<{width}}  assumed: {CHECKS[name].assumes}")
    bad = sum(result != "ok" and not result.startswith(SKIPPED) for result, _ in found.values())
    skipped = sum(result.startswith(SKIPPED) for result, _ in found.values())
    print(f"{len(found)} checks: {len(found) - bad - skipped} ok, {bad} failed, {skipped} not looked at")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
