"""Checks of what `jzero.zero` is called with: gradients, params and state must fit the plan."""

from __future__ import annotations

import jax

from jzero.core.errors import check_arrays, counted, listing, typed_shape
from jzero.core.jaxprs import is_tracer
from jzero.sharding import Plan


def check_dtypes(pairs) -> None:
    """Raises TypeError for params that were replaced by values of another dtype."""
    bad = [(x.name, typed_shape(x), typed_shape(p)) for p, x in pairs if p.dtype != x.dtype]
    if bad:
        raise TypeError(
            f"jzero.zero: update: {counted(len(bad), 'param has', 'params have')} another dtype than in the plan:\n"
            f"{listing([('param', 'plan', 'given'), *bad])}\nCast what replaces a param to its dtype, or make a plan "
            "for the new dtypes: jzero.shard(state, ...) again."
        )


def check_count(given: bool, wanted: bool) -> None:
    """Raises ValueError for a state with a `rounding_count` that the plan does not need, or without one it needs."""
    if given != wanted:
        raise ValueError(
            f"jzero.zero: update: this optimizer state has {'a' if given else 'no'} rounding_count, and its plan needs "
            f'{"one" if wanted else "none"}: a state has one where moment_dtype (bf16, int8) rounds the moments of a '
            "chain without a count. Pass what tx.init(params) or the last update returned; jzero.shard(state, ...) "
            "converts a train state of another plan, jzero.checkpoint.restore(path, like) one in a checkpoint."
        )


def check_grads(grads, plan: Plan) -> None:
    """Raises for gradients that are not arrays, or have other shapes than the params: per-example ones, say."""
    check_arrays(grads, "the gradients", where="jzero.zero: update")
    rows = zip(grads, plan.layouts, strict=True)
    bad = [
        (x.name, typed_shape(x), typed_shape(g))
        for g, x in rows
        if g is not None and tuple(g.shape) != x.shape
    ]
    if bad:
        raise ValueError(
            f"jzero.zero: update: {counted(len(bad), 'gradient has', 'gradients have')} another shape than the param:\n"
            f"{listing([('param', 'its type', 'gradient'), *bad])}\nPer-example gradients (differential privacy) "
            "cannot be reduced before they are clipped: aggregate them first, and wrap the rest of the chain."
        )


def check_devices(leaves, plan: Plan) -> None:
    """Raises ValueError for params that are committed to other devices than those of the plan."""
    mesh = set(plan.mesh.devices.flat)
    bad = [
        (x.name, typed_shape(a), ", ".join(sorted(map(str, a.sharding.device_set))[:3]))
        for a, x in zip(leaves, plan.layouts, strict=True)
        if isinstance(a, jax.Array) and not is_tracer(a) and a.committed and a.sharding.device_set != mesh
    ]
    if bad:
        raise ValueError(
            f"jzero.zero: init: {counted(len(bad), 'param is', 'params are')} committed to other devices than "
            f"the plan's mesh of {len(mesh)}:\n{listing(bad)}\nPlace them first: params = plan.place(params)."
        )
