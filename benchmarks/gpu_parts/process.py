"""The processes of benchmarks/gpu.py: one runs some cases of a part, and writes each row when it is there.

Started as `python gpu_parts/process.py <what to do, as JSON>`: {"probe": true} prints the devices; else "part" and
"module", the names of its "cases", "config", and "rows", the file to write to.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

GRACE = 3.0  # seconds between SIGTERM and SIGKILL


def command(told: dict[str, Any]) -> list[str]:
    """What starts such a process."""
    return [sys.executable, __file__, json.dumps(told)]


def append(path: Path, event: dict[str, Any]) -> None:
    """A line of the rows, on the disk when this returns."""
    with path.open("a") as file:
        file.write(json.dumps(event) + "\n")
        file.flush()
        os.fsync(file.fileno())


def end_group(process: subprocess.Popen) -> None:
    """Ends a process that was started here, and what it has started: they are one process group."""
    for number, wait in ((signal.SIGTERM, GRACE), (signal.SIGKILL, 0.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=wait)
    process.wait()


def driver_of() -> str:
    """The driver's version, where nvidia-smi says it."""
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
        return f"Driver {said.splitlines()[0].strip()}."
    except (OSError, subprocess.SubprocessError, IndexError):
        return ""


def child(told: dict[str, Any]) -> None:
    """A process of a part: its cases, each row written when it is there."""
    from gpu_parts import machine

    if "probe" in told:
        print(json.dumps(machine.probe()))
        return
    part, rows = importlib.import_module(told["module"]), Path(told["rows"])
    for case in told["cases"]:
        head = {"part": told["part"], "case": case}
        append(rows, {**head, "begun": True})
        gc.collect()  # what the last case had on the device
        try:
            for row in part.run(case, told["config"]):
                append(rows, {**head, "row": row})
            append(rows, {**head, "finished": True})
        except Exception as error:
            traceback.print_exc()
            append(
                rows,
                {**head, "failed": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"},
            )


if __name__ == "__main__":
    child(json.loads(sys.argv[1]))
