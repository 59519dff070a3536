"""One of several processes that call a step of `jzero.jit`: `jit_worker.py rank count port`."""

from __future__ import annotations

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jzero


def said(call) -> str:
    """What a call that must fail says."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def main(rank: int, count: int, port: str) -> None:
    """Batches of own rows, class weights that are equal everywhere, and both remedies."""
    jax.config.update("jax_num_cpu_devices", 8 // count)
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    jax.distributed.initialize(f"127.0.0.1:{port}", count, rank, heartbeat_timeout_seconds=20)
    params = {"w": jnp.eye(16, 8)}
    plan = jzero.make_plan(params, stage=2, min_shard_bytes=0)
    params = plan.place(params)
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((16, 16), np.float32), rng.integers(0, 8, 16)
    mine = slice(rank * 16 // count, (rank + 1) * 16 // count)
    batch, weights = {"x": x[mine], "y": y[mine]}, np.arange(8, dtype=np.float32)
    same = np.ones(16 // count, np.float32)

    def loss(params, batch, weights, mask):
        logp = jax.nn.log_softmax(batch["x"] @ params["w"])
        own = jnp.take_along_axis(logp, batch["y"][:, None], 1)[:, 0]
        return -jnp.sum(own * weights[batch["y"]] * mask) / jnp.sum(weights), weights.shape, mask.shape

    step = jzero.jit(loss, plan)
    whole = jax.device_put(weights, plan.sharding(jax.P()))
    value, *shapes = step(params, batch, whole, plan.place_batch(same))
    found = {
        "weights": said(lambda: step(params, batch, weights, plan.place_batch(same))),
        "inside": said(lambda: step(params, {**batch, "weights": weights[:4]}, whole, plan.place_batch(same))),
        "mask": said(lambda: step(params, batch, whole, same)),
        "beside": said(lambda: step(params, {**batch, "mask": same}, whole, plan.place_batch(same))),
        "loss": float(value), "shapes": [tuple(map(int, s)) for s in shapes],
        "want": float(loss(*jax.tree.map(np.asarray, (params, {"x": x, "y": y}, weights, np.ones(16))))[0]),
    }  # fmt: skip
    print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
