"""A function as a flat list of equations, of which any part can be evaluated on its own, on other shapes too.

[Note: flat]
The class of a graph says which calls are inlined. Where a whole state is streamed, all are (optax wraps whole trees in
them), and a `cond` becomes both of its branches and a choice for each of its results: one equation that reads a whole
optimizer state would need all of it at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jzero.core import jaxprs
from jzero.core.dims import reduced_dims
from jzero.core.primitives import CALLS, LAYOUT, REDUCTIONS
from jzero.core.regions import bodies
from jzero.core.types import Aval, Jaxpr, JaxprEqn


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """One equation; its operands and results are numbers of values.

    Attributes:
      ins, outs: the numbers.
      outer: the calls that it was inlined from, the outermost first.
      choice: it computes one result of a `cond`, by `select_n`.
    """

    eqn: JaxprEqn
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    outer: tuple[JaxprEqn, ...] = ()
    choice: bool = False

    @property
    def name(self) -> str:
        """The primitive."""
        return "select_n" if self.choice else self.eqn.primitive.name

    @property
    def cuts_end(self) -> bool:
        """True for a slice that only cuts off the ends of dims."""
        if self.name != "slice":
            return False
        params = self.eqn.params
        return not any(params["start_indices"]) and all(step == 1 for step in params["strides"] or ())

    @property
    def pads_end(self) -> bool:
        """True for padding at the end of dims only."""
        return self.name == "pad" and all(
            not low and high >= 0 and not between for low, high, between in self.eqn.params["padding_config"]
        )

    @property
    def reduces_all(self) -> bool:
        """True for a reduction of all dims of one array to a number, by an operation of REDUCTIONS."""
        if self.name not in REDUCTIONS or len(self.ins) != 1:
            return False
        return len(reduced_dims(self.eqn)) == self.eqn.invars[0].aval.ndim

    @contextlib.contextmanager
    def scope(
        self, of: Callable[[JaxprEqn], contextlib.AbstractContextManager[None]] = jaxprs.scope_of
    ) -> Iterator[None]:
        """The names and contexts of the equation and of the calls around it; `of` gives those of one equation."""
        with contextlib.ExitStack() as scopes:
            for eqn in (*self.outer, self.eqn):
                scopes.enter_context(of(eqn))
            yield

    def run(self, values: Sequence[Any]) -> list[Any]:
        """The results, for these operands."""
        with self.scope():
            if self.choice:
                return [jax.lax.select_n(*values)]
            return jaxprs.bind(self.eqn, values)


class Graph:
    """A jaxpr with calls inlined: see [Note: flat].

    Attributes:
      ins, outs: the numbers of its arguments and of its results.
      known: the values of constants and literals.
      nodes: the equations in order.
      makers: the node that makes a value.
      avals: the abstract value of each number.
    """

    def __init__(self, jaxpr: Jaxpr, consts: Sequence[Any]):
        self.avals: list[Aval] = []
        self.known: dict[int, Any] = {}
        self.nodes: list[Node] = []
        self.makers: dict[int, Node] = {}
        self.ins = [self._new(v.aval) for v in jaxpr.invars]
        self.begin()
        self.outs = self._add(jaxpr, consts, self.ins, ())

    def begin(self) -> None:
        """Called once the arguments have their numbers, before the first equation."""

    def inlines(self, eqn: JaxprEqn, ins: Sequence[int]) -> bool:
        """True for a call whose body is to be inlined."""
        return True

    def added(self, node: Node) -> None:
        """Called for each new node."""

    chooses = False
    """A `cond` becomes both of its branches and a choice."""

    def _new(self, aval: Aval) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def _constant(self, value: Any, aval: Aval) -> int:
        number = self._new(aval)
        self.known[number] = value
        return number

    def _add(
        self, jaxpr: Jaxpr, consts: Sequence[Any], ins: Sequence[int], outer: tuple[JaxprEqn, ...]
    ) -> list[int]:
        """All equations of a jaxpr on these values; returns its results."""
        env = dict(zip(jaxpr.invars, ins, strict=True))
        env.update((v, self._constant(c, v.aval)) for v, c in zip(jaxpr.constvars, consts, strict=True))

        def read(atom: Any) -> int:
            return self._constant(atom.val, atom.aval) if jaxprs.is_literal(atom) else env[atom]

        for eqn in jaxpr.eqns:
            values, name = [read(a) for a in eqn.invars], eqn.primitive.name
            if name in CALLS and CALLS[name] in eqn.params and self.inlines(eqn, values):
                outs = self._add(*jaxprs.opened(eqn.params[CALLS[name]]), values, (*outer, eqn))
            elif self.chooses and name == "cond" and not eqn.effects:
                branches = [self._add(*body, values[1:], (*outer, eqn)) for body in bodies(eqn)[0]]
                outs = [self._choice(eqn, values[0], some) for some in zip(*branches, strict=True)]
            else:
                outs = [self._new(v.aval) for v in eqn.outvars]
                self._node(Node(eqn, tuple(values), tuple(outs), outer))
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(a) for a in jaxpr.outvars]

    def _choice(self, eqn: JaxprEqn, index: int, options: Sequence[int]) -> int:
        if len(set(options)) == 1:
            return options[0]
        out = self._new(self.avals[options[0]])
        self._node(Node(eqn, (index, *options), (out,), choice=True))
        return out

    def _node(self, node: Node) -> None:
        self.nodes.append(node)
        self.makers.update((out, node) for out in node.outs)
        self.added(node)

    def is_small(self, value: int) -> bool:
        """True for a single number or key, which may stay on the device for the whole step."""
        return math.prod(self.avals[value].shape) == 1

    def reads(self, sources: Sequence[int]) -> dict[int, frozenset[int]]:
        """For every value the `sources` that it is computed from, except through single numbers."""
        found: dict[int, frozenset[int]] = {s: frozenset((s,)) for s in sources}
        for node in self.nodes:
            through = frozenset().union(*(found.get(i, frozenset()) for i in node.ins))
            found.update((o, frozenset() if self.is_small(o) else through) for o in node.outs)
        return found

    def needed(self, value: int, is_known: Callable[[int], bool]) -> list[Node]:
        """The nodes that compute a value from values that are known, each after those that it reads."""
        order: list[Node] = []
        seen: set[int] = set()
        pending: list[tuple[int, bool]] = [(value, False)]
        while pending:
            at, done = pending.pop()
            if done:
                order.append(self.makers[at])
            elif at not in seen and not is_known(at) and at in self.makers:
                node = self.makers[at]
                seen.update(node.outs)
                pending.append((at, True))
                pending += [(i, False) for i in node.ins]
        return order


class FlatFunction(Graph):
    """A function of flat arrays with all calls inlined; each result has a number of its own."""

    chooses = True

    def __init__(self, fn: Callable[..., Sequence[Any]], args: Sequence[Any]):
        """Trace a function of flat arrays (or of ShapeDtypeStructs) to a flat list."""
        super().__init__(*jaxprs.trace(lambda *flat: list(fn(*flat)), *args))
        results, self.outs = self.outs, []
        for value in results:
            self.outs.append(self._copy(value) if value in self.outs else value)

    def _copy(self, value: int) -> int:
        aval = self.avals[value]
        jaxpr, _ = jaxprs.trace(lambda x: [jnp.copy(x)], jax.ShapeDtypeStruct(aval.shape, aval.dtype))
        out = self._new(aval)
        self._node(Node(jaxpr.eqns[-1], (value,), (out,)))
        return out


def on_chunk(node: Node, values: Sequence[Any], shape: tuple[int, ...]) -> list[Any]:
    """The results of an elementwise node on a chunk of its operands; scalars stay scalars."""
    if node.name in LAYOUT:
        return [values[0]]
    if node.name == "broadcast_in_dim":
        return [jnp.broadcast_to(jnp.reshape(values[0], ()), shape)]
    if any(np.ndim(v) for v in values) and node.name not in ("select_n", "clamp", "optimization_barrier"):
        values = [v if np.ndim(v) else jnp.broadcast_to(v, shape) for v in values]
    return node.run(values)
