"""What happens where an equation uses a stored weight: it is gathered, and its gradient made and reduced.

[Note: a lookup on the way back]
The gradient of an embedding lookup is added into zeros of the size of the whole table, which XLA may make long
before. Here a loop makes it some columns at a time, and reduces these: in straight-line code the zeros of all parts
would still be made early, and nothing can tie a constant to its place.

[Note: a tied embedding]
Its gradient is the sum of two, and XLA adds the lookup's rows into that of the output head: this one, reduced
already, is gathered again to take them, and all is reduced once more (2 Psi more for such a table, 64 H200). Where
the lookup's gradient is constrained to its shards by itself, XLA adds the two first and reduces once. At stage 1, where
gradients are reduced by the update, this is all that the walk does.

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
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jzero.comm import comm_of
from jzero.core import jaxprs
from jzero.core.linear import linear
from jzero.core.ordering import tied
from jzero.core.products import (
    Product,
    dot_gradient,
    example_dims,
    gradient_dtype,
    lookup_gradient,
    product_gradient,
    row_lookup,
)
from jzero.gather.sharded_weight import Weight, unwrap
from jzero.layout.specs import P, spec_axes
from jzero.sharding import Plan

CUT_BUCKETS = 8  # times `bucket_bytes`: in parts from there on
SHARE_SAID = (
    20  # one of so many parts of the params: a smaller weight's wider gradient is not worth a warning
)


class WeightOps:
    """How weights are used in one part of a function.

    Attributes:
      plan: gives the mesh and the bytes of a bucket.
      in_remat: inside a region that is computed again as a whole.
      ordered: the weights of the function make more than one bucket.
    """

    def __init__(self, plan: Plan, *, in_remat: bool = False, ordered: bool = True):
        self.plan, self.in_remat, self.ordered = plan, in_remat, ordered
        self.comm = comm_of(plan)

    @property
    def drops(self) -> bool:
        """A gathered weight is gone after its use."""
        return self.plan.config.row.params and not self.plan.config.keeps_gathered

    def use(self, eqn, values: list[Any]) -> list[Any]:
        """Gather the weights that the equation reads, bind it, and let go of them."""
        table = values[0]
        looked_up = row_lookup(eqn) and isinstance(table, Weight) and table.is_reduced
        alone = not (self.ordered or self.plan.config.row.params)
        if looked_up and (
            alone or self.is_cut(table) or self.wide(table) is not None or self.lookup_by_rows(table)
        ):
            return self.lookup(eqn, table, values[1])
        cut = self.cut_of(eqn, values)
        if cut is None:
            for weight in (v for v in values if isinstance(v, Weight)):
                self.warn_of_dtype(weight, eqn)
        flat, rewrap = unwrap(self.on_shards(values))

        def on_gathered(*flat):
            if cut is not None:
                return self.product(eqn, rewrap(flat), *cut)
            if self.is_wide(eqn, values):
                return self.unary(eqn, *rewrap(flat))
            return jaxprs.bind(eqn, [self.gathered(v) for v in rewrap(flat)])

        plain = self.in_remat or not self.drops
        return list(on_gathered(*flat) if plain else jax.checkpoint(on_gathered)(*flat))

    def lookup(self, eqn, table: Weight, index: Any) -> list[Any]:
        """Rows of a table: see [Note: a lookup on the way back]."""
        table = table.fetched(self.comm)
        (rows, width), wide = table.shape, self.wide(table)
        columns_are_split = bool(spec_axes(P(*table.grad[1:])))
        parts = 1 if columns_are_split or not self.is_cut(table) else self.parts_of(width, table)

        def fn(index, shard):
            return jaxprs.bind(eqn, [self.gathered(dataclasses.replace(table, shard=shard)), index])

        def tangent(index, shard):
            whole = self.comm.weights.tangent(shard, table.stored, table.used) if table.split else shard
            return jaxprs.bind(eqn, [whole, index])

        def back(index, cotangent):
            def part(i, grad):
                some = jax.lax.dynamic_slice_in_dim(cotangent, i * (width // parts), width // parts, axis=-1)
                some = self.comm.gradients.by_examples(
                    lambda index, rest: self.narrowed(
                        lookup_gradient(eqn, index, rest if wide is None else rest.astype(wide), rows), table
                    ),
                    (index, some),
                    (0, 0) if self.lookup_by_rows(table) else None,
                    table.grad,
                ).astype(grad.dtype)
                return jax.lax.dynamic_update_slice_in_dim(grad, some, i * (width // parts), axis=1)

            zeros = self.plan.constrain(jax.numpy.zeros((rows, width), cotangent.dtype), table.grad)
            return [self.plan.constrain(jax.lax.fori_loop(0, parts, part, zeros), table.grad)]

        return linear(fn, back, [index], [table.shard], tangent=tangent)

    def wide(self, weight: Weight, eqn: Any = None) -> Any:
        """The dtype in which a gradient is made and reduced, where it is wider than the weight's; else None."""
        dtype = self.plan.config.reduce_dtype or gradient_dtype(eqn, weight.dtype)
        return dtype if dtype.itemsize > weight.dtype.itemsize else None

    def narrow(self, weight: Weight, eqn: Any = None) -> Any:
        """The dtype in which a gradient is to be reduced, where it is narrower than that it is made in; else None."""
        dtype, made = self.plan.config.reduce_dtype, gradient_dtype(eqn, weight.dtype)
        matrix = len(weight.shape) > 1 and weight.is_reduced
        return dtype if dtype is not None and dtype.itemsize < made.itemsize and matrix else None

    def made_by_rows(self, weight: Weight, eqn: Any) -> bool:
        """Each device makes its gradient of its own examples, and these are summed in `comm/reduce_scatter.py`."""
        return self.is_scattered(weight) or self.narrow(weight, eqn) is not None

    def warn_of_dtype(self, weight: Weight, eqn: Any = None) -> None:
        """Of a large weight whose gradient XLA reduces in a wider dtype than was asked for."""
        dtype = self.narrow(weight, eqn)
        if dtype is not None and math.prod(weight.shape) * SHARE_SAID > sum(x.size for x in self.plan.layouts):
            own = gradient_dtype(eqn, weight.dtype).name
            warnings.warn(
                f"jzero: reduce_dtype={dtype.name} is narrower than the {own} in which the model computes, and XLA "
                f"reduces the gradient of a weight {weight.shape} in the dtype in which it is made: jzero makes "
                f"those of plain matmuls, convolutions and lookups itself, and no others. Compute in {dtype.name} "
                f"(Flax layers with dtype={dtype.name}; at stage 3 compute_dtype={dtype.name}), or take "
                'jzero.value_and_grad(reduce="step") at stage 1 or 2.',
                stacklevel=2,
            )

    def cut_of(self, eqn, values: list[Any]) -> tuple[int, int, int] | None:
        """Of a product whose weight's gradient is made here: the weight's position, a dim of it to cut, the parts.

        That is a matmul by a weight much larger than a bucket, one whose gradient is made or reduced in a wider dtype,
        and a matmul or a convolution whose gradient is scattered.
        """
        at = [i for i, v in enumerate(values) if isinstance(v, Weight)]
        if len(at) != 1 or not values[at[0]].is_reduced:
            return None
        weight = values[at[0]]
        if eqn.primitive.name != "dot_general":
            scattered = example_dims(eqn, at[0]) is not None and self.made_by_rows(weight, eqn)
            return (at[0], 0, 1) if scattered and self.wide(weight) is None else None
        shape = weight.shape
        parts, dim = 1, 0
        if self.is_cut(weight):
            free = [d for d in range(len(shape)) if d >= len(weight.grad) or not weight.grad[d]]
            parts, dim = min(
                ((n, d) for d in free if (n := self.parts_of(shape[d], weight)) > 1), default=(1, 0)
            )
        by_rows = example_dims(eqn, at[0]) is not None and self.narrow(weight, eqn) is not None
        made_here = parts > 1 or by_rows or self.wide(weight, eqn) is not None or self.is_scattered(weight)
        return (at[0], dim, parts) if made_here else None

    def product(self, eqn, values: list[Any], at: int, dim: int, parts: int) -> list[Any]:
        """A product whose weight's gradient is made here; in parts, each reduced while the next is made."""
        weight, other = values[at].fetched(self.comm), values[1 - at]
        size, dtype = weight.shape[dim] // parts, weight.dtype

        def gradient(other, cotangent, *, piece):
            if eqn.primitive.name != "dot_general":
                return self.narrowed(product_gradient(eqn, at, other, cotangent), weight, eqn)
            grad = dot_gradient(eqn, at, other, cotangent, piece, self.wide(weight, eqn))
            return self.narrowed(grad, weight, eqn)

        def back(other, cotangent):
            def part(i, cotangent):
                piece = (dim, i * size, size) if parts > 1 else None
                return self.comm.gradients.by_examples(
                    functools.partial(gradient, piece=piece),
                    (other, cotangent),
                    example_dims(eqn, at) if self.made_by_rows(weight, eqn) else None,
                    weight.grad,
                ).astype(dtype)

            return [self.plan.constrain(self.joined(part, cotangent, parts, dim), weight.grad)]

        whole = self.gathered(weight, reduces=False)
        return linear(Product(eqn, at), back, [other], [whole])

    def narrowed(self, grad: Any, weight: Weight, eqn: Any = None) -> Any:
        """A gradient that one device has made, in the dtype in which it is reduced."""
        dtype = self.narrow(weight, eqn)
        return grad if dtype is None else grad.astype(dtype)

    def is_scattered(self, weight: Weight) -> bool:
        """Its gradient is reduced by [Note: pieces along several dims] in `comm/reduce_scatter.py`."""
        return weight.is_reduced and self.comm.gradients.is_scattered(weight.shape, weight.grad)

    def lookup_by_rows(self, table: Weight) -> bool:
        """`made_by_rows` for a table whose rows are looked up."""
        if self.narrow(table) is not None:
            return True
        return self.comm.gradients.lookup_is_scattered(table.shape, table.stored, table.grad)

    def is_wide(self, eqn, values: list[Any]) -> bool:
        """True for a weight that is spread over examples (a bias, a scale) and whose gradient is reduced wider."""
        spreads = eqn.primitive.name in ("broadcast_in_dim", "reshape") and isinstance(values[0], Weight)
        return spreads and len(values) == 1 and self.wide(values[0]) is not None

    def unary(self, eqn, weight: Weight) -> list[Any]:
        """A linear function of one weight, with its gradient summed and reduced in the wider dtype."""
        weight = weight.fetched(self.comm)
        wide, dtype = self.wide(weight), weight.dtype

        def back(cotangent):
            def fn(x):
                return jaxprs.bind(eqn, [x])[0]

            (grad,) = jax.linear_transpose(fn, jax.ShapeDtypeStruct(weight.shape, wide))(
                cotangent.astype(wide)
            )
            return [self.reduced(grad, weight).astype(dtype)]

        return linear(lambda x: jaxprs.bind(eqn, [x]), back, [], [self.gathered(weight, reduces=False)])

    def is_cut(self, weight: Weight) -> bool:
        """Its gradient is made in parts."""
        return self.ordered and weight.nbytes > CUT_BUCKETS * self.plan.bucket_bytes

    def parts_of(self, size: int, weight: Weight) -> int:
        """Into how many equal parts a dim of that size is cut, so that two parts of the weight are about a bucket."""
        return _parts(size, -(-2 * weight.nbytes // self.plan.bucket_bytes))

    def joined(self, part: Callable[[int, Any], Any], cotangent: Any, parts: int, dim: int) -> Any:
        """`part(i, cotangent)` for all parts, joined along `dim`: each begins when the last but one is reduced."""
        done: list[Any] = []
        for i in range(parts):
            if len(done) > 1:
                cotangent, done[-2] = tied(cotangent, done[-2])
            done.append(part(i, cotangent))
        return jax.numpy.concatenate(done, axis=dim) if parts > 1 else done[0]

    def reduced(self, grad: Any, weight: Weight) -> Any:
        """The gradient of a weight, reduced: on its shard, or whole where that of a vector has to be."""
        vector = np.ndim(grad) <= 1 and not weight.split
        return self.plan.constrain(grad, weight.used if vector else weight.grad)

    def on_shards(self, values: Sequence[Any]) -> list[Any]:
        """Weights pinned to their stored layout: what a region keeps of one is its shard, not a slice of the whole.

        Without it the layout of the gathered weight spreads back over a cast or a transpose, and the whole one is alive
        until the backward pass cuts the shard out of it. Its gradient is not: it may be split over more devices (hpZ).
        """

        def pinned(weight: Weight) -> Weight:
            (shard,) = linear(
                lambda x: [self.plan.constrain(x, weight.stored)], lambda g: [g], [], [weight.shard]
            )
            return dataclasses.replace(weight, shard=shard)

        return [pinned(v) if isinstance(v, Weight) and v.split and v.host is None else v for v in values]

    def on_device(self, values: Sequence[Any]) -> list[Any]:
        """Weights with their shards in device memory, for operations that do not read host memory; others unchanged."""
        return [v.fetched(self.comm) if isinstance(v, Weight) else v for v in values]

    def gathered(self, value: Any, *, reduces: bool = True) -> Any:
        """The used layout of a weight; anything else as it is. `reduces`: and its gradient is whole, to be reduced."""
        if not isinstance(value, Weight):
            return value
        value = value.fetched(self.comm)
        if not value.split:
            if not (self.ordered and value.is_reduced and reduces):
                return value.shard
            # reduced in the dtype in which it is made, before what casts it
            return linear(lambda x: [x], lambda g: [self.reduced(g, value)], [], [value.shard])[0]

        # see [Note: by way of the used layout] in `comm/gradients.py`
        shared_by_all = self.comm.gradients.is_shared(value.stored, value.grad)
        whole_first = reduces and (shared_by_all or np.ndim(value.shard) <= 1)

        def reduce(grad):
            return [self.comm.gradients.by_layout(grad, value.used, value.grad, whole_first=whole_first)]

        gather, layouts = self.comm.weights, (value.stored, value.used)
        return linear(
            lambda shard: [gather(shard, *layouts, value.narrow)], reduce, [], [value.shard],
            tangent=lambda shard: [gather.tangent(shard, *layouts)],
        )[0]  # fmt: skip

    def kept(self, weight: Weight) -> Weight:
        """Gathered for all its uses; where these reduce its gradient themselves, what comes back is reduced."""
        return weight.as_whole(self.gathered(weight, reduces=not self.ordered and self.wide(weight) is None))


def _parts(width: int, wanted: int) -> int:
    """The smallest divisor of `width` that is at least `wanted`."""
    return next((n for n in range(max(wanted, 1), min(width, 1024) + 1) if width % n == 0), 1)
