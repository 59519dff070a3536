"""What a save or a restore takes of the host's memory: `python restore_memory.py save|device|five|host FOLDER`."""

from __future__ import annotations

import json
import os
import pathlib
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("NPROC", "32")

import jax
import numpy as np
from jax.sharding import Mesh

MIB = 2**20
SHAPES = {
    "embed": (32 * 1024 + 3, 1024),
    "head": (16 * 1024, 1024),
    **{f"layer{i}": (2048, 1024) for i in range(3)},
}


def create():
    """216 MiB of params; with Adam's moments 648, its largest leaves of 128."""
    import jax.numpy as jnp
    import optax
    from flax.training.train_state import TrainState

    params = {k: jnp.full(s, 0.5) for k, s in SHAPES.items()}
    return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))


def filled(state):
    """Random numbers everywhere: zeros would take no memory."""

    def fill(x):
        make = np.random.default_rng(0)
        return x if not x.ndim else jax.device_put(make.random(x.shape, np.float32), x.sharding)

    return jax.block_until_ready(jax.tree.map(fill, state))


def resident(field: str) -> int:
    """Bytes: `VmRSS` now, `VmHWM` at most."""
    text = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in text.splitlines() if line.startswith(field)).split()[1])


def main(what: str, folder: str) -> None:
    """Measures one save or restore in a fresh process."""
    jax.config.update("jax_num_cpu_devices", 8)
    import jzero
    from jzero import checkpoint

    mesh = Mesh(np.array(jax.devices()[: 5 if what == "five" else 8]), ("data",))
    fields = {"stage": 3, "mesh": mesh, "offload": "host" if what == "host" else None}
    if what == "save":
        state = filled(jzero.shard(create, **fields))
    else:
        like = jzero.abstract(create, **fields)
        jax.block_until_ready(jax.device_put(np.zeros(40), jzero.plan_of(like).batch))
    checkpoint.save(folder + f"-{what}", {"w": np.ones(3)})  # what is imported and started once: 90 MB
    checkpoint.restore(folder + f"-{what}", {"w": np.ones(3)})
    before = resident("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    if what == "save":
        checkpoint.save(folder, state)
    else:
        state = jax.block_until_ready(checkpoint.restore(folder, like))
    peak, after = resident("VmHWM"), resident("VmRSS")
    arrays = jax.tree.leaves((state.params, state.opt_state))
    size = sum(s.data.nbytes for x in arrays for s in x.addressable_shards)
    largest = max(x.nbytes for x in arrays)
    print("RESULT " + json.dumps({
        "state": size, "largest": largest, "before": before, "peak": peak, "after": after,
    }))  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
