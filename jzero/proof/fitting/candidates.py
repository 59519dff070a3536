"""A step, its model and a pod; and from an option the closed forms of it, and its program."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jzero.comm.uses import Uses
from jzero.config import ZeroConfig
from jzero.core.random_keys import may_be_keys
from jzero.core.token_loss_rules import GRADIENTS
from jzero.core.traces import as_written, innermost
from jzero.core.types import PyTree
from jzero.flax.adapters import is_pair
from jzero.flax.creation import TracedState
from jzero.flax.shard import abstract_from, plan_of, traced_state
from jzero.layout.gathered import held_gathered, is_in_pieces
from jzero.layout.specs import axis_size
from jzero.proof.arguments import fill_shardings, jitted_fn
from jzero.proof.fitting.flops import flops_of
from jzero.proof.fitting.options import OFFERED, Option, options, smaller
from jzero.proof.fitting.rates import Rates
from jzero.proof.fitting.seconds import Seconds, seconds
from jzero.proof.memory import Estimate, OptimizerBytes, estimate_with, gathered_working
from jzero.proof.pod import Pod
from jzero.proof.report import memory_of
from jzero.proof.transformer import transformer_of
from jzero.proof.uses import uses_in
from jzero.sharding import Plan

WHERE = "jzero.fit"
KEPT_SHARES = (0.25, 0.5, 0.75)
"""Of the gathered weights: how many may stay, between none and all."""
NO_REMAT = {"xla_gpu_memory_limit_slop_factor": 1000}
"""XLA computes again what does not fit, for minutes and at the cost of speed. A program that fits is the same."""


@dataclasses.dataclass(frozen=True, eq=False)
class Candidate:
    """An option with its closed forms.

    Attributes:
      option: what is chosen.
      seconds: of a step.
      examples: of one device in a micro-batch.
      count: makes the estimate.
    """

    option: Option
    seconds: Seconds
    examples: int
    count: Callable[[], Estimate] = dataclasses.field(repr=False)

    @functools.cached_property
    def estimate(self) -> Estimate:
        """Bytes of one device, of its host and on the wire."""
        return self.count()


@dataclasses.dataclass(frozen=True)
class StepTrace:
    """What is read from a step.

    Attributes:
      uses: of its params.
      flops: of all devices.
      of_losses: the part of them in tiled losses.
      pair: the state is an NNX pair.
    """

    uses: Uses
    flops: float
    of_losses: float
    pair: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """What is fitted.

    Attributes:
      create: makes the state; keywords of `OFFERED` that it takes may vary.
      step: takes the state and the batch; if it takes `accumulate`, that may vary.
      batch: the arguments that follow the state, without shardings.
      pod, rates: the machine.
      model: sizes of a transformer, for its activations; None: only compiling tells of them.
      trainable: see `jzero.shard`.
    """

    create: Callable[..., PyTree]
    step: Callable[..., Any]
    batch: tuple[PyTree, ...]
    pod: Pod
    rates: Rates
    model: Mapping[str, Any] | None = None
    trainable: Any = None

    @functools.cached_property
    def offers(self) -> tuple[str, ...]:
        """The variants that the creation function has."""
        return tuple(name for name in OFFERED if name in _keywords(self.create))

    @property
    def first(self) -> tuple[tuple[str, bool], ...]:
        """The variant without any of them."""
        return tuple((name, False) for name in self.offers)

    @property
    def pair(self) -> bool:
        """The state is an NNX pair."""
        return self._traced(self.first).pair

    @functools.cached_property
    def examples(self) -> int:
        """Of one device in a step.

        Raises:
          TypeError: a leaf of the batch is not an array.
          ValueError: no array has examples, or the devices do not divide them.
        """
        leaves = jax.tree.leaves(self.batch)
        for leaf in leaves:
            if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
                raise TypeError(f"{WHERE}: the batch must hold arrays or jax.ShapeDtypeStruct leaves, not {leaf!r}.")
        sizes = {x.shape[0] for x in leaves if len(x.shape) and not may_be_keys(x)}
        devices = len(self.pod.devices)
        if not sizes or any(size % devices for size in sizes):
            raise ValueError(
                f"{WHERE}: the leading dims of the batch, {sorted(sizes)}, must be multiples of the pod's {devices} "
                "devices: the batch is the global one, with the examples of all devices in a step."
            )
        return min(sizes) // devices

    @functools.cached_property
    def accumulates(self) -> list[int]:
        """Numbers of micro-batches that can be tried: divisors of a device's examples."""
        if "accumulate" not in _keywords(self.step):
            return [1]
        return [k for k in range(1, self.examples + 1) if self.examples % k == 0]

    @functools.cached_property
    def kept(self) -> list[int]:
        """How many bytes of gathered weights may stay: of about a quarter, a half and three quarters of them."""
        plan, _ = self._plan(ZeroConfig(stage=3), (("data", len(self.pod.devices)),))
        sizes = [n for x in plan.layouts if (n := held_gathered(x, plan))]
        sums, found = list(itertools.accumulate(sorted(sizes))), set[int]()
        for share in KEPT_SHARES:
            most = max((n for n in sums if n <= share * sum(sizes)), default=0)
            found |= {_rounded_up(most)} if most else set()
        return sorted(found)

    def candidates(self, *, smallest: bool = False) -> list[Candidate]:
        """Those with the state in device memory; `smallest`: only with as many micro-batches as possible."""
        self._traced(self.first)  # what the step raises, it raises here
        accumulates = self.accumulates[-1:] if smallest else self.accumulates
        found = options(self.pod.hosts, self.pod.gpus_per_host, accumulates, self.offers, self.kept)
        return [self.candidate(option) for option in found]

    def smaller(self, candidates: Sequence[Candidate], *, lower_precision: bool) -> list[Candidate]:
        """The same with less on the device, where this model and this version of jax can have that."""
        found = list[Candidate]()
        for option in (o for c in candidates for o in smaller(c.option, lower_precision=lower_precision)):
            with contextlib.suppress(ValueError, NotImplementedError):
                c = self.candidate(option)
                _ = c.estimate  # refused by the plan, if at all
                found.append(c)
        return found

    def candidate(self, option: Option) -> Candidate:
        """The closed forms of an option."""
        trace = self._traced(option.given)
        k = max(option.accumulate, trace.uses.micro_batches)
        axes, base = tuple(option.axes.items()), option.base
        found, plan = self._estimate(base, axes, option.given, k), self._plan(base, axes)[0]
        heads = {name for name, uses in trace.uses.items() if any(use.kind == "loss" for use in uses)}
        in_pieces = any(x.name in heads and is_in_pieces(x, plan) for x in plan.layouts)
        flops = trace.flops + trace.of_losses / 3 * in_pieces  # whose logits are made twice
        remat = option.offered.get("remat", bool((self.model or {}).get("remat", True)))
        share = 1 if base.stage == 0 else 1 / axis_size(plan.mesh, base.axes)
        time = seconds(
            found, self.rates, flops=flops / len(self.pod.devices), accumulate=k, remat=remat, share=share
        )
        count = functools.partial(self._estimate, option.config, axes, option.given, k)
        return Candidate(option, time, self.examples // k, count)

    @functools.cache  # noqa: B019 - a task lives as long as one fit
    def _estimate(self, config: ZeroConfig, axes: tuple, offered: tuple, accumulate: int) -> Estimate:
        (plan, optimizer), uses = self._plan(config, axes), self._traced(offered, self._alike(accumulate)).uses
        model = self.model and {**self.model, **dict(offered), "batch": self.examples // accumulate}
        found = estimate_with(optimizer, plan, uses, transformer_of(model, where=WHERE), accumulate)
        return found if model else dataclasses.replace(found, working=gathered_working(plan))

    @functools.cache  # noqa: B019
    def _plan(self, config: ZeroConfig, axes: tuple) -> tuple[Plan, OptimizerBytes]:
        state = self.state(config, dict(axes), dict(self.first))  # all variants have the same params
        plan = plan_of(state)
        return plan, OptimizerBytes.of(plan, state[1].tx if is_pair(state) else state.tx)

    def state(self, config: ZeroConfig, axes: Mapping[str, int], offered: Mapping[str, bool]) -> PyTree:
        """The abstract state."""
        return abstract_from(self._made(tuple(offered.items())), config, mesh=self.pod.mesh(axes))

    @functools.cache  # noqa: B019
    def _made(self, offered: tuple[tuple[str, bool], ...]) -> TracedState:
        """What the creation function returns; it is traced once for all configs."""
        create = functools.partial(self.create, **dict(offered)) if offered else self.create
        return traced_state(create, self.trainable)

    @functools.cache  # noqa: B019
    def _traced(self, offered: tuple, accumulate: int = 1) -> StepTrace:
        """What the step does with its params, and the FLOPs of all devices, read from the step at stage 0.

        Of several micro-batches the step is read with the fewest, see `_alike`.
        """
        state = self.state(ZeroConfig(stage=0), {"data": len(self.pod.devices)}, dict(offered))
        args, plan = self._arguments(state), plan_of(state)
        filled, _ = fill_shardings((args, {}), plan, devices=self.pod.devices)
        with as_written():
            stage = jitted_fn(self._step(accumulate), (), (args, {}), where=WHERE).trace(*filled)
        jaxpr = innermost(stage, jax.stages.Traced).jaxpr.jaxpr
        return StepTrace(uses_in(stage, plan), flops_of(jaxpr), flops_of(jaxpr, (GRADIENTS,)), is_pair(state))

    def _alike(self, accumulate: int) -> int:
        """The smallest number of micro-batches whose step differs from that one by their number alone."""
        return min(accumulate, next((k for k in self.accumulates if k > 1), accumulate))

    def _step(self, accumulate: int) -> Callable[..., Any]:
        accumulate = accumulate if "accumulate" in _keywords(self.step) else 1
        return functools.partial(self.step, accumulate=accumulate) if accumulate > 1 else self.step

    def _arguments(self, state: PyTree) -> tuple[PyTree, ...]:
        return (*(state if is_pair(state) else (state,)), *self.batch)

    def compiled_bytes(self, option: Option) -> int:
        """Bytes of one device, of the program that is compiled for the pod; see `NO_REMAT`."""
        state = self.state(option.config, option.axes, option.offered)
        args, step = self._arguments(state), self._step(option.accumulate)
        states = tuple(range(len(args) - len(self.batch)))
        plain: dict[str, Any] = {"compiler_options": NO_REMAT, "donate_argnums": states}
        own = {} if hasattr(self.step, "lower") else plain
        memory = memory_of(self.pod.compile(step, *args, plan=plan_of(state), **own))
        assert memory is not None
        return memory.total


def _rounded_up(n: int) -> int:
    """To three digits."""
    unit = 10 ** max(len(str(n)) - 3, 0)
    return -(-n // unit) * unit


def _keywords(fn: Callable[..., Any]) -> Sequence[str]:
    """The names of the arguments of a function that are not fixed."""
    fixed = fn.keywords if isinstance(fn, functools.partial) else {}
    try:
        return tuple(name for name in inspect.signature(fn).parameters if name not in fixed)
    except (TypeError, ValueError):
        return ()
