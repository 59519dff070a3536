"""The update on shards: gradients, masters and moments, and how new values reach the params."""
