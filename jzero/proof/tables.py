"""How a report looks: rich tables as plain text, 110 columns wide."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from jzero.core.errors import counted, human_bytes
from jzero.proof.activations import Activations
from jzero.proof.records import Collective, Memory
from jzero.proof.transfers import GRADIENT, WEIGHT, Transfer

if TYPE_CHECKING:
    from jzero.proof.report import Report

WIDTH = 110
MOST_ROWS = 40
NO_MEMORY = "memory: not reported by this backend"


def render(report: Report) -> str:
    """A `Report` as text: collectives, totals, host traffic, memory."""
    mesh = " x ".join(f"{size} {name}" for name, size in (report.mesh_shape or {}).items())
    left_out = len(report.collectives) - MOST_ROWS
    lines = [counted(report.devices, "device") + (f" ({mesh})" if mesh else "")]
    what = "overlap: output of the compute in between"
    if report.overlap is not None:
        what = "hidden: part of the time that it does not cost, by a model"
    title = f"collectives (tensor and wire: of one execution; {what})"
    lines += ["", title, *(lines_of(_collectives(report)) if report.collectives else [" none"])]
    lines += [f" ... and {counted(left_out, 'row')} with less traffic"] if left_out > 0 else []
    lines += ["", "sent by one device in a step", *lines_of(_wire(report))] if report.collectives else []
    if (overlap := report.overlap) is not None:
        waits = f"{1e3 * overlap.waits:.3g} ms"
        lines += [f" hidden : {overlap.hidden:.0%} of these bytes; a step waits {waits} for the others"]
        lines += [f"   (a model, which no GPU has timed; {overlap.rates})"]
    if report.is_upper_bound:
        lines += [" branch : a collective in a branch of a conditional is counted, whether or not a step takes it"]
    if report.is_lower_bound:
        lines += [" >= : a collective in a loop whose trip count XLA does not know is counted once"]
    if report.unknown_calls:
        named = ", ".join(f"{n} x {target}" for target, n in report.unknown_calls.items())
        lines += [f" custom calls that jzero cannot look into: {named}"]
    if report.transfers:
        lines += ["", "host transfers of one device in a step", *lines_of(_transfers(report))]
    if report.activations is not None:
        lines += ["", "from the forward to the backward pass, one device", *lines_of(_activations(report.activations))]
    lines += ["", *(["memory per device", *lines_of(_memory(report.memory))] if report.memory else [NO_MEMORY])]
    return "\n".join(lines)


def lines_of(table: Table) -> list[str]:
    """The lines of a table without its blank ones and its rule."""
    out = io.StringIO()
    Console(file=out, width=WIDTH, color_system=None, highlight=False, emoji=False, markup=False).print(table)
    return [line.rstrip() for line in out.getvalue().splitlines() if line.strip(" ─")]


def plain_table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """An empty table without frame; columns in `right` hold numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for name in columns:
        number = name in right
        table.add_column(name, justify="right" if number else "left", no_wrap=number)
    return table


def _collectives(report: Report) -> Table:
    title = "overlap" if report.overlap is None else "hidden"
    columns = ("collective", "tensor", "wire", "axes", "where", "phase", title, "per step")
    table = plain_table(*columns, right=("tensor", "wire", "per step"))
    for c in report.collectives[:MOST_ROWS]:
        name = f"{c.count} x {c.op}" + (" + slice" if c.sliced else "")
        tensor = f"{c.dtype} {human_bytes(c.bytes)}"
        wire, total = human_bytes(c.wire_bytes), human_bytes(c.total_wire_bytes)
        phase = f"{c.phase or '?'} {c.scope}"
        table.add_row(name, tensor, wire, _axes(c, report), _where(c), phase, _overlap(c), total)
    return table


def _axes(c: Collective, report: Report) -> str:
    """`data`, or `data (8 of 64)` when a group covers part of its axes."""
    if not c.axes or report.mesh_shape is None:
        return f"? ({c.group_size})"
    whole = math.prod(report.mesh_shape[name] for name in c.axes)
    partial = c.group_size != whole and c.op != "collective-permute"
    return "+".join(c.axes) + (f" ({c.group_size} of {whole})" if partial else "")


def _where(c: Collective) -> str:
    """`once`, or the loops around it: `loop 4 x 3`; and `branch` in a branch that a step may not take."""
    loops = ["loop " + " x ".join(str(n or "?") for n in c.loops)] if c.loops else []
    return " ".join([*loops, *["branch"] * c.in_branch]) or "once"


def _overlap(c: Collective) -> str:
    if not c.asynchronous:
        return "?" if c.asynchronous is None else "sync"
    if c.hidden is not None:
        return f"{c.hidden:.0%}"
    return human_bytes(c.compute_bytes) if c.overlapped else "nothing"


def _wire(report: Report) -> Table:
    wire = report.wire
    table = plain_table("", "bytes", "Psi", right=("bytes", "Psi"))
    over = {f"over {axis}": count for axis, count in wire.by_axis.items()}
    rows = [*wire.by_op.items(), *over.items(), ("total", wire.total)]
    lower, upper = report.is_lower_bound, report.is_upper_bound
    bound = ">= " if lower and not upper else "<= " if upper and not lower else "~ " if upper else ""
    for name, count in rows:
        psi = f"{bound}{count / wire.psi_bytes:.3f}" if wire.psi_bytes else "-"
        table.add_row(name, bound + human_bytes(count), psi)
    return table


def _transfers(report: Report) -> Table:
    """A row per direction of host traffic, and where there are several kinds of it one for each.

    The number counts a transfer in a loop once for each trip.
    """
    columns = ("bytes", "transfers", "asynchronous", "beside compute")
    table = plain_table("", *columns, right=columns)
    for to in ("device", "host"):
        moves = [t for t in report.transfers if t.to == to]
        kinds: dict[str, list[Transfer]] = {}
        for t in moves:
            named = t.scope if t.scope in (WEIGHT, GRADIENT) else ""
            kinds.setdefault(f"  {t.phase or '?'} {named}".rstrip(), []).append(t)
        table.add_row(f"to {to}", *_moved(moves))
        for name, some in kinds.items() if len(kinds) > 1 else ():
            table.add_row(name, *_moved(some))
    return table


def _moved(moves: list[Transfer]) -> list[str]:
    total, count = sum(t.total_bytes for t in moves), sum(t.trips for t in moves)
    apart = sum(t.total_bytes for t in moves if t.asynchronous)
    beside = sum(t.total_bytes for t in moves if t.asynchronous and t.compute_ops)
    shares = [f"{human_bytes(n)} ({100 * n / total:.0f} %)" if total else "-" for n in (apart, beside)]
    return [human_bytes(total), str(count), *shares]


def _activations(a: Activations) -> Table:
    table = plain_table("", "bytes", right=("bytes",))
    table.add_row("saved in device memory", human_bytes(a.saved))
    if a.host:
        table.add_row("saved in host memory", human_bytes(a.host))
    table.add_row("computed again", human_bytes(a.recomputed))
    return table


def _memory(m: Memory) -> Table:
    table = plain_table("", "device", "host", right=("device", "host"))
    rows = [("arguments", m.arguments, m.host_arguments), ("outputs", m.outputs, m.host_outputs)]
    if m.params is not None and m.opt_state is not None and m.rest is not None:
        rows[1:1] = [("  params", m.params, 0), ("  optimizer state", m.opt_state, 0), ("  rest", m.rest, 0)]
    rows += [("aliased", -m.aliased, -m.host_aliased), ("temp", m.temp, m.host_temp)]
    rows += [("total", m.total, m.host_total)]
    for name, device, host in rows:
        table.add_row(name, human_bytes(device), human_bytes(host) if host else "-")
    if m.peak is not None:
        table.add_row("peak, by the compiler", human_bytes(m.peak), "in it" if m.host_total else "-")
    return table
