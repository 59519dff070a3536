"""What happens where an equation uses a stored weight: it is gathered, and its gradient made and reduced.

[Note: a lookup on the way back]
The gradient of an embedding lookup is added into zeros of the size of the whole table, which XLA may allocate long
before they are needed. Here a loop makes a few columns of the gradient at a time, and reduces them. In straight-line
code the zeros of all parts would still be made early, since nothing can tie a constant to its place.

[Note: a lookup and what reads its rows]
XLA joins a lookup to what reads its rows, once for each reader. Where a norm's backward pass reads them, the gathered
table is alive until then, 2 GB for a vocabulary of 256000 (Flax's gemma), in place of the rows. A barrier keeps the
rows as an array of their own.

[Note: a tied embedding]
The gradient of a tied embedding is the sum of the lookup's and the output head's. XLA adds the lookup's rows into the
gradient of the output head: this is already reduced, so it is gathered again to take the rows, and then reduced once
more (2 Psi more for such a table, 64 H200). If the lookup's gradient is constrained to its shards by itself, XLA adds
the two first and reduces once. At stage 1, where gradients are reduced by the update, this is all that the walk does.

[Note: a matmul on the way back]
The gradient of a weight that is much larger than a bucket (an output head: 2 GB for a vocabulary of 256000) is made in
parts, each a matmul of a slice of the activations or of the cotangent, and reduced while the next is made. The same
way is taken where `reduce_dtype` or the matmul's results are wider than the weight: XLA reduces in the dtype of the
matmul that makes a gradient, whatever is cast afterwards (behind a cast it reduces to whole gradients), so the matmul
is made in that dtype and its result reduced before the cast. For a narrower one each device makes the
gradient of its own examples, casts it, and these are summed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax

from jzero.comm.routes import CONVOLUTION, EXAMPLES, LOOKUP, MATMUL, OTHER, SPREAD, Maker, Route
from jzero.core import jaxprs
from jzero.core.linear import linear
from jzero.core.ordering import in_turn, tied
from jzero.core.products import (
    Product,
    dot_gradient,
    example_dims,
    gradient_dtype,
    lookup_gradient,
    product_gradient,
    row_lookup,
)
from jzero.gather.large_weights import product_in_pieces, rows_in_pieces
from jzero.gather.sharded_weight import Weight, unwrap
from jzero.gather.walk import Walk, gathered, on_shards, reduced, warn_of_dtype

KINDS = {"dot_general": MATMUL, "conv_general_dilated": CONVOLUTION}
SPREADS = ("broadcast_in_dim", "reshape")


def use(eqn, values: list[Any], walk: Walk) -> list[Any]:
    """Gather the weights that the equation reads, bind the equation, and drop the weights."""
    cut = product_in_pieces(eqn, values, walk, use)
    if cut is not None:
        return cut
    at = [i for i, v in enumerate(values) if isinstance(v, Weight)]
    maker = maker_of(eqn, at[0], values)
    route = walk.route(values[at[0]], maker)
    if route.made_here and maker.kind == LOOKUP:
        return lookup(eqn, values, route, walk)
    if not route.made_here or maker.kind == SPREAD:
        for i in at:
            warn_of_dtype(values[i], gradient_dtype(eqn, values[i].dtype), walk)
    flat, rewrap = unwrap(on_shards(values, walk))

    def on_gathered(*flat):
        values = rewrap(flat)
        if not route.made_here:
            return jaxprs.bind(eqn, [gathered(v, walk, kind=maker.kind) for v in values])
        return (unary if maker.kind == SPREAD else product)(eqn, values, at[0], route, walk)

    plain = walk.in_remat or not walk.drops or all(values[i].keeps for i in at)
    outs = list(on_gathered(*flat) if plain else jax.checkpoint(on_gathered)(*flat))
    return apart(outs, values[0]) if maker.kind == LOOKUP else outs


def maker_of(eqn, at: int, values: Sequence[Any]) -> Maker:
    """What an equation is to the gradient of the weight at position `at` of its operands."""
    name, weight = eqn.primitive.name, values[at]
    sole = sum(isinstance(v, Weight) for v in values) == 1
    kind = KINDS.get(name, OTHER)
    if at == 0 and row_lookup(eqn):
        kind = LOOKUP
    elif name in SPREADS and len(values) == 1:
        kind = SPREAD
    known = kind in (MATMUL, CONVOLUTION) and example_dims(eqn, at) is not None
    return Maker(kind, gradient_dtype(eqn, weight.dtype), known, sole)


def lookup(eqn, values: Sequence[Any], route: Route, walk: Walk) -> list[Any]:
    """Rows of a table: see [Note: a lookup on the way back]."""
    table, index = values[0].fetched(walk.comm), values[1]
    (rows, width), parts = table.shape, route.parts

    def fn(index, shard):
        here = dataclasses.replace(table, shard=shard)
        outs = rows_in_pieces(eqn, here, index, walk) or jaxprs.bind(eqn, [gathered(here, walk), index])
        return apart(outs, table)

    def tangent(index, shard):
        whole = walk.comm.weights(shard, table.stored, table.used) if table.split else shard
        return jaxprs.bind(eqn, [whole, index])

    def gradient(index, cotangent):
        cotangent = cotangent if route.made is None else cotangent.astype(route.made)
        return lookup_gradient(eqn, index, cotangent, rows)

    def back(index, cotangent):
        def part(i, grad):
            some = jax.lax.dynamic_slice_in_dim(cotangent, i * (width // parts), width // parts, axis=-1)
            dims = (0, 0) if route.by == EXAMPLES else None
            some = walk.comm.gradients.by_examples(gradient, (index, some), dims, table.grad, route.sent)
            return jax.lax.dynamic_update_slice_in_dim(grad, some.astype(grad.dtype), i * (width // parts), axis=1)

        zeros = walk.plan.constrain(jax.numpy.zeros((rows, width), cotangent.dtype), table.grad)
        return [walk.plan.constrain(jax.lax.fori_loop(0, parts, part, zeros), table.grad)]

    return linear(fn, back, [index], [table.shard], tangent=tangent)


def apart(rows: list[Any], table: Weight) -> list[Any]:
    """Rows that were looked up in a gathered table: see [Note: a lookup and what reads its rows]."""
    return list(tied(*rows)) if table.split else rows


def product(eqn, values: Sequence[Any], at: int, route: Route, walk: Walk) -> list[Any]:
    """A matmul or a convolution whose weight's gradient is made here: see [Note: a matmul on the way back]."""
    weight, other = values[at].fetched(walk.comm), values[1 - at]
    size, dtype = weight.shape[route.dim] // route.parts, weight.dtype

    def gradient(other, cotangent, *, piece):
        if eqn.primitive.name != "dot_general":
            return product_gradient(eqn, at, other, cotangent)
        return dot_gradient(eqn, at, other, cotangent, piece, route.made)

    def back(other, cotangent):
        def part(i, cotangent):
            piece = (route.dim, i * size, size) if route.parts > 1 else None
            dims = example_dims(eqn, at) if route.by == EXAMPLES else None
            make = functools.partial(gradient, piece=piece)
            grad = walk.comm.gradients.by_examples(make, (other, cotangent), dims, weight.grad, route.sent)
            return grad.astype(dtype)

        return [walk.plan.constrain(in_turn(part, cotangent, route.parts, route.dim), weight.grad)]

    return linear(Product(eqn, at), back, [other], [gathered(weight, walk, reduces=False)])


def unary(eqn, values: Sequence[Any], at: int, route: Route, walk: Walk) -> list[Any]:
    """A linear function of one weight, with its gradient summed and reduced in the wider dtype."""
    weight = values[at].fetched(walk.comm)

    def back(cotangent):
        def fn(x):
            return jaxprs.bind(eqn, [x])[0]

        made = jax.ShapeDtypeStruct(weight.shape, route.made)
        (grad,) = jax.linear_transpose(fn, made)(cotangent.astype(route.made))
        return [reduced(grad, weight, walk).astype(weight.dtype)]

    return linear(lambda x: jaxprs.bind(eqn, [x]), back, [], [gathered(weight, walk, reduces=False)])
