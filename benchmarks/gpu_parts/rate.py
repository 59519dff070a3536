"""Model FLOPs utilisation and tokens per second of a GPT of about 1B parameters, and FSDP2 and DeepSpeed beside it."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jzero
from gpu_parts import model
from gpu_parts.machine import flops_limit, time_of

TITLE = "Rate: model FLOPs utilisation and tokens per second"
ASKED = """The GPT of about 1B parameters, bf16 params with fp32 masters, `nn.remat`, 8 sequences of 1024 per
device. FLOPs are those of the model (6 per number of a matrix that a token meets, 12 x width x sequence per
layer for attention); what remat computes again does not count. MFU is their share of the datasheet's dense
bf16 rate; the first table has what one large bf16 matmul reaches here. The torch rows are the same model and
sizes in one process per GPU: FSDP2 with fp32 params and bf16 compute and fused AdamW, DeepSpeed with bf16
params and fp32 masters; both with activation checkpointing of each block and clipping by the global norm."""
WEIGHT = 3.0
FRESH = True
SIDE_BY_SIDE = False
XLA = ""
SHORT = (
    "matmul / - / 0 / -",
    "jzero / scan / 3 / xla",
    "fsdp2 / unrolled / 3 / sdpa",
    "deepspeed / unrolled / 3 / sdpa",
)
TORCH = {"fsdp2": "torch", "fsdp2, compiled blocks": "torch", "deepspeed": "deepspeed"}


def cases(config: dict[str, Any]) -> list[str]:
    """jzero, then torch's, then the rest of jzero: `engine / form / stage / attention`."""
    del config
    found = [
        "matmul / - / 0 / -",
        "jzero / scan / 3 / xla",
        "jzero / scan / 3 / cudnn",
        "jzero / unrolled / 3 / xla",
    ]
    found += [f"{engine} / unrolled / 3 / sdpa" for engine in TORCH]
    found += ["jzero / scan / 2 / xla", "jzero / unrolled / 2 / xla", "jzero / scan / 2 / cudnn"]
    return found + [f"{engine} / unrolled / 2 / sdpa" for engine in TORCH]


def run(case: str, config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows of one case."""
    engine, form, stage, attention = case.split(" / ")
    if engine == "matmul":
        yield from matmul(config)
        return
    c = model.sizes(config, model.ABOUT_1B, scan=form == "scan")
    if engine in TORCH:
        missing = [name for name in ("torch", TORCH[engine]) if not installed(name)]
        if missing:
            yield {"cannot": f"{engine}: {missing[0]} is not installed"}
            return
        found = [("", torch_steps(engine, int(stage), c, config), None)]
    else:
        found = ours(dataclasses.replace(c, attention=attention), int(stage), config)
    for options, seconds, peak in found:
        yield {
            "table": "rate", "engine": engine, "layers": form, "stage": int(stage), "attention": attention,
            "plan.compiler_options": options, **rates(c, seconds, config), "peak, GB": peak and peak / 1e9,
        }  # fmt: skip


def installed(name: str) -> bool:
    """True for a package that can be imported, not for a mere folder of that name on the path."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


def ours(c: model.Sizes, stage: int, config: dict[str, Any]) -> Iterator[tuple[str, list[float], int]]:
    """Seconds per step and peak, without and with the plan's options for XLA."""
    mesh = model.mesh_of(config["machine"]["count"])
    batch = model.batch_of(c, mesh)
    state = jzero.shard(model.creator(c), stage=stage, mesh=mesh)
    options = jzero.plan_of(state).compiler_options
    programs = [("no", model.program("no", state, batch))]
    if options:
        programs.append(("yes", model.program("yes", state, batch, options=options)))
        programs[1][1].box = programs[0][1].box
    del state
    for name, p in programs:
        p.seconds(), p.seconds()
        seconds = [p.seconds() for _ in range(10 if config["on_gpu"] else 2)]
        yield name if options else "it has none here", seconds, jzero.explain(p.compiled).memory.total


def rates(c: model.Sizes, seconds: list[float], config: dict[str, Any]) -> dict[str, Any]:
    """Tokens per second and device, and utilisation."""
    machine = config["machine"]
    median = statistics.median(seconds)
    tokens = c.rows * c.seq / median
    limit = flops_limit(machine["kind"])
    return {
        "step, ms": 1e3 * median, "tokens/s per device": tokens,
        "TFLOP/s per device": tokens * c.flops_per_token / 1e12,
        "MFU, %": 100 * tokens * c.flops_per_token / limit if limit else "unknown",
    }  # fmt: skip


def matmul(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What one matmul of random numbers reaches, ten in a row."""
    n = 8192 if config["on_gpu"] else 256
    keys = jax.random.split(jax.random.key(0))
    a, b = (jax.random.normal(k, (n, n), jnp.bfloat16) for k in keys)
    b = b / n**0.5  # products keep their size
    fn = jax.jit(lambda a, b: jax.lax.fori_loop(0, 10, lambda _, x: x @ b, a))
    seconds = time_of(lambda: fn(a, b), 5)
    limit = flops_limit(config["machine"]["kind"])
    rate = 10 * 2 * n**3 / seconds
    yield {
        "table": "matmul", "n": n, "TFLOP/s": rate / 1e12,
        "of the datasheet, %": 100 * rate / limit if limit else "unknown",
    }  # fmt: skip
    if limit is None:
        yield {"cannot": f"MFU: the table of datasheet rates has no {config['machine']['kind']}"}


def torch_steps(engine: str, stage: int, c: model.Sizes, config: dict[str, Any]) -> list[float]:
    """Seconds per step of torch_gpt.py, one process for every GPU."""
    count = config["machine"]["count"] if config["on_gpu"] else 1
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = json.dumps({**dataclasses.asdict(c), "engine": engine, "stage": stage, "on_gpu": config["on_gpu"]})
    command = [sys.executable, str(Path(__file__).with_name("torch_gpt.py")), told]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    workers = [
        subprocess.Popen(
            command, env={**os.environ, **where, "RANK": str(i), "LOCAL_RANK": str(i)}, text=True,
            stdout=subprocess.PIPE if i == 0 else subprocess.DEVNULL,
        )
        for i in range(count)
    ]  # fmt: skip
    text = workers[0].communicate()[0]
    codes = [w.wait() for w in workers]
    if any(codes):
        raise RuntimeError(f"torch_gpt.py ended with {codes}: its last words are in the log")
    return json.loads(re.findall(r"^seconds (.*)$", text, re.MULTILINE)[-1])
