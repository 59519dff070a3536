"""Gradients on their way to the shards of the optimizer state.

[Note: by way of the used layout]
XLA turns an all-reduce and a slice into a reduce-scatter if the gradient is split over all devices of the batch: such a
gradient is constrained to its used layout, then to its shard. With replicas or hpZ this would all-reduce whole
gradients, so there they are constrained directly to the shard. (With few tokens XLA may then move activations.)

[Note: vectors first whole]
The layout of a bias's or a norm scale's gradient would spread back into what it is computed with, and batch statistics
would come out of the step split. So vectors are reduced whole, then cut. For a matrix a whole gradient in between would
be an all-reduce wherever something stands between it and the slice (a loss scale, a clip by hand, a cast, the loop of a
scan over layers): 3 Psi for a step of stage 1, where 2 are needed.

[Note: what spreads back]
The layout of a gradient spreads back into what it is computed from and, where a weight is used value by value (`v *
scale`), into the forward pass. Beside tensor parallelism, in a layout that does not cut one dim over all of the batch's
axes (a hybrid; pieces along two dims), XLA's partitioner can then compute wrong values (jaxlib 0.10 and 0.12 with
Shardy, on CPU devices; the program is the canary `spread_layouts_are_wrong`). There the layout spreads forward alone
(`core/one_way.py`), except at a matmul, a convolution or a lookup, whose operand is the weight itself: XLA makes the
reduce-scatter of a hybrid from what spreads back to these, and all-reduces whole gradients without it. So a walked loss
reduces the gradients of such weights at their uses. The update does not see the uses, nor which of them were walked: it
lets the layouts of all gradients spread forward only.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jzero.comm.gradient_bytes import Sent, wire
from jzero.comm.reduce_scatter import SCOPE, batch_axes, is_of_batch, needs_scatter, reduce_scatter, summed
from jzero.comm.routes import (
    CONVOLUTION,
    EXAMPLES,
    LOOKUP,
    LOOP,
    MATMUL,
    ONE_WAY,
    ROUNDS,
    SHARD,
    SPREAD,
    UPDATE,
    USE,
    WHOLE,
    WHOLE_FIRST,
    Maker,
    Reduced,
    Route,
    equal_parts,
)
from jzero.comm.uses import Use
from jzero.config import GRADIENT_CODES
from jzero.core.jaxprs import is_tracer
from jzero.core.linear import linear
from jzero.core.one_way import forward_only
from jzero.core.ordering import in_turn
from jzero.layout import blocks
from jzero.layout.leaf_rule import Layout
from jzero.layout.placement import HOST, memory_kind
from jzero.layout.specs import P, entry_axes, named_axes, shard_factor, spec_axes, spec_entries
from jzero.sharding import Plan

OPERANDS = (MATMUL, CONVOLUTION, LOOKUP)
PART_BYTES = 2**27  # of a gradient that is cast for its reduction
CUT_BUCKETS = 8  # times `bucket_bytes`: a larger gradient is made in parts


@dataclasses.dataclass(frozen=True)
class GradientReduce:
    """The reduction of a gradient to its shards.

    Attributes:
      plan: gives mesh, batch axes and `reduce_dtype`.
    """

    plan: Plan

    @property
    def on_use(self) -> bool:
        """Every gradient is reduced where it is made, bucket by bucket or in another dtype."""
        config = self.plan.config
        return config.row.params or self.has_buckets or (config.row.grads and config.reduce_dtype is not None)

    @functools.cached_property
    def has_buckets(self) -> bool:
        """What is gathered, or reduced, on use makes more than one bucket: its order matters."""
        moved = (x.nbytes for x in self.plan.layouts if not x.grad == x.used == x.stored)
        return sum(moved) > self.plan.bucket_bytes

    def where(self, x: Layout, *, alone: bool = False, in_loop: bool = False) -> str:
        """`USE` or `UPDATE`: where the gradient of a param is reduced.

        Args:
          x: its layouts.
          alone: XLA would reduce it badly by itself: a tied table, a weight that every round of a loop uses, or one
            of which `spreads_wrongly` holds.
          in_loop: in the loop over micro-batches, which at stage 1 sums whole gradients first.
        """
        scattered = not x.vector and not (in_loop and not self.plan.config.row.grads)
        scattered = scattered and self.is_scattered(x.shape, x.state)
        return USE if self.on_use or scattered or (alone and x.state_shape == x.shape) else UPDATE

    def route(self, w: Reduced, use: Maker, *, ordered: bool) -> Route:
        """How the gradient of a weight that is reduced `on_use`, or alone, comes to its shard: see `routes.py`.

        Args:
          w: the weight.
          use: what makes the gradient.
          ordered: the function has several buckets.
        """
        every, reduced = ordered or self.plan.config.row.params, w.grad != w.used
        made, sent = self.dtypes(w, use.dtype)
        if use.kind == ROUNDS and made is None:  # a loop would sum it in its own dtype
            return Route(LOOP, WHOLE_FIRST, sent=sent)
        most = 1 if sent in GRADIENT_CODES else CUT_BUCKETS  # codes hold a message beside the gradient
        cut = ordered and w.nbytes > most * self.plan.bucket_bytes
        scattered = reduced and self.is_scattered(w.shape, w.grad)
        if use.kind == LOOKUP and reduced:
            examples = sent is not None or self.lookup_is_scattered(w.shape, w.stored, w.grad)
            if not every or cut or made is not None or examples:
                whole_columns = cut and not spec_axes(P(*w.grad[1:]))
                dim, parts = self._cut(w, [1]) if whole_columns else (1, 1)
                return Route(USE, EXAMPLES if examples else SHARD, True, made, sent, dim, parts)
        examples = use.examples and (scattered or sent is not None)
        by = EXAMPLES if examples else SHARD
        if use.kind == MATMUL and use.sole and reduced:
            free = [d for d in range(len(w.shape)) if d >= len(w.grad) or not w.grad[d]]
            dim, parts = self._cut(w, free) if cut else (0, 1)
            if parts > 1 or made is not None or scattered or examples:
                return Route(USE, by, True, made, sent, dim, parts)
        if use.kind == CONVOLUTION and use.sole and examples and made is None:
            return Route(USE, by, True, sent=sent)
        if use.kind == SPREAD and made is not None:
            return Route(USE, self.by_jzero(w), True, made)
        by = self.by_xla(w, use.kind)
        if w.stored == w.used and not self.at_use(w, ordered=ordered):
            return Route(UPDATE, WHOLE, sent=sent)
        return Route(USE, by, sent=sent)

    def at_use(self, w: Reduced, *, ordered: bool) -> bool:
        """Whether the gradient of a weight that is stored whole is reduced at its use, and not by the update."""
        return w.grad != w.used and (ordered or (len(w.shape) > 1 and self.spreads_wrongly(w.grad)))

    def dtypes(self, w: Reduced, made: np.dtype) -> tuple[np.dtype | None, np.dtype | None]:
        """(made, sent) of a `Route` for a gradient that a use makes in the dtype `made`."""
        asked = None if made.kind == "c" else self.plan.config.reduce_dtype  # a cast would drop the imaginary part
        wide = asked or made
        matrix = len(w.shape) > 1 and w.grad != w.used
        narrower = asked is not None and asked.itemsize < made.itemsize and matrix
        narrower = narrower and (asked not in GRADIENT_CODES or self.in_codes(w, w.shape))
        return wide if wide.itemsize > w.dtype.itemsize else None, asked if narrower else None

    def in_codes(self, w: Reduced, shape: Sequence[int]) -> bool:
        """Whether a gradient of this shape that jzero makes travels in codes: see `reduce_in_codes.py`."""
        asked = self.plan.config.reduces_in_codes and w.dtype.kind != "c" and w.dtype.itemsize > 1
        return asked and len(shape) > 1 and w.grad != w.used and math.prod(shape) >= blocks.LEAST_QUANTIZED

    def by_xla(self, w: Reduced, kind: str) -> str:
        """How to reduce a gradient that XLA makes at a use of this kind: see [Note: by way of the used layout]."""
        split = w.stored != w.used
        if split and (len(w.shape) <= 1 or self.is_shared(w.stored, w.grad)):
            return WHOLE_FIRST
        by = self.by_jzero(w)
        return ONE_WAY if by == SHARD and kind not in OPERANDS and self.spreads_wrongly(w.grad) else by

    def by_jzero(self, w: Reduced) -> str:
        """How to reduce a gradient that already exists; a vector's stays whole if the vector is stored whole."""
        return WHOLE if len(w.shape) <= 1 and w.stored == w.used else SHARD

    def by_update(self, x: Layout) -> str:
        """How the update reduces a gradient that has stayed whole; see [Note: vectors first whole]."""
        return WHOLE_FIRST if x.vector else ONE_WAY if self.spreads_wrongly(x.state) else SHARD

    def _cut(self, w: Reduced, dims: Sequence[int]) -> tuple[int, int]:
        """(dim, parts): the dim that needs the fewest parts of at most half a bucket; one part if no dim divides."""
        wanted = -(-2 * w.nbytes // self.plan.bucket_bytes)
        found = [(n, d) for d in dims if (n := equal_parts(w.shape[d], wanted)) > 1]
        parts, dim = min(found, default=(1, dims[0] if dims else 0))
        return dim, parts

    def by_layout(self, grad: jax.Array, used: PartitionSpec, spec: PartitionSpec, by: str) -> jax.Array:
        """A gradient of the whole batch, reduced by XLA's own collective.

        Args:
          grad: the gradient.
          used: layout of its weight in the arithmetic.
          spec: layout of its shards.
          by: `SHARD`, `ONE_WAY`, `WHOLE_FIRST` or `WHOLE`.
        """
        if by == ONE_WAY:
            grad = forward_only(grad)
        elif by != SHARD:
            grad = self.plan.constrain(grad, used)
        return grad if by == WHOLE else self.plan.constrain(grad, spec)

    def by_examples(
        self, make: Callable[..., jax.Array], rows: Sequence[jax.Array], dims: Sequence[int] | None,
        spec: PartitionSpec, sent: np.dtype | None = None,
    ) -> jax.Array:  # fmt: skip
        """The gradient `make(*rows)` on its shards, each device making that of its own examples where it can.

        Args:
          make: from arrays with some examples to their gradient, in the shape of the weight.
          rows: arrays with all examples.
          dims: of each of them the dim of the examples; None leaves the reduction to XLA.
          spec: layout of the result; see [Note: pieces along several dims] in `reduce_scatter.py`.
          sent: the dtype in which it travels, that of codes only where devices make it; None: as it is made.
        """
        codes = sent if sent in GRADIENT_CODES else None

        def narrow(*rows):
            return make(*rows) if sent is None or codes else make(*rows).astype(sent)

        found = None if dims is None else summed(narrow, rows, dims, spec, self.plan, codes)
        return self.plan.constrain(narrow(*rows), spec) if found is None else found

    def of_devices(self, grad: jax.Array, x: Reduced, spec: PartitionSpec) -> jax.Array:
        """Inside of a `shard_map` over the batch axes: the devices' gradients of a param, summed, in the layout `spec`.

        In `reduce_dtype`, or else in the dtype of the param.
        """
        asked = x.dtype if grad.dtype.kind == "c" else self.plan.config.reduce_dtype or x.dtype
        codes = asked if self.in_codes(x, x.shape) and spec != x.used else None
        if asked in GRADIENT_CODES:
            asked = x.dtype if codes is None else grad.dtype
        but = named_axes(self.plan.sharding(x.used).spec)
        return reduce_scatter(grad.astype(asked), spec, self.plan, but=but, codes=codes)

    def in_parts(self, grad: jax.Array, x: Reduced, spec: PartitionSpec) -> jax.Array:
        """The same for a gradient in a wider dtype: a part is cast and sent while others wait, with no copy of it all.

        Codes are those of whole gradients, so what travels in codes goes in one part.
        """
        free = [d for d, axes in enumerate(spec_entries(self.plan.sharding(spec).spec, grad.ndim)) if not axes]
        wanted = -(-grad.size * x.dtype.itemsize // PART_BYTES)
        alone = self.plan.batch_parts == 1 or self.in_codes(x, x.shape)
        cuts = [] if alone else [(equal_parts(grad.shape[d], wanted), d) for d in free]
        parts, dim = min((row for row in cuts if row[0] > 1), default=(1, 0))
        size = grad.shape[dim] // parts

        def part(i, grad):
            return self.of_devices(jax.lax.slice_in_dim(grad, i * size, (i + 1) * size, axis=dim), x, spec)

        return in_turn(part, grad, parts, dim)

    def at_update(self, grads: Sequence[jax.Array]) -> list[jax.Array]:
        """Every gradient that reaches the optimizer, on the shards of its state; see [Note: vectors first whole].

        A gradient in host memory is on its shards already, and stays there.
        """
        with jax.named_scope(SCOPE):
            rows = zip(grads, self.plan.layouts, strict=True)
            return [
                g if g is None or memory_kind(g) == HOST else self.one_at_update(g, x) for g, x in rows
            ]

    def where_they_leave(self, params: Sequence[jax.Array], layouts: Sequence[Layout | None]) -> list[jax.Array]:
        """Params whose gradients are on shards when they leave the program: for an update outside of it.

        A leaf that is stored padded has no equal pieces; its gradient leaves whole.
        """

        def leaving(param, x):
            if x is None or x.padded or not is_tracer(param):
                return param
            return linear(lambda p: [p], lambda g: [self._leaving(g, x)], [], [param], same_types=True)[0]

        return [leaving(p, x) for p, x in zip(params, layouts, strict=True)]

    def _leaving(self, grad: jax.Array, x: Layout) -> jax.Array:
        with jax.named_scope(SCOPE):
            return grad if memory_kind(grad) == HOST else self.one_at_update(grad, x)

    def one_at_update(self, grad: jax.Array, x: Layout) -> jax.Array:
        """One gradient that reaches the optimizer, on the shards of its state."""
        return self.by_layout(grad, x.used, x.state, self.by_update(x))

    def is_shared(self, stored: PartitionSpec, grad: PartitionSpec) -> bool:
        """All devices of the batch share the gradient of a stored weight: [Note: by way of the used layout]."""
        return grad == stored and set(self.plan.batch_axes) <= set(spec_axes(grad))

    def spreads_wrongly(self, spec: PartitionSpec) -> bool:
        """XLA may compute wrong values where such a layout spreads back: see [Note: what spreads back]."""
        batch = set(batch_axes(self.plan))
        beside = any(n > 1 and a not in batch for a, n in self.plan.array_mesh.shape.items())
        cut = [axes for e in self.plan.sharding(spec).spec if (axes := batch & set(entry_axes(e)))]
        return beside and bool(cut) and cut != [batch]

    def is_scattered(self, shape: Sequence[int], spec: PartitionSpec) -> bool:
        """XLA has no reduce-scatter for this layout; `by_examples` has one."""
        return needs_scatter(shape, spec, self.plan)

    def lookup_is_scattered(self, shape: Sequence[int], stored: PartitionSpec, spec: PartitionSpec) -> bool:
        """The same for the gradient of a table whose rows are looked up.

        Also where it is split along the table's own dim over more devices (hpZ): XLA all-reduces the whole gradient of
        a lookup there. Along another dim XLA moves tokens, which is less.
        """
        dims, own = ([bool(e) for e in s] for s in (spec, stored))
        pieces, parts = (shard_factor(s, self.plan.mesh) for s in (spec, stored))
        finer = pieces > parts > 1 and dims == own and is_of_batch(spec, self.plan)
        return finer or self.is_scattered(shape, spec)

    def wire(self, x: Layout, accumulate: int, uses: Sequence[Use], *, in_each: bool = False) -> Iterator[Sent]:
        """(mesh axes, bytes that one device sends) of the reductions of a param's gradient in one step.

        Args:
          x: the layouts of the param.
          accumulate: micro-batches in a step. Gradients that stay whole (stages 0 and 1) are reduced once, after
            the loop, unless `in_each`; where they are split, once per micro-batch and use.
          uses: what the param is used for; a frozen one has no gradient. Where gradients are reduced by the update, XLA
            adds those of all matmuls before it reduces them, and those of all lookups; at stage 0 these two apart.
        """
        return wire(self, x, accumulate if self.plan.config.row.grads or in_each else 1, uses)
