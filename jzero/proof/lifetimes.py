"""How long arrays that travel between host and device are on the device, from the schedule of a program."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Mapping

from jzero.proof.hlo import SAME, Computation, Instruction, Module
from jzero.proof.places import CALLERS
from jzero.proof.transfers import Transfer, find_transfers

COPIES = SAME | {"copy", "copy-done"}


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
        first, last, size = _stay(module, home, home.instructions[t.name], t, moves[name])
        change[first] += size
        change[last] -= size
    inner = (i.callees() if i.opcode in CALLERS else () for i in home.schedule)
    called = (max((_alive(module, c, moves, counts) for c in names), default=0) for names in inner)
    return max((n + m for n, m in zip(itertools.accumulate(change), called, strict=False)), default=0)


def _stay(
    module: Module, home: Computation, i: Instruction, t: Transfer, moves: Mapping[str, Transfer]
) -> tuple[int, int, int]:
    """From where to where in the schedule the array of a transfer is on the device, and its bytes.

    One that is fetched stays from the start of the transfer to its last reader, which may write in place; one that
    is stored, from what makes it to the end of the transfer.
    """
    done = home.done(i)
    if t.to == "device":
        readers = home.readers(done.name, through=COPIES)
        ends = (len(home.schedule) if r.is_root else home.order[home.done(r).name] for r in readers)
        return home.order[i.name], max(ends, default=home.order[done.name]), t.bytes
    value = home.instructions[i.operands[1 if "copy" not in i.opcode and len(i.operands) > 1 else 0]]
    made = module.origin(home, value, through=COPIES)
    fetched = made.name in moves and moves[made.name].to == "device"  # goes back as it came: counted as fetched
    return home.order[made.name], home.order[done.name], 0 if fetched else t.bytes
