"""The proof: what XLA does with a sharded step, read from the program it compiled."""
