"""A process that steps a store until it is killed."""

from __future__ import annotations

import os

from disk_units import UNITS, advance

from jzero.update.on_host.disk import DiskStore


def steps(path: str, pipe: int) -> None:
    """Creates or opens the store, and writes each generation to the pipe when `commit` has returned."""
    if any(file.startswith("record") for _, _, files in os.walk(path) for file in files):
        store = DiskStore.open(path, UNITS, buffer_bytes=2**20)
    else:
        store = DiskStore.create(path, UNITS, identity={}, buffer_bytes=2**20)
    while True:
        os.write(pipe, b"%d\n" % store.generation)
        if store.generation % 7 == 6 and not os.path.exists(f"{path}-{store.generation}"):
            store.snapshot(f"{path}-{store.generation}")
        advance(store)
