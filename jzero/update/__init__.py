"""The update on shards: takes reduced gradients, masters and moments, and gives the new params.

Vocabulary
  master       the wide copy of a 16-bit param, in the optimizer state
  logical      the shape in which the wrapped transformation knows a leaf; it is stored in that shape or padded
  deferred     an update leaf that is its new param once it is added to the old one (`deferred_update.py`)
  mixes        of an equation: combines values along a dim that devices share, as a matmul does (`mixing.py`)
  region       equations that mix and feed one another, with all between them: Newton-Schulz of a matrix, say
  owner        the one device that computes a region of one matrix (`owners.py`), in a round of one matrix per device

What always holds
  The wrapped transformation sees the shapes and dtypes that it would see without sharding. A param that is not the
  cast of its master was replaced by the user, and its master takes it over. Owners compute what mixes, except
  regions too large for one device, which XLA computes. No optimizer is known by name: the rule is about equations.
"""
