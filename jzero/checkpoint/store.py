"""Orbax underneath: how a tree of arrays is written and read, in one directory that appears whole or not at all.

[Note: checksums before the commit]
Orbax writes into a temporary directory and renames it when all processes are done. Its handler of trees is wrapped:
when the inner one has finished its files, each process hashes its share (`seal.py`), and after a barrier orbax
renames. So a directory with the final name has its checksums, and `ocp.training.Checkpointer` keeps and deletes such
steps as it does any other. Plain orbax reads them without jzero.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import itertools
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from jzero.checkpoint import seal
from jzero.checkpoint.logical import Name
from jzero.errors import counted
from jzero.layout import path_keys

STATE = "state"  # orbax's name for the tree of a checkpoint
NAME = "jzero.checkpoint"
MARK: Any = {NAME: seal.VERSION}  # in orbax's metadata: has checksums, be they still there or not
NOTES = "_CHECKPOINT_METADATA"  # orbax's, written after the checksums
TEMPORARY = ".orbax-checkpoint-tmp"
CHUNK_BYTES = 32 * 2**20  # of a leaf that are stored together: the least that another layout has to read
LEAST_READ_BYTES = 64 * 2**20  # that are read at once, of one process
_barriers = itertools.count()


@dataclasses.dataclass
class Numpy:
    """What to read as a numpy array: orbax knows it by these two fields, and by the lack of a sharding."""

    shape: tuple[int, ...]
    dtype: np.dtype


class _Sealed:
    """Orbax's handler of trees; what it has written gets checksums. See [Note: checksums before the commit]."""

    custom: Any = None  # set on the class before a save

    def __init__(self):
        self._inner = ocp.handlers.PyTreeHandler()

    async def save(self, directory, checkpointable):
        custom = self.custom
        written = await self._inner.save(directory, checkpointable)
        barrier = f"jzero.checkpoint.{next(_barriers)}"

        async def finish():
            await written
            path = Path(await directory.await_creation())
            seal.write(path, part=jax.process_index(), parts=jax.process_count(), custom=custom)
            await ocp.multihost.sync_global_processes(barrier, operation_id=barrier)

        return finish()

    async def load(self, directory, abstract_checkpointable=None):
        return await self._inner.load(directory, abstract_checkpointable)

    async def metadata(self, directory):
        return await self._inner.metadata(directory)

    def is_handleable(self, checkpointable):
        return self._inner.is_handleable(checkpointable)

    def is_abstract_handleable(self, abstract_checkpointable):
        return self._inner.is_abstract_handleable(abstract_checkpointable)


def writing(custom: Any = None) -> tuple[ocp.Context, type[_Sealed]]:
    """The orbax context to save in, and its handler: the `custom` of that is kept under the checksums."""
    plain = ocp.handlers.PyTreeHandler  # by whose name plain orbax finds how to read it
    names = {"__module__": plain.__module__, "__qualname__": plain.__qualname__}
    handler = type(plain.__name__, (_Sealed,), {"custom": custom, **names})
    registry = ocp.handlers.local_registry(include_global_registry=False)
    for other, name in ocp.handlers.global_registry().get_all_entries():
        if name != STATE:
            registry.add(other, checkpointable_name=name)
    registry.add(handler, checkpointable_name=STATE)
    context = ocp.Context()
    context.checkpointables.registry = registry
    context.array.saving.storage_options.chunk_byte_size = CHUNK_BYTES
    return context, handler


def save_async(path: Path, tree: Any, *, custom: Any) -> Any:
    """Copies the arrays of a tree and writes them in the background.

    Raises:
      OSError: the disk is full, or refuses; nothing is left of what was begun.
    """
    clean(path)
    try:
        with disk_errors(path), writing(custom)[0]:
            return ocp.save_async(str(path), tree, custom_metadata=MARK)
    except BaseException:
        clean(path)
        raise


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """What tensorstore says of a full disk, which comes as a ValueError, as what it is.

    Raises:
      OSError: with its number, and the path that was not saved.
    """
    try:
        yield
    except ValueError as error:
        found = re.search(r"os_error_code='(\d+)'", str(error))
        if found is None:
            raise
        what = os.strerror(int(found[1]))
        text = f"{what}: {path} is not saved. What was there before is untouched."
        raise OSError(int(found[1]), text) from error


def check_free(path: Path) -> None:
    """Raises FileExistsError where something is at the path, OSError where nothing can be written beside it."""
    if path.exists():
        raise FileExistsError(
            f"jzero.checkpoint.save: {path} exists and is not replaced. Save to another path (one per step), or remove "
            "it first."
        )
    if jax.process_index() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass


def clean(path: Path) -> None:
    """Removes what a killed save left behind."""
    if jax.process_index() == 0 and path.parent.is_dir():
        for left in path.parent.glob(f"{glob.escape(path.name)}{TEMPORARY}*"):
            shutil.rmtree(left, ignore_errors=True)


def locate(path: Any, where: str) -> Path:
    """The absolute path of a checkpoint.

    Raises:
      FileNotFoundError: nothing is there; what lies beside it, or below it, is named.
      ValueError: it is no checkpoint.
    """
    path = Path(os.path.abspath(path))
    if not path.exists():
        beside = [f"  {p}" for p in steps(path.parent)] if path.parent.is_dir() else []
        found = "\nCheckpoints beside it:\n" + "\n".join(beside) if beside else ""
        raise FileNotFoundError(f"{where}: there is nothing at {path}.{found}")
    if not (path / STATE).is_dir():
        below = steps(path) if path.is_dir() else []
        if below:
            raise ValueError(
                f"{where}: {path} holds {counted(len(below), 'checkpoint')} and is none itself. Name one: {below[-1]}"
            )
        raise ValueError(
            f"{where}: {path} is no checkpoint of a state: no folder {STATE!r} in it, as jzero.checkpoint.save and "
            "orbax (v1) write."
        )
    return path


def is_sealed(path: Path) -> bool:
    """True for a checkpoint that was saved with checksums, be they still there or not."""
    try:
        return seal.exists(path / STATE) or NAME in (path / NOTES).read_text(errors="replace")
    except OSError:
        return False


def unreadable(error: Exception) -> seal.Damage:
    """Orbax's notes on a checkpoint cannot be parsed."""
    return seal.Damage(NOTES, f"orbax cannot read it ({error})")


def steps(folder: Path) -> list[Path]:
    """The finished checkpoints in a folder, by step where they are numbered."""
    found = [p for p in folder.iterdir() if (p / STATE).is_dir() and TEMPORARY not in p.name]
    return sorted(found, key=lambda p: (int(p.name) if p.name.isdigit() else -1, p.name))


def stored(path: Path) -> tuple[Any, dict[Name, tuple[tuple[int, ...], np.dtype]]]:
    """What a checkpoint holds: orbax's tree of metadata, and shape and dtype by name."""
    tree = ocp.metadata(str(path)).metadata
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return tree, {path_keys(k): _described(x) for k, x in flat}


def _described(leaf: Any) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype; a Python number has that of its type."""
    if hasattr(leaf, "shape"):
        return tuple(leaf.shape), np.dtype(leaf.dtype)
    return (), np.dtype(leaf if isinstance(leaf, type) else type(leaf))


def load(path: Path, tree: Any, targets: Mapping[Name, Any]) -> dict[Name, Any]:
    """Reads the named arrays: for a numpy target whole, for an abstract array each process its shards.

    Where the shape of a target is larger than the stored one, the rest is zeros.
    """
    like = jax.tree_util.tree_map_with_path(lambda k, _: targets.get(path_keys(k), ocp.PLACEHOLDER), tree)
    stored = {path_keys(k): x for k, x in jax.tree_util.tree_leaves_with_path(tree)}
    with _reading(max((_read_bytes(stored[k], x) for k, x in targets.items()), default=0)):
        out = ocp.load(str(path), like)
    flat = jax.tree_util.tree_leaves_with_path(out, is_leaf=lambda x: x is ocp.PLACEHOLDER)
    return {path_keys(k): x for k, x in flat if path_keys(k) in targets}


def _read_bytes(stored: Any, target: jax.ShapeDtypeStruct | Numpy) -> int:
    """Bytes of the chunks that the largest piece of a target touches: what orbax reserves for it, or fails."""
    shape, dtype = _described(stored)
    chunk = getattr(getattr(stored, "storage_metadata", None), "chunk_shape", None) or shape
    sharding = getattr(target, "sharding", None)
    if sharding is None:
        return math.prod(shape) * dtype.itemsize
    pieces = sharding.addressable_devices_indices_map(target.shape).values()
    return max(math.prod(map(_touched, piece, shape, chunk)) for piece in pieces) * dtype.itemsize


def _touched(piece: slice, size: int, chunk: int) -> int:
    """How much of a dim lies in chunks that a piece of it touches."""
    start, stop, _ = piece.indices(size)
    return -(-stop // chunk) * chunk - start // chunk * chunk


def _reading(largest: int) -> ocp.Context:
    context = ocp.Context()
    context.array.loading.enable_padding_and_truncation = True
    context.memory.read_concurrent_bytes = max(LEAST_READ_BYTES, largest + 1)
    return context
