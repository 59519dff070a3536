"""A run that is told to stop, by a scheduler (SIGTERM) or by Ctrl-C, ends after a step, at a checkpoint."""

from __future__ import annotations

import os
import signal
from typing import Any

import jax
from jax.experimental import multihost_utils

NOTICE = b"\nCtrl-C: the run ends after this step, with a checkpoint. Once more: at once, without one.\n"


class Stopping:
    """Tells when to stop. One process listens for SIGTERM itself; several leave it to JAX's preemption service.

    That service makes all processes stop after the same step when any of them is told to. The first Ctrl-C tells it
    too; the second one raises KeyboardInterrupt, as without this class.
    """

    def __init__(self):
        self._told: signal.Signals | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stopping:
        heard = (signal.SIGTERM, signal.SIGINT) if jax.process_count() == 1 else (signal.SIGINT,)
        self._before = {number: signal.signal(number, self._hear) for number in heard}
        return self

    def __exit__(self, *exc: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)

    def _hear(self, number: int, frame: Any) -> None:
        self._told = signal.Signals(number)
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)  # for the second one
            os.write(2, NOTICE)  # a signal may come in the middle of a print
            if jax.process_count() > 1:
                os.kill(os.getpid(), signal.SIGTERM)  # JAX's service hears that, and tells the others

    def after(self, step: int) -> signal.Signals | None:
        """What stops the run after this step, None where nothing does; every process asks after every step."""
        if jax.process_count() == 1:
            return self._told
        return signal.SIGTERM if multihost_utils.reached_preemption_sync_point(step) else None
