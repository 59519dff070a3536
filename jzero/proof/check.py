"""`check`: did the stage engage? Every way in which a compiled step does not do what its plan says."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import jax

from jzero.comm.uses import Use
from jzero.core.errors import check_names, counted, human_bytes
from jzero.core.traces import innermost, trace_of
from jzero.proof.arguments import arguments_given
from jzero.proof.evidence import Evidence
from jzero.proof.faults import KINDS, faults
from jzero.proof.faults.blind import NOT_CHECKED, not_checked
from jzero.proof.faults.closed_form import less_than_closed_form
from jzero.proof.faults.rules import not_looked_for
from jzero.proof.hlo import parse
from jzero.proof.memory import checked_uses
from jzero.proof.models import check_plan_fits
from jzero.proof.report import text_of
from jzero.proof.uses import uses_again
from jzero.sharding import Plan, check_plan


@dataclasses.dataclass(frozen=True)
class Finding:
    """One way in which a stage did not engage.

    Attributes:
      kind: a stable short name, one of `faults.KINDS`, or `not_checked`.
      text: what was found and its cause, with the leaves it concerns.
      bytes: per device: what is held, or sent in a step, without need.
      remedy: the argument or call that mends it.
    """

    kind: str
    text: str
    bytes: int
    remedy: str

    def __str__(self) -> str:
        return f"{self.kind} ({human_bytes(self.bytes)}): {self.text}\n    Remedy: {self.remedy}"


class Findings(tuple[Finding, ...]):
    """What `findings` returns: a tuple of `Finding`, which prints what was looked for.

    Attributes:
      looked_for: the kinds that were looked for.
      left_out: the other kinds, and why each was not.
      in_part: kinds that were looked for only in part, and what of each was not looked for.
      notes: not faults, but worth a look: less is sent than `estimate` says.
    """

    looked_for: tuple[str, ...]
    left_out: Mapping[str, str]
    in_part: Mapping[str, str]
    notes: tuple[str, ...]

    def __new__(
        cls,
        found: Iterable[Finding],
        left_out: Mapping[str, str],
        in_part: Mapping[str, str],
        notes: Iterable[str],
    ):
        """See `findings`."""
        self = super().__new__(cls, found)
        self.looked_for = tuple(kind for kind in KINDS if kind not in left_out)
        self.left_out, self.in_part, self.notes = dict(left_out), dict(in_part), tuple(notes)
        return self

    def __getnewargs__(self):
        return tuple(self), self.left_out, self.in_part, self.notes

    def __repr__(self):
        lines = [f"{counted(len(self), 'finding')}, of {len(self.looked_for)} kinds looked for"]
        lines += [f"  {number}. {f}" for number, f in enumerate(self, 1)]
        lines += [f"  note: {note}" for note in self.notes]
        for why in dict.fromkeys(self.left_out.values()):
            kinds = ", ".join(kind for kind, other in self.left_out.items() if other == why)
            lines.append(f"  not looked for, {why}: {kinds}")
        lines += [f"  {kind} was looked for in part, {why}" for kind, why in self.in_part.items()]
        return "\n".join(lines)


class CheckError(Exception):
    """A compiled step that does not do what its plan says; `findings` holds what is wrong."""

    def __init__(self, found: tuple[Finding, ...], plan: Plan):
        self.findings = found
        lines = "\n".join(f"  {number}. {f}" for number, f in enumerate(found, 1))
        super().__init__(
            f"jzero.check: {counted(len(found), 'finding')}; stage {plan.config.stage} ({plan.config.row.text}) "
            f"{'is not proven' if all(f.kind == NOT_CHECKED for f in found) else 'did not engage'}:\n{lines}"
        )

    def __reduce__(self):  # without the plan: that of a pod cannot be pickled
        return _with_text, (self.findings, str(self))


def _with_text(found: tuple[Finding, ...], text: str) -> CheckError:
    error = CheckError.__new__(CheckError, text)
    error.findings = found
    return error


def check(
    compiled: jax.stages.Compiled,
    plan: Plan,
    *,
    uses: Mapping[str, Sequence[Use]] | None = None,
    ignore: Sequence[str] = (),
) -> None:
    """Raises unless a compiled step does what its plan says.

    Args:
      compiled: what `pod.compile(step, ...)` or `jzero.jit(step).lower(...).compile()` returns; in
        other programs params are recognized only by their names and shapes.
      plan: the plan of the state that the step was compiled for, `jzero.plan_of(state)`.
      uses, ignore: as in `findings`.

    Raises:
      CheckError: lists every finding with its bytes and its remedy; they are in `.findings`.
      TypeError, ValueError: as `findings`.

    Cost:
      As `explain`, and one more trace of a step that jzero has traced before.
    """
    found = findings(compiled, plan, uses=uses, ignore=ignore)
    if found:
        raise CheckError(found, plan)


def findings(
    compiled: jax.stages.Compiled,
    plan: Plan,
    *,
    uses: Mapping[str, Sequence[Use]] | None = None,
    ignore: Sequence[str] = (),
) -> Findings:
    """Every way in which a compiled step does not do what its plan says; empty where it does.

    What could not be looked for, or read, is a finding too: `not_checked`. In a program of the CPU backend some kinds
    are not looked for, since its collectives and its memory are not those of a GPU; `left_out` of the result, and its
    text, name them. Compile for `jzero.pod`.

    Args:
      compiled: a compiled train step: state in, new state out.
      plan: the plan of that state.
      uses: what the step does with its params, `jzero.param_uses(step, state, batch)`. None: the step of a program of
        `pod.compile` or `jzero.jit(step).lower(...)` is traced once more to read them. For other programs they are not
        known; `more_than_closed_form` and gradients that are zero (`not_trained`) are then not looked for.
      ignore: kinds to leave out, and targets of custom calls that you know not to communicate, such as your own
        kernels.

    Returns:
      A `Finding` for each fault, in the order of `faults.KINDS`: wrong values first, then what wastes most, then what
      was not checked.

    Raises:
      TypeError: `compiled` has no text of a compiled program, `plan` is not a plan, `uses` is not a mapping, or
        `ignore` is not a sequence of names.
      ValueError: `uses` of a param that is not in the plan; a plan of other params than the program's, or of another
        number of devices; a program without any of the plan's params.

    Example:
      >>> import jax, jax.numpy as jnp, jzero
      >>> plan = jzero.make_plan({"w": jnp.ones((64, 64))}, stage=0)
      >>> step = jax.jit(lambda params, x: (x @ params["w"]).sum())
      >>> tuple(findings(step.lower(plan.shapes, jnp.ones((8, 64))).compile(), plan))
      ()
    """
    check_plan(plan, where="jzero.check")
    ignore = check_names(ignore, "ignore", where="jzero.check")
    compiled = innermost(compiled, jax.stages.Compiled)
    module = parse(text_of(compiled))
    given = arguments_given(compiled, tokens=module.tokens)
    check_plan_fits(compiled, given, plan, devices=module.partitions, trains=module.has_backward, where="jzero.check")
    evidence = Evidence(compiled, plan, module, *_uses(compiled, plan, uses))
    found = faults(evidence)
    rows = [Finding(kind, *row) for kind, rows in found.items() if kind not in ignore for row in rows]
    if NOT_CHECKED not in ignore:
        rows += [Finding(NOT_CHECKED, *row) for row in not_checked(evidence, ignore, found)]
    left_out, in_part = not_looked_for(evidence)
    left_out |= dict.fromkeys((kind for kind in ignore if kind in KINDS), "by ignore=")
    in_part = {kind: why for kind, why in in_part.items() if kind not in left_out}
    notes = () if "weights_not_gathered_on_use" in found else less_than_closed_form(evidence)
    return Findings(rows, left_out, in_part, notes)


def _uses(
    compiled: jax.stages.Compiled, plan: Plan, uses: Mapping[str, Sequence[Use]] | None
) -> tuple[Mapping[str, Sequence[Use]] | None, str]:
    """What the step does with its params, or None and why that is not known."""
    if uses is not None:
        return checked_uses(uses, plan, where="jzero.check"), ""
    trace = trace_of(compiled)
    if trace is None:
        return None, "jzero did not trace this program, and uses= was not passed"
    try:
        return uses_again(trace, plan)[0], ""
    except Exception as error:  # of the user's step, outside of its contexts: reported, not raised
        why = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
        return None, f"the step could not be traced again ({why})"
