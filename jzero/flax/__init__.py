"""Train states: takes a `TrainState` or an NNX pair apart, lays it out, and puts it together again.

Vocabulary
  parts        params, optimizer state and the rest of a state, whatever class it has (`adapters.py`)
  conversion   an optimizer state for another plan or with other masters, with the same values (`conversion.py`)

What always holds
  The state that comes back has the class and the structure of the given one, and shares no memory with it. (An NNX
  pair is changed in place.)
  Flax is imported only for a state that uses it.
"""
