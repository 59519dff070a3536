"""A value whose layout spreads forward only: to what is computed from it, not back to what it is computed from.

Shardy has an operation for that (`sdy.propagation_barrier`, the identity; it is gone after propagation), which JAX has
no function for. `jax.lax.optimization_barrier` lets layouts through both ways.
"""

from __future__ import annotations

import jax
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy

from jzero.core.custom_primitive import custom_primitive

FORWARD = 1  # of Shardy's enum of directions


def forward_only(x: jax.Array) -> jax.Array:
    """The same value. Layouts of what is computed from it do not spread back through it."""
    return _forward_only_p.bind(x)


def _same(x: jax.Array) -> jax.Array:
    return x


def _jvp(primals: tuple, tangents: tuple) -> tuple:
    return forward_only(primals[0]), tangents[0]


def _batch(values: tuple, dims: tuple) -> tuple:
    return forward_only(values[0]), dims[0]


def _lowered(_: mlir.LoweringRuleContext, x: ir.Value) -> list[ir.Value]:
    if not jax.config.jax_use_shardy_partitioner:  # pyright: ignore[reportAttributeAccessIssue]
        return [x]
    direction = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), FORWARD)
    return [sdy.PropagationBarrierOp(x, allowed_direction=direction).result]


_forward_only_p = custom_primitive("jzero_forward_only", _same, jvp=_jvp, batch=_batch, several=False)
mlir.register_lowering(_forward_only_p, _lowered)
