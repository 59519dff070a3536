"""Order between values in a compiled program, where XLA would choose one that costs memory.

[Note: what a barrier needs]
`jax.lax.optimization_barrier` returns its operands, each only when all of them are there. XLA drops an operand whose
result nobody reads, and the tie with it; it sees through a constant; and the partitioner moves a collective in front of
a barrier unless the result is constrained again. So both sides of a tie must be values of the program, and the results
of both must be used. Their order counts too: with the cotangents before the reduced gradients the peak of a 7.5B GPT at
stage 3 is 3.00 GB, after them 2.93 (`python benchmarks/peak.py --stages 3 --layers scan --kernels 3d`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jzero.core.types import PyTree


def tied(*values: PyTree) -> tuple[PyTree, ...]:
    """The same values (arrays, or trees of arrays), each only when all of them are there. Use all results."""
    return jax.lax.optimization_barrier(values)


def after(
    values: Sequence[jax.Array], deps: Sequence[jax.Array]
) -> tuple[list[jax.Array], list[jax.Array]]:
    """`values`, but only when `deps` are there, and `deps`. Use the results of both."""
    first, second = jax.lax.optimization_barrier((list(values), list(deps)))
    return first, second


def in_turn(part: Callable[[int, Any], Any], value: jax.Array, count: int, dim: int) -> Any:
    """`part(i, value)` for `count` parts, joined along a dim: each begins when the last but one is there."""
    done: list[Any] = []
    for i in range(count):
        if len(done) > 1:
            value, done[-2] = tied(value, done[-2])
        done.append(part(i, value))
    return jax.numpy.concatenate(done, axis=dim) if count > 1 else done[0]
