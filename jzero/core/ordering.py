"""Order between values in a compiled program, where XLA would choose one that costs memory.

[Note: what a barrier needs]
`jax.lax.optimization_barrier` gives back its operands, each only when all are there. XLA drops an operand whose result
nobody reads, and the tie with it; it sees through a constant; and the partitioner moves a collective in front of a
barrier unless the result is constrained again. So both sides of a tie are values of the program, and the results of
both are used. Their order counts too: with the cotangents in front of the reduced gradients the peak of a 7.5B GPT at
stage 3 is 3.00 GB, behind them 2.93 (`python benchmarks/peak.py --stages 3 --layers scan --kernels 3d`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax


def tied(*values: Any) -> tuple[Any, ...]:
    """The same values (arrays, or trees of arrays), each only when all of them are there; use all results."""
    return jax.lax.optimization_barrier(values)


def after(values: Sequence[Any], deps: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """`values` only when `deps` are there, and `deps`; use the results of both."""
    first, second = jax.lax.optimization_barrier((list(values), list(deps)))
    return first, second
