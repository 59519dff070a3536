"""The leaves that `update` returns, from new values on shards: gathered to the stored layout of each param."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jzero.comm import comm_of
from jzero.comm.updates import goes_by_layers, is_copied
from jzero.core.types import PyTree
from jzero.layout.explicit import explicit_axes, in_auto_mode
from jzero.layout.leaf_rule import Layout
from jzero.layout.placement import HOST, memory_kind
from jzero.sharding import Plan
from jzero.update.deferred_update import deferred


def update_leaves(
    news: Sequence[jax.Array | None], masters: Sequence[jax.Array | None], params: Sequence[jax.Array], plan: Plan
) -> list[PyTree]:
    """The leaves that `update` returns.

    Args:
      news: the new value of a param with a master; the difference for one without, or with updates="delta". For a param
        in host memory always the new value, already there in its stored layout. None where a param stays.
      masters: one per param, or None.
      params: to which differences that travel in codes are added.
      plan: the layouts.
    """
    rows, gather = list(zip(news, masters, plan.layouts, strict=True)), comm_of(plan).updates
    if plan.config.updates == "delta":
        return [None if new is None else _stored(gather, x, new) for new, _, x in rows]
    whole = _added(news, params, plan)
    copied = [
        (new, x) for i, (new, master, x) in enumerate(rows)
        if new is not None and master is not None and is_copied(x) and not goes_by_layers(x)
        and memory_kind(new) != HOST and i not in whole
    ]  # fmt: skip
    in_turn = iter(_in_turn([new for new, _ in copied], [x for _, x in copied], plan) if copied else ())
    return [
        deferred(lambda _, value=whole[i]: value, row[2]) if i in whole else _leaf(*row, plan, in_turn)
        for i, row in enumerate(rows)
    ]


def _leaf(
    new: jax.Array | None, master: jax.Array | None, x: Layout, plan: Plan, in_turn: Iterator[Callable[[], jax.Array]]
) -> PyTree:
    """The leaf for one param; `in_turn`: the remaining gathers of copied leaves."""
    gather = comm_of(plan).updates
    if new is None:
        return None
    if x.frozen is not None:
        return deferred(lambda param: param, x)
    if memory_kind(new) == HOST:
        return deferred(lambda _: new, x)
    if master is None:
        return deferred(lambda param: _stored(functools.partial(_sum, plan), x, param, new), x)
    if goes_by_layers(x):
        return deferred(lambda param: _stored(gather.by_layers, x, param, new), x)
    if is_copied(x):
        value = next(in_turn)
        return deferred(lambda _: value(), x)
    gathered = _stored(gather, x, new)
    return deferred(lambda _: gathered, x)


def _added(news: Sequence[Any], params: Sequence[jax.Array], plan: Plan) -> dict[int, jax.Array]:
    """By position, the new params whose differences travel in codes."""
    gather = comm_of(plan).updates
    at = [i for i, x in enumerate(plan.layouts) if news[i] is not None and gather.codes(x)]
    if not at:
        return {}
    layouts = [plan.layouts[i] for i in at]
    values = in_auto_mode(
        lambda params, news: gather.added_in_turn(params, news, layouts),
        ([params[i] for i in at], [news[i] for i in at]), lambda _: [x.stored for x in layouts],
    )  # fmt: skip
    return dict(zip(at, values, strict=True))


def _in_turn(
    news: Sequence[jax.Array], layouts: Sequence[Layout], plan: Plan
) -> list[Callable[[], jax.Array]]:
    """Functions that return gathered leaves; under an Explicit mesh they are all gathered at once."""
    gather = comm_of(plan).updates
    if not explicit_axes():
        return gather.in_turn(news, layouts)
    values = in_auto_mode(
        lambda *news: [value() for value in gather.in_turn(news, layouts)], tuple(news),
        lambda _: [x.stored for x in layouts],
    )  # fmt: skip
    return [lambda value=value: value for value in values]


def _sum(plan: Plan, param: jax.Array, delta: jax.Array, x: Layout) -> jax.Array:
    """A param without a master and its change, added on shards and gathered."""
    gather = comm_of(plan).updates
    new = plan.constrain(plan.constrain(param, x.stored), x.state) + delta
    shard = plan.constrain(new.astype(x.dtype), x.state)
    return gather.by_layers(param, shard, x) if goes_by_layers(x) else gather(shard, x)


def _stored(gathered: Callable[..., jax.Array], x: Layout, *arrays: jax.Array) -> jax.Array:
    """`gathered(*arrays, x)`, in the stored layout."""
    return in_auto_mode(lambda *arrays: gathered(*arrays, x), arrays, lambda _: [x.stored])
