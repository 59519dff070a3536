"""Communication: every collective that jzero asks XLA for is made here."""
