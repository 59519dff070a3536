"""What the processes of a job tell each other of their steps, through JAX's key-value store.

The store is in process 0: when that is stopped, a call to it never returns. So every call is made in a thread that may
be left behind.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from jzero.core.errors import listing
from jzero.core.processes import key_value_client, number_and_count

T = TypeVar("T")
SHOWN = 8
"""Processes in an account."""
PHASES = {
    "run": "in step {step}, its program on the devices,",
    "call": "in the call of step {step}",
    "compile": "compiling step {step}",
    "pause": "between step {step} and the next call",
}


@dataclasses.dataclass(frozen=True)
class Told:
    """What a process is doing.

    Attributes:
      phase: a key of `PHASES`.
      step: the number of the call, from 1.
      seconds: for how long.
      limit: how long it may take.
      why: what the limit is, in words.
    """

    phase: str
    step: int
    seconds: float
    limit: float
    why: str

    @property
    def left(self) -> float:
        """Seconds until its limit."""
        return self.limit - self.seconds

    @property
    def where(self) -> tuple[int, str]:
        """Step and phase."""
        return self.step, self.phase

    @property
    def text(self) -> str:
        """In words."""
        return f"{PHASES[self.phase].format(step=self.step)} for {self.seconds:.1f} s"


@dataclasses.dataclass(frozen=True)
class Answer:
    """What is known of another process.

    Attributes:
      told: what it said last; None: nothing yet.
      gives_sign: it has said something new while it was being asked.
    """

    told: Told | None
    gives_sign: bool

    @property
    def last(self) -> str:
        """What it said last, in words."""
        return "nor was there one before" if self.told is None else f"last {self.told.text}"

    @property
    def has_time(self) -> bool:
        """It is at work, and its limit is not reached."""
        return self.gives_sign and self.told is not None and self.told.left > 0


class RollCall:
    """Says every `beat` seconds what this process is doing, and hears whether another one ends the job.

    Args:
      name: of the keys, the same in all processes.
      beat: seconds.
      told: what this process is doing.
      summoned: called with the account of a process that ends the job.
      closed: set at the end of the loop.
    """

    def __init__(
        self, name: str, beat: float, told: Callable[[], Told], summoned: Callable[[str], object],
        closed: threading.Event,
    ) -> None:  # fmt: skip
        self.name, self.beat, self._told, self._summoned, self._closed = name, beat, told, summoned, closed
        self.client = key_value_client()
        self.me, self.count = number_and_count() if self.client is not None else (0, 1)
        if self.count > 1:
            threading.Thread(target=self._run, name="jzero.deadline: roll call", daemon=True).start()

    def _run(self) -> None:
        number = 0
        try:
            while not self._closed.wait(self.beat):
                number += 1
                self._set(f"told/{self.me}", json.dumps([number, dataclasses.astuple(self._told())]))
                if alarms := self.client.key_value_dir_get(f"{self.name}/alarm/"):
                    self._summoned(alarms[0][1])
        except Exception:  # the store is gone, and JAX ends this process
            return

    def _set(self, key: str, value: str) -> None:
        self.client.key_value_set(f"{self.name}/{key}", value, allow_overwrite=True)

    def _read(self) -> dict[int, tuple[int, Told]]:
        rows = self.client.key_value_dir_get(f"{self.name}/told/")
        said = {int(key.rpartition("/")[2]): json.loads(value) for key, value in rows}
        return {i: (number, Told(*told)) for i, (number, told) in said.items() if i != self.me}

    def answers(self, bound: float) -> dict[int, Answer] | None:
        """What the other processes do now; None if the store does not answer."""
        if self.count == 1:
            return {}
        before = within(bound, self._read)
        if before is None:
            return None
        time.sleep(3 * self.beat)
        after = within(bound, self._read)
        if after is None:
            return None
        others = {i: after.get(i) for i in range(self.count) if i != self.me}
        return {i: Answer(x and x[1], gives_sign=x is not None and x != before.get(i)) for i, x in others.items()}

    def account(self, mine: Told, others: Mapping[int, Answer] | None) -> list[str]:
        """Who is late, and a line for each process: those that give no sign, then by step."""
        if others is None:
            return ["Process 0, which has the key-value store, does not answer: it is the late one, or gone."]
        if not others:
            return []
        silent = {i: x for i, x in others.items() if not x.gives_sign}
        known = {self.me: mine, **{i: x.told for i, x in others.items() if x.gives_sign and x.told is not None}}
        order = sorted(known, key=lambda i: (known[i].step, known[i].phase != "pause", i))
        rows = [f"process {i}: no sign of it, {x.last}" for i, x in silent.items()]
        rows += [f"process {i}: {known[i].text}" for i in order]
        first = known[order[0]].where
        behind = [i for i in order if known[i].where == first]
        late = list(silent) or (behind if len(behind) < len(known) else [])
        said = "All are in the same step: something in it never ends."
        if late:
            more = f" and {len(late) - SHOWN} more" if len(late) > SHOWN else ""
            said = f"Late: process{'es' * (len(late) > 1)} {', '.join(map(str, late[:SHOWN]))}{more}."
        return [said, listing([[row] for row in rows], most=SHOWN)]

    def alarm(self, text: str, bound: float) -> None:
        """Ends the other processes, which hear the first account alone."""
        if self.count > 1:
            within(bound, lambda: self.client.key_value_set(f"{self.name}/alarm/first", text))

    def leave(self, bound: float) -> None:
        """Tells process 0 that this process has said everything; process 0, the store, stays until the others have."""
        if self.count == 1:
            return
        if self.me:
            within(bound, lambda: self._set(f"left/{self.me}", ""))
            return
        known, ends = 0, time.monotonic() + bound
        while known < self.count - 1 and time.monotonic() < ends:
            time.sleep(0.2)
            gone = within(1.0, lambda: self.client.key_value_dir_get(f"{self.name}/left/"))
            if gone is not None and len(gone) > known:
                known, ends = len(gone), time.monotonic() + bound


def within(seconds: float, run: Callable[[], T]) -> T | None:
    """The result of a function, run in a thread; None if it raises, or takes longer."""
    found: list[Any] = []

    def call() -> None:
        try:
            found.append(run())
        except Exception:  # no answer is an answer here
            return

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None
