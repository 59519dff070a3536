"""A run that is told to stop (SIGTERM: a scheduler takes the machine back) ends after a step, at a checkpoint."""

from __future__ import annotations

import signal
from typing import Any

import jax
from jax.experimental import multihost_utils


class Stopping:
    """Tells when to stop. One process listens for SIGTERM itself; several leave it to JAX's preemption service.

    That service makes all processes stop after the same step when any of them is told to.
    """

    def __init__(self):
        self._told = False
        self._before: Any = None

    def __enter__(self) -> Stopping:
        if jax.process_count() == 1:
            self._before = signal.signal(signal.SIGTERM, self._hear)
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _hear(self, number: int, frame: Any) -> None:
        self._told = True

    def after(self, step: int) -> bool:
        """True when the run should stop after this step; every process asks after every step."""
        return self._told or (jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step))
