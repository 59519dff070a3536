"""What the step was compiled to, beside the closed form, and how it runs: a line, metrics, and a picture of both."""

from __future__ import annotations

import dataclasses
import resource
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import matplotlib

import jzero
from jzero.core.errors import human_bytes

OPS = {"all-gather": "#0072B2", "reduce-scatter": "#E69F00", "all-reduce": "#D55E00", "all-to-all": "#009E73"}
ELSE = "everything else"
PARTS = {"params": "#0072B2", "optimizer state": "#E69F00", ELSE: "#999999"}


@dataclasses.dataclass(frozen=True)
class Figures:
    """Bytes of one device.

    Attributes:
      planned, compiled: its memory in parts, by the closed form and in the program; empty where that cannot be read.
      wire_planned: what it sends in a step, by the closed form.
      wire: what it sends in the program, by operation; None where that cannot be read.
      unread: why.
    """

    planned: Mapping[str, int]
    compiled: Mapping[str, int]
    wire_planned: int
    wire: Mapping[str, int] | None
    unread: str = ""

    @property
    def metrics(self) -> dict[str, float]:
        """For every line of metrics: bytes on the wire per step, and as a multiple of the closed form."""
        if self.wire is None:
            return {}
        sent = sum(self.wire.values())
        share = {"wire_by_closed_form": round(sent / self.wire_planned, 4)} if self.wire_planned else {}
        return {"wire_bytes": sent, **share}

    def __str__(self) -> str:
        """Model states and bytes on the wire, as planned and as compiled."""
        def states(parts: Mapping[str, int]) -> str:
            return f"{(parts['params'] + parts['optimizer state']) / 1e6:.3f}"

        memory = f"MB per device: {states(self.planned)} of params and optimizer state planned"
        if self.wire is None:
            return f"{memory}; what was compiled and its bytes on the wire are not known: {self.unread}"
        memory += f", {states(self.compiled)} compiled, {self.compiled[ELSE] / 1e6:.1f} more while a step runs"
        sent, planned = sum(self.wire.values()), self.wire_planned
        share = f", {sent / planned:.2f} of the closed form ({human_bytes(planned)})" if planned else ""
        note = f"; {_simulated()}" if _simulated() else ""
        return f"{memory}\nsent by a device in a step: {human_bytes(sent)}{share}{note}"


def figures_of(program: jax.stages.Compiled, plan: jzero.Plan, estimate: jzero.Estimate) -> Figures:
    """The figures of a compiled step."""
    planned = {"params": estimate.params, "optimizer state": estimate.opt_state, ELSE: estimate.grads}
    try:
        report = jzero.explain(program, plan)
    except jzero.ProofError as error:  # a run does not end because of what cannot be shown
        return Figures(planned, {}, estimate.wire, None, str(error))
    held = report.memory
    assert held is not None
    assert held.params is not None
    assert held.opt_state is not None
    rest = held.total - held.params - held.opt_state
    compiled = {"params": held.params, "optimizer state": held.opt_state, ELSE: rest}
    return Figures(planned, compiled, estimate.wire, report.wire.by_op)


def peak_bytes() -> int:
    """Peak memory so far: of the first GPU, or of this process if there is no GPU."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use") or host_peak()


def host_peak() -> int:
    """The most memory that this process has held."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def draw(path: Path, figures: Figures, rows: Iterable[Mapping[str, Any]]) -> None:
    """Tokens per second and memory along the run; memory and wire of a device, planned and compiled."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in rows if "tokens_per_second" in row]
    figure, ((rate, memory), (parts, wire)) = plt.subplots(2, 2, figsize=(9, 6), layout="constrained")
    rate.plot([r["step"] for r in rows], [r["tokens_per_second"] for r in rows], marker=".", color="#1f4e9c")
    rate.set(title="tokens per second", xlabel="step")
    known = [r for r in rows if "memory_bytes" in r]
    memory.plot([r["step"] for r in known], [r["memory_bytes"] / 1e9 for r in known], marker=".", color="#1f4e9c")
    whose = "the first GPU" if jax.devices()[0].platform == "gpu" else "this process"
    memory.set(title=f"GB, the most so far of {whose}", xlabel="step")
    _bars(parts, {"closed form": figures.planned, "compiled": figures.compiled}, PARTS)
    parts.set(title="MB of one device in a step")
    sent = {"closed form": {"all": figures.wire_planned}, "compiled": figures.wire or {}}
    _bars(wire, sent, {"all": "#999999", **OPS})
    known_wire = "MB that a device sends in a step" if figures.wire is not None else "what a device sends is not known"
    wire.set(title=known_wire, xlabel=_simulated())
    for axes in (rate, memory, parts, wire):
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _bars(axes: Any, bars: Mapping[str, Mapping[str, int]], colours: Mapping[str, str]) -> None:
    below = dict.fromkeys(bars, 0.0)
    for part, colour in colours.items():
        heights = {name: values.get(part, 0) / 1e6 for name, values in bars.items()}
        if any(heights.values()):
            axes.bar(list(heights), list(heights.values()), 0.5, list(below.values()), color=colour, label=part)
        below = {name: below[name] + height for name, height in heights.items()}
    axes.legend(frameon=False, fontsize=8)


def _simulated() -> str:
    """A note where XLA has compiled other collectives than it does for GPUs."""
    return "" if jax.devices()[0].platform == "gpu" else "on simulated devices XLA all-reduces for a reduce-scatter"
