"""What a compiled step keeps from its forward for its backward pass, and what it computes again instead.

[Note: saved]
A value is saved where forward code makes it and backward code reads it. A loop over layers saves stacks: results of the
forward loop that are not what went in. Tuples, barriers and bitcasts between are not readers. Weights that were cast or
gathered in the forward pass and kept count as well: they take the same memory, and a plan that does not want them finds
them here. In the body of a loop over micro-batches each round saves its own, in the same memory: it counts once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from jzero.proof.hlo import Computation, Instruction, Module
from jzero.proof.places import Place, name_stack, output_bytes, phase_of, walk
from jzero.proof.transfers import SAME, Transfer

AGAIN = "rematted_computation"


@dataclasses.dataclass(frozen=True)
class Activations:
    """Bytes of one device, in a step.

    Attributes:
      saved: held in device memory from the forward to the backward pass.
      host: sent to pinned host memory in the forward pass and fetched in the backward pass.
      recomputed: written again in the backward pass, instead of saved; what stays inside of a kernel is not counted.
    """

    saved: int
    host: int
    recomputed: int


def find_activations(module: Module, transfers: tuple[Transfer, ...]) -> Activations | None:
    """What a program saves, and computes again; None for one without a backward pass.

    Args:
      module: a parsed program.
      transfers: what it moves between host and device.
    """
    if not module.has_backward:
        return None
    places = list(walk(module))
    moved = {
        to: sum(t.total_bytes for t in transfers if (t.to, t.phase, t.scope) == (to, phase, ""))
        for to, phase in (("host", "forward"), ("device", "backward"))
    }
    return Activations(
        saved=sum(size for p in places for size in _saved(module, p)),
        host=min(moved.values()),
        recomputed=sum(_again(p) for p in places),
    )


def _again(place: Place) -> int:
    trips = math.prod(n or 1 for n in place.loops)
    home = place.computation
    return trips * sum(output_bytes(home, i) for i in home.schedule if AGAIN in i.op_name)


def _saved(module: Module, place: Place) -> Iterator[int]:
    home = place.computation
    for i in home.schedule:
        if i.opcode in SAME or i.opcode == "parameter" or i.opcode.endswith("-start"):
            continue
        if phase_of(name_stack(place, i), module.has_backward) != "forward":
            continue
        kept = _handed_through(module, i) if i.opcode == "while" else frozenset()
        several = len(i.shapes) > 1 or i.opcode == "while"
        for k, shape in enumerate(i.shapes):
            if shape.size > 1 and not shape.on_host and k not in kept:
                at = k if several else None
                if "backward" in _read_by(module, place, i.name, at):
                    yield shape.nbytes


def _handed_through(module: Module, loop: Instruction) -> frozenset[int]:
    """The results of a loop that are what went in."""
    body = module.computations[loop.callees("body")[0]]
    root = next(i for i in body.schedule if i.is_root)
    if root.opcode != "tuple":
        return frozenset()
    return frozenset(k for k, name in enumerate(root.operands) if _is_own(body, name, k))


def _is_own(body: Computation, name: str, at: int) -> bool:
    """A value of a loop's body is element `at` of its parameter."""
    value = body.instructions[name]
    if value.opcode != "get-tuple-element" or value.index != at:
        return False
    return body.instructions[value.operands[0]].opcode == "parameter"


def _read_by(module: Module, place: Place, name: str, at: int | None) -> set[str]:
    """The phases that read a value, or element `at` of a tuple."""
    home, phases = place.computation, set()
    pending, seen = [(name, at)], {(name, at)}
    while pending:
        name, at = pending.pop()
        for user in home.users.get(name, ()):
            if user.opcode == "get-tuple-element" and at is not None and user.index != at:
                continue
            if user.opcode not in SAME:
                phases.add(phase_of(name_stack(place, user), module.has_backward))
                continue
            if user.opcode == "tuple":
                places = [k for k, o in enumerate(user.operands) if o == name]
            else:
                places = [None if user.opcode == "get-tuple-element" else at]
            further = {(user.name, k) for k in places} - seen
            seen |= further
            pending += further
    return phases
