"""Which dims of a program number independent computations (the layers of a stack), and the program for one of them.

[Note: classes of dims]
Dims of values go together where one entry of each is computed from one entry of the others: the operands and the result
of an addition, a batch dim of a matmul, the carry of a loop before and after a round. A class of dims is independent
where no equation combines, or leaves out, entries along any of its members. The program for one entry is then the same
equations on values that have size 1 along all members.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jzero.core.dims import dim_in_result
from jzero.core.graph import Graph, Node
from jzero.core.jaxprs import bind, names_of, opened
from jzero.core.regions import bodies, scan_parts, scan_with, switch_with, while_parts, while_with

Cells = list[int]
"""Of one value: a number for each of its dims; see `Classes`."""


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """A node with the cells of its results, and its bodies as programs of their own."""

    node: Node
    outs: list[Cells]
    bodies: list[StepList]


@dataclasses.dataclass(frozen=True, eq=False)
class StepList:
    """Nodes in order, on the values `ins`, with constants `known`, for the values `outs`."""

    ins: Sequence[int]
    outs: Sequence[int]
    known: dict[int, Any]
    steps: list[Step]


class Classes:
    """The classes of dims of some nodes of a graph: see [Note: classes of dims].

    Attributes:
      program: the nodes.
      cells: those of each value; `class_of(cell)` names the class.
    """

    def __init__(self, graph: Graph, nodes: Sequence[Node], ins: Sequence[int], outs: Sequence[int]):
        self._leader: list[int] = []
        self._mixed: set[int] = set()
        self.cells = {i: self._fresh(graph.avals[i].shape) for i in ins}
        self.program = self._program(graph, nodes, ins, outs, self.cells)

    def class_of(self, cell: int) -> int:
        """The representative of a cell's class."""
        while self._leader[cell] != cell:
            cell = self._leader[cell]
        return cell

    def independent(self, value: int) -> dict[int, int]:
        """The dims of a value that number independent computations, with their classes."""
        mixed = {self.class_of(c) for c in self._mixed}
        found = {d: self.class_of(c) for d, c in enumerate(self.cells[value])}
        return {d: c for d, c in found.items() if c not in mixed and list(found.values()).count(c) == 1}

    def _fresh(self, shape: Sequence[int]) -> Cells:
        start = len(self._leader)
        self._leader += range(start, start + len(shape))
        return list(range(start, start + len(shape)))

    def _join(self, a: int, b: int) -> None:
        self._leader[self.class_of(a)] = self.class_of(b)

    def _mix(self, cells: Sequence[int]) -> None:
        self._mixed.update(cells)

    def _program(self, graph: Graph, nodes, ins, outs, cells: dict[int, Cells]) -> StepList:
        def of(value: int) -> Cells:
            if value not in cells:  # a constant
                cells[value] = self._fresh(graph.avals[value].shape)
                self._mix(cells[value])
            return cells[value]

        steps = []
        for node in nodes:
            made = [self._fresh(graph.avals[o].shape) for o in node.outs]
            inner = self._follow(node, [of(i) for i in node.ins], made)
            steps.append(Step(node, made, inner))
            cells.update(zip(node.outs, made, strict=True))
        for value in outs:
            of(value)
        known = {v: graph.known[v] for node in nodes for v in node.ins if v in graph.known}
        return StepList(ins, outs, known | {v: graph.known[v] for v in outs if v in graph.known}, steps)

    def _body(self, jaxpr, consts, args: Sequence[Cells], outs: Sequence[Cells | None]) -> StepList:
        """A body on arguments with these cells, its results joined with `outs`."""
        graph = Graph(jaxpr, consts)
        cells = {i: list(c) for i, c in zip(graph.ins, args, strict=True)}
        program = self._program(graph, graph.nodes, graph.ins, graph.outs, cells)
        for value, out in zip(graph.outs, outs, strict=True):
            self._join_all(cells[value], out or [])
        return program

    def _join_all(self, a: Cells, b: Cells) -> None:
        for x, y in zip(a, b, strict=False):
            self._join(x, y)

    def _follow(self, node: Node, ins: list[Cells], outs: list[Cells]) -> list[StepList]:
        """Join the cells of a node's operands and results; the programs of its bodies."""
        if node.name in ("scan", "while", "cond"):
            return getattr(self, f"_{node.name}")(node.eqn, ins, outs)
        reached: set[int] = set()
        if node.name == "optimization_barrier":
            for a, b in zip(ins, outs, strict=True):
                self._join_all(a, b)
            return []
        for at, operand in enumerate(ins):
            shape = node.eqn.invars[at].aval.shape
            for dim, cell in enumerate(operand):
                to = dim_in_result(node.eqn, at, dim)
                for aval, made in zip((v.aval for v in node.eqn.outvars), outs, strict=True):
                    if to is not None and to < len(made) and aval.shape[to] == shape[dim]:
                        self._join(cell, made[to])
                        reached.add(made[to])
                    elif node.name != "broadcast_in_dim" or shape[dim] != 1:
                        self._mix([cell])
        if node.name != "broadcast_in_dim":  # what it adds is the same for every entry
            self._mix([c for made in outs for c in made if c not in reached])
        return []

    def _scan(self, eqn, ins, outs) -> list[StepList]:
        _, consts, carry = scan_parts(eqn)
        state, stacks = ins[consts : consts + carry], ins[consts + carry :]
        for stack in (*stacks, *outs[carry:]):
            self._mix(stack[:1])
        for before, after in zip(state, outs[:carry], strict=True):
            self._join_all(before, after)
        args = [*ins[:consts], *state, *(s[1:] for s in stacks)]
        return [
            self._body(*opened(eqn.params["jaxpr"]), args, [*outs[:carry], *(o[1:] for o in outs[carry:])])
        ]

    def _while(self, eqn, ins, outs) -> list[StepList]:
        (_, a), (_, count) = while_parts(eqn)
        own, state = [ins[:a], ins[a : a + count]], ins[a + count :]
        for before, after in zip(state, outs, strict=True):
            self._join_all(before, after)
        cond, body = (opened(eqn.params[f"{name}_jaxpr"]) for name in ("cond", "body"))
        return [
            self._body(*cond, [*own[0], *state], [None]),
            self._body(*body, [*own[1], *state], outs),
        ]

    def _cond(self, eqn, ins, outs) -> list[StepList]:
        return [self._body(*branch, ins[1:], outs) for branch in bodies(eqn)[0]]

    def run(self, single: Collection[int], values: Sequence[Any]) -> list[Any]:
        """The results of the program, for operands that have size 1 along every dim of the classes `single`.

        In any context: it may run inside of a `jax.shard_map`.
        """
        return self._run(self.program, frozenset(single), values)

    def _run(self, program: StepList, single: frozenset[int], values: Sequence[Any]) -> list[Any]:
        env = {**program.known, **dict(zip(program.ins, values, strict=True))}
        for step in program.steps:
            operands = [env[i] for i in step.node.ins]
            with step.node.scope(names_of):
                env.update(zip(step.node.outs, self._apply(step, single, operands), strict=True))
        return [env[o] for o in program.outs]

    def _apply(self, step: Step, single: frozenset[int], values: list[Any]) -> list[Any]:
        """One node."""
        eqn, name = step.node.eqn, step.node.name
        runs: list[Callable[[Any], list[Any]]] = [
            lambda args, p=p: self._run(p, single, args) for p in step.bodies
        ]
        if name == "scan":
            return scan_with(eqn, runs[0], values)
        if name == "cond":
            return switch_with(eqn, [lambda *args, run=run: run(args) for run in runs], values[0], values[1:])
        if name == "while":
            cond = opened(eqn.params["cond_jaxpr"])[0]
            return list(while_with(eqn, lambda jaxpr, _, args: runs[jaxpr is not cond](args), values))
        shape = tuple(
            1 if self.class_of(c) in single else size
            for c, size in zip(step.outs[0], eqn.outvars[0].aval.shape, strict=True)
        )
        if shape == eqn.outvars[0].aval.shape:
            return bind(eqn, values, anywhere=True)
        if name in _SHAPED:
            return [_SHAPED[name](eqn, values, shape)]
        return bind(eqn, values, anywhere=True)


def _slice(eqn, values, shape):
    starts, steps = eqn.params["start_indices"], eqn.params["strides"] or (1,) * len(shape)
    sizes = zip(starts, shape, steps, strict=True)
    ends = [start + (count - 1) * step + 1 for start, count, step in sizes]
    return jax.lax.slice(values[0], starts, ends, steps)


_SHAPED: dict[str, Callable[[Any, Sequence[Any], tuple[int, ...]], Any]] = {
    "broadcast_in_dim": lambda eqn, values, shape: jax.lax.broadcast_in_dim(
        values[0], shape, eqn.params["broadcast_dimensions"]
    ),
    "reshape": lambda eqn, values, shape: jnp.reshape(values[0], shape),
    "iota": lambda eqn, values, shape: jax.lax.broadcasted_iota(
        eqn.params["dtype"], shape, eqn.params["dimension"]
    ),
    "slice": _slice,
    "dynamic_slice": lambda eqn, values, shape: jax.lax.dynamic_slice(values[0], values[1:], shape),
}
"""Equations that name the shape of their result."""
