"""Train states: a `TrainState` or an NNX pair is taken apart, laid out, and put together again.

Vocabulary
  parts        params, optimizer state and the rest of a state, whatever class it has (`adapters.py`)
  conversion   an optimizer state for another plan or with other masters, values kept (`conversion.py`)

What always holds
  The state that comes back has the class and the structure of the one that was given. Nothing is aliased with it.
  Flax is imported only for a state that uses it.
"""
