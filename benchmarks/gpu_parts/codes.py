"""What codes of 8 bits cost in time: to make and to read them on one device, and in steps of several."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jzero
from gpu_parts import model
from gpu_parts.machine import in_turns, median_ratio, time_of
from jzero.comm.transport import InCodes
from jzero.layout.blocks import Blocks

TITLE = "Codes: what 8 bits on the wire cost in time"
ASKED = """"kernels": a bf16 matrix is encoded in blocks of 256, and decoded, ten times in a row on one
device; GB/s are of what must be read and written. "steps", with several devices: the GPT of about 1B params,
in bf16, `nn.remat`, 8 sequences of 1024 per device; the time of a step with codes over that of one without,
in turns."""
WEIGHT = 1.5
FRESH = False
SIDE_BY_SIDE = False
XLA = ""
SHORT = ("kernels / int8 / -", "steps / 2 / int8 updates")
STEPS: dict[str, dict[str, Any]] = {
    "2 / int8 gradients": {"reduce_dtype": "int8"},
    "2 / int8 updates": {"update_dtype": "int8"},
    "3 / int8 gathers": {"gather_dtype": "int8"},
    "3 / int8 gathers and gradients": {"gather_dtype": "int8", "reduce_dtype": "int8"},
}
ROUNDS = 10


def cases(config: dict[str, Any]) -> list[str]:
    """`kernels / codes / -`, and with several devices `steps / stage / policy`."""
    found = [f"kernels / {codes} / -" for codes in ("int8", "float8_e4m3fn")]
    return found + [f"steps / {name}" for name in STEPS] * (config["machine"]["count"] > 1)


def run(case: str, config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows of one case."""
    what, first, second = case.split(" / ")
    if what == "kernels":
        yield from kernels(first, config)
        if config["machine"]["count"] == 1:
            yield {"cannot": "what codes save on the wire: there is one device"}
    else:
        yield from steps(int(first), second, config)


def kernels(codes: str, config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Seconds to encode and to decode a matrix."""
    rows = 16384 if config["on_gpu"] else 256
    shape, whole = (rows, 8192), jax.P()
    way = InCodes(Blocks.of(shape, None, 256), np.dtype(codes), whole, whole, model.mesh_of(1))
    x = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    sent = jax.jit(way.encode)(x)

    def encode(x):  # a next round that depends on the last one
        def again(_, carry):
            x, (_, scales) = carry
            return x.at[0, 0].set(scales[0, 0].astype(x.dtype)), tuple(way.encode(x))

        return jax.lax.fori_loop(0, ROUNDS, again, (x, tuple(sent)))

    def decode(sent):
        def again(_, carry):
            (values, scales), found = carry
            scales = scales.at[0, 0].set(found[0, 0].astype(scales.dtype))
            return (values, scales), way.decode((values, scales), np.dtype(jnp.bfloat16))

        return jax.lax.fori_loop(0, ROUNDS, again, (tuple(sent), x))[1]

    moved = 3 * x.size  # two bytes of a value and one of its code
    for name, fn, given in (("encode", encode, x), ("decode", decode, sent)):
        compiled = jax.jit(fn)
        seconds = time_of(lambda: compiled(given), 5) / ROUNDS  # noqa: B023
        yield {
            "table": "kernels", "codes": codes, "what": name, "GB of bf16": 2 * x.size / 1e9, "ms": 1e3 * seconds,
            "GB/s": moved / seconds / 1e9,
        }  # fmt: skip


def steps(stage: int, name: str, config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A step with codes beside one without."""
    mesh = model.mesh_of(config["machine"]["count"])
    c = model.sizes(config, model.ABOUT_1B, scan=True)
    create, batch, programs = model.creator(c), model.batch_of(c, mesh), []
    for fields in ({}, STEPS[f"{stage} / {name}"]):
        state = jzero.shard(create, stage=stage, mesh=mesh, **fields)
        programs.append(model.program("with" if fields else "without", state, batch))
        del state
    without, coded = in_turns(programs, 10 if config["on_gpu"] else 4)
    yield {
        "table": "steps", "stage": stage, "policy": name, "without, ms": 1e3 * statistics.median(without),
        "with, ms": 1e3 * statistics.median(coded), "with / without": median_ratio(coded, without),
    }  # fmt: skip
