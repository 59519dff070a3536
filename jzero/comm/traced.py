"""Records which updates and gathers have been traced: a program that lacks them runs without an error.

A step that does not return its state has no update in its program, since XLA drops it. A loss at stage 3 that gathers
nothing gives the right numbers: XLA then gathers as it likes.
"""

from __future__ import annotations

from weakref import WeakSet

from jzero.core.errors import warn
from jzero.core.traces import is_as_written
from jzero.sharding import Plan

_expected: WeakSet[Plan] = WeakSet()
_traced: WeakSet[Plan] = WeakSet()


def expect_gathers(plan: Plan) -> None:
    """A state has been sharded by this plan: a gather must be traced before an update is."""
    if plan.config.row.params and plan.n > 1 and any(x.stored != x.used for x in plan.layouts):
        _expected.add(plan)


def gather_traced(plan: Plan) -> None:
    """A weight of this plan has been gathered where it is used."""
    _traced.add(plan)


def update_traced(plan: Plan) -> None:
    """An update by this plan is traced; warns once if no gather was traced before it, and gathers are traced at all."""
    if not is_as_written() and plan in _expected and plan not in _traced:
        _expected.discard(plan)
        warn(
            "jzero: at stage 3 the update of this state was traced, but no weight was gathered where it is used. XLA "
            "then gathers the weights by itself, often all at once, so that every device holds all of them. In the "
            "loss, call state.apply_fn in place of model.apply, or wrap the loss (of an NNX model as well): "
            "loss_fn = jzero.gather_on_use(loss_fn, plan). If the loss has a plan already, it is that of another "
            "state: take jzero.plan_of(state), of an NNX pair jzero.plan_of(optimizer), in the step.",
        )
