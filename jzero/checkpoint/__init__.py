"""Checkpoints of a state that do not depend on its layout, with checksums; on top of orbax.

What is stored is the logical state: no padding, whatever the stage, mesh or tier. It is restored into any other layout
of the same model and optimizer, completely or not at all, and every byte that is read is checked.

Vocabulary
  logical      a state as named leaves in the shapes that model and optimizer know (`logical.py`)
  checksums    of every chunk of every leaf, written before a checkpoint counts as finished (`checksums.py`)
  commit       the rename after which a checkpoint is there; until then its folder has a temporary name (`commit.py`)
  parts        what a train state is made of: params, optimizer state, step, rest (`flax/adapters.py`)
  lock         one writer per folder of steps (`core/folder_lock.py`)

What always holds
  A checkpoint is there as a whole or not at all. Nothing that exists is changed before what replaces it is on the disk.
"""

from jzero.checkpoint.disk_state import snapshot
from jzero.checkpoint.exporting import export
from jzero.checkpoint.pretrained import load_safetensors
from jzero.checkpoint.restoring import CheckpointDamaged, custom, restore, verify
from jzero.checkpoint.saving import Saving, save, save_async
from jzero.checkpoint.steps import Steps
from jzero.core.folder_lock import FolderInUse

__all__ = [
    "CheckpointDamaged",
    "FolderInUse",
    "Saving",
    "Steps",
    "custom",
    "export",
    "load_safetensors",
    "restore",
    "save",
    "save_async",
    "snapshot",
    "verify",
]
