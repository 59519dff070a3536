"""`deadline`: a step that does not come back ends the job, with an account of who was late.

Dispatch is asynchronous: a call returns long before its program has run, and a program that waits forever for another
process never raises an error. Three threads therefore run beside the loop: one blocks on the smallest result of each
call, one watches the clock (`step_watch.py`), and one tells the other processes what this one is doing
(`roll_call.py`).
"""

from __future__ import annotations

import functools
import itertools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jzero.core.errors import check_function, check_kind, check_number
from jzero.core.jaxprs import is_tracer
from jzero.core.step_watch import WHERE, Limits, Watched

_NUMBERS = itertools.count()


def deadline(
    step: Callable[..., Any],
    *,
    seconds: float | None = None,
    compile_seconds: float = 3600.0,
    pause_seconds: float = 1800.0,
    folder: str | Path | None = None,
) -> Deadline:
    """A train step that ends the job if it does not come back, so that a scheduler starts it again.

    A collective that waits for a process that hangs raises no error. With a deadline, each process that still runs
    writes the Python stacks of its threads into a file, says on stderr which process is late and what it was doing, and
    exits with status 75. Time counts from the call, or from the end of the step before, until the result is there.

    Args:
      step: what the loop calls: jitted by `jax.jit`, `nnx.jit` or `jzero.jit`, or a plain function around that.
      seconds: that a step may take. None: ten times the median of the last 20 steps, at least 60 s; until 5 of them are
        known, `compile_seconds`.
      compile_seconds: that a call may trace and compile for.
      pause_seconds: that may lie between the end of a step and the next call: data, evaluation, saving a checkpoint.
      folder: where the stacks are written, as `deadline-process-0.txt`. None: the folder for temporary files.

    Returns:
      A function like `step`, with its attributes (`lower`, `trace`). `close()`, or the end of `with`, ends the watch;
      so does the end of the program, or the last reference to it. A loop that ends without that is in a pause, also in
      a notebook.

    Raises:
      TypeError, ValueError: `step` is not a function; a time is not a positive number; `folder` cannot be written.

    Cost:
      Three threads, which sleep; with several processes each writes 100 bytes to JAX's key-value store every 2 s.
      Nothing of the step changes, and nothing waits for it.

    With several processes:
      All must make their deadlines in the same order. A process that is late first asks what the others do: as long as
      one that answers has time left (it compiles, or saves), it waits. JAX itself aborts the processes, with status
      134, when one sends no heartbeats for 100 s: pass `heartbeat_timeout_seconds` above `seconds` to
      `jax.distributed.initialize`. What is smallest among the results is waited for; a step that returns no array is
      timed by its calls alone.

    Example:
      >>> import jax, jax.numpy as jnp, jzero
      >>> step = jax.jit(lambda x: (x + 1, x.sum()))
      >>> with jzero.deadline(step, seconds=300) as step:
      ...     for _ in range(3):
      ...         x, total = step(jnp.zeros(4))
    """
    check_function(step, "step", where=WHERE)
    times = {"seconds": seconds, "compile_seconds": compile_seconds, "pause_seconds": pause_seconds}
    for name, value in times.items():
        if value is not None or name != "seconds":
            check_number(value, name, "a positive number of seconds", lambda x: x > 0, where=WHERE)
    check_kind(folder, "folder", (str, Path), "a path", where=WHERE, optional=True)
    path = Path(tempfile.gettempdir() if folder is None else folder)
    if not path.is_dir() or not os.access(path, os.W_OK):
        raise ValueError(f"{WHERE}: folder {path} is not a folder that can be written.")
    return Deadline(step, Limits(seconds, compile_seconds, pause_seconds), path)


class Deadline:
    """What `deadline` returns."""

    def __init__(self, step: Callable[..., Any], limits: Limits, folder: Path) -> None:
        functools.update_wrapper(self, step, updated=())
        self._watch = Watched(limits, folder, next(_NUMBERS))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the step."""
        self._watch.begin()
        leaf = None
        try:
            result = self.__wrapped__(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
            leaf = smallest(result)
            return result
        finally:
            self._watch.called(leaf)

    def __getattr__(self, name: str) -> Any:
        """Of the step: `lower`, `trace`, `eval_shape`."""
        if name in ("_watch", "__wrapped__"):
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    def __enter__(self) -> Deadline:
        """The step."""
        return self

    def __exit__(self, *error: object) -> None:
        """Ends the watch."""
        self.close()

    def __del__(self) -> None:
        """Ends the watch, without its lock: the collector may run in a thread that holds it."""
        closed = self._watch.closed if "_watch" in self.__dict__ else None
        if closed is not None:
            closed.set()

    def close(self) -> None:
        """Ends the watch; a later call begins it again."""
        self._watch.end()


def smallest(result: Any) -> jax.Array | None:
    """The array with the fewest bytes, of equal ones the last: a loss, rather than a counter that is donated."""
    arrays = [x for x in jax.tree.leaves(result) if isinstance(x, jax.Array) and not is_tracer(x)]
    return min(reversed(arrays), key=lambda x: x.size * x.dtype.itemsize, default=None)
