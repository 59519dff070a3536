"""A state that is born sharded: the function that creates it runs so that each device makes its own shards alone."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jzero.comm.traced import expect_gathers
from jzero.config import ZeroConfig
from jzero.core.dependence import wide_sources
from jzero.flax import adapters
from jzero.flax.adapters import Parts
from jzero.flax.conversion import convert_opt_state
from jzero.flax.state_plan import (
    check_real,
    map_shardings,
    plan_of_parts,
    shardings_of,
    step_dtype,
    wrapped_apply,
)
from jzero.layout.explicit import auto_context, on_auto_mesh, on_context_mesh
from jzero.layout.layer_stacks import stacked_by_scan
from jzero.layout.leaf_rule import path_keys
from jzero.layout.placement import check_same_program, put
from jzero.offload import check_host_memory, made_streamed
from jzero.optim import check_explicit, fresh_held, init_shapes, unwrap, zero
from jzero.sharding import Plan
from jzero.update.padded_state import pad


def checked_creator(create: Callable, where: str) -> Callable[[], Any]:
    """The function itself; what a `functools.partial` brings along lies on a mesh with Auto axes then.

    Raises:
      TypeError: it needs arguments.
    """
    if isinstance(create, functools.partial):
        create = functools.partial(create.func, *on_auto_mesh(create.args), **on_auto_mesh(create.keywords))
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


def born_sharded(create: Callable[[], Any], config: ZeroConfig, mesh, param_specs, scan_axes) -> Any:
    """Run a creation function so that each device makes its own shards alone."""
    with auto_context():
        born, finish, plan, shapes = creation(create, config, mesh, param_specs, scan_axes)
        check_real(plan)
    check_explicit(plan)
    expect_gathers(plan)
    if config.offload is not None:
        check_host_memory(shapes.opt_state, plan)
    with auto_context():
        leaves = _run(born)
    return finish(on_context_mesh(leaves))


def _run(born: Any) -> list[Any]:
    """The leaves; across processes of one and the same program."""
    if jax.process_count() == 1:
        return born()
    lowered = born.lower()
    check_same_program(lowered, where="jzero.shard")
    return lowered.compile()()


def creation(
    create: Callable[[], Any], config: ZeroConfig, mesh=None, param_specs=None, scan_axes=None
) -> tuple[Any, Callable[[list[Any]], Any], Plan, Parts]:
    """The jitted creation of all leaves in their layout, what makes a state of them, the plan and the shapes."""
    shapes, rebuild, stacks = trace_creator(create)
    plan = plan_of_parts(shapes, config, mesh, param_specs, scan_axes, stacks)
    home = _home(plan)
    tx = zero(unwrap(shapes.tx), home)
    tree, count = jax.tree.structure(shapes), len(plan.layouts)
    flat = wide_sources(
        lambda: [jnp.asarray(x) for x in jax.tree.leaves(adapters.take_apart(create(), where="jzero"))],
        count, lambda i: config.master_for(plan.layouts[i].dtype),
    )  # fmt: skip

    def born():
        leaves, masters = flat()
        parts = jax.tree.unflatten(tree, leaves)
        # inside the trace nothing moves yet: out_shardings place every leaf
        opt_state = convert_opt_state(
            parts, tx, home, place=lambda x, s: jax.lax.with_sharding_constraint(x, s), masters=masters
        )
        step = None if parts.step is None else jnp.asarray(parts.step, step_dtype(parts.step))
        return jax.tree.leaves(parts.replace(opt_state=opt_state, step=step))

    target = shapes.replace(opt_state=init_shapes(tx, shapes.params))
    out = target.replace(tx=zero(unwrap(shapes.tx), plan), apply_fn=wrapped_apply(shapes, plan))
    if config.in_files:
        return (*_born_into_files(flat, tree, out, home, rebuild), plan, target)
    layout = jax.tree.leaves(shardings_of(out, home))
    jitted = jax.jit(made_streamed(born, layout, plan) if config.streams else born, out_shardings=layout)

    def finish(leaves):
        parts = jax.tree.unflatten(jax.tree.structure(out), leaves)
        return rebuild(parts if home is plan else map_shardings(parts, plan, put))

    return jitted, finish, plan, target


def _born_into_files(flat, tree, out: Parts, home: Plan, rebuild) -> tuple[Any, Callable[[list[Any]], Any]]:
    """The creation of params and masters alone: the state is made from these, unit by unit, in its files."""
    out = out.replace(opt_state=None)
    count = len(jax.tree.leaves(out))

    def born():
        leaves, masters = flat()
        parts = jax.tree.unflatten(tree, leaves)
        step = None if parts.step is None else jnp.asarray(parts.step, step_dtype(parts.step))
        rows = zip(jax.tree.leaves(parts.params), masters, home.layouts, strict=True)
        wide = [pad(p if m is None else m, x.state_shape, x.state, home) for p, m, x in rows]
        return [*jax.tree.leaves(parts.replace(opt_state=None, step=step)), *wide]

    layout = [*jax.tree.leaves(shardings_of(out, home)), *(home.sharding(x.state) for x in home.layouts)]

    def finish(leaves):
        parts = jax.tree.unflatten(jax.tree.structure(out), leaves[:count])
        plan = out.tx.init.plan
        state = fresh_held(leaves[count:], out.tx)
        return rebuild(map_shardings(parts, plan, put).replace(opt_state=state))

    return jax.jit(born, out_shardings=layout), finish


def _home(plan: Plan) -> Plan:
    """The plan by which all leaves are born: on the host mesh where their state lives there."""
    if not plan.config.updates_outside or not all(isinstance(d, jax.Device) for d in plan.mesh.devices.flat):
        return plan
    return plan.home


def trace_creator(create) -> tuple[Parts, Callable[[Parts], Any], dict[tuple[str, ...], int | None]]:
    """The shapes of what a creation function returns, how to put such a state together, and its stacks of layers."""
    box: list[Any] = []

    def run():
        state = create()
        parts = adapters.take_apart(
            state, where=f"jzero: the creation function {getattr(create, '__name__', '')}".rstrip()
        )
        box[:] = [jax.tree.structure(parts), adapters.rebuilder(state)]
        return jax.tree.leaves(parts)

    jitted = jax.jit(run)
    leaves = jitted.eval_shape()
    parts = jax.tree.unflatten(box[0], leaves)
    flat = jax.tree_util.tree_leaves_with_path(parts.params)
    dims = stacked_by_scan(
        jitted.trace().jaxpr.jaxpr, len(flat)
    )  # the trace of `eval_shape`, not another one
    stacks: dict[tuple[str, ...], int | None] = {
        path_keys(k): d for (k, _), d in zip(flat, dims, strict=True) if d is not None
    }
    return parts, box[1], stacks
