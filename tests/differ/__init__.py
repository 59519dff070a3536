"""Random training runs, each compared with the same run in plain optax and Flax on one device.

Vocabulary
  case      one run as plain data (JSON): model, optimizer, config, mesh, events; `grammar.draw(seed, index)`
  flavour   how the model is written: "linen", "nnx" or "plain" (a pytree of arrays and a function)
  event     something that happens to the state between two steps (a jit round trip, a save and a restore, ...)
  fed       the plain run takes the gradients that the sharded run returned, so that rounding is not amplified from step
            to step; gradients are compared at each step by themselves
  refused   jzero raised one of the documented refusals of `refusals.py`

What always holds
  A case is a pure function of (seed, index): the same draw on every machine and version of jax.
  Anything but equal numbers, or a documented refusal, is a failure: also a crash or a hang.
"""
