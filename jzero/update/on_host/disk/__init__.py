"""Optimizer state on a local disk: read, updated and written back once per step, without ever losing a whole state.

Vocabulary
  unit         arrays that are read and written together: the masters and moments of some leaves (`units.py`)
  frame        aligned memory for one unit; all frames together are the buffer (`frames.py`)
  slot         one of the two files of a unit; a step writes to the one that the last generation does not use
  transfer     a unit between its frame and a slot, in requests that a few threads carry out (`transfers.py`)
  generation   the number of steps committed; `Record` says which slots and checksums belong to it (`record.py`)

What always holds
  After a kill or a power failure at any moment the store opens at the last generation committed or, if that commit had
  not returned, at the one before; never at a mix. What is read has the checksums that were committed. Memory is
  `buffer_bytes`, and what an interpreter and its threads take. Nothing here knows of JAX arrays or plans.
"""

from jzero.update.on_host.disk.step import DiskStep
from jzero.update.on_host.disk.store import DiskStore
from jzero.update.on_host.disk.transfers import DamagedStore
from jzero.update.on_host.disk.units import FileUnit

__all__ = ["DiskStore", "DiskStep", "FileUnit", "DamagedStore"]
