"""The plan of a state in parts, and the sharding of every leaf of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jzero.config import ZeroConfig
from jzero.core.errors import counted, human_bytes, listing, typed_shape
from jzero.core.types import PyTree
from jzero.flax.adapters import Parts, is_train_state
from jzero.flax.conversion import as_array
from jzero.gather.transform import GatherOnUse
from jzero.layout.describe import leaf_bytes
from jzero.layout.given_layouts import Given
from jzero.layout.leaf_rule import Frozen, path_name
from jzero.layout.placement import device_type
from jzero.layout.specs import P, entry_axes, joined, make_spec, named_axes, whole_mesh
from jzero.optim import check_explicit, is_wrapped, unwrap
from jzero.sharding import Plan, plan_for
from jzero.update.frozen_params import kept_leaves


def plan_of_parts(
    parts: Parts, stacks: Mapping[tuple[str, ...], int | None] | None = None, *,
    config: ZeroConfig, mesh: Mesh | None, param_specs: PyTree, scan_axes: Mapping[str, int | None] | None,
) -> Plan:  # fmt: skip
    """The plan for a state. If it was sharded before, it brings its layouts, without the ZeRO axis, and its stacks."""
    _check_single(parts)
    if is_wrapped(parts.tx):
        stacks = {x.keys: x.scan_dim for x in parts.tx.init.plan.layouts if not x.guessed}
    if is_train_state(param_specs):
        param_specs = param_specs.params
    if param_specs is None and is_wrapped(parts.tx):
        old = parts.tx.init.plan
        apart = [s and s.state for s in parts.specs or [None] * len(old.layouts)]
        given = [Given(x.used, state) for x, state in zip(old.layouts, apart, strict=True)]
        param_specs = jax.tree.structure(parts.params).unflatten(given)
        mesh = old.mesh if mesh is None else mesh
    if param_specs is None and parts.specs is not None and any(s is not None for s in parts.specs):
        param_specs = jax.tree.structure(parts.params).unflatten(parts.specs)
    plan = plan_for(
        parts.params, config, mesh=mesh, param_specs=param_specs, scan_axes=scan_axes, stacks=stacks or {},
        frozen=_frozen(parts), trained_tree=parts.trained_tree,
    )  # fmt: skip
    return dataclasses.replace(plan, notes=(*plan.notes, *_notes_on_rest(parts.rest, plan)))


def _frozen(parts: Parts) -> list[Frozen | None]:
    """For each param why it is not trained."""
    kept = iter(kept_leaves(unwrap(parts.tx), jax.tree.map(device_type, parts.taken)))
    trained = parts.trained or [True] * len(jax.tree.leaves(parts.params))
    return [Frozen.APART if not t else Frozen.KEPT if next(kept) else None for t in trained]


def _check_single(parts: Parts) -> None:
    """Raises ValueError for several states in one: each leaf then has a leading dim that no optimizer knows."""
    shape = np.shape(parts.step)
    if parts.step is None or shape == ():
        return
    raise ValueError(
        f"jzero: this is {shape[0]} states in one: its step has the shape {shape}, as jax.vmap or "
        "flax.jax_utils.replicate make it. Of a replicated state pass one (flax.jax_utils.unreplicate). For an "
        "ensemble make one state of stacked params, with one step counter: params = jax.vmap(init)(keys), then "
        "TrainState.create(..., params=params, tx=tx)."
    )


def _notes_on_rest(rest: PyTree, plan: Plan) -> list[str]:
    """Notes on arrays outside of the params that stay whole on every device: batch statistics, a frozen NNX base."""
    named = zip(jax.tree_util.tree_leaves_with_path(rest), plan.copy_specs(rest), strict=True)
    whole = [(path_name(k), leaf_bytes(as_array(x))) for (k, x), spec in named if spec == P()]
    if not whole or plan.n == 1 or not plan.config.row.state:
        return []
    count, size = len(whole), human_bytes(sum(b for _, b in whole))
    largest = ", ".join(name for name, _ in sorted(whole, key=lambda row: -row[1])[:3])
    largest += f" and {count - 3} more" if count > 3 else ""
    stay = "stays" if count == 1 else "stay"
    return [f"{counted(count, 'array')} outside of the params {stay} whole on every device, {size} in all ({largest})."]


def wrapped_apply(parts: Parts, plan: Plan) -> GatherOnUse | None:
    """`apply_fn` with gather on use; None for a state without one."""
    plain = parts.apply_fn.fn if isinstance(parts.apply_fn, GatherOnUse) else parts.apply_fn
    return None if plain is None else GatherOnUse(plain, plan)


def shardings_of(parts: Parts, plan: Plan) -> Parts:
    """A sharding for every leaf."""

    rest, tree = jax.tree.flatten(parts.rest)
    specs = plan.copy_specs(parts.rest)
    return parts.replace(
        params=jax.tree.structure(parts.params).unflatten([plan.param_sharding(x) for x in plan.layouts]),
        opt_state=jax.tree.structure(parts.opt_state).unflatten(plan.state_shardings(parts.opt_state)),
        step=None if parts.step is None else plan.sharding(P()),
        rest=tree.unflatten([_own_sharding(x, plan) or plan.sharding(s) for x, s in zip(rest, specs, strict=True)]),
    )


def _own_sharding(leaf: Any, plan: Plan) -> NamedSharding | None:
    """The layout that the user gave to a leaf of the rest, if it is on this mesh."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or whole_mesh(sharding.mesh) != plan.mesh:
        return None
    spec = make_spec([joined(entry_axes(e), plan.mesh) for e in sharding.spec])
    return None if set(named_axes(spec)) - {*plan.mesh.shape, *plan.array_mesh.shape} else plan.sharding(spec)


def map_shardings(parts: Parts, plan: Plan, place: Callable[[Any, NamedSharding], Any]) -> Parts:
    """`place(leaf, sharding)` for every leaf of a state."""
    return jax.tree.map(place, parts, shardings_of(parts, plan))


def is_real(plan: Plan) -> bool:
    """False for the compile-only devices of a pod."""
    return all(isinstance(d, jax.Device) for d in plan.mesh.devices.flat)


def check_placeable(plan: Plan) -> None:
    """Raises if no array can be placed by this plan: its devices are compile-only, or not the context's."""
    if not is_real(plan):
        raise TypeError(
            "jzero.shard: this mesh is of compile-only devices (jzero.pod); no array can lie there. Use "
            "jzero.abstract(state, ..., mesh=mesh) and pod.compile(step, state, batch)."
        )
    check_explicit(plan)


def check_devices(parts: Parts, plan: Plan) -> None:
    """Raises ValueError if arrays of a plain state are committed to devices outside of the mesh."""
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
            f"jzero.shard: {counted(len(bad), 'array is', 'arrays are')} committed to devices that are not in the mesh "
            f"of {len(mesh)}:\n"
            f"{listing(bad)}\nPass a mesh with these devices, or move the state first: jax.device_get(state)."
        )


def step_dtype(step: Any) -> np.dtype:
    """The dtype of a step counter; int32 for a Python number."""
    return step.dtype if hasattr(step, "dtype") else np.dtype(np.int32)


def step_array(step: Any) -> jax.Array | None:
    """A step counter as an array; None for a state without one."""
    return None if step is None else jnp.asarray(step, step_dtype(step))
