"""The proof: what XLA does with a sharded step, read from the program that it compiled; no GPU is needed.

Vocabulary
  pod          GPUs that are only compiled for (`pod.py`)
  site         a collective where it stands in the program: its computation, loops and phase (`collectives.py`)
  phase        forward, backward or update, read from the names of operations (`places.py`)
  record       what the trace of a step says of its arguments and updates (`record.py`)
  home         the computation in which an instruction stands (`hlo.py`)
  iteration    one run of a loop's body; `trips` counts them
  slot         a piece of device memory while it is in use (`buffers.py`)
  saved        alive from the forward to the backward pass
  evidence     a program beside its plan: arguments, layouts, sites (`evidence.py`)
  finding      something that costs more, or computes something else, than the plan says (`faults/rules.py`)
  estimate     the same figures in closed form, from a plan alone (`memory.py`)

What always holds
  Figures come from the compiled program and not from the source; what a program does not say is reported as
  not checked. Names and shapes decide what an argument is only where there is no record. A finding says what it costs
  in bytes and what to change.
"""
