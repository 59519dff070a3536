"""The page and the plot of benchmarks/step.py."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flax
import jax
import jaxlib
import matplotlib.figure
import optax

MEDIAN, UPPER = 1.00, 1.03
"""The goal: the median ratio, and the upper end of its interval."""


def write(config: Any, pairs: list[Any], *, whole_below: int, flags: Sequence[str], seconds: float) -> Path:
    """The page and its plot; returns the page's path.

    Args:
      config: the `Config` of the run.
      pairs: its `Pair`s.
      whole_below: bytes; smaller leaves stay whole.
      flags: of the command line.
      seconds: that the run took.
    """
    path = config.out / f"{config.date}-{jax.default_backend()}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    draw(path.with_suffix(".png"), pairs)
    plain = {p.model: p for p in pairs if p.label.startswith("plain")}
    by_stage = [p for p in pairs if p.label[0].isdigit()]
    goal = [p for p in by_stage if p.goal]
    missed = [p for p in goal if not p.met]
    misses = "\n".join(f"- missed: {p.model}, stage {p.label}: {why(p)}" for p in missed)
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    text = f"""# Cost of using jzero: a train step, {config.date}

{machine()}
{versions()}; written by
`{" ".join(["python benchmarks/step.py", *flags])}` in {seconds / 60:.1f} minutes; load average at the
end {load} (over 1, 5, 15 minutes; the benchmark alone makes 1 to 2).
GPT of `train/model.py`, {config.dtype}, AdamW with clipping by the global norm; leaves below
{whole_below // 1024} KiB stay whole. {config.rounds} alternating rounds of at least {config.seconds * 1e3:.0f} ms
for each program.

Goal: never slower than sharded by hand: a median ratio of at most {MEDIAN:.2f} and the upper end of its 95 % bootstrap
interval at most {UPPER:.2f}. Met in {len(goal) - len(missed)} of {len(goal)} rows; in {sum(p.same for p in goal)} of \
them both programs are the same instructions, whatever the clock says.

{misses}

![ratios]({path.with_suffix(".png").name})

## Step time

{times_table(by_stage, plain)}

`/ plain` and `/ one` are jzero against plain Flax on all devices and on one device (the whole batch there), medians
of the same rounds. "3" is compared with a program that drops a gathered weight and gathers it again, as ZeRO-3 does;
"3, kept" (`reshard_after_forward=False`) with one that keeps it. Without a goal, since the two do not do the same: "3 /
kept", what the second gather costs; "3, kept / first", against all weights gathered before the model begins; "Muon / by
hand", against matrices that each device gathers and orthogonalizes all, and "Muon / replicated", against stage 0.

## Noise, and plain Flax

{controls_table([p for p in pairs if p not in by_stage])}

The same executable twice: what the machine alone does to a ratio. About half of such rows have a median above 1.00.

## Tracing and compile time, seconds

{building_table(by_stage)}

## The two programs

{contents_table(by_stage)}

jzero / by hand. {DIFFERENCES}

Counts are of the compiled text, a loop's body counted once; sent and temp are bytes per device and
step. "same": made of the same instructions; names, channels and their order aside. Relative difference of the
losses of the first three steps: at most {max(p.loss_difference for p in by_stage):.0e}.

## Caveats

{CAVEATS[jax.default_backend() == "cpu"]}
- One compile of each program, the least of three tracings; the machine is shared.
- "By hand" is in the note at the top of `benchmarks/step.py`; its author is ours.
"""
    path.write_text(text, encoding="utf-8")
    return path


DIFFERENCES = """They differ where jzero means to:
- Stage 1: jzero cuts each gradient before the update (`reduce_grad`), so that a clip's norm is taken on shards and
  a GPU can reduce-scatter. By hand the whole gradients are reduced in one combined
  collective, and the norm is taken of all of it on every device.
- Stage 3 in a scan: jzero gathers a weight for the forward pass and again for the backward pass (the checkpoint round
  each use), 3 Psi. By hand XLA does so too, and moves some activations instead of weights."""

CAVEATS = {
    True: """- Simulated devices share the cores: a collective is a copy in memory, and work that every device
  repeats is paid for once per device. Ratios here say what the host, the arithmetic and the number of collectives
  cost, not what a GPU's network does.
- XLA:CPU has no reduce-scatter of its own making: a split gradient is an all-reduce and a slice, in both programs.""",
    False: "- One process; GPUs of one machine.",
}


def why(pair: Any) -> str:
    """What a row can owe its ratio to."""
    ours, by_hand = (sum(p.opcodes[op] for op in COLLECTIVES) for p in pair.programs)
    sent = [p.report.wire.total / 1e6 for p in pair.programs]
    return f"{ours} collectives in the text against {by_hand}, {sent[0]:.2f} MB sent against {sent[1]:.2f}"


COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


def machine() -> str:
    """Hardware in a line."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    info = dict(tuple(map(str.strip, line.split(":", 1))) for line in lines if ":" in line)
    name = info.get("model name", platform.processor() or platform.machine())
    name += f" (model {info['model']})" * ("model" in info) + ", AVX-512" * (
        "avx512f" in info.get("flags", "")
    )
    devices = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    return f"{name}, {os.cpu_count()} cores; {devices} devices{' (simulated)' * (jax.default_backend() == 'cpu')}."


def versions() -> str:
    """Python and the libraries that make the programs."""
    libraries = {"jax": jax, "jaxlib": jaxlib, "flax": flax, "optax": optax}
    names = ", ".join(f"{name} {module.__version__}" for name, module in libraries.items())
    return f"Python {platform.python_version()}, {names}"


def table(header: str, rows: Sequence[Sequence[Any]]) -> str:
    """Markdown; the first two columns to the left, figures to the right."""
    names = header.split("|")
    lines = [names, ["---", "---", *["---:"] * (len(names) - 2)], *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def interval(pair: Any) -> str:
    median, low, high = pair.summary
    return f"{median:.3f} ({low:.3f} to {high:.3f})"


def times_table(pairs: Sequence[Any], plain: dict[str, Any]) -> str:
    rows = []
    for p in pairs:
        (ours, hand), (flat, one) = p.ms, plain[p.model].ms
        goal = "" if not p.goal else "same" if p.same else "met" if p.met else "missed"
        times = [f"{ours:.2f}", f"{hand:.2f}", interval(p), goal, f"{ours / flat:.2f}", f"{ours / one:.2f}"]
        rows.append([p.model, p.label, *times])
    return table("model|stage|jzero, ms|by hand, ms|jzero / by hand (95 %)|goal|/ plain|/ one", rows)


def controls_table(pairs: Sequence[Any]) -> str:
    rows = [[p.model, p.label, *(f"{ms:.2f}" for ms in p.ms), interval(p)] for p in pairs]
    return table("model|pair|first, ms|second, ms|first / second (95 %)", rows)


def building_table(pairs: Sequence[Any]) -> str:
    rows = []
    for p in pairs:
        row = [p.model, p.label]
        for name in ("lower_seconds", "compile_seconds"):
            a, b = (getattr(x, name) for x in p.programs)
            row += [f"{a:.2f}", f"{b:.2f}", f"{a / b:.2f}"]
        rows.append(row)
    return table("model|stage|trace, jzero|by hand|ratio|compile, jzero|by hand|ratio", rows)


def contents_table(pairs: Sequence[Any]) -> str:
    ops = (*COLLECTIVES, "copy", "fusion")
    rows = []
    for p in pairs:
        a, b = p.programs
        counts = [f"{a.opcodes[op]} / {b.opcodes[op]}" for op in ops]
        sent = " / ".join(f"{x.report.wire.total / 1e6:.2f}" for x in p.programs)
        temp = " / ".join(f"{x.report.memory.temp / 1e6:.2f}" for x in p.programs)
        rows.append([p.model, p.label, *counts, sent, temp, "same" if p.same else ""])
    return table(f"model|stage|{'|'.join(ops)}|sent, MB|temp, MB|", rows)


def draw(path: Path, pairs: Sequence[Any]) -> None:
    """Ratios over stages, with their intervals and the goal; a panel for each model. Grey: one program twice."""
    models = list(dict.fromkeys(p.model for p in pairs))
    figure = matplotlib.figure.Figure(figsize=(3 + 2 * len(models), 3.6), layout="constrained")
    panels = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
    for axes, model in zip(panels, models, strict=True):
        rows = [p for p in pairs if p.model == model and p.goal]
        rows = [next(p for p in pairs if p.model == model), *rows]
        for x, p in enumerate(rows):
            median, low, high = p.summary
            color = "#b0b0b0" if x == 0 or p.same else "#55a868" if p.met else "#c44e52"
            axes.errorbar(x, median, [[median - low], [high - median]], fmt="o", color=color, capsize=3)
        axes.axhline(MEDIAN, color="black", linewidth=0.8)
        axes.axhline(UPPER, color="black", linewidth=0.8, linestyle=":")
        axes.set_xticks(range(len(rows)), ["noise", *(p.label for p in rows[1:])])
        axes.set_xlabel("stage")
        axes.set_title(model, fontsize="medium")
    panels[0].set_ylabel("step time, jzero / by hand")
    figure.savefig(path, dpi=120)
