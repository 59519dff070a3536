"""Finds the all-reduce of which every device uses its own slice alone: an unfused reduce-scatter.

XLA:GPU fuses the two; the CPU backend never does. Such an all-reduce sends twice the bytes, but what stays
afterwards is the shard, so a check of a layout must not call the gradient replicated.
"""

from __future__ import annotations

from jzero.proof.hlo import Computation, Instruction, Module

ELEMENTWISE = frozenset(
    (
        "bitcast", "copy", "convert", "transpose", "reshape", "get-tuple-element", "multiply", "add",
        "subtract", "divide", "negate", "maximum", "minimum", "select", "abs", "sqrt", "rsqrt", "power",
        "reduce-precision", "clamp",
    )
)  # fmt: skip


def only_sliced(module: Module, computation: Computation, value: Instruction, parts: int) -> bool:
    """True when all uses of a value end in a dynamic-slice that takes one `parts`-th of it.

    Scalars that were combined with it (a loss) are left aside.

    Args:
      module: the program.
      computation: where the value is.
      value: the instruction whose result is followed.
      parts: number of devices that share; of one device nothing is said.
    """
    if parts < 2:
        return False
    combined = len(value.shapes) > 1
    ends: list[bool] = []
    for user in computation.users.get(value.name, ()):
        if not (combined and user.opcode == "get-tuple-element" and user.shapes[0].size == 1):
            ends += _ends(module, computation, user, value.name, parts)
    return bool(ends) and all(ends)


def _ends(module: Module, computation: Computation, i: Instruction, read: str, parts: int) -> list[bool]:
    """How the uses of `read` by `i` end: True for a slice of one part, False for anything else."""
    if i.opcode == "dynamic-slice":
        source = computation.instructions[read].shapes[0]
        return [i.operands[0] == read and i.shapes[0].size * parts == source.size]
    if i.opcode == "fusion":
        return _in_fusion(module, computation, i, read, parts)
    whole = read in computation.instructions and i.opcode in ELEMENTWISE and len(i.shapes) == 1
    if not whole or (i.is_root and not computation.users.get(i.name)):
        return [False]
    return _further(module, computation, i, parts)


def _further(module: Module, computation: Computation, i: Instruction, parts: int) -> list[bool]:
    users = computation.users.get(i.name, ())
    return [end for user in users for end in _ends(module, computation, user, i.name, parts)] or [False]


def _in_fusion(module: Module, outer: Computation, fusion: Instruction, read: str, parts: int) -> list[bool]:
    """Inside a fusion; what leaves it whole is followed outside."""
    inner = module.body(fusion)
    if inner is None:
        return [False]
    ends: list[bool] = []
    for number, operand in enumerate(fusion.operands):
        if operand == read and number in inner.parameters:
            for leaf in _leaves(inner, inner.parameters[number]):
                if leaf.opcode == "dynamic-slice":
                    ends.append(leaf.shapes[0].size * parts == inner.parameters[number].shapes[0].size)
                elif leaf.is_root and leaf.opcode in ELEMENTWISE and len(fusion.shapes) == 1:
                    ends += _further(module, outer, fusion, parts)
                else:
                    ends.append(False)
    return ends or [False]


def _leaves(inner: Computation, start: Instruction) -> list[Instruction]:
    """The instructions at which the elementwise uses of `start` end."""
    found, pending, seen = [], [start], {start.name}
    while pending:
        current = pending.pop()
        users = inner.users.get(current.name, [])
        if not users or current.is_root:
            found.append(current)
        for user in users:
            if user.opcode not in ELEMENTWISE or user.shapes[0].size != start.shapes[0].size:
                found.append(user)
            elif user.name not in seen:
                seen.add(user.name)
                pending.append(user)
    return found
