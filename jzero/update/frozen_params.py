"""Which params an optax transformation leaves as they are, read from the jaxpr of its update."""

from __future__ import annotations

import jax

from jzero.core.dependence import constant_zero_outputs, sources_of_outputs
from jzero.update.extra import with_extra


def frozen_leaves(tx, params) -> list[bool]:
    """For each param, whether `tx.update` answers a constant zero whatever the gradient; read from its jaxpr.

    If the update cannot be traced because it needs arguments that jzero does not know, every param counts as trained:
    a frozen one then has a master and moments, which `estimate` and `describe` count.
    """

    def zeros(update):
        def deltas(grads, state, params):
            return jax.tree.leaves(update(grads, state, params)[0])

        # any state, not the initial one: a delayed or accumulated update starts at zero and is not frozen
        return constant_zero_outputs(deltas, params, jax.eval_shape(tx.init, params), params)

    return _of_update(zeros, tx, params)


def kept_leaves(tx, params) -> list[bool]:
    """For each param, whether `tx.update` leaves it as it is and reads no gradient of it: `Frozen.KEPT`.

    If a norm over all gradients comes before the freeze, it reads those of frozen params too. They are then reduced
    like any others, and their params are not `KEPT`.
    """
    found = frozen_leaves(tx, params)
    if not any(found):
        return found

    def unread(update):
        def results(grads, state, params):
            return jax.tree.leaves(update(grads, state, params))

        read = frozenset[int]().union(*sources_of_outputs(results, params, jax.eval_shape(tx.init, params), params))
        return [i not in read for i in range(len(found))]

    return [a and b for a, b in zip(found, _of_update(unread, tx, params), strict=True)]


def _of_update(read, tx, params) -> list[bool]:
    count = len(jax.tree.leaves(params))
    try:
        found = with_extra(read, tx)
    except Exception:  # of the user's transformation, which wants arguments of its own
        return [False] * count
    return found if len(found) == count else [False] * count
