"""How long arrays that travel between host and device are on the device, from the schedule of a program."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Mapping

from jzero.proof.hlo import Computation, Instruction, Module
from jzero.proof.places import CALLERS
from jzero.proof.transfers import Transfer, done_of, find_transfers

SAME = frozenset(
    ("get-tuple-element", "bitcast", "copy", "copy-done", "tuple", "optimization-barrier", "opt-barrier")
)


def most_on_device(module: Module, counts: Callable[[Transfer], bool] = lambda t: True) -> int:
    """Most bytes of arrays from or for the host that a device holds at one moment of the schedule.

    Args:
      module: a parsed program.
      counts: the transfers whose arrays are meant.
    """
    moves: dict[str, dict[str, Transfer]] = collections.defaultdict(dict)
    for t in find_transfers(module):
        moves[t.computation][t.name] = t
    return _alive(module, module.entry, moves, counts)


def _alive(
    module: Module, name: str, moves: Mapping[str, Mapping[str, Transfer]], counts: Callable[[Transfer], bool]
) -> int:
    """The same for one computation, the loops that it runs included."""
    home = module.computations[name]
    change = [0] * (len(home.schedule) + 1)
    for t in filter(counts, moves.get(name, {}).values()):
        first, last, size = _stay(home, home.instructions[t.name], t, moves[name])
        change[first] += size
        change[last] -= size
    inner = (i.callees() if i.opcode in CALLERS else () for i in home.schedule)
    called = (max((_alive(module, c, moves, counts) for c in names), default=0) for names in inner)
    return max((n + m for n, m in zip(itertools.accumulate(change), called, strict=False)), default=0)


def _stay(
    home: Computation, i: Instruction, t: Transfer, moves: Mapping[str, Transfer]
) -> tuple[int, int, int]:
    """From where to where in the schedule the array of a transfer is on the device, and its bytes.

    One that is fetched stays from the start of the transfer to its last reader, which may write in place; one that
    is stored, from what makes it to the end of the transfer.
    """
    done = done_of(home, i)
    if t.to == "device":
        return home.order[i.name], _last_reader(home, done), t.bytes
    made = _maker(home, i.operands[1 if "copy" not in i.opcode and len(i.operands) > 1 else 0])
    fetched = (
        made.name in moves and moves[made.name].to == "device"
    )  # goes back as it came: counted as fetched
    return home.order[made.name], home.order[done.name], 0 if fetched else t.bytes


def _maker(home: Computation, name: str) -> Instruction:
    """What computes or fetches a value that may have gone through tuples and barriers since."""
    made, at = home.instructions[name], None
    while (made.opcode in SAME or made.opcode.endswith("-done")) and made.operands:
        if made.opcode == "get-tuple-element":
            at = made.index
        k, at = (at or 0, None) if made.opcode == "tuple" else (0, at)
        made = home.instructions[made.operands[k]]
    return made


def _last_reader(home: Computation, value: Instruction) -> int:
    """Position of the last instruction that reads a value, the end of the schedule for a result."""
    last = home.order[value.name]
    pending: list[tuple[str, int | None]] = [(value.name, None)]
    seen: set[tuple[str, int | None]] = set()
    while pending:
        name, at = pending.pop()  # the value, or the element `at` of a tuple
        for user in home.users.get(name, ()):
            if user.opcode == "get-tuple-element" and at is not None and user.index != at:
                continue
            last = max(last, len(home.schedule) if user.is_root else home.order[done_of(home, user).name])
            at_user = None if user.opcode == "get-tuple-element" else at
            places = (
                [k for k, o in enumerate(user.operands) if o == name] if user.opcode == "tuple" else [at_user]
            )
            further = {(user.name, k) for k in places if user.opcode in SAME} - seen
            seen |= further
            pending += further
    return last
