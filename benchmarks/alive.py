"""What is alive at the peak of a compiled program: the largest temporaries, from its schedule.

    python benchmarks/peak.py --stages 3 --layers scan --kernels 2d --depth 12 --save /tmp/programs
    python benchmarks/alive.py /tmp/programs/*.hlo

The text of a program gives the order of its instructions but not where XLA put their results, so this is an estimate:
a result is alive from the instruction that makes it to its last reader, through views, tuples and loops; an output
lies in a donated buffer, and so does a temporary of the same size while that buffer is free. `temp` of `peak.py` is
the compiler's own figure, which is lower by up to a quarter where XLA computes in place.
"""

from __future__ import annotations

import argparse
import collections
import re
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

from jzero.proof.hlo import Computation, Instruction, Module, parse

VIEWS = ("get-tuple-element", "bitcast", "tuple", "optimization-barrier", "while")
NOTHING = (*VIEWS, "parameter", "constant", "partition-id", "replica-id")


def passes_on(module: Module, user: Instruction, value: str) -> bool:
    """The user's result lies where the value does: a view, the end of a pair, an update in place."""
    if user.opcode in VIEWS or user.opcode.endswith("-done"):
        return True
    if user.opcode == "dynamic-update-slice":
        return user.operands[0] == value
    return user.opcode == "fusion" and in_place(module, user) == value


def in_place(module: Module, fusion: Instruction) -> str | None:
    """The operand that a fusion updates a slice of, if that is what it does."""
    inner = module.computations[fusion.callees()[0]]
    root = next(i for i in inner.schedule if i.is_root)
    while root.opcode == "bitcast":
        root = inner.instructions[root.operands[0]]
    if root.opcode != "dynamic-update-slice":
        return None
    target = inner.instructions[root.operands[0]]
    while target.opcode in ("bitcast", "convert", "copy") and target.operands:
        target = inner.instructions[target.operands[0]]
    params = [i for i in inner.schedule if i.opcode == "parameter"]
    numbers = {p.name: int(m[1]) for p in params if (m := re.search(r"param_(\d+)", p.name))}
    found = numbers.get(target.name)
    return None if found is None or found >= len(fusion.operands) else fusion.operands[found]


def made_bytes(module: Module, i: Instruction) -> int:
    """Bytes of a new buffer that an instruction needs on one device."""
    if i.opcode in NOTHING or i.opcode.endswith("-done") or i.opcode == "dynamic-update-slice":
        return 0
    if i.opcode == "fusion" and in_place(module, i) is not None:
        return 0
    if i.opcode.endswith("-start") and len(i.shapes) > 1:  # (inputs, outputs)
        return sum(s.nbytes for s in i.shapes[len(i.shapes) // 2 :])
    return i.nbytes


def last_reader(module: Module, home: Computation, value: Instruction) -> int | None:
    """Position of the last instruction that reads a value; None for one that is a result of the computation."""
    last, pending, seen = home.order[value.name], [value], {value.name}
    while pending:
        name = pending.pop().name
        for user in home.users.get(name, ()):
            last = max(last, home.order[user.name])
            if passes_on(module, user, name):
                if user.is_root:
                    return None
                if user.name not in seen:
                    seen.add(user.name)
                    pending.append(user)
    return last


def donated(text: str) -> frozenset[int]:
    """Numbers of the parameters whose buffers a program may write."""
    return frozenset(map(int, re.findall(r"\((\d+), {}, (?:may|must)-alias\)", text.split("\n", 1)[0])))


def peak(module: Module, name: str, given: frozenset[int]) -> tuple[int, list[tuple[Instruction, int]]]:
    """Bytes of temporaries at the worst moment of a computation, and which these are."""
    home = module.computations[name]
    stays = []
    slots: dict[int, list[int]] = collections.defaultdict(list)  # by size: from when a donated buffer is free
    for number in given:
        last = last_reader(module, home, param := home.parameters[number])
        slots[param.nbytes].append(len(home.schedule) if last is None else last)
    for i in home.schedule:
        size, last, now = made_bytes(module, i), last_reader(module, home, i), home.order[i.name]
        if not size:
            continue
        free = [k for k, since in enumerate(slots[size]) if since <= now]
        if free:
            slots[size][free[0]] = len(home.schedule) if last is None else last + 1
        elif last is not None:
            stays.append((now, last, size, i))
    change = [0] * (len(home.schedule) + 1)
    for first, last, size, _ in stays:
        change[first] += size
        change[last + 1] -= size
    best, level, where = (0, []), 0, 0
    for at, i in enumerate(home.schedule):
        level += change[at]
        calls = i.callees() if i.opcode in ("while", "conditional", "call") else ()
        inner = max((peak(module, c, frozenset()) for c in calls), key=lambda p: p[0], default=(0, []))
        if level + inner[0] > best[0]:
            best, where = (level + inner[0], inner[1]), at
    return best[0], best[1] + [(i, size) for first, last, size, i in stays if first <= where <= last]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("programs", nargs="+", type=Path, help="text of compiled programs")
    parser.add_argument("--rows", type=int, default=12)
    args = parser.parse_args()
    for path in args.programs:
        module = parse(text := path.read_text())
        total, alive = peak(module, module.entry, donated(text))
        rows: dict[tuple[str, str, str], list[int]] = collections.defaultdict(list)
        for i, size in alive:
            shape = max(i.shapes, key=lambda s: s.nbytes)
            shape = f"{shape.dtype}{list(shape.dims)}" + " and more" * (shape.nbytes < size)
            rows[i.opcode, shape, "/".join(i.op_name.split("/")[-4:])].append(size)
        print(f"{path.stem}: {total / 1e9:.2f} GB alive at the peak")
        for (opcode, shape, op), sizes in sorted(rows.items(), key=lambda r: -sum(r[1]))[: args.rows]:
            print(f"  {sum(sizes) / 1e6:8.0f} MB  {len(sizes)} x {opcode} {shape[:60]}  {op[:90]}")


if __name__ == "__main__":
    main()
