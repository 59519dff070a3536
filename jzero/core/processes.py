"""Processes that `jax.distributed` has brought together: its key-value store, which has no public name."""

from __future__ import annotations

from typing import Protocol

import jax
from jax._src import distributed


class KeyValueClient(Protocol):
    """JAX's client of the store."""

    def key_value_set(self, key: str, value: str) -> None:
        """Write a value, which no key may have yet."""

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        """Wait for a value."""
        ...


def key_value_client() -> KeyValueClient | None:
    """The client of the store; None where `jax.distributed` was not started."""
    return distributed.global_state.client


def wait_for(client: KeyValueClient, key: str, milliseconds: int) -> str | None:
    """What another process writes under a key; None if it writes nothing in time."""
    try:
        return client.blocking_key_value_get(key, milliseconds)
    except jax.errors.JaxRuntimeError:
        return None
