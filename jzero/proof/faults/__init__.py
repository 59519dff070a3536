"""The faults that `check` looks for in a compiled step: `state.py`, `weights.py` and `steps.py`, listed in `rules.py`."""

from jzero.proof.faults.rules import KINDS

__all__ = ["KINDS"]
