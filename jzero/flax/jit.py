"""`jit`: a train step that takes batches as they come from a data loader."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jzero.core.errors import check_arrays, check_function, is_argument, warn
from jzero.core.jaxprs import every_equation, is_tracer, of_any_leaves
from jzero.core.traces import keeping, traced
from jzero.core.types import PyTree
from jzero.core.update_mark import UPDATE
from jzero.flax.adapters import is_nnx_optimizer, is_train_state
from jzero.flax.donation import (
    Key,
    beside_objects,
    check_unshared,
    described,
    named_arguments,
    replaced,
    subtrees,
)
from jzero.flax.nnx_jit import NnxJit, hashed
from jzero.flax.shard import plans_in
from jzero.flax.step_batches import check_differ, is_object, is_unplaced, rows_of
from jzero.layout.batches import abstract_batch
from jzero.layout.leaf_rule import keyed_shapes
from jzero.layout.state_layouts import stored_copies
from jzero.sharding import Plan, check_copies, check_plan


def jit(step: Callable[..., Any], plan: Plan | None = None, **options) -> Jit:
    """`jax.jit` for a train step: batches are split by the plan, the state is donated, XLA gets the plan's options.

    A batch that is not split over the batch axes is computed whole on every device: the loss is right, but the work is
    N times as much. Here each array that is not on the mesh yet is placed by `plan.place_batch` first.

    Args:
      step: a function of a `TrainState`, of an NNX model and its optimizer, or of params and optimizer state; and of
        batches. Not jitted yet.
      plan: from `jzero.plan_of(state)` or `jzero.make_plan`. None: that of the state among the arguments of a call,
        which `jzero.shard` returned; params and optimizer state by themselves do not know theirs.
      **options: of `jax.jit` (of `nnx.jit` where an argument is an NNX module). `donate_argnums` or `donate_argnames`
        replace the choice described below; `compiler_options` are added to those of the plan.

    Returns:
      A function like `step`, with `lower`, `trace`, `eval_shape` and `describe`.

    Raises:
      TypeError: `step` is not a function or is jitted already, `plan` is not a plan; when called, a batch has lists of
        numbers among its arrays.
      ValueError: when called, the batch axes do not divide the leading dim of a batch (its leaves are listed); an
        argument may be a batch or params; with several processes, an argument is equal on all of them; the step would
        train a `TrainState` on one device; without `plan`, no argument has one, or they differ.
      RuntimeError: when called, a state was donated to an earlier step, or shares arrays with another argument.

    Layout:
      Placed are numpy arrays and JAX arrays on a single device, of one dim or more: `[B, ...]`, `[B/N, ...]` per
      device. Left to `jax.jit` are arrays on the mesh, scalars, random keys, copies of params and whatever a state
      holds. What every device needs whole, such as class weights, is put on the mesh by hand:
      `jax.device_put(x, plan.sharding(jax.P()))`. With several processes the first call refuses arguments that are
      equal on all of them: they are not rows.

    Cost:
      Unless the options say otherwise, an argument with optimizer state is donated if the step returns it in the
      same shapes, and the params beside it (an average of them, too). A step with an `nnx.Optimizer` changes NNX
      objects in place: all of them are donated. Nothing else is, so an evaluation step keeps its state. Of several
      arguments of one form (a reference, a target network) the one that the result is made from is; where the data
      flow does not tell which, none is, and a warning says so. `print(step.describe(state, batch))` lists the
      arguments. The step is traced once for this and for its compile together; with NNX objects and params beside
      them once more.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np, optax, jzero
      >>> params = {"w": jnp.ones((1024, 8))}
      >>> plan = jzero.make_plan(params, stage=2)
      >>> loss = jzero.jit(lambda params, batch: jnp.mean((batch @ params["w"]) ** 2), plan)
      >>> loss(plan.place(params), np.ones((64, 1024), np.float32)).shape
      ()
    """
    check_function(step, "step", where="jzero.jit")
    if plan is not None:
        check_plan(plan, where="jzero.jit")
    if hasattr(step, "lower"):
        raise TypeError(
            "jzero.jit: the step is jitted already, and its batches would be placed too late. Pass the function "
            "itself, and the options of its jit as keywords."
        )
    return Jit(step, plan, options)


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Jit:
    """What `jit` returns."""

    step: Callable[..., Any]
    known: Plan | None
    options: dict[str, Any]
    _jitted: dict[Any, Any] = dataclasses.field(default_factory=dict)
    _compared: set[Any] = dataclasses.field(default_factory=set)
    _by_plan: dict[Plan, Jit] = dataclasses.field(default_factory=dict)
    _statics: dict[int, list[Key]] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        object.__setattr__(self, "__wrapped__", self.step)
        object.__setattr__(self, "__doc__", self.step.__doc__)

    def __repr__(self):
        of = self.known.title if self.known is not None else "the plan of its state"
        return f"<jzero.jit: {getattr(self.step, '__qualname__', type(self.step).__name__)}, {of}>"

    @property
    def plan(self) -> Plan:
        """The plan that it was given, or has found among the arguments."""
        assert self.known is not None
        return self.known

    def _planned(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Jit:
        """Itself; without a plan, the one for the plan of the state among the arguments."""
        if self.known is not None:
            return self
        found = set(plans_in((*args, *kwargs.values())))
        if len(found) != 1:
            raise ValueError(
                f"jzero.jit: {'arguments of several plans say' if found else 'no argument says'} how to split "
                "the batch. Shard the state by jzero.shard, or pass the plan: jzero.jit(step, plan)."
            )
        (plan,) = found
        if plan not in self._by_plan:
            self._by_plan[plan] = Jit(self.step, plan, self.options)
        return self._by_plan[plan]

    def __call__(self, *args, **kwargs):
        """Place what is on the host, and run the step."""
        _check_alive((args, kwargs))
        jitted, donated, args, kwargs = self._ready(args, kwargs)
        check_unshared(_by_key(args, kwargs), donated)
        return jitted(*args, **kwargs)

    def lower(self, *args, **kwargs) -> Any:
        """As `jax.jit(step).lower`; abstract batches are split as real ones are."""
        jitted, _, args, kwargs = self._ready(args, kwargs)
        stage, trace = traced(jitted, *args, **kwargs)
        options = jitted.compiler_options if isinstance(jitted, NnxJit) else None
        return keeping(of_any_leaves(stage.lower), trace, options)

    def trace(self, *args, **kwargs) -> Any:
        """As `jax.jit(step).trace`; abstract batches are split as real ones are."""
        jitted, _, args, kwargs = self._ready(args, kwargs)
        return jitted.trace(*args, **kwargs)

    def eval_shape(self, *args, **kwargs) -> Any:
        """As `jax.jit(step).eval_shape`."""
        jitted, _, args, kwargs = self._ready(args, kwargs)
        return jitted.eval_shape(*args, **kwargs)

    def describe(self, *args, **kwargs) -> str:
        """Which arguments a call donates, and why, as a table. The step is traced and does not run."""
        own = self._planned(args, kwargs)
        given = _by_key(args, kwargs)
        rows = [k for k in given if any(rows_of(k, given, own.plan))]
        donated = own._ready(args, kwargs)[1]
        if own._chosen:
            why = {k: "changed in place" if is_object(given[k]) else "the step returns a new one" for k in donated}
        else:
            why = dict.fromkeys(named_arguments(self.step, self.options, "donate", len(args)), "an option says so")
        return described(self.step, given, why, rows)

    def _ready(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Sequence[Key], tuple[Any, ...], dict[str, Any]]:
        """The jitted step for a call, the arguments that it donates by jzero's choice, and all of them, placed."""
        own = self._planned(args, kwargs)
        args, kwargs = own._placed(args, kwargs)
        return *own._jit(args, kwargs), args, kwargs

    def _placed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = _by_key(args, kwargs)
        rows = {k: found for k in given if any(found := rows_of(k, given, self.plan))}
        placed = {k: self._place(arg, rows[k]) if k in rows else arg for k, arg in given.items()}
        if rows and jax.process_count() > 1:
            kind = tuple((k, jax.tree.structure(given[k]), tuple(found)) for k, found in rows.items())
            if kind not in self._compared:
                check_differ(given, rows, self.plan)
                self._compared.add(kind)
        return tuple(placed[i] for i in range(len(args))), {k: placed[k] for k in kwargs}

    def _place(self, arg: PyTree, rows: Sequence[bool]) -> PyTree:
        """One argument with its rows split."""
        leaves, tree = jax.tree.flatten(arg)
        abstract = [isinstance(x, jax.ShapeDtypeStruct) for x in leaves]
        real = [x if w and not a else None for x, w, a in zip(leaves, rows, abstract, strict=True)]
        placed = tree.flatten_up_to(self.plan.place_batch(jax.tree.unflatten(tree, real)))
        each = zip(leaves, rows, abstract, placed, strict=True)
        new = [x if not w else abstract_batch(x, self.plan.batch) if a else p for x, w, a, p in each]
        return jax.tree.unflatten(tree, new)

    def _jit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Sequence[Key]]:
        """The jitted step for arguments of this structure, and the arguments that it donates by jzero's choice."""
        given = _by_key(args, kwargs)
        objects = [k for k, x in given.items() if is_object(x)]
        key: Any = tuple(objects)
        if self._chosen:  # an object's structure is that of the program, which is looked up by it later
            static = self._static(len(args))
            fixed = [(k, *hashed(x)) for k, x in given.items() if k in static]
            others = [(k, jax.tree.structure(x)) for k, x in given.items() if k not in objects and k not in static]
            key = key, frozenset(fixed), frozenset(others)
        if key not in self._jitted:
            self._jitted[key] = (self._jit_nnx if objects else self._jit_arrays)(args, kwargs)
        return self._jitted[key]

    @property
    def _chosen(self) -> bool:
        """Whether jzero chooses what is donated, and not the user's options."""
        return not self.options.keys() & {"donate_argnums", "donate_argnames"}

    def _jit_arrays(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Sequence[Key]]:
        options = {**self.options, "compiler_options": self._compiler_options or None}
        if not self.options.keys() & {"static_argnums", "static_argnames"}:
            check_arrays((args, kwargs), "the arguments", good=is_argument, where="jzero.jit")
        jitted = jax.jit(self.step, **options)
        if not self._chosen:
            return jitted, ()
        stage, given = jitted.trace(*args, **kwargs), _by_key(args, kwargs)
        out_info = of_any_leaves(lambda: stage.out_info)
        self._check_sharded(given.values(), out_info)
        updates = any(eqn.primitive.name == UPDATE for eqn in every_equation(stage.jaxpr.jaxpr))
        if updates:
            self._warn_if_lost(out_info)
        donated = self._donated(given, stage, self._static(len(args)), updates)
        if not donated:
            return jitted, ()
        return jax.jit(self.step, **options, **_donating(donated)), donated

    def _jit_nnx(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Sequence[Key]]:
        from flax import nnx

        options = {k: v for k, v in self.options.items() if k != "compiler_options"}
        donated: list[Key] = []
        if self._chosen:
            donated = self._donated_with_objects(_by_key(args, kwargs))
            options |= _donating(donated)
        jitted = nnx.jit(self.step, **options)
        options = self._compiler_options
        return NnxJit(jitted, options, self._static) if options else jitted, donated

    def _static(self, count: int) -> list[Key]:
        """The static arguments of a call with so many positional ones."""
        if count not in self._statics:  # the signature is not looked up again in every step
            self._statics[count] = named_arguments(self.step, self.options, "static", count)
        return self._statics[count]

    def _donated_with_objects(self, given: Mapping[Key, Any]) -> list[Key]:
        """What the step replaces, and all objects if one is an optimizer or other optimizer state is replaced."""

        def may_be(arg: PyTree) -> bool:
            return self._has_optimizer_state(arg) or self._is_params(arg)

        static = self._static(sum(isinstance(k, int) for k in given))
        others = beside_objects(self.step, given, may_be, static)
        trains = any(map(is_nnx_optimizer, given.values())) or any(self._has_optimizer_state(given[k]) for k in others)
        return [k for k, x in given.items() if k in others or is_object(x)] if trains else []

    @property
    def _compiler_options(self) -> dict[str, Any]:
        given = self.options.get("compiler_options") or {}
        if given:
            check_copies(self.plan.config, self.plan.mesh, given)
        return {**self.plan.compiler_options, **given}

    def _donated(
        self, given: Mapping[Key, Any], traced: jax.stages.Traced, static: Sequence[Key], updates: bool
    ) -> list[Key]:
        """Which arguments, by position or name, the step replaces: optimizer state, and the params of an update.

        The state may hold no copy of a param (plain SGD): then `updates` says that the step trains.
        """
        state = replaced(given, traced, self._has_optimizer_state, static)
        return state + replaced(given, traced, self._is_params, static) if state or updates else []

    def _check_sharded(self, args: Iterable[PyTree], out: PyTree) -> None:
        """Raises ValueError for a `TrainState` that every device would train whole; the loss would not show it."""
        if self.plan.mesh.size == 1 or not self.plan.config.row.state:
            return
        returned = [jax.tree.structure(tree) for tree in subtrees(out)]
        trained = [a.params for a in args if is_train_state(a) and jax.tree.structure(a) in returned]
        leaves = jax.tree.leaves(trained)
        if leaves and all(isinstance(x, jax.Array) and is_unplaced(x) for x in leaves if np.ndim(x)):
            raise ValueError(
                "jzero.jit: the TrainState lies on one device, and each device would train the whole of it. Shard it: "
                f"state = jzero.shard(state, stage={self.plan.config.stage}), and pass jzero.plan_of(state)."
            )

    def _warn_if_lost(self, out: PyTree) -> None:
        """Warns if the results of an update cannot hold the new params: XLA drops the update, and nothing trains."""
        returned = sum(x.size for x in jax.tree.leaves(out) if hasattr(x, "size"))
        params = sum(x.size for x in self.plan.trained.layouts)
        if returned < params:
            warn(
                f"jzero.jit: the step updates a state and does not return it: {returned:,} values come back, and the "
                f"params alone have {params:,}. XLA drops such an update, and nothing is trained. Return the new "
                "state: return state, loss.",
            )

    def _has_optimizer_state(self, arg: PyTree) -> bool:
        if is_train_state(arg) or self._is_params(arg):
            return is_train_state(arg)
        return any(stored_copies(keyed_shapes(arg), self.plan.by_keys))

    def _is_params(self, arg: PyTree) -> bool:
        leaves, plans = keyed_shapes(arg), (self.plan, self.plan.trained)
        return any(leaves == [(x.keys, x.shape) for x in plan.layouts] for plan in plans)


def _by_key(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[Key, Any]:
    """All arguments of a call; the keys of positional ones are their positions."""
    return {**dict(enumerate(args)), **kwargs}


def _donating(keys: Sequence[Key]) -> dict[str, Any]:
    """Options of `jax.jit` and `nnx.jit` that donate these arguments."""
    numbers, names = [k for k in keys if isinstance(k, int)], [k for k in keys if isinstance(k, str)]
    return {"donate_argnums": numbers, "donate_argnames": names}


def _check_alive(args: PyTree) -> None:
    """Raises RuntimeError for donated arrays: on the CPU backend JAX may crash instead of raising."""
    for x in jax.tree.leaves(args):
        if isinstance(x, jax.Array) and not is_tracer(x) and x.is_deleted():
            raise RuntimeError(
                f"jzero.jit: Array has been deleted with shape={x.shape}: it was donated to an earlier step. Go on "
                "with the state that the step returned: state, loss = step(state, batch)."
            )


__all__ = ["Jit", "jit"]
