"""Which params an optax transformation leaves as they are, read from the jaxpr of its update."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import jax
import optax

from jzero.core.dependence import constant_zero_outputs, sources_of_outputs
from jzero.core.types import PyTree
from jzero.update.extra import with_extra

Read = Callable[[PyTree, PyTree, Callable[..., Any]], list[bool]]
_FOUND: WeakKeyDictionary[Any, WeakKeyDictionary[Any, dict[Any, list[bool]]]] = WeakKeyDictionary()
"""By the two functions of a transformation, for as long as they live: they may hold tracers."""


def frozen_leaves(tx: optax.GradientTransformation, params: PyTree) -> list[bool]:
    """For each param, whether `tx.update` answers a constant zero whatever the gradient; read from its jaxpr.

    If the update cannot be traced because it needs arguments that jzero does not know, every param counts as trained:
    a frozen one then has a master and moments, which `estimate` and `describe` count.
    """
    return _of_update(_frozen, tx, params)


def kept_leaves(tx: optax.GradientTransformation, params: PyTree) -> list[bool]:
    """For each param, whether `tx.update` leaves it as it is and reads no gradient of it: `Frozen.KEPT`.

    If a norm over all gradients comes before the freeze, it reads those of frozen params too. They are then reduced
    like any others, and their params are not `KEPT`.
    """
    found = frozen_leaves(tx, params)
    return [a and b for a, b in zip(found, _of_update(_unread, tx, params), strict=True)] if any(found) else found


def _of_update(read: Read, tx: optax.GradientTransformation, params: PyTree) -> list[bool]:
    """What `read` finds in the trace of an update. It is traced once for all plans, as `jax.jit` traces it once."""
    leaves, tree = jax.tree.flatten(params)
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
    try:
        known = _FOUND.setdefault(tx.update, WeakKeyDictionary()).setdefault(tx.init, {})
    except TypeError:  # callable objects of the user's that cannot be keys
        known = {}
    key = read, tree, shapes
    if key not in known:
        params = jax.tree.unflatten(tree, shapes)
        try:
            found = with_extra(functools.partial(read, params, jax.eval_shape(tx.init, params)), tx)
        except Exception:  # of the user's transformation, which wants arguments of its own
            found = []
        known[key] = found if len(found) == len(leaves) else [False] * len(leaves)
    return list(known[key])


def _frozen(params: PyTree, state: PyTree, update: Callable[..., Any]) -> list[bool]:
    def deltas(grads, state, params):
        return jax.tree.leaves(update(grads, state, params)[0])

    # any state, not the initial one: a delayed or accumulated update starts at zero and is not frozen
    return constant_zero_outputs(deltas, params, state, params)


def _unread(params: PyTree, state: PyTree, update: Callable[..., Any]) -> list[bool]:
    def results(grads, state, params):
        return jax.tree.leaves(update(grads, state, params))

    read = frozenset[int]().union(*sources_of_outputs(results, params, state, params))
    return [i not in read for i in range(len(jax.tree.leaves(params)))]
