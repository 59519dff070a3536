"""Fault of micro-batches: cut so that each lies on only some of the devices.

[Note: how a cut shows]
A batch `[B, ...]` is split over N devices along dim 0. `x.reshape(k, B // k, ...)`, or rows from `i * B // k` on, take
a micro-batch from N/k of them. XLA then moves rows of the batch itself between devices, on GPUs and on the CPU: a
collective over the batch axes, named after a slice outside of the backward pass, whose operand is made from
arguments of the batch alone. What is sent on top, activations and whole gradients, depends on the model and on XLA.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from jzero.core.errors import human_bytes
from jzero.proof.collectives import Site
from jzero.proof.evidence import Argument, Evidence
from jzero.proof.faults.wording import Faults, axes_text, names_text
from jzero.proof.hlo import Computation, Instruction
from jzero.proof.places import joined_names, phase_of, primitive_of

CUTS = frozenset(("dynamic_slice", "slice", "split", "squeeze"))
"""Primitives that take rows from a batch; `gather` and `rev` shuffle it, which may be wanted. A `reshape` that gathers
the batch counts as well (k does not divide N), but not in the loss, where labels are reshaped to be looked up, nor one
that moves rows to a layout that was asked for."""
MOST = 10_000  # instructions behind one collective


def cut_across_devices(e: Evidence) -> Faults:
    """Micro-batches that XLA puts together from the rows of several devices."""
    numbered = _split_arguments(e)
    if e.plan.batch_parts == 1 or not (numbered and e.module.has_backward):
        return
    moved: dict[Argument, float] = {}
    where = (0.0, "")
    for s, axes in e.sites:
        cut = _cut(e, s) if set(axes) & set(e.plan.batch_axes) else ""
        if cut:
            for x, share in _sources(e, s, numbered):
                sent = share * s.wire_bytes * e.trips(s)
                moved[x] = moved.get(x, 0.0) + sent
                where = max(where, (sent, cut))
    found = [x for x, sent in moved.items() if sent >= _least(x)]
    if found:
        size = round(sum(moved[x] for x in found))
        yield (
            f"micro-batches are cut across the devices of {axes_text(e.plan.batch_axes)}: {human_bytes(size)} of "
            f"{names_text(found)[:-1]} move between them at {where[1]}. Dim 0 of a batch is split over "
            f"{e.plan.batch_parts} devices in the order of the examples, so x.reshape(k, B // k, ...), or a slice of "
            "B // k rows, puts each micro-batch on a k-th of them. XLA then moves rows, and often activations and "
            f"whole gradients, or computes the same rows on several devices{_sent_in_all(e)}.",
            size,
            "batch = plan.micro_batches(batch, k), leaves [k, B // k, ...], in place of the reshape or the slices.",
        )


def _sent_in_all(e: Evidence) -> str:
    sent = sum(s.wire_bytes * e.trips(s) for s, axes in e.sites if set(axes) & set(e.plan.batch_axes))
    psi = e.plan.param_bytes * (e.plan.batch_parts - 1) / e.plan.batch_parts
    return "" if e.on_cpu else f"; this step sends {sent / psi:.1f} Psi"


def _least(x: Argument) -> float:
    """Bytes that all micro-batches together move at least: half of a device's share of the array (with two of them)."""
    return x.held / 2


def _split_arguments(e: Evidence) -> dict[int, Argument]:
    """By number of the parameter the arrays of the batch whose dim 0 is split over the batch axes."""
    return {x.number: x for x in e.batch if x.number is not None and x.local[0] < x.shape[0]}


def _cut(e: Evidence, s: Site) -> str:
    """The slice of rows, outside of the backward pass, that XLA made a collective for; empty for any other."""
    names = joined_names(s.stack)
    before = (name for name in names if phase_of(name, e.module.has_backward) != "backward")

    def cuts(name: str) -> bool:
        reshapes = s.op == "all-gather" and primitive_of(name) == "reshape" and "jvp(" not in name
        return reshapes or primitive_of(name) in CUTS

    return "" if s.scope else next(filter(cuts, before), "")


def _sources(e: Evidence, s: Site, numbered: dict[int, Argument]) -> Iterator[tuple[Argument, float]]:
    """The arguments of the batch that the operands of a collective are made from, and their shares of its bytes."""
    home, i, pair = s.place.computation, s.instruction, s.place.pair
    home, i = pair if pair is not None and _reads_parameters(home, i) else (home, i)
    values = [home.instructions[o] for o in i.operands]
    for value in values:
        arguments = _parameters(e, home, value) or set()
        if arguments and arguments <= numbered.keys():
            for n in arguments:
                yield numbered[n], value.nbytes / sum(v.nbytes for v in values) / len(arguments)


def _reads_parameters(home: Computation, i: Instruction) -> bool:
    return all(home.instructions[o].opcode == "parameter" for o in i.operands)


def _parameters(e: Evidence, home: Computation, value: Instruction) -> set[int] | None:
    """Numbers of the arguments that an array is made from, single numbers left out; None if that is not known."""
    found, seen, pending = set[int](), set[tuple[str, str]](), [(home, value)]
    while pending and len(seen) < MOST:
        where, i = pending.pop()
        if (where.name, i.name) in seen or all(math.prod(x.dims) == 1 for x in i.shapes):
            continue
        seen.add((where.name, i.name))
        if i.opcode == "parameter":
            if where.name != e.module.entry:
                return None
            found.add(i.number)
        elif i.opcode in ("while", "conditional", "call", "custom-call"):
            return None
        else:
            origin = _element(e, where, i) if i.opcode == "get-tuple-element" else None
            pending += [origin] if origin else [(where, where.instructions[o]) for o in i.operands]
    return found if not pending else None


def _element(e: Evidence, where: Computation, i: Instruction) -> tuple[Computation, Instruction] | None:
    """What a loop was given, for an element of its tuple that it does not change."""
    source, at = where.instructions[i.operands[0]], i.index
    if source.opcode != "parameter" or where.name not in e.module.loops or at is None:
        return None
    outer, loop = e.module.loops[where.name]
    given = outer.instructions[loop.operands[0]]
    same = given.opcode == "tuple" and at in e.module.handed_through(loop)
    return (outer, outer.instructions[given.operands[at]]) if same else None
