"""What a step does with a param, as far as the wire depends on it."""

from __future__ import annotations

import dataclasses

import numpy as np

EVALUATED = "evaluated"
GATHERS = {"matmul": 2, "lookup": 1, "kept": 1, "loss": 1, EVALUATED: 1}
"""How often each kind of use gathers a weight, forward and backward. "lookup": its gradient does not read the weight.
"kept": nor does the backward pass. The weight is reshaped or broadcast, and the result is kept; or it multiplies the
batch, of which no gradient is taken. "loss": the head of a `jzero.tiled_loss` that makes its gradients in the forward
pass; one in pieces is gathered twice all the same. "evaluated": a forward pass outside of `jax.grad` reads it, for a
metric."""


@dataclasses.dataclass(frozen=True)
class Use:
    """One use of a param.

    Attributes:
      kind: one of `GATHERS`.
      dtype: of the weight where it is used, in which its gradient is made; None: that of the plan.
      rows: of a lookup, how many rows all devices look up together; 0: not known.
      part: of the param: less than one where a part of it is used, as in `w[0]`, which is cut on the shards.
    """

    kind: str
    dtype: np.dtype | None = None
    rows: int = 0
    part: float = dataclasses.field(default=1.0, kw_only=True)

    @property
    def has_gradient(self) -> bool:
        """It makes a gradient, unless the param is frozen."""
        return self.kind != EVALUATED

    def __repr__(self):
        rows = [f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self)]
        return f"Use({', '.join(rows[: 3 + (self.part != 1)])})"


class Uses(dict[str, tuple[Use, ...]]):
    """What `jzero.param_uses` reads from a step: by name of a param its uses.

    Attributes:
      micro_batches: how many that reduce gradients the step cuts its batch into; 1 where it does not.
      reduced_in_each: gradients are reduced in each of them at every stage.
    """

    micro_batches: int = 1
    reduced_in_each: bool = False


DEFAULT = (Use("matmul"),)
"""The use that is assumed of every param if only the plan is known."""
