"""Processes that `jax.distributed` has brought together: what fails on one of them, and its key-value store."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax._src import distributed
from jax.experimental import multihost_utils

T = TypeVar("T")


def everywhere(
    make: Callable[[], T],
    what: str,
    *,
    where: str,
    undo: Callable[[T], object] = lambda _: None,
    error: type[Exception] = RuntimeError,
) -> T:
    """What `make` returns on this process. If it fails on any process, all of them raise, and none waits for another.

    Args:
      make: called on every process.
      what: what cannot be done then: "open the files".
      where: the caller, for the message.
      undo: takes back what was made, on processes on which `make` succeeded.
      error: the exception that these raise.

    Raises:
      Exception: what `make` raised on this process; `error` where it failed on others alone.
    """
    try:
        made = make()
    except Exception as found:
        with contextlib.suppress(Exception):  # of processes that have lost each other: this error matters more
            _failed(found)
        raise
    try:
        others = _failed(None)
        if others:
            text = f"process {others[0]} failed; its error says why" if len(others) == 1 else ""
            text = text or f"processes {', '.join(map(str, others))} failed; their errors say why"
            raise error(f"{where}: cannot {what}: {text}.")
    except Exception as found:  # one of ours, or the processes have lost each other
        try:
            undo(made)
        finally:
            raise found
    return made


def _failed(error: Exception | None) -> list[int]:
    """The processes that have an error; every process calls this once."""
    if jax.process_count() == 1:
        return []
    return np.flatnonzero(multihost_utils.process_allgather(np.int32(error is not None))).tolist()


def key_value_client() -> Any:
    """The client of the store; None where `jax.distributed` was not started."""
    return distributed.global_state.client


def number_and_count() -> tuple[int, int]:
    """The number of this process, and how many there are; without starting a backend."""
    return distributed.global_state.process_id, distributed.global_state.num_processes


def wait_for(client: Any, key: str, milliseconds: int) -> str | None:
    """The value that another process writes under a key; None if the wait times out."""
    try:
        return client.blocking_key_value_get(key, milliseconds)
    except jax.errors.JaxRuntimeError:
        return None
