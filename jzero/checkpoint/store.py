"""What is at a path, and how named arrays are read from a checkpoint by orbax."""

from __future__ import annotations

import dataclasses
import glob
import math
import os
import re
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from jzero.checkpoint import checksums
from jzero.checkpoint.logical import Name
from jzero.core import durable
from jzero.core.errors import counted
from jzero.core.types import PyTree
from jzero.layout.leaf_rule import path_keys

STATE = "state"  # orbax's name for the tree of a checkpoint
NAME = "jzero.checkpoint"
TEMPORARY = ".orbax-checkpoint-tmp"  # in the name of a folder that is not yet, or no longer, a checkpoint
STAGING, DELETED = "-whole", "-deleted"
RETRIES, RETRY_SECONDS = 50, 0.1
LEAST_READ_BYTES = 64 * 2**20  # that are read at once, of one process
PathLike = str | os.PathLike[str]


@dataclasses.dataclass
class Numpy:
    """A target that is read as a numpy array: orbax recognizes these two fields without a sharding."""

    shape: tuple[int, ...]
    dtype: np.dtype


Target = jax.ShapeDtypeStruct | Numpy


def absolute(path: PathLike, where: str) -> Path:
    """The absolute path of a file or folder.

    Raises:
      TypeError: `path` is not a path.
      NotImplementedError: an address (`gs://...`).
      ValueError: an empty path, or one with a null character.
    """
    if not isinstance(path, (str, os.PathLike)) or isinstance(os.fspath(path), bytes):
        raise TypeError(f"{where}: a path must be a string or a pathlib.Path, not {type(path).__name__}: {path!r}.")
    text = os.fspath(path)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", text):
        raise NotImplementedError(
            f"{where}: {text} is not a path of a file system, and jzero.checkpoint writes and reads nothing else. Pass "
            "a path that all processes see; a bucket can be mounted as one, or use plain orbax, which knows gs://."
        )
    if not text or "\0" in text:
        raise ValueError(f"{where}: {text!r} is not a path.")
    return Path(os.path.abspath(text))


def check_free(path: Path, where: str) -> None:
    """Raises FileExistsError if the path exists, ValueError for a reserved name, OSError if nothing can be written."""
    if TEMPORARY in path.name:
        raise ValueError(
            f"{where}: {path.name}: names with {TEMPORARY!r} are of saves under way. Pass another."
        )
    if path.exists() or path.is_symlink():
        raise FileExistsError(
            f"{where}: {path} exists and is not replaced. Save to another path (one per step), or remove "
            "it first."
        )
    if jax.process_index() == 0:
        durable.make_folder(path.parent)
        with tempfile.TemporaryFile(dir=path.parent):
            pass


def clean(path: Path, *, failed: bool = False) -> None:
    """Removes what a killed save left behind.

    `failed`: a save of this process. Some of its threads may still write, and recreate folders; so the folder is
      removed until it stays gone.
    """
    if jax.process_index() == 0 and path.parent.is_dir():
        pattern = f"{glob.escape(path.name)}{TEMPORARY}*"
        _remove(path.parent, pattern)
        for _ in range(RETRIES if failed else 0):
            time.sleep(RETRY_SECONDS)
            if not _remove(path.parent, pattern):
                break


def _remove(folder: Path, pattern: str) -> bool:
    """Removes the folders that match a pattern; False if none does."""
    found = list(folder.glob(pattern))
    for left in found:
        shutil.rmtree(left, ignore_errors=True)
    return bool(found)


def delete(path: Path) -> None:
    """Removes a checkpoint; it loses its name first, so that none is ever half removed."""
    aside = path.with_name(f"{path.name}{TEMPORARY}{DELETED}")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(path, aside)
    shutil.rmtree(aside)


def locate(path: PathLike, where: str) -> Path:
    """The absolute path of a checkpoint.

    Raises:
      FileNotFoundError: nothing is there; what lies beside it, or below it, is named.
      ValueError: it is not a checkpoint.
    """
    path = absolute(path, where)
    if not path.exists():
        raise FileNotFoundError(f"{where}: there is nothing at {path}.{_beside(path)}")
    if not (path / STATE).is_dir():
        if below := steps(path):
            raise ValueError(
                f"{where}: {path} is not a checkpoint but holds {counted(len(below), 'checkpoint')}. "
                f"Name one: {below[-1]}"
            )
        raise ValueError(
            f"{where}: {path} is not a checkpoint of a state: no folder {STATE!r} in it, as jzero.checkpoint.save and "
            f"orbax (v1) write.{_beside(path)}"
        )
    return path


def _beside(path: Path) -> str:
    """The checkpoints in the same folder, as text."""
    found = [f"  {p}" for p in steps(path.parent)]
    return "\nCheckpoints beside it:\n" + "\n".join(found) if found else ""


def has_checksums(path: Path) -> bool:
    """True for a checkpoint that was saved with checksums, whether they are still there or not."""
    try:
        return checksums.exists(path) or NAME in (path / checksums.NOTES).read_text(errors="replace")
    except OSError:
        return False


def steps(folder: Path) -> list[Path]:
    """The finished checkpoints in a folder, by step where they are numbered; empty if there is no folder."""
    paths = folder.iterdir() if folder.is_dir() else ()
    found = [p for p in paths if (p / STATE).is_dir() and TEMPORARY not in p.name]
    return sorted(found, key=lambda p: (int(p.name) if p.name.isdecimal() else -1, p.name))


def numbered(folder: Path) -> list[int]:
    """The finished checkpoints of a folder whose names are steps, ascending."""
    return [int(p.name) for p in steps(folder) if p.name.isdecimal() and p.name == str(int(p.name))]


def clean_steps(folder: Path) -> None:
    """Removes what killed saves of steps left behind; only for the holder of the folder's lock."""
    if jax.process_index() == 0:
        _remove(folder, f"[0-9]*{TEMPORARY}*")


def stored(path: Path) -> tuple[PyTree, dict[Name, tuple[tuple[int, ...], np.dtype]]]:
    """What a checkpoint holds: orbax's tree of metadata, and shape and dtype by name."""
    tree = ocp.metadata(str(path)).metadata
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return tree, {path_keys(k): _described(x) for k, x in flat}


def _described(leaf: Any) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype; a Python number has that of its type."""
    if hasattr(leaf, "shape"):
        return tuple(leaf.shape), np.dtype(leaf.dtype)
    return (), np.dtype(leaf if isinstance(leaf, type) else type(leaf))


def load(path: Path, tree: PyTree, targets: Mapping[Name, Target]) -> dict[Name, Any]:
    """Reads the named arrays: whole for a numpy target; for an abstract array, each process reads its shards.

    Where the shape of a target is larger than the stored one, the rest is zeros.
    """
    like = jax.tree_util.tree_map_with_path(lambda k, _: targets.get(path_keys(k), ocp.PLACEHOLDER), tree)
    stored = {path_keys(k): x for k, x in jax.tree_util.tree_leaves_with_path(tree)}
    with _reading(max((_read_bytes(stored[k], x) for k, x in targets.items()), default=0)):
        out = ocp.load(str(path), like)
    flat = jax.tree_util.tree_leaves_with_path(out, is_leaf=lambda x: x is ocp.PLACEHOLDER)
    return {path_keys(k): x for k, x in flat if path_keys(k) in targets}


def _read_bytes(stored: Any, target: Target) -> int:
    """Bytes of the chunks that the largest piece of a target touches: orbax reserves these bytes, or fails."""
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
