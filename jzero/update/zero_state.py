"""`ZeroState`: optimizer state and the masters that it was made for."""

from __future__ import annotations

from typing import Any, NamedTuple


class ZeroState(NamedTuple):
    """Optimizer state of a run with master weights.

    Attributes:
      inner: the state of the wrapped transformation, made for the fp32 masters.
      master: the tree of params in the master dtype; None where a param needs none. Sharded like the moments.
        With an update outside of the program a node with the generation, and `inner` has handles.
    """

    inner: Any
    master: Any
