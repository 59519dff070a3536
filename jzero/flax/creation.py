"""A state that is born sharded: the function that creates it runs so that each device makes only its own shards."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jzero.comm.traced import expect_gathers
from jzero.core.dependence import wide_sources
from jzero.core.errors import typed_shape
from jzero.core.jaxprs import in_trace, is_tracer
from jzero.core.ordering import tied
from jzero.core.types import PyTree, PyTreeDef
from jzero.flax import adapters
from jzero.flax.adapters import Parts
from jzero.flax.conversion import converted
from jzero.flax.state_plan import (
    check_explicit,
    check_placeable,
    is_real,
    map_shardings,
    shardings_of,
    step_array,
    wrapped_apply,
)
from jzero.flax.trained import parts_of
from jzero.layout.explicit import auto_context, on_auto_mesh, on_context_mesh, with_arrays_on_auto_mesh
from jzero.layout.layer_stacks import stacked_by_scan
from jzero.layout.leaf_rule import Frozen, path_keys
from jzero.layout.placement import check_same_program, put
from jzero.offload import made_streamed
from jzero.optim import check_memory, fresh_held, init_shapes, unwrap, zero
from jzero.sharding import Plan
from jzero.update.extra import with_extra
from jzero.update.padded_state import pad
from jzero.update.sharded_update import taken_over


def checked_creator(create: Callable[..., Any], where: str) -> Callable[[], Any]:
    """The function itself; arrays that it closes over, or of a `functools.partial`, are put on a mesh with Auto axes.

    Raises:
      TypeError: it needs arguments.
    """
    if isinstance(create, functools.partial):
        create = functools.partial(create.func, *on_auto_mesh(create.args), **on_auto_mesh(create.keywords))
    create = with_arrays_on_auto_mesh(create)
    try:
        params = inspect.signature(create).parameters.values()
    except (TypeError, ValueError):
        return create
    rest = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if needed := ", ".join(p.name for p in params if p.default is p.empty and p.kind not in rest):
        raise TypeError(
            f"{where}: the creation function {getattr(create, '__name__', create)!r} needs arguments ({needed}). Pass "
            f"one without: lambda: {getattr(create, '__name__', 'create')}({needed})."
        )
    return create


def born_sharded(create: Callable[[], Any], planned: Callable[..., Plan], trainable: Any) -> Any:
    """Runs a creation function so that each device makes only its own shards; `planned` is `plan_of_parts`."""
    with auto_context():
        make, plan, shapes = creation(create, planned, trainable)
    check_explicit(plan) if in_trace() else check_placeable(plan)
    expect_gathers(plan)
    if plan.config.offload is not None:
        check_memory(unwrap(shapes.tx), plan)
    return make()


def _run(born: Any) -> list[jax.Array]:
    """Runs it; across processes all must have the same program. Inside of a trace the program is the caller's."""
    if jax.process_count() == 1 or in_trace():
        return born()
    lowered = born.lower()
    check_same_program(lowered, where="jzero.shard")
    return lowered.compile()()


def creation(
    create: Callable[[], Any], planned: Callable[..., Plan], trainable: Any
) -> tuple[Callable[[], Any], Plan, Parts]:
    """A function that makes the state, each leaf in its layout; the plan; and the shapes."""
    shapes, rebuild, stacks = trace_creator(create, trainable)
    plan = planned(shapes, stacks)
    home = _home(plan)
    tx = zero(shapes.tx, home)
    tree, count = jax.tree.structure(shapes), len(plan.layouts)
    flat = wide_sources(
        lambda: [jnp.asarray(x) for x in jax.tree.leaves(parts_of(create(), trainable, where="jzero"))],
        count, lambda i: plan.config.master_for(plan.layouts[i].dtype),
    )  # fmt: skip

    def born():
        leaves, masters = flat()
        if plan.config.paired_by is not None:
            leaves, masters = _computed_once(leaves, masters)
        parts = jax.tree.unflatten(tree, leaves)
        # inside the trace nothing moves yet: out_shardings place every leaf
        parts = converted(
            parts, tx, home, place=lambda x, s: jax.lax.with_sharding_constraint(x, s), masters=masters
        )
        return jax.tree.leaves(parts.replace(step=step_array(parts.step)))

    target = shapes.replace(opt_state=init_shapes(tx, shapes.params))
    out = target.replace(tx=zero(shapes.tx, plan), apply_fn=wrapped_apply(shapes, plan))
    if plan.config.in_files:  # elsewhere the state is made in the trace
        _check_outlives(lambda: jax.make_jaxpr(unwrap(shapes.tx).init)(shapes.taken).consts)
        return _born_into_files(flat, tree, out, home, rebuild), plan, target
    layout = jax.tree.leaves(shardings_of(out, home))
    jitted = jax.jit(made_streamed(born, layout, plan) if plan.config.streams else born, out_shardings=layout)

    def make():
        with auto_context():
            leaves = _run(jitted)
        parts = jax.tree.unflatten(jax.tree.structure(out), on_context_mesh(leaves))
        return rebuild(parts if home is plan else map_shardings(parts, plan, put))

    return make, plan, target


def _computed_once(leaves: list[Any], masters: list[Any]) -> tuple[list[Any], list[Any]]:
    """Params and masters behind barriers, so that everything computed from one of them sees the same value.

    Otherwise XLA may skip the rounding of a param that the program widens again (its excess precision), and a copy of
    the param in the state would differ from the master that the pair stands for.
    """
    masters = [m if m is None else taken_over(p, m) for p, m in zip(leaves, masters, strict=False)]
    return [tied(p)[0] for p in leaves], [m if m is None else tied(m)[0] for m in masters]


def _born_into_files(
    flat: Callable[[], tuple[list[Any], list[Any]]],
    tree: PyTreeDef,
    out: Parts,
    home: Plan,
    rebuild: Callable[[Parts], Any],
) -> Callable[[], Any]:
    """Creates a state in files: a few params and their masters at a time, each group by its own program."""
    plan, out = out.tx.init.plan, out.replace(opt_state=None)
    layout, target = (jax.tree.leaves(shardings_of(out, p)) for p in (home, plan))
    leaves: dict[int, Any] = {}
    trained = [i for i, x in enumerate(plan.layouts) if x.frozen is not Frozen.APART]

    def born(own: Sequence[int], asked: Sequence[int]):
        known, masters = flat()
        parts = jax.tree.unflatten(tree, known)
        all_leaves = jax.tree.leaves(parts.replace(opt_state=None, step=step_array(parts.step)))  # params first
        rows = [(known[i] if masters[i] is None else masters[i], home.layouts[i]) for i in asked]
        return [all_leaves[i] for i in own], [pad(m, x.state_shape, x.state, home) for m, x in rows]

    def make(taken: Sequence[int], own: Sequence[int] | None = None) -> dict[int, Any]:
        asked = [trained[i] for i in taken]  # `taken` numbers the params that the optimizer takes
        own = [i for i in asked if i not in leaves] if own is None else own
        shardings = [layout[i] for i in own], [home.sharding(home.layouts[i].state) for i in asked]
        with auto_context():
            new, masters = _run(jax.jit(functools.partial(born, own, asked), out_shardings=shardings))
        leaves.update({i: put(x, target[i]) for i, x in zip(own, new, strict=True)})
        return dict(zip(taken, masters, strict=True))

    numbers = jax.tree.unflatten(jax.tree.structure(out), range(len(layout)))

    def state():
        at: Any = numbers.step  # which of the leaves the step is, None without one
        if at is not None:
            make([], [at])
        opt_state = fresh_held(make, out.tx, step=None if at is None else leaves[at])
        if rest := [i for i in range(len(layout)) if i not in leaves]:
            make([], rest)
        parts = jax.tree.unflatten(jax.tree.structure(out), [leaves[i] for i in range(len(layout))])
        return rebuild(parts.replace(opt_state=opt_state))

    return state


def _home(plan: Plan) -> Plan:
    """The plan by which all leaves are made: that on the host mesh if their state lives there."""
    return plan.update_plan if plan.config.updates_outside and is_real(plan) else plan


TracedState = tuple[Parts, Callable[[Parts], Any], dict[tuple[str, ...], int | None]]
"""The shapes of a state, a function that puts such a state together, and its stacks."""


def trace_creator(create: Callable[[], Any], trainable: Any = None) -> TracedState:
    """The shapes that a creation function returns, a function that puts such a state together, and its stacks."""
    box: list[Any] = []

    def run():
        state = create()
        parts = parts_of(
            state, trainable, where=f"jzero: the creation function {getattr(create, '__name__', '')}".rstrip()
        )
        box[:] = [jax.tree.structure(parts), adapters.rebuilder(state)]
        return jax.tree.leaves(parts)

    jitted = jax.jit(run)
    leaves = jitted.eval_shape()
    parts = jax.tree.unflatten(box[0], leaves)
    flat = jax.tree_util.tree_leaves_with_path(parts.params)
    dims = stacked_by_scan(jitted.trace().jaxpr.jaxpr, len(flat))  # JAX still has the trace of `eval_shape`
    stacks: dict[tuple[str, ...], int | None]
    stacks = {path_keys(k): d for (k, _), d in zip(flat, dims, strict=True) if d is not None}
    _check_outlives(functools.partial(_update_constants, unwrap(parts.tx), parts.taken))
    return parts, box[1], stacks


def _update_constants(tx: optax.GradientTransformation, params: PyTree) -> list[Any]:
    state = jax.eval_shape(tx.init, params)
    with contextlib.suppress(Exception):  # of the user's transformation, which wants arguments of its own
        return with_extra(lambda update: jax.make_jaxpr(update)(params, state, params).consts, tx)
    return []


def _check_outlives(constants: Callable[[], list[Any]]) -> None:
    """Raises TypeError if constants of an optimizer were made in the trace of a creation function, which has ended."""
    if not in_trace() and (made := [x for x in constants() if is_tracer(x)]):
        raise TypeError(
            "jzero: the optimizer uses arrays that the creation function makes, such as a table of learning rates or a "
            f"random key ({', '.join(typed_shape(x) for x in made)}). They exist only while that function is traced. "
            "Make the optimizer outside of the creation function."
        )
