"""The rules of `check`: what each looks for in a compiled step, and under which kind it is reported.

[Note: what is a fault]
A rule looks for the trace that a cause leaves in the program, measures it in bytes, and stays silent below
a threshold, since a false alarm costs more than a small leak. Vectors (biases, norm scales) and leaves that stay
whole are all-reduced by design, and an embedding that is used twice is reduced twice. A kind says what is
wrong; each of its rules finds one cause, with the remedy for it.

[Note: the CPU backend]
It all-reduces what a GPU reduce-scatters, chooses other collectives, and has no separate host memory. So rules with
`on_gpus` do not look at its programs: compile for `jzero.pod`. The others see both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jzero.proof.evidence import Evidence
from jzero.proof.faults import closed_form, frozen, held, host, micro_batches, state, steps, updates, weights
from jzero.proof.faults.wording import Faults

Find = Callable[[Evidence], Faults]


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule of `check`.

    Attributes:
      kind: what it is reported as.
      find: yields its faults.
      on_gpus: in words, what it finds only in programs for GPUs; empty if it looks at programs of the CPU too.
      unless: rules whose finding explains its own, which is then not reported.
      wire: True where its bytes are on the wire, and explain `more_than_closed_form`.
    """

    kind: str
    find: Find
    on_gpus: str = ""
    unless: tuple[Find, ...] = ()
    wire: bool = False


WRONG_BATCH = (steps.batch_not_split, micro_batches.cut_across_devices)
LOST = (updates.state_not_returned,)  # XLA drops the backward pass, too

RULES = (
    Rule("loop_slices_wrong", steps.slices_wrong, "slices in loops"),
    Rule("not_trained", updates.state_not_returned),
    Rule("not_trained", steps.gradients_zero, unless=LOST),
    *(Rule("batch_not_split", find, wire=True) for find in WRONG_BATCH),
    Rule("weights_not_gathered_on_use", weights.gather_on_use, wire=True),
    Rule("weights_not_gathered_on_use", weights.stack_before_loop, wire=True),
    Rule("weights_not_gathered_on_use", weights.weights_saved, "weights that stay gathered",
         (weights.stack_before_loop,)),
    Rule("weights_not_gathered_on_use", weights.weights_in_loop, "weights that every iteration of a loop gathers",
         (weights.gather_on_use, *WRONG_BATCH), wire=True),
    Rule("gradients_all_reduced", steps.grads_all_reduced, "all-reduces of gradients",
         (*LOST, *WRONG_BATCH, weights.stack_before_loop, weights.weights_in_loop), wire=True),
    Rule("reduction_per_microbatch", steps.reduction_per_microbatch,
         unless=(*WRONG_BATCH, weights.weights_in_loop), wire=True),
    Rule("state_too_large", state.state_whole, unless=LOST),  # without an update params are known by shapes alone
    Rule("state_too_large", weights.whole_leaves),
    Rule("state_too_large", frozen.frozen_whole),
    Rule("state_too_large", held.more_memory_than_closed_form),
    Rule("state_not_donated", state.state_not_donated),
    Rule("state_not_donated", state.offloaded_copied, "state in host memory that is copied"),
    Rule("state_not_offloaded", state.state_not_offloaded),
    Rule("state_not_offloaded", state.offloaded_on_device, "state fetched too early"),
    Rule("state_not_offloaded", host.weights_on_device, "weights fetched too early"),
    Rule("host_transfers_waited_for", host.transfers_waited_for, "copies to and from host memory"),
    Rule("activations_moved", steps.activations_moved, "activations on the wire", WRONG_BATCH, wire=True),
    Rule("optimizer_moves", state.optimizer_moves, "the optimizer's arithmetic on the wire", wire=True),
    Rule("more_than_closed_form", closed_form.more_than_closed_form, "all bytes sent",
         (*LOST, *WRONG_BATCH)),
)  # fmt: skip
"""In the order of the report: wrong values first, then what wastes most."""

KINDS = tuple(dict.fromkeys(rule.kind for rule in RULES))


def faults(e: Evidence) -> dict[str, list[tuple[str, int, str]]]:
    """What the rules find, by kind, without what follows from another finding."""
    found: dict[Find, list[tuple[str, int, str]]] = {}
    on_wire = 0
    for rule in RULES:
        silent = (rule.on_gpus and e.on_cpu) or any(found[find] for find in rule.unless)
        rows = [] if silent else list(rule.find(e))
        if rule.find is closed_form.more_than_closed_form:  # the rules measure an excess in different ways
            rows = [row for row in rows if on_wire < row[1] / 2]
        found[rule.find] = rows
        on_wire += sum(size for _, size, _ in rows) if rule.wire else 0
    return {kind: rows for kind in KINDS if (rows := [row for r in RULES if r.kind == kind for row in found[r.find]])}


def not_looked_for(e: Evidence) -> tuple[dict[str, str], dict[str, str]]:
    """Kinds that were not looked for in this program, and those that were in part; each with the reason."""
    left_out, in_part = _on_gpus_alone() if e.on_cpu else ({}, {})
    if e.uses is None:
        without = "without the uses of the params"
        left_out.setdefault("more_than_closed_form", without)
        in_part["not_trained"] = f"{without}: not whether its loss reads other params than it trains"
    elif not e.on_cpu and (why := closed_form.incomparable(e)):
        left_out["more_than_closed_form"] = why
    if e.on_cpu and held.has_unknown_dtypes(e):
        in_part["state_too_large"] = "without a traced update or a tx: not the dtypes of the optimizer state"
    beside = "beside the params of another model"
    if e.others:
        in_part["state_too_large"] = f"{beside}: not each leaf by the plan's closed form"
    if updates.unknown_beside_others(e):
        more = f"{beside}: not whether all params come back as they went in"
        in_part["not_trained"] = f"{in_part['not_trained']}; {more}" if "not_trained" in in_part else more
    return left_out, in_part


def _on_gpus_alone() -> tuple[dict[str, str], dict[str, str]]:
    """Kinds that programs of the CPU backend do not show, and those that they show in part; each with the reason."""
    left_out, in_part, where = {}, {}, "in a program of the CPU backend"
    for kind in KINDS:
        rules = [rule for rule in RULES if rule.kind == kind]
        left = " and ".join(rule.on_gpus for rule in rules if rule.on_gpus)
        if all(rule.on_gpus for rule in rules):
            left_out[kind] = where
        elif left:
            in_part[kind] = f"{where}: not {left}"
    return left_out, in_part
