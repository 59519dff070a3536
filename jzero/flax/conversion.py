"""An optimizer state for another plan: values kept, dtypes those of the masters, nothing rounded twice."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jzero.core.errors import counted, listing
from jzero.flax.adapters import Parts
from jzero.layout.padding import padded
from jzero.layout.placement import on_device
from jzero.optim import ZeroState, init_shapes, is_wrapped, unwrap
from jzero.sharding import Plan
from jzero.update.padded_state import align, check_state, cut, cut_state


def check_belongs(parts: Parts, tx) -> None:
    """Raises ValueError where the optimizer state is not what `tx.init` gives for these params."""
    state = _inner(parts.opt_state)
    want = jax.eval_shape(unwrap(tx).init, parts.params)
    if _outline(want) == _outline(state):
        return
    got, wanted = _outline(state), _outline(want)
    rows = [
        (k, wanted.get(k, "absent"), got.get(k, "absent"))
        for k in {**wanted, **got}
        if wanted.get(k) != got.get(k)
    ]
    raise ValueError(
        f"jzero: the optimizer state does not belong to the params: "
        f"{counted(len(rows), 'leaf differs', 'leaves differ')} from what tx.init "
        f"gives for them:\n{listing([('leaf', 'tx.init', 'given'), *rows])}\nBuild it with tx.init(params), as "
        "TrainState.create does."
    )


def _outline(tree) -> dict[str, str]:
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(k): str(tuple(np.shape(x))) for k, x in flat}


def convert_opt_state(parts: Parts, tx, plan: Plan, *, place, store=lambda x, _: x, masters=None) -> Any:
    """The optimizer state for this plan: values kept, dtypes those that `init` gives for the masters.

    Leaf by leaf: `place(x, sharding)` puts one on its devices, where it is converted, and `store(x, sharding)` where it
    lives. `masters`: initial values wider than the params, where they are known. A state with masters keeps them,
    except where the user has replaced the param.
    """
    parts = parts.replace(opt_state=logical_state(parts))
    check_belongs(parts, tx)
    target = init_shapes(tx, parts.params)
    has_master, target_inner, inner = isinstance(target, ZeroState), _inner(target), _inner(parts.opt_state)
    old = parts.opt_state.master if isinstance(parts.opt_state, ZeroState) else None
    wanted = jax.tree.leaves(target_inner)
    given, homes = [as_array(x) for x in jax.tree.leaves(inner)], plan.state_shardings(target)
    fresh: list[Any] = [None] * len(given)
    if any(x.dtype.itemsize < t.dtype.itemsize for x, t in zip(given, wanted, strict=True)):
        fresh = _fresh_inner(parts, tx, plan, place, masters)
    leaves = []
    for x, t, f, home in zip(given, wanted, fresh, homes[: len(given)], strict=True):
        x = place(padded(on_device(x), t.shape), home.with_memory_kind("device"))
        leaves.append(store(_as_dtype(x if f is None else _widened(x, f), t.dtype), home))
    inner = jax.tree.unflatten(jax.tree.structure(target_inner), leaves)
    if not has_master:
        return inner
    count = len(plan.layouts)
    known = (
        align(old, parts.params, where="jzero.shard: the master")
        if old is not None
        else masters or [None] * count
    )
    needs = align(target.master, parts.params, where="jzero.shard: the master")
    master_homes = iter(homes[len(given) :])
    new = []
    for p, m, w in zip(jax.tree.leaves(parts.params), known, needs, strict=True):
        home = None if w is None else next(master_homes)
        new.append(
            None if home is None else store(_master(p, m, w, home.with_memory_kind("device"), place), home)
        )
    return ZeroState(inner, jax.tree.unflatten(jax.tree.structure(parts.params), new))


def _fresh_inner(parts: Parts, tx, plan: Plan, place, masters) -> list[Any]:
    """The leaves of a fresh inner state, made for the masters: what a 16-bit `tx.init` rounded, unrounded."""
    params = [
        place(padded(on_device(as_array(p)), x.state_shape), plan.sharding(x.state))
        for p, x in zip(jax.tree.leaves(parts.params), plan.layouts, strict=True)
    ]
    tree = jax.tree.structure(parts.params)
    known = None if masters is None else [p if m is None else m for p, m in zip(params, masters, strict=True)]

    def fresh(params, masters):
        def logical(leaves):
            return tree.unflatten(
                [cut(v, x.shape, x.state, plan) for v, x in zip(leaves, plan.layouts, strict=True)]
            )

        return _inner(tx.init.on_device(logical(params), None if masters is None else logical(masters)))

    return jax.tree.leaves(jax.jit(fresh)(params, known))


def _widened(value, fresh):
    """The wider fresh value where the given one is its rounding (a hyper-parameter, a copy of a param)."""
    return (
        value
        if value.dtype == fresh.dtype
        else jnp.where(fresh.astype(value.dtype) == value, fresh, value.astype(fresh.dtype))
    )


def _master(param, known, wanted, sharding, place):
    param = place(padded(on_device(as_array(param)), wanted.shape), sharding)
    if known is None:
        return param.astype(wanted.dtype)
    known = place(padded(on_device(known), wanted.shape), sharding)
    return jnp.where(known.astype(param.dtype) == param, known, param.astype(known.dtype)).astype(
        wanted.dtype
    )


def logical_state(parts: Parts) -> Any:
    """The optimizer state in the shapes that its transformation knows, without the padding of an earlier plan."""
    return without_padding(parts.opt_state, parts.tx) if is_wrapped(parts.tx) else parts.opt_state


def logical_shapes(parts: Parts) -> Any:
    """The same as `jax.ShapeDtypeStruct`, of arrays or of such."""
    plain = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), parts.opt_state)
    return jax.eval_shape(lambda state: logical_state(parts.replace(opt_state=state)), plain)


def without_padding(opt_state: Any, tx: Any) -> Any:
    """The state of a wrapped transformation in logical shapes: what dims were padded by is cut off."""
    plan = tx.init.plan
    if plan.config.uneven != "pad":
        return opt_state
    check_state(_inner(opt_state), tx.update.logical, where="jzero")
    inner = cut_state(_inner(opt_state), tx.update.logical, plan)
    if not isinstance(opt_state, ZeroState):
        return inner
    tree = plan.tree
    known = tree.flatten_up_to(opt_state.master)
    master = [
        m if m is None else cut(m, x.shape, x.state, plan) for m, x in zip(known, plan.layouts, strict=True)
    ]
    return ZeroState(inner, tree.unflatten(master))


def _inner(opt_state):
    return opt_state.inner if isinstance(opt_state, ZeroState) else opt_state


def as_array(x):
    """An array of a Python scalar; arrays and abstract values as they are."""
    return x if hasattr(x, "dtype") else jnp.asarray(x)


def _as_dtype(x, dtype):
    return x if x.dtype == dtype else x.astype(dtype)
