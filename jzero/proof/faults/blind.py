"""What could not be read or looked for, and why: `not_checked`.

[Note: names that are not recognized]
Phases, scopes and loops are read from the name stacks that jax writes into the program. If a version of jax named them
otherwise, rules would fall silent. So what the trace says is compared with what was recognized: a backward pass, an
update, and for every collective of more than negligible size a phase and its loops. A trace has the same names, so a
derivative is traced, and looked at, once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from jzero.core.errors import counted, human_bytes
from jzero.proof.collectives import Site
from jzero.proof.evidence import Evidence
from jzero.proof.faults.frozen import rows_or_weights
from jzero.proof.faults.held import has_unknown_dtypes, planned_leaves
from jzero.proof.faults.wording import MOST_NAMES, Faults, more_text, names_text
from jzero.proof.record import names_are_known
from jzero.proof.unread import endless, unknown_calls
from jzero.proof.unrolled import UPDATE

NOT_CHECKED = "not_checked"
SHARE_UNNAMED = 0.05  # of one Psi
EXPLAINED = "not_trained"  # XLA has dropped the backward pass, or the update
DRAWN_BY_REJECTION = ("_gamma", "_poisson", "_binomial")
"""Functions of jax.random that draw again until every number is accepted; beta, dirichlet and t call the first."""
REPORT = "report it to jzero with the version of jax; "


def not_checked(e: Evidence, ignore: Collection[str], found: Collection[str]) -> Faults:
    """One finding for each cause; `found`: the kinds that were found."""
    for text in e.unread:
        yield (
            text,
            0,
            REPORT + 'ignore=("not_checked",) leaves it out, and no figure of this program is proven.',
        )
    for target, count in unknown_calls(e.module).items():
        if target not in ignore:
            yield (
                f"{counted(count, 'custom call')} of {target!r}: whether it communicates is not in the program's text.",
                0,
                f"if it does not: ignore=({target!r},).",
            )
    yield from _endless(e)
    if has_unknown_dtypes(e) and not e.on_cpu and EXPLAINED not in found:
        yield (
            "whether the optimizer state is held in the dtypes of the plan was not looked for: jzero did not trace an "
            "update of these params, and no argument holds their optimizer (tx).",
            0,
            "pod.compile(step, ...), or jzero.jit(step, plan).lower(...).compile(), of a step that updates by "
            "jzero.zero(tx, plan); or a look at jzero.explain(compiled, plan).memory.opt_state.",
        )
    if rows := rows_or_weights(e):
        yield (
            f"{counted(len(rows), 'whole array has', 'whole arrays have')} as many rows as the batch, and "
            f"{'is' if len(rows) == 1 else 'are'} frozen weights or a part of it: {names_text(rows)}",
            sum(x.held for x in rows),
            "a part of the batch: plan.place_batch(batch), or in one argument with what is split. Frozen weights: "
            "among the params, state = jzero.shard(state, ..., trainable=lambda path, leaf: 'lora' in path).",
        )
    if e.trains and (why := planned_leaves(e)[1]):
        yield (
            f"whether the optimizer state is held as planned was not looked for: its init cannot be traced ({why}).",
            0,
            "an init that takes params alone; or a look at jzero.explain(compiled, plan).memory.opt_state.",
        )
    if e.makes_state:
        yield (
            f"none of the {counted(len(e.plan.layouts), 'param')} of the update is known to be an argument: the "
            "program makes its state itself, and what is held and returned of it was not looked for.",
            0,
            "jzero.shard before jax.jit, and the state as an argument of the run.",
        )
    for text in (*slices_unread(e), *_names(e, found)):
        yield text, 0, REPORT + "meanwhile a version that docs/compatibility.md lists."
    if e.uses is None and (e.trace_failed or not e.on_cpu):
        yield (
            f"more_than_closed_form, and gradients that are zero (not_trained), were not looked for: {e.uses_unknown}.",
            0,
            "uses=jzero.param_uses(step, state, batch), in the contexts that the step wants; or compile with "
            "pod.compile(step, ...) or jzero.jit(step, plan).lower(...).compile().",
        )


def _endless(e: Evidence) -> Faults:
    sites = endless(s for s, _ in e.sites)
    drawn = [s for s in sites if any(f"jit({name})" in s.stack for name in DRAWN_BY_REJECTION)]
    for found in (drawn, [s for s in sites if s not in drawn]):
        if found is drawn:
            loop = "that ends when all devices have drawn their random numbers"
            remedy = (
                "jax.lax.with_sharding_constraint(numbers, plan.sharding(jax.P())): each device draws all of them, "
                "and none waits for another."
            )
        else:
            loop = "whose trip count XLA does not know"
            remedy = (
                "jax.lax.scan or jax.lax.fori_loop with a length that is known when the step is traced; or no "
                "collective in that loop."
            )
        if found:
            listed = ", ".join(f"%{s.name} ({s.op}, {human_bytes(s.wire_bytes)})" for s in found[:MOST_NAMES])
            yield (
                f"{counted(len(found), 'collective')} in a loop {loop}, counted once: {listed}{more_text(found)}.",
                sum(s.wire_bytes for s in found),
                remedy,
            )


def slices_unread(e: Evidence) -> Iterator[str]:
    """See [Note: offsets of a slice] in `offsets.py`."""
    _, unread = e.slices
    if unread:
        yield (
            f"{counted(len(unread), 'slice')} of host memory in a loop with an index that jzero cannot compute: "
            "whether XLA copies what it points to is not known. "
            f"{', '.join(f'%{x}' for x in unread[:MOST_NAMES])}{more_text(unread)}."
        )


def _names(e: Evidence, found: Collection[str]) -> Iterator[str]:
    """See [Note: names that are not recognized]."""
    if not names_are_known():
        yield (
            "this jax names the derivative otherwise than jzero reads: forward and backward pass cannot be told apart."
        )
    if e.record is not None and EXPLAINED not in found:
        if e.record.has_backward and e.record.of(e.plan) and not e.module.has_backward:
            yield "the step has a backward pass, and none was recognized in the names of the compiled program."
        inside = not e.plan.config.updates_outside and e.record.of(e.plan)
        if inside and not any(e.module.lines(UPDATE)):
            yield "the step has an update, and none was recognized in the names of the compiled program."
    missing = len(e.plan.layouts) - sum(x.is_param for x in e.leaves)
    if e.record is not None and e.record.of(e.plan) and missing and not e.makes_state:
        yield (
            f"{missing} of {len(e.plan.layouts)} params of the update do not come in as arguments, and "
            "neither names nor shapes say which: what is held and returned is not known of them."
        )
    if not e.on_cpu:
        yield from _unnamed(e, [s for s, _ in e.sites if not s.phase], "a name that tells forward, backward or update")
        loops = [s for s, _ in e.sites if e.loop_names(s) is None]
        yield from _unnamed(e, loops, "a name that tells which loop is in the loss, and which is over micro-batches")
        pairs = [s for s, _ in e.sites if s.asynchronous is None]
        yield from _unnamed(e, pairs, "a mark that tells whether the program waits for them (is_sync)", share=0)


def _unnamed(e: Evidence, sites: Sequence[Site], what: str, share: float = SHARE_UNNAMED) -> Iterator[str]:
    size = sum(s.wire_bytes * e.trips(s) for s in sites)
    if size > share * e.plan.param_bytes:
        yield (
            f"{counted(len(sites), 'collective')} of {human_bytes(round(size))} in a step without {what}: "
            f"{', '.join(f'%{s.name}' for s in sites[:MOST_NAMES])}{more_text(sites)}."
        )
