"""Who keeps masters and moments outside of the device, and updates them unit by unit."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jzero.layout.host_mesh import moved
from jzero.layout.leaf_rule import Layout, path_name
from jzero.layout.placement import put
from jzero.layout.specs import P
from jzero.sharding import Plan
from jzero.stream.placement import DEVICE, Placement
from jzero.stream.schedule import Group
from jzero.update.moment_dtype import ROUNDING_COUNT
from jzero.update.on_host.units import Unit, Units, joined
from jzero.update.padded_state import cut, pad, pin_state
from jzero.update.sharded_update import ShardedUpdate, taken_over

RESTORE = "jzero.checkpoint.restore(path, jzero.abstract(create, ...))"
AHEAD = 2  # units that are dispatched before the new params of the first of them go to the device


@dataclasses.dataclass(frozen=True, eq=False)
class Chain:
    """The transformation as the host runs it.

    Attributes:
      plan: the user's; `plan.home` is the one on the host mesh.
      make: gives the transformation with its moments as they are stored, and the inner state as it knows it, abstract.
      inner: the inner state as it is stored, abstract.
      masters: the stored masters, abstract; None for a param that has none.
      counts: the update takes the number of updates as well: [Note: a count of steps] in `moment_dtype.py`.
    """

    plan: Plan
    make: Callable[[], tuple[Any, Any]]
    inner: Any
    masters: tuple[Any, ...]
    counts: bool = False

    def count(self, number: Any) -> dict[str, Any]:
        """The keyword argument with the number of updates, where the update takes it."""
        return {ROUNDING_COUNT: number} if self.counts else {}

    @functools.cached_property
    def leaves(self) -> list[Any]:
        """All leaves, abstract: those of the inner state, then the masters."""
        return [*jax.tree.leaves(self.inner), *(m for m in self.masters if m is not None)]

    @functools.cached_property
    def kept(self) -> list[bool]:
        """Which of the leaves are kept outside: small ones of the inner state stay with the user."""
        masters = sum(m is not None for m in self.masters)
        return [*self.plan.offloaded(self.inner), *[True] * masters]

    @functools.cached_property
    def names(self) -> list[str]:
        """The paths of the leaves; of a master that of its param."""
        inner = [path_name(k) for k, _ in jax.tree_util.tree_leaves_with_path(self.inner)]
        return [*inner, *(x.name for x, m in zip(self.plan.layouts, self.masters, strict=True) if m is not None)]

    @functools.cached_property
    def specs(self) -> list[Any]:
        """The layouts of the leaves."""
        masters = [x.state for m, x in zip(self.masters, self.plan.layouts, strict=True) if m is not None]
        return [*self.plan.state_specs(self.inner), *masters]

    @functools.cached_property
    def master_leaves(self) -> dict[int, int]:
        """For each param with a master, which leaf that is."""
        having = [i for i, m in enumerate(self.masters) if m is not None]
        first = len(jax.tree.leaves(self.inner))
        return {i: first + at for at, i in enumerate(having)}

    @property
    def placed_leaves(self) -> list[Any]:
        """All leaves, abstract, with the shardings that they have when they are not handles."""
        rows = zip(self.leaves, self.specs, self.kept, strict=True)
        return [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=(self.plan.home if k else self.plan).sharding(spec))
            for x, spec, k in rows
        ]

    def units(self, grads: Sequence[Any], extra: Any, most: int | None = None) -> Units:
        """The update cut into units.

        Args:
          grads: their types, None where a param has no gradient.
          extra: keyword arguments of the update, abstract.
          most: bytes of a unit.
        """
        home, layouts = self.plan.home, self.plan.layouts
        count = len(layouts)
        params = [
            None if m is not None else jax.ShapeDtypeStruct(x.state_shape, x.dtype)
            for m, x in zip(self.masters, layouts, strict=True)
        ]
        args, tree = jax.tree.flatten((params, list(grads), self.leaves, extra))
        lies = [self._lies(x, layout.state) for x, layout in zip(params, layouts, strict=True) if x is not None]
        wide = jnp.dtype("float32").itemsize  # sums of micro-batches are cut as gradients of the params' dtype are
        lies += [self._lies(g, x.state, wide) for g, x in zip(grads, layouts, strict=True) if g is not None]
        before = len(lies)
        rows = zip(self.leaves, self.specs, self.kept, strict=True)
        lies += [self._lies(x, spec) if kept else DEVICE for x, spec, kept in rows]
        lies += [DEVICE] * (len(args) - len(lies))
        rows = enumerate(zip(self.leaves, self.kept, strict=True))
        kept = {before + i: i for i, (x, k) in rows if k and x.size > 1}

        def fn(*flat):
            params, grads, leaves, extra = tree.unflatten(flat)
            news, leaves = self._updated(params, grads, leaves, extra)
            return [n for n in news if n is not None] + leaves

        def out_lies():
            news = [self._lies(m, x.state) for m, x in zip(self.masters, layouts, strict=True) if m is not None]
            state = [
                Placement(h.sharding, before + i) if h.sharding is not None else DEVICE
                for i, h in enumerate(lies[before : before + len(self.leaves)])
            ]
            return [*news, *state]

        assert len(grads) == count
        types = [
            x if h.sharding is None else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=h.sharding)
            for x, h in zip(args, lies, strict=True)
        ]
        return Units(fn, types, lies, out_lies, kept, home.sharding(P()), most=most)

    def wide(self, i: int, param: Any) -> jax.Array:
        """The initial master of a param that lies in its stored layout, for `initial`."""
        m, x = self.masters[i], self.plan.layouts[i]
        return param_on_host(param, x, self.plan).astype(x.dtype if m is None else m.dtype)

    @functools.cached_property
    def initial(self) -> Units:
        """What makes a new state of masters (of params, where a param has none), each in its stored shape."""
        home, layouts = self.plan.home, self.plan.layouts
        wide = [
            jax.ShapeDtypeStruct(x.state_shape, x.dtype if m is None else m.dtype)
            for m, x in zip(self.masters, layouts, strict=True)
        ]
        lies = [self._lies(w, x.state) for w, x in zip(wide, layouts, strict=True)]

        def fn(*wide):
            tx, _ = self.make()
            logical = [cut(w, x.shape, x.state, home) for w, x in zip(wide, layouts, strict=True)]
            inner = pin_state(tx.init(self.plan.tree.unflatten(logical)), home)
            masters = [w for w, m in zip(wide, self.masters, strict=True) if m is not None]
            return [*jax.tree.leaves(inner), *masters]

        rows = zip(self.leaves, self.specs, self.kept, strict=True)
        out_lies = [self._lies(x, spec) if kept else DEVICE for x, spec, kept in rows]
        return Units(fn, wide, lies, lambda: out_lies, {}, home.sharding(P()))

    def _lies(self, x: Any, spec, itemsize: int = 0) -> Placement:
        return DEVICE if x.size <= 1 else Placement(self.plan.home.sharding(spec), itemsize=itemsize)

    def _updated(self, params: list, grads: list, leaves: list, extra) -> tuple[list, list]:
        """New params as they are stored on shards, and the new leaves of the state."""
        home, layouts = self.plan.home, self.plan.layouts
        tree = jax.tree.structure(self.inner)
        inner, flat = tree.unflatten(leaves[: tree.num_leaves]), iter(leaves[tree.num_leaves :])
        masters = [None if m is None else next(flat) for m in self.masters]
        tx, logical = self.make()
        step = ShardedUpdate(tx, home, lambda: logical, self.plan.tree, extra)
        inner, masters = step.cut(inner, masters)
        rows = list(zip(params, masters, grads, layouts, strict=True))
        wide = [cut(p, x.shape, x.state, home) if m is None else m for p, m, _, x in rows]
        grads = [g if g is None else cut(g, x.shape, x.state, home) for _, _, g, x in rows]
        news, inner, masters = step([None] * len(wide), wide, grads, inner, masters)
        landed = [
            None if m is None else pad(m if n is None else n, x.state_shape, x.state, home).astype(x.dtype)
            for n, m, x in zip(news, masters, layouts, strict=True)
        ]
        return landed, [*jax.tree.leaves(inner), *(m for m in masters if m is not None)]


class Store:
    """Masters and moments in the memory of the host.

    Attributes:
      chain: the transformation.
      generation: how many updates they have had.
    """

    place = "host"

    def __init__(self, chain: Chain, leaves: Sequence[Any]):
        self.chain, self.generation = chain, 0
        self.arrays = [x if k else None for x, k in zip(leaves, chain.kept, strict=True)]
        self.broken = ""
        self._units: dict[Any, Units] = {}

    @property
    def most(self) -> int | None:
        """Bytes that a unit may have; None: arrays are not cut."""
        return None

    def leaves(self) -> list[Any]:
        """The arrays that are kept, whole; None in the place of a leaf that is not."""
        self.check_whole()
        return list(self.arrays)

    def check_whole(self) -> None:
        """Raises RuntimeError where an update was broken off half-way."""
        if self.broken:
            raise RuntimeError(
                f"jzero: the update of generation {self.generation} was broken off ({self.broken}), and part of the "
                "optimizer state is of the next one already. "
                f"Restore a checkpoint: {RESTORE}."
            )

    def update(
        self, params: Sequence[Any], changed: Sequence[bool], grads: list[Any], small: list[Any], extra: Any
    ):
        """One update in place.

        Args:
          params: on their shards on the host, as functions; asked for where they are needed.
          changed: which of them the user has replaced.
          grads: on their shards on the host, in stored shapes; None where a param has none. The list is emptied: each
            of them goes when it has been used.
          small: the leaves of the state that the user holds; None where the store has one.
          extra: keyword arguments of the update.

        Yields:
          (number of the param, its new value or chunks of it), as they come; then the new `small` as the result.
        """
        self.check_whole()
        try:
            result = yield from self._update(params, changed, grads, small, extra)
        except BaseException as error:
            self.broken = f"{type(error).__name__}: {error}"[:200]
            raise
        self.generation += 1
        return result

    def _update(self, params, changed, grads, small, extra):
        self._take_over(params, changed)
        units = self.units_for(grads, extra)
        given, known, numbers = self._arguments(units, params, grads, small, extra)
        grads.clear()

        def fetch(source: int, group: Group):
            if source in given:
                return units.piece(given[source](), group.chunk)
            return self.read(units, source, group)

        units.scalars(known, fetch)
        small_outs = units.small_outs(known)
        pieces: dict[int, list[Any]] = {}  # of small results that units compute
        self.before_units(units)
        uses = collections.Counter(s for unit in units.units for s in unit.group.sources)
        waiting: collections.deque[Any] = collections.deque()
        for unit in units.units:
            if unit.group.values:
                news = self._run(units, unit, known, fetch, given)
                waiting.append([(numbers[v], (x, unit.group.chunk)) for v, x in news.items() if v in numbers])
                for v in filter(units.is_everywhere, news):
                    pieces.setdefault(v, []).append((news[v], unit.group.chunk))
                uses.subtract(unit.group.sources)
                for s in unit.group.sources:
                    if not uses[s]:
                        given.pop(s, None)
            if len(waiting) > AHEAD:
                yield from waiting.popleft()
        while waiting:
            yield from waiting.popleft()
        small_outs |= {v: joined(some, units.graph.avals[v], units.everywhere) for v, some in pieces.items()}
        return self._small_results(units, numbers, small_outs)

    def units_for(self, grads: Sequence[Any], extra: Any) -> Units:
        """The units for gradients and keyword arguments of these types."""
        types = [None if g is None else jax.ShapeDtypeStruct(g.shape, g.dtype) for g in grads]
        extra = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), extra)
        key = str((types, extra))
        if key not in self._units:
            self._units[key] = self.chain.units(types, extra, self.most)
        return self._units[key]

    def frozen_reads(self, grads: Sequence[Any], extra: Any) -> set[int]:
        """Which of the params without a master an update of these types reads."""
        units = self.units_for(grads, extra)
        groups = (*units.schedule.scalars, *(unit.group for unit in units.units))
        read = {s for group in groups for s in group.sources}
        frozen = [i for i, m in enumerate(self.chain.masters) if m is None]
        rows = zip(frozen, units.graph.ins, strict=False)
        return {i for i, n in rows if n in read or units.graph.avals[n].size <= 1}

    def before_units(self, units: Units) -> None:
        """Called when all norms are known, before the first unit is updated."""

    def read(self, units: Units, source: int, group: Group):
        """An array that is kept, for a group that reads it."""
        return self.arrays[units.kept[source]]

    def write(self, units: Units, unit: Unit, news: dict[int, Any]) -> None:
        """The new arrays of a unit."""
        for source, value in unit.kept:
            if value in news:
                self.arrays[units.kept[source]] = news[value]

    def _run(self, units: Units, unit: Unit, known, fetch, given) -> dict[int, Any]:
        """Dispatches a unit; returns its results by their numbers."""
        group = unit.group
        own = self._own(units, unit, given)
        outs = units.outs_of(group, known, [fetch(s, group) for s in group.sources], own=own)
        news = dict(zip(group.values, outs, strict=True))
        self.write(units, unit, news)
        return news

    gives_memory = True
    """New state takes the memory of the old."""

    def _own(self, units: Units, unit: Unit, given) -> list[int]:
        """The sources whose memory a result takes: state what replaces it, and gradients what replaces nothing."""
        avals, replaced = units.graph.avals, {v: s for s, v in unit.kept if v != s}
        fits = list(replaced.values()) if self.gives_memory else []
        rest = (v for v in unit.group.values if not (self.gives_memory and v in replaced))
        free = collections.Counter((avals[v].shape, avals[v].dtype) for v in rest)
        for s in unit.group.sources:
            form = avals[s].shape, avals[s].dtype
            if s in given and free[form]:
                free[form] -= 1
                fits.append(s)
        return fits

    def _arguments(self, units: Units, params, grads, small, extra):
        """Large arguments as functions, small ones as values, and which param a result is."""
        chain, graph = self.chain, units.graph
        given: dict[int, Callable[[], Any]] = {}
        known: dict[int, Any] = {}
        numbers = iter(graph.ins)

        def add(x: Callable[[], Any], size: int):
            number = next(numbers)
            if size > 1:
                given[number] = functools.cache(x)
            else:
                known[number] = x()

        for m, x, param in zip(chain.masters, chain.plan.layouts, params, strict=True):
            if m is None:
                add(param, math.prod(x.state_shape))
        for g in grads:
            if g is not None:
                add(functools.partial(_same, g), g.size)
        for x, mine, k, array in zip(chain.leaves, small, chain.kept, self.arrays, strict=True):
            number = next(numbers)
            if not k or x.size <= 1:
                known[number] = mine if not k else array
        for value, number in zip(jax.tree.leaves(extra), numbers, strict=True):
            known[number] = value
        having = [i for i, m in enumerate(chain.masters) if m is not None]
        return given, known, dict(zip(graph.outs, having, strict=False))

    def _small_results(self, units: Units, numbers: dict[int, int], outs: dict[int, Any]):
        """New values of the small leaves that the user holds, and of small params; small masters are kept."""
        news, values = [], units.graph.outs[len(numbers) :]
        for at, (value, k) in enumerate(zip(values, self.chain.kept, strict=True)):
            if k and value in outs:
                self.arrays[at] = outs[value]
            news.append(None if k else outs[value])
        return news, {numbers[v]: x for v, x in outs.items() if v in numbers}

    def _take_over(self, params, changed) -> None:
        """Masters of params that the user has replaced: see [Note: the master follows the param]."""
        for i, at in self.chain.master_leaves.items():
            if changed[i] and self.arrays[at] is not None:
                self.arrays[at] = _taken_over(params[i](), self.arrays[at])


def _same(x):
    return x


@functools.partial(jax.jit, donate_argnums=1)
def _taken_over(param, master):
    return taken_over(param, master)


def on_host(x: Any, plan: Plan) -> Any:
    """A small array on every device of the host mesh, in memory of its own."""
    target = plan.home.sharding(P())
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(on_host(jax.random.key_data(x), plan), impl=jax.random.key_impl(x))
    if isinstance(x, jax.Array) and x.sharding.device_set == set(plan.mesh.devices.flat):
        return moved(put(x, plan.sharding(P())), target, copy=plan.home.mesh == plan.mesh)
    return put(np.array(x), target)


def on_devices(x: Any, spec: PartitionSpec, plan: Plan) -> Any:
    """The reverse, in a layout, in memory of its own too."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(on_devices(jax.random.key_data(x), P(), plan), impl=jax.random.key_impl(x))
    return put(moved(x, plan.sharding(P()), copy=plan.home.mesh == plan.mesh), plan.sharding(spec))


def param_on_host(param: Any, x: Layout, plan: Plan) -> jax.Array:
    """A param on the shards of its state on the host, in memory of its own."""
    return moved(_shard_of(plan, x)(param), plan.home.sharding(x.state), copy=plan.home.mesh == plan.mesh)


@functools.lru_cache(maxsize=1024)
def _shard_of(plan: Plan, x: Layout):
    return jax.jit(
        lambda p: pad(plan.constrain(p, x.state), x.state_shape, x.state, plan), out_shardings=plan.sharding(x.state)
    )
