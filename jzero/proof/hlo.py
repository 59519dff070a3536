"""The text of a compiled program (optimized HLO, GPU or CPU) as computations and instructions.

Only what is asked for is parsed: the text is cut into computations by line, and a computation's instructions
are read when first wanted. Most of a program is the inside of fusions, which nobody asks about, so a 10 MB
text is read in half a second. `jzero.proof.collectives` interprets what is found here.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Collection, Iterator

BARRIERS = frozenset(("optimization-barrier", "opt-barrier"))
SAME = BARRIERS | {"get-tuple-element", "bitcast", "tuple", "add-dependency"}
"""Opcodes whose result is an operand, or an element of one."""
_BITS = {"pred": 8, "token": 0, "opaque": 0}
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLEES = re.compile(
    r"\b(body|condition|calls|to_apply|(?:branch|called)_computations|(?:true|false)_computation)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_INDEX = re.compile(r"\bindex=(\d+)")
_OP_NAME = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')
_PARTITIONS = re.compile(r"\bnum_partitions=(\d+)")
_ALIASES = re.compile(r"input_output_alias=\{(.*?)\}, (?:entry|num_|allow|frontend|replica|buffer)")
_ALIASED = re.compile(r": \((\d+), ")
_PARENTHESIS = re.compile(r"[()]")
_HOST_SPACE = "S(5)"
NAMES_DEVICES = ("replica_groups=", "source_target_pairs=", "channel_id=")
"""One of these is in the line of every instruction that communicates."""
TOKEN = "token"  # the dtype of what orders effects


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """One array in the type of an instruction.

    Attributes:
      dtype: HLO name, such as `bf16`.
      dims: its sizes, on one device.
      on_host: True where the layout names host memory.
      layout: its dims from the one that lies closest in memory to the outermost, as text: `2,1,0`.
    """

    dtype: str
    dims: tuple[int, ...]
    on_host: bool = False
    layout: str = dataclasses.field(default="", compare=False)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int:
        """Bytes on one device; dtypes below a byte are packed."""
        return -(-self.size * dtype_bits(self.dtype) // 8)

    @property
    def has_unknown_dtype(self) -> bool:
        """True where the bytes of an element are not known, and `nbytes` is 0."""
        return self.dtype not in _BITS and not dtype_bits(self.dtype)

    @property
    def strides(self) -> tuple[int, ...]:
        """Elements between neighbours along each dim."""
        order = [int(d) for d in self.layout.split(",") if d] or list(reversed(range(len(self.dims))))
        return tuple(math.prod(self.dims[d] for d in order[: order.index(k)]) for k in range(len(self.dims)))


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: without `%`.
      opcode: such as `all-gather-start`.
      shapes: arrays of the result, tuples flattened.
      operands: names of the operands.
      attrs: what follows the operands, as text.
      is_root: True for the computation's result.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    attrs: str
    is_root: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the result on one device."""
        return sum(s.nbytes for s in self.shapes)

    @property
    def op_name(self) -> str:
        """The jax name stack it comes from, empty when the compiler made it without one."""
        found = _OP_NAME.search(self.attrs)
        return found[1] if found else ""

    @property
    def trips(self) -> int | None:
        """How often a `while` runs, None when the compiler does not know."""
        found = _TRIPS.search(self.attrs)
        return int(found[1]) if found else None

    @property
    def number(self) -> int:
        """Which parameter of its computation a `parameter` is."""
        return int(self.attrs.partition(")")[0])

    @property
    def index(self) -> int | None:
        """Which element of a tuple a `get-tuple-element` takes, None for any other."""
        found = _INDEX.search(self.attrs) if self.opcode == "get-tuple-element" else None
        return int(found[1]) if found else None

    def callees(self, *roles: str) -> tuple[str, ...]:
        """Names of the computations it calls, in the given roles (`body`, `calls`, ...) or in any."""
        found = (m for m in _CALLEES.finditer(self.attrs) if not roles or m[1] in roles)
        return tuple(name for m in found for name in re.findall(r"[\w.\-]+", m[2]))


@dataclasses.dataclass(eq=False)
class Computation:
    """A computation; `lines` is its text, `instructions` reads it on first use."""

    name: str
    lines: list[str] = dataclasses.field(default_factory=list)
    communicates: bool = False

    @functools.cached_property
    def instructions(self) -> dict[str, Instruction]:
        """Its instructions by name, in schedule order where the program is scheduled."""
        parsed = (parse_instruction(line) for line in self.lines)
        return {i.name: i for i in parsed if i is not None}

    @functools.cached_property
    def schedule(self) -> list[Instruction]:
        """Its instructions in the order of the text."""
        return list(self.instructions.values())

    @functools.cached_property
    def order(self) -> dict[str, int]:
        """Position of each instruction in `schedule`."""
        return {i.name: k for k, i in enumerate(self.schedule)}

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The instructions that read each instruction."""
        table: dict[str, list[Instruction]] = {}
        for instruction in self.instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                table.setdefault(operand, []).append(instruction)
        return table

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        """Its parameters by number."""
        return {i.number: i for i in self.instructions.values() if i.opcode == "parameter"}

    @functools.cached_property
    def root(self) -> Instruction:
        """The instruction whose result is that of the computation."""
        return next(i for i in reversed(self.schedule) if i.is_root)

    @property
    def outputs(self) -> list[Instruction]:
        """What it returns: the elements of a tuple."""
        return [self.instructions[o] for o in self.root.operands] if self.root.opcode == "tuple" else [self.root]

    @functools.cached_property
    def unchanged(self) -> frozenset[int]:
        """Of the body of a loop: the elements of its tuple that every iteration returns unchanged."""
        if self.root.opcode != "tuple":
            return frozenset()
        return frozenset(k for k, value in enumerate(self.outputs) if _is_own(self, value, k))

    def done(self, i: Instruction) -> Instruction:
        """The instruction that ends what `i` starts; `i` itself if nothing does."""
        if not i.opcode.endswith("-start"):
            return i
        return next((u for u in self.users.get(i.name, ()) if u.opcode.endswith("-done")), i)

    def readers(self, name: str, at: int | None = None, *, through: Collection[str] = SAME) -> Iterator[Instruction]:
        """Every instruction that reads a value (of a tuple, its element `at`), directly or by way of `through`."""
        pending, seen = [(name, at)], {(name, at)}
        while pending:
            name, at = pending.pop()
            for user in self.users.get(name, ()):
                taken = user.opcode == "get-tuple-element"
                if taken and at is not None and user.index != at:
                    continue
                yield user
                if user.opcode not in through:
                    continue
                places = [None if taken else at]
                if user.opcode == "tuple":
                    places = [k for k, o in enumerate(user.operands) if o == name]
                further = {(user.name, k) for k in places} - seen
                seen |= further
                pending += further


@dataclasses.dataclass(eq=False)
class Module:
    """A compiled program.

    Attributes:
      computations: all of them, by name.
      entry: name of the one that runs.
      partitions: number of devices it was partitioned for.
      has_backward: True where some instruction comes from the transpose of a differentiated function.
      aliased: numbers of the parameters whose buffers results take.
    """

    computations: dict[str, Computation]
    entry: str
    partitions: int
    has_backward: bool
    aliased: frozenset[int] = frozenset()

    @functools.cached_property
    def loops(self) -> dict[str, tuple[Computation, Instruction]]:
        """By the name of a loop's body the computation that runs the loop, and the `while` there."""
        homes = [c for c in self.computations.values() if any(" while(" in line for line in c.lines)]
        rows = ((c, i) for c in homes for i in c.schedule if i.opcode == "while")
        return {i.callees("body")[0]: (c, i) for c, i in rows}

    @property
    def results(self) -> tuple[Shape, ...]:
        """The arrays that the program returns, on one device."""
        return tuple(x for x in self.computations[self.entry].root.shapes if x.dtype != TOKEN)

    @property
    def tokens(self) -> int:
        """How many tokens of ordered effects come before its arguments, and before its results."""
        return len(self.computations[self.entry].root.shapes) - len(self.results)

    def lines(self, word: str) -> Iterator[str]:
        """The lines of its text that contain a word."""
        return (line for home in self.computations.values() for line in home.lines if word in line)

    def body(self, i: Instruction) -> Computation | None:
        """The computation of a fusion or an asynchronous call; None for any other instruction."""
        names = i.callees("calls") if i.opcode.removesuffix("-start") in ("fusion", "async") else ()
        return next((self.computations[name] for name in names if name in self.computations), None)

    def handed_through(self, loop: Instruction) -> frozenset[int]:
        """The elements of a loop's tuple that every iteration returns unchanged."""
        return self.computations[loop.callees("body")[0]].unchanged

    def origin(
        self, home: Computation, i: Instruction, at: int | None = None, *, through: Collection[str]
    ) -> Instruction:
        """What a value, or element `at` of a tuple, is a copy of: through tuples, fusions and the opcodes `through`."""
        while True:
            if i.opcode == "fusion" and (body := self.body(i)) is not None:
                inner = self.origin(body, body.root, at, through=through)
                if inner.opcode != "parameter":
                    return i
                i, at = home.instructions[i.operands[inner.number]], None
            elif i.opcode == "get-tuple-element" and at is None:
                i, at = home.instructions[i.operands[0]], i.index
            elif i.opcode == "tuple" and at is not None:
                i, at = home.instructions[i.operands[at]], None
            elif i.operands and (i.opcode.endswith("-done") or (i.opcode in through and len(i.operands) == 1)):
                i = home.instructions[i.operands[0]]
            else:
                return i


def _is_own(body: Computation, value: Instruction, at: int) -> bool:
    """A value of a loop's body is element `at` of what the iteration was given."""
    while value.opcode in BARRIERS | {"bitcast", "copy"}:
        value = body.instructions[value.operands[0]]
    own = value.opcode == "get-tuple-element" and value.index == at
    return own and body.instructions[value.operands[0]].opcode == "parameter"


def parse(text: str) -> Module:
    """Cut the text of a compiled program into computations.

    Args:
      text: what `compiled.as_text()` returns.

    Returns:
      A `Module`, whose instructions are parsed when first read.

    Raises:
      ValueError: the text is not that of a compiled program (a lowered one is StableHLO).

    Cost:
      Less than 0.1 s for 10 MB.
    """
    if not text.startswith("HloModule"):
        raise ValueError(
            "not the text of a compiled program, which starts with HloModule: call .compile() first."
        )
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in text.splitlines():
        if line[:1] in ("%", "E") and line.endswith("{"):
            current = Computation(line.removeprefix("ENTRY ").split(" ", 1)[0].lstrip("%"))
            computations[current.name] = current
            entry = current.name if line.startswith("ENTRY") else entry
        elif line.startswith("}"):
            current = None
        elif current is not None:
            current.lines.append(line)
            current.communicates |= any(word in line for word in NAMES_DEVICES)
    head = text[: text.find("\n")]
    partitions, aliases = _PARTITIONS.search(head), _ALIASES.search(head)
    return Module(
        computations, entry, int(partitions[1]) if partitions else 1, "transpose(jvp(" in text,
        frozenset(map(int, _ALIASED.findall(aliases[1])) if aliases else ()),
    )  # fmt: skip


def parse_instruction(line: str) -> Instruction | None:
    """One instruction from its line, None for a line that holds none."""
    head, equals, rest = line.partition(" = ")
    if not equals:
        return None
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    opcode, _, tail = rest[end:].lstrip().partition("(")
    if opcode in ("parameter", "constant"):
        operands, attrs = "", tail
    else:
        close = _closing(tail, -1)
        operands, attrs = tail[:close], tail[close + 1 :]
    names = tuple(_NAME.findall(operands))
    *root, name = head.split()
    return Instruction(name.lstrip("%"), opcode, tuple(_shapes(rest[:end])), names, attrs, bool(root))


def dtype_bits(dtype: str) -> int:
    """Bits of one element: `bf16` 16, `f8e4m3fn` 8, `s4` 4, `pred` 8; 0 for an unknown dtype."""
    if dtype in _BITS:
        return _BITS[dtype]
    digits = re.match(r"[a-z]+(\d+)", dtype)
    return int(digits[1]) if digits else 0


def _shapes(text: str) -> Iterator[Shape]:
    """The arrays in a type, tuples flattened; `<=8` (a bound of a dynamic size) counts as 8."""
    for dtype, dims, layout in _SHAPE.findall(text):
        sizes = tuple(int(d.lstrip("<=")) for d in dims.split(",") if d)
        yield Shape(dtype, sizes, _HOST_SPACE in layout, layout.partition(":")[0])


def _closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one at `start` (-1: one that stood before the text)."""
    depth = 0 if start >= 0 else 1
    for match in _PARENTHESIS.finditer(text, max(start, 0)):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    return len(text)
