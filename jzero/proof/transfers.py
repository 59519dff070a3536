"""What a compiled program moves between host and device memory: every copy, and whether the program waits for it.

[Note: forms of one transfer]
Host memory is memory space 5 in a layout: `f32[8]{0:S(5)}`. A whole array moves by `copy-start` / `copy-done`, or by
a plain `copy` that the program waits for. A piece of one moves by a `dynamic-slice` of a host array, or by a
`dynamic-update-slice` of a device array into one: alone, or in a fusion of its own with `fusion-start` /
`fusion-done`, named `dynamic-slice-start` and `dynamic-update-slice-start` and asynchronous. What moves is then the
slice, not the array. A kernel may also read host memory where it stands; all that it reads crosses the bus.

[Note: what a transfer is for]
XLA drops the names of the copies it makes. So the purpose of a fetch is read from its readers, and that of a write
from what makes the value. In the forward and the backward pass, a fetched argument of the program is a weight; what the
program itself has put into host memory is a saved activation, or a gradient that waits to be added. What the backward
pass writes is a gradient.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

from jzero.comm.host import HostTransfer
from jzero.proof.hlo import SAME, Computation, Instruction, Module, Shape
from jzero.proof.places import (
    CALLERS,
    Move,
    Place,
    Work,
    name_stack,
    phase_of,
    scope_of,
    touches_host,
    walk,
    work_before,
    work_between,
)

WEIGHT = HostTransfer.FETCH.removeprefix("jzero.")
GRADIENT = HostTransfer.WRITE.removeprefix("jzero.")
BARRIER = "optimization_barrier"
ALLOCATES = 'custom_call_target="AllocateBuffer"'  # of a stack in host memory, which a loop fills
CARRIES = CALLERS | SAME | {"parameter", "async-done", "async-update"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transfer(Move):
    """A copy between host and device memory, at one place of the program; `to`: `device` or `host`."""

    name: str
    to: str

    @property
    def total_bytes(self) -> int:
        """Bytes in a step: `bytes` x `trips`."""
        return self.bytes * self.trips


def find_transfers(module: Module) -> tuple[Transfer, ...]:
    """Every copy between pinned host memory and the device, in the order of the schedule.

    Args:
      module: a parsed program.

    Returns:
      One `Transfer` for each direction of each instruction, once for each place it is called from.
    """
    work = functools.cache(work_before)  # once for each computation
    every = ((place, i) for place in walk(module) for i in place.computation.schedule)
    return tuple(transfer for place, i in every for transfer in _transfers(module, place, i, work))


def _transfers(module: Module, place: Place, i: Instruction, work: Work) -> Iterator[Transfer]:
    if i.opcode in CARRIES or i.opcode.endswith("-done") or ALLOCATES in i.attrs:
        return
    home = place.computation
    if not touches_host(home, i):
        return
    operands = [home.instructions[o] for o in i.operands if o in home.instructions]
    held = list(dict.fromkeys(o.name for o in operands if any(s.on_host for s in o.shapes)))
    paired, done = i.opcode.endswith("-start") and '"is_sync":true' not in i.attrs, home.done(i)
    if i.opcode in ("copy", "copy-start"):
        moves = _copied(done.shapes, i.shapes[1].on_host if len(i.shapes) > 1 else bool(held))
    else:
        moves = {
            "device": sum(_read(module, home, i, name) for name in held),
            "host": sum(_written(module, home, i, done.shapes)) if any(s.on_host for s in done.shapes) else 0,
        }
    ops, written = work_between(work, home, i, done) if paired and done is not i else (0, 0)
    for to, size in moves.items():
        if size:
            phase, scope = _purpose(module, place, i, to, next(iter(held), ""))
            yield Transfer(
                to=to, name=i.name, computation=home.name, bytes=size, loops=place.loops, asynchronous=paired,
                phase=phase, scope=scope, compute_ops=ops, compute_bytes=written,
            )  # fmt: skip


def _purpose(module: Module, place: Place, i: Instruction, to: str, held: str) -> tuple[str, str]:
    """Phase and scope of a transfer, by [Note: what a transfer is for]; `held`: the host array that it reads."""
    stack = "" if to == "host" else _read_as(place.computation, i)
    stack = stack or name_stack(place, i)
    phase = phase_of(stack, module.has_backward)
    if to == "host":
        return phase, GRADIENT if phase == "backward" else scope_of(stack)
    if phase in ("forward", "backward"):
        return phase, WEIGHT if held and _is_argument(module, place.computation, held) else ""
    return phase, scope_of(stack)


def _read_as(home: Computation, i: Instruction) -> str:
    """The name stack of a fetched value: its own, else that of the nearest reader with one, else empty."""
    level, seen = [i], {i.name}
    while level:
        found = next((x.op_name for x in level if "/" in x.op_name and not x.op_name.endswith(BARRIER)), "")
        if found:
            return found
        users = {u.name: u for x in level for u in home.users.get(x.name, ()) if u.name not in seen}
        seen.update(users)
        level = [u for x in level if x is i or x.opcode in SAME or x.opcode.endswith("-done")
                 for u in home.users.get(x.name, ()) if u.name in users]  # fmt: skip
    return ""


def _is_argument(module: Module, home: Computation, name: str) -> bool:
    """True for a value that is, in a loop too, an argument of the program as it came in."""
    path: list[int] = []  # into the tuple
    while True:
        value = home.instructions[name]
        if value.opcode == "get-tuple-element":
            path.append(value.index or 0)
        elif value.opcode == "tuple" and path:
            name = value.operands[path.pop()]
            continue
        elif value.opcode == "parameter":
            caller = module.loops.get(home.name)
            if caller is None:
                return home.name == module.entry
            home, value = caller
        elif value.opcode == "while":
            if not path or path[-1] not in module.handed_through(value):
                return False
        elif value.opcode not in SAME and value.opcode != "copy":
            return False
        name = value.operands[0]


def _copied(result: Sequence[Shape], from_host: bool) -> dict[str, int]:
    """A copy within one memory is not a transfer."""
    target = result[0]
    return {} if target.on_host == from_host else {"host" if target.on_host else "device": target.nbytes}


def _read(module: Module, home: Computation, i: Instruction, value: str) -> int:
    """Bytes of an array that an instruction reads: slices of it, else all."""
    whole = home.instructions[value].nbytes
    if i.opcode in ("dynamic-slice", "slice"):
        return i.nbytes if i.operands[0] == value else whole
    if i.opcode == "dynamic-update-slice":
        return 0 if i.operands[0] == value else whole
    inside = module.body(i)
    if inside is None:
        return whole
    at = [k for k, o in enumerate(i.operands) if o == value]
    parts = [_used(module, inside, inside.parameters[k].name) for k in at if k in inside.parameters]
    return min(whole, sum(parts))


def _used(module: Module, home: Computation, value: str) -> int:
    total = 0
    for user in home.users.get(value, ()):
        same = user.opcode in SAME and not user.is_root
        total += _used(module, home, user.name) if same else _read(module, home, user, value)
    return total


def _written(module: Module, home: Computation, i: Instruction, result: Sequence[Shape]) -> Iterator[int]:
    """Bytes of each host array among the results of an instruction: the slice that it puts there, else all."""
    inside = module.body(i)
    if inside is not None:
        for out, shape in zip(inside.outputs, result, strict=False):
            made = _origin(inside, out)
            if shape.on_host and made.opcode != "parameter":  # an array that is passed through
                yield from _written(module, inside, made, made.shapes if len(made.shapes) > 1 else (shape,))
    elif i.opcode == "dynamic-update-slice":
        yield home.instructions[i.operands[1]].nbytes
    else:
        yield sum(s.nbytes for s in result if s.on_host)


def _origin(home: Computation, value: Instruction) -> Instruction:
    while value.opcode in ("bitcast", "get-tuple-element") and value.operands[0] in home.instructions:
        value = home.instructions[value.operands[0]]
    return value
