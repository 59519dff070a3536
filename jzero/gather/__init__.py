"""Weights where they are used: gathered for one use, their gradients reduced, in buckets."""
