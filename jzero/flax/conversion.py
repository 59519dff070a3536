"""An optimizer state for another plan: the same values, in the dtypes of the masters, nothing rounded twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

from jzero.core.errors import counted, listing
from jzero.core.types import PyTree
from jzero.flax.adapters import Parts
from jzero.layout.padding import padded
from jzero.layout.placement import device_type, on_device
from jzero.layout.trainable import trained_part
from jzero.optim import ZeroState, ZeroTransformation, init_shapes, is_wrapped, unwrap, zero
from jzero.sharding import Plan
from jzero.update import remainder
from jzero.update.padded_state import align, check_state, cut, cut_state
from jzero.update.sharded_update import taken_over
from jzero.update.zero_state import inner_of


def check_belongs(parts: Parts, tx: optax.GradientTransformation) -> None:
    """Raises ValueError if the optimizer state is not what `tx.init` gives for these params."""
    got, wanted = outline(inner_of(parts.opt_state)), outline(fresh_shapes(tx, parts.taken))
    if got == wanted:
        return
    both = [(k, wanted.get(k, "absent"), got.get(k, "absent")) for k in {**wanted, **got}]
    rows = [row for row in both if row[1] != row[2]]
    raise ValueError(
        f"jzero: the optimizer state does not belong to the params: "
        f"{counted(len(rows), 'leaf differs', 'leaves differ')} from what tx.init "
        f"gives for them:\n{listing([('leaf', 'tx.init', 'given'), *rows])}\nBuild it with tx.init(params), as "
        "TrainState.create does; if it is of a part of the params, say of which: trainable=."
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

    Params are as they were, unless this plan rounds masters by another rule (`by_rule`). Leaf by leaf:
    `place(x, sharding)` puts it on its devices, where it is converted, and `store(x, sharding)` where it lives.
    `masters`: initial values wider than the params, where they are known. A state with masters keeps them, except for
    params that the user has replaced.
    """
    parts = by_rule(parts.replace(opt_state=logical_state(parts)), plan, masters)
    check_belongs(parts, tx)
    state, params = _state_for(parts, tx, plan, place, store, masters), parts.params
    return parts.replace(params=params, opt_state=state)


def _state_for(
    parts: Parts, tx: optax.GradientTransformation, plan: Plan, place: Callable[..., jax.Array],
    store: Callable[..., jax.Array], masters: Sequence[jax.Array | None] | None,
) -> PyTree:  # fmt: skip
    if masters is not None and parts.trained is not None:
        masters = [m for m, t in zip(masters, parts.trained, strict=True) if t]
    # from here on of what the optimizer takes
    parts, plan = parts.replace(params=parts.taken, trained=None, trained_tree=None), plan.trained
    target = init_shapes(tx, parts.params)
    wanted, shardings = jax.tree.leaves(target), iter(plan.state_shardings(target))

    def placed(x: Any, shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
        return place(padded(on_device(as_array(x)), shape), sharding.with_memory_kind("device"))

    given = jax.tree.leaves(inner_of(parts.opt_state))
    fresh: list[Any] = [None] * len(given)
    if any(as_array(x).dtype.itemsize < t.dtype.itemsize for x, t in zip(given, wanted, strict=False)):
        fresh = _fresh_inner(parts, tx, plan, placed, masters)
    leaves = []
    for x, t, f, sharding in zip(given, wanted, fresh, shardings, strict=False):
        x = placed(x, t.shape, sharding)
        if f is not None and x.dtype != f.dtype:
            x = taken_over(x, f)  # the fresh value, if `x` is its rounding
        leaves.append(store(x if x.dtype == t.dtype else x.astype(t.dtype), sharding))
    inner = jax.tree.unflatten(jax.tree.structure(inner_of(target)), leaves)
    if not isinstance(target, ZeroState):
        return inner

    def master(param, known, shape, sharding):
        if shape is None:
            return None
        if shape.dtype == jnp.int16:  # a remainder; `by_rule` has rounded the param
            known = jnp.zeros(np.shape(param), jnp.int16) if known is None else known
            known = known if known.dtype == jnp.int16 else remainder.split(known)[1]
            return store(placed(known, shape.shape, sharding), sharding)
        param = placed(param, shape.shape, sharding)
        new = param if known is None else taken_over(param, placed(known, shape.shape, sharding))
        return store(new.astype(shape.dtype), sharding)

    known, count = masters or [None] * len(plan.layouts), None
    if isinstance(parts.opt_state, ZeroState):
        old = align(parts.opt_state.master, parts.params, where="jzero.shard: the master")
        known = [k if m is None else m for m, k in zip(old, known, strict=True)]
        count = parts.opt_state.rounding_count
    shapes = align(target.master, parts.params, where="jzero.shard: the master")
    rows = zip(jax.tree.leaves(parts.params), known, shapes, strict=True)
    new = [master(*row, None if row[2] is None else next(shardings)) for row in rows]
    if target.rounding_count is None:
        count = None
    else:
        sharding = next(shardings)
        count = store(placed(jnp.zeros((), jnp.int32) if count is None else count, (), sharding), sharding)
    return ZeroState(inner, jax.tree.unflatten(jax.tree.structure(parts.params), new), count)


def by_rule(parts: Parts, plan: Plan | None, masters: Sequence[jax.Array | None] | None = None) -> Parts:
    """Params and masters as this plan rounds and stores them, where the state has them otherwise; None: fp32 masters.

    A remainder becomes the fp32 master, whose param is then rounded to even; for a plan that stores remainders a param
    is rounded away from zero. They differ on exact ties alone, and there a master would take its param for a new one.
    The optimizer state is logical; `masters` as in `converted`.
    """
    leaves, state = jax.tree.leaves(parts.params), parts.opt_state
    taken = [i for i in range(len(leaves)) if parts.trained is None or parts.trained[i]]
    known: list[Any] = [None] * len(taken)
    if isinstance(state, ZeroState):
        known = align(state.master, parts.taken, where="jzero: the master")
    born = [None if masters is None else masters[i] for i in taken]
    for j, i in enumerate(taken):
        stores = plan is not None and plan.config.keeps_remainder(leaves[i].dtype)
        if known[j] is not None and (known[j].dtype == jnp.int16) != stores:
            param = on_device(leaves[i])
            if stores:
                leaves[i], known[j] = _narrowed(param, on_device(known[j]))
            else:
                leaves[i], known[j] = _widened(param, on_device(known[j]))
        elif (initial := born[j]) is not None and known[j] is None and stores:
            leaves[i] = remainder.split(initial)[0]
    parts = parts.replace(params=jax.tree.unflatten(jax.tree.structure(parts.params), leaves))
    if not isinstance(state, ZeroState):
        return parts
    master = jax.tree.unflatten(jax.tree.structure(parts.taken), known)
    return parts.replace(opt_state=state._replace(master=master))


@jax.jit
def _widened(param: jax.Array, rest: jax.Array) -> tuple[jax.Array, jax.Array]:
    master = remainder.join(param, rest)
    return master.astype(param.dtype), master


@jax.jit
def _narrowed(param: jax.Array, master: jax.Array) -> tuple[jax.Array, jax.Array]:
    master = taken_over(param, master)
    return remainder.split(master)[0], master


def _fresh_inner(
    parts: Parts,
    tx: optax.GradientTransformation,
    plan: Plan,
    placed: Callable[..., jax.Array],
    masters: Sequence[Any] | None,
) -> list[jax.Array]:
    """The leaves of a fresh inner state for the masters: unrounded, unlike those of 16-bit params."""
    home, (given, tree) = plan.update_plan, jax.tree.flatten(parts.params)
    params = [
        placed(p, x.state_shape, home.sharding(x.state)) for p, x in zip(given, plan.layouts, strict=True)
    ]
    known = None if masters is None else [p if m is None else m for p, m in zip(params, masters, strict=True)]

    def fresh(params, masters):
        def logical(leaves):
            rows = zip(leaves, plan.layouts, strict=True)
            return tree.unflatten([cut(v, x.shape, x.state, home) for v, x in rows])

        init: Any = zero(unwrap(tx), home).init
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
    check_state(inner_of(opt_state), tx.update.logical, where="jzero")
    inner = cut_state(inner_of(opt_state), tx.update.logical, plan)
    if not isinstance(opt_state, ZeroState):
        return inner
    rows = zip(plan.tree.flatten_up_to(opt_state.master), plan.layouts, strict=True)
    master = [m if m is None else cut(m, x.shape, x.state, plan) for m, x in rows]
    return ZeroState(inner, plan.tree.unflatten(master), opt_state.rounding_count)


def with_masters(opt_state: PyTree, params: PyTree, tx: ZeroTransformation) -> PyTree:
    """A logical optimizer state with fp32 masters, also if its plan stores remainders.

    Raises:
      ValueError: `params`, of which masters with remainders are made, are None.
    """
    if tx.init.plan.config.master_dtype != "remainder" or not isinstance(opt_state, ZeroState):
        return opt_state
    if params is None:
        raise ValueError(
            'jzero.unshard: with master_dtype="remainder" a master is its param and 16 bits more. Pass the params too: '
            "jzero.unshard(state.opt_state, tx=state.tx, params=state.params)."
        )
    params = trained_part(params, tx.init.plan, where="jzero.unshard")
    return by_rule(Parts(params, opt_state, None, None, tx, None), None).opt_state


def as_array(x: Any) -> Any:
    """A Python scalar as an array; arrays and abstract values unchanged."""
    return x if hasattr(x, "dtype") else jnp.asarray(x)
