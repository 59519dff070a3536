"""`deadline`: a step that does not come back ends the job, with an account of who was late.

Dispatch is asynchronous: a call returns long before its program has run, and a program that waits for another process
forever raises nothing. So three threads stand beside the loop: one blocks on the smallest result of each call, one
reads the clock, and one tells the other processes what this one is doing (`roll_call.py`).

    pause ─call──▶ step ─smallest result is there──▶ pause
                    │ compiling: JAX's compiler is on the stack of the calling thread
                    ▼ longer than its limit, and no process that answers has time left
                  stacks into a file, the account to stderr and to all others, status 75
"""

from __future__ import annotations

import dataclasses
import faulthandler
import functools
import itertools
import os
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import jax

from jzero.core.errors import check_function, check_kind, check_number
from jzero.core.jaxprs import is_tracer
from jzero.core.roll_call import RollCall, Told, within

WHERE = "jzero.deadline"
STATUS = 75
"""What a process exits with: EX_TEMPFAIL of sysexits.h, "try again"."""
TIMES, LEAST, KNOWN, LAST = 10, 60.0, 5, 20
"""The default limit: so many times the median of the last steps, at least so many seconds, once so many are known."""
BEAT, BOUND = 2.0, 5.0
"""Seconds between two signs of a process; how long a file or the key-value store may take at the end."""
COMPILING = tuple(os.path.join("jax", "_src", *x) for x in (
    ("compiler.py",), ("interpreters", "mlir.py"), ("interpreters", "partial_eval.py"),
))  # fmt: skip
"""Where JAX traces, lowers and compiles."""
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
            check_number(value, name, "be a positive number of seconds", lambda x: x > 0, where=WHERE)
    check_kind(folder, "folder", (str, Path), "a path", where=WHERE, optional=True)
    path = Path(tempfile.gettempdir() if folder is None else folder)
    if not path.is_dir() or not os.access(path, os.W_OK):
        raise ValueError(f"{WHERE}: folder {path} is not a folder that can be written.")
    return Deadline(step, Limits(seconds, compile_seconds, pause_seconds), path)


@dataclasses.dataclass(frozen=True)
class Limits:
    """Seconds that a step, a compilation and a pause may take."""

    step: float | None
    compile: float
    pause: float

    def of_step(self, durations: deque[float]) -> tuple[float, str]:
        """The limit of a step, and what it is."""
        if self.step is not None:
            return self.step, ""
        if len(durations) < KNOWN:
            return self.compile, ""
        limit = TIMES * (median := statistics.median(durations))
        said = f"{TIMES} x the median of {len(durations)} steps, {median:.3g} s"
        return (limit, f" ({said})") if limit > LEAST else (LEAST, f" (which is more than {said})")

    @property
    def beat(self) -> float:
        """Seconds between two signs."""
        return min(BEAT, 0.1 * min(x for x in (self.step, self.compile, self.pause) if x is not None))


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


class Watched:
    """What is known of the steps of this process, and the threads that read it."""

    def __init__(self, limits: Limits, folder: Path, number: int) -> None:
        self.limits, self.folder, self.number = limits, folder, number
        self._lock, self._ending = threading.Lock(), threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._forget()

    def _forget(self) -> None:
        self.count, self.thread = 0, 0
        self.call: float | None = None
        self.results: deque[tuple[int, float, jax.Array]] = deque()
        self.last = time.monotonic()
        self.durations: deque[float] = deque(maxlen=LAST)
        self.closed: threading.Event | None = None
        self._waits_for = (0, 0)

    def begin(self) -> None:
        """A call begins; the first one starts the threads."""
        with self._lock:
            self.count += 1
            self.call, self.thread = time.monotonic(), threading.get_ident()
            started, self.closed = self.closed is not None, self.closed or threading.Event()
        if not started:
            self._start(self.closed)

    def _start(self, closed: threading.Event) -> None:
        self.roll = RollCall(f"jzero/deadline/{self.number}", self.limits.beat, self.told, self.summoned, closed)
        for run in (self._wait_for_results, self._read_clock):
            threading.Thread(target=run, args=(closed,), name=f"{WHERE}: {run.__name__}", daemon=True).start()

    def called(self, leaf: jax.Array | None) -> None:
        """A call has returned; `leaf`: what to wait for."""
        with self._arrived:
            if self.call is None:
                return
            began, self.call = self.call, None
            if leaf is None:
                self._ended(began)
            else:
                self.results.append((self.count, began, leaf))
                self._arrived.notify()

    def end(self) -> None:
        """The loop has ended."""
        with self._arrived:
            if self.closed is not None:
                self.closed.set()
                self._arrived.notify()
                self._forget()

    def _ended(self, began: float) -> None:
        now = time.monotonic()
        self.durations.append(now - max(began, self.last))
        self.last = now

    def _wait_for_results(self, closed: threading.Event) -> None:
        while True:
            with self._arrived:
                while not self.results and not closed.is_set():
                    self._arrived.wait(BEAT)
                if closed.is_set():
                    return
                _, began, leaf = self.results[0]
            try:
                leaf.block_until_ready()
                known = True
            except Exception:  # donated to a later step, whose end tells more; or the loop hears of the error itself
                known = False
            del leaf
            with self._lock:
                if closed.is_set():
                    return
                self.results.popleft()
                if known or not self.results:
                    self._ended(began)

    def told(self) -> Told:
        """What this process is doing."""
        with self._lock:
            now, call = time.monotonic(), self.call
            if self.results:
                number, began, _ = self.results[0]
            elif call is not None:
                number, began = self.count, call
            else:
                return Told("pause", self.count, now - self.last, self.limits.pause, "")
            since, thread = now - max(began, self.last), self.thread
            limit, why = self.limits.of_step(self.durations)
            waits = bool(self.results)
        if not waits and compiles(sys._current_frames().get(thread)):
            return Told("compile", number, since, self.limits.compile, "")
        return Told("run" if waits else "call", number, since, limit, why)

    def _read_clock(self, closed: threading.Event) -> None:
        while not closed.wait(self.limits.beat / 2):
            mine = self.told()
            if mine.left <= 0:
                self._late(mine, closed)

    def _late(self, mine: Told, closed: threading.Event) -> None:
        """Ends all processes, unless one that answers has time left."""
        path = self.write_stacks(f"{WHERE}: {mine.text}")
        others = self.roll.answers(BOUND)
        if closed.is_set() or self.told().left > 0:
            return
        busy = {i: x for i, x in (others or {}).items() if x is not None and x.left > 0}
        if busy and mine.phase != "pause":
            i, x = max(busy.items(), key=lambda item: item[1].left)
            if self._waits_for != (mine.step, i):
                self._waits_for = (mine.step, i)
                self.say(f"{mine.text}: waits for process {i}, {x.text}, up to {x.left:.0f} s.")
            return
        who = f"process {self.roll.me} is " if self.roll.count > 1 else ""
        first = f"{who}{mine.text}; the limit is {mine.limit:.3g} s{mine.why}."
        text = "\n".join([first, *self.roll.account(mine, others)])
        self._exit(text, path, heard=others is not None)

    def say(self, text: str) -> None:
        """To stderr, not through buffers that another thread may hold."""
        me = f" (process {self.roll.me})" if self.roll.count > 1 else ""
        os.write(2, f"{WHERE}{me}: {text}\n".encode())

    def summoned(self, text: str) -> None:
        """Another process is late, and has said so."""
        self._exit(text, self.write_stacks(f"{WHERE}: {self.told().text}; another process says:\n{text}"))

    def _exit(self, text: str, path: Path | None, *, heard: bool = True) -> None:
        """Ends this process, and tells the others if they may hear it."""
        if not self._ending.acquire(blocking=False):
            time.sleep(60)  # another thread is at it
        if heard:
            self.roll.alarm(text, BOUND)
        where = "could not be written" if path is None else f"are in {path}"
        self.say(f"{text}\nThe stacks of this process {where}. It exits with status {STATUS}.")
        if heard:
            self.roll.leave(BOUND)
        os._exit(STATUS)  # without the handlers of exit: JAX's waits for the process that is late

    def write_stacks(self, head: str) -> Path | None:
        """Writes what all threads are doing; None if that takes longer than `BOUND`."""
        path = self.folder / f"deadline-process-{self.roll.me}.txt"

        def write() -> Path:
            with path.open("w", encoding="utf-8") as f:
                f.write(f"{head}\n\n")
                f.flush()
                faulthandler.dump_traceback(f, all_threads=True)
                names = {t.ident: t.name for t in threading.enumerate()}
                for thread, frame in sys._current_frames().items():
                    f.write(f"\n{names.get(thread, thread)}\n{''.join(traceback.format_stack(frame))}")
            return path

        return within(BOUND, write)


def compiles(frame: FrameType | None) -> bool:
    """Whether JAX traces, lowers or compiles in this frame or below it."""
    while frame is not None:
        if frame.f_code.co_filename.endswith(COMPILING):
            return True
        frame = frame.f_back
    return False


def smallest(result: Any) -> jax.Array | None:
    """The array with the fewest bytes, of equal ones the last: a loss, rather than a counter that is donated."""
    arrays = [x for x in jax.tree.leaves(result) if isinstance(x, jax.Array) and not is_tracer(x)]
    return min(reversed(arrays), key=lambda x: x.size * x.dtype.itemsize, default=None)
