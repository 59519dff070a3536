"""How a new param lands: the leaf that an update is, and the ways in which shards become the param.

The leaf is opaque and only lands on its own param; see [Note: an update knows where it lands] in `optim.py`.

[Note: layer by layer]
A stack of layers for a scan that is gathered as one needs a buffer of its own and a copy from the layout of
the gather (its split dim first) to that of the param: 5.5 to 6.5 GB for a 7.5B GPT on 64 H100. A loop gathers one
layer at a time into the buffer of the old stack: 1.2 GB.

[Note: one copy at a time]
A leaf that is split on another dim than its first, on several, or padded, is gathered into a buffer of its own and
copied to the layout of the param. XLA would gather all of them first. A chain of barriers begins each gather when the
last copy is done.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jzero.core.errors import typed_shape
from jzero.layout.leaf_rule import Layout
from jzero.layout.specs import P, spec_axes
from jzero.sharding import Plan

LARGE = 16 * 2**20  # bytes: what is smaller is not worth a loop or a place of its own


class UpdateThatOnlyAddsToItsParam__use_ZeroConfig_updates_delta_for_plain_arrays:
    """A leaf of updates: `param + leaf` is the new param. Opaque on purpose; its name is all that JAX prints."""

    __array_ufunc__ = None  # numpy params: let __radd__ answer

    def __init__(self, add, shape, dtype):
        self._add, self.shape, self.dtype = add, shape, dtype

    def __radd__(self, param):
        fits = hasattr(param, "dtype") and tuple(np.shape(param)) == self.shape and param.dtype == self.dtype
        if not fits:
            got = typed_shape(param) if hasattr(param, "dtype") else repr(param)
            raise TypeError(
                f"jzero: this update lands on a param {typed_shape(self)} and cannot be added to {got}. Add it to "
                'its param by optax.apply_updates, or pass ZeroConfig(updates="delta") for plain arrays.'
            )
        return self._add(param)

    def __add__(self, other):
        raise TypeError(
            "jzero: an update stands on the right of the sum, param + update, as in optax.apply_updates; "
            'pass ZeroConfig(updates="delta") for plain arrays.'
        )

    def __getattr__(self, name):
        raise AttributeError(_no_array(name))

    def __repr__(self):
        return f"<jzero update of a param {typed_shape(self)}>"


def _no_array(asked: str) -> str:
    return (
        f"jzero: an update is no array, and has no {asked!r}: it only lands on its param. Take norms of the gradients, "
        "optax.global_norm(grads), scale inside of the chain that jzero.zero wraps (optax.chain), or pass "
        'ZeroConfig(updates="delta") for plain arrays.'
    )


def _refused(name: str):
    def refuse(self, *others):
        raise TypeError(_no_array(name))

    return refuse


for _name in [
    "mul",
    "rmul",
    "sub",
    "rsub",
    "truediv",
    "rtruediv",
    "matmul",
    "rmatmul",
    "pow",
    "neg",
    "abs",
    "getitem",
]:
    setattr(
        UpdateThatOnlyAddsToItsParam__use_ZeroConfig_updates_delta_for_plain_arrays,
        f"__{_name}__", _refused(f"__{_name}__"),
    )  # fmt: skip


def landing(add, x: Layout):
    """An update leaf that answers `param + leaf` with `add(param)`."""
    return UpdateThatOnlyAddsToItsParam__use_ZeroConfig_updates_delta_for_plain_arrays(add, x.shape, x.dtype)


def land_on_sum(delta, x: Layout, plan: Plan):
    """An update leaf of a param without master: `param + leaf` is the sum, taken on shards."""

    def add(param):
        new = plan.constrain(plan.constrain(param, x.stored), x.state) + delta
        shard = plan.constrain(new.astype(x.dtype), x.state)
        return (
            land_by_layers(param, shard, x, plan) if lands_by_layers(x) else plan.constrain(shard, x.stored)
        )

    return landing(add, x)


def is_copied(x: Layout) -> bool:
    """A large leaf whose gather is no whole result: split along another dim than the first, several, or padded.

    Not one that stays split along another dim than the first: flat, it would have to be gathered whole.
    """
    if x.state == x.stored or x.nbytes < LARGE or spec_axes(P(*x.stored[1:])):
        return False
    return not (x.along_one_dim and spec_axes(P(*x.state[:1])))


class OneByOne:
    """See [Note: one copy at a time]: gathers of leaves that are copied, each begun when the last is copied."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.values: list[Any] = []

    def gather(self, shard, x: Layout):
        """A function that returns the gathered leaf, once all leaves have been given."""
        if self.values:
            # both results are used, or XLA would drop the barrier
            shard, self.values[-1] = jax.lax.optimization_barrier((shard, self.values[-1]))
            shard = self.plan.constrain(shard, x.state)
        at = len(self.values)
        # flat: the copy to the layout of the param comes before the barrier
        self.values.append(self.plan.constrain(shard, x.stored).reshape(-1))
        return lambda: self.plan.constrain(self.values[at].reshape(x.shape), x.stored)


def lands_by_layers(x: Layout) -> bool:
    """See [Note: layer by layer]."""
    return x.scan_dim == 0 and x.state != x.stored and x.nbytes >= LARGE


def land_by_layers(param, shard, x: Layout, plan: Plan):
    """The new stack of layers, gathered one by one into the buffer of the old one."""

    count = x.shape[0]

    def gathered(i):
        layer = plan.constrain(jax.lax.dynamic_slice_in_dim(shard, i, 1), x.state)
        return plan.constrain(layer, x.stored).reshape(1, -1)

    def land(i, carry):  # the next layer is under way while this one is written
        stack, layer = carry
        return jax.lax.dynamic_update_slice_in_dim(stack, layer, i, 0), gathered(i + 1)

    # flat layers: else the layout that the gather likes spreads to the stack, and all of it is copied
    flat = plan.constrain(param, x.stored).reshape(count, -1)
    flat, last = jax.lax.fori_loop(0, count - 1, land, (flat, gathered(0)))
    flat = jax.lax.dynamic_update_slice_in_dim(flat, last, count - 1, 0)
    return plan.constrain(flat.reshape(x.shape), x.stored)
