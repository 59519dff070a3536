"""A walk through a function of stored weights: what its rules share, and how a weight becomes an array.

A rule is a function of (equation, values, walk) that returns the equation's results; `interpreter.py` has their table.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from jzero.comm import Comm, comm_of
from jzero.comm.routes import OTHER, ROUNDS, SHARD, Maker, Route
from jzero.core.errors import warn
from jzero.core.linear import linear
from jzero.core.types import Jaxpr
from jzero.gather.sharded_weight import Weight, as_arrays
from jzero.sharding import Plan

SHARE_SAID = 20  # warn only of weights that hold more than one 20th of all params


@dataclasses.dataclass(frozen=True)
class Walk:
    """How one part of a function is evaluated again.

    Attributes:
      plan: gives the mesh, the bytes of a bucket and the prefetch distance.
      evaluate: the function of that name in `interpreter.py`, for the bodies of loops, regions and branches.
      in_remat: inside a region that is computed again as a whole.
      ordered: weights are tied to their place in the program; not where all of them make one bucket.
      losses: the function has a tiled loss somewhere, which runs on the devices of the plan also without a weight.
    """

    plan: Plan
    evaluate: Callable[..., list[Any]]
    in_remat: bool = False
    ordered: bool = True
    losses: bool = False

    @functools.cached_property
    def comm(self) -> Comm:
        """The collectives."""
        return comm_of(self.plan)

    @property
    def drops(self) -> bool:
        """A gathered weight is gone after its use, unless it is one that stays."""
        return self.plan.config.row.params and self.plan.config.reshard_after_forward

    def run(self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """The results of a body, evaluated in the same way."""
        return self.evaluate(self, jaxpr, consts, args)

    def route(self, weight: Weight, use: Maker) -> Route:
        """How the gradient of a weight comes to its shard."""
        return self.comm.gradients.route(weight, use, ordered=self.ordered)


def plain(outs: Iterable[Any]) -> list[Any]:
    """Results that leave a region are arrays: a weight that is passed through leaves as its shard."""
    return [o.leaving if isinstance(o, Weight) else o for o in as_arrays(list(outs))]


def on_shards(values: Sequence[Any], walk: Walk) -> list[Any]:
    """Weights pinned to their stored layout: what a region keeps of one is its shard, not a slice of the whole.

    Without it the layout of the gathered weight spreads back over a cast or a transpose, and the whole one is alive
    until the backward pass cuts the shard out of it. The gradient is not pinned: it may be on more devices (hpZ).
    """

    def pinned(weight: Weight) -> Weight:
        pin = functools.partial(walk.plan.constrain, spec=weight.stored)
        (shard,) = linear(lambda x: [pin(x)], lambda g: [g], [], [weight.shard], same_types=True)
        return dataclasses.replace(weight, shard=shard)

    return [pinned(v) if isinstance(v, Weight) and v.split and v.source.direct else v for v in values]


def on_device(values: Sequence[Any], walk: Walk) -> list[Any]:
    """Weights with their shards in device memory, for operations that read no other memory; others unchanged."""
    return [v.fetched(walk.comm) if isinstance(v, Weight) else v for v in values]


def gathered(value: Any, walk: Walk, *, reduces: bool = True, kind: str = OTHER) -> Any:
    """The used layout of a weight; other values unchanged.

    Args:
      value: a weight, or anything else.
      walk: gives the collectives.
      reduces: its gradient comes back whole, and is reduced here; False: the use has reduced it.
      kind: of the use that makes the gradient; see `Maker`.
    """
    if not isinstance(value, Weight):
        return value
    value, gradients = value.fetched(walk.comm), walk.comm.gradients
    by = gradients.by_xla(value, kind) if reduces else SHARD

    def reduce(grad):
        return [gradients.by_layout(grad, value.used, value.grad, by)]

    if value.split:
        return _gathered(value, walk, reduce)
    if not (reduces and gradients.at_use(value, ordered=walk.ordered)):
        return value.shard
    # reduced in the dtype in which it is made, before what casts it
    return linear(lambda x: [x], reduce, [], [value.shard], same_types=True)[0]


def _gathered(weight: Weight, walk: Walk, reduce: Callable[[Any], list[Any]]) -> Any:
    gather, layouts = walk.comm.weights, (weight.stored, weight.used)
    return linear(
        lambda shard: [gather(shard, *layouts, weight.narrow, weight.order)], reduce, [], [weight.shard],
        tangent=lambda shard: [gather(shard, *layouts)],  # as it is: an encoding is not linear
    )[0]  # fmt: skip


def kept(weight: Weight, walk: Walk) -> Weight:
    """The weight, gathered once for all its uses. If a use already reduces the gradient, the result is reduced."""
    made, _ = walk.comm.gradients.dtypes(weight, weight.dtype)
    return weight.as_whole(gathered(weight, walk, reduces=not walk.ordered and made is None))


def before_loop(weight: Weight, walk: Walk, dtype: DTypeLike | None = None) -> Any:
    """A weight gathered for all rounds of a loop, whose summed gradient is reduced once; `dtype`: cast to it first."""
    weight = weight.fetched(walk.comm)
    if dtype is not None:
        shard = weight.shard.astype(dtype)
        narrow = dataclasses.replace(weight, shard=shard, narrow=None)
        return before_loop(narrow, walk).astype(weight.shard.dtype)
    warn_of_dtype(weight, weight.dtype, walk)
    by = walk.route(weight, Maker(ROUNDS, weight.dtype)).by

    def reduce(grad):
        return [walk.comm.gradients.by_layout(grad, weight.used, weight.grad, by)]

    if not weight.split:
        return linear(lambda x: [x], reduce, [], [weight.shard], same_types=True)[0]
    return _gathered(weight, walk, reduce)


def reduced(grad: jax.Array, weight: Weight, walk: Walk) -> Any:
    """A weight's gradient that already exists, reduced by XLA."""
    gradients = walk.comm.gradients
    return gradients.by_layout(grad, weight.used, weight.grad, gradients.by_jzero(weight))


def warn_of_dtype(weight: Weight, made: np.dtype, walk: Walk) -> None:
    """Warns if XLA makes a large weight's gradient and reduces it in a wider dtype than `reduce_dtype`."""
    _, dtype = walk.comm.gradients.dtypes(weight, made)
    if dtype is not None and math.prod(weight.shape) * SHARE_SAID > sum(x.size for x in walk.plan.layouts):
        layers = f"Flax layers with dtype={dtype.name}; at stage 3 compute_dtype={dtype.name}"
        compute = "" if walk.plan.config.reduces_in_codes else f"Compute in {dtype.name} ({layers}). "
        warn(
            f"jzero: reduce_dtype={dtype.name} is narrower than the {made.name} in which the model computes, and XLA "
            f"reduces the gradient of a weight {weight.shape} in the dtype in which it is made: jzero makes "
            f"those of plain matmuls, convolutions and lookups itself, and no others. {compute}At stages 1 and 2 "
            'jzero.value_and_grad(reduce="step") reduces all of them in it.',
        )
