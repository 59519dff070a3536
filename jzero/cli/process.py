"""Runs a job in a process of its own: shows progress on standard error, collects answers and the end of a crash."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from jzero.cli.inputs import InputError
from jzero.cli.job import Answers, Job, Json

# Imports the same jzero as here, and nothing else from its folder or the current one: a file there, such as jax.py,
# must not shadow an installed module.
START = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("jzero", sys.argv[2])
sys.modules["jzero"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["jzero"])
from jzero.cli.worker import main
main()
"""


def run_job(job: Job) -> Answers:
    """What a job answers: `about` the pod; `results` and `pages` by stage; `lines`. A crashed stage has a `crash` text.

    Raises:
      InputError: the compiling process could not use its input.
    """
    answers: Answers = {"about": {}, "results": {}, "lines": {}, "pages": {}}
    left = list(job.stages)
    with _progress() as show:
        while left:
            stage, crash = _attempt(job, left, answers, show)
            if not crash:
                break
            if stage is None:
                raise InputError(f"the compiling process ended before it began: {crash}")
            if stage in answers["results"]:  # the stage had ended
                print(f"other numbers of GPUs could not be estimated: {crash}", file=sys.stderr)
                break
            answers["results"][stage] = {"stage": stage, "crash": crash}
            left = left[left.index(stage) + 1 :]
    return answers


def run_fit(job: Job) -> Json:
    """What a job with `fit` answers: `text`, and `found` as plain data.

    Raises:
      InputError: the compiling process could not use its input, or ended.
    """
    with _progress() as show, _worker(job.to_json()) as (events, process, log):
        for event in events:
            kind = event.pop("event")
            if kind == "doing":
                show(event["text"])
            elif kind == "error":
                raise InputError(event["text"])
            elif kind == "fit":
                return event
        code = process.wait()
        log.seek(0)
        raise InputError(f"the compiling process ended: {_ending(code, log.read().decode(errors='replace'))}")


def _attempt(
    job: Job, stages: list[int], answers: Answers, show: Callable[[str], None]
) -> tuple[int | None, str]:
    """One process, for the stages that are left: the stage it was at, and how it crashed, empty if it did not."""
    stage: int | None = None
    with _worker(dataclasses.replace(job, stages=stages).to_json()) as (events, process, log):
        for event in events:
            kind = event.pop("event")
            if kind == "doing":
                show(_where(job.stages, answers["results"], stage) + event["text"])
            elif kind == "stage":
                stage = event["stage"]
            elif kind == "about":
                answers["about"] = event
            elif kind == "result":
                answers["results"][event["result"]["stage"]] = event["result"]
                if event["page"] is not None:
                    answers["pages"][event["result"]["stage"]] = event["page"]
            elif kind == "lines":
                lines = event["lines"].items()
                answers["lines"] = {int(s): {int(n): b for n, b in totals.items()} for s, totals in lines}
            elif kind == "error":
                raise InputError(event["text"])
            elif kind == "end":
                return stage, ""
        code = process.wait()
        log.seek(0)
        return stage, _ending(code, log.read().decode(errors="replace"))


@contextlib.contextmanager
def _worker(job: str) -> Iterator[tuple[Iterator[Json], subprocess.Popen, IO[bytes]]]:
    """The process, its events, and the file that holds what it prints. It ends with the block."""
    ours, theirs = os.pipe()
    env = os.environ | {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2"}
    package = Path(__file__).parents[1] / "__init__.py"
    command = [sys.executable, "-P", "-c", START, str(theirs), str(package)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=env, pass_fds=[theirs]
        )
        os.close(theirs)
        try:
            with os.fdopen(ours) as pipe:
                assert process.stdin is not None
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(job.encode())
                    process.stdin.close()
                yield (json.loads(line) for line in pipe), process, log
        finally:
            process.kill()
            process.wait()


def _ending(code: int, printed: str) -> str:
    """`killed by SIGABRT: Check failed: ...`."""
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    telling = [x for x in lines if "Check failed" in x or "Error" in x or x.startswith("F0")]
    last = (telling or lines or ["nothing was printed"])[-1]
    return f"{how}: {last[:300]}"


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A function that shows what is being done: beside a spinner on a terminal, elsewhere as a line."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: print(text, file=sys.stderr, flush=True)
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting")
        yield lambda text: progress.update(task, description=text)


def _where(stages: list[int], results: dict[int, Json], stage: int | None) -> str:
    """`stage 2 (3 of 4, about 20 s): `: how far a job is, and how long the stage before took."""
    if stage is None:
        return ""
    took = [r["seconds"] for r in results.values() if "seconds" in r]
    about = f", about {max(took[-1], 1):.0f} s" if took else ""
    return f"stage {stage} ({stages.index(stage) + 1} of {len(stages)}{about}): "
