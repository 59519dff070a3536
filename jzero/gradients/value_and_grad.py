"""`value_and_grad`: gradients over micro-batches, reduced once per step or once per micro-batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jzero.core.errors import check_choice, check_flag, check_function, check_int, check_ints
from jzero.core.jaxprs import split_arrays
from jzero.core.left_behind import left_behind
from jzero.core.nnx_modules import Apart, has_module, has_node, is_module, is_node, is_variable
from jzero.core.random_keys import may_be_keys
from jzero.gather.transform import gather_on_use
from jzero.gradients.accumulation import Accumulation, trained_value_and_grad
from jzero.gradients.batch_independence import ALLOWED, STATISTICS
from jzero.gradients.loss_scale import Factor, factor_of
from jzero.gradients.module_state import State, read_state
from jzero.layout.explicit import in_auto_mode, result_specs
from jzero.layout.specs import P
from jzero.layout.trainable import numbers, with_rest
from jzero.offload import mapped
from jzero.sharding import Plan, check_plan

REDUCE = ("auto", "step", "microbatch")
COUPLED = ("auto", "refuse", "allow")
WHERE = "jzero.value_and_grad"


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
    coupled: str = "auto",
    scale: Any = None,
) -> Callable[..., Any]:
    """`jax.value_and_grad` of a loss over micro-batches, with gradients reduced once or in each of them.

    The batch is cut into `accumulate` micro-batches, each still split over all devices; their gradients are
    summed in fp32. At stage 3 weights are gathered where they are used (`gather_on_use`) in each of them.

    Args:
      loss_fn: `loss_fn(params, batch, ...)` or `loss_fn(model, batch, ...)` of an `nnx.Module`: a scalar, or (loss,
        aux). Micro-batches of a mean over examples are averaged, those of a sum are summed; jzero finds out which it is
        by tracing the loss at two batch sizes.
      plan: the plan of the params; for a module, of those that its optimizer trains (`wrt`).
      accumulate: number of micro-batches.
      has_aux: `loss_fn` returns (loss, aux). Over micro-batches sums over examples are summed, other floats averaged
        (with a warning for a maximum, a root, a ratio), and integers that no example changes are kept. Bools and
        other integers are refused.
      batch_argnums: positions of the arguments whose leaves have the batch as dim 0; params are position 0.
      rng_argnums: positions of random keys; each micro-batch gets its own (`fold_in` of its number), and with
        reduce="step" each device as well. A loss that draws numbers for each example from any other key is refused.
        The `nnx.Rngs` of a module, or of another argument, are not named here: their counts advance.
      weight: `weight(batch)`, the sum that a micro-batch's mean loss divides by (the number of tokens that are not
        padding), called like `loss_fn` without params. None: micro-batches count the same. With it the result is the
        one-batch mean, and a micro-batch of weight 0 contributes nothing, whatever its loss.
      reduce: "step", once after the loop; "microbatch", in each; "auto": "step" at stages 0 and 1, else "microbatch".
        One micro-batch needs neither, unless the plan has a `reduce_dtype`: "step" (then also "auto" at stage 2, but
        for int8) returns gradients in that dtype (int8: in fp32), "microbatch" (stages 2 and 3) reduces bucket by
        bucket and rounds the sums to the params' dtype.
        With a module that keeps batch statistics "auto" is always "microbatch", and "step" is refused; with
        coupled="allow", too, "auto" is "microbatch".
      coupled: what to do with a loss that couples examples (BatchNorm, contrastive), whose value differs on
        micro-batches. "refuse": raise an error if a trace of the loss shows it. "allow": take the loss of each
        micro-batch as it is, of the whole one (with reduce="step": of each device's part of it). "auto": accept
        what is coupled by statistics alone that a module keeps (the mean and the variance of BatchNorm), which are
        those of whole micro-batches; else "refuse".
      scale: a `jzero.LossScale` (or a number) for fp16: the loss is multiplied by it and the gradients are divided by
        it, in fp32, on their shards, after they are reduced in the dtype of the params.

    Returns:
      A function `(params, batch, ...) -> (loss, grads)`, or `((loss, aux), grads)`. Gradients are in the dtype of
      the params for one micro-batch, for "step" in `reduce_dtype` where the plan has one, in fp32 for summed
      shards and with `scale`, where an overflow leaves inf or nan in them. Params that the plan says are not trainable
      have None in the place of a gradient.

    Raises:
      TypeError, ValueError: from here: wrong kinds, an unknown `reduce`, "step" at stage 3. From the function:
        params that the plan was not made for, a batch that devices x micro-batches do not divide, aux with one value
        per example or with a bool; a loss that couples examples (BatchNorm, contrastive), that is neither a mean nor a
        sum over them, or that draws numbers for each of them from a key that is not split; a loss that sets a Variable
        outside of an object, adds Variables to its module, changes the shape or dtype of its state, or sets its params.

    Layout:
      params: stored; batch: split over the batch axes; grads: `Layout.state` at stage 1 and for reduce="step", else
      `Layout.grad`.

    Cost:
      Per device, k = accumulate, Psi = bytes of all params, bf16: "step" 4 bytes per parameter (fp32 sums, whole)
      and (N-1)/N Psi for gradients (stage 0: 2 (N-1)/N Psi); "microbatch" 4/N bytes per parameter and k (N-1)/N Psi
      (stage 0: 4 bytes and up to 2 k (N-1)/N Psi). Stage 3 gathers 2 (N-1)/N Psi more per micro-batch.
      `estimate(accumulate=)` computes the total.

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
    check_function(loss_fn, "loss_fn", where=WHERE)
    check_plan(plan, where=WHERE)
    check_int(accumulate, "accumulate", low=1, where=WHERE)
    check_flag(has_aux, "has_aux", where=WHERE)
    check_function(weight, "weight", optional=True, where=WHERE)
    check_choice(reduce, "reduce", REDUCE, where=WHERE)
    check_choice(coupled, "coupled", COUPLED, where=WHERE)
    positions: Any = {"low": 1, "remedy": "Position 0 is the params.", "where": WHERE}
    accumulation = Accumulation(
        plan, accumulate, check_ints(batch_argnums, "batch_argnums", **positions),
        check_ints(rng_argnums, "rng_argnums", **positions), weight, _mode(reduce, plan, accumulate),
    )  # fmt: skip
    scale = None if scale is None else factor_of(scale)
    return _ValueAndGrad(loss_fn, accumulation, has_aux, reduce, coupled, scale)


def _mode(reduce: str, plan: Plan, accumulate: int) -> str:
    """Where gradients are reduced: "step", "microbatch" or, where XLA alone decides, "plain"."""
    if plan.config.row.params and reduce == "step":
        raise ValueError(
            'jzero.value_and_grad(reduce="step"): stage 3 gathers weights in each micro-batch and never holds a '
            "whole gradient. Leave reduce out, or pass stage=2 (4 bytes per parameter more)."
        )
    if accumulate == 1:
        by_bucket = reduce == "microbatch" or (reduce == "auto" and plan.config.reduces_in_codes)
        in_place = plan.config.row.params or (plan.config.row.grads and by_bucket)
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
    reduce: str
    coupled: str
    scale: Factor | None

    @property
    def __name__(self) -> str:
        """For profiles and messages, as `jax.value_and_grad` has it."""
        return getattr(self.loss_fn, "__name__", "loss")

    @property
    def plan(self) -> Plan:
        """That of the params."""
        return self.accumulation.plan

    def __call__(self, params, *args, **kwargs):
        """(loss, grads) of the whole batch."""
        if has_node((params, args, kwargs)):
            return self._of_objects(params, args, kwargs)
        self.plan.match(params, where=WHERE)
        out, grads, _, _ = self._evaluated(_as_it_is, params, args, kwargs)
        return out, grads

    def _of_objects(self, params, args, kwargs):
        """The same with NNX objects among the arguments, whose state advances."""
        module = is_module(params)
        if has_module(params) and not module:
            raise TypeError(f"{WHERE}: params in several nnx.Modules. Pass one that holds them: nnx.Dict(a=a, b=b).")
        by_path = self.plan.by_keys
        apart = Apart((params, args, kwargs), by_path.__contains__ if module else None, where=WHERE)
        self.plan.match(apart.params if module else params, where=WHERE)
        if self.accumulation.mode == "plain":
            return self._plain_of_objects(params, args, kwargs)
        keys = [i for i in self.accumulation.rng_argnums if i <= len(args) and has_node(args[i - 1])]
        if keys:
            raise ValueError(
                f"{WHERE}: rng_argnums names argument {keys[0]}, an NNX object. Its keys advance by counts of their "
                "own: leave it out."
            )
        numbers = [jnp.asarray(x) if isinstance(x, (bool, int, float, complex)) else x for x in apart.state]
        values, filled = split_arrays(numbers)
        paths = [k for k, x in zip(apart.paths, numbers, strict=True) if any(x is v for v in values)]

        def call(fn, params, args, kwargs, values):
            first = apart.trees[0] if module else params
            out, own, new = apart.call(fn, (first, args, kwargs), params if module else (), filled(values))
            return out, own if module else jax.tree.leaves(params), split_arrays(new)[0]

        _, args, kwargs = apart.trees
        out, grads, values, _ = self._evaluated(call, apart.params if module else params, args, kwargs, values, paths)
        apart.update(filled(values))
        if not module:
            return out, grads
        found = apart.as_params(jax.tree.leaves(grads, is_leaf=lambda x: x is None))
        if self.plan.trained is self.plan:
            return out, found
        own = self.plan.trained.by_keys
        return out, found.filter(lambda path, _: tuple(map(str, path)) in own)

    def _plain_of_objects(self, params, args, kwargs):
        from flax import nnx

        def of_factor(params, args, kwargs, factor):
            return self._with_factor(factor)._loss(params, args, kwargs)

        fn, factor = gather_on_use(of_factor, self.plan), self._factor
        if is_module(params):
            by_path = self.plan.trained.by_keys
            wanted = nnx.DiffState(0, lambda path, _: tuple(map(str, path)) in by_path)
            (loss, aux), grads = nnx.value_and_grad(fn, argnums=wanted, has_aux=True)(params, args, kwargs, factor)
        else:
            run = trained_value_and_grad(fn, self.plan, nnx.value_and_grad)
            (loss, aux), grads = run(params, args, kwargs, factor)
            grads = self._with_none(grads, params)
        if self.scale is not None:
            loss, grads = self._unscaled(loss, grads)
        return ((loss, aux) if self.has_aux else loss), grads

    @property
    def _factor(self):
        """The value of the loss scale, if there is one: an argument of what runs, since a mesh is part of its type."""
        return None if self.scale is None else self.scale.value

    def _with_factor(self, factor):
        """The same with this value of the loss scale."""
        return self if factor is None else dataclasses.replace(self, scale=Factor(factor))

    def _evaluated(self, call, params, args, kwargs, values=(), paths=()):
        """(loss or (loss, aux), grads, the state of the objects, where gradients were reduced)."""
        trees, values = (params, args, kwargs), list(values)

        def of_batch(loss_fn, factor, params, args, kwargs, values):
            own = dataclasses.replace(self._with_factor(factor), loss_fn=loss_fn)
            return own._of_batch(call, params, args, kwargs, values, paths)

        def specs(out):
            used = dataclasses.replace(self.accumulation, mode=out[3])
            grads = [used.layout_of(x) for x in self.plan.trained.layouts]
            own = [jax.typeof(x).sharding.spec for x in values]
            return [*result_specs(trees, out[0], self.plan), *grads, *own, P()]

        return in_auto_mode(of_batch, (self._factor, *trees, values), specs, self.plan.own_axes, user=self.loss_fn)

    def _of_batch(self, call, params, args, kwargs, values, paths):
        used = self.accumulation
        if used.mode == "plain":
            gathering = gather_on_use(lambda p, *a: self._checked_loss(p, a, kwargs), self.plan)
            (loss, aux), grads = trained_value_and_grad(gathering, self.plan)(params, *args)
        else:
            used.check_batch(args)

            def fn(params, args, values):
                (loss, aux), _, values = call(self._checked_loss, params, args, kwargs, values)
                self._check_generators()
                return loss, (aux, values)

            state = State() if call is _as_it_is else self._state(call, params, args, kwargs, values, paths)
            used = self._reduced_for(state)
            of_batch = bool(state.of_batch) and self.coupled == "auto"
            coupled = STATISTICS if of_batch else ALLOWED if self.coupled == "allow" else ""
            ways = used.check_loss(fn, params, args, state, coupled=coupled)
            loss, aux, grads, carry = used(fn, params, args, state, ways)
            values = state.with_carry(carry)
        if self.scale is not None:
            loss, grads = self._unscaled(loss, grads)
        return ((loss, aux) if self.has_aux else loss), self._with_none(grads, params), values, used.mode

    def _with_none(self, grads, params):
        """The gradients in the structure of the params: None for those that the optimizer does not train."""
        at = numbers(params, self.plan, where=WHERE)
        return jax.tree.structure(params).unflatten(with_rest(grads, at, lambda _: None))

    def _check_generators(self) -> None:
        """Raises ValueError where the loss advances a random number generator that is not an argument."""
        for stored in left_behind(self.loss_fn):
            if any(map(may_be_keys, stored.values)):
                raise ValueError(
                    f"{WHERE}: the loss draws from {stored.name} and changes it, and micro-batches cannot hand it on. "
                    "Draw one key before the loss, pass it as an argument of the loss and name its position: "
                    "rng_argnums=2 for loss(params, batch, key)."
                )

    def _state(self, call, params, args, kwargs, values, paths) -> State:
        """The state of the objects, with what the loss does to it."""
        used = dataclasses.replace(self.accumulation, mode="microbatch")
        numbers = [i + 1 for i, arg in enumerate(args) for _ in split_arrays(arg)[0]]
        batch, keys = ([i in some for i in numbers] for some in (used.batch_argnums, used.rng_argnums))

        def fn(params, args, values):
            return call(self._loss, params, args, kwargs, values)[1:]

        return read_state(fn, params, used.part(args), values, paths, batch, keys)

    def _reduced_for(self, state: State) -> Accumulation:
        """Where gradients are reduced: in each micro-batch if what the loss does to its state does not allow "step"."""
        used, why = self.accumulation, state.why_not_step
        if self.coupled == "allow" and self.reduce == "auto":
            why = why or "couples examples, and each device would compute it from its own rows."
        if used.mode != "step" or not why:
            return used
        remedy = "Leave reduce out: such a loss is reduced in each micro-batch."
        if self.reduce == "step":
            raise ValueError(f'{WHERE}(reduce="step"): the loss {why} {remedy}')
        if self.plan.config.reduce_dtype is not None and not self.plan.config.row.grads:
            raise ValueError(
                f"{WHERE}: the loss {why} So its gradients are reduced in each micro-batch, where stage "
                f"{self.plan.config.stage} does not support reduce_dtype. Pass stage=2, or leave reduce_dtype out."
            )
        return dataclasses.replace(used, mode="microbatch")

    def _unscaled(self, loss, grads):
        """Loss and gradients divided by the loss scale, in fp32; XLA does it on shards, after the reduction."""
        leaves, tree = jax.tree.flatten(grads)
        assert self.scale is not None
        by = 1 / self.scale.value

        def unscaled(by, g):
            return g.astype(jnp.promote_types(g.dtype, jnp.float32)) * by

        wide = mapped(unscaled, [leaves], self.plan, scalars=[by], in_place=True)
        return loss.astype(jnp.float32) * by, tree.unflatten(wide)

    def _checked_loss(self, *given):
        """`_loss`; raises ValueError where the loss sets a Variable outside of objects: its new value would be lost."""
        leaves = jax.tree.leaves(given, is_leaf=lambda x: is_node(x) or is_variable(x))
        alone = [(x, jax.tree.leaves(x)) for x in leaves if is_variable(x)]
        out = self._loss(*given)
        if any(a is not b for x, old in alone for a, b in zip(jax.tree.leaves(x), old, strict=True)):
            raise ValueError(
                f"{WHERE}: the loss sets an nnx.Variable that is an argument by itself, and the new value would be "
                "lost. Pass an object that holds it (nnx.Dict(count=variable)), or return it as aux (has_aux=True)."
            )
        return out

    def _loss(self, params, args, kwargs):
        out = self.loss_fn(params, *args, **kwargs)
        loss, aux = out if self.has_aux else (out, ())
        return loss if self.scale is None else loss.astype(jnp.float32) * self.scale.value, aux


def _as_it_is(fn: Callable[..., Any], params, args, kwargs, values):
    """`fn(params, args, kwargs)` of arguments without NNX objects."""
    return fn(params, args, kwargs), jax.tree.leaves(params), values
