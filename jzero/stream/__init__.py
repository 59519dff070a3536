"""Bounded device memory: state in host memory is fetched, updated and written back, a part at a time.

Vocabulary
  placement    where an argument or a result lives: host memory in a layout, or device memory (`placement.py`)
  group        results that are fetched, computed and written together
  chunk        a part of an array that consists of the same part of every shard (`chunks.py`)
  in flight    bytes of host arrays that are on one device at once

What always holds
  At most `in_flight_bytes` are on the device at once; what cannot be cut small enough is reported before it runs. The
  values are those of the function without streaming.
"""
