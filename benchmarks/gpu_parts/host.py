"""Offload: how fast state comes and goes, how much of that is hidden, and the largest GPT that trains."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from hand import HOST, naive, to_host, train_step

import jzero
from gpu_parts import model
from gpu_parts.machine import HOST_SHARE, Program, host_memory, in_turns, time_of

TITLE = "Offload: the bus, the overlap, the largest model"
ASKED = """"bus": one large pinned copy each way, and both at once. "update": clip and AdamW alone on a GPT's
state in host memory, fetched and written back; the limit is the larger of the two directions' bytes over
their rates. "step": the same model with and without offload; "hidden" is the share of the time of all copies
that the step does not take longer by; naive is a device_put of the whole state before and after the update.
"largest": the depth that memory allows by the compiled program of two smaller depths, then trained for two
steps, and less where it does not fit."""
WEIGHT = 3.0
FRESH = True
SIDE_BY_SIDE = False
XLA = ""
WAYS: dict[str, jzero.Offload | None] = {
    "none": None,
    "naive": None,
    "host": jzero.Offload(),
    "host, prefetch": jzero.Offload(prefetch=True),
    "host, whole leaves": jzero.Offload(in_flight_bytes=2**33),  # copies of arrays, not of slices
}
SHORT = ("bus / - / 0", "update / host / 0", "step / naive / 8", "largest / host / 1")
DEVICE_SHARE = 0.97  # of a device's memory that a program may plan for
SMALLER = 0.93  # of the depth that did not fit
TRIES = 4
LARGE = model.Sizes(depth=12, dim=4096, heads=32, rows=1)
STAND_IN = 2**20  # bytes of memory, where a device has no limit to read


def cases(config: dict[str, Any]) -> list[str]:
    """The bus, the update, steps at growing batches, the largest model per tier: `what / way / rows`."""
    del config
    found = ["bus / - / 0", "step / host / 8", "step / host, whole leaves / 8", "largest / host / 1"]
    found += ["step / naive / 8", "largest / none / 1", "update / host / 0", "step / host, prefetch / 8"]
    return found + [f"step / {way} / {rows}" for rows in (32, 1) for way in ("host", "naive")]


def run(case: str, config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows of one case."""
    what, way, rows = case.split(" / ")
    if what == "bus":
        yield from bus(config)
    elif what == "update":
        yield update(way, config)
    else:
        yield step(way, int(rows), config) if what == "step" else largest(way, config)
    if not config["on_gpu"]:
        yield {
            "cannot": "offload: a CPU's pinned memory is its memory, so no copy is a transfer and no memory has a limit"
        }


def bus(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Bytes per second of one pinned copy to a device and one to the host, alone and together."""
    nbytes = 2**30 if config["on_gpu"] else 2**20
    device = jax.local_devices()[0]
    here, there = (jax.sharding.SingleDeviceSharding(device, memory_kind=k) for k in ("device", HOST))
    on_device = jax.device_put(jax.random.normal(jax.random.key(0), nbytes // 4), here)
    on_host = jax.block_until_ready(jax.device_put(on_device, there))
    ways = {
        "to the device": (lambda: jax.device_put(on_host, here), 1),
        "to the host": (lambda: jax.device_put(on_device, there), 1),
        "both at once": (lambda: (jax.device_put(on_host, here), jax.device_put(on_device, there)), 2),
    }
    for name, (copy, parts) in ways.items():
        seconds = time_of(copy, 5)
        yield {"table": "bus", "copy": name, "MiB": nbytes / 2**20, "GB/s": parts * nbytes / seconds / 1e9}


def rates(config: dict[str, Any]) -> dict[str, float]:
    """Bytes per second of the bus each way, measured in this process."""
    found = {r["copy"]: r["GB/s"] * 1e9 for r in bus(config)}
    return {"to_device": found["to the device"], "to_host": found["to the host"]}


def update(way: str, config: dict[str, Any]) -> dict[str, Any]:
    """The optimizer alone, with its state on the host."""
    rate = rates(config)
    c = model.sizes(config, model.ABOUT_1B)
    mesh = model.mesh_of(config["machine"]["count"])
    state = jzero.shard(model.creator(c), stage=2, mesh=mesh, offload=WAYS[way])
    plan = jzero.plan_of(state)
    grads = jax.jit(lambda params: jax.tree.map(lambda x: 1e-3 * x, params))(state.params)
    moved = jzero.estimate(plan, tx=state.tx)
    p = model.program("update", state, grads, lambda s, g: (s.apply_gradients(grads=g), jnp.zeros(())))
    del state
    p.seconds(), p.seconds()
    seconds = statistics.median(p.seconds() for _ in range(5))
    limit = max(moved.to_device / rate["to_device"], moved.to_host / rate["to_host"])
    return {
        "table": "update", "way": way, "params, B": plan.param_bytes / 2e9, "to the device, GB": moved.to_device / 1e9,
        "to the host, GB": moved.to_host / 1e9, "update, ms": 1e3 * seconds, "limit, ms": 1e3 * limit,
        "of the limit, %": 100 * limit / seconds,
    }  # fmt: skip


def step(way: str, rows: int, config: dict[str, Any]) -> dict[str, Any]:
    """A step with state on the host, beside the same step without, in turns."""
    rate = rates(config)
    c = dataclasses.replace(model.sizes(config, model.ABOUT_1B), rows=rows)
    mesh = model.mesh_of(config["machine"]["count"])
    batch, create = model.batch_of(c, mesh), model.creator(c)
    plain = model.program("none", jzero.shard(create, stage=2, mesh=mesh), batch)
    offloaded = jzero.shard(create, stage=2, mesh=mesh, offload=WAYS[way])
    if way == "naive":
        moved = jzero.estimate(
            jzero.plan_of(jzero.abstract(create, stage=2, mesh=mesh, offload="host")), tx=offloaded.tx
        )
        other = model.program(way, to_host(offloaded), batch, naive(train_step))
    else:
        moved = jzero.estimate(jzero.plan_of(offloaded), tx=offloaded.tx)
        other = model.program(way, offloaded, batch)
    del offloaded
    start = [(plain.step(), other.step()) for _ in range(3)]
    times = in_turns([plain, other], 8 if config["on_gpu"] else 2)
    a, b = (statistics.median(t) for t in times)
    copies = moved.to_device / rate["to_device"] + moved.to_host / rate["to_host"]
    return {
        "table": "step", "way": way, "rows": rows, "without, ms": 1e3 * a, "with, ms": 1e3 * b, "ratio": b / a,
        "all copies, ms": 1e3 * copies, "hidden, %": 100 * (1 - max(b - a, 0) / copies),
        "peak without, GB": peak_of(plain) / 1e9, "peak with, GB": peak_of(other) / 1e9,
        "loss differs by": max(abs(x / y - 1) for x, y in start),
    }  # fmt: skip


def peak_of(p: Program) -> int:
    """Device bytes of a program."""
    return jzero.explain(p.compiled).memory.total


def largest(way: str, config: dict[str, Any]) -> dict[str, Any]:
    """The deepest GPT of one width that trains."""
    device = DEVICE_SHARE * (config["machine"]["limit"] or STAND_IN)
    host = HOST_SHARE * host_memory() if config["on_gpu"] else STAND_IN
    depth, by, why = deepest(way, config, device, host), "", ""
    planned = depth
    for _ in range(TRIES):
        try:
            params, loss = trained(way, depth, config)
        except Exception as error:
            by, depth = str(error).splitlines()[0][:100], max(int(depth * SMALLER), 1)
            continue
        why = "did not fit at the planned depth: " + by if by else ""
        return {
            "table": "largest", "tier": way, "planned depth": planned, "depth": depth, "params, B": params / 1e9,
            "loss": loss, "": why,
        }  # fmt: skip
    return {"table": "largest", "tier": way, "planned depth": planned, "": f"none of {TRIES} trained: {by}"}


def deepest(way: str, config: dict[str, Any], device: float, host: float) -> int:
    """The depth at which the compiled program fills a device, or the host; both grow by the same bytes per layer."""
    count, low, high = config["machine"]["count"], 4, 8
    small, large = (memory_at(way, d, config) for d in (low, high))
    room = []
    for first, second, limit in (
        (small.total, large.total, device),
        (small.host_total, large.host_total, host / count),
    ):
        layer = (second - first) / (high - low)
        room.append(low + (limit - first) / layer if layer > 0 else float("inf"))
    return max(int(min(room)), 1)


def memory_at(way: str, depth: int, config: dict[str, Any]) -> Any:
    """What the compiled step takes."""
    c = sizes_at(depth, config)
    mesh = model.mesh_of(config["machine"]["count"])
    state = jzero.abstract(model.creator(c), stage=3, mesh=mesh, offload=WAYS[way])
    return jzero.explain(model.compiled(state, model.batch_of(c, mesh)), jzero.plan_of(state)).memory


def trained(way: str, depth: int, config: dict[str, Any]) -> tuple[int, float]:
    """Two steps: the number of params, and the loss after them."""
    c = sizes_at(depth, config)
    mesh = model.mesh_of(config["machine"]["count"])
    compiled = model.compiled(
        jzero.abstract(model.creator(c), stage=3, mesh=mesh, offload=WAYS[way]),
        batch := model.batch_of(c, mesh),
    )
    state = jzero.shard(model.creator(c), stage=3, mesh=mesh, offload=WAYS[way])
    p = Program(way, compiled, [jax.tree.leaves(state)], batch)
    count = jzero.plan_of(state).param_bytes // 2
    del state
    p.step()
    return count, p.step()


def sizes_at(depth: int, config: dict[str, Any]) -> model.Sizes:
    """Of one width."""
    return dataclasses.replace(model.sizes(config, LARGE), depth=depth, rows=1)
