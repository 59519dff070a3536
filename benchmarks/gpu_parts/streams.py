"""Streams: what a GPU does at the same time, from a profile of one call."""

from __future__ import annotations

import collections
import dataclasses
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from hand import HOST
from jax import lax

import jzero
from gpu_parts import model
from gpu_parts.machine import time_of

TITLE = "Streams: what is copied beside what"
ASKED = """One call under `jax.profiler`: milliseconds in which some stream computes, copies to the device or copies to
the host, and in which both directions are busy at once. A slice of a host array that XLA reads or writes by a kernel
counts as a copy ("by kernels"): it takes multiprocessors, and two directions by kernels share the rate of one. "step":
a GPT with `Offload("host")`. "loop": 2 GiB of host arrays fetched, changed and written back in slices, in plain JAX:
unrolled; in a loop; in a loop in which two arrays take turns. "graphs off" sets xla_gpu_enable_command_buffer to
nothing: a CUDA graph of XLA's runs everything one after another."""
WEIGHT = 2.0
FRESH = True
SIDE_BY_SIDE = False
XLA = ""
GRAPHS_OFF = {"xla_gpu_enable_command_buffer": ""}
SHORT = ("loop / two arrays / graphs",)
Interval = tuple[float, float]


def cases(config: dict[str, Any]) -> list[str]:
    """`what / form / graphs`."""
    del config
    loops = [f"loop / {form} / {graphs}" for graphs in ("graphs off", "graphs") for form in reversed(FORMS)]
    return [*loops, "step / scan / graphs off", "step / scan / graphs", "step / unrolled / graphs off"]


def run(case: str, config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One profile."""
    what, form, graphs = case.split(" / ")
    options = GRAPHS_OFF if graphs == "graphs off" and config["on_gpu"] else {}
    call = (of_step if what == "step" else of_loop)(form, options, config)
    seconds = time_of(call, 3)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(call())
        found = next(Path(folder).glob("**/*.xplane.pb"))
        busy = by_kind(jax.profiler.ProfileData.from_file(str(found)))
    merged = {kind: union(busy.get(kind, [])) for kind in KINDS}
    up, down = (union(busy.get(f"to the {end}", []) + busy.get(f"to the {end} by kernels", [])) for end in ENDS)
    yield {
        "what": what, "form": form, "XLA's graphs": graphs == "graphs", "call, ms": 1e3 * seconds,
        **{f"{kind}, ms": length(found) for kind, found in merged.items()},
        "both directions, ms": length(both(up, down)),
        "copies beside compute, ms": length(both(union([*up, *down]), merged["compute"])),
    }  # fmt: skip
    if not config["on_gpu"]:
        yield {"cannot": "streams: a CPU has none"}


def of_step(form: str, options: dict[str, str], config: dict[str, Any]) -> Callable[[], Any]:
    """A train step with optimizer state on the host."""
    c = dataclasses.replace(model.sizes(config, model.ABOUT_1B), scan=form == "scan")
    mesh = model.mesh_of(config["machine"]["count"])
    state = jzero.shard(model.creator(c), stage=2, mesh=mesh, offload="host")
    return model.program("host", state, model.batch_of(c, mesh), options=options).step


# host arrays in slices, in plain JAX


def unrolled(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    for i in range(len(a)):
        a, b = stored(a, changed(fetched(a, i)), i), stored(b, changed(fetched(b, i)), i)
    return a, b


def one_after_another(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    def body(i: Any, ab: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        a, b = ab
        return stored(a, changed(fetched(a, i)), i), stored(b, changed(fetched(b, i)), i)

    return lax.fori_loop(0, len(a), body, (a, b))


def two_arrays(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """While a slice of one is fetched, one of the other is written; XLA copies an array that a loop reads and writes
    at once, so that the two slices must be of two arrays."""

    def body(i: Any, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        a, b, y = carry
        b, x = stored(b, y, i - 1), fetched(a, i)
        x, b = lax.optimization_barrier((changed(x), b))
        a, y = stored(a, x, i), fetched(b, i)
        return a, b, changed(y)

    y = changed(fetched(b, 0))
    a = stored(a, changed(fetched(a, 0)), 0)
    a, b, y = lax.fori_loop(1, len(a), body, (a, b, y))
    return a, stored(b, y, len(a) - 1)


FORMS = {"unrolled": unrolled, "one after another": one_after_another, "two arrays": two_arrays}


def fetched(x: jax.Array, i: Any) -> jax.Array:
    part = lax.dynamic_slice(x, (i, *(0 for _ in x.shape[1:])), (1, *x.shape[1:]))
    return jax.device_put(part, jax.memory.Space.Device)


def changed(x: jax.Array) -> jax.Array:
    return x * 0.5 + 1


def stored(whole: jax.Array, x: jax.Array, i: Any) -> jax.Array:
    there = jax.device_put(x, jax.memory.Space.Host)
    return lax.dynamic_update_slice(whole, there, (i, *(0 for _ in x.shape[1:])))


def of_loop(form: str, options: dict[str, str], config: dict[str, Any]) -> Callable[[], Any]:
    """One of the forms over two arrays in host memory."""
    shape = (16, 2048, 8192) if config["on_gpu"] else (16, 8, 8)
    there = jax.sharding.SingleDeviceSharding(jax.local_devices()[0], memory_kind=HOST)
    box = [tuple(jax.device_put(jnp.ones(shape), there) for _ in range(2))]
    fn = jax.jit(FORMS[form], donate_argnums=(0, 1), out_shardings=(there, there), compiler_options=options)

    def call() -> Any:
        box[0] = fn(*box[0])
        return box[0]

    return call


# what a profile says

ENDS = ("device", "host")
KINDS = ("compute", *(f"to the {end}{how}" for how in ("", " by kernels") for end in ENDS), "host to host")
NAMES = {
    "to the device": re.compile(r"memcpyh2d|htod", re.I),
    "to the host": re.compile(r"memcpyd2h|dtoh", re.I),
    "host to host": re.compile(r"memcpyother|h2h", re.I),
    "to the device by kernels": re.compile(r"^wrapped_dynamic_slice"),
    "to the host by kernels": re.compile(r"^wrapped_dynamic_update_slice"),
}


def by_kind(profile: Any) -> dict[str, list[Interval]]:
    """Begin and end, in ms, of what ran on the streams of the GPUs."""
    found = collections.defaultdict(list)
    for plane in (p for p in profile.planes if "GPU" in p.name):
        for line in (x for x in plane.lines if x.name.startswith("Stream")):
            for e in line.events:
                kind = next((k for k, name in NAMES.items() if name.search(e.name)), "compute")
                found[kind].append((e.start_ns / 1e6, (e.start_ns + e.duration_ns) / 1e6))
    return found


def union(found: Iterable[Interval]) -> list[Interval]:
    """Intervals that do not touch."""
    out: list[Interval] = []
    for begin, end in sorted(found):
        if out and begin <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((begin, end))
    return out


def both(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Where two unions overlap: what either covers twice."""
    edges = sorted([(t, 1 - 2 * k) for pairs in (first, second) for pair in pairs for k, t in enumerate(pair)])
    out, depth, begin = [], 0, 0.0
    for t, step in edges:
        if depth == 2 and step < 0:
            out.append((begin, t))
        depth += step
        begin = t if depth == 2 else begin
    return out


def length(found: Sequence[Interval]) -> float:
    return sum(end - begin for begin, end in found)
