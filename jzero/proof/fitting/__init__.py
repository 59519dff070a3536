"""`jzero.fit`: the configuration that a model, a batch and a pod ask for, by closed forms first and compiling second.

Vocabulary
  option: what can be chosen: a config, mesh axes, micro-batches, and what the model's functions offer.
  candidate: an option with its closed forms: seconds of a step, bytes of one device.
  limit: bytes of one device that a program may take.
  refuted: compiling showed that it does not fit.
"""
