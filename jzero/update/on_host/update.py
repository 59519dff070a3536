"""`tx.init` and `tx.update` where the update runs outside of the compiled program.

[Note: which params were replaced]
A param that the user has replaced is copied into its master. Comparing all of them would bring every param to the host
in every step. The arrays that the last update returned need no comparison; any others (the step returned them through
`jit`, say) are compared.

[Note: one step late]
With `delay=1` an update returns what the one before it computed, and runs in a thread beside the next forward and
backward pass. What is resolved for a checkpoint has waited for the thread, and its params are those of the masters.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jzero.comm import comm_of
from jzero.core.jaxprs import is_tracer
from jzero.layout.host_mesh import moved
from jzero.layout.leaf_rule import Layout
from jzero.layout.placement import HOST, memory_kind
from jzero.layout.specs import P
from jzero.sharding import Plan
from jzero.update.on_host.disk_tier import DiskTier, joined
from jzero.update.on_host.handles import Handle, Held, held_in
from jzero.update.on_host.store import Chain, Store, on_devices, on_host, param_on_host
from jzero.update.padded_state import cut, pad
from jzero.update.zero_state import ZeroState

MOVE = (
    "the update runs outside of the compiled program with {option}, and this one is being traced. Two lines move:\n"
    "    grads = gradients(state, batch)                # jitted: it returns what jax.grad gives\n"
    "    state = state.apply_gradients(grads=grads)     # not jitted; NNX: optimizer.update(model, grads)"
)


def check_outside(leaves: Sequence[Any], plan: Plan) -> None:
    """Raises TypeError where an update outside of the program is traced, with the two lines to move."""
    if any(is_tracer(x) for x in leaves):
        tier = plan.config.tier
        option = 'Offload(tier="disk")' if tier is not None and tier.tier == "disk" else 'Offload(update="host")'
        raise TypeError(f"jzero.zero: {MOVE.format(option=option)}")


def with_handles(full: Any, params: Any, chain: Chain, generation: int = 0) -> ZeroState:
    """A state whose large arrays are handles.

    Args:
      full: with arrays on the host mesh, or abstract: then no store is behind the handles.
      params: what a master starts as where `full` has none: that of a param of its dtype.
      chain: the transformation.
      generation: how many updates it has had.
    """
    inner, masters = (full.inner, full.master) if isinstance(full, ZeroState) else (full, None)
    given, known = jax.tree.leaves(params), [None] * len(chain.masters)
    known = known if masters is None else chain.plan.tree.flatten_up_to(masters)
    abstract = any(isinstance(x, jax.ShapeDtypeStruct) for x in (*given, *jax.tree.leaves(inner)))
    rows = zip(chain.masters, known, given, chain.plan.layouts, strict=True)
    if abstract:
        leaves = chain.leaves
    else:
        own = [param_on_host(p, x, chain.plan) if k is None else k for m, k, p, x in rows if m is not None]
        leaves = [*jax.tree.leaves(inner), *own]
    store = None if abstract else _new_store(chain, leaves, generation)
    return state_of(chain, [None if k else x for x, k in zip(leaves, chain.kept, strict=True)], store)


def state_of(chain: Chain, own: Sequence[Any], running: Any) -> ZeroState:
    """The user's state: `own` are the leaves that are no handles, None in the place of the others."""
    tier = chain.plan.config.tier
    place = "disk" if tier is not None and tier.tier == "disk" else "host"
    rows = zip(chain.leaves, own, chain.kept, strict=True)
    handles = [Handle(tuple(x.shape), x.dtype.name, place) if k else mine for x, mine, k in rows]
    tree = jax.tree.structure(chain.inner)
    masters = iter(handles[tree.num_leaves :])
    named = [None if m is None else next(masters) for m in chain.masters]
    total = sum(h.nbytes for h in handles if isinstance(h, Handle))
    where = chain.plan.sharding(P())
    if running is None:
        number: Any = jax.ShapeDtypeStruct((), np.int32, sharding=where)
    else:
        number = jax.device_put(jnp.int32(running.generation), where)
    return ZeroState(tree.unflatten(handles[: tree.num_leaves]), Held(number, named, total, running))


def reopened(chain: Chain, snapshot: Path | None = None) -> tuple[ZeroState, list[Any]]:
    """The state in the files of an earlier run, or of a snapshot, and the params, None where they have no master."""
    if snapshot is not None:
        DiskTier.copy(chain, snapshot)
    tier, small = DiskTier.open(chain)
    own = [None if k else x for k, x in zip(chain.kept, small, strict=True)]
    found: dict[int, list[Any]] = {}
    plan, at = chain.plan, {leaf: i for i, leaf in chain.master_leaves.items()}
    for leaf, x, chunk in tier.every(set(at)):
        value = x.astype(plan.layouts[at[leaf]].dtype)
        found.setdefault(at[leaf], []).append((moved(value, _on_plan(value, plan), copy=True), chunk))
    return state_of(chain, own, Running(tier)), landed(found, plan)


def _new_store(chain: Chain, leaves: Sequence[Any], generation: int) -> Any:
    tier = chain.plan.config.tier
    if tier is None or tier.tier != "disk":
        return Running(Store(chain, leaves, generation))

    def contents(units, unit):
        return [units.piece(leaves[units.kept[s]], unit.group.chunk) for s, _ in unit.kept]

    return Running(DiskTier.create(chain, contents, leaves))


def resolved(state: ZeroState, params: Any, chain: Chain) -> tuple[Any, Any]:
    """The whole state, its arrays on the host mesh, and the params that belong to it.

    An abstract state gives an abstract one.
    """
    held = held_in(state)
    assert held is not None
    running = _running(held)
    tree = jax.tree.structure(chain.inner)
    if running is None:
        leaves = chain.placed_leaves
    else:
        running.check(held)
        params, small = running.settled(params)
        own = jax.tree.leaves(state.inner) if small is None else [x for x in small if x is not None]
        mine = iter(own)
        leaves = [next(mine) if x is None else x for x in running.store.leaves()]
    masters = iter(leaves[tree.num_leaves :])
    found = [None if m is None else next(masters) for m in chain.masters]
    inner = tree.unflatten(leaves[: tree.num_leaves])
    rows = zip(found, chain.plan.layouts, strict=True)
    wide = [m if m is not None and m.dtype != x.dtype else None for m, x in rows]  # others are their params
    if all(m is None for m in wide):
        return inner, params
    return ZeroState(inner, chain.plan.tree.unflatten(wide)), params


def _running(held: Held) -> Any:
    if held.is_lost:
        raise RuntimeError(
            "jzero: the masters and moments of this state are gone, or not known: for a while no state that held them "
            "was alive, or a program compiled for an abstract state returned it, and there are several states of its "
            "kind. Keep the state itself, and not only its leaves and their structure."
        )
    return held.store


def update_held(grads: Sequence[Any], state: Any, params: Sequence[Any], extra: Any) -> tuple[list, ZeroState]:
    """The new params, None where they stay, and the new state of one with handles.

    Raises:
      TypeError: a state without handles, or an abstract one.
      ValueError: an older state.
    """
    held = held_in(state)
    running = None if held is None else _running(held)
    if running is None:
        raise TypeError(
            "jzero.zero: update: this optimizer state has no handles to arrays on the host. Pass what tx.init(params), "
            "jzero.shard or the last update returned."
        )
    return running.update(grads, state, params, extra)


class Running:
    """A store in use: its updates in order, each at its generation, at most one of them under way."""

    place = property(lambda self: self.store.place)

    def __init__(self, store: Any):
        self.store = store
        self.chain: Chain = store.chain
        self.generation = store.generation  # of what the user holds
        tier = self.chain.plan.config.tier
        self.delay = 0 if tier is None else tier.delay
        self._last: list[Any] = []  # weak references to the params that the last update returned
        self._pending: Future | None = None
        self._thread = ThreadPoolExecutor(1, "jzero-update") if self.delay else None

    def check(self, held: Held) -> None:
        """Raises ValueError for a state that is not the last one: its arrays were updated in place."""
        at = int(np.asarray(held.generation))
        if at != self.generation:
            raise ValueError(
                f"jzero: this optimizer state is of generation {at}, and its masters and moments are of generation "
                f"{self.generation}: they live outside of the device and are updated in place. "
                "Go on with the state that the last update returned, or restore a checkpoint: "
                "jzero.checkpoint.restore(path, state)."
            )

    def update(
        self, grads: Sequence[Any], state: ZeroState, params: Sequence[Any], extra: Any
    ) -> tuple[list, ZeroState]:
        """The new params, None where they stay, and the new state."""
        held = held_in(state)
        assert held is not None
        self.check(held)
        leaves = jax.tree.leaves(state.inner)
        if not self.delay:
            news, small = self._step(grads, leaves, params, self._changed(params), extra)
        else:
            assert self._thread is not None
            changed = self._changed(params)
            done = self._pending.result() if self._pending is not None else ([None] * len(params), None)
            if self.chain.plan.config.in_files and jax.process_count() > 1:
                # a process that is a commit behind the others needs the generation that they would overwrite now
                multihost_utils.sync_global_devices("jzero: the last update is in the files of all processes")
            news, small = [None if c else n for n, c in zip(done[0], changed, strict=True)], done[1]
            own = leaves if small is None else [x for x in small if x is not None]
            self._pending = self._thread.submit(self._step, list(grads), own, list(params), changed, extra)
        self.generation += 1
        self._last = [_weak(n if n is not None else p) for n, p in zip(news, params, strict=True)]
        tree = jax.tree.structure(self.chain.inner)
        if small is not None:
            leaves = [x for x in small if x is not None]
        mine, handles = iter(leaves), jax.tree.leaves(state.inner, is_leaf=lambda x: isinstance(x, Handle))
        inner = tree.unflatten([x if isinstance(x, Handle) else next(mine) for x in handles])
        number = jax.device_put(jnp.int32(self.generation), self.chain.plan.sharding(P()))
        return news, ZeroState(inner, Held(number, held.masters, held.total, self))

    def snapshot(self, path: Any) -> str:
        """A copy of the files, once the update that is under way is in them; how it was made."""
        if self._pending is not None:
            self._pending.result()
        self.store.check_whole()
        return self.store.disk.snapshot(path)

    def settled(self, params: Any) -> tuple[Any, list | None]:
        """Waits for an update that is under way: params that belong to the masters, and the small leaves."""
        if self._pending is None:
            return params, None
        news, small = self._pending.result()
        leaves, tree = jax.tree.flatten(params)
        return tree.unflatten([p if n is None else n for p, n in zip(leaves, news, strict=True)]), small

    def _step(
        self, grads: Sequence[Any], leaves: list, params: Sequence[Any], changed: Sequence[bool], extra: Any
    ) -> tuple[list, list]:
        plan, layouts = self.chain.plan, self.chain.plan.layouts
        copy = plan.home.mesh == plan.mesh
        targets = [plan.home.sharding(x.state) for x in layouts]
        shards = on_shards(grads, plan)
        hosted = [None if g is None else moved(g, s, copy=copy) for g, s in zip(shards, targets, strict=True)]
        del shards
        mine = iter(leaves)
        small = [None if k else on_host(next(mine), plan) for k in self.chain.kept]
        asked = [functools.partial(self._param, p, x) for p, x in zip(params, layouts, strict=True)]
        extra = jax.tree.map(lambda x: on_host(x, plan), extra)
        found: dict[int, Any] = {}
        step = self.store.update(asked, changed, hosted, small, extra)
        while True:
            try:
                i, (value, chunk) = next(step)
            except StopIteration as end:
                small, tiny = end.value
                break
            found.setdefault(i, []).append((moved(value, _on_plan(value, plan)), chunk))
            if chunk is not None:
                found[i] = _whole_once_complete(found[i], layouts[i], plan)
        for i, value in tiny.items():
            found[i] = [(moved(value, plan.sharding(layouts[i].state)), None)]
        news = landed(found, plan)
        return news, [
            None if x is None else on_devices(x, spec, plan)
            for x, spec in zip(small, self.chain.specs, strict=True)
        ]

    def _changed(self, params: Sequence[Any]) -> list[bool]:
        """See [Note: which params were replaced]."""
        if not self._last:
            return [True] * len(params)
        return [last() is not p for p, last in zip(params, self._last, strict=True)]

    def _param(self, param, x: Layout):
        return param_on_host(param, x, self.chain.plan)


def _on_plan(value: jax.Array, plan: Plan):
    sharding: Any = value.sharding
    split = len(sharding.mesh.shape) == len(plan.array_mesh.shape)
    return jax.sharding.NamedSharding(plan.array_mesh if split else plan.mesh, sharding.spec)


def _weak(x: Any) -> Any:
    try:
        return weakref.ref(x)
    except TypeError:
        return lambda: None


def on_shards(grads: Sequence[Any], plan: Plan) -> list[Any]:
    """Gradients on the shards of their state, in stored shapes; those that lie there already as they are."""
    away = [
        i for i, (g, x) in enumerate(zip(grads, plan.layouts, strict=True))
        if g is not None and memory_kind(g) != HOST
        and not (x.state_shape == g.shape and g.sharding.is_equivalent_to(plan.sharding(x.state), g.ndim))
    ]  # fmt: skip
    if not away:
        return list(grads)
    layouts = tuple(plan.layouts[i] for i in away)
    out = dict(zip(away, _reduce(plan, layouts)([grads[i] for i in away]), strict=True))
    return [out.get(i, g) for i, g in enumerate(grads)]


@functools.lru_cache(maxsize=64)
def _reduce(plan: Plan, layouts: tuple[Layout, ...]):
    comm = comm_of(plan).gradients

    def reduce(grads):
        own = [comm.one_at_update(g, x) for g, x in zip(grads, layouts, strict=True)]
        return [pad(g, x.state_shape, x.state, plan) for g, x in zip(own, layouts, strict=True)]

    return jax.jit(reduce, out_shardings=[plan.sharding(x.state) for x in layouts])


def _whole_once_complete(pieces: list[Any], x: Layout, plan: Plan) -> list[Any]:
    """The chunks of a param, or all of it once they are there: both of all params at once would be twice as much."""
    if sum(math.prod(chunk.shape) for _, chunk in pieces) < math.prod(pieces[0][1].view):
        return pieces
    leaf = jax.ShapeDtypeStruct(x.state_shape, x.dtype)
    return [(joined(pieces, leaf, plan.sharding(x.state)), None)]


def landed(found: dict[int, list[Any]], plan: Plan) -> list[Any]:
    """New params in their stored layouts, from their shards, which may be in chunks; None where there are none."""
    out: list[Any] = [None] * len(plan.layouts)
    rest = {}
    for i, pieces in found.items():
        x = plan.layouts[i]
        (value, chunk), *more = pieces
        same = not more and chunk is None and x.stored == x.state and tuple(value.shape) == x.shape
        if same and not plan.lives_on_host(x):
            out[i] = value
        else:
            rest[i] = [v for v, _ in pieces], tuple(c for _, c in pieces)
    if rest:
        key = tuple((i, chunks) for i, (_, chunks) in rest.items())
        news = _land(plan, key)([values for values, _ in rest.values()])
        for i, value in zip(rest, news, strict=True):
            out[i] = value
    return out


@functools.lru_cache(maxsize=64)
def _land(plan: Plan, rows: tuple[Any, ...]):
    layouts = [plan.layouts[i] for i, _ in rows]

    def land(values):
        gather = comm_of(plan).updates
        with jax.named_scope(gather.SCOPE):
            parts = zip(values, rows, layouts, strict=True)
            return [_stored(gather, v, chunks, x, plan) for v, (_, chunks), x in parts]

    return jax.jit(land, out_shardings=[plan.param_sharding(x) for x in layouts])


def _stored(gather, values: list, chunks: tuple[Any, ...], x: Layout, plan: Plan):
    if len(values) == 1 and chunks[0] is None:
        (whole,) = values
    else:
        whole = jnp.zeros(chunks[0].view, x.dtype)
        for value, chunk in zip(values, chunks, strict=True):
            whole = jax.lax.dynamic_update_slice(whole, value, chunk.start)
        whole = plan.constrain(jnp.reshape(whole, x.state_shape), x.state)
    return plan.constrain(gather(cut(whole, x.shape, x.state, plan), x), x.stored)
