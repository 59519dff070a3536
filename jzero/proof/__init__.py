"""The proof: what XLA does with a sharded step, read from the program that it compiled; no GPU is needed.

Vocabulary
  pod          GPUs that are only compiled for (`pod.py`)
  site         a collective where it stands in the program: its computation, loops and phase (`collectives.py`)
  phase        forward, backward or update, told from the names of operations (`places.py`)
  evidence     a program next to its plan: arguments, layouts, sites (`evidence.py`)
  finding      something that costs more, or computes something else, than the plan says (`faults/rules.py`)
  estimate     the same figures in closed form, from a plan alone (`memory.py`)

What always holds
  Figures come from the compiled program and not from the source; what a program does not tell is left open, not
  guessed. A finding says what it costs in bytes and what to change.
"""
