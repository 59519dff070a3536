"""`ZeroState`: optimizer state, the masters that it was made for, and what else jzero keeps beside it."""

from __future__ import annotations

from typing import Any, NamedTuple

from jzero.core.types import PyTree


class ZeroState(NamedTuple):
    """Optimizer state of a run with master weights, with 8-bit moments, or with a count for rounding its moments.

    Attributes:
      inner: the state of the wrapped transformation, made for the fp32 masters.
      master: the tree of params in the master dtype (int16 with `master_dtype="remainder"`); None where a param needs
        none. Sharded like the moments. If the update runs outside of the program, it is a node with the generation, and
        `inner` has handles.
      rounding_count: int32 scalar, the number of updates, on every device; with 16-bit or 8-bit moments of a chain that
        counts no steps itself. Otherwise None.
      moment_scales: with `moment_dtype="int8"` a tree like `inner`: fp32, one scale per block, beside the int8 codes
        that `inner` holds; None for leaves that are not quantized. Otherwise None.
    """

    inner: Any
    master: Any
    rounding_count: Any = None
    moment_scales: Any = None


class Quantized(NamedTuple):
    """Optimizer state with 8-bit moments, while it is updated: see `ZeroState` for both attributes."""

    inner: Any
    moment_scales: Any


def inner_of(opt_state: PyTree) -> PyTree:
    """The state of the wrapped transformation."""
    return opt_state.inner if isinstance(opt_state, (ZeroState, Quantized)) else opt_state


def scales_of(opt_state: PyTree) -> PyTree:
    """The scales of 8-bit moments; None without them."""
    return opt_state.moment_scales if isinstance(opt_state, (ZeroState, Quantized)) else None
