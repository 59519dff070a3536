"""FLOPs of the matmuls and convolutions in a trace."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

from jzero.core.primitives import LOSS
from jzero.core.token_loss_rules import GRADIENTS
from jzero.core.types import Jaxpr, JaxprEqn


def _of_matmul(eqn: JaxprEqn) -> float:
    (contract, _), _ = eqn.params["dimension_numbers"]
    return 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(_shape(eqn, 0)[d] for d in contract)


def _of_convolution(eqn: JaxprEqn) -> float:
    kernel, numbers = _shape(eqn, 1), eqn.params["dimension_numbers"].rhs_spec
    return 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(kernel) / kernel[numbers[0]]


def _of_token_loss(eqn: JaxprEqn) -> float:
    """Logits, and the gradients of both factors."""
    return 6.0 * math.prod(_shape(eqn, 0)) * _shape(eqn, 1)[-1]


COUNTED: dict[str, Callable[[JaxprEqn], float]] = {
    "dot_general": _of_matmul, "conv_general_dilated": _of_convolution, GRADIENTS: _of_token_loss,
}  # fmt: skip


def flops_of(jaxpr: Jaxpr, kinds: Collection[str] = COUNTED) -> float:
    """Of all devices together; a loop without a known number of rounds counts as one round.

    Args:
      jaxpr: a trace.
      kinds: primitives that count, of `COUNTED`.
    """
    return sum(_of_equation(eqn, kinds) for eqn in jaxpr.eqns)


def _of_equation(eqn: JaxprEqn, kinds: Collection[str]) -> float:
    name = eqn.primitive.name
    if name in COUNTED:
        return COUNTED[name](eqn) if name in kinds else 0.0
    inner = [flops_of(body, kinds) for body in _bodies(eqn)]
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
