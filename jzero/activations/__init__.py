"""ZeRO-R's activation checkpoints: what a block that runs again in the backward pass keeps of its input, and where.

Vocabulary
  block        the function or module that `jzero.remat` wraps
  input        the floating-point arrays that the block is given; kept as they are, split, or in host memory
  region       the traced block; it begins and ends with a primitive of `core/block_input.py`

What always holds
  Without `partition` and `offload` it is `jax.checkpoint`. Values and gradients are those of the block as written.
"""
