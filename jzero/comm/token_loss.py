"""A token loss on the devices of a plan: each computes that of its own tokens; see `core/token_loss.py`.

The head is gathered once for all tiles. Each device sums the gradient of its own tokens in fp32, over all tiles, and
then these are reduced once, in the dtype in which gradients travel.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jzero.comm.collectives import comm_of
from jzero.comm.reduce_scatter import batch_axes, of_batch, sum_over_devices
from jzero.comm.routes import Reduced
from jzero.core.token_loss import TokenLoss
from jzero.core.token_loss_rules import LOSS, Arrays
from jzero.layout.explicit import typed_mesh
from jzero.layout.padding import unpadded
from jzero.layout.specs import P
from jzero.sharding import Plan


@dataclasses.dataclass(frozen=True, eq=False)
class OnPlan:
    """Tokens are split over the batch axes of a plan.

    Attributes:
      plan: gives mesh and collectives.
      weights: what the head, and the bias if there is one, are in the plan, with their layouts; None for one that is an
        array like others.
      gather: from a weight and its shard to the whole one.
    """

    plan: Plan
    weights: tuple[Reduced | None, ...] = (None, None)
    gather: Callable[[Any, jax.Array], jax.Array] | None = None

    def run(self, loss: TokenLoss, make: str, operands: Arrays, saved: Arrays = ()) -> list[Any]:
        """See `Devices.run`."""
        hidden, *params, labels, weights = operands
        known, shape = self.weights[: len(params)], labels.shape
        whole = [self.whole(w, x) for w, x in zip(known, params, strict=True)]
        hidden, labels, weights = self.rows([hidden, labels, weights], len(shape))
        rows, run = P(batch_axes(self.plan)), self._value if make == LOSS else self._gradients
        of_loss = rows if loss.per_token else P()
        outs = self.on_each(
            lambda *own: run(loss, known, own), (rows, *(P() for _ in params), rows, rows),
            [of_loss] if make == LOSS else [P(), rows, rows, *map(self.spec, known)],
        )(hidden, *whole, labels, weights)  # fmt: skip
        if make == LOSS:
            return [first_values(outs[0], shape) if loss.per_token else outs[0]]
        total, losses, of_hidden, *of_params = outs
        grads = [self.laid_out(g, w, x.shape) for g, w, x in zip(of_params, known, params, strict=True)]
        return [total, first_values(losses, shape), first_values(of_hidden, operands[0].shape), *grads]

    def whole(self, weight: Reduced | None, x: jax.Array) -> jax.Array:
        """A param, gathered."""
        return x if weight is None or self.gather is None else self.gather(weight, x)

    def rows(self, arrays: Arrays, dims: int) -> Arrays:
        """Arrays whose first dim devices divide: as they are, or their tokens, and some of weight 0."""
        parts = self.plan.batch_parts
        if arrays[0].shape[0] % parts == 0:
            return arrays
        flat = [x.reshape(-1, *x.shape[dims:]) for x in arrays]
        return [jnp.pad(x, [(0, -len(x) % parts)] + [(0, 0)] * (x.ndim - 1)) for x in flat]

    def _value(self, loss: TokenLoss, known: Arrays, own: Arrays) -> list[Any]:
        (out,) = loss.value(*own)
        return [out if loss.per_token else sum_over_devices(out, self.plan)]

    def _gradients(self, loss: TokenLoss, known: Arrays, own: Arrays) -> list[Any]:
        """Inside of the `shard_map`: each device's own, and of weights the sum of all devices'."""
        total, losses, of_hidden, *grads = loss.gradients(*own)
        of_params = zip(known, own[1:], grads, strict=False)
        return [sum_over_devices(total, self.plan), losses, of_hidden, *(self.reduced(*row) for row in of_params)]

    def on_each(self, fn: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """`fn`, which runs on each device with its own tokens."""
        return jax.shard_map(
            fn, mesh=typed_mesh(self.plan.array_mesh), in_specs=in_specs, out_specs=out_specs,
            axis_names=set(batch_axes(self.plan)), check_vma=False,
        )  # fmt: skip

    def reduced(self, weight: Reduced | None, param: jax.Array, grad: jax.Array) -> jax.Array:
        """Inside of the `shard_map`: the sum of all devices' gradients, or this device's piece of it."""
        if weight is None:
            return sum_over_devices(grad.astype(param.dtype), self.plan)
        return comm_of(self.plan).gradients.in_parts(grad, weight, weight.grad)

    def spec(self, weight: Reduced | None) -> PartitionSpec:
        """The layout of a gradient that leaves the `shard_map`."""
        return P() if weight is None else of_batch(weight.grad, self.plan)

    def laid_out(self, grad: jax.Array, weight: Reduced | None, shape: Sequence[int]) -> jax.Array:
        """A gradient that has left the `shard_map`, in its shape and layout."""
        grad = unpadded(grad, shape)
        return grad if weight is None else self.plan.constrain(grad, weight.grad)


def first_values(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """The first values, in this shape: without those of tokens that were added."""
    if x.shape == tuple(shape):
        return x
    return x.reshape(-1)[: math.prod(shape)].reshape(shape)
