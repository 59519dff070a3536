"""Where an array lies: pure functions of shapes, specs and a mesh decide it before any array exists.

Vocabulary
  axis, dim     an axis of the mesh; a dim of an array
  spec          a PartitionSpec
  split         which dims of an array are cut over which axes, and into how many pieces (`split.py`)
  whole         not split over the ZeRO axis
  sub-axis      a prime factor of an axis, written `data:0` (`specs.py`)
  padded        stored with zeros at the end of a dim that does not divide into equal pieces (`padding.py`)
  stack         one array for all layers of a scan; the dim of its layers is never cut (`layer_stacks.py`)

What always holds
  The layout of a leaf follows only from shapes, the mesh and the config. A layout that an array brings
  along (tensor parallelism) is kept; the ZeRO axis is added to it.
"""
