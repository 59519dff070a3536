"""How long a step takes, in closed form: one formula for all options. It is a model: no GPU has timed it.

    math    = FLOPs / (rate x the part that is reached), and at least the reading of all weights in each pass
    wire    = the collectives at full links (`Estimate.wire_seconds`)
    update  = a device's share of params, gradients and optimizer state, read and written once
    pcie    = what goes to the host and back, the longer of the two directions, beside nothing
    total   = max(math, wire) + (1 - hidden) x min(math, wire) + update + pcie
"""

from __future__ import annotations

import dataclasses

from jzero.proof.fitting.rates import Rates
from jzero.proof.memory import Estimate

PASSES = {False: 2, True: 3}
"""How often a micro-batch reads the weights: forward, backward, and forward again under remat."""


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Of one step."""

    math: float
    wire: float
    update: float
    pcie: float
    hidden: float

    @property
    def total(self) -> float:
        """See above."""
        longer, shorter = max(self.math, self.wire), min(self.math, self.wire)
        return longer + (1 - self.hidden) * shorter + self.update + self.pcie


def seconds(e: Estimate, rates: Rates, *, flops: float, accumulate: int, remat: bool, share: float) -> Seconds:
    """The time of a step.

    Args:
      e: of the option, without lower precision.
      rates: of the pod.
      flops: of one device in a step.
      accumulate: micro-batches.
      remat: the forward pass runs twice.
      share: the part of params and gradients that a device updates.
    """
    reads = accumulate * PASSES[remat] * e.psi / rates.memory
    touched = 2 * (e.opt_state + 2 * e.psi * share)
    return Seconds(
        math=max(flops / (rates.flops * rates.reached), reads),
        wire=e.wire_seconds(within_host=rates.within_host, between_hosts=rates.between_hosts),
        update=touched / rates.memory,
        pcie=max(e.to_host, e.to_device) / rates.pcie,
        hidden=rates.hidden,
    )
