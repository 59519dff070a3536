"""The foundation of all other packages: errors, jaxprs, order, and everything that touches JAX's internals.

Vocabulary
  jaxpr       a traced function: `jaxprs.py` opens it, `traversal.py` passes over it with a rule per equation
  body        the jaxpr inside of a loop, a branch or a remat region, with its constants (`regions.py`)
  graph       a jaxpr with calls inlined (`graph.py`): values are numbers, equations are nodes
  split       of a value: the mesh axes that each of its dims is split over (`splits.py`)
  linear      a function with a transpose of its own (`linear.py`), which runs in the backward pass
  tied        of values: none is available before all are (`ordering.py`)

What always holds
  `jax._src`, `jax.extend` and `jax.interpreters` are imported only here (tests/test_house.py), so a new jax can only
  break this package. Nothing here knows plans, stages or optimizers.
"""
