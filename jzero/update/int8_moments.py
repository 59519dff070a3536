"""`moment_dtype="int8"`: moments as 8-bit codes with one fp32 scale per block, for any optax transformation.

[Note: the map]
A code c from -127 to 127 stands for sign(c) (|c| / 127)^4 times the scale of its block, the largest magnitude in it.
The fourth power keeps small values: the least is 4e-9 of the scale, and neighbors differ by a factor 1 + 4/|c|. It is
computed, since a table of 256 values and a search in it compiled to 50 MB of temp for two leaves. A linear map turns
all small second moments of a block into zeros, and the update divides by them.

[Note: rounding of codes]
Rounded to nearest, a second moment with a decay of 0.999 rises only at large gradients and falls only with its scale:
for normal gradients of one variance it ends 44 % too high in the median, where random rounding is 0.5 % off (`python
benchmarks/moments.py`). So codes are rounded up or down at random, with the hash and the count of
`moment_dtype.py`. What a code holds exactly is kept, as a skipped step needs it. A nonzero value never becomes zero:
the update could divide a nonzero first moment by a zero second moment.

[Note: the update is computed twice]
All scales must exist before the first code, and a scale needs the moments of its whole block. Kept, they would be an
fp32 buffer of the size of the shard. So the update runs twice, first for the scales, then for the codes and the new
params, each fused into what it reads: codes, scales, gradients and masters. The second run waits for the scales;
otherwise XLA would see that both are the same computation, and keep it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from jzero.core.ordering import tied
from jzero.core.types import PyTree
from jzero.layout.blocks import Blocks, blocks_of
from jzero.layout.leaf_rule import path_keys
from jzero.layout.placement import on_device
from jzero.sharding import Plan
from jzero.update.moment_dtype import ROUNDING_COUNT, counts_of, hashed, in_dtype, leaves_of, widened
from jzero.update.zero_state import Quantized, inner_of, scales_of

LEVELS = 127
"""The largest code."""
Scales = list[jax.Array | None]
"""For each leaf of a state its scales, if it has any."""


@dataclasses.dataclass(frozen=True)
class Moment:
    """A leaf of a state: its own dtype, the one in which its transformation sees it, and its blocks if it has any."""

    dtype: DTypeLike
    seen: Any
    blocks: Blocks | None


@dataclasses.dataclass(frozen=True, eq=False)
class Int8Moments:
    """The transformation `tx` with its moments in 8 bits.

    Attributes:
      tx: any optax transformation.
      plan: names the params and the size of blocks.
      params: their tree, abstract, in the dtypes that `tx` sees.
    """

    tx: optax.GradientTransformation
    plan: Plan
    params: PyTree

    @functools.cached_property
    def moments(self) -> list[Moment]:
        """What is known of each leaf of the state.

        Raises:
          ValueError: it has no moments.
        """
        leaves = leaves_of(self.tx, self.plan, self.params)
        if not any(x.moment_of for x in leaves):
            raise ValueError(
                'ZeroConfig(moment_dtype="int8"): the state of this optimizer has no moments (floating arrays of the '
                "shapes of the params whose first values do not depend on them). Leave moment_dtype out."
            )
        blocks = [None if x.moment_of is None else blocks_of(x.moment_of, self.plan) for x in leaves]
        return [Moment(x.dtype, x.seen, b) for x, b in zip(leaves, blocks, strict=True)]

    @functools.cached_property
    def counts(self) -> list[int]:
        """Positions of the state's own counts of steps."""
        return counts_of(self.tx, self.params)

    def init(self, params: PyTree) -> Quantized:
        """The state of `tx` for these params, stored."""
        return self.stored(self.tx.init(widened(params, self.plan.config.moment_dtype)))

    def update(
        self, update: Callable[..., Any], grads: PyTree, state: Quantized, params: PyTree, extra: dict[str, Any]
    ) -> tuple[PyTree, Quantized]:
        """The update of `tx` between stored states; `update`: that of `tx`, as it runs on shards."""
        extra = dict(extra)
        count = extra.pop(ROUNDING_COUNT, None)
        grads, params = (widened(x, self.plan.config.moment_dtype) for x in (grads, params))
        _, new = update(grads, self.seen(state), params, **extra)
        scales, state = self.after_scales(self.scales(new), state)
        updates, new = update(grads, self.seen(state), params, **extra)
        return updates, self.stored(new, scales, self.salt(new, count))

    def after_scales(self, scales: Scales, state: Quantized) -> tuple[Scales, Quantized]:
        """New scales, and the old codes once they are there: see [Note: the update is computed twice]."""
        leaves, tree = jax.tree.flatten(state.inner)
        rows = [(s, x) if s is None else tied(s, x) for s, x in zip(scales, leaves, strict=True)]
        return [s for s, _ in rows], state._replace(inner=tree.unflatten([x for _, x in rows]))

    def salt(self, new: PyTree, count: Any) -> Any:
        """A uint32 that gives this step other random bits than the last."""
        if count is None:
            leaves = jax.tree.leaves(new)
            count = sum(leaves[i].astype(jnp.uint32) for i in self.counts)
        return jnp.asarray(count).astype(jnp.uint32)

    def seen(self, state: Quantized) -> PyTree:
        """The state as `tx` knows it."""
        leaves, tree = jax.tree.flatten(state.inner)
        rows = zip(leaves, scales_by_leaf(state.inner, state.moment_scales), self.moments, strict=True)
        return tree.unflatten(
            [in_dtype(x if m.blocks is None or s is None else decoded(x, s, m.blocks), m.seen) for x, s, m in rows]
        )

    def scales(self, state: PyTree) -> Scales:
        """The scales of a state of `tx`, for each leaf."""
        rows = zip(jax.tree.leaves(state), self.moments, strict=True)
        return [None if m.blocks is None else scale_of(x, m.blocks) for x, m in rows]

    def stored(self, state: PyTree, scales: Scales | None = None, salt: jax.Array | None = None) -> Quantized:
        """A state of `tx` as it is stored; without `salt` codes are rounded to nearest."""
        leaves, tree = jax.tree.flatten(state)
        scales = self.scales(state) if scales is None else scales
        codes = []
        for i, (x, s, m) in enumerate(zip(leaves, scales, self.moments, strict=True)):
            if m.blocks is None or s is None:
                codes.append(in_dtype(x, m.dtype))
            else:
                codes.append(encoded(x, s, m.blocks, None if salt is None else salt + i))
        return Quantized(tree.unflatten(codes), tree.unflatten(scales))


class BlockArray(NamedTuple):
    """A leaf of a state: values, or codes with their scales and blocks."""

    values: Any
    scales: Any = None
    blocks: Blocks | None = None

    @property
    def dtype(self) -> Any:
        """Of the values that it stands for."""
        return jnp.result_type(self.values) if self.blocks is None else jnp.dtype(jnp.float32)

    def wide(self) -> Any:
        """The values; those of codes are computed in device memory."""
        return self.values if self.blocks is None else _decoded(*map(on_device, self[:2]), blocks=self.blocks)


def scales_by_leaf(inner: PyTree, scales: PyTree) -> Scales:
    """The scales of each leaf of a state, by their paths: NNX has other nodes where a part has no leaves."""
    known = {path_keys(k): s for k, s in jax.tree_util.tree_leaves_with_path(scales)}
    found = [known.pop(path_keys(k), None) for k, _ in jax.tree_util.tree_leaves_with_path(inner)]
    assert not known, f"scales without moments: {list(known)}"
    return found


def block_leaves(opt_state: PyTree) -> list[BlockArray]:
    """The leaves of the inner part of an optimizer state, real or abstract."""
    inner = inner_of(opt_state)
    rows = zip(jax.tree.leaves(inner), scales_by_leaf(inner, scales_of(opt_state)), strict=True)
    return [BlockArray(x) if s is None else BlockArray(x, s, Blocks.between(x.shape, s.shape)) for x, s in rows]


def with_values(opt_state: PyTree) -> PyTree:
    """An optimizer state with the values that its codes stand for; one without codes as it is."""
    if scales_of(opt_state) is None:
        return opt_state
    inner = jax.tree.structure(opt_state.inner).unflatten([x.wide() for x in block_leaves(opt_state)])
    whole = opt_state._replace(inner=inner, moment_scales=None)
    return whole if jax.tree.leaves((whole.master, whole.rounding_count)) else inner


@functools.partial(jax.jit, static_argnames="blocks")
def quantize(x: jax.Array, blocks: Blocks) -> tuple[jax.Array, jax.Array]:
    """The codes of an array, rounded to nearest, and their scales."""
    scales = scale_of(x, blocks)
    return encoded(x, scales, blocks), scales


def scale_of(x: jax.Array, blocks: Blocks) -> jax.Array:
    """The scale of every block of an array: its largest magnitude, fp32."""
    return jnp.max(jnp.abs(blocks.cut(x.astype(jnp.float32))), axis=-1)


def decoded(codes: jax.Array, scales: jax.Array, blocks: Blocks) -> jax.Array:
    """The values that codes stand for, fp32: see [Note: the map]."""
    return _value(codes.astype(jnp.float32)) * blocks.spread(scales)


def encoded(x: jax.Array, scales: jax.Array, blocks: Blocks, salt: jax.Array | None = None) -> jax.Array:
    """The codes of an array, int8.

    `encoded(decoded(codes, ...)) == codes` for the scales that codes have. See [Note: rounding of codes].

    Args:
      x: floating, no larger than its scale.
      scales: of `scale_of`.
      blocks: of the array.
      salt: uint32 scalar; None rounds to nearest.
    """
    x, scale = x.astype(jnp.float32), blocks.spread(scales)
    share = jnp.abs(x) / jnp.where(scale > 0, scale, 1)
    code = jnp.round(LEVELS * jnp.sqrt(jnp.sqrt(share)))
    if salt is not None:
        held = _value(code) * scale
        low = jnp.where(jnp.abs(x) < held, code - 1, code)
        below, above = _value(low), _value(low + 1)
        bits = hashed(jax.lax.bitcast_convert_type(x, jnp.uint32) + salt * jnp.uint32(0x9E3779B9))
        up = (bits >> 8).astype(jnp.float32) * 2.0**-24 < (share - below) / (above - below)
        code = jnp.where(jnp.abs(x) == held, code, low + up)
    code = jnp.clip(code, jnp.where(x == 0, 0, 1), LEVELS)
    return (jnp.sign(x) * code).astype(jnp.int8)


_decoded = jax.jit(decoded, static_argnames="blocks")


def _value(code: jax.Array) -> jax.Array:
    """What a code stands for at a scale of 1."""
    root = code * jnp.float32(1 / LEVELS)
    return jnp.sign(code) * jnp.square(jnp.square(root))
