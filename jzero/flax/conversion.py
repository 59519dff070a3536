"""An optimizer state for another plan: the same values, in the dtypes of the masters, nothing rounded twice."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

from jzero.core.errors import counted, listing, typed_shape
from jzero.core.jaxprs import in_trace
from jzero.core.types import PyTree
from jzero.flax.adapters import Parts
from jzero.layout.leaf_rule import Frozen
from jzero.layout.padding import padded, unpadded
from jzero.layout.placement import device_type, on_device, put
from jzero.optim import ZeroState, ZeroTransformation, init_shapes, is_wrapped, unwrap, zero
from jzero.sharding import Plan
from jzero.update.int8_moments import block_leaves, quantize
from jzero.update.padded_state import align, check_state, cut, cut_state
from jzero.update.pairs import Pair, pair_of
from jzero.update.sharded_update import taken_over
from jzero.update.zero_state import inner_of

FP32 = np.dtype(np.float32)


def check_belongs(parts: Parts, tx: optax.GradientTransformation) -> None:
    """Raises ValueError if the optimizer state is not what `tx.init` gives for these params."""
    got, wanted = outline(inner_of(parts.opt_state)), outline(fresh_shapes(tx, parts.taken))
    if got == wanted:
        return
    both = [(k, wanted.get(k, "absent"), got.get(k, "absent")) for k in {**wanted, **got}]
    rows = [row for row in both if row[1] != row[2]]
    remedy = (
        "Build it with tx.init(params), as TrainState.create does; if it covers only some of the params, name them "
        "with trainable=."
        if parts.trained is None
        else "It holds leaves for params that trainable= leaves out, not named like them. Make the state of the "
        "trained params: opt_state=tx.init(own), with None in own in place of each frozen param."
    )
    raise ValueError(
        f"jzero: the optimizer state does not belong to the params: "
        f"{counted(len(rows), 'leaf differs', 'leaves differ')} from what tx.init "
        f"gives for them:\n{listing([('leaf', 'tx.init', 'given'), *rows])}\n{remedy}"
    )


def fresh_shapes(tx: optax.GradientTransformation, params: PyTree) -> PyTree:
    """The state that a plain or wrapped transformation makes of these params without jzero, abstract."""
    return jax.eval_shape(unwrap(tx).init, jax.tree.map(device_type, params))


def outline(tree: PyTree) -> dict[str, str]:
    """The shapes of a tree by the paths of its leaves."""
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(k): str(tuple(np.shape(x))) for k, x in flat}


def converted(
    parts: Parts,
    tx: optax.GradientTransformation,
    plan: Plan,
    *,
    place: Callable[[Any, NamedSharding], jax.Array],
    store: Callable[[Any, NamedSharding], jax.Array] = lambda x, _: x,
    masters: Sequence[jax.Array | None] | None = None,
) -> Parts:
    """The parts with the optimizer state for this plan: the same values, in the dtypes that `init` gives for masters.

    Params are as they were, unless masters are stored in another way: then they are rounded by the rule of the new
    plan. (Otherwise, where the rules round differently, a plan with fp32 masters would assume that the user replaced
    the param.)

    Leaf by leaf: `place(x, sharding)` puts it on its devices, where it is converted, and `store(x, sharding)` where it
    lives. `masters`: initial values wider than the params, where they are known. A state with masters keeps them,
    except for params that the user has replaced.
    """
    parts = parts.replace(opt_state=logical_state(parts))
    check_belongs(parts, tx)
    if masters is not None and parts.trained is not None:
        masters = [m for m, t in zip(masters, parts.trained, strict=True) if t]
    own = parts.replace(params=parts.taken, trained=None, trained_tree=None)
    state, news = _Conversion(own, tx, plan.trained, place, store, masters).state()
    leaves, tree = jax.tree.flatten(parts.params)
    trained = [i for i in range(len(leaves)) if parts.trained is None or parts.trained[i]]
    for i, new in zip(trained, news, strict=True):
        leaves[i] = new
    return parts.replace(params=tree.unflatten(leaves), opt_state=state)


@dataclasses.dataclass(frozen=True)
class _Conversion:
    """The state of parts for another plan, all of them of what the optimizer takes.

    Attributes:
      parts: with their state as it was.
      tx, plan: of the new state.
      place, store, masters: as in `converted`.
    """

    parts: Parts
    tx: optax.GradientTransformation
    plan: Plan
    place: Callable[..., jax.Array]
    store: Callable[..., jax.Array]
    masters: Sequence[jax.Array | None] | None

    def state(self) -> tuple[PyTree, list[Any]]:
        """The state, and the params that belong to it."""
        target = init_shapes(self.tx, self.parts.params)
        shardings = iter(self.plan.state_shardings(target))
        inner, scales = self._inner(target, shardings)
        if not isinstance(target, ZeroState):
            return inner, jax.tree.leaves(self.parts.params)
        master, params = self._masters(target, shardings)
        count, old = None, self.parts.opt_state
        if target.rounding_count is not None:
            known = old.rounding_count if isinstance(old, ZeroState) else None
            count = self._stored(jnp.zeros((), jnp.int32) if known is None else known, (), next(shardings))
        if target.moment_scales is None:
            return ZeroState(inner, master, count), params
        lying = [self._stored(s, np.shape(s), next(shardings)) for s in scales if s is not None]
        return ZeroState(inner, master, count, jax.tree.structure(target.moment_scales).unflatten(lying)), params

    def _placed(self, x: Any, shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
        return self.place(padded(on_device(as_array(x)), shape), sharding.with_memory_kind("device"))

    def _stored(self, x: Any, shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
        return self.store(self._placed(x, shape, sharding), sharding)

    def _inner(self, target: PyTree, shardings: Iterator[NamedSharding]) -> tuple[PyTree, list[jax.Array | None]]:
        """The state of the wrapped transformation, and the scale of each of its leaves."""
        inner = inner_of(target)
        wanted, given = jax.tree.leaves(inner), block_leaves(self.parts.opt_state)
        blocks = [b for _, _, b in block_leaves(target)]
        into = [t.dtype if b is None else FP32 for t, b in zip(wanted, blocks, strict=True)]
        fresh: list[Any] = [None] * len(given)
        if any(x.dtype.itemsize < dtype.itemsize for x, dtype in zip(given, into, strict=True)):
            fresh = _fresh_inner(self.parts, self.tx, self.plan, self._placed, self.masters)
        leaves: list[jax.Array] = []
        scales: list[jax.Array | None] = []
        for old, t, new, f, sharding in zip(given, wanted, blocks, fresh, shardings, strict=False):
            if old.blocks == new:  # codes stay as they are
                x, scale = self._placed(old.values, t.shape, sharding), old.scales
            else:
                x, scale = self._placed(old.wide(), t.shape, sharding), None
            if f is not None and x.dtype != f.dtype and old.blocks is None:
                x = taken_over(x, f)  # the fresh value, if `x` is its rounding
            if new is not None and scale is None:
                x, scale = quantize(x.astype(FP32), new)
                x = self._placed(x, t.shape, sharding)
            leaves.append(self.store(x if x.dtype == t.dtype else x.astype(t.dtype), sharding))
            scales.append(scale)
        return jax.tree.structure(inner).unflatten(leaves), scales

    def _masters(self, target: ZeroState, shardings: Iterator[NamedSharding]) -> tuple[PyTree, list[Any]]:
        """The masters as they are stored, and the params that belong to them."""
        params, tree = jax.tree.flatten(self.parts.params)
        known = list(self.masters or [None] * len(params))
        were: list[Pair | None] = [None] * len(params)  # how the known ones are stored
        if isinstance(self.parts.opt_state, ZeroState):
            old = align(self.parts.opt_state.master, self.parts.params, where="jzero.shard: the master")
            if is_wrapped(self.parts.tx):
                config = self.parts.tx.init.plan.config
                were = [None if m is None else pair_of(config, p.dtype) for m, p in zip(old, params, strict=True)]
            known = [k if m is None else m for m, k in zip(old, known, strict=True)]
        shapes = align(target.master, self.parts.params, where="jzero.shard: the master")
        made = []
        for i, shape in enumerate(shapes):
            if shape is None:
                made.append(None)
                continue
            sharding = next(shardings)
            param, pair = self._placed(params[i], shape.shape, sharding), pair_of(self.plan.config, params[i].dtype)
            if known[i] is None:
                new = param if pair is None else jnp.zeros_like(param, pair.dtype)
            else:
                new = self._placed(known[i], shape.shape, sharding)
                if pair != were[i]:
                    new, params[i] = _paired(param, new, were[i], pair, tuple(np.shape(params[i])))
                elif pair is None:
                    new = taken_over(param, new)
            made.append(self.store(new.astype(shape.dtype), sharding))
        return tree.unflatten(made), params


@functools.partial(jax.jit, static_argnames=("was", "pair", "shape"))
def _paired(
    param: jax.Array, known: jax.Array, was: Pair | None, pair: Pair | None, shape: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """A master stored in another way, and the param that belongs to it, cut to its shape: see `converted`.

    Args:
      param: that belongs to the known one.
      known: the master, as it was stored.
      was, pair: how it was and is stored.
      shape: of the param.
    """
    master = (taken_over(param, known) if was is None else was.join(param, known)).astype(FP32)
    if pair is None:
        return master, unpadded(master.astype(param.dtype), shape)
    new, rest = pair.split(master, param.dtype)
    return rest, unpadded(new, shape)


def _fresh_inner(
    parts: Parts,
    tx: optax.GradientTransformation,
    plan: Plan,
    placed: Callable[..., jax.Array],
    masters: Sequence[Any] | None,
) -> list[jax.Array]:
    """The leaves of a fresh inner state for the masters: unrounded, unlike those of 16-bit params."""
    home, (given, tree) = plan.update_plan, jax.tree.flatten(parts.params)
    if home.config.moment_dtype == jnp.int8:
        home = dataclasses.replace(home, config=dataclasses.replace(home.config, moment_dtype=jnp.float32))
    params = [
        placed(p, x.state_shape, home.sharding(x.state)) for p, x in zip(given, plan.layouts, strict=True)
    ]
    known = None if masters is None else [p if m is None else m for p, m in zip(params, masters, strict=True)]

    def fresh(params, masters):
        def logical(leaves):
            rows = zip(leaves, plan.layouts, strict=True)
            return tree.unflatten([cut(v, x.shape, x.state, home) for v, x in rows])

        init: Any = zero(tx, home).init
        return inner_of(init.on_device(logical(params), None if masters is None else logical(masters)))

    return jax.tree.leaves(jax.jit(fresh)(params, known))


def logical_state(parts: Parts) -> PyTree:
    """The optimizer state in the shapes that its transformation sees, without the padding of an earlier plan."""
    return without_padding(parts.opt_state, parts.tx) if is_wrapped(parts.tx) else parts.opt_state


def logical_shapes(parts: Parts) -> PyTree:
    """The same as `jax.ShapeDtypeStruct`; the leaves of `parts` may be arrays or abstract."""
    plain = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), parts.opt_state)
    return jax.eval_shape(lambda state: logical_state(parts.replace(opt_state=state)), plain)


def without_padding(opt_state: PyTree, tx: ZeroTransformation) -> PyTree:
    """The state of a wrapped transformation in logical shapes: the padding is cut off."""
    plan = tx.init.plan.trained
    if plan.config.uneven != "pad":
        return opt_state
    logical = inner_of(tx.update.logical)
    check_state(inner_of(opt_state), logical, where="jzero")
    inner = cut_state(inner_of(opt_state), logical, plan)
    if not isinstance(opt_state, ZeroState):
        return inner
    rows = zip(plan.tree.flatten_up_to(opt_state.master), plan.layouts, strict=True)
    master = [m if m is None else cut(m, x.shape, x.state, plan) for m, x in rows]
    return opt_state._replace(inner=inner, master=plan.tree.unflatten(master))


def with_masters(opt_state: PyTree, params: PyTree, tx: ZeroTransformation) -> PyTree:
    """A logical optimizer state with fp32 masters, also if its plan stores what params lack.

    Args:
      opt_state: without padding.
      params: all, or the trained ones.
      tx: the wrapped transformation.

    Raises:
      ValueError: the plan stores what params lack, and `params` is None or not the params of the plan.
    """
    plan = tx.init.plan
    field = plan.config.paired_by
    if field is None or not isinstance(opt_state, ZeroState):
        return opt_state
    if params is None:
        raise ValueError(
            f'jzero.unshard: with {field}="{getattr(plan.config, field)}" a master is its param and what that lacks. '
            "Pass the params too: "
            "jzero.unshard(state.opt_state, tx=state.tx, params=state.params), in NNX "
            "params=nnx.state(model, nnx.Param)."
        )
    some = len(jax.tree.leaves(params)) == len(plan.trained.layouts)
    rows = (plan.trained if some else plan).match(params, where="jzero.unshard: params")
    given = [(p, x) for p, x in rows if x.frozen is not Frozen.APART]
    if wrong := [(x.name, typed_shape(p)) for p, x in given if p.dtype != x.dtype]:
        raise ValueError(f"jzero.unshard: params of another dtype than those of the plan:\n{listing(wrong)}")
    plan = plan.trained
    known = plan.tree.flatten_up_to(opt_state.master)
    pairs = [pair_of(plan.config, x.dtype) for _, x in given]
    rows = zip(given, known, pairs, strict=True)
    masters = [m if m is None or pair is None else _joined(p, m, pair) for (p, _), m, pair in rows]
    return opt_state._replace(master=plan.tree.unflatten(masters))


def _joined(param: Any, rest: Any, pair: Pair) -> Any:
    rest = on_device(rest)
    return pair.join(param if in_trace() else put(param, rest.sharding), rest)


def as_array(x: Any) -> Any:
    """A Python scalar as an array; arrays and abstract values unchanged."""
    return x if hasattr(x, "dtype") else jnp.asarray(x)
