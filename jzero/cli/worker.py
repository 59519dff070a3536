"""The process that compiles: reads a job from standard input, writes one line of JSON per event to a given file.

XLA can end a process instead of raising, when a check inside of the compiler fails. The command line compiles
here, so that such an end is only a line in its table.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import traceback
from pathlib import Path
from typing import IO, Any

from jzero.cli.job import Job

PACKAGE = str(Path(__file__).parents[1])
SIZES = [2**i for i in range(11)]


def main() -> None:
    """Reads the job, answers with events: `doing`, `about`, `stage`, `result`, `lines`, `fit`, `error`, `end`."""
    with os.fdopen(int(sys.argv[1]), "w") as out:
        try:
            _run(Job.from_json(sys.stdin.read()), out)
        except (ValueError, TypeError, NotImplementedError, ImportError, RuntimeError) as error:
            said = f"{type(error).__name__}: {error}" if _is_foreign(error) else str(error)
            _say(out, event="error", text=said)
        except Exception:
            _say(out, event="error", text=traceback.format_exc(limit=-6))


def _run(job: Job, out: IO[str]) -> None:
    from jzero.cli.program import Subject
    from jzero.cli.results import result, totals_over

    _say(out, event="doing", text="loading the model")
    if job.fit is not None:
        from jzero.cli.fit import fitted

        _say(out, event="fit", **fitted(job, lambda text: _say(out, event="doing", text=text)))
        return
    subject = Subject.of(job)
    _say(out, event="about", gpus=len(subject.pod.devices), memory=subject.pod.memory_bytes,
         mesh=dict(subject.mesh.shape))  # fmt: skip
    for stage in job.stages:
        _say(out, event="stage", stage=stage)
        answer = result(subject, stage, lambda text: _say(out, event="doing", text=text))
        page = answer.pop("page", None)
        _say(out, event="result", result=answer | {"host_memory": _peak()}, page=page)
    if job.sizes:
        _say(out, event="doing", text="estimating other numbers of GPUs")
        lines = {stage: totals_over(subject, SIZES, stage) for stage in job.sizes}
        _say(out, event="lines", lines=lines)
    _say(out, event="end")


def _peak() -> int:
    """The most host memory that this process has held, in bytes.

    On Linux, `ru_maxrss` includes what the parent held when the process started; the status file does not.
    """
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = (x for x in status.read_text().splitlines() if x.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def _is_foreign(error: BaseException) -> bool:
    """True for an error that neither jzero nor the command line raised."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and not frame.tb_frame.f_code.co_filename.startswith(PACKAGE)


def _say(out: IO[str], **event: Any) -> None:
    out.write(json.dumps(event) + "\n")
    out.flush()
