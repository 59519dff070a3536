"""Weights that are too large to be whole: gathered, used and dropped piece by piece.

[Note: pieces of a weight]
A weight of more than `Plan.whole_bytes` that a matmul or a lookup of rows reads is cut along a dim that no layout of it
splits, so a piece lies on all devices as the weight does. Each piece is gathered and used before the next one is
gathered; on the way back in the reverse order, and its gradient is reduced. The same bytes travel, in more messages. Of
a matmul the results are put together, or added in fp32 where the dim is summed over (a tied table); of a lookup the
columns are, and its gradient is made as in [Note: a lookup on the way back]. A weight in codes stays whole,
since a piece would have other blocks. (Memory-centric tiling: Rajbhandari et al., ZeRO-Infinity, arXiv 2104.07857,
section 5.1.3.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jzero.core import jaxprs
from jzero.core.dims import dim_in_result, dot_dims
from jzero.core.linear import linear
from jzero.core.ordering import tied
from jzero.core.types import JaxprEqn
from jzero.core.vocabulary_pieces import VocabularyPieces
from jzero.gather.sharded_weight import Weight, pieces
from jzero.gather.walk import Walk, gathered
from jzero.layout.specs import axis_size, entry_axes, shard_factor, spec_entries

Use = Callable[[JaxprEqn, list[Any], Walk], list[Any]]


PIECES = 4
"""That many pieces, at least, are `whole_bytes`: two are there at once, and their gradients."""


def product_in_pieces(eqn: JaxprEqn, values: Sequence[Any], walk: Walk, use: Use) -> list[Any] | None:
    """The results of a matmul whose weight is used piece by piece; None for a weight that is whole.

    Args:
      eqn: reads weights; None for one that is no matmul, too.
      values: its operands.
      walk: gives the plan.
      use: what a matmul with a piece is handed to.
    """
    at = [i for i, v in enumerate(values) if isinstance(v, Weight)]
    if eqn.primitive.name != "dot_general" or len(at) > 1:
        return None
    weight, other = values[at[0]], values[1 - at[0]]
    # one that the result has too, if there is one: else the results are added
    dims = sorted(range(len(weight.shape)), key=lambda d: dim_in_result(eqn, at[0], d) is None)
    cut, outs = _cut(weight, dims, walk), list[Any]()
    if cut is None:
        return None
    joined, beside = dim_in_result(eqn, at[0], cut[0]), _summed_with(eqn, at[0], cut[0])
    for first, piece in _pieces(weight, *cut, walk):
        if outs:
            other, outs[-1], piece = _after(other, outs[-1], piece, walk)
        last = first + piece.shape[cut[0]]
        part = other if beside is None else jax.lax.slice_in_dim(other, first, last, axis=beside)
        operands = [piece, part] if at[0] == 0 else [part, piece]
        found = use(_smaller(eqn, operands, wide=joined is None), operands, walk)
        outs = [*outs, *found] if joined is not None or not outs else [outs[0] + found[0]]
    return [jnp.concatenate(outs, axis=joined) if joined is not None else outs[0].astype(eqn.outvars[0].aval.dtype)]


def rows_in_pieces(eqn: JaxprEqn, table: Weight, index: jax.Array, walk: Walk) -> list[Any] | None:
    """The rows that are looked up in a table, without a derivative; None where it is whole."""
    cut, outs = _cut(table, [1], walk), list[Any]()
    if cut is None:
        return None
    for _, piece in _pieces(table, *cut, walk):
        if outs:
            outs[-1], shard = tied(outs[-1], piece.shard)
            piece = dataclasses.replace(piece, shard=walk.plan.constrain(shard, piece.stored))
        params = {**eqn.params, "slice_sizes": (1, piece.shape[1])}
        whole = gathered(piece, walk, reduces=False)
        outs.append(eqn.primitive.bind(whole, index, **eqn.primitive.get_bind_params(params)))
    return [jnp.concatenate(outs, axis=-1)]


def _summed_with(eqn: JaxprEqn, at: int, dim: int) -> int | None:
    """The dim of the other operand that is summed over together with a dim of operand `at`."""
    contract = dot_dims(eqn).contract
    return dict(zip(contract[at], contract[1 - at], strict=True)).get(dim)


def _cut(weight: Weight, dims: Sequence[int], walk: Walk) -> tuple[int, int] | None:
    """(dim, its size in a piece) for the first of these dims that no layout splits; None: the weight is whole."""
    wanted, split = _wanted(weight, walk), weight.split_dims
    if not wanted or split is None:
        return None
    cuts = ((d, -(-weight.shape[d] // wanted)) for d in dims if d not in split and weight.shape[d] >= wanted)
    return next(cuts, None)


def classes_in_pieces(head: Any, walk: Walk) -> VocabularyPieces | None:
    """How a tiled loss cuts the classes of its head, [features, classes]; None for one that is whole."""
    wanted = _wanted(head, walk) if isinstance(head, Weight) else 0
    if not wanted:
        return None
    entries = [entry_axes(spec_entries(spec, 2)[1]) for spec in (head.stored, head.used, head.grad)]
    finest = max(entries, key=len)
    parts = axis_size(walk.plan.mesh, finest)
    if any(entry != finest[: len(entry)] for entry in entries) or head.shape[1] % parts:
        return None
    found = VocabularyPieces.of(head.shape[1], parts, wanted)
    return found if found.count > 1 else None


def _wanted(weight: Weight, walk: Walk) -> int:
    """How many pieces a weight is cut into, at most; 0: it is whole."""
    most, size = walk.plan.whole_bytes, weight.held_bytes // shard_factor(weight.used, walk.plan.mesh)
    whole = not weight.split or weight.keeps or size <= most or not weight.source.direct or weight.order is not None
    return 0 if whole else -(-PIECES * size // most)


def _pieces(weight: Weight, dim: int, size: int, walk: Walk) -> Iterator[tuple[int, Weight]]:
    """Where each piece begins, and the piece; the last one may be smaller."""
    for first in range(0, weight.shape[dim], size):
        (piece,) = pieces(_slice(weight, dim, first, size), weight, walk.plan.config.quantize_block)
        yield first, piece


def _slice(weight: Weight, dim: int, first: int, size: int) -> JaxprEqn:
    """The equation that cuts a piece out."""

    def cut(w):
        return [jax.lax.slice_in_dim(w, first, min(first + size, w.shape[dim]), axis=dim)]

    return jaxprs.trace(cut, weight.aval)[0].eqns[0]


def _smaller(eqn: JaxprEqn, operands: Sequence[Any], *, wide: bool) -> JaxprEqn:
    """The same matmul for a piece of its weight; `wide`: with results in fp32, which are added."""
    given = [x.aval if isinstance(x, Weight) else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    params = dict(eqn.params)
    if wide:
        params["preferred_element_type"] = jnp.promote_types(eqn.outvars[0].aval.dtype, jnp.float32)

    def bind(*xs):
        return [eqn.primitive.bind(*xs, **eqn.primitive.get_bind_params(params))]

    return jaxprs.trace(bind, *given)[0].eqns[-1]


def _after(other: jax.Array, out: jax.Array, piece: Weight, walk: Walk) -> tuple[Any, Any, Weight]:
    """The next piece only when the result of the last one is there; on the way back the reverse."""

    def forward(*values):
        *rest, shard = tied(*values)
        return [*rest, walk.plan.constrain(shard, piece.stored)]

    other, out, shard = linear(forward, lambda *cotangents: list(tied(*cotangents)), [], [other, out, piece.shard])
    return other, out, dataclasses.replace(piece, shard=shard)
