"""What the rules of `check` look at: the leaves of a step beside the plan, and the collectives that carry weights."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from jzero.comm.uses import Use, Uses
from jzero.comm.weights import WeightGather
from jzero.core.jaxprs import of_any_leaves
from jzero.core.nnx_modules import whole_objects
from jzero.core.traces import trace_of
from jzero.core.types import PyTree
from jzero.layout.leaf_rule import Layout
from jzero.layout.specs import entry_axes, shard_factor
from jzero.proof.arguments import GivenArgument, arguments_given
from jzero.proof.collectives import Site
from jzero.proof.groups import axes_of
from jzero.proof.hlo import Computation, Instruction, Module
from jzero.proof.leaves import Argument, arguments_of, roles_of
from jzero.proof.lifetimes import most_on_device
from jzero.proof.offsets import WrongSlice, wrong_slices
from jzero.proof.places import executions, loops_of, phase_of
from jzero.proof.record import TraceRecord, record_of
from jzero.proof.transfers import GRADIENT, WEIGHT, Transfer, find_transfers
from jzero.proof.unread import read
from jzero.proof.unrolled import step_of, updates_in
from jzero.proof.uses import uses_again
from jzero.sharding import Plan

THROUGH = frozenset(("get-tuple-element", "bitcast", "copy", "convert", "transpose", "reshape", "tuple"))
DECODES = THROUGH | {"parameter", "constant", "broadcast", "multiply", "add", "subtract"}
REDUCES = ("reduce-scatter", "all-reduce")


@dataclasses.dataclass(frozen=True)
class Evidence:
    """A compiled step next to its plan."""

    compiled: jax.stages.Compiled
    plan: Plan
    module: Module
    uses: Mapping[str, Sequence[Use]] | None = None  # of the params, where they are known
    uses_unknown: str = ""  # why they are not

    @functools.cached_property
    def record(self) -> TraceRecord | None:
        """What the trace of the program says; None if jzero did not trace it."""
        return record_of(self.compiled)

    @property
    def trace_failed(self) -> bool:
        """True where jzero has traced the program, and its step could not be traced again."""
        return self.uses is None and self.record is not None

    @functools.cached_property
    def given(self) -> list[GivenArgument]:
        """The arguments as jax describes them."""
        return arguments_given(self.compiled, tokens=self.module.tokens)

    @functools.cached_property
    def leaves(self) -> list[Argument]:
        """The arguments, each with its param and the result that takes its place."""
        roles = roles_of(self.given, self.plan, self.record)
        return arguments_of(self.compiled, self.given, self.plan, self.module, roles)

    @functools.cached_property
    def others(self) -> int:
        """Elements of the params of other models in the same step."""
        return sum(x.size for x in self.leaves if x.is_others_param)

    @functools.cached_property
    def beside(self) -> list[tuple[Plan, Uses]]:
        """The other models that the step trains, each with the uses of its params; empty where not all are known."""
        trace = trace_of(self.compiled)
        if not self.others or trace is None or self.record is None:
            return []
        plans = [u.plan for u in {u.params: u for u in self.record.others(self.plan)}.values()]
        own, mine = self.plan.config, self.updates
        alike = all(
            p.mesh == self.plan.mesh and (p.config.axes, p.batch_axes) == (own.axes, self.plan.batch_axes)
            and sum(u.times for u in self.record.of(p)) == mine for p in plans
        )  # fmt: skip
        distinct = len({self.plan, *plans}) == 1 + len(plans)  # of two models with equal plans the trace tells one
        if not (alike and distinct and sum(x.size for p in plans for x in p.layouts) == self.others):
            return []
        try:
            return list(zip(plans, uses_again(trace, *plans), strict=True))
        except Exception:  # of the user's step, outside of its contexts: it is then said not to be compared
            return []

    @functools.cached_property
    def state(self) -> list[Argument]:
        """The arguments that a step returns: params, optimizer state, what else is carried."""
        return [x for x in self.leaves if x.returned is not None]

    @functools.cached_property
    def frozen(self) -> list[Argument]:
        """Copies of params that come in and do not come back: the weights of a reference model."""
        rest = (x for x in self.leaves if x.returned is None and not (x.is_param or x.in_opt_state))
        return [x for x in rest if x.layout is not None and x.held]

    @property
    def makes_state(self) -> bool:
        """True for a run that shards its state itself: it has updates of the params, and no argument is one of them."""
        makes = self.record is not None and self.record.makes(self.plan)
        return makes and not any(x.is_param or x.in_opt_state for x in self.leaves)

    @functools.cached_property
    def batch(self) -> list[Argument]:
        """Arrays that come in, do not come back, and are not copies of params."""
        rest = (x for x in self.leaves if x.returned is None and x.layout is None)
        return [x for x in rest if x.shape and x.held and not x.is_key]

    @functools.cached_property
    def split(self) -> list[Layout]:
        """The params that ZeRO splits along one dim (at stage 0: all), vectors left out: they hardly count."""
        every = not self.plan.config.row.state
        split = (x for x in self.plan.layouts if x.along_one_dim and not x.vector)
        return [x for x in split if every or not x.reason]

    @functools.cached_property
    def split_stacks(self) -> dict[str, list[Site]]:
        """Stacks that their own layout splits along the scanned dim, by name, and what gathers each whole."""
        found: dict[str, list[Site]] = collections.defaultdict(list)
        for x in self.plan.layouts:
            split = x.scan_dim is not None and x.scan_dim < len(x.stored)
            axes = entry_axes(x.stored[x.scan_dim]) if split else ()
            held = self.plan.sharding(x.stored).shard_shape(x.shape) if axes else ()
            for s, over in self.sites if axes else ():
                gathers = s.op == "all-gather" and s.phase != "update" and set(axes) <= set(over)
                if gathers and sorted(held) in map(sorted, s.dims):
                    found[x.name].append(s)
        return dict(found)

    def local(self, x: Layout, *, sliced: bool = False) -> int:
        """Elements of a param as the model uses it, on one device; with `sliced`, of one layer of a stack."""
        return x.size // shard_factor(x.used, self.plan.mesh) // (x.layers if sliced else 1)

    @functools.cached_property
    def weight_sizes(self) -> frozenset[int]:
        """Elements of every split param, and of one layer of every stack."""
        return frozenset(self.local(x, sliced=s) for x in self.split for s in (False, True))

    def is_weight(self, dims: tuple[int, ...]) -> bool:
        """True for an array as large as a split param and of its dims; an activation may be as large."""
        big = sorted(d for d in dims if d > 1)
        return math.prod(dims) in self.weight_sizes and (len(big) <= 2 or tuple(big) in self._weight_dims)

    @functools.cached_property
    def _weight_dims(self) -> frozenset[tuple[int, ...]]:
        shapes = (shape for x in self.split for shape in (x.shape, x.layer_shape))
        return frozenset(tuple(sorted(d for d in shape if d > 1)) for shape in shapes)

    @functools.cached_property
    def sites(self) -> list[tuple[Site, tuple[str, ...]]]:
        """Every collective with its mesh axes."""
        mesh = dict(self.plan.mesh.shape)
        return [(s, axes_of(s.groups, mesh)) for s in self._read[0]]

    @property
    def unread(self) -> list[str]:
        """The parts of the program that cannot be read, one sentence each."""
        return self._read[1]

    @functools.cached_property
    def _read(self) -> tuple[tuple[Site, ...], list[str]]:
        return read(self.module)

    def over_zero_axes(self, *ops: str) -> Iterator[Site]:
        """Collectives of these kinds that join the devices of the ZeRO axis."""
        zero = set(self.plan.config.axes)
        return (s for s, axes in self.sites if s.op in ops and zero & set(axes))

    def gradients(self, s: Site) -> int:
        """Elements of gradients that one execution of a reduction carries (XLA joins all-reduces into one flat one)."""
        if s.phase == "forward":
            return 0
        least = min(self.weight_sizes, default=0) if s.op == "all-reduce" else math.inf
        flat = sum(d[0] for d in s.dims if len(d) == 1 and d[0] >= least)
        return flat + sum(math.prod(d) for d in s.dims if len(d) > 1 and self.is_weight(d))

    def is_optimizers(self, s: Site) -> bool:
        """True for a collective that the arithmetic of the wrapped transformation makes; constraints are jzero's.

        So are reductions of gradients, which XLA may name after the first cast behind them.
        """
        gradient = s.op in REDUCES and s.primitive == "convert_element_type"
        mine = s.phase == "update" and s.scope == "update"
        return mine and s.primitive != "sharding_constraint" and not gradient

    def trips(self, s: Site) -> float:
        """Executions within one update, on average where a program has several."""
        return s.trips / self.updates

    def loop_names(self, s: Site) -> list[str] | None:
        """The name stacks of the loops around a collective, the innermost first; None where they are not known."""
        found = [name for name in s.place.callers if name.endswith("while")]
        if len(found) != len(s.loops):  # a loop that XLA has pipelined has no name: what is in it tells
            found = loops_of(s.stack)
        return found if len(found) == len(s.loops) else None

    def loss_iterations(self, s: Site) -> int:
        """Iterations of all loops around a collective that are inside of a differentiated function; 1 if none is.

        A loop over micro-batches takes gradients in its body and is not one of them. Where the names of the loops are
        not known it is 1, and `check` says so.
        """
        names = self.loop_names(s)
        if names is None:
            return 1
        pairs = zip(names, reversed(s.loops), strict=True)
        return math.prod(trips or 1 for name, trips in pairs if "jvp(" in name)

    @functools.cached_property
    def updates(self) -> int:
        """How many updates the program runs, by its record, else as [Note: steps in a row] in `unrolled.py` says."""
        if self.record is not None:
            return max(sum(u.times for u in self.record.of(self.plan)), 1)
        step = step_of(self.module)
        if step is None:
            return 1
        return executions(step.loops) * updates_in(self.module, step.computation)

    def saved_weights(self, s: Site) -> int:
        """Bytes of gathered weights that the forward pass and the backward pass both read."""
        home = s.place.computation
        done = home.done(s.instruction)
        pieces = [u for u in home.users.get(done.name, ()) if u.opcode == "get-tuple-element"] or [done]
        weights = [p for p in pieces if p.shapes[0].size in self.weight_sizes]
        return sum(_saved_bytes(self.module, home, p) for p in weights)

    @functools.cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """What moves between host and device."""
        return find_transfers(self.module)

    @functools.cached_property
    def fetched_at_once(self) -> int:
        """Most bytes of state from or for the host that the device holds at one moment of the schedule."""
        return most_on_device(self.module, lambda t: t.scope not in (WEIGHT, GRADIENT))

    @functools.cached_property
    def weights_at_once(self) -> int:
        """The same of weights that are fetched for a use."""
        return most_on_device(self.module, lambda t: t.scope == WEIGHT)

    @functools.cached_property
    def largest_transfer(self) -> int:
        """Bytes of the largest array, or piece of one, that moves between host and device."""
        return max((t.bytes for t in self.transfers), default=0)

    @property
    def trains(self) -> bool:
        """True for a program that should return a new state, even if it does not.

        Either an update of its params was traced, or it takes an optimizer and one of these holds: it has a backward
        pass or a traced update, state is in an argument without params, or a leaf of params or state is donated.
        """
        if self.record is not None and self.record.of(self.plan):
            return True
        mine = [x for x in self.leaves if x.is_param or x.layout is not None or x.in_opt_state]
        params = {x.argument for x in mine if x.is_param}
        beside = any(x.argument not in params for x in mine)
        made = self.module.has_backward or (self.record is not None and self.record.differentiates)
        return self.takes_optimizer and (made or beside or any(x.donated for x in mine))

    @functools.cached_property
    def takes_optimizer(self) -> bool:
        """True where optimizer state comes in; or, since `optax.sgd` has none, an optimizer, or donated params.

        Beside another model only state says it: without, a step may train the other alone.
        """
        if any(x.in_opt_state or (x.layout is not None and not x.is_param) for x in self.leaves):
            return True
        donated = any(x.is_param and x.donated for x in self.leaves)
        return not self.others and (donated or bool(self.train_states))

    @functools.cached_property
    def train_states(self) -> list[Any]:
        """The objects with an optimizer and its state: those with the params of the plan, and those without params."""

        def is_state(x: PyTree) -> bool:
            return hasattr(x, "opt_state") and hasattr(x, "tx")

        def fits(x: Any) -> bool:
            with contextlib.suppress(ValueError):  # another model's
                self.plan.match(x.params, where="jzero.check")
                return True
            return False

        arguments = of_any_leaves(lambda: whole_objects(self.compiled.args_info))
        found = filter(is_state, jax.tree.leaves(arguments, is_leaf=is_state))
        return [x for x in found if not hasattr(x, "params") or fits(x)]

    @property
    def on_cpu(self) -> bool:
        """True for a program of the CPU backend."""
        return self.plan.mesh.devices.flat[0].platform == "cpu"

    @property
    def micro_batches(self) -> int:
        """How many micro-batches of the step reduce gradients, as it asks; 1 if that is not known."""
        return getattr(self.uses, "micro_batches", 1)

    @property
    def under_grad(self) -> int:
        """How many params the step reads under `jax.grad`, by its uses."""
        return sum(any(use.has_gradient for use in uses) for uses in (self.uses or {}).values())

    @functools.cached_property
    def slices(self) -> tuple[list[WrongSlice], list[str]]:
        """The slices in loops that are not where their index points, and those of which that is not known."""
        return wrong_slices(self.module)

    @functools.cached_property
    def has_gathers(self) -> bool:
        """True where gather on use was traced into the program."""
        return any(self.module.lines(WeightGather.SCOPE))


def _saved_bytes(module: Module, home: Computation, weight: Instruction) -> int:
    """Bytes of a gathered weight, or of what it is decoded to, where both passes read it; else 0."""
    both, found, everywhere = {"forward", "backward"}, 0, set()
    pending, seen = [weight], {weight.name}
    while pending:
        value, phases = pending.pop(), set()
        for user in home.users.get(value.name, ()):
            if not _passes_on(module, home, user, value):
                phases.add(phase_of(user.op_name, module.has_backward))
            elif user.name not in seen:
                seen.add(user.name)
                pending.append(user)
        found = max(found, value.shapes[0].nbytes if both <= phases else 0)
        everywhere |= phases
    return found or (weight.shapes[0].nbytes if both <= everywhere else 0)


def _passes_on(module: Module, home: Computation, user: Instruction, value: Instruction) -> bool:
    """True where an instruction gives the same weight in another layout or dtype: a cast, or a fusion that decodes."""
    if user.opcode != "fusion":
        return user.opcode in THROUGH
    size = value.shapes[0].size
    others = (home.instructions[o] for o in user.operands if o != value.name)
    alone = len(user.shapes) == 1 and user.shapes[0].size == size
    body = module.body(user)
    decodes = body is not None and all(i.opcode in DECODES for i in body.schedule)
    return alone and decodes and all(i.shapes and i.shapes[0].size < size for i in others)
