"""FLOPs of the matmuls and convolutions in a trace."""

from __future__ import annotations

import math
from typing import Any

from jzero.core.primitives import LOSS
from jzero.core.token_loss_rules import GRADIENTS
from jzero.core.types import Jaxpr, JaxprEqn


def flops_of(jaxpr: Jaxpr, *, only: str | None = None) -> float:
    """Of all devices together; a loop without a known number of rounds counts as one round.

    Args:
      jaxpr: a trace.
      only: the primitive that counts; None: all.
    """
    return sum(_of_equation(eqn, only) for eqn in jaxpr.eqns)


def _of_equation(eqn: JaxprEqn, only: str | None) -> float:
    name = eqn.primitive.name
    if only is not None and name != only:
        name = "" if name in ("dot_general", "conv_general_dilated", GRADIENTS) else name
    if name == "dot_general":
        (contract, _), _ = eqn.params["dimension_numbers"]
        return 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(_shape(eqn, 0)[d] for d in contract)
    if name == "conv_general_dilated":
        kernel, numbers = _shape(eqn, 1), eqn.params["dimension_numbers"].rhs_spec
        return 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(kernel) / kernel[numbers[0]]
    if name == GRADIENTS:  # logits, and the gradients of both factors
        return 6.0 * math.prod(_shape(eqn, 0)) * _shape(eqn, 1)[-1]
    inner = [flops_of(body, only=only) for body in _bodies(eqn)]
    if not inner:
        return 0.0
    total = max(inner) if name == "cond" else sum(inner)
    times = eqn.params.get("length", 1) if name == "scan" else 1
    return total * times * (eqn.params["mesh"].size if name == "shard_map" else 1)


def _shape(eqn: JaxprEqn, operand: int) -> tuple[int, ...]:
    return eqn.invars[operand].aval.shape


def _bodies(eqn: JaxprEqn) -> list[Any]:
    values = [eqn.params["jaxpr"]] if eqn.primitive.name == LOSS else eqn.params.values()
    flat = [x for v in values for x in (v if isinstance(v, (tuple, list)) else (v,))]
    jaxprs = [getattr(x, "jaxpr", x) for x in flat]
    return [x for x in jaxprs if hasattr(x, "eqns")]
