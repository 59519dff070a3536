"""What the trace of a step says of it: which arguments an update takes, and how many updates there are.

[Note: read by record]
A path does not say what an argument is: an average has the names of the params, an NNX state has none. Where jzero has
traced the program itself, each update has left a mark in the jaxpr (`core.update_mark`), and its operands are followed
back to the arguments: through calls, loops, branches, and what changes no more than layout or dtype. Any other
program is read by paths and shapes (`leaves.py`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath

from jzero.core.jaxprs import every_equation, opened
from jzero.core.linear import LINEAR
from jzero.core.primitives import CALLS, ELEMENTWISE, LAYOUT
from jzero.core.regions import bodies, scan_parts, while_parts
from jzero.core.traces import Trace, trace_of
from jzero.core.traversal import traverse
from jzero.core.types import Jaxpr, JaxprEqn
from jzero.core.update_mark import FROZEN, UPDATE
from jzero.layout.leaf_rule import Frozen, Layout, path_keys
from jzero.layout.state_layouts import stored_copies
from jzero.proof.places import executions
from jzero.sharding import Plan

STAYS = ELEMENTWISE | {*LAYOUT, "optimization_barrier", "device_put", "reshard", "mesh_cast", UPDATE, FROZEN}
"""What changes no more of an array than its values, layout or place."""


@dataclasses.dataclass(frozen=True)
class Update:
    """One update of a traced step.

    Attributes:
      plan: of its params.
      tx: the optimizer as the user wrote it.
      params: for each param of the plan the number of the argument that it is, None where that is not known, and for
        a frozen param that the optimizer does not take.
      state: the same for each leaf of the optimizer state.
      paths: of these, in the state.
      shapes: of these.
      loops: how often each loop around it runs, outermost first; 0 for a `while` loop.
    """

    plan: Plan
    tx: optax.GradientTransformation
    params: tuple[int | None, ...]
    state: tuple[int | None, ...]
    paths: tuple[KeyPath, ...]
    shapes: tuple[tuple[int, ...], ...]
    loops: tuple[int, ...]

    @property
    def times(self) -> int:
        """How often the update runs; a `while` loop counts once."""
        return executions(self.loops)

    def repeats(self, first: Update) -> bool:
        """True for an update of the same params, or of those that an earlier update has made: no arguments."""
        pairs = zip(self.params, first.params, strict=True)
        return self.tx == first.tx and all(mine in (None, theirs) for mine, theirs in pairs)

    def copies(self, plan: Plan) -> list[Layout | None]:
        """For each leaf of the state the param that it is a copy of (a moment, a master), in this plan."""
        rows = zip(map(path_keys, self.paths), self.shapes, strict=True)
        return stored_copies(rows, plan.by_keys)


@dataclasses.dataclass(frozen=True)
class TraceRecord:
    """What is known of a program from its trace.

    Attributes:
      updates: in the order of the trace.
      has_backward: True where some equation is of a backward pass.
      arguments: how many the jaxpr has.
      frozen: frozen weights where a model reads them: their plan, and by their number in it the argument.
    """

    updates: tuple[Update, ...]
    has_backward: bool
    arguments: int
    frozen: tuple[tuple[Plan, Mapping[int, int]], ...] = ()

    @property
    def differentiates(self) -> bool:
        """True where the trace has a backward pass or an update, which XLA may have dropped."""
        return self.has_backward or bool(self.updates)

    def frozen_of(self, plan: Plan) -> dict[int, int]:
        """The arguments that are frozen weights of a plan, by their number in it."""
        mine = [found for p, found in self.frozen if p == plan]
        mine = mine or [found for p, found in self.frozen if _alike(p, plan)]
        return {at: i for found in mine for at, i in found.items()}

    def of(self, plan: Plan) -> list[Update]:
        """The updates of the params of a plan, or of the same params by another one.

        If several models have equal plans, only the updates of the first one's params.
        """
        equal = [u for u in self.updates if u.plan == plan]
        equal = equal or [u for u in self.updates if _alike(u.plan, plan)]
        return [u for u in equal if u.repeats(equal[0])]

    def names(self, plan: Plan) -> bool:
        """True where the trace says of every param that the optimizer takes which argument it is."""
        mine = self.of(plan)
        return bool(mine) and all(
            i is not None or x.frozen is Frozen.APART for i, x in zip(mine[0].params, plan.layouts, strict=True)
        )

    def makes(self, plan: Plan) -> bool:
        """True where params of a plan are updated and none of them is known to be an argument: a run in one program."""
        mine = self.of(plan)
        return bool(mine) and all(i is None for i in mine[0].params)

    def others(self, plan: Plan) -> list[Update]:
        """The updates of other params."""
        mine = self.of(plan)
        return [u for u in self.updates if u not in mine]


@functools.cache
def names_are_known() -> bool:
    """True where this jax names the two passes of a derivative as jzero reads them, in traces and programs."""
    closed = jax.make_jaxpr(jax.grad(lambda x: jnp.sin(x) * x))(1.0)
    names = [str(eqn.source_info.name_stack) for eqn in every_equation(closed.jaxpr)]
    forward = any("jvp(" in name and "transpose(" not in name for name in names)
    return forward and any("transpose(jvp(" in name for name in names)


_records: WeakKeyDictionary[Trace, TraceRecord] = WeakKeyDictionary()


def record_of(compiled: jax.stages.Compiled) -> TraceRecord | None:
    """The record of a program; None if jzero did not trace it."""
    trace = trace_of(compiled)
    if trace is not None and trace not in _records:
        _records[trace] = record(trace.jaxpr)
    return None if trace is None else _records[trace]


def record(closed: Any) -> TraceRecord:
    """The record of a closed jaxpr."""
    jaxpr, _ = opened(closed)
    found = _Found()
    _follow(jaxpr, list(range(len(jaxpr.invars))), (), found)
    backward = any(_is_backward(eqn) for eqn in every_equation(jaxpr))
    return TraceRecord(tuple(found.updates), backward, len(jaxpr.invars), tuple(found.frozen))


@dataclasses.dataclass
class _Found:
    """What marks say, in the order of the trace."""

    updates: list[Update] = dataclasses.field(default_factory=list)
    frozen: list[tuple[Plan, Mapping[int, int]]] = dataclasses.field(default_factory=list)


def _follow(jaxpr: Jaxpr, sources: Sequence[int | None], loops: tuple[int, ...], found: _Found) -> list[int | None]:
    """The argument that each result is, None for one that is made of several; marks on the way go into `found`."""
    rule, consts = functools.partial(_results, loops=loops, found=found), [None] * len(jaxpr.constvars)
    return traverse(jaxpr, consts, sources, rule, literal=lambda _: None, calls=CALLS)


def _results(eqn: JaxprEqn, values: list[int | None], loops: tuple[int, ...], found: _Found) -> list[int | None]:
    name = eqn.primitive.name
    if name == UPDATE:
        found.updates.append(_update(eqn, values, loops))
    elif name == FROZEN:
        rows = zip(eqn.params["at"], values, strict=True)
        found.frozen.append((eqn.params["plan"].plan, {at: i for at, i in rows if i is not None}))
    if name == "scan":
        body, consts, carry = scan_parts(eqn)
        slices = [None] * (len(values) - consts - carry)  # of stacks: not arguments
        inside = [*values[: consts + carry], *slices]
        outs = _follow(body, inside, (*loops, eqn.params["length"]), found)
        return [*outs[:carry], *[None] * (len(eqn.outvars) - carry)]
    if name == "while":
        (_, skipped), (body, _) = while_parts(eqn)
        return _follow(body, values[skipped:], (*loops, 0), found)
    if name == "cond":
        branches, skipped = bodies(eqn)
        outs = [_follow(body, values[skipped:], loops, found) for body, _ in branches]
        return [same[0] if len(set(same)) == 1 else None for same in zip(*outs, strict=True)]
    if name == "shard_map":
        _follow(opened(eqn.params["jaxpr"])[0], [None] * len(values), loops, found)
    elif name == LINEAR:
        # NNX hands all of a module through what is called with it, and this may be a gather and all that follows it
        avals = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in eqn.invars]
        body = jax.make_jaxpr(eqn.params["fn"])(*avals)
        return _follow(opened(body)[0], values, loops, found)
    elif name in STAYS and len(eqn.outvars) == len(values):
        return values
    elif name in STAYS and len(eqn.outvars) == 1:
        shape = eqn.outvars[0].aval.shape
        alike = {v for a, v in zip(eqn.invars, values, strict=True) if a.aval.shape == shape}
        return [alike.pop() if len(alike) == 1 else None]
    return [None] * len(eqn.outvars)


def _update(eqn: JaxprEqn, values: list[int | None], loops: tuple[int, ...]) -> Update:
    of, count = eqn.params["of"], len(values) - len(eqn.params["of"].paths)
    own = iter(values[:count])
    params = tuple(None if x.frozen is Frozen.APART else next(own) for x in of.plan.layouts)
    shapes = tuple(tuple(a.aval.shape) for a in eqn.invars[count:])
    return Update(of.plan, of.tx, params, tuple(values[count:]), of.paths, shapes, loops)


def _is_backward(eqn: JaxprEqn) -> bool:
    return "transpose(" in str(eqn.source_info.name_stack)


def _alike(a: Plan, b: Plan) -> bool:
    return [(x.name, x.shape, x.dtype) for x in a.layouts] == [(x.name, x.shape, x.dtype) for x in b.layouts]
