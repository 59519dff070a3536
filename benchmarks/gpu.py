"""What compiling cannot settle, in ten minutes on any machine with a GPU: one command, one dated page.

    python benchmarks/gpu.py                               # all GPUs of this machine: 9 minutes
    python benchmarks/gpu.py --minutes 30                  # what did not fit into nine
    python benchmarks/gpu.py --parts peak numbers          # some of it: peak, donation, numbers, cost, ...
    python benchmarks/gpu.py --tiny                        # every part on 8 simulated CPU devices, no GPU: 2 minutes

Writes `<out>/<date>-gpu-<device>.md`, and beside it the rows as JSON lines (each when it is measured) and the
log of what the processes printed. Without a GPU the short form is what runs; its page says what a CPU cannot
show.

[Note: a run that is cut short]
The parts run in the order of importance, each within a share of the time that is left. Every part runs in
processes of its own, started here, where jax is never used: a crash costs one case, and the part goes on with
the next one; what is over its time is ended, with all that it has started, and the next part begins. On a GPU the
cases of a part that measures no time run side by side, in processes that share its memory. The page is written
anew after every process, and on Ctrl-C and SIGTERM.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import datetime
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from gpu_parts import PARTS, machine
from gpu_parts.page import page
from gpu_parts.process import append, command, driver_of, end_group

RESERVE = 5.0  # seconds for the last page
LEAST = 3.0  # seconds in which no case is begun
MOST_JOBS = 8  # processes side by side
CORES = 2  # for each of them
SPEAKS = re.compile(r"^(?![IW]\d{4} |WARNING: All log).*\S")  # a line that is not from XLA's own log
SHOWN = ("XLA_", "JAX_", "NCCL_", "CUDA_VISIBLE", "NPROC")


def budget(left: float, weights: Sequence[float]) -> float:
    """Seconds for the first of some parts; what it does not need is left for the others."""
    return max(left, 0.0) * weights[0] / sum(weights)


@dataclasses.dataclass
class Part:
    """One part as it runs.

    Attributes:
      name, module: as in PARTS.
      budget: seconds.
      seconds: that it took.
      cases: their names.
      finished: how many of them ended well.
      left: why some did not begin; empty where all did.
    """

    name: str
    module: str
    budget: float = 0.0
    seconds: float = 0.0
    cases: list[str] = dataclasses.field(default_factory=list)
    finished: int = 0
    left: str = ""

    @property
    def code(self) -> Any:
        """Its module."""
        return importlib.import_module(self.module)

    def described(self, events: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """For the page."""
        rows = [e["row"] for e in events if e["part"] == self.name and "row" in e]
        found = self.code.findings(rows) if hasattr(self.code, "findings") else []
        return {
            **dataclasses.asdict(self),
            "title": self.code.TITLE,
            "asked": self.code.ASKED,
            "findings": found,
        }


class Run:
    """All parts, within a time."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.began = args, time.monotonic()
        self.parts = {**PARTS, **{m.rsplit(".", 1)[-1]: m for m in args.also}}
        self.asked = [
            n for n in self.parts if args.parts is None or n in args.parts or self.parts[n] in args.also
        ]
        self.done: list[Part] = []
        self.processes: set[subprocess.Popen] = set()
        self.writing = threading.Lock()
        self.date = datetime.date.today().isoformat()
        args.out.mkdir(parents=True, exist_ok=True)
        self.machine = self.probed(args.tiny)
        self.config = machine.config_of(self.machine, tiny=args.tiny, every=args.every)
        kind = re.sub(r"[^a-z0-9]+", "-", self.machine["kind"].lower()).strip("-")
        name = f"{self.date}-gpu-" + (
            "cpu-short" if self.config["tiny"] else f"{self.machine['count']}x{kind}"
        )
        self.page, self.rows, self.log = (args.out / f"{name}{end}" for end in (".md", ".jsonl", ".log"))
        self.rows.write_text("")
        self.log.write_text("")

    def probed(self, tiny: bool) -> dict[str, Any]:
        """The devices, asked of a process of its own."""
        done = subprocess.run(
            command({"probe": True}),
            env=machine.environment(tiny),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"benchmarks/gpu.py: jax does not start here:\n{done.stderr[-2000:]}")
        return json.loads(done.stdout.splitlines()[-1])

    @property
    def took(self) -> float:
        return time.monotonic() - self.began

    def run(self) -> Path:
        """Runs what was asked for; returns the page's path."""
        waiting = [Part(n, self.parts[n]) for n in self.asked]
        try:
            while waiting:
                weights = [p.code.WEIGHT for p in waiting]
                part = waiting.pop(0)
                part.budget = budget(self.args.minutes * 60 - RESERVE - self.took, weights)
                self.done.append(part)
                began = time.monotonic()
                try:
                    self.run_part(part, began + part.budget)
                finally:
                    part.seconds = time.monotonic() - began
                    self.write()
                print(
                    f"{part.name}: {part.finished} of {len(part.cases)} cases, {part.seconds:.0f} s",
                    flush=True,
                )
        except KeyboardInterrupt:
            self.done[-1].left = "stopped by Ctrl-C or SIGTERM"
        self.write()
        return self.page

    def run_part(self, part: Part, until: float) -> None:
        """All cases of a part: of one process as many as it comes to; on a GPU one, where peaks are read."""
        every = part.code.cases(self.config)
        part.cases = [c for c in every if not self.config["short"] or c in part.code.SHORT]
        if len(part.cases) < len(every):
            part.left = f"the short form runs {len(part.cases)} of {len(every)} cases"
        jobs = self.jobs(part)
        alone = part.code.FRESH and self.config["on_gpu"]
        groups = [[c] for c in part.cases] if alone else [part.cases[i::jobs] for i in range(jobs)]
        waiting = collections.deque(g for g in groups if g)

        def work() -> None:
            while waiting and time.monotonic() + LEAST < until:
                left = self.run_cases(part, waiting.popleft(), until, jobs)
                if left:
                    waiting.appendleft(left)

        with ThreadPoolExecutor(jobs) as pool:
            try:
                for worker in [pool.submit(work) for _ in range(jobs)]:
                    worker.result()
            except BaseException:  # Ctrl-C: what is waited for ends at once
                waiting.clear()
                for process in self.processes:
                    end_group(process)
                raise
        left = [c for group in waiting for c in group]
        if left:
            part.left = f"no time for {len(left)} of {len(part.cases)} cases: {'; '.join(left)}"

    def jobs(self, part: Part) -> int:
        """Processes of a part at a time."""
        several = self.config["on_gpu"] and part.code.SIDE_BY_SIDE
        return max(min(MOST_JOBS, (os.cpu_count() or 1) // CORES), 1) if several else 1

    def run_cases(self, part: Part, now: list[str], until: float, jobs: int) -> list[str]:
        """One process over some cases; returns those that it did not come to."""
        ended = self.child(part, now, until, jobs)
        events = [e for e in self.events() if e["part"] == part.name and e["case"] in now]
        part.finished += sum("finished" in e for e in events)
        begun = [e["case"] for e in events if "begun" in e]
        over = {e["case"] for e in events if "finished" in e or "failed" in e}
        for case in (c for c in begun if c not in over):
            self.add({"part": part.name, "case": case, "failed": ended})
        if not begun:  # its process did not come to the first case
            self.add({"part": part.name, "case": now[0], "failed": ended})
            begun = now[:1]
        self.write()
        return [c for c in now if c not in begun]

    def child(self, part: Part, cases: list[str], until: float, jobs: int) -> str:
        """Runs one process over some cases; how it ended, should one be unfinished."""
        told = {
            "part": part.name,
            "module": part.module,
            "cases": cases,
            "config": self.config,
            "rows": str(self.rows),
        }
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(
                command(told), env=machine.environment(self.config["tiny"], jobs, part.code.XLA),
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
            self.processes.add(process)
            try:
                process.wait(timeout=max(until - time.monotonic(), 0.1))
                ended = f"its process ended with {process.returncode}"
            except subprocess.TimeoutExpired:
                ended = f"ended after the part's {part.budget:.0f} s"
            finally:
                end_group(process)
                self.processes.discard(process)
            log.seek(0)
            text = log.read().decode(errors="replace")
        with self.log.open("a") as file:
            file.write(text)
        said = [x for x in text.splitlines() if SPEAKS.search(x)]
        return f"{ended}; last words: {said[-1][:200]}" if said else ended

    def events(self) -> list[dict[str, Any]]:
        """What has been written so far; a line that was cut short does not count."""
        found = []
        for line in self.rows.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                found.append(json.loads(line))
        return found

    def add(self, event: dict[str, Any]) -> None:
        append(self.rows, event)

    def write(self) -> None:
        """The page, in one piece: a page that is there is whole."""
        events = self.events()
        driver = driver_of() if self.config["on_gpu"] else ""
        set_here = {k: v for k, v in machine.environment(self.config["tiny"]).items() if k.startswith(SHOWN)}
        run = {
            "date": self.date, "command": " ".join(["python benchmarks/gpu.py", *self.args.said]),
            "minutes": self.args.minutes, "took": self.took, "machine": self.machine, "driver": driver,
            "environment": set_here, "parts": list(self.parts), "asked": self.asked,
        }  # fmt: skip
        text = page(run, [p.described(events) for p in self.done], events)
        draft = self.page.with_suffix(".tmp")
        with self.writing:
            draft.write_text(text, encoding="utf-8")
            draft.replace(self.page)


def main(args: Sequence[str] | None = None) -> Path:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="for all parts together")
    parser.add_argument(
        "--parts", nargs="*", choices=list(PARTS), help="some of them; all where this is not said"
    )
    parser.add_argument(
        "--also", nargs="+", default=[], help="modules with parts of your own, last in the order"
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="the short form on simulated CPU devices, also where there is a GPU",
    )
    parser.add_argument("--every", action="store_true", help="every case, also in the short form")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    found = parser.parse_args(args)
    found.said = list(sys.argv[1:] if args is None else args)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what is started here ends with this process
    path = Run(found).run()
    print(path)
    return path


if __name__ == "__main__":
    main()
