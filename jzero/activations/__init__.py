"""ZeRO-R's activation checkpoints: what a rematerialized block keeps of its input, and where."""
