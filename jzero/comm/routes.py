"""Who reduces the gradient of a weight: where, in which dtype, by which collective.

`GradientReduce.where` and `GradientReduce.route` choose the route. The walk in `gather/` follows it, `estimate` counts
its bytes, and docs/design.md shows all routes in a table (`python docs/make_routes.py`).

Where
  `USE`: at the use that makes the gradient: every gradient at stage 3, and at stage 2 with several buckets or a
  `reduce_dtype`; otherwise only one that XLA would reduce badly by itself.
  `LOOP`: once, after the backward loop that sums it; see [Note: a weight that every round uses] in `gather/loops.py`.
  `UPDATE`: by the optimizer's update, which reduces every gradient that is still whole.

By
  `SHARD`: it is constrained to its shard, and XLA makes the collective.
  `ONE_WAY`: the same, and that layout does not spread back; see [Note: what spreads back] in `gradients.py`.
  `WHOLE_FIRST`: to its used layout, then to its shard; see [Note: by way of the used layout] and [Note: vectors first
  whole] in `gradients.py`.
  `WHOLE`: to its used layout alone, if at all. The update cuts it.
  `EXAMPLES`: each device makes the gradient of its own examples, and these are summed; see [Note: pieces along several
  dims] in `reduce_scatter.py`.

Dtypes
  A gradient is *made* (and summed) in one dtype and may be *sent* in another. A `reduce_dtype` that is wider than the
  weight's dtype is the one in which it is made: XLA reduces in the dtype of the matmul that makes a gradient, and
  ignores a later cast. A narrower `reduce_dtype` is the one in which it is sent; int8 and int4
  are codes (`reduce_in_codes.py`), which only `EXAMPLES` can send.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np
from jax.sharding import PartitionSpec

USE, LOOP, UPDATE = "use", "loop", "update"
SHARD, ONE_WAY, WHOLE_FIRST, WHOLE, EXAMPLES = "shard", "one way", "whole first", "whole", "examples"
MATMUL, CONVOLUTION, LOOKUP, SPREAD, ROUNDS, OTHER = "matmul", "convolution", "lookup", "spread", "rounds", "other"


class Reduced(Protocol):
    """A weight whose gradient is reduced: whole shape and dtype, and its layouts (see `Layout`)."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole weight."""
        ...

    @property
    def dtype(self) -> np.dtype:
        """In which the model computes."""
        ...

    @property
    def nbytes(self) -> int:
        """Of the whole weight, and of its gradient."""
        ...

    @property
    def stored(self) -> PartitionSpec:
        """Its layout between steps."""
        ...

    @property
    def used(self) -> PartitionSpec:
        """Its layout in the arithmetic."""
        ...

    @property
    def grad(self) -> PartitionSpec:
        """The layout of its reduced gradient."""
        ...


@dataclasses.dataclass(frozen=True)
class Maker:
    """The use that makes a gradient.

    Attributes:
      kind: `MATMUL`, `CONVOLUTION`, `LOOKUP` (whole rows of a table), `SPREAD` (a bias or a scale, which is broadcast
        over examples), `ROUNDS` (every round of a loop uses the weight), `OTHER`.
      dtype: in which it makes the gradient.
      examples: it is known along which dims the examples lie.
      sole: no other operand of the equation is a weight.
    """

    kind: str
    dtype: np.dtype
    examples: bool = False
    sole: bool = True


@dataclasses.dataclass(frozen=True)
class Route:
    """How one gradient comes to its shard.

    Attributes:
      where, by: see above.
      made_here: jzero makes the gradient, by a rule for the kind of use; else XLA does, from JAX's derivative.
      made: the dtype in which it is made and summed, where that is wider than the weight's; else None.
      sent: the dtype that was asked for, if it is narrower than the one in which the gradient is made; else None. A
        gradient that XLA makes is sent as it is.
      dim, parts: the gradient is made in `parts` parts along `dim`, each reduced while the next is made.
    """

    where: str
    by: str
    made_here: bool = False
    made: np.dtype | None = None
    sent: np.dtype | None = None
    dim: int = 0
    parts: int = 1


def equal_parts(size: int, wanted: int) -> int:
    """The smallest divisor of `size` that is at least `wanted`; 1 if no divisor up to 1024 is."""
    return next((n for n in range(max(wanted, 1), min(size, 1024) + 1) if size % n == 0), 1)
