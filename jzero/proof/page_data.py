"""What the page of `write_html` shows of one program, as plain data."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jzero.core.errors import typed_shape
from jzero.layout.specs import shard_factor
from jzero.proof.arguments import arguments_given
from jzero.proof.buffers import Buffers, BufferSlot
from jzero.proof.check import Findings
from jzero.proof.collectives import read_collectives
from jzero.proof.groups import axes_of
from jzero.proof.hlo import SAME, Instruction, Module, parse
from jzero.proof.leaves import kinds_of, names_of, roles_of
from jzero.proof.places import Place, phase_of, primitive_of, scope_of, walk
from jzero.proof.record import record_of
from jzero.proof.report import Report, text_of
from jzero.proof.source_lines import SourceLines
from jzero.proof.timeline import key_of, overlap_on
from jzero.sharding import Plan

KINDS = (
    "params", "optimizer state", "batch and other arguments", "outputs and constants", "gathered weights",
    "saved for the backward pass", "gradients, until the update", "forward pass", "backward pass", "update", "other",
)  # fmt: skip
"""What device memory holds: arguments by the plan, temporaries by the phases that write them first and read them
last."""
LEAST_SHARE = 1e-4
"""Of the peak: a slot below it is in the sums, not in the lists."""
MOST_POINTS = 2000
PASSED = SAME | {"parameter", "while", "copy", "constant"}
ZEROS = ("broadcast_in_dim", "while", "scan")
"""Primitives whose results a loop fills, and loops themselves."""
PHASES = ("", "forward", "backward", "update")
Json = dict[str, Any]


class Strings:
    """Texts that a page holds once each; a row has their numbers."""

    def __init__(self):
        self.numbers: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        """The number of a text."""
        return self.numbers.setdefault(text, len(self.numbers))


def page_data(
    compiled: jax.stages.Compiled, plan: Plan, buffers: Buffers | None, report: Report, found: Findings
) -> Json:
    """Everything about one program; bytes are those of one device.

    Args:
      compiled: the program.
      plan: its plan.
      buffers: its device memory, None where it was compiled without.
      report, found: what `explain` and `findings` say of it.
    """
    text, strings = text_of(compiled), Strings()
    module = parse(text)
    program = _Program(module, SourceLines(text), buffers)
    data: Json = {
        "title": plan.title,
        "memory": None if report.memory is None else dataclasses.asdict(report.memory) | {
            "total": report.memory.total, "host_total": report.memory.host_total,
        },
        "wire": {"total": report.wire.total, "psi": report.wire.psi_bytes, "by_axis": dict(report.wire.by_axis),
                 "by_op": dict(report.wire.by_op), "by_phase": dict(report.wire.by_phase)},
        "pcie": report.pcie,
        "collectives": _collectives(program, plan.mesh, strings),
        "findings": [dataclasses.asdict(x) for x in found],
        "notes": [*found.notes, *(f"{kind} was not looked for, {why}" for kind, why in found.left_out.items())],
        "leaves": _leaves(plan),
        "timeline": None if buffers is None else _timeline(program, compiled, plan, buffers, strings),
    }  # fmt: skip
    return data | {"strings": list(strings.numbers)}


class _Program:
    """The instructions of a program by their place in its schedule."""

    def __init__(self, module: Module, lines: SourceLines, buffers: Buffers | None):
        self.module, self.lines = module, lines
        self.found: dict[str, tuple[Place, Instruction]] = {}
        for place in walk(module):
            self.found |= {i.name: (place, i) for i in place.computation.schedule}
        schedule = self.found if buffers is None else buffers.schedule
        self.order = {name: at for at, name in enumerate(schedule)}
        named = [self.phase(name) for name in schedule]
        self.phases = list(itertools.accumulate(named, lambda before, own: own or before))

    def instruction(self, name: str) -> Instruction | None:
        return self.found[name][1] if name in self.found else None

    def phase(self, name: str) -> str:
        """The phase that an instruction's own name says; empty if none."""
        i = self.instruction(name)
        return "" if i is None else phase_of(i.op_name, self.module.has_backward)

    def line(self, name: str) -> str:
        i = self.instruction(name)
        return "" if i is None else self.lines.of(i)


def _timeline(
    program: _Program, compiled: jax.stages.Compiled, plan: Plan, buffers: Buffers, strings: Strings
) -> Json:
    in_use = buffers.in_use()
    peak = max(in_use)
    rows, steady = _held(program, compiled, plan, buffers, strings), [0] * len(KINDS)
    for _, kind, size, *_ in rows:
        steady[kind] += size
    changes = [[0] * (len(buffers.schedule) + 1) for _ in KINDS]
    slots = list[list[int]]()
    for slot in buffers.slots:
        name, written = _writer(program, slot)
        kind = KINDS.index(_kind(program, name, written, slot.end))
        changes[kind][slot.start] += slot.size
        changes[kind][min(slot.end + 1, len(buffers.schedule))] -= slot.size
        if slot.size >= LEAST_SHARE * peak:
            i = program.instruction(name)
            made = "" if i is None else i.op_name
            slots.append([
                strings(name), kind, slot.size, strings(slot.type), slot.start, slot.end, slot.offset,
                strings(made), strings(program.line(name)),
            ])  # fmt: skip
    series = [list(itertools.accumulate(change, initial=at))[1:] for at, change in zip(steady, changes, strict=True)]
    at = _points(in_use[: len(buffers.schedule)])
    return {
        "kinds": list(KINDS), "length": len(buffers.schedule), "peak": peak, "peak_at": in_use.index(peak),
        "reserved": buffers.reserved, "most_temp": peak - sum(x.size for x in buffers.held),
        "points": at, "series": [[one[t] for t in at] for one in series],
        "names": [strings(buffers.schedule[t]) for t in at],
        "phases": [PHASES.index(program.phases[t]) for t in at],
        "lines": [strings(program.line(buffers.schedule[t])) for t in at],
        "held": [row for row in rows if row[2] >= LEAST_SHARE * peak], "slots": slots,
    }  # fmt: skip


def _writer(program: _Program, slot: BufferSlot) -> tuple[str, int]:
    """The first instruction that computes what lies in a slot, and its position: not the zeros that a loop fills."""
    for name, at in slot.writers:
        i = program.instruction(name)
        if i is not None and "/" in i.op_name and i.opcode not in PASSED and primitive_of(i.op_name) not in ZEROS:
            return name, at
    return slot.writers[0]


def _kind(program: _Program, name: str, start: int, end: int) -> str:
    i = program.instruction(name)
    if i is not None and (i.opcode.startswith("all-gather") or scope_of(i.op_name) == "gather_weight"):
        return "gathered weights"
    first = program.phases[start]
    last = program.phases[min(end, len(program.phases) - 1)]
    pairs = {
        ("forward", "backward"): "saved for the backward pass", ("forward", "update"): "saved for the backward pass",
        ("backward", "update"): "gradients, until the update",
    }  # fmt: skip
    alone = {"forward": "forward pass", "backward": "backward pass", "update": "update"}
    return pairs.get((first, last), alone.get(first, "other"))


def _points(in_use: Sequence[int]) -> list[int]:
    """Positions to draw: all, or of each of equal parts of the schedule the one with most in use."""
    if len(in_use) <= MOST_POINTS:
        return list(range(len(in_use)))
    ends = [len(in_use) * k // MOST_POINTS for k in range(MOST_POINTS + 1)]
    return [max(range(a, b), key=in_use.__getitem__) for a, b in itertools.pairwise(ends)]


def _held(
    program: _Program, compiled: jax.stages.Compiled, plan: Plan, buffers: Buffers, strings: Strings
) -> list[list[int]]:
    """Rows of what is in use for the whole step, as those of slots."""
    given = arguments_given(compiled, tokens=program.module.tokens)
    known = record_of(compiled)
    roles = roles_of(given, plan, known)
    kinds = kinds_of(roles, recorded=known is not None and known.names(plan))
    numbers = {"params": 0, "opt_state": 1, "rest": 2}
    named = zip(given, names_of(compiled, given), kinds, strict=True)
    by_number = {x.number: (name, numbers[kind]) for x, name, kind in named if x.number is not None}
    rows = []
    for x in buffers.held:
        name, kind = by_number.get(x.parameter, ("", 3)) if x.parameter is not None else ("", 3)
        row = [strings(name), kind, x.size, strings(x.type), 0, len(buffers.schedule), -1]
        rows.append([*row, strings(""), strings("")])
    return rows


def _collectives(program: _Program, mesh: Mesh, strings: Strings) -> list[list[Any]]:
    sites, _ = read_collectives(program.module)
    mesh_shape, waits = dict(mesh.shape), overlap_on(mesh, program.module, sites)[1]
    rows = []
    for s in sites:
        home, start = s.place.pair or (s.place.computation, s.instruction)
        first = program.order.get(start.name, -1)
        rows.append([
            strings(s.name), strings(s.op), strings(s.dtype), s.bytes, s.wire_bytes * s.trips, s.trips,
            strings("+".join(axes_of(s.groups, mesh_shape)) or "?"), strings(f"{s.phase or '?'} {s.scope}".strip()),
            first, max(first, program.order.get(home.done(start).name, first)),
            _overlap(s.asynchronous, s.compute_bytes), strings(program.lines.of(s.instruction)), strings(s.stack),
            round(100 * waits[key_of(s)].hidden) if key_of(s) in waits else -1,
        ])  # fmt: skip
    return rows


def _overlap(asynchronous: bool | None, compute_bytes: int) -> int:
    """Bytes that are computed beside it; -1 for one that the program waits for, -2 where it does not say."""
    return compute_bytes if asynchronous else -2 if asynchronous is None else -1


def _leaves(plan: Plan) -> list[list[Any]]:
    rows = []
    for x in plan.layouts:
        specs = [str(x.stored), str(x.used), *([str(x.grad), str(x.state)] if x.frozen is None else ["frozen"] * 2)]
        held = x.nbytes // shard_factor(x.stored, plan.mesh)
        rows.append([x.name, typed_shape(x), *specs, held, x.reason])
    return rows
