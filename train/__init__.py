"""Training scripts: `gpt.py` (Flax linen, a TrainState) and `digits.py` (Flax NNX)."""
