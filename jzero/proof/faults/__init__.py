"""The faults that `check` looks for: of the state, of weights, and of gradients and activations; listed in `rules.py`."""

from jzero.proof.faults.rules import KINDS

__all__ = ["KINDS"]
