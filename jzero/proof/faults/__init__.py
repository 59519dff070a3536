"""The faults that `check` looks for: of the state, of weights, of gradients and activations; `rules.py` lists them."""

from jzero.proof.faults.rules import KINDS

__all__ = ["KINDS"]
