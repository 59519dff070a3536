"""Draws docs/pictures/: memory by stage, bytes on the wire by stage, and where each collective stands in a step.

    python docs/make_pictures.py                          # about 8 minutes on two cores; needs jzero[pod], no GPU
    python docs/make_pictures.py --saved runs/stages.json # draw again what the last run wrote there

The program is that of benchmarks/stages.py: a GPT of 12 unrolled layers, compiled for 64 H200 at each stage, with one
sequence of 16 tokens per device, so that what is measured is the model states; the schedule is that with 512 tokens.
(With few tokens nothing needs to be ordered at stage 2, and XLA reduces all gradients in one collective.)
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

STAGES, N, TOKENS = (0, 1, 2, 3), 64, 512
FOLDER = Path(__file__).with_name("pictures")
# Okabe and Ito's colours, which people who see fewer colours can tell apart
MEMORY = {"params": "#0072B2", "optimizer state": "#E69F00", "temp": "#999999"}
OPS = {"all-reduce": "#D55E00", "reduce-scatter": "#E69F00", "all-gather": "#0072B2"}
PHASES = {"forward": "#CFE3F1", "backward": "#F4D9C6", "update": "#CDEBDF", " no name (copies)": "#ECECEC"}
HATCHES = {"all-reduce": "//", "reduce-scatter": "", "all-gather": ""}


def measured(stage: int) -> dict[str, Any]:
    """What the pictures need of one stage, in bytes: memory by kind, wire by kind, and the schedule.

    The schedule's unit is an instruction that computes: `phases` has one letter for each, a collective begins after
    `start` of them and ends before `end`.
    """
    import test_gpu_program as program

    report = compiled(stage, program.SEQ)[0]
    memory = report.memory
    return {
        "memory": {"params": memory.params, "optimizer state": memory.opt_state, "temp": memory.temp},
        "wire": dict(report.wire.by_op),
        "psi": report.wire.psi_bytes,
        **schedule(compiled(stage, TOKENS)[1]),
    }


def compiled(stage: int, tokens: int) -> tuple[Any, str]:
    """What `explain` says of the step, and the text of the compiled program."""
    import jax
    import jax.numpy as jnp
    import test_gpu_program as program

    import jzero

    pod = jzero.pod("h200", hosts=N // 8, gpus_per_host=8)
    state = jzero.abstract(
        lambda: program.create(False, layers=12, vocab=2048),
        stage=stage, mesh=pod.mesh({"data": N}), min_shard_bytes=16 * 1024,
    )  # fmt: skip
    plan = jzero.plan_of(state)
    batch = {"tokens": jax.ShapeDtypeStruct((N, tokens), jnp.int32)}
    done = pod.compile(program.train_step, state, batch, donate_argnums=0)
    return jzero.explain(done, plan), done.as_text()


def schedule(text: str) -> dict[str, Any]:
    """The phase of each computing instruction of the program's entry, and its collectives between them."""
    from jzero.proof.collectives import read_collectives
    from jzero.proof.hlo import parse
    from jzero.proof.places import Place, name_stack, phase_of, work_before

    module = parse(text)
    home = module.computations[module.entry]
    before, place = work_before(home)[0], Place(home)
    phases = [
        (phase_of(name_stack(place, i), module.has_backward) or " ")[0]
        for at, i in enumerate(home.schedule)
        if before[at + 1] > before[at]
    ]
    callers = {c: i for i in home.schedule for c in i.callees("calls", "called_computations")}
    rows = []
    for site in read_collectives(module)[0]:
        start = home.instructions.get(site.name) or callers.get(site.computation)
        assert start is not None, site  # all layers are unrolled: nothing stands in a loop
        done = next((u for u in home.users.get(start.name, ()) if u.opcode.endswith("-done")), start)
        first, last = before[home.order[start.name]], before[home.order[done.name]]
        rows.append(
            {"op": site.op, "bytes": site.bytes, "start": first, "end": last if site.asynchronous else first}
        )
    return {"phases": "".join(phases), "collectives": rows}


def plain(axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def draw_memory(found: dict[int, Any], plt, path: Path) -> None:
    """One bar for each stage: params, optimizer state, temp."""
    figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
    for row, stage in enumerate(STAGES):
        left = 0.0
        for kind, color in MEMORY.items():
            size = found[stage]["memory"][kind] / 1e6
            axes.barh(row, size, left=left, color=color, label=kind if not row else None, height=0.65)
            left += size
        parts = " + ".join(f"{found[stage]['memory'][kind] / 1e6:.0f}" for kind in MEMORY)
        axes.text(left + 25, row, f"{left:.0f} MB  = {parts}", va="center", fontsize=11)
    axes.set(
        yticks=range(4),
        yticklabels=[f"stage {s}" for s in STAGES],
        xlabel="MB on each device",
        xlim=(0, 3700),
    )
    axes.invert_yaxis()
    axes.legend(frameon=False, loc="lower right", fontsize=11)
    axes.tick_params(labelsize=11)
    plain(axes)
    figure.savefig(path, dpi=120)


def draw_wire(found: dict[int, Any], plt, path: Path) -> None:
    """One bar for each stage: what a device sends in a step, by kind of collective, in Psi."""
    figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
    named = set()
    for row, stage in enumerate(STAGES):
        left, wire, psi = 0.0, found[stage]["wire"], found[stage]["psi"]
        for op, color in OPS.items():
            size = wire.get(op, 0) / psi
            if size < 0.005:
                continue
            axes.barh(
                row, size, left=left, color=color, height=0.65, hatch=HATCHES[op], edgecolor="white",
                label=None if op in named else op,
            )  # fmt: skip
            named.add(op)
            left += size
        total = sum(wire.values())
        axes.text(left + 0.03, row, f"{total / psi:.2f} Psi = {total / 1e6:.0f} MB", va="center", fontsize=11)
    axes.set(
        yticks=range(4), yticklabels=[f"stage {s}" for s in STAGES], xlim=(0, 4.3),
        xlabel="sent by each device in a step, in Psi = (N-1)/N of the bytes of all params",
    )  # fmt: skip
    axes.invert_yaxis()
    axes.legend(frameon=False, loc="upper right", fontsize=11)
    axes.tick_params(labelsize=11)
    plain(axes)
    figure.savefig(path, dpi=120)


def runs(phases: str, letter: str) -> list[tuple[int, int]]:
    """Where a letter stands without a break: (first, behind the last)."""
    return [m.span() for m in re.finditer(f"{re.escape(letter)}+", phases)]


def draw_schedule(found: dict[int, Any], plt, path: Path) -> None:
    """One strip for each stage: phases from left to right, collectives as bars of their bytes."""
    figure, rows = plt.subplots(4, 1, figsize=(9, 8), layout="constrained")
    for axes, stage in zip(rows, STAGES, strict=True):
        phases, sites = found[stage]["phases"], found[stage]["collectives"]
        count = len(phases)
        top = max(x["bytes"] for x in sites) / 1e6 * 1.1
        for name, color in PHASES.items():
            for first, last in runs(phases, name[0]):
                axes.axvspan(first, last, color=color, linewidth=0)
        for x in sites:
            width = max(x["end"] - x["start"], 0.004 * count)
            axes.bar(
                x["start"], x["bytes"] / 1e6, width=width, align="edge", color=OPS.get(x["op"], "black"),
                alpha=0.85, edgecolor="white", linewidth=0.4,
            )  # fmt: skip
        large = sum(x["bytes"] >= 1e6 for x in sites)
        axes.set_title(
            f"stage {stage}: {large} collectives of at least 1 MB, {len(sites) - large} smaller",
            loc="left",
            fontsize=11,
        )
        axes.set(ylabel="tensor, MB", xlim=(0, count * 1.01), ylim=(0, top))
        plain(axes)
    rows[-1].set_xlabel("instructions that compute, in the order of the schedule")
    handles = [plt.Rectangle((0, 0), 1, 1, color=c) for c in (*OPS.values(), *PHASES.values())]
    names = [*OPS, *(f"compute: {p.strip()}" for p in PHASES)]
    figure.legend(handles, names, loc="outside upper center", ncols=4, frameon=False, fontsize=11)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Compile, or read what was found, and draw."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--saved", type=Path, help="draw from this file instead of compiling")
    parser.add_argument("--save", type=Path, default=ROOT / "runs" / "stages.json")
    parser.add_argument("--out", type=Path, default=FOLDER)
    args = parser.parse_args()
    if args.saved:
        found = {int(k): v for k, v in json.loads(args.saved.read_text(encoding="utf-8")).items()}
    else:
        found = {stage: measured(stage) for stage in STAGES}
        args.save.parent.mkdir(parents=True, exist_ok=True)
        args.save.write_text(json.dumps(found), encoding="utf-8")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    args.out.mkdir(exist_ok=True)
    draw_memory(found, plt, args.out / "memory_by_stage.png")
    draw_wire(found, plt, args.out / "wire_by_stage.png")
    draw_schedule(found, plt, args.out / "schedule.png")
    for stage, row in found.items():
        memory = ", ".join(f"{kind} {size / 1e6:.1f} MB" for kind, size in row["memory"].items())
        print(f"stage {stage}: {memory}; {sum(row['wire'].values()) / row['psi']:.2f} Psi")


if __name__ == "__main__":
    main()
