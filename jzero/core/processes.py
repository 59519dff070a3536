"""Processes that `jax.distributed` has brought together: its key-value store, which has no public name."""

from __future__ import annotations

from typing import Any

import jax
from jax._src import distributed


def key_value_client() -> Any:
    """The client of the store; None where `jax.distributed` was not started."""
    return distributed.global_state.client


def wait_for(client: Any, key: str, milliseconds: int) -> str | None:
    """The value that another process writes under a key; None if the wait times out."""
    try:
        return client.blocking_key_value_get(key, milliseconds)
    except jax.errors.JaxRuntimeError:
        return None
