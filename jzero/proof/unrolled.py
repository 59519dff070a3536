"""The number of whole steps in one iteration of a loop, for programs that jzero did not trace.

[Note: steps in a row]
`lax.scan(step, state, batches, unroll=k)` puts k steps into an iteration, each of which reduces every gradient.
Micro-batches do that too, and their sum has one update. So the values of an iteration are numbered: 0 before the first
update, 1 in it, 2 in the gradients that are computed from its params, 3 in the second update. Fusions are looked
into, since XLA puts the end of one step and the beginning of the next into one, under the name of either; and so are
collectives of several arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from jzero.proof.collectives import SENDS
from jzero.proof.hlo import BARRIERS, Computation, Instruction, Module
from jzero.proof.places import CALLERS, Place, phase_of, walk

UPDATE = "jzero.update"
FIXED = ("constant", "iota", "partition-id", "replica-id")
Value = int | list


def step_of(module: Module) -> Place | None:
    """Where whole steps run: the body of the outermost loop, or the entry, that has an optimizer update in it."""
    places = (p for p in walk(module) if any(UPDATE in line for line in p.computation.lines))
    return min(places, key=lambda p: len(p.loops), default=None)


def updates_in(module: Module, home: Computation) -> int:
    """The number of consecutive updates in a computation, at least 1."""
    values = _numbered(module, home, ())
    return max((max(_flat(values.values()), default=0) + 1) // 2, 1)


def _numbered(module: Module, home: Computation, given: Sequence[Value]) -> dict[str, Value]:
    """The number of every value, see [Note: steps in a row], for those of the parameters; a tuple has a list."""
    found: dict[str, Value] = {}
    fixed: set[str] = set()  # equal in every step, and shared: under the name of any of them
    for i in home.schedule:
        operands = [found[o] for o in i.operands if o in found]
        inner = module.body(i) if i.opcode == "fusion" else None
        if i.opcode == "parameter":
            found[i.name] = given[i.number] if i.number < len(given) else 0
        elif i.opcode in FIXED or (i.operands and fixed.issuperset(i.operands)):
            found[i.name] = 0
            fixed.add(i.name)
        elif i.opcode == "tuple" or (len(operands) > 1 and i.opcode.removesuffix("-start") in SENDS):
            found[i.name] = operands
        elif operands and (i.opcode.endswith("-done") or i.opcode in BARRIERS):
            found[i.name] = operands[0]
        elif i.opcode == "get-tuple-element" and operands and isinstance(operands[0], list):
            found[i.name] = operands[0][i.index or 0]
        elif inner is not None:
            found[i.name] = _numbered(module, inner, operands)[inner.root.name]
        else:
            names = [i.op_name, *_names_inside(module, i)]
            found[i.name] = _after(max(_flat(operands), default=0), names, module.has_backward)
    return found


def _names_inside(module: Module, i: Instruction) -> Iterator[str]:
    """The name stacks of what a loop or a call runs: its own does not say that it computes gradients."""
    for name in i.callees() if i.opcode in CALLERS else ():
        if name in module.computations:
            yield from (inner.op_name for inner in module.computations[name].schedule)


def _after(number: int, names: Iterable[str], has_backward: bool) -> int:
    """The number of a value that is computed, under these names, from values with this number."""
    if number % 2 == 0:
        return number + any(UPDATE in name for name in names)
    return number + any(phase_of(name, has_backward) in ("forward", "backward") for name in names)


def _flat(values: Iterable[Value]) -> Iterator[int]:
    for v in values:
        if isinstance(v, list):
            yield from _flat(v)
        else:
            yield v
