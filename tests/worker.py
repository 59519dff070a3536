"""One process of a run over several: `python worker.py RANK COUNT PORT`. Prints losses and what it holds as JSON."""

from __future__ import annotations

import json
import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("NPROC", "32")

import jax

STEPS, STAGES = 5, (0, 1, 2, 3)


def run(stage: int, existing: bool) -> dict:
    """Five steps of one stage; each process loads its own part of the batch."""
    import models
    import numpy as np

    import jzero

    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    state = models.create_state() if existing else models.create_state
    state = jzero.shard(state, stage=stage, mesh=mesh, min_shard_bytes=0)
    plan = jzero.plan_of(state)
    part = models.BATCH // jax.process_count()
    mine = slice(jax.process_index() * part, (jax.process_index() + 1) * part)
    step, losses = jax.jit(models.train_step, donate_argnums=0), []
    for i in range(STEPS):
        placed = plan.place_batch({k: v[mine] for k, v in models.batch(i).items()})
        models.assert_batch_is_split(placed)
        state, loss = step(state, placed)
        losses.append(float(loss))
    models.assert_laid_out(state, plan)
    arrays = jax.tree.leaves((state.params, state.opt_state))
    held = sum(s.data.nbytes for x in arrays for s in x.addressable_shards)
    full = jzero.unshard(state.params)
    norm = float(sum(np.sum(np.square(x.addressable_data(0))) for x in jax.tree.leaves(full)))
    return {"stage": stage, "existing": existing, "losses": losses, "held": held, "norm": norm}


def main(rank: int, count: int, port: str) -> None:
    """Join the others, run every stage born sharded and one from an existing state, print a line of JSON."""
    jax.config.update("jax_num_cpu_devices", 8 // count)
    if count > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", count, rank, heartbeat_timeout_seconds=20)
    runs = [run(stage, False) for stage in STAGES] + [run(2, True)]
    print("RESULT " + json.dumps({"rank": rank, "devices": jax.device_count(), "runs": runs}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
