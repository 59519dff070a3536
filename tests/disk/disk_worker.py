"""A process that steps a store until it is killed."""

from __future__ import annotations

import os
import traceback

from disk_units import UNITS, advance

from jzero.update.on_host.disk import DiskStore


def steps(path: str, pipe: int) -> None:
    """Opens the store, or creates it, and writes each generation to the pipe when `commit` has returned.

    An error goes to the pipe too, as a traceback.
    """
    try:
        _steps(path, pipe)
    except BaseException:
        os.write(pipe, traceback.format_exc().encode())


def _steps(path: str, pipe: int) -> None:
    try:
        store = DiskStore.open(path, UNITS, buffer_bytes=2**20)
    except FileNotFoundError:  # the first time, or its creation was killed
        store = DiskStore.create(path, UNITS, identity={}, buffer_bytes=2**20)
    while True:
        os.write(pipe, b"%d\n" % store.generation)
        if store.generation % 7 == 6 and not os.path.exists(f"{path}-{store.generation}"):
            store.snapshot(f"{path}-{store.generation}")
        advance(store)
