"""The plot of `jzero plan`: memory per stage, and over the number of GPUs."""

from __future__ import annotations

from pathlib import Path

import matplotlib.figure
import matplotlib.ticker
from matplotlib.axes import Axes

from jzero.cli.job import Answers, Job, Json

_PARTS = {"params": "#4c72b0", "optimizer state": "#dd8452", "gradients": "#55a868", "temp": "#b0b0b0"}


def draw(path: Path, job: Job, answers: Answers) -> None:
    """Bars per stage as compiled, beside the estimate over the number of GPUs; the GPU's memory is a line.

    Args:
      path: file to write; its suffix says the format.
      job: what was asked.
      answers: what `run_job` returned, with `lines`.
    """
    figure = matplotlib.figure.Figure(figsize=(11, 4.5), layout="constrained")
    bars, lines = figure.subplots(1, 2)
    memory = answers["about"]["memory"]
    _bars(bars, [r for r in answers["results"].values() if "crash" not in r], memory)
    bars.set_title(f"compiled for {answers['about']['gpus']} {job.gpu}")
    _lines(lines, answers["lines"], memory)
    figure.suptitle(str(job.preset or job.create))
    figure.savefig(path, dpi=150)


def memory_parts(result: Json) -> dict[str, float]:
    """Bytes of a compiled stage by part; gradients share buffers with the rest of temp, at most their estimate."""
    c = result["compiled"]
    rest = c["total"] - c["params"] - c["opt_state"]
    grads = min(rest, result["estimate"]["grads"])
    return {
        "params": c["params"],
        "optimizer state": c["opt_state"],
        "gradients": grads,
        "temp": rest - grads,
    }


def _unit(largest: float) -> tuple[str, float]:
    """The unit in which the largest bar or point has one to four digits before the point."""
    return next(((name, size) for name, size in (("GB", 1e9), ("MB", 1e6)) if largest >= size), ("kB", 1e3))


def _bars(axes: Axes, results: list[Json], memory: int) -> None:
    names = [f"stage {r['stage']}" for r in results]
    memories = [memory_parts(r) for r in results]
    unit, size = _unit(max((sum(s.values()) for s in memories), default=0))
    base = [0.0] * len(memories)
    for part, color in _PARTS.items():
        heights = [s[part] / size for s in memories]
        axes.bar(names, heights, bottom=base, label=part, color=color)
        base = [b + h for b, h in zip(base, heights, strict=True)]
    for name, top in zip(names, base, strict=True):
        axes.annotate(f"{top:.2f}", (name, top), ha="center", va="bottom")
    if base and max(base) > 0.3 * memory / size:
        axes.axhline(memory / size, color="black", linestyle=":", label="GPU memory")
    axes.set_ylabel(f"{unit} per device")
    axes.margins(y=0.12)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=len(_PARTS) + 1, fontsize="small")


def _lines(axes: Axes, lines: dict[int, dict[int, int]], memory: int) -> None:
    most = max((b for totals in lines.values() for b in totals.values()), default=0)
    unit, size = _unit(most)
    for stage, totals in lines.items():
        axes.plot(list(totals), [b / size for b in totals.values()], marker="o", label=f"stage {stage}")
    counts = sorted({n for totals in lines.values() for n in totals})
    if most > 0.01 * memory:  # otherwise this line would squeeze all others together
        axes.axhline(memory / size, color="black", linestyle=":", label="GPU memory")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(counts, [str(n) for n in counts])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    axes.set_xlabel("GPUs")
    axes.set_ylabel(f"{unit} per device, estimated")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=len(lines) + 1, fontsize="small")
