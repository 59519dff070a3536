"""`value_and_grad`: gradients of micro-batches, with the communication where one wants it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jzero.core.errors import (
    check_choice,
    check_flag,
    check_function,
    check_int,
    check_ints,
)
from jzero.core.nnx_modules import has_module
from jzero.gather.transform import gather_on_use
from jzero.gradients.accumulation import Accumulation
from jzero.gradients.loss_scale import Factor, factor_of
from jzero.layout.explicit import in_auto_mode, result_specs
from jzero.offload import mapped
from jzero.sharding import Plan, check_plan

REDUCE = ("auto", "step", "microbatch")


def value_and_grad(
    loss_fn: Callable[..., Any],
    plan: Plan,
    *,
    accumulate: int = 1,
    has_aux: bool = False,
    batch_argnums: int | Sequence[int] = 1,
    rng_argnums: int | Sequence[int] = (),
    weight: Callable[..., Any] | None = None,
    reduce: str = "auto",
    coupled: str = "refuse",
    scale: Any = None,
) -> Callable[..., Any]:
    """`jax.value_and_grad` of a loss of params, over micro-batches, reduced once or as they come.

    The batch is cut into `accumulate` micro-batches, each still split over all devices; their gradients are
    summed in fp32. At stage 3 weights are gathered where they are used (`gather_on_use`) in each of them.

    Args:
      loss_fn: `loss_fn(params, batch, ...)`, a scalar, or (loss, aux). Micro-batches of a mean over examples are
        averaged, those of a sum are summed; jzero finds out which it is by tracing the loss at two batch sizes.
      plan: of the params.
      accumulate: number of micro-batches.
      has_aux: `loss_fn` returns (loss, aux). Over micro-batches integer leaves of aux and sums over examples are
        summed, all others averaged.
      batch_argnums: positions of the arguments whose leaves have the batch as dim 0; params are position 0.
      rng_argnums: positions of random keys; each micro-batch gets its own (`fold_in` of its number), and with
        reduce="step" each device as well. Numbers for each example that come from any other key are refused.
      weight: `weight(batch)`, the sum of the weights that a micro-batch's loss is a mean over (tokens that are
        not padding), called like `loss_fn` without params. None: micro-batches count the same. With it the result
        is the one-batch mean, and a micro-batch of weight 0 counts nothing, whatever its loss.
      reduce: "step", once after the loop; "microbatch", in each; "auto": "step" at stages 0 and 1, else
        "microbatch". One micro-batch needs neither, unless the plan has a `reduce_dtype`: "step" then hands over the
        sums in it, "microbatch" (stages 2 and 3) reduces bucket by bucket and rounds the sums to the params' dtype.
      coupled: a loss that couples examples (BatchNorm, contrastive) is another one on micro-batches. "refuse" it,
        found by tracing it, or "allow" the loss of each micro-batch (with reduce="step": of each device's part).
      scale: a `jzero.LossScale` (or a number) for fp16: the loss is multiplied by it and the gradients are divided by
        it, in fp32, on their shards, after they are reduced in the dtype of the params.

    Returns:
      A function `(params, batch, ...) -> (loss, grads)`, or `((loss, aux), grads)`. Gradients are in the dtype of
      the params for one micro-batch, for "step" in `reduce_dtype` where the plan has one, in fp32 for summed
      shards and with `scale`, where an overflow leaves inf or nan in them.

    Raises:
      TypeError, ValueError: from here: wrong kinds, an unknown `reduce`, "step" at stage 3. From the function:
        params that the plan was not made for, a batch that devices x micro-batches do not divide, aux with one
        value per example, a loss that couples examples (BatchNorm, contrastive), that is neither a mean nor a sum over
        them, or that draws numbers for each of them from a key that is not split.

    Layout:
      params: stored; batch: split over the batch axes; grads: reduce="step" `Layout.state`, else `Layout.grad`.

    Cost:
      Per device, k = accumulate, Psi = bytes of all params, bf16: "step" 4 bytes per parameter (fp32 sums, whole)
      and (N-1)/N Psi for gradients; "microbatch" 4/N bytes per parameter and k (N-1)/N Psi (stages 0 and 1: 4
      bytes and 2 k (N-1)/N Psi). Stage 3 gathers 2 (N-1)/N Psi more per micro-batch.
      `estimate(accumulate=)` sums it up.

    Example:
      >>> import jax.numpy as jnp, jzero
      >>> params = {"w": jnp.ones((16, 4))}
      >>> plan = jzero.make_plan(params, stage=1)
      >>> vg = jzero.value_and_grad(lambda p, x: jnp.mean((x @ p["w"]) ** 2), plan, accumulate=2)
      >>> loss, grads = vg(params, plan.place_batch(jnp.ones((32, 16))))
      >>> float(loss), grads["w"].shape
      (256.0, (16, 4))

    References:
      Rajbhandari et al., ZeRO (arXiv:1910.02054), section 7; DeepSpeed's `gradient_accumulation_steps`.
    """
    where: Any = {"where": "jzero.value_and_grad"}
    check_function(loss_fn, "loss_fn", **where)
    check_plan(plan, **where)
    check_int(accumulate, "accumulate", low=1, **where)
    check_flag(has_aux, "has_aux", **where)
    check_function(weight, "weight", optional=True, **where)
    check_choice(reduce, "reduce", REDUCE, **where)
    check_choice(coupled, "coupled", ("refuse", "allow"), **where)
    positions = {"low": 1, "remedy": "Position 0 is the params.", **where}
    accumulation = Accumulation(
        plan, accumulate, check_ints(batch_argnums, "batch_argnums", **positions),
        check_ints(rng_argnums, "rng_argnums", **positions), weight, _mode(reduce, plan, accumulate),
    )  # fmt: skip
    scale = None if scale is None else factor_of(scale)
    return _ValueAndGrad(loss_fn, accumulation, has_aux, coupled == "allow", scale)


def _mode(reduce: str, plan: Plan, accumulate: int) -> str:
    """Where gradients are reduced: "step", "microbatch" or, where XLA alone decides, "plain"."""
    if plan.config.row.params and reduce == "step":
        raise ValueError(
            'jzero.value_and_grad(reduce="step"): stage 3 gathers weights in each micro-batch and never holds a '
            "whole gradient. Leave reduce out, or pass stage=2 (4 bytes per parameter more)."
        )
    if accumulate == 1:
        in_place = plan.config.row.params or (plan.config.row.grads and reduce == "microbatch")
        return "plain" if plan.config.reduce_dtype is None or in_place else "step"
    if reduce == "auto":
        return "microbatch" if plan.config.row.grads else "step"
    return reduce


@dataclasses.dataclass(frozen=True)
class _ValueAndGrad:
    """What `value_and_grad` returns."""

    loss_fn: Callable[..., Any]
    accumulation: Accumulation
    has_aux: bool
    coupled: bool
    scale: Factor | None

    @property
    def __name__(self) -> str:
        """For profiles and messages, as `jax.value_and_grad` has it."""
        return getattr(self.loss_fn, "__name__", "loss")

    def __call__(self, params, *args, **kwargs):
        """(loss, grads) of the whole batch."""
        plan, trees = self.accumulation.plan, (params, args, kwargs)
        self._check_params(params)

        def of_batch(scale, params, args, kwargs):
            known = self if scale is None else dataclasses.replace(self, scale=Factor(scale))
            return known._of_batch(params, *args, **kwargs)

        def specs(out):
            grads = [self.accumulation.layout_of(x) for x in plan.layouts]
            return [*result_specs(trees, out[0], plan), *grads]

        scale = None if self.scale is None else self.scale.value
        return in_auto_mode(of_batch, (scale, *trees), specs, plan.own_axes)

    def _of_batch(self, params, *args, **kwargs):
        plan, plain = self.accumulation.plan, self.accumulation.mode == "plain"
        if plain and self.scale is None:
            fn = gather_on_use(self.loss_fn, plan)
            return jax.value_and_grad(fn, has_aux=self.has_aux)(params, *args, **kwargs)
        fn = functools.partial(self._loss, kwargs=kwargs)
        if plain:
            (loss, aux), grads = jax.value_and_grad(
                gather_on_use(lambda p, *a: self._loss(p, a, kwargs), plan), has_aux=True
            )(params, *args)
        else:
            self.accumulation.check_batch(args)
            sums = self.accumulation.check_loss(fn, params, args, coupled=self.coupled)
            loss, aux, grads = self.accumulation(fn, params, args, sums)
        if self.scale is not None:
            loss, grads = self._unscaled(loss, grads)
        return ((loss, aux), grads) if self.has_aux else (loss, grads)

    def _unscaled(self, loss, grads):
        """Without the loss scale: the division is in fp32, and XLA does it on shards, after the reduction."""
        leaves, tree = jax.tree.flatten(grads)
        assert self.scale is not None
        by = 1 / self.scale.value

        def unscaled(by, g):
            return g.astype(jnp.promote_types(g.dtype, jnp.float32)) * by

        wide = mapped(unscaled, [leaves], self.accumulation.plan, scalars=[by])
        return loss.astype(jnp.float32) * by, tree.unflatten(wide)

    def _check_params(self, params) -> None:
        """Raises ValueError for a tree that the plan was not made for; says what to do with an `nnx.Module`."""
        try:
            self.accumulation.plan.match(params, where="jzero.value_and_grad")
        except ValueError:
            if not has_module(params):
                raise
            raise ValueError(
                "jzero.value_and_grad: this nnx.Module holds more than the plan's params (statistics, random keys). "
                "Take its gradient by nnx.value_and_grad(jzero.gather_on_use(loss_fn, plan))(model, batch); for "
                "micro-batches split it: graph, params, rest = nnx.split(model, nnx.Param, ...)."
            ) from None

    def _loss(self, params, args, kwargs):
        out = self.loss_fn(params, *args, **kwargs)
        loss, aux = out if self.has_aux else (out, ())
        return loss if self.scale is None else loss.astype(jnp.float32) * self.scale.value, aux
