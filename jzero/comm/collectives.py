"""The collectives of a plan, and what a step sends in all."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from jzero.comm.gradients import GradientReduce
from jzero.comm.host import HostTransfer
from jzero.comm.updates import UpdateGather
from jzero.comm.uses import DEFAULT, Use
from jzero.comm.weights import WeightGather
from jzero.layout.specs import axis_of
from jzero.sharding import Plan


@dataclasses.dataclass(frozen=True)
class Comm:
    """Every collective of a plan.

    Attributes:
      weights: stored to used, where a weight is used.
      gradients: to the shards of the optimizer state.
      updates: new params from these shards to the stored layout.
      host: params and gradients between host and device memory.
    """

    weights: WeightGather
    gradients: GradientReduce
    updates: UpdateGather
    host: HostTransfer

    @property
    def plan(self) -> Plan:
        """The plan of all of them."""
        return self.weights.plan

    def wire_by_axes(
        self,
        *,
        accumulate: int = 1,
        uses: Mapping[str, Sequence[Use]] | None = None,
        in_each: bool = False,
        extra: Mapping[tuple[str, ...], float] | None = None,
    ) -> dict[str, int]:
        """Bytes that one device sends in a step, rings assumed, by axes ("data", "replica+data").

        Args:
          accumulate: micro-batches in a step.
          uses: by name of a param, what it is used for; each use is gathered and reduced by itself where that happens
            on use. A param that is not named has one matmul.
          in_each: gradients are reduced in each micro-batch at stages 0 and 1 too.
          extra: what else is sent, by axes.
        """
        total: dict[str, float] = {}

        def add(axes: Sequence[str], size: float) -> None:
            if size:
                own = {axis_of(a) for a in axes}
                name = "+".join(a for a, n in self.plan.mesh.shape.items() if a in own and n > 1)
                total[name] = total.get(name, 0.0) + size

        for x in self.plan.layouts:
            of = accumulate, (uses or {}).get(x.name, DEFAULT)
            sent = self.gradients.wire(x, *of, in_each=in_each), self.updates.wire(x), self.weights.wire(x, *of)
            for axes, size in itertools.chain(*sent):
                add(axes, size)
        for axes, size in (extra or {}).items():
            add(axes, size)
        return {axes: round(size) for axes, size in total.items()}


def comm_of(plan: Plan) -> Comm:
    """The collectives of a plan."""
    return Comm(WeightGather(plan), GradientReduce(plan), UpdateGather(plan), HostTransfer(plan))
