"""What a compiled program sends: every collective with its bytes, its devices, how often it runs, and when.

[Note: bytes]
`bytes` is the tensor a collective works on: the whole one for all-gather (its result), reduce-scatter (its
input) and all-reduce; what each device holds for all-to-all and collective-permute. `wire_bytes` is what one
device sends in one execution with the ring algorithms, n devices in a group: (n-1)/n of `bytes` for
all-gather, reduce-scatter and all-to-all, twice that for all-reduce, `bytes` for collective-permute. NCCL
may choose another algorithm; the bandwidth-optimal ones send the same.

[Note: forms of one collective]
Depending on the version and on its size, XLA prints a plain `reduce-scatter` with `"is_sync":true`, a pair
`reduce-scatter-start` / `-done` (whose start may hold inputs and outputs, or outputs alone), an `async-start`
that calls a computation with the collective in it, or a tuple of several tensors that were combined into one.
The result of the `-done`, or of the plain form, is the same in all of them, so all is computed from that.
"""

from __future__ import annotations

import dataclasses
import functools
import math

from jzero.core.errors import ProofError
from jzero.proof.groups import GROUPS, PAIRS, Groups, parse_groups, parse_pairs
from jzero.proof.hlo import Instruction, Module, Shape
from jzero.proof.places import (
    Move,
    Place,
    Work,
    name_stack,
    phase_of,
    primitive_of,
    scope_of,
    walk,
    work_before,
    work_between,
)
from jzero.proof.slices import only_sliced

SENDS = {
    "all-gather": 1,
    "reduce-scatter": 1,
    "all-reduce": 2,
    "all-to-all": 1,
    "ragged-all-to-all": 1,
    "collective-permute": 1,
    "collective-broadcast": 1,
}
POINT_TO_POINT = ("collective-permute", "collective-broadcast")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Site(Move):
    """One collective at one place of the program.

    Attributes:
      name: of the instruction.
      op: its kind, such as `all-gather`, however it is printed.
      dtype: of its tensors; joined with `+` when combined tensors differ.
      tensors: number of tensors combined in it.
      wire_bytes: of one execution; for `bytes` too see the note at the top of this file.
      groups: the devices that join, as positions in the mesh; pairs for a collective-permute.
      group_size: devices in one group.
      sliced: True for an all-reduce of which each device uses its own slice alone: an unfused reduce-scatter.
      stack: the name stack that phase and scope are read from.
      place, instruction: its computation as it is reached, and its instruction.
    """

    name: str
    op: str
    dtype: str
    tensors: int
    wire_bytes: int
    groups: Groups
    group_size: int
    sliced: bool
    stack: str
    place: Place = dataclasses.field(repr=False)
    instruction: Instruction = dataclasses.field(repr=False)

    @functools.cached_property
    def dims(self) -> list[tuple[int, ...]]:
        """The dims of each tensor that one device puts in."""
        home = self.place.computation
        return [home.instructions[o].shapes[0].dims for o in self.instruction.operands]

    @functools.cached_property
    def sizes(self) -> list[int]:
        """Elements of each tensor: of the whole one for all-gather and reduce-scatter."""
        times = self.group_size if self.op == "all-gather" else 1
        return [math.prod(dims) * times for dims in self.dims]

    @property
    def primitive(self) -> str:
        """The operation that it comes from."""
        return primitive_of(self.instruction.op_name)


def read_collectives(module: Module) -> tuple[tuple[Site, ...], dict[tuple[str, str], str]]:
    """Every collective of a program, once for each place it is called from.

    Returns:
      The sites in the order of the schedule, a loop's body where the loop stands; and of collectives that cannot be
      read, by computation and name, what is wrong with them.
    """
    work = functools.cache(work_before)  # once for each computation
    sites, failed = list[Site](), dict[tuple[str, str], str]()
    for place in walk(module):
        for i in place.computation.schedule:
            if kind(i):
                try:
                    sites.append(_site(module, place, i, work))
                except ProofError as error:
                    home = place.computation.name
                    failed[home, i.name] = f"%{i.name} in %{home}: {error}"
    return tuple(sites), failed


def kind(i: Instruction) -> str:
    """The collective that an instruction starts, empty for any other (a `-done` included)."""
    base = i.opcode.removesuffix("-start")
    return base if base in SENDS else ""


def _site(module: Module, place: Place, i: Instruction, work: Work) -> Site:
    op, (home, start) = kind(i), place.pair or (place.computation, i)
    done = home.done(start)
    shapes = _result(i, done if start is i else i)
    if unknown := [s.dtype for s in shapes if s.has_unknown_dtype]:
        raise ProofError(f"unknown dtype: {', '.join(unknown)}")
    groups, size = _groups(i, module.partitions)
    total = sum(s.nbytes for s in shapes) * (size if op == "reduce-scatter" else 1)
    paired = start.opcode.endswith("-start")
    ops, written = work_between(work, home, start, done) if paired else (0, 0)
    stack = name_stack(place, i)
    return Site(
        op=op, name=i.name, computation=place.computation.name, dtype="+".join(sorted({s.dtype for s in shapes})),
        tensors=1 if op == "all-to-all" else len(i.operands), bytes=total,
        wire_bytes=_wire(op, total, groups, size), groups=groups, group_size=size, loops=place.loops,
        phase=phase_of(stack, module.has_backward), scope=scope_of(stack), stack=stack,
        asynchronous=_is_asynchronous(start) if paired else False, compute_ops=ops, compute_bytes=written,
        sliced=op == "all-reduce" and only_sliced(module, place.computation, done if start is i else i, size),
        place=place, instruction=i,
    )  # fmt: skip


def _is_asynchronous(start: Instruction) -> bool | None:
    """Whether the program goes on between a start and its done; None where the text does not say."""
    return None if '"is_sync":' not in start.attrs else '"is_sync":true' not in start.attrs


def _result(i: Instruction, done: Instruction) -> tuple[Shape, ...]:
    """The arrays a collective results in, on one device."""
    count = len(i.operands)
    if done is i and i.opcode.endswith("-start") and len(i.shapes) >= 2 * count:
        return i.shapes[count : 2 * count]  # its done is out of sight: (inputs, outputs, contexts)
    return done.shapes


def _groups(i: Instruction, devices: int) -> tuple[Groups, int]:
    pairs = PAIRS.search(i.attrs)
    if pairs:
        return parse_pairs(pairs[1]), 2
    found = GROUPS.search(i.attrs)
    if not found:
        raise ProofError(f"no replica groups in {i.attrs[:160]}")
    groups = parse_groups(found[1], devices)
    return groups, max(len(g) for g in groups)


def _wire(op: str, total: int, groups: Groups, size: int) -> int:
    if op in POINT_TO_POINT:
        return total if any(a != b for a, *rest in groups for b in rest) else 0
    return SENDS[op] * total * (size - 1) // size
