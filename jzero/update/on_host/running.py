"""A store in use: updates in their order, what the user has replaced, and updates that are one step late.

[Note: which params were replaced]
A param that the user has replaced is copied into its master. It is recognized by its values: a jitted function returns
equal params as new arrays, and with NNX it always does. The arrays that the last update returned need no comparison,
which would bring every param to the host in every step; any others are compared with the cast of their masters.

[Note: one step late]
With `delay=1` an update returns what the one before it computed, and runs in a thread beside the next forward and
backward pass. What the user brings back is then older than the masters, so it is compared with what was handed out
last, of which the host keeps a copy. Values that differ are the user's, all others get the update that has finished;
this holds for hyper-parameters in the state too. The thread reads nothing that the user holds and may donate:
gradients, params and small leaves are copied before it starts, and what it computed is copied when it is handed out.
What is resolved for a checkpoint has waited for the thread, and its params are those of the masters.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.typing import DTypeLike

from jzero.core.errors import is_numeric
from jzero.core.random_keys import by_data, data, is_key
from jzero.core.types import PyTree
from jzero.layout.host_mesh import moved
from jzero.layout.leaf_rule import path_name
from jzero.layout.specs import P
from jzero.update.on_host.chain import Chain, Constant
from jzero.update.on_host.handles import Held, held_in
from jzero.update.on_host.host_arrays import (
    Piece,
    differ,
    joined,
    on_devices,
    on_host,
    on_plan,
    others,
    param_on_host,
    to_host,
)
from jzero.update.on_host.landing import landed, on_shards, whole_once_complete
from jzero.update.on_host.store import RESTORE
from jzero.update.zero_state import ZeroState

_numbers = itertools.count(1)  # of stores; processes make them in the same order


class Running:
    """A store in use: its updates in order, each at its generation, at most one of them under way."""

    def __init__(self, store: Any, updates: int = 0):
        """`updates`: how many the state has had."""
        self.store, self.number = store, next(_numbers)
        self._before = updates - store.generation
        self.chain: Chain = store.chain
        self.generation = store.generation  # of what the user holds
        self.delay = self.chain.tier.delay
        self._last: list[Callable[[], Any]] = []  # weak references to the params that the last update returned
        self._handed: dict[int, jax.Array] = {}  # with `delay`: params with masters as the user has them, on the host
        self._handed_small: list[jax.Array] = []  # likewise the small leaves
        self._pending: Future | None = None
        self._lost = False  # the update under way has failed, and the user knows
        self._thread = ThreadPoolExecutor(1, "jzero-update") if self.delay else None

    @property
    def updates(self) -> int:
        """How many updates the state has had, including those before it came into this store."""
        return self._before + self.generation

    def stamp(self) -> jax.Array:
        """The stamp of a state of this generation, on the devices: the number of the store, and the generation."""
        return jax.device_put(np.array([self.number, self.generation], np.int32), self.chain.plan.sharding(P()))

    def check(self, held: Held) -> None:
        """Raises ValueError for a state that is not the last one: its arrays were updated in place."""
        at = held.generation
        if at != self.generation:
            raise ValueError(
                f"jzero: this optimizer state is of generation {at}, and its masters and moments are of generation "
                f"{self.generation}: they live outside of the device and are updated in place. "
                f"Go on with the state that the last update returned, or restore a checkpoint: {RESTORE}."
            )

    def update(
        self, grads: Sequence[jax.Array], state: ZeroState, params: Sequence[jax.Array], extra: PyTree
    ) -> tuple[list, ZeroState]:
        """The new params, None where they stay, and the new state."""
        held = held_in(state)
        assert held is not None
        self.check(held)
        leaves = self._small_on_host(jax.tree.leaves(state.inner))
        extra = self._extra_on_host({**extra, **self.chain.count(np.int32(self.updates))})
        if self.delay:
            news, small = self._late(grads, leaves, params, extra)
        else:
            asked = [functools.partial(self._param, i, p) for i, p in enumerate(params)]
            job = self._on_host(grads), leaves, asked, self._changed(params), extra
            found, _, small = self._step(*job)
            news = landed(found, self.chain.plan)
        self.generation += 1
        self._last = [_weak(n if n is not None else p) for n, p in zip(news, params, strict=True)]
        inner = jax.tree.structure(state.inner).unflatten(self._small_on_devices(small))
        return news, ZeroState(inner, Held(self.stamp(), held.masters, held.total, self))

    def snapshot(self, path: Any) -> str:
        """A copy of the files, once the update that is under way is in them; how it was made."""
        self._settle()
        return self.store.disk.snapshot(path)

    def _settle(self) -> None:
        """Waits for an update that is under way. Raises what it raised; RuntimeError where one was broken off."""
        if self._pending is not None:
            self._finished()
        self.store.check_whole()

    def not_in_files(self, params: PyTree, leaves: Sequence[jax.Array]) -> list[str]:
        """What the user has set since the last update: see [Note: which params were replaced].

        Args:
          params, leaves: of the user's state; `leaves` are the small ones.

        Returns:
          The names of params and of leaves of the optimizer state whose new values the files do not have.
        """
        self._settle()
        mine, flat = self._small_on_host(leaves), jax.tree.leaves(params)
        if self._pending is not None:
            _, values, _ = self._finished()
            replaced, small = set(self._replaced(flat, values)), self._handed_small
        else:
            changed, at = self._changed(flat), self.chain.master_leaves
            asked = {at[i]: functools.partial(self._param, i, flat[i]) for i in at if changed[i]}
            other = self.store.differing(asked)
            replaced, small = {i for i in at if at[i] in other}, self._small_on_host(self.store.small_leaves())
        rows = zip(self.chain.names, mine, small, strict=False)  # masters are not small
        return [self.chain.plan.layouts[i].name for i in sorted(replaced)] + [
            name for name, a, b in rows if a is not None and bool(differ(*map(data, (a, b))))
        ]

    def settled(self, params: PyTree, leaves: Sequence[jax.Array]) -> tuple[Any, list[jax.Array]]:
        """Waits for an update that is under way.

        Args:
          params, leaves: of the user's state; `leaves` are the small ones.

        Returns:
          Those that belong to the masters, with what the user has changed in them.
        """
        if self._pending is None:
            return params, list(leaves)
        _, values, small = self._finished()
        flat, tree = jax.tree.flatten(params)
        values = {**values, **self._replaced(flat, values)}
        news = landed({i: [(self._to_plan(x), None)] for i, x in values.items()}, self.chain.plan)
        small = self._given_small(self._small_on_host(leaves), small)
        params = tree.unflatten([p if n is None else n for p, n in zip(flat, news, strict=True)])
        return params, self._small_on_devices(small)

    def _late(
        self, grads: Sequence[jax.Array], leaves: list, params: Sequence[jax.Array], extra: PyTree
    ) -> tuple[list, list]:
        """Starts this update, and returns what the last one computed: see [Note: one step late]."""
        assert self._thread is not None
        plan, masters = self.chain.plan, self.chain.master_leaves
        if self._pending is None:
            found, values, small = {}, {i: self._param(i, params[i]) for i in masters}, leaves
            taken = values
        else:
            found, values, small = self._finished()
            if plan.config.in_files and jax.process_count() > 1:
                # a process that is a commit behind the others needs the generation that they would overwrite now
                multihost_utils.sync_global_devices("jzero: the last update is in the files of all processes")
            taken, small = self._replaced(params, values), self._given_small(leaves, small)
            found = {**found, **{i: [(self._to_plan(x), None)] for i, x in taken.items()}}
            values = {**values, **taken}
        news = landed(found, plan)
        hosted = self._on_host(grads)
        read = self.store.frozen_reads(hosted, extra)
        own = [taken[i] if i in taken else self._param(i, p) if i in read else None for i, p in enumerate(params)]
        asked = [lambda x=x: x for x in own]
        self._handed, self._handed_small = values, small
        changed = [i in taken for i in range(len(params))]
        self._pending = self._thread.submit(self._step, hosted, list(small), asked, changed, extra)
        return news, small

    def _finished(self) -> tuple[dict, dict, list]:
        """What the update under way has computed.

        Raises:
          Exception: what it raised; from the second time on RuntimeError, since its gradients are gone.
        """
        assert self._pending is not None
        try:
            return self._pending.result()
        except Exception as error:
            if not self._lost:
                self._lost = True
                raise
            remedy = f"Restore a checkpoint: {RESTORE}"
            if self.chain.plan.config.in_files and not self.store.broken:
                remedy = (
                    f"The files are of generation {self.store.generation}. Drop this state (del state), and go on from "
                    "them: jzero.checkpoint.restore(path, jzero.abstract(create, ...)), with the path of the Offload"
                )
            raise RuntimeError(
                f"jzero: with delay=1 the update of generation {self.store.generation} failed beside a later step "
                f"({type(error).__name__}: {error}), and its gradients are gone. {remedy}."
            ) from error

    def _replaced(self, params: Sequence[jax.Array], values: dict[int, jax.Array]) -> dict[int, jax.Array]:
        """The params that the user has replaced, on the host: their values, and the update's where they stayed."""
        out = {}
        for i, handed in self._handed.items():
            if self._last[i]() is params[i]:
                continue
            now = self._param(i, params[i])
            if bool(differ(now, handed)):
                out[i] = _theirs_or(now, handed, values[i])
        return out

    def _given_small(self, leaves: list, small: list) -> list:
        """Small leaves as the update made them, but for what the user has set."""
        rows = zip(leaves, self._handed_small, small, strict=True)
        return [None if x is None else _theirs_or(mine, handed, x) for mine, handed, x in rows]

    def _step(
        self, grads: list, small: list, asked: list, changed: Sequence[bool], extra: PyTree
    ) -> tuple[dict, dict, list]:
        """One update of the store, from arrays on the host.

        Returns:
          New params on the devices, by number; the same on the host, empty without `delay`; small leaves on the host.
        """
        plan, layouts = self.chain.plan, self.chain.plan.layouts
        found: dict[int, list[Piece]] = {}
        values: dict[int, list[Piece]] = {}
        with contextlib.closing(self.store.update(asked, changed, grads, small, extra)) as step:
            while True:
                try:
                    i, (value, chunk) = next(step)
                except StopIteration as end:
                    small, tiny = end.value
                    break
                found.setdefault(i, []).append((self._to_plan(value), chunk))
                if self.delay:
                    values.setdefault(i, []).append((value, chunk))
                if chunk is not None:
                    found[i] = whole_once_complete(found[i], layouts[i], plan)
        for i, value in tiny.items():
            found[i] = [(moved(value, plan.sharding(layouts[i].state), copy=self._copies), None)]
            values[i] = [(value, None)]
        return found, {i: self._whole(i, pieces) for i, pieces in values.items()} if self.delay else {}, small

    def _whole(self, i: int, pieces: list[Piece]) -> jax.Array:
        """A new param on the host, from its chunks."""
        plan = self.chain.plan
        return joined(pieces, plan.update_plan.sharding(plan.layouts[i].state))

    def _on_host(self, grads: Sequence[jax.Array]) -> list:
        """Gradients on their shards on the host, in memory of their own."""
        plan = self.chain.plan
        rows = zip(on_shards(grads, plan), plan.layouts, strict=True)
        return [None if g is None else to_host(g, x.state, plan) for g, x in rows]

    def _small_on_host(self, leaves: Sequence[jax.Array]) -> list:
        """The leaves that the user holds, in the dtypes of the chain; None in the place of those that are kept.

        Raises TypeError for one that was set in a dtype which that of the chain does not hold.
        """
        mine = iter(leaves)
        rows = zip(self.chain.leaves, self.chain.kept, self.chain.names, strict=True)
        return [None if k else _in_dtype(on_host(next(mine), self.chain.plan), x.dtype, name) for x, k, name in rows]

    def _small_on_devices(self, small: Sequence[jax.Array]) -> list:
        """The reverse."""
        rows = zip(small, self.chain.specs, strict=True)
        return [on_devices(x, spec, self.chain.plan) for x, spec in rows if x is not None]

    def _extra_on_host(self, extra: PyTree) -> Any:
        """Keyword arguments on every device of the host mesh; raises TypeError for what cannot be there."""

        def placed(path, x):
            if isinstance(x, (bool, str)):  # it decides what is traced
                return Constant(x)
            if is_numeric(x):
                return on_host(x, self.chain.plan)
            raise TypeError(
                f"jzero: the keyword argument {path_name(path)} of an update on the host must be an array, a number, a "
                f"bool or a string, not {type(x).__name__}. For an optimizer that calls a function of the params, as a "
                'line search does, leave out update="host" and tier="disk".'
            )

        return jax.tree_util.tree_map_with_path(placed, extra)

    def _to_plan(self, value: jax.Array) -> jax.Array:
        """A new param, or a chunk of it, on the devices."""
        return moved(value, on_plan(value, self.chain.plan), copy=self._copies)

    @property
    def _copies(self) -> bool:
        """True if new params must be copied: with `delay` their values stay on a host mesh that is the plan's own."""
        return bool(self.delay) and self.chain.plan.update_plan.mesh == self.chain.plan.mesh

    def _changed(self, params: Sequence[jax.Array]) -> list[bool]:
        """See [Note: which params were replaced]."""
        if not self._last:
            return [True] * len(params)
        return [last() is not p for p, last in zip(params, self._last, strict=True)]

    def _param(self, i: int, param):
        return param_on_host(param, self.chain.plan.layouts[i], self.chain.plan)


def _in_dtype(value: jax.Array, dtype: DTypeLike, name: str) -> jax.Array:
    if value.dtype == dtype:
        return value
    if is_key(value) or jnp.promote_types(value.dtype, dtype) != dtype:
        raise TypeError(
            f"jzero: {name} of the optimizer state has dtype {value.dtype}, and tx.init made it in {dtype}, which "
            f"does not hold every such value. Set it in {dtype}."
        )
    return value.astype(dtype)


def _theirs_or(mine: Any, handed: Any, new: Any) -> Any:
    """`new`, except where `mine` differs from what was handed out: there `mine`. Random keys too."""
    return by_data(_merged, mine, handed, new)


@jax.jit
def _merged(mine, handed, new):
    return jnp.where(others(mine, handed), mine, new)


def _weak(x: jax.Array | None) -> Callable[[], jax.Array | None]:
    try:
        return weakref.ref(x)
    except TypeError:
        return lambda: None
