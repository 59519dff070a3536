"""The faults that `check` looks for: of the state, of weights, of gradients and activations; `rules.py` lists them."""

from jzero.proof.faults.rules import KINDS, faults

__all__ = ["KINDS", "faults"]
