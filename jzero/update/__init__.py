"""The update on shards: reduced gradients, masters and moments in, what the params become out.

Vocabulary
  master       the wide copy of a 16-bit param, in the optimizer state
  logical      the shape in which the wrapped transformation knows a leaf; it is stored in that shape or padded
  deferred     an update leaf that is its new param once it is added to the old one (`deferred_update.py`)

What always holds
  The wrapped transformation sees the shapes and dtypes that it would see without sharding. A param that is not the
  cast of its master was replaced by the user, and its master takes it over.
"""
