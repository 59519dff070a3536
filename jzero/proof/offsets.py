"""Slices in loops for which XLA has noted offsets: do these agree with the index?

[Note: offsets of a slice]
XLA:GPU notes beside a slice in a loop where it lies in iteration k: `byte_offset + k byte_stride`, in
`dynamic_slice_config` (since jaxlib 0.12 in its field `linear`; the fields outside are 0). If an operand is in host
memory, XLA copies what the offsets say and ignores the index. Before jaxlib 0.11.2 it wrote the offsets of a forward
loop into backward loops as well (openxla/xla pull request 46231). So the index is computed here for the first
iterations, from the scalars that the loop carries, and compared. An index that depends on anything else is not; if the
slice is of host memory, its name is kept.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
from collections.abc import Callable, Iterator
from typing import Any

from jzero.proof.hlo import BARRIERS, Computation, Instruction, Module, Shape, dtype_bits

CONFIG = '"dynamic_slice_config":'
SLICES = {"dynamic-slice": 1, "dynamic-update-slice": 2}  # where the indices begin among the operands
ITERATIONS = 8
THROUGH = BARRIERS | {"bitcast", "copy", "reshape", "convert"}


def _quotient(a: int, b: int) -> int:
    """Toward zero; by zero -1, as XLA has it."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1) if b else -1


COMPUTES: dict[str, Callable[..., Any]] = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "negate": operator.neg,
    "divide": _quotient, "remainder": lambda a, b: a - b * _quotient(a, b),
    "minimum": min, "maximum": max, "and": operator.and_, "or": operator.or_,
    "select": lambda p, a, b: a if p else b, "clamp": lambda low, x, high: min(max(x, low), high),
}  # fmt: skip
COMPARES = {"LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge, "EQ": operator.eq,
            "NE": operator.ne}  # fmt: skip
Path = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class WrongSlice:
    """A slice in a loop that is taken from where its index does not point.

    Attributes:
      name: of the instruction.
      array: what it is a slice of.
      bytes: of the slice.
      trips: iterations of the loop, 0 where the compiler does not know.
      written, needed: byte offset in the first iteration, and bytes from one iteration to the next: as XLA wrote them
        down, and as the index says.
    """

    name: str
    array: Shape
    bytes: int
    trips: int
    written: tuple[int, int]
    needed: tuple[int, int]


@dataclasses.dataclass(eq=False)
class _Frame:
    """A computation where it is called: `given(number, path, iterations)` is the value of a parameter."""

    computation: Computation
    loops: tuple[Instruction, ...]
    given: Callable[[int, Path, Path], int | None]


def wrong_slices(module: Module) -> tuple[list[WrongSlice], list[str]]:
    """The slices in loops whose written offsets are not those of their index; see [Note: offsets of a slice].

    Args:
      module: a parsed program.

    Returns:
      These slices, and the names of those of host memory whose index cannot be computed.
    """
    if not any(module.lines(CONFIG)):
        return [], []
    reader = _Reader(module)
    entry = _Frame(module.computations[module.entry], (), lambda *_: None)
    found = [reader.wrong(frame, i) for frame, i in reader.slices(entry)]
    return list({x.name: x for x in found if x is not None}.values()), list(reader.unread)


class _Reader:
    def __init__(self, module: Module):
        self.module = module
        self.unread: dict[str, None] = {}  # names, in order
        self.value = functools.cache(self._value)

    def slices(self, frame: _Frame) -> Iterator[tuple[_Frame, Instruction]]:
        """Every slice with written offsets, in the frame that it stands in."""
        for i in frame.computation.schedule:
            if i.opcode in SLICES and frame.loops and CONFIG in i.attrs:
                yield frame, i
            for inner in self.called(frame, i):
                yield from self.slices(inner)

    def called(self, frame: _Frame, i: Instruction) -> Iterator[_Frame]:
        """The frames of what an instruction runs."""
        kind = i.opcode.removesuffix("-start")
        if kind == "while":
            (body,) = i.callees("body")
            yield self.body(frame, i, self.module.computations[body])
        elif kind in ("fusion", "call", "async"):
            names = (c for c in i.callees("calls", "to_apply") if c in self.module.computations)
            yield from (self.inside(frame, i, self.module.computations[c], 0) for c in names)
        elif kind == "conditional":
            branches = i.callees("branch_computations", "true_computation", "false_computation")
            for n, name in enumerate(branches):
                yield self.inside(frame, i, self.module.computations[name], 1 + n)

    def inside(self, frame: _Frame, i: Instruction, computation: Computation, first: int) -> _Frame:
        """What is called with the operands from `first` on."""
        def given(n: int, path: Path, iterations: Path) -> int | None:
            return self.value(frame, i.operands[first + n], path, iterations)

        return _Frame(computation, frame.loops, given)

    def body(self, frame: _Frame, loop: Instruction, computation: Computation) -> _Frame:
        """The body of a loop: its tuple is the initial one in iteration 0, then what the iteration before returns."""
        root, same, depth = computation.root, self.module.handed_through(loop), len(frame.loops)

        def given(_: int, path: Path, iterations: Path) -> int | None:
            if not path:
                return None
            if path[0] in same or not iterations[depth]:
                return self.value(frame, loop.operands[0], path, iterations)
            before = (*iterations[:depth], iterations[depth] - 1, *iterations[depth + 1 :])
            return self.value(inner, root.name, path, before)

        inner = _Frame(computation, (*frame.loops, loop), given)
        return inner

    def _value(self, frame: _Frame, name: str, path: Path, iterations: Path) -> int | None:
        """An integer of a computation, where `path` leads to in a tuple; None where it is not known."""
        i = frame.computation.instructions.get(name)
        if i is None:
            return None
        if i.opcode == "parameter":
            return frame.given(i.number, path, iterations)
        if i.opcode == "constant":
            return _constant(i)
        if i.opcode == "tuple" and path:
            return self.value(frame, i.operands[path[0]], path[1:], iterations)
        if i.opcode == "get-tuple-element":
            return self.value(frame, i.operands[0], (i.index or 0, *path), iterations)
        if i.opcode in THROUGH and len(i.operands) == 1:
            return self.value(frame, i.operands[0], path, iterations)
        if i.opcode == "fusion":
            (inner,) = self.called(frame, i)
            return self.value(inner, inner.computation.root.name, path, iterations)
        compute = COMPARES.get(i.attrs.partition("direction=")[2][:2]) if i.opcode == "compare" else None
        compute = compute or COMPUTES.get(i.opcode)
        if compute is None or path:
            return None
        operands = [self.value(frame, o, (), iterations) for o in i.operands]
        return None if None in operands else int(compute(*operands))

    def wrong(self, frame: _Frame, i: Instruction) -> WrongSlice | None:
        """A slice, where the written offsets are not those of its index."""
        config, _ = json.JSONDecoder().raw_decode(i.attrs.partition(CONFIG)[2])
        level, linear = int(config.get("loop_index", 0)), config.get("linear", config)
        home = frame.computation.instructions
        piece = i if i.opcode == "dynamic-slice" else home[i.operands[1]]
        array = home[i.operands[0]].shapes[0]
        on_host = array.on_host or piece.shapes[0].on_host
        if level >= len(frame.loops):  # of a loop that is not there
            self.unread |= dict.fromkeys([i.name] if on_host else [])
            return None
        depth = len(frame.loops) - 1 - level
        offset, stride = (int(linear.get(k, 0)) for k in ("byte_offset", "byte_stride"))
        trips = frame.loops[depth].trips
        found: list[int] = []
        for k in range(min(ITERATIONS, trips or 2)):
            iterations = tuple(k if d == depth else 0 for d in range(len(frame.loops)))
            at = self.offset(frame, i, iterations)
            if at is None:
                self.unread |= dict.fromkeys([i.name] if on_host else [])
                return None
            found.append(at)
        if all(at == offset + k * stride for k, at in enumerate(found)):
            return None
        needed = found[0], found[1] - found[0] if len(found) > 1 else 0
        return WrongSlice(i.name, array, piece.nbytes, trips or 0, (offset, stride), needed)

    def offset(self, frame: _Frame, i: Instruction, iterations: Path) -> int | None:
        """The byte at which a slice begins in these iterations of its loops, by its index."""
        home = frame.computation.instructions
        array = home[i.operands[0]].shapes[0]
        piece = (i if i.opcode == "dynamic-slice" else home[i.operands[1]]).shapes[0]
        at = 0
        for dim, index in enumerate(i.operands[SLICES[i.opcode] :]):
            room = array.dims[dim] - piece.dims[dim]
            where = self.value(frame, index, (), iterations) if room else 0
            if where is None:
                return None
            at += min(max(where, 0), room) * array.strides[dim]
        return at * dtype_bits(array.dtype) // 8


def _constant(i: Instruction) -> int | None:
    text = i.attrs.partition(")")[0]
    if text in ("true", "false"):
        return int(text == "true")
    return int(text) if text.lstrip("-").isdecimal() else None
