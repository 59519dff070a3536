"""What everything else rests on: errors, jaxprs, order, and all that touches JAX's internals.

Vocabulary
  jaxpr       a traced function; `jaxprs.py` opens one, `traversal.py` passes over one with a rule per equation
  graph       a jaxpr with calls inlined (`graph.py`): values are numbers, equations are nodes
  linear      a function whose transpose is ours (`linear.py`): what runs in the backward pass
  tied        of values: each is there only when all are (`ordering.py`)

What always holds
  `jax._src`, `jax.extend` and `jax.interpreters` are imported here and nowhere else (tests/test_house.py): a new jax
  can break this package alone. Nothing here knows of plans, stages or optimizers.
"""
