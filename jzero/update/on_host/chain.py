"""An optax chain as the host runs it: which leaves its state has, and the programs of its update."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jzero.config import Offload
from jzero.core.types import PyTree, Shaped
from jzero.layout.leaf_rule import path_name
from jzero.layout.specs import P
from jzero.sharding import Plan
from jzero.stream.placement import DEVICE, Placement
from jzero.update.masters import seen_dtype
from jzero.update.moment_dtype import ROUNDING_COUNT
from jzero.update.on_host.host_arrays import param_on_host
from jzero.update.on_host.units import Units
from jzero.update.padded_state import check_dtypes, cut, pad, pin_state
from jzero.update.sharded_update import ShardedUpdate


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Constant:
    """A keyword argument of an update that is not an array, in the place of a leaf: other values are other programs."""

    value: bool | str


@dataclasses.dataclass(frozen=True, eq=False)
class Chain:
    """The transformation as the host runs it.

    Attributes:
      plan: the user's; `plan.update_plan` is the one on the host mesh.
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

    @property
    def tier(self) -> Offload:
        """Where the plan has its optimizer state."""
        assert self.plan.config.offload_options is not None
        return self.plan.config.offload_options

    def parts(self, leaves: Sequence[Any]) -> tuple[Any, list[Any]]:
        """All leaves, or what stands for them, as an inner state and a master, or None, for each param."""
        tree = jax.tree.structure(self.inner)
        masters = iter(leaves[tree.num_leaves :])
        return tree.unflatten(leaves[: tree.num_leaves]), [None if m is None else next(masters) for m in self.masters]

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
        """The paths of the leaves; for a master, that of its param."""
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
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=(self.plan.update_plan if k else self.plan).sharding(spec))
            for x, spec, k in rows
        ]

    def units(self, grads: Sequence[Shaped], extra: PyTree, most: int | None = None) -> Units:
        """The update cut into units.

        Args:
          grads: their types, None where a param has no gradient.
          extra: keyword arguments of the update, abstract, or a `Constant`.
          most: bytes of a unit.
        """
        layouts = self.plan.layouts
        params = [
            None if m is not None else jax.ShapeDtypeStruct(x.state_shape, x.dtype)
            for m, x in zip(self.masters, layouts, strict=True)
        ]
        args, tree = jax.tree.flatten((params, list(grads), self.leaves, extra))
        wide = jnp.dtype("float32").itemsize  # sums of micro-batches are cut as gradients of the params' dtype are
        lies = self._places(params) + self._places(grads, wide)
        before = len(lies)
        lies += self._state_places
        lies += [DEVICE] * (len(args) - len(lies))
        rows = enumerate(zip(self.leaves, self.kept, strict=True))
        kept = {before + i: i for i, (x, k) in rows if k and x.size > 1}

        def fn(*flat):
            params, grads, leaves, extra = tree.unflatten(flat)
            news, leaves = self._updated(params, grads, leaves, extra)
            return [n for n in news if n is not None] + leaves

        own = enumerate(self._state_places, before)
        out_lies = self._places(self.masters) + [p if p is DEVICE else Placement(p.sharding, i) for i, p in own]
        types = [
            x if h.sharding is None else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=h.sharding)
            for x, h in zip(args, lies, strict=True)
        ]
        return Units(fn, types, lies, out_lies, kept, self.plan.update_plan.sharding(P()), most=most)

    def wide(self, i: int, param: Any) -> jax.Array:
        """The initial master of a param that lies in its stored layout, for `initial`."""
        m, x = self.masters[i], self.plan.layouts[i]
        return param_on_host(param, x, self.plan).astype(x.dtype if m is None else m.dtype)

    @functools.cached_property
    def initial(self) -> Units:
        """The units that make a new state from masters (from params that have none), in stored shapes."""
        home, layouts = self.plan.update_plan, self.plan.layouts
        wide = [
            jax.ShapeDtypeStruct(x.state_shape, x.dtype if m is None else m.dtype)
            for m, x in zip(self.masters, layouts, strict=True)
        ]

        def fn(*wide):
            tx, _ = self.make()
            rows = zip(wide, layouts, strict=True)
            logical = [cut(w, x.shape, x.state, home).astype(seen_dtype(x, home)) for w, x in rows]
            inner = pin_state(tx.init(self.plan.tree.unflatten(logical)), home)
            masters = [w for w, m in zip(wide, self.masters, strict=True) if m is not None]
            return [*jax.tree.leaves(inner), *masters]

        return Units(fn, wide, self._places(wide), self._state_places, {}, home.sharding(P()))

    @functools.cached_property
    def _state_places(self) -> list[Placement]:
        """Where the leaves of the state lie: those kept outside on their shards, except single values."""
        rows = zip(self.leaves, self.specs, self.kept, strict=True)
        return [self._place(x, spec) if kept else DEVICE for x, spec, kept in rows]

    def _places(self, arrays: Sequence[Any], itemsize: int = 0) -> list[Placement]:
        """Where arrays of the params lie, None left out."""
        rows = zip(arrays, self.plan.layouts, strict=True)
        return [self._place(a, x.state, itemsize) for a, x in rows if a is not None]

    def _place(self, x: Any, spec, itemsize: int = 0) -> Placement:
        return DEVICE if x.size <= 1 else Placement(self.plan.update_plan.sharding(spec), itemsize=itemsize)

    def _updated(self, params: list, grads: list, leaves: list, extra) -> tuple[list, list]:
        """New params as they are stored on shards, and the new leaves of the state."""
        home, layouts = self.plan.update_plan, self.plan.layouts
        inner, masters = self.parts(leaves)
        tx, logical = self.make()
        extra = jax.tree.map(
            lambda x: x.value if isinstance(x, Constant) else x, extra, is_leaf=lambda x: isinstance(x, Constant)
        )
        step = ShardedUpdate(tx, home, lambda: logical, self.plan.tree, extra)
        inner, masters = step.cut(inner, masters)
        rows = list(zip(params, masters, grads, layouts, strict=True))
        wide = [cut(p, x.shape, x.state, home) if m is None else m for p, m, _, x in rows]
        grads = [g if g is None else cut(g, x.shape, x.state, home) for _, _, g, x in rows]
        before = inner
        news, inner, masters = step([None] * len(wide), wide, grads, inner, masters)
        check_dtypes(before, inner, self.kept)
        landed = [
            None if m is None else pad(m if n is None else n, x.state_shape, x.state, home).astype(x.dtype)
            for n, m, x in zip(news, masters, layouts, strict=True)
        ]
        return landed, [*jax.tree.leaves(inner), *(m for m in masters if m is not None)]
