"""One process of several that save or restore together.

`python checkpoint_worker.py RANK COUNT PORT DEVICES PHASE FOLDER`. The phases: `save` writes one checkpoint for each of
stages 2 and 3; `restore` reads each into this number of devices at the other stage, and then damaged copies. Prints as
JSON what it found.
"""

from __future__ import annotations

import functools
import json
import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("NPROC", "32")

import jax

STAGES = (2, 3)


def digest(state) -> dict:
    """What this process holds: bytes, and whether every shard is that of the values that the step must have."""
    import numpy as np
    from layouts import logical_shapes

    leaves = jax.tree.leaves((state.params, state.opt_state))
    shapes = [x.shape for x in jax.tree.leaves(state.params)] + logical_shapes(state)
    wrong = []
    for i, (x, shape) in enumerate(zip(leaves, shapes, strict=True)):
        want = np.zeros(x.shape, x.dtype)
        want[tuple(map(slice, shape))] = value_of(i, shape, x.dtype)
        for shard in x.addressable_shards:
            if np.asarray(shard.data).tobytes() != want[shard.index].tobytes():
                wrong.append([i, list(shape)])
    held = sum(s.data.nbytes for x in leaves for s in x.addressable_shards)
    return {"wrong": wrong, "held": held, "step": int(state.step)}


def value_of(index: int, shape, dtype):
    import numpy as np

    rng = np.random.default_rng(index)
    if np.dtype(dtype).kind in "iu":
        return np.asarray(rng.integers(1, 99, shape), dtype)
    return np.asarray(rng.standard_normal(shape).astype(np.float32), dtype)


def state_in(stage: int, mesh):
    """A state of odd shapes in 16 bits with masters, every leaf with the values of its place."""
    import jax.numpy as jnp
    import numpy as np
    from layouts import create, logical_shapes

    import jzero

    state = jzero.shard(lambda: create(dtype=jnp.bfloat16), stage=stage, mesh=mesh, min_shard_bytes=0)
    leaves, tree = jax.tree.flatten((state.params, state.opt_state))
    shapes = [x.shape for x in jax.tree.leaves(state.params)] + logical_shapes(state)
    made = []
    for i, (x, shape) in enumerate(zip(leaves, shapes, strict=True)):
        full = np.zeros(x.shape, x.dtype)
        full[tuple(map(slice, shape))] = value_of(i, shape, x.dtype)
        made.append(jax.make_array_from_callback(x.shape, x.sharding, lambda index, full=full: full[index]))
    params, opt_state = tree.unflatten(made)
    return state.replace(params=params, opt_state=opt_state)


def saved(folder: str, mesh) -> dict:
    """Saves a checkpoint of each stage: what is held."""
    from jzero import checkpoint

    runs = []
    for stage in STAGES:
        state = state_in(stage, mesh)
        checkpoint.save(f"{folder}/{stage}", state, custom={"stage": stage})
        runs.append(digest(state))
    checkpoint.save(f"{folder}/large", large(mesh))
    return {"runs": runs}


def large(mesh) -> dict:
    """Noise of 3 MB: its file is read against its checksums by one process alone, for all."""
    import numpy as np

    value = np.random.default_rng(0).standard_normal((40, 20_000)).astype(np.float32)
    sharding = jax.sharding.NamedSharding(mesh, jax.P("data"))
    return {"w": jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])}


def restored(folder: str, mesh) -> dict:
    """Restores each checkpoint at the other stage, and then the damaged ones: what is held, and what is said."""
    import jax.numpy as jnp
    from layouts import create

    import jzero
    from jzero import checkpoint

    found: dict = {"runs": []}
    make = functools.partial(create, dtype=jnp.bfloat16)
    for stage in STAGES:
        like = jzero.abstract(make, stage=5 - stage, mesh=mesh, min_shard_bytes=0)
        found["runs"].append(digest(checkpoint.restore(f"{folder}/{stage}", like)))
        found["custom"] = checkpoint.custom(f"{folder}/{stage}")
    for name in ("flipped", "missing"):
        try:
            checkpoint.restore(f"{folder}/{name}", large(mesh))
        except checkpoint.CheckpointDamaged as error:
            found[name] = str(error)
    return found


def main(rank: int, count: int, port: str, devices: int, phase: str, folder: str) -> None:
    """Join the others, run a phase, print a line of JSON."""
    import numpy as np

    jax.config.update("jax_num_cpu_devices", devices)
    jax.distributed.initialize(f"127.0.0.1:{port}", count, rank, heartbeat_timeout_seconds=20)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    found = {"save": saved, "restore": restored}[phase](folder, mesh)
    print("RESULT " + json.dumps({"devices": jax.device_count(), **found}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5], sys.argv[6])
