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
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jzero.comm.transport import AsIs, InCodes, sent
from jzero.comm.weights import ring
from jzero.core.ordering import tied
from jzero.layout.blocks import update_blocks
from jzero.layout.leaf_rule import Layout
from jzero.layout.specs import P, axis_of, named_axes, shard_factor, spec_axes
from jzero.sharding import Plan

LARGE = 16 * 2**20  # bytes: a smaller leaf is worth neither a loop nor a place of its own


@dataclasses.dataclass(frozen=True)
class UpdateGather:
    """The all-gather of a new param, or of what is added to it.

    Attributes:
      plan: gives the mesh.
    """

    plan: Plan

    SCOPE = "jzero.gather_params"
    """`named_scope` of its operations."""

    def __call__(self, shard: jax.Array, x: Layout) -> jax.Array:
        """A new param, or the difference to it, in the stored layout."""
        return self.plan.constrain(shard, x.stored)

    def codes(self, x: Layout, shape: Sequence[int] | None = None) -> InCodes | None:
        """How what is added to a param travels, or to a part of this shape; None where the new param does, as it is."""
        blocks = update_blocks(x, self.plan)
        if blocks is None:
            return None
        blocks = dataclasses.replace(blocks, shape=tuple(shape or x.shape))
        return InCodes(blocks, np.dtype(jnp.int8), x.state, x.stored, self.plan.mesh, exact=True)

    def add(self, param: jax.Array, added: jax.Array, x: Layout) -> jax.Array:
        """A param in its stored layout and what is added to it, in fp32 on shards, which travels in codes."""
        way = self.codes(x)
        assert way is not None
        param = self.plan.constrain(param, x.stored)
        return self.plan.constrain(plus(param, sent(way, added, self.plan.constrain)), x.stored)

    def by_layers(self, param: jax.Array, shard: jax.Array, x: Layout) -> jax.Array:
        """The new stack of layers, gathered one by one into the buffer of the old one; see [Note: layer by layer]."""
        plan, count, dims = self.plan, x.shape[0], merged_dims(x)
        layer = self.codes(x, (1, *x.shape[1:]))
        way = self.codes(x) or AsIs(x.shape, x.dtype, x.state, x.stored)
        sends = [plan.constrain(part, before) for part, (before, _) in zip(way.encode(shard), way.layouts, strict=True)]

        def gathered(i):
            parts = []
            for part, (before, after) in zip(sends, way.layouts, strict=True):
                one = plan.constrain(jax.lax.dynamic_slice_in_dim(part, i, 1), before)
                parts.append(plan.constrain(one, after))
            return parts if layer else [parts[0].reshape(1, *dims)]

        def place(i, carry):  # the next layer is under way while this one is written
            stack, parts = carry
            return written(stack, parts, i), gathered(i + 1)

        def written(stack, parts, i):
            new = parts[0]
            if layer:
                added = layer.decode(parts, shard.dtype).reshape(1, *dims)
                new = plus(jax.lax.dynamic_slice_in_dim(stack, i, 1), added)
            return jax.lax.dynamic_update_slice_in_dim(stack, new, i, 0)

        # flat layers: else the layout that the gather likes spreads to the stack, and all of it is copied
        flat = plan.constrain(param, x.stored).reshape(count, *dims)
        flat, last = jax.lax.fori_loop(0, count - 1, place, (flat, gathered(0)))
        flat = written(flat, last, count - 1)
        return plan.constrain(flat.reshape(x.shape), x.stored)

    def added_in_turn(
        self, params: Sequence[jax.Array], added: Sequence[jax.Array], layouts: Sequence[Layout]
    ) -> list[jax.Array]:
        """The new params of `add`, by layers where these are large; see [Note: one copy at a time]."""
        values: list[jax.Array] = []
        for param, shard, x in zip(params, added, layouts, strict=True):
            if values and x.nbytes >= LARGE:
                shard, values[-1] = tied(shard, values[-1])
                shard = self.plan.constrain(shard, x.state)
            add = self.by_layers if goes_by_layers(x) else self.add
            values.append(add(param, shard, x))
        return values

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
        way = self.codes(x)
        size = way.sent_bytes if way else math.prod(x.state_shape) * x.dtype.itemsize
        yield axes, ring(state / stored) * size / stored


def rounded(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """An fp32 array rounded to the values of bfloat16, say, by an operation that XLA does not drop.

    Values that are subnormal in the narrower dtype become zero.
    """
    kind = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, kind.nexp, kind.nmant)


def plus(param: jax.Array, added: jax.Array) -> jax.Array:
    """A param and an fp32 array, added in fp32 and rounded to the dtype of the param."""
    return rounded(param.astype(added.dtype) + added, param.dtype).astype(param.dtype)


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
