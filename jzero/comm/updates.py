"""New params on their way from the shards of the optimizer state to the stored layout (stages 1 and 2).

[Note: layer by layer]
A stack of layers for a scan that is gathered as one needs a buffer of its own and a copy from the layout of
the gather (its split dim first) to that of the param: 5.5 to 6.5 GB for a 7.5B GPT on 64 H100. A loop gathers one
layer at a time into the buffer of the old stack: 1.2 GB.

[Note: one copy at a time]
A leaf that is split along a dim other than the first, along several dims, or padded, is gathered into a buffer of its
own and copied to the layout of the param. XLA would gather all such leaves first. So each gather waits until the last
copy is done.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import jax

from jzero.comm.weights import ring
from jzero.core.ordering import tied
from jzero.layout.leaf_rule import Layout
from jzero.layout.specs import P, axis_of, named_axes, shard_factor, spec_axes
from jzero.sharding import Plan

LARGE = 16 * 2**20  # bytes: a smaller leaf is worth neither a loop nor a place of its own


@dataclasses.dataclass(frozen=True)
class UpdateGather:
    """The all-gather of a new param.

    Attributes:
      plan: gives the mesh.
    """

    plan: Plan

    SCOPE = "jzero.gather_params"
    """`named_scope` of its operations."""

    def __call__(self, shard: jax.Array, x: Layout) -> jax.Array:
        """A new param, or the difference to it, in the stored layout."""
        return self.plan.constrain(shard, x.stored)

    def by_layers(self, param: jax.Array, shard: jax.Array, x: Layout) -> jax.Array:
        """The new stack of layers, gathered one by one into the buffer of the old one; see [Note: layer by layer]."""
        plan, count, dims = self.plan, x.shape[0], merged_dims(x)

        def gathered(i):
            layer = plan.constrain(jax.lax.dynamic_slice_in_dim(shard, i, 1), x.state)
            return plan.constrain(layer, x.stored).reshape(1, *dims)

        def place(i, carry):  # the next layer is under way while this one is written
            stack, layer = carry
            return jax.lax.dynamic_update_slice_in_dim(stack, layer, i, 0), gathered(i + 1)

        # flat layers: else the layout that the gather likes spreads to the stack, and all of it is copied
        flat = plan.constrain(param, x.stored).reshape(count, *dims)
        flat, last = jax.lax.fori_loop(0, count - 1, place, (flat, gathered(0)))
        flat = jax.lax.dynamic_update_slice_in_dim(flat, last, count - 1, 0)
        return plan.constrain(flat.reshape(x.shape), x.stored)

    def in_turn(self, shards: Sequence[jax.Array], layouts: Sequence[Layout]) -> list[Callable[[], jax.Array]]:
        """Functions that return the gathered leaves, each gather begun when the last copy is done.

        See [Note: one copy at a time].
        """
        values: list[jax.Array] = []
        for shard, x in zip(shards, layouts, strict=True):
            if values:
                shard, values[-1] = tied(shard, values[-1])
                shard = self.plan.constrain(shard, x.state)
            # flat: the copy to the layout of the param comes before the barrier
            values.append(self.plan.constrain(shard, x.stored).reshape(-1))

        def copy(value, x):
            return lambda: self.plan.constrain(value.reshape(x.shape), x.stored)

        return [copy(value, x) for value, x in zip(values, layouts, strict=True)]

    def wire(self, x: Layout) -> Iterator[tuple[tuple[str, ...], float]]:
        """(mesh axes, bytes that one device sends) of the gather of a param after the update."""
        if x.frozen is not None:
            return
        own = (a for a in named_axes(x.state) if a not in (*named_axes(x.stored), *named_axes(x.used)))
        axes = tuple(dict.fromkeys(map(axis_of, own)))
        state, stored = (shard_factor(spec, self.plan.mesh) for spec in (x.state, x.stored))
        size = math.prod(x.state_shape) * x.dtype.itemsize
        yield axes, ring(state / stored) * size / stored


def is_copied(x: Layout) -> bool:
    """A large leaf whose gathered pieces must be copied into place: see [Note: one copy at a time].

    Not one that stays split along a dim other than the first: flat, it would have to be gathered whole.
    """
    if x.state == x.stored or x.nbytes < LARGE or spec_axes(P(*x.stored[1:])):
        return False
    return not (x.along_one_dim and spec_axes(P(*x.state[:1])))


def merged_dims(x: Layout) -> tuple[int, ...]:
    """The shape of a layer with each unsplit dim merged into the one before it; merging a split dim would gather it."""
    dims: list[int] = []
    for size, axes in itertools.zip_longest(x.shape[1:], x.stored[1:]):
        if axes or not dims:
            dims.append(size)
        else:
            dims[-1] *= size
    return tuple(dims)


def goes_by_layers(x: Layout) -> bool:
    """See [Note: layer by layer]."""
    return x.scan_dim == 0 and x.state != x.stored and x.nbytes >= LARGE
