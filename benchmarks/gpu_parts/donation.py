"""Donation: whether a step may still donate arrays in host memory that something has read."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from hand import train_step

import jzero
from gpu_parts import model

TITLE = "Donation: host memory that something has read"
ASKED = """A donated step right after its state was read in one of several ways, with optimizer state or params in
pinned host memory. A GPU refuses to donate memory of which there is a view ("Donation requested for buffer with
external reference"), and jax keeps the view that `np.asarray` and `jax.device_get` give within the array that was
read. What jzero reads must leave none; that JAX's own ways leave one is expected."""
WEIGHT = 1.0
FRESH = False
SIDE_BY_SIDE = True
XLA = "--xla_gpu_autotune_level=0"
TIERS = {"state": jzero.Offload(), "params": jzero.Offload(params="host")}


def keep_views(state: Any) -> Any:
    return [np.asarray(x) for x in jax.tree.leaves(state)]


def save(state: Any) -> None:
    jzero.checkpoint.save(Path(tempfile.mkdtemp()) / "saved", state)


def save_async(state: Any) -> Any:
    return jzero.checkpoint.save_async(Path(tempfile.mkdtemp()) / "saved", state)


def copied(state: Any) -> None:
    for x in jax.tree.leaves(state):
        np.array(x)


WAYS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda state: None,
    "np.array": copied,
    "device_get, dropped": lambda state: jax.device_get(state) and None,
    "checkpoint.save": save,
    "checkpoint.save_async": save_async,
    "unshard": lambda state: jzero.unshard(state) and None,
    "view kept": keep_views,
}
OF_JAX = ("np.array", "device_get, dropped", "view kept")
SHORT = tuple(f"{way} / params" for way in WAYS)


def cases(config: dict[str, Any]) -> list[str]:
    """Params in host memory, then state alone: `way / tier`."""
    del config
    return [f"{way} / {tier}" for tier in ("params", "state") for way in WAYS]


def run(case: str, config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One way to read."""
    way, tier = case.split(" / ")
    mesh = model.mesh_of(config["machine"]["count"])
    state = jzero.shard(model.creator(model.TINY), stage=3, mesh=mesh, offload=TIERS[tier])
    batch = model.batch_of(model.TINY, mesh)
    step = jax.jit(train_step, donate_argnums=0)
    said, held = "", WAYS[way](state)
    try:
        for _ in range(2):
            state, _ = step(state, batch)
        jax.block_until_ready(state)
    except jax.errors.JaxRuntimeError as error:
        said = str(error).splitlines()[0][:160]
    if isinstance(held, jzero.checkpoint.Saving):
        held.result()
    ok = not said or way in OF_JAX
    yield {"in host memory": tier, "read by": way, "donated": not said, "ok": ok, "": said}
    if not config["on_gpu"]:
        yield {"cannot": "donation of host memory: a CPU copies what it may not take"}


def findings(rows: list[dict[str, Any]]) -> list[str]:
    """What was refused without a view that someone keeps."""
    return [
        f"**Refused** after {r['read by']}: {r['in host memory']} in host memory" for r in rows if r.get("ok") is False
    ]
