"""A run that saves step after step, to be killed: `python saver.py FOLDER FIRST`. Tells what it does line by line.

With a third argument it kills itself, in its second save, before that many flushes to the disk are done.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("NPROC", "32")

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

SHAPES = {"params": {"w": (512, 1024), "b": (517, 300), "k": (3, 3, 64, 64)}, "count": (), "mu": (4096, 256)}


def state_of(step: int):
    """The state of a step: every number follows from the step."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    paths, tree = jax.tree.flatten(SHAPES, is_leaf=lambda x: isinstance(x, tuple))
    leaves = []
    for i, shape in enumerate(paths):
        value = np.random.default_rng([step, i]).standard_normal(shape).astype(np.float32)
        split = bool(shape) and shape[0] % 8 == 0
        leaves.append(jax.device_put(value, NamedSharding(mesh, jax.P("data") if split else jax.P())))
    return tree.unflatten(leaves)


def die_at_flush(number: int) -> None:
    """SIGKILL in place of the `number`-th flush from here on, counted from 1."""
    flush, numbers = os.fsync, itertools.count(1)

    def fsync(handle) -> None:
        if next(numbers) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        flush(handle)

    os.fsync = fsync


def main(folder: str, first: int, killed_at: int = 0) -> None:
    from jzero import checkpoint

    jax.config.update("jax_num_cpu_devices", 8)
    for step in range(first, first + 100):
        state = state_of(step)
        print(f"saving {step}", flush=True)
        if killed_at and step == first + 1:
            die_at_flush(killed_at)
        checkpoint.save(f"{folder}/{step}", state)
        print(f"saved {step}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
