"""Which params an optax transformation leaves as they are, read from the jaxpr of its update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal
from weakref import WeakKeyDictionary

import jax
import optax

from jzero.core.dependence import constant_zero_outputs, sources_of_outputs
from jzero.core.types import PyTree, PyTreeDef
from jzero.update.extra import with_extra

Read = Literal["frozen", "unread"]
_FOUND: WeakKeyDictionary[Any, WeakKeyDictionary[Any, dict[Any, tuple[bool, ...]]]] = WeakKeyDictionary()
"""By the two functions of a transformation, for as long as they live: they may hold tracers."""


def frozen_leaves(tx: optax.GradientTransformation, params: PyTree) -> list[bool]:
    """For each param, whether `tx.update` answers a constant zero whatever the gradient; read from its jaxpr.

    If the update cannot be traced because it needs arguments that jzero does not know, every param counts as trained:
    a frozen one then has a master and moments, which `estimate` and `describe` count.
    """
    return _of_update("frozen", tx, params)


def kept_leaves(tx: optax.GradientTransformation, params: PyTree) -> list[bool]:
    """For each param, whether `tx.update` leaves it as it is and reads no gradient of it: `Frozen.KEPT`.

    If a norm over all gradients comes before the freeze, it reads those of frozen params too. They are then reduced
    like any others, and their params are not `KEPT`.
    """
    found = frozen_leaves(tx, params)
    return [a and b for a, b in zip(found, _of_update("unread", tx, params), strict=True)] if any(found) else found


def _of_update(what: Read, tx: optax.GradientTransformation, params: PyTree) -> list[bool]:
    """See `frozen_leaves` and `kept_leaves`. An update is traced once for all plans, as `jax.jit` traces it once."""
    leaves, tree = jax.tree.flatten(params)
    key = (what, tree, tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves))
    try:
        found = _FOUND.setdefault(tx.update, WeakKeyDictionary()).setdefault(tx.init, {})
    except TypeError:  # callable objects of the user's that cannot be keys
        found = {}
    if key not in found:
        found[key] = _read(what, tx, *key[1:])
    return list(found[key])


def _read(
    what: Read, tx: optax.GradientTransformation, tree: PyTreeDef, shapes: Sequence[jax.ShapeDtypeStruct]
) -> tuple[bool, ...]:
    params = jax.tree.unflatten(tree, shapes)
    count = len(shapes)

    def frozen(update: Callable[..., Any]) -> list[bool]:
        def deltas(grads, state, params):
            return jax.tree.leaves(update(grads, state, params)[0])

        # any state, not the initial one: a delayed or accumulated update starts at zero and is not frozen
        return constant_zero_outputs(deltas, params, jax.eval_shape(tx.init, params), params)

    def unread(update: Callable[..., Any]) -> list[bool]:
        def results(grads, state, params):
            return jax.tree.leaves(update(grads, state, params))

        read = frozenset[int]().union(*sources_of_outputs(results, params, jax.eval_shape(tx.init, params), params))
        return [i not in read for i in range(count)]

    try:
        found = with_extra(frozen if what == "frozen" else unread, tx)
    except Exception:  # of the user's transformation, which wants arguments of its own
        return (False,) * count
    return tuple(found) if len(found) == count else (False,) * count
