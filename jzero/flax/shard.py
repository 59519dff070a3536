"""`shard`, `abstract`, `unshard` and `plan_of`: the entry points for a TrainState or an NNX pair.

A state is taken apart into params, optimizer state, step and the rest, and each part is laid out:

    params            Layout.stored
    optimizer state   Layout.state for copies of params, else by the leaf's own shape
    rest              copies of params (an EMA) like the optimizer state; everything else whole

A state is taken apart (`adapters.py`), planned (`state_plan.py`), placed (here) or created in its layout
(`creation.py`), and put together again (`adapters.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from jzero.comm.traced import expect_gathers
from jzero.config import ZeroConfig, make_config
from jzero.core.jaxprs import in_trace
from jzero.core.types import PyTree
from jzero.flax import adapters
from jzero.flax.adapters import Parts
from jzero.flax.conversion import (
    as_array,
    check_belongs,
    converted,
    logical_shapes,
    with_masters,
    without_padding,
)
from jzero.flax.creation import TracedState, born_sharded, checked_creator, trace_creator
from jzero.flax.state_plan import (
    check_devices,
    check_placeable,
    map_shardings,
    plan_of_parts,
    step_array,
    step_dtype,
    wrapped_apply,
)
from jzero.flax.trained import parts_of
from jzero.layout.aliasing import HeldMemory
from jzero.layout.explicit import auto_context, explicit_axes, on_auto_mesh, on_context_mesh
from jzero.layout.placement import HOST, check_same, memory_kind, put
from jzero.layout.specs import P, whole_mesh
from jzero.optim import as_held, check_explicit, check_memory, init_shapes, is_wrapped, unwrap, zero
from jzero.sharding import Plan
from jzero.update.int8_moments import with_values


def shard(
    state: Any,
    config: ZeroConfig | None = None,
    *,
    mesh: Mesh | None = None,
    param_specs: PyTree = None,
    scan_axes: Mapping[str, int | None] | None = None,
    trainable: Any = None,
    **fields,
) -> Any:
    """A train state split over the data axis; the train step stays as it is.

    Params, optimizer state and every other leaf are placed as the stage says; `tx` is wrapped by
    `jzero.zero`, and at stage 3 `apply_fn` by `jzero.gather_on_use`. An existing state is placed leaf by
    leaf, and shares no memory with the new one: a donated step leaves it as it was. A function that creates one
    runs under `jax.jit` with sharded outputs, so that no device ever holds more of a leaf than its shard. A
    sharded state is laid out again (another stage or mesh), values kept. Inside of a `jax.jit` the same holds of
    traced states: a whole run may be one program.

    Args:
      state: a Flax `TrainState` (or a subclass with more fields), a pair `(nnx.Module, nnx.Optimizer)`, or a
        function without arguments that returns one of them.
      config: a `ZeroConfig`; or pass its fields as keywords (`stage=2`).
      mesh: the devices; None: those of `jax.set_mesh`, else all of them on one axis named as `config.axis`.
      param_specs: the layouts of the params (tensor parallelism), as for `make_plan`; or a TrainState of layouts, of
        which `params` is read.
      scan_axes: which dim of which params is a stack of layers, as for `make_plan`. None: what a scan in the creation
        function stacks up is one; of other params it is guessed from shapes, and `plan_of(state).describe()` says so.
      trainable: which params are trained, as for `make_plan`; for an NNX pair any nnx filter, such as `nnx.LoRAParam`.
        The others are frozen: they have no gradient, no master and no moments, keep their dtype, and at stage 3 are
        split and gathered where they are used. None: what the optimizer takes. That is `wrt` of an `nnx.Optimizer`,
        or the params that the optimizer state is of; what the chain never changes (`optax.set_to_zero`) is frozen too.

    Returns:
      The same class. For an existing NNX pair the same two objects, changed in place.

    Raises:
      TypeError: the state or the filter is of an unknown kind, a creation function needs arguments, a field has an
        unknown name.
      ValueError: the mesh has no such axis, the optimizer state does not belong to the params, a filter names no param
        or one that the optimizer does not train (NNX `wrt`), arrays are committed to devices outside of the mesh, an
        existing state is not the same on every process.
      NotImplementedError: inside of a `jax.jit`, under an Explicit mesh or with an update outside of the program; or
        anywhere, `offload` under an Explicit mesh, or params in host memory on GPUs with jaxlib before 0.11.2.
      MemoryError: what `offload` keeps in host memory does not fit.

    Layout:
      params `Layout.stored`, moments and masters `Layout.state`, scalars replicated; see `Plan.describe`.

    Cost:
      Per device, 16-bit params and Adam: stage 1: 4 Psi + 12 Psi/N bytes, stage 2: 2 Psi + 14 Psi/N, stage
      3: 16 Psi/N, gradients counted in.

    Example:
      >>> import jax.numpy as jnp, optax, jzero
      >>> from flax.training.train_state import TrainState
      >>> params = {"w": jnp.ones((1024, 512))}
      >>> state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))
      >>> state = jzero.shard(state, stage=2)
      >>> state.opt_state[0].mu["w"].sharding.spec
      P('data',)

    References:
      Rajbhandari et al., ZeRO (arXiv:1910.02054).
    """
    adapters.check_state(state, where="jzero.shard")
    config = make_config(config, fields, where="jzero.shard")
    _check_trace(config, "jzero.shard")
    planned = partial(plan_of_parts, config=config, mesh=mesh, param_specs=param_specs, scan_axes=scan_axes)
    if adapters.is_creator(state):
        return born_sharded(checked_creator(state, "jzero.shard"), planned, trainable)
    if in_trace():  # as what a creation function returns
        made = born_sharded(lambda: state, planned, trainable)
        return adapters.put_together(state, adapters.take_apart(made, where="jzero.shard"))
    parts = on_auto_mesh(parts_of(state, trainable, where="jzero.shard"))
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(parts)):
        raise TypeError(
            "jzero.shard: this state is abstract (jax.ShapeDtypeStruct leaves) and has nothing to place. Use "
            "jzero.abstract(state, ...) to compile a step with it, or pass the function that creates it."
        )
    plan = planned(parts)
    check_placeable(plan)
    expect_gathers(plan)
    check_devices(parts, plan)
    check_same(parts, where="jzero.shard")
    if plan.config.offload is not None:
        check_memory(unwrap(parts.tx), plan)
    # an NNX pair is filled in place: what it held before, it does not keep
    held = HeldMemory(() if adapters.is_pair(state) else parts)
    with auto_context():
        placed = _place(parts, plan, held)
    return adapters.put_together(state, on_context_mesh(placed))


def abstract(
    state: Any,
    config: ZeroConfig | None = None,
    *,
    mesh: Mesh | None = None,
    param_specs: PyTree = None,
    scan_axes: Mapping[str, int | None] | None = None,
    trainable: Any = None,
    **fields,
) -> Any:
    """The state that `shard` would give, as `jax.ShapeDtypeStruct` leaves that carry their shardings.

    Nothing is allocated: it is what to compile a step with for a pod, or to restore a checkpoint into.

    Args:
      state, config, mesh, param_specs, scan_axes, trainable, **fields: as for `shard`.

    Returns:
      The same class with abstract leaves (for an NNX pair, a new pair).

    Raises:
      TypeError, ValueError, NotImplementedError: as for `shard`.
    """
    adapters.check_state(state, where="jzero.abstract")
    config = make_config(config, fields, where="jzero.abstract")
    _check_trace(None, "jzero.abstract")
    traced = traced_state(state, trainable)
    return abstract_from(traced, config, mesh=mesh, param_specs=param_specs, scan_axes=scan_axes)


def traced_state(state: Any, trainable: Any = None) -> TracedState:
    """What `abstract` reads from a state or from a creation function: the same for every config and mesh."""
    if adapters.is_creator(state):
        with auto_context():
            return trace_creator(checked_creator(state, "jzero.abstract"), trainable)
    parts = on_auto_mesh(parts_of(state, trainable, where="jzero.abstract"))
    return jax.tree.map(_shape, parts), adapters.rebuilder(state), {}


def abstract_from(
    traced: TracedState, config: ZeroConfig, *, mesh: Mesh | None, param_specs: PyTree = None,
    scan_axes: Mapping[str, int | None] | None = None,
) -> Any:  # fmt: skip
    """The abstract state; the mesh and the layouts are those of `abstract`."""
    shapes, rebuild, stacks = traced
    plan = plan_of_parts(
        shapes, stacks, config=config, mesh=mesh, param_specs=param_specs, scan_axes=scan_axes
    )
    check_explicit(plan)
    tx = zero(shapes.tx, plan)
    opt_state = init_shapes(tx, shapes.taken)
    check_belongs(shapes.replace(opt_state=logical_shapes(shapes)), tx)
    target = shapes.replace(opt_state=opt_state, tx=tx, apply_fn=wrapped_apply(shapes, plan))
    target = target.replace(
        opt_state=as_held(opt_state, shapes.params, tx),
        step=None if target.step is None else jax.ShapeDtypeStruct((), step_dtype(target.step)),
    )
    return rebuild(
        map_shardings(target, plan, lambda x, s: jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=s))
    )


def plan_of(state: Any) -> Plan:
    """The plan that a sharded state was laid out by.

    Args:
      state: a TrainState, an nnx optimizer, a pair of model and optimizer, or a wrapped transformation.

    Raises:
      TypeError: it has no plan.
    """
    for plan in plans_in([state]):
        return plan
    raise TypeError(
        f"jzero.plan_of: this {type(state).__name__} has no plan. Pass a TrainState from jzero.shard, of an "
        "NNX pair the optimizer or both (a model does not know its plan), or a transformation from jzero.zero."
    )


def plans_in(values: Iterable[Any]) -> Iterator[Plan]:
    """The plans of those values that have one, and of the parts of tuples and lists; see `plan_of`."""
    for value in values:
        parts = value if isinstance(value, (tuple, list)) and not is_wrapped(value) else ()
        for tx in (value, *(getattr(x, "tx", None) for x in (value, *parts))):
            if is_wrapped(tx):
                yield tx.init.plan


def unshard(tree: PyTree, *, tx: optax.GradientTransformation | None = None, params: PyTree = None) -> Any:
    """Every array of a tree whole on each device of its mesh, in memory of its own: for evaluation, sampling or export.

    Args:
      tree: arrays in any layout, e.g. `state.params`.
      tx: the wrapped transformation (`state.tx`) whose state the tree is. Then padding is cut off, 8-bit moments
        become float32, and every leaf has the shape that `tx.init` gives it without jzero.
      params: with `master_dtype="remainder"`, the params that belong to this optimizer state: fp32 masters are made
        from both.

    Returns:
      The same tree, replicated. Across processes all of them must call.

    Raises:
      TypeError: `tx` is not a transformation from `jzero.zero`.
      ValueError: `params` are needed and not given, or are not those of the plan.

    Cost:
      The bytes of the whole tree on every device; an all-gather.
    """

    held = HeldMemory(tree)

    def whole(x: Any) -> Any:
        if not isinstance(x, jax.Array) or not isinstance(x.sharding, NamedSharding):
            return x
        if not x.is_fully_replicated or memory_kind(x) == HOST:
            x = put(x, NamedSharding(whole_mesh(x.sharding.mesh), P()))
        return held.apart(x)

    if tx is not None and not is_wrapped(tx):
        raise TypeError("jzero.unshard: tx must be a transformation from jzero.zero, such as state.tx.")
    tree, params = on_auto_mesh(tree), on_auto_mesh(params)
    with auto_context():
        tree = jax.tree.map(whole, tree)
        if tx is not None:
            tree = with_values(with_masters(without_padding(tree, tx), jax.tree.map(whole, params), tx))
    return on_context_mesh(tree)


def _check_trace(config: ZeroConfig | None, where: str) -> None:
    """Raises NotImplementedError inside of a trace if arrays are needed, or the context's mesh is Explicit."""
    if not in_trace():
        return
    what = "under an Explicit mesh" if explicit_axes() else None
    if config is not None and config.updates_outside:
        what = "with an update outside of the program"
    if what is not None:
        raise NotImplementedError(
            f"{where}: {what} this does not work inside of jax.jit. Call it outside, state = {where}(create, ...), and "
            "pass the state to the jitted function."
        )


def _place(parts: Parts, plan: Plan, held: HeldMemory) -> Parts:
    """An existing state in its layout, leaf by leaf. A leaf that would share memory with `held` or another is copied.

    Optimizers put one array of zeros, or the params themselves (COCOB), into several leaves.
    """
    tx = zero(parts.tx, plan)
    parts = converted(parts, tx, plan, place=put, store=put)
    parts = parts.replace(tx=tx, apply_fn=wrapped_apply(parts, plan), step=step_array(parts.step))
    return map_shardings(parts, plan, lambda x, s: held.taken(put(as_array(x), s)))


def _shape(x):
    return jax.ShapeDtypeStruct(np.shape(x), as_array(x).dtype, sharding=getattr(x, "sharding", None))
