"""What jzero costs: a step against plain Flax and ZeRO written by hand, and everything that jzero does switched off."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from typing import Any

import jax
from hand import MIN_SHARD_BYTES, by_hand

import jzero
from gpu_parts import model, switches
from gpu_parts.machine import Program, in_turns, median_ratio

TITLE = "Cost: step time, and what each rewrite is worth"
ASKED = """A GPT of about 1B parameters, `nn.remat`, 8 sequences of 1024 per device. "step": fp32 params and
bf16 compute, so that plain Flax, ZeRO by hand (`benchmarks/hand.py`) and jzero compute the same; medians of
interleaved rounds, each step waited for, ratios by round; "one program twice" is what the machine alone does
to a ratio. "switches": bf16 params with fp32 masters; "off / on" is the time without, over the time with what
jzero does, peaks are the compiler's. What costs time (off / on below 1 by more than 1 % and by more than the
noise) and saves no memory is a candidate for deletion."""
WEIGHT = 4.0
FRESH = False
SIDE_BY_SIDE = False
XLA = ""
LEAST = 0.01  # of a step's time: less is nothing
SAME_PEAK = 1.001
FORMS = ("scan", "unrolled")
SHORT = ("step / scan / 2 / all", "offload / scan / 2 / all", "switches / unrolled / 3 / all")


def cases(config: dict[str, Any]) -> list[str]:
    """One of each kind first; then the rest: `what / form / stage / devices`. One device has nothing to gather."""
    count = config["machine"]["count"]
    several = count > 1
    found = ["step / scan / 2 / all"] + ["switches / scan / 2 / all"] * several + ["offload / scan / 2 / all"]
    found += ["step / unrolled / 3 / all"] + ["switches / unrolled / 3 / all"] * several
    found += ["step / scan / 3 / all", "step / unrolled / 2 / all"]
    found += [f"step / {f} / {s} / one" for f in FORMS for s in (2, 3)] * several
    found += [f"switches / {f} / {s} / all" for f, s in (("unrolled", 2), ("scan", 3))] * several
    return found + [f"{what} / {f} / 1 / all" for what in ("step", "switches") for f in FORMS] * several


def run(case: str, config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows of one case."""
    what, form, stage, devices = case.split(" / ")
    mesh = model.mesh_of(1 if devices == "one" else config["machine"]["count"])
    dtype = {"param_dtype": "float32"} if what == "step" else {}
    c = model.sizes(config, model.ABOUT_1B, scan=form == "scan", **dtype)
    head = {"layers": form, "stage": int(stage), "devices": mesh.size}
    for row in (step if what == "step" else switched)(c, int(stage), mesh, config, what == "offload"):
        yield {**head, **row}
    if config["machine"]["count"] == 1:
        yield {"cannot": "ZeRO by hand, and switches of gathers and reductions: there is one device"}
    if not config["on_gpu"]:
        yield {
            "cannot": "what anything costs on a GPU: times here are those of simulated devices on the same cores"
        }


def rounds(config: dict[str, Any]) -> int:
    return 10 if config["on_gpu"] else 4


def step(c: model.Sizes, stage: int, mesh: Any, config: dict[str, Any], _) -> Iterator[dict[str, Any]]:
    """Plain Flax, by hand and jzero, in turns."""
    create, batch = model.creator(c), model.batch_of(c, mesh)

    def hand(name: str, stage: int) -> Program:
        state, fn, shardings = by_hand(stage, create, mesh)
        return model.program(name, state, batch, fn, shardings=shardings)

    plain = hand("plain Flax", 0)
    programs = [plain, Program("one program twice", plain.compiled, plain.box, batch)]
    programs += [hand("by hand", stage)] if mesh.size > 1 else []
    state = jzero.shard(create, stage=stage, mesh=mesh, min_shard_bytes=MIN_SHARD_BYTES)
    programs.append(model.program("jzero", state, batch))
    del state
    times = in_turns(programs, rounds(config))
    for p, seconds in zip(programs, times, strict=True):
        against = times[2] if mesh.size > 1 and p.name == "jzero" else None
        yield {
            "table": "step", "program": p.name, "step, ms": 1e3 * statistics.median(seconds),
            "fastest, ms": 1e3 * min(seconds), "/ plain": median_ratio(seconds, times[0]),
            "/ by hand": against and median_ratio(seconds, against), "peak, GB": peak_of(p.compiled) / 1e9,
        }  # fmt: skip


def switched(
    c: model.Sizes, stage: int, mesh: Any, config: dict[str, Any], offload: bool
) -> Iterator[dict[str, Any]]:
    """The step as it is beside the step without one thing that jzero does, for all of them."""
    create, batch = model.creator(c), model.batch_of(c, mesh)

    def state_with(make: Any, switch: switches.Switch | None = None):
        fields = dict(switch.fields) if switch else {}
        tier = {"in_flight_bytes": fields.pop("in_flight_bytes")} if "in_flight_bytes" in fields else {}
        return make(
            create, stage=stage, mesh=mesh, offload=jzero.Offload(**tier) if offload else None, **fields
        )

    on = model.program("on", state_with(jzero.shard), batch)
    first, again = in_turns([on, on], rounds(config))
    noise = abs(median_ratio(first, again) - 1)
    yield {
        "table": "switches",
        "switched off": "nothing (one program twice)",
        "off / on": median_ratio(first, again),
    }
    lines = program_lines(on.compiled)
    for switch in switches.of(stage, offload):
        row: dict[str, Any] = {"table": "switches", "switched off": switch.name}
        try:
            with switches.off(switch):
                off = Program("off", model.compiled(state_with(jzero.abstract, switch), batch), on.box, batch)
            if program_lines(off.compiled) == lines:
                yield {**row, "": "the same program"}
                continue
            peaks = [peak_of(p.compiled) for p in (on, off)]
            row |= {"peak on, GB": peaks[0] / 1e9, "peak off, GB": peaks[1] / 1e9}
            a, b = in_turns([on, off], rounds(config))
        except Exception as error:  # the others are measured all the same
            yield {**row, "": f"fails: {str(error).splitlines()[0][:120]}"}
            if any(x.is_deleted() for x in on.box[0]):
                on.box[0] = jax.tree.leaves(state_with(jzero.shard))
            continue
        ratio = median_ratio(b, a)
        useless = config["on_gpu"] and candidate(ratio, noise, *peaks)
        yield {**row, "step on, ms": 1e3 * statistics.median(a), "off / on": ratio, "candidate": useless}


def candidate(ratio: float, noise: float, peak_on: int, peak_off: int) -> bool:
    """It costs time, and without it no more memory is needed."""
    return ratio < 1 - max(noise, LEAST) and peak_off <= SAME_PEAK * peak_on


def peak_of(compiled: Any) -> int:
    """Device bytes of a program."""
    return jzero.explain(compiled).memory.total


def program_lines(compiled: Any) -> list[str]:
    """The program's lines, sorted, without names, channels and metadata."""
    noise = r"%[\w.\-]+|[\w.\-]+: (?=\w+\[)|, channel_id=\d+|, metadata=\{[^}]*\}"
    return sorted(re.sub(noise, "", line) for line in compiled.as_text().splitlines()[1:])


def findings(rows: list[dict[str, Any]]) -> list[str]:
    """What could go."""
    found = [r for r in rows if r.get("candidate")]
    return [
        f"Candidate for deletion: {r['switched off']} ({r['layers']}, stage {r['stage']}, {r['devices']} devices): "
        f"{r['off / on']:.3f} of the time without it, and no byte more"
        for r in found
    ]
