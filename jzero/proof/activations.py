"""What a compiled step keeps from its forward for its backward pass, and what it computes again instead.

[Note: saved]
A value is saved where forward code makes it and backward code reads it. A loop over layers saves stacks: results of the
forward loop that are not what went in. Tuples, barriers and bitcasts in between are not readers. Weights that were cast
or gathered in the forward pass and kept count as well: they take the same memory, and whoever does not want them finds
them here. In the body of a loop over micro-batches each iteration saves its own, in the same memory: it counts once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from jzero.proof.hlo import SAME, Instruction, Module
from jzero.proof.places import Place, executions, name_stack, output_bytes, phase_of, walk
from jzero.proof.transfers import Transfer

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
    home = place.computation
    return executions(place.loops) * sum(output_bytes(home, i) for i in home.schedule if AGAIN in i.op_name)


def _saved(module: Module, place: Place) -> Iterator[int]:
    home = place.computation

    def phase(i: Instruction) -> str:
        return phase_of(name_stack(place, i), module.has_backward)

    for i in home.schedule:
        if i.opcode in SAME or i.opcode == "parameter" or i.opcode.endswith("-start") or phase(i) != "forward":
            continue
        same = module.handed_through(i) if i.opcode == "while" else frozenset()
        several = len(i.shapes) > 1 or i.opcode == "while"
        for k, shape in enumerate(i.shapes):
            if shape.size > 1 and not shape.on_host and k not in same:
                readers = home.readers(i.name, k if several else None)
                if any(r.opcode not in SAME and phase(r) == "backward" for r in readers):
                    yield shape.nbytes
