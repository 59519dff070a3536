"""A state that is born sharded: the function that creates it runs so that each device makes its own shards alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jzero.config import ZeroConfig
from jzero.core.dependence import wide_sources
from jzero.flax import adapters
from jzero.flax.adapters import Parts
from jzero.flax.conversion import convert_opt_state
from jzero.flax.state_plan import check_real, plan_of_parts, shardings_of, step_dtype, wrapped_apply
from jzero.layout.layer_stacks import stacked_by_scan
from jzero.layout.leaf_rule import path_keys
from jzero.layout.placement import check_same_program
from jzero.offload import check_host_memory, made_streamed
from jzero.optim import init_shapes, unwrap, zero
from jzero.sharding import Plan


def checked_creator(create: Callable, where: str) -> Callable[[], Any]:
    """The function itself.

    Raises:
      TypeError: it needs arguments.
    """
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
    born, finish, plan, shapes = _creation(create, config, mesh, param_specs, scan_axes)
    check_real(plan)
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
    shapes, rebuild, stacks = trace_creator(create)
    plan = plan_of_parts(shapes, config, mesh, param_specs, scan_axes, stacks)
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
        step = None if parts.step is None else jnp.asarray(parts.step, step_dtype(parts.step))
        return jax.tree.leaves(parts.replace(opt_state=opt_state, step=step))

    target = shapes.replace(opt_state=init_shapes(tx, shapes.params))
    out = target.replace(tx=tx, apply_fn=wrapped_apply(shapes, plan))
    layout = jax.tree.leaves(shardings_of(out, plan))
    jitted = jax.jit(
        born if config.offload is None else made_streamed(born, layout, plan), out_shardings=layout
    )
    return jitted, lambda leaves: rebuild(jax.tree.unflatten(jax.tree.structure(out), leaves)), plan, target


def trace_creator(create) -> tuple[Parts, Callable[[Parts], Any], dict[tuple[str, ...], int | None]]:
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
