"""What watches the steps of a process for `jzero.deadline`: one thread waits for results, and one reads the clock.

    pause ─call──▶ step ─smallest result is there──▶ pause
                    │ compiling: JAX's compiler is on the stack of the calling thread
                    ▼ longer than its limit, and no process that answers has time left
                  stacks into a file, the account to stderr and to all others, status 75
"""

from __future__ import annotations

import dataclasses
import faulthandler
import os
import statistics
import sys
import threading
import time
import traceback
from collections import deque
from pathlib import Path
from types import FrameType

import jax

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
        busy = {i: x.told for i, x in (others or {}).items() if x.told is not None and x.has_time}
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
