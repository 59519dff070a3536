"""Checkpoints of a state that do not depend on its layout, with checksums; on top of orbax.

What is stored is the logical state: no padding, whatever the stage, mesh or tier. It is restored into any other layout
of the same model and optimizer, whole or not at all, and every byte that is read is checked.
"""

from jzero.checkpoint.exporting import export
from jzero.checkpoint.lock import FolderInUse
from jzero.checkpoint.pretrained import load_safetensors
from jzero.checkpoint.restoring import CheckpointDamaged, custom, restore, verify
from jzero.checkpoint.saving import Saving, save, save_async
from jzero.checkpoint.steps import Steps

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
    "verify",
]
