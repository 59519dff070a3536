"""How long arrays that travel between host and device are on the device, from the schedule of a program."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Mapping

from jzero.proof.collectives import find_transfers
from jzero.proof.hlo import Computation, Instruction, Module
from jzero.proof.places import CALLERS

SAME = frozenset(("get-tuple-element", "bitcast", "copy", "copy-done", "tuple", "optimization-barrier"))


def most_on_device(module: Module) -> int:
    """Most bytes of arrays from or for the host that a device holds at one moment of the schedule."""
    copies: dict[str, dict[str, str]] = collections.defaultdict(dict)
    for t in find_transfers(module):
        copies[t.computation][t.name] = t.to
    return _alive(module, module.entry, copies)


def _alive(module: Module, name: str, copies: Mapping[str, Mapping[str, str]]) -> int:
    """The same for one computation, the loops that it runs included."""
    home = module.computations[name]
    change = [0] * (len(home.schedule) + 1)
    for copy, to in copies.get(name, {}).items():
        first, last, size = _stay(home, home.instructions[copy], to)
        change[first] += size
        change[last] -= size
    inner = (i.callees() if i.opcode in CALLERS else () for i in home.schedule)
    called = (max((_alive(module, c, copies) for c in names), default=0) for names in inner)
    return max((n + m for n, m in zip(itertools.accumulate(change), called, strict=False)), default=0)


def _stay(home: Computation, copy: Instruction, to: str) -> tuple[int, int, int]:
    """From where to where in the schedule a copy's array is on the device, and its bytes.

    One that is fetched stays from the start of the copy to its last reader, which may write in place; one that
    is stored, from what makes it to the end of the copy.
    """
    done = next((u for u in home.users.get(copy.name, ()) if u.opcode == "copy-done"), copy)
    if to == "device":
        return home.order[copy.name], _last_reader(home, done), done.nbytes
    made = home.instructions[copy.operands[0]]
    while made.opcode in SAME and made.operands:
        made = home.instructions[made.operands[0]]
    fetched = made.opcode == "copy-start"  # goes back as it came: counted as fetched
    return home.order[made.name], home.order[done.name], 0 if fetched else done.nbytes


def _last_reader(home: Computation, value: Instruction) -> int:
    """Position of the last instruction that reads a value, the end of the schedule for a result."""
    last, pending, seen = home.order[value.name], [value], {value.name}
    while pending:
        for user in home.users.get(pending.pop().name, ()):
            last = max(last, len(home.schedule) if user.is_root else home.order[user.name])
            if user.opcode in SAME and user.name not in seen:
                seen.add(user.name)
                pending.append(user)
    return last
