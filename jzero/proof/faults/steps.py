"""Faults of gradients and activations: wrong slices, a batch that is not split, reductions of too much or too often."""

from __future__ import annotations

from jzero.comm.reduce_scatter import SCOPE
from jzero.comm.weights import WeightGather
from jzero.core.errors import counted
from jzero.layout.specs import axis_size
from jzero.proof.evidence import REDUCES, Evidence
from jzero.proof.faults.wording import (
    ACROSS,
    MOST_NAMES,
    Faults,
    axes_text,
    elements,
    equation,
    is_tied,
    more_text,
    names_text,
)

SHARE_MOVED = 0.01
LEAST_MOVED = 16 * 2**10  # bytes: a percent of a small model is less than a few rows of a batch
SHARE_GRADS = 0.2
REPEATED = 1.75


def slices_wrong(e: Evidence) -> Faults:
    """Slices in loops that are not where their index points: see [Note: offsets of a slice] in `offsets.py`."""
    found, _ = e.slices
    if found:
        shown = "; ".join(
            f"%{x.name} of {x.array.dtype}[{','.join(map(str, x.array.dims))}]"
            f"{' on the host' if x.array.on_host else ''} begins at byte {x.needed[0]} and goes on by {x.needed[1]} an "
            f"iteration, XLA wrote {x.written[0]} and {x.written[1]}"
            for x in found[:MOST_NAMES]
        )
        yield (
            f"{counted(len(found), 'slice', 'slices')} in a loop will be taken from where the index does not point: "
            f"the values are wrong. {shown}{more_text(found)}.",
            sum(x.bytes * (x.trips or 1) for x in found),
            "jaxlib >= 0.11.2, which needs Python 3.12 (openxla/xla pull request 46231); or layers that are not in a "
            "scan, or no offload in it.",
        )


def gradients_zero(e: Evidence) -> Faults:
    """A step that trains and reads params under `jax.grad`, with no backward pass: its loss reads other params."""
    if not e.under_grad or not e.trains or e.module.has_backward or (e.record is not None and e.record.has_backward):
        return
    yield (
        f"{e.under_grad} of {len(e.plan.layouts)} params are read under jax.grad, and there is no backward pass: every "
        "gradient is zero, and the optimizer changes the params by weight decay and momentum alone.",
        e.plan.param_bytes,
        "let the loss read its own argument: in loss_fn(params), state.apply_fn({'params': params}, x) and not "
        "state.params; no jax.lax.stop_gradient around all of it.",
    )


def batch_not_split(e: Evidence) -> Faults:
    """An argument whose first dim is whole, and along some batch axis no gradient is ever reduced.

    XLA may choose to split another dim of an array that comes without a layout, and the model with it.
    """
    parts = e.plan.batch_parts
    if parts == 1 or not e.module.has_backward:
        return
    whole = [x for x in e.batch if x.local[0] * parts > x.shape[0] > 1]
    shard = elements(e) // axis_size(e.plan.mesh, e.plan.config.axes)  # what is reduced over a replica axis
    unreduced = [a for a in e.plan.batch_axes if e.plan.mesh.shape[a] > 1 and 2 * _reduced(e, a) < shard]
    if whole and unreduced:
        yield (
            f"no gradient is reduced over {axes_text(unreduced)}, and {len(whole)} of {len(e.batch)} batch "
            f"arrays are not split over batch axes {axes_text(e.plan.batch_axes)} ({parts} parts): every device "
            f"computes all examples, or a part of the model for all of them. {names_text(whole)}",
            sum(x.held for x in whole),
            "plan.place_batch(batch), or a batch of jax.ShapeDtypeStruct(shape, dtype, sharding=plan.batch).",
        )


def grads_all_reduced(e: Evidence) -> Faults:
    """Gradients that are whole on every device where a reduce-scatter was planned."""
    if e.split_stacks or not e.plan.config.row.grads or not elements(e):
        return
    sites = [
        s
        for s in e.over_zero_axes("all-reduce")
        if not (s.sliced or s.phase == "forward" or e.is_optimizers(s))
    ]
    sizes = {e.local(x, sliced=some) for x in e.plan.layouts for some in (False, True)}

    def values(s) -> int:  # of gradients: alone, or joined to one flat array; rows of a batch are reduced too
        return sum(n for n, dims in zip(s.sizes, s.dims, strict=True) if e.others or len(dims) < 2 or n in sizes)

    rows = [(s, values(s) * e.trips(s)) for s in sites]
    others = [x for x in e.plan.layouts if x not in e.split]
    allowed = sum(e.local(x) * (1 if x.vector else 2) for x in others) + 2 * e.others
    smallest = min(e.local(x, sliced=True) for x in e.split if x.frozen is None)
    total = sum(n for _, n in rows) - allowed
    if total > SHARE_GRADS * elements(e) and any(values(s) >= smallest for s, _ in rows):
        split = [x for x in e.plan.layouts if x.frozen is None and x.along_one_dim and not x.reason]
        yield (
            f"gradients are all-reduced over {axes_text(e.plan.config.axes)} where a reduce-scatter was planned: "
            f"{100 * total / elements(e):.0f} % of the values of {len(split)} split params, whole on every device "
            "and sent twice.",
            round(sum(s.bytes * e.trips(s) for s, n in rows if n)),
            "hand the gradients to tx.update as jax.grad gives them: no with_sharding_constraint, pmean or output of "
            "the whole gradient (return optax.global_norm(grads) instead).",
        )


def activations_moved(e: Evidence) -> Faults:
    """Activations on the wire over the ZeRO axes; under `jax.vmap` XLA gathers weights by all-to-all."""
    if e.split_stacks:
        return
    sites = list(e.over_zero_axes("all-to-all", "ragged-all-to-all", "collective-permute"))
    least = min(e.weight_sizes, default=0)  # a vector is a statistic: BatchNorm over the whole batch
    forward = [s for s in e.over_zero_axes(*REDUCES) if s.phase == "forward" and sum(s.sizes) >= least]
    mine = (WeightGather.SCOPE, SCOPE)
    sites = [s for s in sites if s.phase != "update" and f"jzero.{s.scope}" not in mine] + forward
    moved = round(sum(s.wire_bytes * e.trips(s) for s in sites))
    if moved > max(SHARE_MOVED * e.plan.param_bytes, LEAST_MOVED):
        ops, largest = sorted({s.op for s in sites}), max(sites, key=lambda s: s.wire_bytes * e.trips(s))
        yield (
            f"activations move between the devices of {axes_text(e.plan.config.axes)} ({', '.join(ops)}) where "
            f"{'weights should' if e.plan.config.row.params else 'nothing should'}; the bytes grow with the batch. At "
            f"{equation(largest)}.",
            moved,
            ("loss_fn = jzero.gather_on_use(loss_fn, plan), with " if e.plan.config.row.params else "")
            + "a batch from plan.place_batch(batch), and params as the plan stores them, with no constraint on them in "
            "the loss."
            + (f" {ACROSS}" if forward else ""),
        )


def reduction_per_microbatch(e: Evidence) -> Faults:
    """Gradients that are reduced once per micro-batch, without being asked for."""
    sites = (
        s for s in e.over_zero_axes(*REDUCES) if s.scope != "microbatch" and not e.is_optimizers(s)
    )  # asked for
    rows = [(s, e.gradients(s) * e.trips(s)) for s in sites]
    values, once = sum(n for _, n in rows), elements(e) + e.others
    tied = sum(e.local(x) for x in e.split if is_tied(e, x))
    least = values / max(once + tied, 1)  # a tied table that is reduced for each use: `more_than_closed_form`
    times = values / max(once, 1)
    asked = e.micro_batches if e.plan.config.row.grads else 1  # at stages 0 and 1 whole gradients can be summed
    if least >= REPEATED * asked and not e.split_stacks:
        sent = sum(s.wire_bytes * e.trips(s) for s, n in rows if n)
        yield (
            f"every gradient is reduced {times:.1f} times in a step, once per micro-batch or call of the model, where "
            "once after their sum would do.",
            round(sent * (1 - 1 / times)),
            (
                "jzero.value_and_grad(loss_fn, plan, accumulate=k), or a loop over plan.micro_batches(batch, k), where "
                "that is meant: stage 3 gathers and reduces in every micro-batch. Less is sent by fewer and larger "
                'ones, with jzero.remat for their activations, or by stage 2 with reduce="step".'
                if e.plan.config.row.params
                else 'jzero.value_and_grad(loss_fn, plan, accumulate=k, reduce="step"): local gradients are summed, '
                "and reduced once after the loop."
            )
            + " Where a loss calls the model on several batches: one call on all of them, "
            "jnp.stack([x, y], 1).reshape(-1, *x.shape[1:]), since jnp.concatenate moves rows between devices; where a "
            'call needs the result of another one: ignore=("reduction_per_microbatch",).',
        )


def _reduced(e: Evidence, axis: str) -> float:
    """Elements of gradients reduced along a mesh axis in a step."""
    zero = axis in e.plan.config.axes  # over a replica axis shards are reduced, of any size
    rows = [s for s, axes in e.sites if s.op in REDUCES and axis in axes and s.phase != "forward"]
    return sum((e.gradients(s) if zero else sum(s.sizes)) * e.trips(s) for s in rows)
