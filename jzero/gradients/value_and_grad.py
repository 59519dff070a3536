"""`value_and_grad`: gradients of micro-batches, with the communication where one wants it.

[Note: one reduction or many]
Micro-batches can be reduced in two places. After the loop ("step"): each device sums its own gradients, whole
and in fp32, and one reduce-scatter follows: 1 Psi for the gradients whatever the number of micro-batches, and
4 bytes per parameter held. Inside of it ("microbatch"): each micro-batch's gradient is reduced to its shard as
the backward pass makes it, and shards are summed: 1 Psi per micro-batch, and 4/N bytes per parameter held. Under
plain `jax.jit` XLA always does the second, since a sum over micro-batches of sums over devices looks the same to
it; the first takes `jax.shard_map`, where a gradient is a device's own until it is reduced.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jzero.comm import comm_of
from jzero.comm.reduce_scatter import batch_axes, of_batch, sum_over_devices
from jzero.core.errors import (
    check_choice,
    check_flag,
    check_function,
    check_int,
    check_ints,
    counted,
    division,
    is_array,
    listing,
    shown,
    typed_shape,
)
from jzero.core.jaxprs import is_tracer
from jzero.core.nnx_modules import has_module
from jzero.gather.transform import as_written, gather_on_use
from jzero.gradients.batch_independence import check_examples_apart
from jzero.gradients.loss_scale import Factor, factor_of
from jzero.layout.leaf_rule import Layout
from jzero.layout.mesh import check_context_mesh
from jzero.layout.specs import P, make_spec
from jzero.sharding import Plan, check_plan
from jzero.update.padded_state import cut, pad

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
      loss_fn: `loss_fn(params, batch, ...)`, a scalar that is a mean over examples, or (loss, aux).
      plan: of the params.
      accumulate: number of micro-batches.
      has_aux: `loss_fn` returns (loss, aux). Over micro-batches floating aux leaves are averaged like the loss
        and integer ones summed.
      batch_argnums: positions of the arguments whose leaves have the batch as dim 0; params are position 0.
      rng_argnums: positions of random keys; each micro-batch gets its own (`fold_in` of its number), and with
        reduce="step" each device as well.
      weight: `weight(batch)`, the sum of the weights that a micro-batch's loss is a mean over (tokens that are
        not padding), called like `loss_fn` without params. None: micro-batches count the same. With it the result
        is the one-batch mean, and a micro-batch of weight 0 counts nothing, whatever its loss.
      reduce: "step", once after the loop; "microbatch", in each; "auto": "step" at stages 0 and 1, else
        "microbatch". One micro-batch needs neither, unless the plan has a `reduce_dtype`: "step" then hands over the
        sums in it, "microbatch" (stages 2 and 3) reduces bucket by bucket and rounds the sums to the params' dtype.
      coupled: a loss that couples examples (BatchNorm, contrastive) is another one on micro-batches. "refuse" it,
        told from its jaxpr, or "allow" the loss of each micro-batch (with reduce="step": of each device's part).
      scale: a `jzero.LossScale` (or a number) for fp16: the loss is multiplied by it and the gradients are divided by
        it, in fp32, on their shards, after they are reduced in the dtype of the params.

    Returns:
      A function `(params, batch, ...) -> (loss, grads)`, or `((loss, aux), grads)`. Gradients are in the dtype of
      the params for one micro-batch, for "step" in `reduce_dtype` where the plan has one, in fp32 for summed
      shards and with `scale`, where an overflow leaves inf or nan in them.

    Raises:
      TypeError, ValueError: from here: wrong kinds, an unknown `reduce`, "step" at stage 3. From the function:
        params that the plan was not made for, a batch that devices x micro-batches do not divide, aux with one
        value per example, a loss that couples examples (BatchNorm, contrastive).

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
    return _ValueAndGrad(
        loss_fn, plan, accumulate, has_aux, check_ints(batch_argnums, "batch_argnums", **positions),
        check_ints(rng_argnums, "rng_argnums", **positions), weight, _mode(reduce, plan, accumulate),
        coupled == "allow", None if scale is None else factor_of(scale),
    )  # fmt: skip


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
    plan: Plan
    accumulate: int
    has_aux: bool
    batch_argnums: tuple[int, ...]
    rng_argnums: tuple[int, ...]
    weight: Callable[..., Any] | None
    mode: str
    coupled: bool
    scale: Factor | None

    @property
    def __name__(self) -> str:
        """For profiles and messages, as `jax.value_and_grad` has it."""
        return getattr(self.loss_fn, "__name__", "loss")

    def __call__(self, params, *args, **kwargs):
        """(loss, grads) of the whole batch."""
        check_context_mesh()
        self._check_params(params)
        if self.mode == "plain" and self.scale is None:
            fn = gather_on_use(self.loss_fn, self.plan)
            return jax.value_and_grad(fn, has_aux=self.has_aux)(params, *args, **kwargs)
        fn = functools.partial(self._loss, kwargs=kwargs)
        if self.mode == "plain":
            fn = gather_on_use(lambda p, *a: self._loss(p, a, kwargs), self.plan)
            (loss, aux), grads = jax.value_and_grad(fn, has_aux=True)(params, *args)
        else:
            call = self._after_the_loop if self.mode == "step" else self._in_the_loop
            loss, aux, grads = call(fn, params, args, self._check_batch(args))
        if self.scale is not None:
            loss, grads = self._unscaled(loss, grads)
        return ((loss, aux), grads) if self.has_aux else (loss, grads)

    def _unscaled(self, loss, grads):
        """Without the loss scale: the division is in fp32, and XLA does it on shards, after the reduction."""
        leaves, tree = jax.tree.flatten(grads)
        assert self.scale is not None
        by = 1 / self.scale.value
        wide = [g.astype(jnp.promote_types(g.dtype, jnp.float32)) * by for g in leaves]
        return loss.astype(jnp.float32) * by, tree.unflatten(wide)

    def _check_params(self, params) -> None:
        """Raises ValueError for a tree that the plan was not made for; says what to do with an `nnx.Module`."""
        try:
            self.plan.match(params, where="jzero.value_and_grad")
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

    def _check_batch(self, args) -> int:
        """The size of the batch.

        Raises:
          ValueError: no such argument, leaves of different sizes, or a size that devices x micro-batches do
            not divide.
        """
        missing = [i for i in (*self.batch_argnums, *self.rng_argnums) if i > len(args)]
        if missing:
            raise ValueError(
                f"jzero.value_and_grad: batch_argnums and rng_argnums name argument {missing[0]}, but the function was "
                f"called with params and {len(args)} more. Pass it by position."
            )
        leaves = jax.tree.leaves([args[i - 1] for i in self.batch_argnums])
        sizes = sorted({np.shape(x)[0] if is_array(x) and np.ndim(x) else 0 for x in leaves})
        parts = self.plan.batch_parts * self.accumulate
        if len(sizes) == 1 and sizes[0] and sizes[0] % parts == 0:
            return sizes[0]
        rows = [
            (typed_shape(x), division(np.shape(x)[0], parts) if np.ndim(x) else "no dim 0")
            if is_array(x)
            else (shown(x), "no array")
            for x in leaves
        ]
        raise ValueError(
            f"jzero.value_and_grad: {counted(self.plan.batch_parts, 'device')} x "
            f"{counted(self.accumulate, 'micro-batch', 'micro-batches')} cannot split the batch evenly:\n"
            f"{listing(rows)}\nDim 0 of every batch leaf must be the same multiple of {parts}; "
            "leaves that are no batch belong in an argument that batch_argnums leaves out."
        )

    # --- one reduction after the loop -----------------------------------------------------------------------

    def _after_the_loop(self, fn, params, args, size: int):
        plan, axes = self.plan, batch_axes(self.plan)
        arrays, rest = _split_static(args)
        specs = [[P(axes) if i + 1 in self.batch_argnums else P() for _ in xs] for i, xs in enumerate(arrays)]
        self._check_apart(fn, params, args, size // (plan.batch_parts * self.accumulate))
        rows = [(x, self._reduced_to(x)) for x in plan.layouts]

        def local(params, arrays):
            index = jax.lax.axis_index(axes)
            parts = self._micro_batches(_merge_static(arrays, rest), local_index=index)
            total, loss, aux, sums = self._loop(fn, params, *parts, pin=lambda x: x)
            total = sum_over_devices(total, plan)
            scaled = [s / total for s in sums]
            grads = [self._reduced(g, *row) for g, row in zip(scaled, rows, strict=True)]
            return sum_over_devices(loss, plan) / total, _over_devices(aux, total, plan), grads

        run = jax.shard_map(
            local, mesh=plan.array_mesh, in_specs=(P(), specs),
            out_specs=(P(), P(), [of_batch(spec, plan) for _, spec in rows]), axis_names=set(axes), check_vma=False,
        )  # fmt: skip
        loss, aux, grads = run(params, arrays)
        grads = [cut(g, x.shape, spec, plan) for g, (x, spec) in zip(grads, rows, strict=True)]
        return loss, aux, jax.tree.structure(params).unflatten(grads)

    def _reduced_to(self, x: Layout):
        """`Layout.state`, or whole where its padded pieces share a dim with another axis."""
        scattered = comm_of(self.plan).gradients.is_scattered(x.shape, x.state)
        return x.used if x.padded and not scattered else x.state

    def _reduced(self, grad, x: Layout, spec):
        """One device's mean gradient, reduced to the layout `spec`; padded where its pieces would be unequal."""
        grad = grad.astype(self.plan.config.reduce_dtype or x.dtype)
        return comm_of(self.plan).gradients.of_devices(grad, spec, x.used)

    # --- a reduction in every micro-batch -------------------------------------------------------------------

    def _in_the_loop(self, fn, params, args, size: int):
        plan = self.plan
        self._check_apart(fn, params, args, size // self.accumulate)

        def flat_loss(params, *args):
            return fn(params, args)

        gathering = gather_on_use(flat_loss, plan)
        parts = self._micro_batches(args)

        def pin(grads):
            return [self._on_shard(g, x) for g, x in zip(grads, plan.layouts, strict=True)]

        total, loss, aux, sums = self._loop(lambda p, a: gathering(p, *a), params, *parts, pin=pin)
        grads = [cut(s / total, x.shape, x.grad, plan) for s, x in zip(sums, plan.layouts, strict=True)]
        aux = jax.tree.map(lambda x: x / total if jnp.issubdtype(x.dtype, jnp.inexact) else x, aux)
        return loss / total, aux, jax.tree.structure(params).unflatten(grads)

    def _on_shard(self, grad, x: Layout):
        """In the shape of the sums: padded where the pieces of a gradient would be unequal."""
        return pad(grad, self._sum_shape(x), x.grad, self.plan)

    def _sum_shape(self, x: Layout) -> tuple[int, ...]:
        return x.state_shape if self.mode == "microbatch" and x.grad != x.used else x.shape

    # --- the loop -------------------------------------------------------------------------------------------

    def _micro_batches(self, args, local_index=None):
        """(arguments that change per micro-batch, stacked; a function that completes one micro-batch's arguments).

        On a device's own rows (`local_index` is its number) a cut is a reshape. On the whole batch micro-batch i
        takes the i-th part of every device's rows, so that nothing moves.
        """
        k, n = self.accumulate, self.plan.batch_parts

        def cut(x):
            x = jnp.asarray(x)
            if local_index is not None:
                return x.reshape(k, x.shape[0] // k, *x.shape[1:])
            x = x.reshape(n, k, x.shape[0] // (n * k), *x.shape[1:]).swapaxes(0, 1)
            x = x.reshape(k, n * x.shape[2], *x.shape[3:])
            return self.plan.constrain(x, make_spec([(), self.plan.batch_axes]))

        stacked = [jax.tree.map(cut, args[i - 1]) for i in self.batch_argnums]

        def complete(parts, number):
            out = list(args)
            for i, part in zip(self.batch_argnums, parts, strict=True):
                out[i - 1] = part
            for i in self.rng_argnums:
                own = out[i - 1] if local_index is None else jax.random.fold_in(out[i - 1], local_index)
                out[i - 1] = jax.random.fold_in(own, number) if k > 1 else own
            return tuple(out)

        return stacked, complete

    def _loop(self, fn, params, stacked, complete, *, pin):
        """Sums over micro-batches: of weights, and of loss, aux and gradients times their weight (fp32)."""

        def one(sums, step):
            number, parts = step
            args = complete(parts, number)
            (loss, aux), grads = jax.value_and_grad(fn, has_aux=True)(params, args)
            w = jnp.float32(1) if self.weight is None else self._weight_of(args)
            total, loss_sum, grad_sums = sums
            grads = pin(
                [_times(w, g, s.dtype) for g, s in zip(jax.tree.leaves(grads), grad_sums, strict=True)]
            )
            grad_sums = pin([s + g for s, g in zip(grad_sums, grads, strict=True)])
            return (total + w, loss_sum + _times(w, loss, jnp.float32), grad_sums), _weighted(aux, w)

        layouts = self.plan.layouts
        zeros = pin([jnp.zeros(self._sum_shape(x), jnp.promote_types(x.dtype, jnp.float32)) for x in layouts])
        start = (jnp.float32(0), jnp.float32(0), zeros)
        steps = (jnp.arange(self.accumulate), stacked)
        # `check` reads this name: a reduction in each micro-batch is a fault where it was not asked for
        with jax.named_scope("jzero.microbatch" if self.mode == "microbatch" else "jzero.accumulate"):
            (total, loss, sums), aux = jax.lax.scan(one, start, steps)
        return total, loss, jax.tree.map(lambda x: x.sum(0), aux), sums

    def _weight_of(self, args):
        assert self.weight is not None
        return jnp.asarray(self.weight(*(args[i - 1] for i in self.batch_argnums)), jnp.float32)

    def _check_apart(self, fn, params, args, examples: int) -> None:
        """Refuses losses that micro-batches would change, and aux with one value per example."""
        if self.coupled:
            return

        def shape(i, x):
            cut = i + 1 in self.batch_argnums and hasattr(x, "shape")
            return jax.ShapeDtypeStruct((examples, *np.shape(x)[1:]), x.dtype) if cut else x

        args = tuple(jax.tree.map(functools.partial(shape, i), arg) for i, arg in enumerate(args))
        batch = [i - 1 for i in self.batch_argnums]
        with as_written():
            check_examples_apart(
                fn, params, args, batch=batch, examples=examples, weighted=self.weight is not None
            )


def _times(w, value, dtype):
    """A value times its weight; nothing where the weight is 0, whose loss may be 0/0."""
    return jnp.where(w > 0, w * value.astype(dtype), jnp.zeros((), dtype))


def _weighted(aux, w):
    """Aux leaves to sum: floating ones times their weight, integer ones as they are."""
    return jax.tree.map(
        lambda x: _times(w, x, x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else x,
        jax.tree.map(jnp.asarray, aux),
    )


def _over_devices(aux, total, plan):
    """Aux sums of this device, summed over all; floating ones divided by the sum of the weights."""
    summed = jax.tree.map(lambda x: sum_over_devices(x, plan), aux)
    return jax.tree.map(
        lambda x: x / total.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else x, summed
    )


def _split_static(args):
    """Per argument its array leaves, and what puts it together again: `shard_map` takes arrays alone."""
    flat = [jax.tree.flatten(arg) for arg in args]
    traced = [
        [isinstance(x, (jax.Array, np.ndarray, np.generic)) or is_tracer(x) for x in xs] for xs, _ in flat
    ]
    arrays = [
        [x for x, a in zip(xs, own, strict=True) if a] for (xs, _), own in zip(flat, traced, strict=True)
    ]
    return arrays, [(tree, xs, own) for (xs, tree), own in zip(flat, traced, strict=True)]


def _merge_static(arrays, rest):
    """The reverse of `_split_static`."""
    out = []
    for own, (tree, leaves, traced) in zip(arrays, rest, strict=True):
        new = iter(own)
        out.append(tree.unflatten([next(new) if a else x for x, a in zip(leaves, traced, strict=True)]))
    return tuple(out)
