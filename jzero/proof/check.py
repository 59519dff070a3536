"""`check`: did the stage engage? Every way in which a compiled step does not do what its plan says."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence

import jax

from jzero.comm.uses import Use
from jzero.core.compile_only import trace_again
from jzero.core.errors import human_bytes
from jzero.proof.arguments import argument_shardings
from jzero.proof.evidence import Evidence
from jzero.proof.faults import faults
from jzero.proof.hlo import parse
from jzero.proof.memory import checked_uses
from jzero.proof.models import check_plan_fits
from jzero.proof.report import text_of
from jzero.sharding import Plan, check_plan


@dataclasses.dataclass(frozen=True)
class Finding:
    """One way in which a stage did not engage.

    Attributes:
      kind: a stable short name, one of `faults.KINDS`.
      text: what was found, with the leaves it concerns.
      bytes: per device: what is held, or sent in a step, without need.
      remedy: the argument or call that mends it.
    """

    kind: str
    text: str
    bytes: int
    remedy: str

    def __str__(self) -> str:
        return f"{self.kind} ({human_bytes(self.bytes)}): {self.text}\n    Remedy: {self.remedy}"


class CheckError(Exception):
    """A compiled step that does not do what its plan says; `findings` holds what is wrong."""

    def __init__(self, found: tuple[Finding, ...], plan: Plan):
        self.findings = found
        lines = "\n".join(f"  {number}. {f}" for number, f in enumerate(found, 1))
        count = f"{len(found)} finding{'s' if len(found) > 1 else ''}"
        super().__init__(
            f"jzero.check: {count}; stage {plan.config.stage} ({plan.config.row.text}) did not engage:\n{lines}"
        )


def check(
    compiled: jax.stages.Compiled, plan: Plan, *, uses: Mapping[str, Sequence[Use]] | None = None
) -> None:
    """Raises unless a compiled step does what its plan says.

    Args:
      compiled: what `pod.compile(step, ...)` or `jax.jit(step).lower(...).compile()` returns.
      plan: the plan of the state that the step was compiled for, `jzero.plan_of(state)`.
      uses: as in `findings`.

    Raises:
      CheckError: lists every finding with its bytes and its remedy; they are in `.findings`.
      TypeError: `compiled` has no text of a compiled program, `plan` is no plan, or `uses` no mapping.
      ValueError: `uses` of a param that is not in the plan; a plan of other params than the program's, or of another
        number of devices.

    Cost:
      As `explain`, and one trace of the step for a program of `pod.compile`.
    """
    found = findings(compiled, plan, uses=uses)
    if found:
        raise CheckError(found, plan)


def findings(
    compiled: jax.stages.Compiled, plan: Plan, *, uses: Mapping[str, Sequence[Use]] | None = None
) -> tuple[Finding, ...]:
    """Every way in which a compiled step does not do what its plan says; empty where it does.

    In a program of the CPU backend `loop_slices_wrong`, `gradients_all_reduced`, `gathered_weights_kept`,
    `activations_moved`, `offloaded_state_copied`, `offloaded_state_on_device`, `fetched_weights_on_device`,
    `host_transfers_waited_for` and `more_than_closed_form` are not looked for, since
    its collectives and its memory are not those of a GPU: compile for `jzero.pod`.

    Args:
      compiled: a compiled train step: state in, new state out.
      plan: the plan of that state.
      uses: what the step does with its params, `jzero.uses_of(step, state, batch)`: without it `more_than_closed_form`
        is not looked for. None: for a program of `pod.compile`, the step is traced once more to read it; for others
        not known.

    Returns:
      A `Finding` for each fault, in the order of `faults.KINDS`: wrong values first, then what wastes most.

    Raises:
      TypeError: `compiled` has no text of a compiled program, `plan` is no plan, or `uses` no mapping.
      ValueError: `uses` of a param that is not in the plan; a plan of other params than the program's, or of another
        number of devices.

    Example:
      >>> import jax, jax.numpy as jnp, jzero
      >>> plan = jzero.make_plan({"w": jnp.ones((64, 64))}, stage=0)
      >>> findings(jax.jit(lambda x: x * 2).lower(jnp.ones(8)).compile(), plan)
      ()
    """
    check_plan(plan, where="jzero.check")
    compiled = getattr(compiled, "compiled", compiled)  # flax.nnx wraps it
    module = parse(text_of(compiled))
    check_plan_fits(
        argument_shardings(compiled), plan, devices=module.partitions, trains=module.has_backward, where="jzero.check"
    )
    if uses is not None:
        uses = checked_uses(uses, plan, where="jzero.check")
    else:
        with contextlib.suppress(Exception):  # a step that cannot be traced again, outside of its contexts
            uses = trace_again(compiled)
    evidence = Evidence(compiled, plan, module, uses)
    return tuple(Finding(kind, *row) for kind, rows in faults(evidence).items() for row in rows)
