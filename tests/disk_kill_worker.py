"""A server of processes that train with `Offload(tier="disk")` until they are killed: `python disk_kill_worker.py`.

For each line `FOLDER LOG UNTIL EVERY` on its input a child is forked, which has JAX imported and no backend yet; its id
is the answer. The child goes on from the folder, or begins there, and trains up to a generation. What it writes in LOG:

    whole G DIGEST     masters and moments of generation G as the files hold them: at the start, and every EVERY steps
    step G DIGEST      params after the step that made generation G
"""

from __future__ import annotations

import os
import signal
import sys
import zlib
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import jzero

DEVICES, ROWS, WIDTH = 2, 8, 96
BUFFER = 2**18  # bytes: leaves are cut, and a generation is more than a dozen files


def create() -> TrainState:
    """Two layers in bf16, whose masters are fp32; AdamW after a clip, whose norm reads all gradients."""
    rng = np.random.default_rng(0)
    shapes = {"up": (24, WIDTH), "inner": (WIDTH, WIDTH), "down": (WIDTH, 8)}
    params = {k: jnp.asarray(rng.standard_normal(s) / 8, jnp.bfloat16) for k, s in shapes.items()}
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return TrainState.create(apply_fn=None, params=params, tx=tx)


@jax.jit
def gradients(params, batch):
    """What leaves the compiled program."""

    def loss(p):
        x = jnp.tanh(batch["x"].astype(jnp.bfloat16) @ p["up"])
        x = x + jnp.tanh(x @ p["inner"])
        return jnp.mean((x @ p["down"] - batch["y"]).astype(jnp.float32) ** 2)

    return jax.grad(loss)(params)


def batch(generation: int) -> dict:
    rng = np.random.default_rng(generation)
    return {k: rng.standard_normal((ROWS, n), dtype=np.float32) for k, n in (("x", 24), ("y", 8))}


def digest(arrays) -> int:
    """Of all bits, in order; None counts for nothing."""
    found = 0
    for x in arrays:
        if x is not None:
            found = zlib.crc32(np.asarray(jax.device_get(x)).tobytes(), found)
    return found


def train(folder: str, log: str, until: int, every: int) -> None:
    """Steps until the generation `until`."""
    jax.config.update("jax_num_cpu_devices", DEVICES)
    with open(log, "a", buffering=1) as file:
        fields = {"stage": 2, "min_shard_bytes": 0}
        fields["offload"] = jzero.Offload(tier="disk", path=folder, buffer_bytes=BUFFER)
        if any(Path(folder).glob("process-*/record*")):
            state = jzero.checkpoint.restore(folder, jzero.abstract(create, **fields))
        else:
            state = jzero.shard(create, **fields)
        plan = jzero.plan_of(state)
        tier = state.opt_state.master.store.store
        at = int(state.step)
        assert at == int(state.opt_state.master.generation)
        print(f"whole {at} {digest(tier.leaves())}", file=file)
        print(f"step {at} {digest(jax.tree.leaves(state.params))}", file=file)
        while at < until:
            state = state.apply_gradients(grads=gradients(state.params, plan.place_batch(batch(at))))
            at += 1
            print(f"step {at} {digest(jax.tree.leaves(state.params))}", file=file)
            if at % every == 0:
                print(f"whole {at} {digest(tier.leaves())}", file=file)


def main() -> None:
    """Forks, and collects what has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    for line in sys.stdin:
        folder, log, until, every = line.split()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                train(folder, log, int(until), int(every))
                code = 0
            except BaseException as error:
                Path(f"{log}.error").write_text(f"{type(error).__name__}: {error}")
            os._exit(code)
        print(child, flush=True)


if __name__ == "__main__":
    main()
