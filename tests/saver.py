"""A run that saves step after step, to be killed: `python saver.py FOLDER FIRST`. Tells what it does line by line."""

from __future__ import annotations

import os
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


def main(folder: str, first: int) -> None:
    from jzero import checkpoint

    jax.config.update("jax_num_cpu_devices", 8)
    for step in range(first, first + 100):
        state = state_of(step)
        print(f"saving {step}", flush=True)
        checkpoint.save(f"{folder}/{step}", state)
        print(f"saved {step}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
