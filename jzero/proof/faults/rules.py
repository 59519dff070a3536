"""The rules of `check`: one for each kind of fault, from the traces that it leaves in a compiled step.

[Note: what is a fault]
A rule looks for the trace that a fault leaves in the program, measures it in bytes, and stays silent below
a threshold: a false alarm costs more than a small leak. Vectors (biases, norm scales) and leaves that stay
whole are all-reduced by design, and an embedding that is used twice is reduced twice.

[Note: the CPU backend]
It makes an all-reduce of what a GPU reduce-scatters, its choice of collectives is its own, and it has no host
memory apart. So the kinds of `GPU_ALONE` are not looked for in its programs: compile for `jzero.pod`. The other kinds
show on both.
"""

from __future__ import annotations

from collections.abc import Callable

from jzero.proof.evidence import Evidence
from jzero.proof.faults import closed_form, frozen, held, host, micro_batches, state, steps, updates, weights
from jzero.proof.faults.wording import Faults


def batch_not_split(e: Evidence) -> Faults:
    """A batch that is whole on every device, or micro-batches of it that lie on some of them alone."""
    yield from steps.batch_not_split(e)
    yield from micro_batches.cut_across_devices(e)


def replicated_leaves(e: Evidence) -> Faults:
    """Params that the plan leaves whole, and weights that are no params and lie whole on every device."""
    yield from weights.whole_leaves(e)
    yield from frozen.frozen_whole(e)


KINDS: dict[str, Callable[[Evidence], Faults]] = {
    "loop_slices_wrong": steps.slices_wrong,
    "state_not_returned": updates.state_not_returned,
    "gradients_zero": steps.gradients_zero,
    "batch_not_split": batch_not_split,
    "gather_on_use_not_traced": weights.gather_on_use,
    "gradients_all_reduced": steps.grads_all_reduced,
    "state_whole": state.state_whole,
    "state_not_donated": state.state_not_donated,
    "state_not_offloaded": state.state_not_offloaded,
    "offloaded_state_copied": state.offloaded_copied,
    "offloaded_state_on_device": state.offloaded_on_device,
    "fetched_weights_on_device": host.weights_on_device,
    "host_transfers_waited_for": host.transfers_waited_for,
    "replicated_leaves": replicated_leaves,
    "stack_gathered_before_loop": weights.stack_before_loop,
    "gathered_weights_kept": weights.weights_kept,
    "activations_moved": steps.activations_moved,
    "weights_moved_in_loop": weights.weights_in_loop,
    "optimizer_moves": state.optimizer_moves,
    "reduction_per_microbatch": steps.reduction_per_microbatch,
    "more_memory_than_closed_form": held.more_memory_than_closed_form,
    "more_than_closed_form": closed_form.more_than_closed_form,
}

GPU_ALONE = (
    "loop_slices_wrong", "gradients_all_reduced", "gathered_weights_kept", "activations_moved",
    "weights_moved_in_loop", "optimizer_moves", "offloaded_state_on_device", "offloaded_state_copied",
    "fetched_weights_on_device", "host_transfers_waited_for", "more_than_closed_form",
)  # fmt: skip
"""See [Note: the CPU backend]."""

CONSEQUENCES = {
    "gradients_zero": ("state_not_returned",),  # XLA drops the backward pass
    "gathered_weights_kept": ("stack_gathered_before_loop",),
    "weights_moved_in_loop": ("gather_on_use_not_traced", "batch_not_split"),  # XLA chooses what to move
    "activations_moved": ("batch_not_split",),
    "gradients_all_reduced": ("state_not_returned", "weights_moved_in_loop", "batch_not_split"),
    "reduction_per_microbatch": ("weights_moved_in_loop", "batch_not_split"),
    "more_than_closed_form": ("state_not_returned", "batch_not_split",),
}
"""Kinds that are not reported where another one is, which they follow from."""

EXPLAINS = frozenset(
    (
        "batch_not_split", "gather_on_use_not_traced", "gradients_all_reduced", "stack_gathered_before_loop",
        "activations_moved", "weights_moved_in_loop", "reduction_per_microbatch", "optimizer_moves",
    )
)  # fmt: skip
"""Kinds whose bytes are on the wire: where they account for half of `more_than_closed_form`, it is not reported."""


def faults(e: Evidence) -> dict[str, list[tuple[str, int, str]]]:
    """What each rule finds, by kind, without what follows from something else that is found."""
    found = {kind: list(rule(e)) for kind, rule in KINDS.items()}

    def is_reported(kind: str) -> bool:
        return bool(found[kind]) and not any(map(is_reported, CONSEQUENCES.get(kind, ())))

    reported = {kind: rows for kind, rows in found.items() if is_reported(kind)}
    more = sum(size for _, size, _ in reported.get("more_than_closed_form", ()))
    known = sum(size for kind in EXPLAINS & reported.keys() for _, size, _ in reported[kind])
    if more - known <= more / 2:  # the rules measure an excess in different ways
        reported.pop("more_than_closed_form", None)
    return reported
