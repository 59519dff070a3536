"""Traces updates that need more arguments than gradients, state and params, with stand-ins for these."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax.numpy as jnp
import optax

T = TypeVar("T")


def with_extra(read: Callable[[Callable], T], tx: optax.GradientTransformation) -> T:
    """`read(update)`, where `update(grads, state, params)` calls `tx.update` with the other arguments that it needs.

    jzero tries in turn what optax's own updates take: nothing more; the value of the loss (`value=`); for line
    searches also the gradient and the loss as a function (`grad=`, `value_fn=`).

    Raises:
      Exception: what `read` raised at the first try, if none succeeds.
    """
    tx = optax.with_extra_args_support(tx)

    def plain(grads, state, params):
        return tx.update(grads, state, params)

    def with_value(grads, state, params):
        return tx.update(grads, state, params, value=jnp.zeros(()))

    def with_function(grads, state, params):
        return tx.update(grads, state, params, value=jnp.zeros(()), grad=grads, value_fn=lambda _: jnp.zeros(()))

    failed: list[Exception] = []
    for update in (plain, with_value, with_function):
        try:
            return read(update)
        except Exception as error:  # an update checks its arguments as it likes
            failed.append(error)
    raise failed[0]
