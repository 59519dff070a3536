"""The front door: `shard` and `abstract`, and what is in a TrainState or an NNX pair.

A state is taken apart into params, optimizer state, step and the rest, and each part is laid out:

    params            Layout.stored
    optimizer state   Layout.state for copies of params, else by the leaf's own shape
    rest              copies of params (an EMA) like the optimizer state; everything else whole

`adapters.py` knows how to take which object apart and put it together again; this file knows what goes where.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jzero.config import ZeroConfig, make_config
from jzero.core.dependence import wide_sources
from jzero.core.errors import human_bytes, listing, typed_shape
from jzero.flax import adapters
from jzero.flax.adapters import Parts
from jzero.flax.conversion import as_array, check_belongs, convert_opt_state, logical_shapes, without_padding
from jzero.gather.transform import GatherOnUse
from jzero.layout.aliasing import HeldMemory
from jzero.layout.describe import leaf_bytes
from jzero.layout.layer_stacks import stacked_by_scan
from jzero.layout.leaf_rule import path_keys, path_name
from jzero.layout.placement import check_same, check_same_program, put
from jzero.layout.specs import P, entry_axes, joined, make_spec, named_axes, whole_mesh
from jzero.offload import check_host_memory, made_streamed
from jzero.optim import init_shapes, is_wrapped, unwrap, zero
from jzero.sharding import Plan, plan_for


def shard(
    state: Any,
    config: ZeroConfig | None = None,
    *,
    mesh: Mesh | None = None,
    param_specs: Any = None,
    scan_axes: Mapping[str, int | None] | None = None,
    **fields,
) -> Any:
    """A train state split over the data axis; the train step stays as it is.

    Params, optimizer state and every other leaf are placed as the stage says; `tx` is wrapped by
    `jzero.zero`, and at stage 3 `apply_fn` by `jzero.gather_on_use`. An existing state is placed leaf by
    leaf, and shares no memory with the new one: a donated step leaves it as it was. A function that creates one
    runs under `jax.jit` with sharded outputs, so that no device ever holds more of a leaf than its shard. A
    sharded state is laid out again (another stage or mesh), values kept.

    Args:
      state: a Flax `TrainState` (or a subclass with more fields), a pair `(nnx.Module, nnx.Optimizer)`, or a
        function without arguments that returns one of them.
      config: a `ZeroConfig`; or pass its fields as keywords (`stage=2`).
      mesh: the devices; None: all of them on one axis named as `config.axis`.
      param_specs: a tree of PartitionSpec for the params (tensor parallelism).
      scan_axes: which dim of which params is a stack of layers, as for `make_plan`. None: what a scan in the creation
        function stacks up is one; of other params it is guessed from shapes, and `plan_of(state).describe()` says so.

    Returns:
      The same class. For an existing NNX pair the same two objects, changed in place.

    Raises:
      TypeError: a state of an unknown kind, a creation function that needs arguments, an unknown field.
      ValueError: an axis that the mesh has not, optimizer state that does not belong to the params, arrays
        committed to devices outside of the mesh; an existing state that is not the same on every process.

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
    if adapters.is_creator(state):
        return _born_sharded(_checked_creator(state, "jzero.shard"), config, mesh, param_specs, scan_axes)
    parts = adapters.take_apart(state, where="jzero.shard")
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(parts)):
        raise TypeError(
            "jzero.shard: this state is abstract (jax.ShapeDtypeStruct leaves) and has nothing to place. Use "
            "jzero.abstract(state, ...) to compile a step with it, or pass the function that creates it."
        )
    plan = _plan(parts, config, mesh, param_specs, scan_axes)
    _check_real(plan)
    _check_devices(parts, plan)
    check_same(parts, where="jzero.shard")
    check_host_memory(lambda: init_shapes(zero(unwrap(parts.tx), plan), parts.params), plan)
    # an NNX pair is filled in place: what it held before, it does not keep
    return adapters.put_together(state, _place(parts, plan, HeldMemory(() if adapters.is_pair(state) else parts)))


def abstract(
    state: Any,
    config: ZeroConfig | None = None,
    *,
    mesh: Mesh | None = None,
    param_specs: Any = None,
    scan_axes: Mapping[str, int | None] | None = None,
    **fields,
) -> Any:
    """The state that `shard` would give, as `jax.ShapeDtypeStruct` leaves that carry their shardings.

    Nothing is allocated: it is what to compile a step with for a pod, or to restore a checkpoint into.

    Args:
      state, config, mesh, param_specs, scan_axes, **fields: as for `shard`.

    Returns:
      The same class with abstract leaves (for an NNX pair, a new pair).

    Raises:
      TypeError, ValueError: as for `shard`.
    """
    adapters.check_state(state, where="jzero.abstract")
    config = make_config(config, fields, where="jzero.abstract")
    if adapters.is_creator(state):
        shapes, rebuild, stacks = _trace_creator(_checked_creator(state, "jzero.abstract"))
    else:
        parts = adapters.take_apart(state, where="jzero.abstract")
        shapes, rebuild, stacks = jax.tree.map(_shape, parts), adapters.rebuilder(state), {}
    plan = _plan(shapes, config, mesh, param_specs, scan_axes, stacks)
    tx = zero(unwrap(shapes.tx), plan)
    opt_state = init_shapes(tx, shapes.params)
    check_belongs(shapes.replace(opt_state=logical_shapes(shapes)), tx)
    target = shapes.replace(opt_state=opt_state, tx=tx, apply_fn=_wrap_apply(shapes, plan))
    target = target.replace(
        step=None if target.step is None else jax.ShapeDtypeStruct((), _step_dtype(target.step))
    )
    return rebuild(
        _map_layout(target, plan, lambda x, s: jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=s))
    )


def plan_of(state: Any) -> Plan:
    """The plan that a sharded state was laid out by.

    Args:
      state: a TrainState, an nnx optimizer, a pair of model and optimizer, or a wrapped transformation.

    Raises:
      TypeError: it was not sharded by jzero.
    """
    candidates = [state, getattr(state, "tx", None)]
    if isinstance(state, (tuple, list)) and not is_wrapped(state):
        candidates += [getattr(part, "tx", None) for part in state]
    for tx in candidates:
        if is_wrapped(tx):
            return tx.init.plan
    raise TypeError(
        f"jzero.plan_of: this {type(state).__name__} was not sharded by jzero. Pass what jzero.shard returned, or "
        "a transformation from jzero.zero."
    )


def unshard(tree: Any, *, tx: Any = None) -> Any:
    """Every array of a tree whole on each device of its mesh, in memory of its own: for evaluation, sampling or export.

    Args:
      tree: arrays in any layout, e.g. `state.params`.
      tx: the wrapped transformation (`state.tx`) whose state the tree is: then what its leaves were padded by is cut
        off, and every leaf has the shape that `tx.init` gives it without jzero.

    Returns:
      The same tree, replicated. Across processes all of them must call.

    Raises:
      TypeError: `tx` is no transformation from `jzero.zero`.

    Cost:
      The bytes of the whole tree on every device; an all-gather.
    """

    kept = HeldMemory(tree)

    def whole(x):
        if not isinstance(x, jax.Array) or not isinstance(x.sharding, NamedSharding):
            return x
        if not x.is_fully_replicated:
            x = put(x, NamedSharding(whole_mesh(x.sharding.mesh), P()))
        return kept.apart(x)

    if tx is None:
        return jax.tree.map(whole, tree)
    if not is_wrapped(tx):
        raise TypeError("jzero.unshard: tx must be a transformation from jzero.zero, such as state.tx.")
    return without_padding(jax.tree.map(whole, tree), tx)


def _checked_creator(create: Callable, where: str) -> Callable[[], Any]:
    try:
        params = inspect.signature(create).parameters.values()
    except (TypeError, ValueError):
        return create
    needed = [
        p.name for p in params if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if needed:
        raise TypeError(
            f"{where}: the creation function {getattr(create, '__name__', create)!r} needs arguments "
            f"({', '.join(needed)}). Pass one without: lambda: {getattr(create, '__name__', 'create')}"
            f"({', '.join(needed)})."
        )
    return create


def _plan(parts: Parts, config: ZeroConfig, mesh, param_specs, scan_axes, stacks=None) -> Plan:
    """The plan for a state; one that was sharded before brings its layouts without the ZeRO axis, and its stacks."""
    _check_single(parts)
    if is_wrapped(parts.tx):
        stacks = {x.keys: x.scan_dim for x in parts.tx.init.plan.layouts if not x.guessed}
    if param_specs is None and is_wrapped(parts.tx):
        old = parts.tx.init.plan
        param_specs = jax.tree.unflatten(jax.tree.structure(parts.params), [x.used for x in old.layouts])
        mesh = old.mesh if mesh is None else mesh
    if param_specs is None and parts.specs is not None and any(s is not None for s in parts.specs):
        param_specs = jax.tree.unflatten(jax.tree.structure(parts.params), parts.specs)
    plan = plan_for(parts.params, config, mesh, param_specs, scan_axes, stacks or {})
    return dataclasses.replace(plan, notes=(*plan.notes, *_notes_on_rest(parts.rest, plan)))


def _check_single(parts: Parts) -> None:
    """Raises ValueError for several states in one: each leaf then has a dim in front that no optimizer knows."""
    shape = np.shape(parts.step)
    if parts.step is None or shape == ():
        return
    raise ValueError(
        f"jzero: this is {shape[0]} states in one: its step has the shape {shape}, as jax.vmap or "
        "flax.jax_utils.replicate make it. Of a replicated state pass one (flax.jax_utils.unreplicate). For an "
        "ensemble make one state of stacked params, with one step counter: params = jax.vmap(init)(keys), then "
        "TrainState.create(..., params=params, tx=tx)."
    )


def _notes_on_rest(rest: Any, plan: Plan) -> list[str]:
    """What lies outside of the params and stays whole on every device: batch statistics, a frozen NNX base."""
    named = zip(jax.tree_util.tree_leaves_with_path(rest), plan.copy_specs(rest), strict=True)
    whole = [(path_name(k), leaf_bytes(as_array(x))) for (k, x), spec in named if spec == P()]
    if not whole or plan.n == 1 or not plan.config.row.state:
        return []
    largest = ", ".join(name for name, _ in sorted(whole, key=lambda row: -row[1])[:3])
    count, size = len(whole), human_bytes(sum(b for _, b in whole))
    return [f"{count} arrays outside of the params stay whole on every device, {size} in all ({largest})."]


def _wrap_apply(parts: Parts, plan: Plan):
    """`apply_fn` with gather on use."""
    plain = parts.apply_fn.fn if isinstance(parts.apply_fn, GatherOnUse) else parts.apply_fn
    return None if plain is None else GatherOnUse(plain, plan)


def _layout(parts: Parts, plan: Plan) -> Parts:
    """A sharding for every leaf."""

    def specs_of_rest(tree):
        named = zip(jax.tree.leaves(tree), plan.copy_specs(tree), strict=True)
        return jax.tree.unflatten(
            jax.tree.structure(tree), [_kept(x, plan) or plan.sharding(s) for x, s in named]
        )

    params = [plan.sharding(x.stored) for x in plan.layouts]
    state = plan.state_shardings(parts.opt_state)
    return parts.replace(
        params=jax.tree.unflatten(jax.tree.structure(parts.params), params),
        opt_state=jax.tree.unflatten(jax.tree.structure(parts.opt_state), state),
        step=None if parts.step is None else plan.sharding(P()),
        rest=specs_of_rest(parts.rest),
    )


def _kept(leaf, plan: Plan) -> NamedSharding | None:
    """A layout on this mesh that the user gave to a leaf of the rest."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or whole_mesh(sharding.mesh) != plan.mesh:
        return None
    spec = make_spec([joined(entry_axes(e), plan.mesh) for e in sharding.spec])
    return None if set(named_axes(spec)) - {*plan.mesh.shape, *plan.array_mesh.shape} else plan.sharding(spec)


def _map_layout(parts: Parts, plan: Plan, place: Callable[[Any, NamedSharding], Any]) -> Parts:
    return jax.tree.map(place, parts, _layout(parts, plan))


def _place(parts: Parts, plan: Plan, kept: HeldMemory) -> Parts:
    """An existing state in its layout, leaf by leaf; a leaf that would share memory with `kept` is copied."""
    tx = zero(unwrap(parts.tx), plan)
    opt_state = convert_opt_state(parts, tx, plan, place=put, store=put)
    parts = parts.replace(tx=tx, apply_fn=_wrap_apply(parts, plan), opt_state=opt_state)
    if parts.step is not None:
        parts = parts.replace(step=jnp.asarray(parts.step, _step_dtype(parts.step)))
    return _map_layout(
        parts, plan, lambda x, s: kept.apart(put(x if hasattr(x, "dtype") else jnp.asarray(x), s))
    )


def _born_sharded(create: Callable[[], Any], config: ZeroConfig, mesh, param_specs, scan_axes) -> Any:
    """Run a creation function so that each device makes its own shards alone."""
    born, finish, plan, shapes = _creation(create, config, mesh, param_specs, scan_axes)
    _check_real(plan)
    check_host_memory(lambda: shapes.opt_state, plan)
    if jax.process_count() == 1:
        return finish(born())
    lowered = born.lower()
    check_same_program(lowered, where="jzero.shard")
    return finish(lowered.compile()())


def lower_creation(
    create: Callable[[], Any],
    config: ZeroConfig,
    *,
    mesh: Mesh | None = None,
    param_specs: Any = None,
    scan_axes: Mapping[str, int | None] | None = None,
) -> jax.stages.Lowered:
    """The program by which `shard` creates a state, lowered: compile it to read what creation holds at once.

    Args:
      create, config, mesh, param_specs, scan_axes: as for `shard`.
    """
    return _creation(create, config, mesh, param_specs, scan_axes)[0].lower()


def _creation(
    create, config, mesh, param_specs, scan_axes
) -> tuple[Any, Callable[[list[Any]], Any], Plan, Parts]:
    """The jitted creation of all leaves in their layout, what makes a state of them, the plan and the shapes."""
    shapes, rebuild, stacks = _trace_creator(create)
    plan = _plan(shapes, config, mesh, param_specs, scan_axes, stacks)
    tx = zero(unwrap(shapes.tx), plan)
    tree, count = jax.tree.structure(shapes), len(plan.layouts)
    order = _params_first(shapes)
    flat = wide_sources(
        lambda: [jnp.asarray(x) for x in order(jax.tree.leaves(_parts_of(create)))],
        count, lambda i: config.master_for(plan.layouts[i].dtype),
    )  # fmt: skip

    def born():
        leaves, masters = flat()
        parts = jax.tree.unflatten(tree, order(leaves, back=True))
        # inside the trace nothing moves yet: out_shardings place every leaf
        opt_state = convert_opt_state(
            parts, tx, plan, place=lambda x, s: jax.lax.with_sharding_constraint(x, s), masters=masters
        )
        step = None if parts.step is None else jnp.asarray(parts.step, _step_dtype(parts.step))
        return jax.tree.leaves(parts.replace(opt_state=opt_state, step=step))

    target = shapes.replace(opt_state=init_shapes(tx, shapes.params))
    out = target.replace(tx=tx, apply_fn=_wrap_apply(shapes, plan))
    layout = jax.tree.leaves(_layout(out, plan))
    jitted = jax.jit(
        born if config.offload is None else made_streamed(born, layout, plan), out_shardings=layout
    )
    return jitted, lambda leaves: rebuild(jax.tree.unflatten(jax.tree.structure(out), leaves)), plan, target


def _trace_creator(create) -> tuple[Parts, Callable[[Parts], Any], dict[tuple[str, ...], int | None]]:
    """The shapes of what a creation function returns, how to put such a state together, and its stacks of layers."""
    box: list[Any] = []

    def run():
        state = create()
        parts = adapters.take_apart(
            state, where=f"jzero: the creation function {getattr(create, '__name__', '')}".rstrip()
        )
        box[:] = [parts.statics(), adapters.rebuilder(state)]
        return parts.arrays()

    jitted = jax.jit(run)
    arrays = jitted.eval_shape()  # one trace serves both
    parts = box[0].with_arrays(arrays)
    flat = jax.tree_util.tree_leaves_with_path(parts.params)
    dims = stacked_by_scan(jitted.trace().jaxpr.jaxpr, len(flat))
    stacks: dict[tuple[str, ...], int | None] = {
        path_keys(k): d for (k, _), d in zip(flat, dims, strict=True) if d is not None
    }
    return parts, box[1], stacks


def _parts_of(create) -> Parts:
    return adapters.take_apart(create(), where="jzero")


def _params_first(parts: Parts):
    """A function that moves the params to the front of the flat list of a state's leaves, and back."""
    index = list(range(len(jax.tree.leaves(parts))))
    numbered = jax.tree.unflatten(jax.tree.structure(parts), index)
    params = jax.tree.leaves(numbered.params)
    front = params + [i for i in index if i not in set(params)]

    def order(leaves, back: bool = False):
        if not back:
            return [leaves[i] for i in front]
        out: list[Any] = [None] * len(leaves)
        for i, leaf in zip(front, leaves, strict=True):
            out[i] = leaf
        return out

    return order


def _check_real(plan: Plan) -> None:
    """Raises TypeError for a mesh of compile-only devices: nothing can be placed there."""
    if not all(isinstance(d, jax.Device) for d in plan.mesh.devices.flat):
        raise TypeError(
            "jzero.shard: this mesh is of compile-only devices (jzero.pod); no array can lie there. Use "
            "jzero.abstract(state, ..., mesh=mesh) and pod.compile(step, state, batch)."
        )


def _check_devices(parts: Parts, plan: Plan) -> None:
    """Raises ValueError where arrays of a plain state are committed to devices outside of the mesh."""
    if is_wrapped(parts.tx):
        return
    mesh = set(plan.mesh.devices.flat)
    bad = [
        (
            jax.tree_util.keystr(k),
            typed_shape(x),
            ", ".join(sorted(str(d) for d in x.sharding.device_set - mesh)[:3]),
        )
        for k, x in jax.tree_util.tree_leaves_with_path(parts)
        if isinstance(x, jax.Array) and x.committed and not x.sharding.device_set <= mesh
    ]
    if bad:
        raise ValueError(
            f"jzero.shard: {len(bad)} arrays are committed to devices that are not in the mesh of {len(mesh)}:\n"
            f"{listing(bad)}\nPass a mesh with these devices, or move the state first: jax.device_get(state)."
        )


def _step_dtype(step):
    return step.dtype if hasattr(step, "dtype") else jnp.int32


def _shape(x):
    return jax.ShapeDtypeStruct(np.shape(x), as_array(x).dtype, sharding=getattr(x, "sharding", None))
