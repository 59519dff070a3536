"""A `Fit` as one screen of text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jzero.config import Offload
from jzero.core.errors import human_bytes, table

if TYPE_CHECKING:
    from jzero.proof.fitting.candidates import Candidate
    from jzero.proof.fitting.fit import Fit


def shown(fit: Fit) -> str:
    """The text."""
    pod, best = fit.pod, fit.best
    each = f"{human_bytes(fit.limit)} of each for a program"
    machine = f"{len(pod.devices)} {pod.gpu} ({pod.hosts} x {pod.gpus_per_host}), {each}"
    if best is None:
        return "\n".join([f"nothing fits on {machine}.", *_refused(fit), *_needed(fit), *fit.notes])
    lines = [f"the fastest that fits on {machine}:", "", *_code(fit, best), "", *_table(fit)]
    return "\n".join([*lines, *_refused(fit), *(f"note: {n}" for n in fit.notes), "", *MODEL])


MODEL = [
    "ms of a step: a model, which no GPU has timed; rates= sets its rates. Bytes of one device: `compiled` is what XLA",
    "allocated. examples: of one device in a micro-batch.",
]


def _code(fit: Fit, best: Candidate) -> list[str]:
    option = best.option
    fields = ", ".join(f"{name}={_code_of(value)}" for name, value in option.fields().items())
    sizes = ", ".join(f'"{name}": {size}' for name, size in option.axes.items())
    offered = ", ".join(f"{name}={on}" for name, on in option.offered.items())
    call = f"lambda: create_state({offered})" if offered else "create_state"
    lines = [f"    config = jzero.ZeroConfig({fields})", f"    mesh = jzero.mesh({{{sizes}}})"]
    state, more = "model, optimizer" if fit.pair else "state", ", trainable=trainable" if fit.trainable else ""
    lines.append(f"    {state} = jzero.shard({call}, config, mesh=mesh{more})")
    return [*lines, f"    step({state}, batch, accumulate={option.accumulate})"] if option.accumulate > 1 else lines


def _code_of(value: Any) -> str:
    if not isinstance(value, Offload):
        return repr(value)
    parts = [f'tier="{value.tier}"', *([f'params="{value.params}"'] if value.params != "device" else [])]
    return f"jzero.Offload({', '.join(parts)})"


def _table(fit: Fit) -> list[str]:
    head = ["", "ms", "math", "wire", "update", "PCIe", "estimated", "compiled", "host", "examples"]
    rows = list[list[str]]()
    for name, c in (("chosen", fit.best), ("runner-up", fit.runner_up)):
        if c is not None:
            rows.append([f"{name}: {c.option}", *_times(c), *_bytes(fit, c), str(c.examples)])
    return table(head, rows).splitlines()


def _times(c: Candidate) -> list[str]:
    s = c.seconds
    return [f"{1e3 * x:.1f}" for x in (s.total, s.math, s.wire, s.update, s.pcie)]


def _bytes(fit: Fit, c: Candidate) -> list[str]:
    compiled = human_bytes(fit.compiled[c]) if c in fit.compiled else "-"
    return [human_bytes(c.estimate.total), compiled, human_bytes(c.estimate.host_per_node)]


def _refused(fit: Fit) -> list[str]:
    if not fit.refused:
        return []
    head = "faster, but too large:" if fit.best is not None else "the smallest:"
    return [head, *(f"  {c.option}: {_why(fit, c)}" for c in fit.refused)]


def _why(fit: Fit, c: Candidate) -> str:
    size, how = fit.predicted(c), "compiled" if c in fit.compiled else "estimated"
    if size > fit.limit:
        return f"{human_bytes(size)} ({how}), {human_bytes(size - fit.limit)} too much ({1e3 * c.seconds.total:.1f} ms)"
    return f"{human_bytes(c.estimate.host_per_node)} of a host's memory ({1e3 * c.seconds.total:.1f} ms)"


def _needed(fit: Fit) -> list[str]:
    if fit.needed is None:
        return ["no number of such hosts that divides the batch is enough by the closed forms."]
    return [f"by the closed forms {fit.needed} {fit.pod.gpu} are enough."]
