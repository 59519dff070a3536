"""`ZeroState`: optimizer state, the masters that it was made for, and a count of updates where one is needed."""

from __future__ import annotations

from typing import Any, NamedTuple

from jzero.core.types import PyTree


class ZeroState(NamedTuple):
    """Optimizer state of a run with master weights, or with a count for the rounding of its moments.

    Attributes:
      inner: the state of the wrapped transformation, made for the fp32 masters.
      master: the tree of params in the master dtype (int16 with `master_dtype="remainder"`); None where a param needs
        none. Sharded like the moments. If the update runs outside of the program, it is a node with the generation, and
        `inner` has handles.
      rounding_count: int32 scalar, the number of updates, on every device; with `moment_dtype="bfloat16"` of a chain
        that counts no steps itself. Otherwise None.
    """

    inner: Any
    master: Any
    rounding_count: Any = None


def inner_of(opt_state: PyTree) -> PyTree:
    """The state of the wrapped transformation."""
    return opt_state.inner if isinstance(opt_state, ZeroState) else opt_state
