"""`tx.init` and `tx.update` where the update runs outside of the compiled program."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jzero.core.jaxprs import is_tracer
from jzero.core.types import PyTree
from jzero.layout.host_mesh import moved
from jzero.layout.specs import P
from jzero.sharding import Plan
from jzero.update.on_host.chain import Chain
from jzero.update.on_host.disk_tier import DiskTier
from jzero.update.on_host.handles import Handle, Held, held_in
from jzero.update.on_host.host_arrays import Piece, on_plan, param_on_host
from jzero.update.on_host.landing import landed
from jzero.update.on_host.running import Running
from jzero.update.on_host.store import Store
from jzero.update.zero_state import ZeroState

MOVE = (
    "the update runs outside of the compiled program with {option}, and this one is being traced. Two lines move:\n"
    "    grads = gradients(state, batch)                # jitted: it returns what jax.grad gives\n"
    "    state = state.apply_gradients(grads=grads)     # not jitted; NNX: optimizer.update(model, grads)"
)


def check_outside(leaves: Sequence[jax.Array], plan: Plan) -> None:
    """Raises TypeError where an update outside of the program is traced, with the two lines to move."""
    if any(is_tracer(x) for x in leaves):
        option = 'Offload(tier="disk")' if plan.config.in_files else 'Offload(update="host")'
        raise TypeError(f"jzero.zero: {MOVE.format(option=option)}")


def with_handles(full: Any, params: PyTree, chain: Chain, *, step: jax.Array | int | None = None) -> ZeroState:
    """A state whose large arrays are handles.

    Args:
      full: with arrays on the host mesh, or abstract: then no store is behind the handles.
      params: a master that `full` lacks (one in the dtype of its param) starts from its param.
      chain: the transformation.
      step: of the train state, which files keep; None: 0.
    """
    inner, masters, count = full[:3] if isinstance(full, ZeroState) else (full, None, None)
    given, known = jax.tree.leaves(params), [None] * len(chain.masters)
    known = known if masters is None else chain.plan.tree.flatten_up_to(masters)
    abstract = any(isinstance(x, jax.ShapeDtypeStruct) for x in (*given, *jax.tree.leaves(inner)))
    rows = zip(chain.masters, known, given, chain.plan.layouts, strict=True)
    if abstract:
        leaves = chain.leaves
    else:
        own = [param_on_host(p, x, chain.plan) if k is None else k for m, k, p, x in rows if m is not None]
        leaves = [*jax.tree.leaves(inner), *own]
    updates = 0 if count is None or abstract else int(count)
    store = None if abstract else _new_store(chain, leaves, step, updates)
    return state_of(chain, leaves, store)


def state_of(chain: Chain, own: Sequence[jax.Array | None], running: Running | None) -> ZeroState:
    """The user's state: handles for the leaves that are kept outside, the others from `own`."""
    place = "disk" if chain.plan.config.in_files else "host"
    rows = zip(chain.leaves, own, chain.kept, strict=True)
    handles = [Handle(tuple(x.shape), x.dtype.name, place) if k else mine for x, mine, k in rows]
    inner, masters = chain.parts(handles)
    total = sum(h.nbytes for h in handles if isinstance(h, Handle))
    stamp: Any = jax.ShapeDtypeStruct((2,), np.int32, sharding=chain.plan.sharding(P()))
    if running is not None:
        stamp = running.stamp()
    return ZeroState(inner, Held(stamp, masters, total, running))


def reopened(chain: Chain, snapshot: Path | None = None) -> tuple[ZeroState, list[jax.Array | None], int]:
    """The state in the files of an earlier run, or of a snapshot, the params (None without a master), and the step."""
    if snapshot is not None:
        DiskTier.copy(chain, snapshot)
    tier, small = DiskTier.open(chain)
    found: dict[int, list[Piece]] = {}
    plan, at = chain.plan, {leaf: i for i, leaf in chain.master_leaves.items()}
    for leaf, x, chunk in tier.every(set(at)):
        value = x.astype(plan.layouts[at[leaf]].dtype)
        found.setdefault(at[leaf], []).append((moved(value, on_plan(value, plan), copy=True), chunk))
    return state_of(chain, small, Running(tier, tier.train_step)), landed(found, plan), tier.train_step


def _new_store(chain: Chain, leaves: Sequence[jax.Array], step: Any, updates: int) -> Running:
    if not chain.plan.config.in_files:
        return Running(Store(chain, leaves), updates)

    def contents(units, unit):
        return [units.piece(leaves[units.kept[s]], unit.group.chunk) for s, _ in unit.kept]

    return Running(DiskTier.create(chain, contents, leaves, step=step), updates)


def resolved(state: ZeroState, params: PyTree, chain: Chain) -> tuple[Any, Any]:
    """The whole state, its arrays on the host mesh, and the params that belong to it.

    An abstract state gives an abstract one.
    """
    held = held_in(state)
    assert held is not None
    running = held.store
    if running is None:
        leaves = chain.placed_leaves
    else:
        running.check(held)
        params, own = running.settled(params, jax.tree.leaves(state.inner))
        mine = iter(own)
        leaves = [next(mine) if x is None else x for x in running.store.leaves()]
    inner, masters = chain.parts(leaves)
    rows = zip(masters, chain.plan.layouts, strict=True)
    wide = [m if m is not None and m.dtype != x.dtype else None for m, x in rows]  # others are their params
    if all(m is None for m in wide) and not chain.counts:
        return inner, params
    where, count = chain.plan.sharding(P()), None
    if chain.counts:
        abstract = jax.ShapeDtypeStruct((), np.int32, sharding=where)
        count = abstract if running is None else jax.device_put(jnp.int32(running.updates), where)
    return ZeroState(inner, chain.plan.tree.unflatten(wide), count), params


def update_held(
    grads: Sequence[jax.Array], state: PyTree, params: Sequence[jax.Array], extra: PyTree
) -> tuple[list, ZeroState]:
    """The new params, None where they stay, and the new state of one with handles.

    Raises:
      TypeError: a state without handles, or an abstract one.
      ValueError: an older state.
      RuntimeError: the arrays of the state are gone, or an update was broken off.
    """
    held = held_in(state)
    running = None if held is None else held.store
    if running is None:
        raise TypeError(
            "jzero.zero: update: this optimizer state is abstract, or has no handles to arrays outside of the device. "
            "Pass what tx.init(params), jzero.shard or the last update returned."
        )
    return running.update(grads, state, params, extra)
