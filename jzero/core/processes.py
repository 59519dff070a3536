"""Processes that `jax.distributed` has brought together: what fails on one of them, and its key-value store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax._src import distributed
from jax.experimental import multihost_utils

from jzero.core.errors import counted

T = TypeVar("T")


def everywhere(
    make: Callable[[], T],
    doing: str,
    *,
    undo: Callable[[T], object] = lambda _: None,
    error: type[Exception] = RuntimeError,
) -> T:
    """What `make` returns on this process. If it fails on any process, all of them raise, and none waits for another.

    Args:
      make: called on every process.
      doing: where, and what cannot be done: "here: open the files".
      undo: takes back what was made, on processes on which `make` succeeded.
      error: what these raise.
    """
    try:
        made, failed = make(), None
    except Exception as found:
        made, failed = None, found
    numbers = [0]
    if jax.process_count() > 1:
        numbers = multihost_utils.process_allgather(np.int32(failed is not None))
    if failed is not None:
        raise failed
    if where := np.flatnonzero(numbers).tolist():
        undo(made)  # pyright: ignore[reportArgumentType]
        raise error(f"{doing}: {counted(len(where), 'process', 'processes')} failed, {where}; their errors say why.")
    return made  # pyright: ignore[reportReturnType]


def key_value_client() -> Any:
    """The client of the store; None where `jax.distributed` was not started."""
    return distributed.global_state.client


def wait_for(client: Any, key: str, milliseconds: int) -> str | None:
    """The value that another process writes under a key; None if the wait times out."""
    try:
        return client.blocking_key_value_get(key, milliseconds)
    except jax.errors.JaxRuntimeError:
        return None
