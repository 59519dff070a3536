"""Weights where they are used: a function is traced and evaluated again with one rule added.

Vocabulary
  weight       a stored param on its way to its use: its shard and its layouts (`sharded_weight.py`)
  use          an equation that reads a weight for arithmetic
  on its shard what is done to a weight before it is gathered: casts, transposes
  region       the body of a remat, a loop or a branch
  bucket       weights that are gathered together and whose gradients are reduced together (`buckets.py`)
  tie          an order between weights and activations, forward or on the way back

What always holds
  A weight is gathered at its use and dropped after it, except where the config keeps it. Values are those of the
  function as written. Collectives come from `comm/`.
"""
