"""Where an array lies: specs, the leaf rule, meshes, placement."""
