"""Which dims of a program number independent computations (the layers of a stack), and the program for one of them.

[Note: classes of dims]
Dims of values go together if one entry of each is computed from one entry of the others: the operands and the result of
an addition, a batch dim of a matmul, the carry of a loop before and after a round. A class of dims is independent if no
equation combines, or leaves out, entries along any of its members. The program for one entry is then the same equations
on values that have size 1 along all members.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jzero.core.dims import dim_in_result
from jzero.core.graph import Graph, Node
from jzero.core.jaxprs import bind, names_of, opened
from jzero.core.primitives import CONTROL_FLOW
from jzero.core.regions import (
    Body,
    loop_consts,
    scan_with,
    switch_with,
    through_bodies,
    while_parts,
    while_with,
)
from jzero.core.types import JaxprEqn

Cells = list[int]
"""A number for each dim of one value; see `Classes`."""


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
      free: primitives whose results may be other numbers if there are fewer entries: random ones.
    """

    def __init__(
        self, graph: Graph, nodes: Sequence[Node], ins: Sequence[int], outs: Sequence[int], free: Sequence[str] = ()
    ):
        self.free = ("broadcast_in_dim", *free)
        self._leader: list[int] = []
        self._mixed: dict[int, Node | None] = {}
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

    def mixed_by(self, classes: Collection[int]) -> Node | None:
        """The first node that combines, or leaves out, entries along a dim of one of these classes."""
        return next((node for c, node in self._mixed.items() if node and self.class_of(c) in classes), None)

    def _mix(self, cells: Iterable[int], node: Node | None = None) -> None:
        for cell in cells:
            self._mixed.setdefault(cell, node)

    def _fresh(self, shape: Sequence[int]) -> Cells:
        start = len(self._leader)
        self._leader += range(start, start + len(shape))
        return list(range(start, start + len(shape)))

    def _program(self, graph: Graph, nodes, ins, outs, cells: dict[int, Cells]) -> StepList:
        def of(value: int, node: Node | None = None) -> Cells:
            if value not in cells:  # a constant
                cells[value] = self._fresh(graph.avals[value].shape)
                self._mix(cells[value], node)
            return cells[value]

        steps = []
        for node in nodes:
            found, inner = self._follow(node, [of(i, node) for i in node.ins])
            steps.append(Step(node, found, inner))
            cells.update(zip(node.outs, found, strict=True))
        for value in outs:
            of(value)
        known = {v: graph.known[v] for node in nodes for v in node.ins if v in graph.known}
        return StepList(ins, outs, known | {v: graph.known[v] for v in outs if v in graph.known}, steps)

    def _body(self, body: Body, args: Sequence[Cells]) -> tuple[StepList, list[Cells]]:
        """A body on arguments with these cells, and the cells of its results."""
        graph = Graph(*body)
        cells = {i: list(c) for i, c in zip(graph.ins, args, strict=True)}
        program = self._program(graph, graph.nodes, graph.ins, graph.outs, cells)
        return program, [cells[o] for o in graph.outs]

    def _joined(self, a: Cells, b: Cells) -> Cells:
        for x, y in zip(a, b, strict=True):
            self._leader[self.class_of(x)] = self.class_of(y)
        return a

    def _follow(self, node: Node, ins: list[Cells]) -> tuple[list[Cells], list[StepList]]:
        """The cells of a node's results, joined with those of its operands; the programs of its bodies."""
        if node.name == "optimization_barrier":
            return ins, []
        if node.name in CONTROL_FLOW:
            return self._of_bodies(node.eqn, ins)
        reached: set[int] = set()
        avals = [v.aval for v in node.eqn.outvars]
        outs = [self._fresh(aval.shape) for aval in avals]
        for at, operand in enumerate(ins):
            shape = node.eqn.invars[at].aval.shape
            for dim, cell in enumerate(operand):
                to = dim_in_result(node.eqn, at, dim)
                for aval, made in zip(avals, outs, strict=True):
                    if to is not None and to < len(made) and aval.shape[to] == shape[dim]:
                        self._joined([cell], [made[to]])
                        reached.add(made[to])
                    elif node.name != "broadcast_in_dim" or shape[dim] != 1:
                        self._mix([cell], node)
        if node.name not in self.free:  # what a broadcast adds is the same for every entry
            self._mix((c for made in outs for c in made if c not in reached), node)
        return outs, []

    def _of_bodies(self, eqn: JaxprEqn, ins: list[Cells]) -> tuple[list[Cells], list[StepList]]:
        programs: list[StepList] = []

        def run(body: Body, args: Sequence[Cells]) -> list[Cells]:
            program, outs = self._body(body, args)
            programs.append(program)
            return outs

        def sliced(stack: Cells) -> Cells:
            self._mix(stack[:1])
            return stack[1:]

        def stacked(cells: Cells) -> Cells:
            (rounds,) = self._fresh((1,))
            self._mix([rounds])
            return [rounds, *cells]

        if eqn.primitive.name == "while":
            own = while_parts(eqn)[0][1]
            run(opened(eqn.params["cond_jaxpr"]), [*ins[:own], *ins[loop_consts(eqn) :]])
        outs = through_bodies(eqn, ins, run, self._joined, sliced=sliced, stacked=stacked)
        assert outs is not None
        return outs, programs

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
