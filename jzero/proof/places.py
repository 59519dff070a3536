"""Where an instruction stands in a program: its loops, its phase of the step, what runs beside it."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator

from jzero.comm.reduce_scatter import SCOPE
from jzero.proof.hlo import SAME, Computation, Instruction, Module

CALLERS = frozenset(("while", "call", "conditional"))
IDLE = SAME | {
    "parameter", "constant", "after-all", "partition-id", "replica-id", "iota", "async", "copy-start", "copy-done",
    "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast",
}  # fmt: skip
Work = Callable[[Computation], tuple[list[int], list[int]]]
_SCOPE = re.compile(r"\bjzero\.(\w+)")
_JOINED = re.compile(r"((?:[^:]*/)?)\((.*:.*)\)")
_DEPTH = 8


@dataclasses.dataclass(frozen=True)
class Place:
    """A computation as reached by one path of the call graph.

    Attributes:
      computation: what is reached.
      loops: trip counts of the loops on the path, outermost first; 0 where the compiler does not know one.
      callers: name stacks of the calling instructions, the nearest first.
      pair: the computation and the `async-start` whose body this is, else None.
      in_branch: a conditional is on the path, which may take another branch.
    """

    computation: Computation
    loops: tuple[int, ...] = ()
    callers: tuple[str, ...] = ()
    pair: tuple[Computation, Instruction] | None = None
    in_branch: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Move:
    """Bytes that move at one place of the program: between devices, or between a device and its host.

    Attributes:
      computation: where it stands.
      bytes: of one execution, on one device.
      loops: trip counts of the loops around it, outermost first; 0 where the compiler does not know one.
      asynchronous: True where the program goes on between start and done; None where it does not say.
      phase: `forward`, `backward`, `update` or empty.
      scope: its `jzero.` named scope, such as `update`, or empty.
      compute_ops, compute_bytes: instructions between start and done that compute more than a scalar, and the bytes of
        their outputs.
    """

    computation: str
    bytes: int
    loops: tuple[int, ...]
    asynchronous: bool | None
    phase: str
    scope: str
    compute_ops: int
    compute_bytes: int

    @property
    def trips(self) -> int:
        """Executions per step; an unknown loop counts once."""
        return executions(self.loops)


def executions(loops: Iterable[int]) -> int:
    """How often the body of these loops runs; a loop of unknown trip count runs it once."""
    return math.prod(n or 1 for n in loops)


def walk(module: Module) -> Iterator[Place]:
    """The entry and all it calls, depth first; of fusions and async bodies those that communicate."""
    pending = [Place(module.computations[module.entry])]
    while pending:
        place = pending.pop()
        yield place
        called = [(i, c) for i in place.computation.schedule for c in _followed(module, i)]
        pending += [_enter(place, i, module.computations[c]) for i, c in reversed(called)]


def _followed(module: Module, i: Instruction) -> list[str]:
    if i.opcode in CALLERS:
        return [c for c in i.callees() if c in module.computations]
    if "calls=" not in i.attrs and "called_computations=" not in i.attrs:
        return []
    names = i.callees("calls", "called_computations")
    return [c for c in names if c in module.computations and module.computations[c].communicates]


def _enter(place: Place, i: Instruction, callee: Computation) -> Place:
    loops = (*place.loops, i.trips or 0) if i.opcode == "while" else place.loops
    pair = (place.computation, i) if i.opcode == "async-start" else place.pair
    return Place(callee, loops, (i.op_name, *place.callers), pair, place.in_branch or i.opcode == "conditional")


def work_before(home: Computation) -> tuple[list[int], list[int]]:
    """For each position of the schedule, how many instructions before it compute, and their output bytes.

    Scalars are left out, and what reads or writes host memory, which is a copy whatever its opcode. A
    `fusion-start` (jaxlib 0.12 has slices and copies on streams of their own) counts where it stands, with the bytes
    of its `fusion-done`. Two positions differ by what runs between them.
    """
    ops, written = [0], [0]
    for i in home.schedule:
        size = output_bytes(home, i) if computes(home, i) else 0
        ops.append(ops[-1] + (size > 0 or i.opcode in CALLERS))
        written.append(written[-1] + size)
    return ops, written


def computes(home: Computation, i: Instruction) -> bool:
    """False for what only moves, waits or names values, and for what reads or writes host memory."""
    if i.opcode in IDLE or i.opcode.removesuffix("-start") in IDLE:
        return False
    return i.opcode in CALLERS or not touches_host(home, i)


def work_between(work: Work, home: Computation, start: Instruction, done: Instruction) -> tuple[int, int]:
    """What `work_before` counts from a start to its done, or to the end where the done is in the next iteration."""
    ops, written = work(home)
    first, last = home.order[start.name], home.order[done.name] if done is not start else -1
    return ops[last] - ops[first], written[last] - written[first]


def touches_host(home: Computation, i: Instruction) -> bool:
    """True where an operand or a result lies in host memory."""
    operands = (home.instructions[o] for o in i.operands if o in home.instructions)
    return any(s.on_host for x in (i, *operands) for s in x.shapes)


def output_bytes(home: Computation, i: Instruction) -> int:
    """Bytes an instruction writes; 0 for scalars, for instructions that only wait, and for loops (theirs are state)."""
    if i.opcode.endswith("-done") or i.opcode == "while":
        return 0
    if i.opcode.endswith("-start"):
        done = home.done(i)
        return done.nbytes if done is not i and any(s.size > 1 for s in done.shapes) else 0
    return i.nbytes if any(s.size > 1 for s in i.shapes) else 0


def phase_of(name_stack: str, has_backward: bool) -> str:
    """The part of a training step that a jax name stack belongs to, empty if it does not say.

    Transposed and rematerialised code is `backward`, other differentiated code `forward`; what is not
    differentiated is `update` in a program that has a backward pass, `forward` in one that has none.

    Example:
      >>> phase_of("jit(step)/transpose(jvp(mlp))/dot_general", True)
      'backward'
      >>> phase_of("jit(step)/jzero.gather_params/sharding_constraint", True)
      'update'
      >>> phase_of("jit(step)/(jzero.update/mul:jzero.update/dot_general:jvp()/reduce_sum)", True)  # jaxlib 0.12
      'update'
    """
    if "/" not in name_stack:
        return ""
    if "transpose(" in name_stack or "rematted_computation" in name_stack:
        return "backward"
    if SCOPE in name_stack and "jvp(" in name_stack:  # gradients of a tiled loss are made in the forward pass
        return "backward"
    parts = joined_names(name_stack)
    if 2 * sum("jvp(" in part for part in parts) >= len(parts):
        return "forward"
    return "update" if has_backward or scope_of(name_stack) else "forward"


def primitive_of(name_stack: str) -> str:
    """The name at the end of a name stack (of the first operation if several are joined), or empty."""
    return joined_names(name_stack)[0].rpartition("/")[2]


def joined_names(name_stack: str) -> list[str]:
    """The name stacks that jaxlib 0.12 writes for operations that it has joined: `jit(step)/(a/add:b/mul)`.

    Example:
      >>> joined_names("(jit(step)/jvp()/while:params['w'])")  # nothing in common
      ['jit(step)/jvp()/while', "params['w']"]
    """
    joined = _JOINED.fullmatch(name_stack)
    if joined is None:
        return [name_stack]
    names, depth = [""], 0
    for letter in joined[2]:
        depth += (letter == "(") - (letter == ")")
        if letter == ":" and depth == 0:
            names.append("")
        else:
            names[-1] += letter
    return [joined[1] + name for name in names]


def loops_of(name_stack: str) -> list[str]:
    """The name stacks of the loops that an operation is in, the innermost first.

    Example:
      >>> loops_of("jit(step)/while/body/transpose(jvp(mlp))/while/body/dot_general")
      ['jit(step)/while/body/transpose(jvp(mlp))/while', 'jit(step)/while']
    """
    parts = joined_names(name_stack)[0].split("/")
    return ["/".join(parts[: i + 1]) for i in reversed(range(len(parts))) if parts[i] == "while"]


def scope_of(name_stack: str) -> str:
    """The innermost `jzero.` scope in a name stack, such as `update`, or empty.

    Among joined operations the scope of a collective is preferred to that of arithmetic.
    """
    found = [scopes[-1] for name in joined_names(name_stack) if (scopes := _SCOPE.findall(name))] or [""]
    return next((scope for scope in found if scope not in ("update", "master")), found[0])


def name_stack(place: Place, i: Instruction) -> str:
    """The jax name stack of an instruction: its own, else of what feeds it, of what reads it, of its loop.

    XLA makes some collectives without metadata (on jaxlib 0.10 every fused reduce-scatter).
    """
    users = place.computation.users
    readers = list(users.get(i.name, ()))
    readers += [further for user in readers for further in users.get(user.name, ())]
    stacks = (*_fed_by(place.computation, i), *(r.op_name for r in readers), *place.callers)
    return next((stack for stack in stacks if "/" in stack), "")


def _fed_by(computation: Computation, i: Instruction) -> Iterator[str]:
    """Name stacks of an instruction and of what it is computed from, the nearest first."""
    instructions, seen, level = computation.instructions, {i.name}, [i]
    for _ in range(_DEPTH):
        yield from (found.op_name for found in level if found.opcode != "parameter")
        names = dict.fromkeys(
            o for found in level for o in found.operands if o in instructions and o not in seen
        )
        seen.update(names)
        level = [instructions[n] for n in names]
