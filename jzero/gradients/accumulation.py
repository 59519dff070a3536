"""Sums losses, aux and gradients over micro-batches, and decides where the gradients are reduced.

[Note: one reduction or many]
Gradients can be reduced in two places (N devices; 1 Psi: (N-1)/N of the bytes of all params):

- After the loop ("step"): each device sums its own gradients, whole and in fp32, and one reduce-scatter follows. This
  sends 1 Psi whatever the number of micro-batches, and holds 4 bytes per parameter.
- Inside the loop ("microbatch"): each micro-batch's gradient is reduced to its shard as the backward pass makes it, and
  the shards are summed. This sends 1 Psi per micro-batch, and holds 4/N bytes per parameter.

Under plain `jax.jit` XLA always does the second, because it cannot tell a sum over micro-batches from a sum over
devices. The first needs `jax.shard_map`, where a gradient stays local to its device until it is reduced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jzero.comm import comm_of
from jzero.comm.reduce_scatter import batch_axes, is_of_batch, of_batch, sum_over_devices
from jzero.core.errors import counted, division, is_array, listing, shown, typed_shape
from jzero.core.jaxprs import split_arrays
from jzero.core.traces import as_written
from jzero.gather.transform import gather_on_use
from jzero.gradients.batch_independence import DEVICE, MICRO_BATCH, Loss
from jzero.gradients.means import Means, times
from jzero.gradients.module_state import State
from jzero.layout.batches import micro_batch_scope, split_rows
from jzero.layout.explicit import typed_mesh
from jzero.layout.leaf_rule import Layout
from jzero.layout.specs import P
from jzero.layout.trainable import numbers, picked, with_rest
from jzero.offload import mapped, zeros_like_gradients
from jzero.sharding import Plan
from jzero.update.padded_state import cut, pad


@dataclasses.dataclass(frozen=True)
class Accumulation:
    """Gradients of a batch in micro-batches; the fields are the arguments of `value_and_grad`.

    Its loss is `fn(params, args, values) -> (loss, (aux, values))`; `values` are those of a `State`.

    Attributes:
      mode: "step" or "microbatch", where gradients are reduced; "plain": XLA decides.
    """

    plan: Plan
    accumulate: int
    batch_argnums: tuple[int, ...]
    rng_argnums: tuple[int, ...]
    weight: Callable[..., Any] | None
    mode: str

    def check_batch(self, args) -> None:
        """Raises ValueError for a missing argument, or for leaves that devices x micro-batches cannot split evenly."""
        missing = [i for i in (*self.batch_argnums, *self.rng_argnums) if i > len(args)]
        if missing and self.batch_argnums == (1,) and not args:
            raise ValueError(
                f"jzero.value_and_grad: the loss was called with params alone, and {self.accumulate} micro-batches are "
                "cut from its arguments. Pass the batch as one: loss_fn(params, batch)."
            )
        if missing:
            raise ValueError(
                f"jzero.value_and_grad: batch_argnums and rng_argnums name argument {missing[0]}, but the function was "
                f"called with params and {counted(len(args), 'other argument')}. Pass it by position."
            )
        leaves = jax.tree.leaves([args[i - 1] for i in self.batch_argnums])
        sizes = sorted({np.shape(x)[0] if is_array(x) and np.ndim(x) else 0 for x in leaves})
        parts = self.plan.batch_parts * self.accumulate
        if len(sizes) == 1 and sizes[0] and sizes[0] % parts == 0:
            return
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
            "leaves that are not part of the batch belong in an argument that batch_argnums leaves out."
        )

    def part(self, args) -> tuple[Any, ...]:
        """The arguments with the shapes of one micro-batch, or with "step" of one device's rows of it."""
        parts = self.accumulate * (self.plan.batch_parts if self.mode == "step" else 1)

        def shape(x):
            whole = not hasattr(x, "shape")
            return x if whole else jax.ShapeDtypeStruct((x.shape[0] // parts, *x.shape[1:]), x.dtype)

        return tuple(jax.tree.map(shape, arg) if i + 1 in self.batch_argnums else arg for i, arg in enumerate(args))

    def check_loss(self, fn, params, args, state: State, *, coupled: str) -> list[str]:
        """For the loss and each leaf of aux what its micro-batches add up to. Raises if they would change the loss."""
        batch, rngs = ([i - 1 for i in some] for some in (self.batch_argnums, self.rng_argnums))
        parts = [MICRO_BATCH] * (self.accumulate > 1) + [DEVICE] * (self.mode == "step")
        with as_written():
            loss = Loss(fn, params, self.part(args), state, batch=batch, rngs=rngs,
                        weight=self.weight, parts=frozenset(parts))  # fmt: skip
            return loss.check(coupled=coupled)

    def __call__(self, fn: Callable[..., Any], params, args, state: State, ways: Sequence[str]):
        """(loss, aux, grads, carry of the state) on the whole batch; `ways` is from `check_loss`.

        `grads` is a list, with one gradient for each param that the optimizer trains.
        """
        reduced = self._reduced_once if self.mode == "step" else self._reduced_in_each
        parts = self.accumulate * (self.plan.batch_parts if self.mode == "step" else 1)
        return reduced(fn, params, args, state, Means(ways, parts))

    # --- one reduction after the loop -----------------------------------------------------------------------

    def _reduced_once(self, fn, params, args, state, means: Means):
        """(loss, aux, grads, carry), with one reduction after the loop: see [Note: one reduction or many]."""
        plan, axes = self.plan, batch_axes(self.plan)
        arrays, merged = zip(*map(split_arrays, args), strict=True)
        specs = tuple(
            [P(axes) if i + 1 in self.batch_argnums else P()] * len(xs) for i, xs in enumerate(arrays)
        )
        rows = [(x, self._reduced_to(x)) for x in plan.trained.layouts]

        def local(params, arrays, values):
            index = jax.lax.axis_index(axes)
            own = state.replaced(state.replaced(values).of_device(index))
            args = tuple(merge(xs) for merge, xs in zip(merged, arrays, strict=True))
            parts = self._micro_batches(args, local_index=index)
            total, loss, aux, sums, carry = self._loop(fn, params, *parts, own, means, pin=lambda x: x)
            total = sum_over_devices(total, plan)
            scaled = [means.of_loss(s, total) for s in sums]
            grads = [self._reduced(g, *row) for g, row in zip(scaled, rows, strict=True)]
            aux = means.of_aux(jax.tree.map(lambda x: sum_over_devices(x, plan), aux), total)
            return means.of_loss(sum_over_devices(loss, plan), total), aux, grads, carry

        run = jax.shard_map(
            local, mesh=typed_mesh(plan.array_mesh), in_specs=(P(), specs, P()),
            out_specs=(P(), P(), [of_batch(spec, plan) for _, spec in rows], P()), axis_names=set(axes),
            check_vma=False,
        )  # fmt: skip
        loss, aux, grads, carry = run(params, arrays, list(state.values))
        grads = [cut(g, x.shape, spec, plan) for g, (x, spec) in zip(grads, rows, strict=True)]
        return loss, aux, grads, carry

    def layout_of(self, x: Layout):
        """The layout of a returned gradient, which is part of its type under an Explicit mesh."""
        return {"step": self._reduced_to(x), "microbatch": self._summed(x), "plain": x.state}[self.mode]

    def _reduced_to(self, x: Layout):
        """`Layout.state`; or `Layout.used` if the state splits one dim over batch axes and other axes together."""
        return x.state if is_of_batch(x.state, self.plan) else x.used

    def _reduced(self, grad, x: Layout, spec):
        """One device's mean gradient, reduced to the layout `spec`; padded where its pieces would be unequal."""
        return comm_of(self.plan).gradients.of_devices(grad, x, spec)

    # --- a reduction in every micro-batch -------------------------------------------------------------------

    def _reduced_in_each(self, fn, params, args, state, means: Means):
        """(loss, aux, grads, carry), with a reduction in every micro-batch."""
        plan = self.plan

        def flat_loss(variables, *args):
            return fn(variables["params"], args, variables["jzero.state"])

        gathering = gather_on_use(flat_loss, plan)

        def gathered(params, args, values):
            return gathering({"params": params, "jzero.state": values}, *args)

        parts = self._micro_batches(args)

        def pin(grads):  # padded where the pieces of a gradient would be unequal
            rows = zip(grads, plan.trained.layouts, strict=True)
            return [pad(g, self._sum_shape(x), self._summed(x), plan) for g, x in rows]

        total, loss, aux, sums, carry = self._loop(gathered, params, *parts, state, means, pin=pin)
        if plan.config.params_on_host:
            grads = mapped(lambda total, s: means.of_loss(s, total), [sums], plan, scalars=[total], in_place=True)
        else:
            grads = pin([means.of_loss(s, total) for s in sums])  # or XLA gathers vectors here
            rows = zip(grads, plan.trained.layouts, strict=True)
            grads = [cut(g, x.shape, self._summed(x), plan) for g, x in rows]
        return means.of_loss(loss, total), means.of_aux(aux, total), grads, carry

    def _sum_shape(self, x: Layout) -> tuple[int, ...]:
        return x.state_shape if self.mode == "microbatch" and self._summed(x) != x.used else x.shape

    def _summed(self, x: Layout):
        """The layout in which gradients of micro-batches are summed: a shard at stage 1, too."""
        return x.grad if self.plan.config.row.grads else x.state

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
            with micro_batch_scope(k):
                return split_rows(x, k, self.plan.batch, n)

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

    def _loop(self, fn, params, stacked, complete, state, means: Means, *, pin):
        """Sums over micro-batches: of weights, and of loss, aux and gradients times their weight (fp32); the carry."""

        def one(sums, step):
            number, parts = step
            args = complete(parts, number)
            total, grad_sums, carry = sums
            run = trained_value_and_grad(fn, self.plan)
            (loss, (aux, values)), grads = run(params, args, state.with_carry(carry))
            carry = state.replaced(values).carry
            w = jnp.float32(1)
            if self.weight is not None:
                w = jnp.asarray(self.weight(*(args[i - 1] for i in self.batch_argnums)), jnp.float32)
            if self.plan.config.params_on_host:
                grad_sums = mapped(
                    lambda w, s, g: s + times(w, g, s.dtype), [grad_sums, grads], self.plan,
                    scalars=[w], in_place=True,
                )  # fmt: skip
            else:
                grads = pin([times(w, g, s.dtype) for g, s in zip(grads, grad_sums, strict=True)])
                grad_sums = pin([s + g for s, g in zip(grad_sums, grads, strict=True)])
            weighted = times(w, loss, jnp.promote_types(loss.dtype, jnp.float32)), means.weighted(aux, w)
            return (total + w, grad_sums, carry), weighted

        layouts = self.plan.trained.layouts
        dtypes = [jnp.promote_types(x.dtype, jnp.float32) for x in layouts]
        if self.plan.config.params_on_host:
            zeros = zeros_like_gradients(dtypes, self.plan)
        else:
            rows = zip(layouts, dtypes, strict=True)
            zeros = pin([jnp.zeros(self._sum_shape(x), dtype) for x, dtype in rows])
        start = (jnp.float32(0), zeros, state.carry)
        steps = (jnp.arange(self.accumulate), stacked)
        # `check` reads this name: a reduction in each micro-batch is a fault where it was not asked for
        with jax.named_scope("jzero.microbatch" if self.mode == "microbatch" else "jzero.accumulate"):
            (total, sums, carry), each = jax.lax.scan(one, start, steps)
        loss, aux = jax.tree.map(lambda x: x.sum(0), each)
        return total, loss, aux, sums, carry


def trained_value_and_grad(
    fn: Callable[..., Any], plan: Plan, value_and_grad: Callable[..., Any] = jax.value_and_grad
) -> Callable[..., Any]:
    """`value_and_grad(fn, has_aux=True)`; its gradients are a list, for the params that the optimizer trains."""

    def run(params, *args):
        leaves, tree = jax.tree.flatten(params)
        at = numbers(params, plan, where="jzero.value_and_grad")

        def of_own(own, *args):
            return fn(tree.unflatten(with_rest(own, at, lambda i: leaves[i])), *args)

        return value_and_grad(of_own, has_aux=True)(picked(leaves, at), *args)

    return run
