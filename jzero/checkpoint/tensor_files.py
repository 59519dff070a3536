"""Tensors by name in safetensors files: which files there are, whether they are whole, which tensor is in which."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open

from jzero.checkpoint.restoring import refuse
from jzero.checkpoint.tensors import DTYPES, damaged
from jzero.core.errors import counted, listing


class Tensor:
    """One tensor in an open file, read in slices."""

    def __init__(self, file: Any, name: str):
        self._file, self._name, self._view = file, name, file.get_slice(name)
        self.shape = tuple(self._view.get_shape())
        self.dtype = _NAMES.get(self._view.get_dtype())

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """A part of it, or all."""
        return np.asarray(self._view[index] if index else self._file.get_tensor(self._name))


_NAMES = {short: name for name, short in DTYPES.items()}


def tensors_of(path: Path, ignore: Sequence[str], opened: ExitStack, where: str) -> dict[str, Tensor]:
    """The tensors by name, in files that stay open as long as `opened`: those of an index, or all.

    Raises:
      ValueError: a damaged file, an index that does not fit the files, a tensor in several files.
    """
    files, index = _files(path, where)
    share = files[jax.process_index() :: jax.process_count()]
    refuse(path, damaged(share), "Get or export it again.")
    handles = {file: _opened(file, opened, where) for file in files}
    places: dict[str, list[Path]] = {}
    for file, handle in handles.items():
        for name in handle.keys():  # noqa: SIM118 (a handle is not a dict)
            places.setdefault(name, []).append(file)
    if index is not None:
        _check_index(index, places, ignore, path, where)
        places = {name: [file] for name, file in index.items()}
    rows = [(name, ", ".join(f.name for f in found)) for name, found in places.items() if len(found) > 1]
    if rows:
        raise ValueError(
            f"{where}: {counted(len(rows), 'tensor')} in more than one file of {path}; which one is meant?\n"
            f"{listing(rows)}\nPass an index (model.safetensors.index.json) that tells, or one file."
        )
    return {name: Tensor(handles[found[0]], name) for name, found in places.items()}


def _opened(file: Path, opened: ExitStack, where: str) -> Any:
    try:
        return opened.enter_context(safe_open(file, framework="np"))
    except SafetensorError as error:
        raise ValueError(f"{where}: {file} cannot be read as safetensors ({error}).") from None


def _check_index(
    index: Mapping[str, Path], places: Mapping[str, list[Path]], ignore: Sequence[str], path: Path, where: str
) -> None:
    """Raises ValueError where index and files disagree."""
    rows = [
        (name, file.name, "not in that file")
        for name, file in index.items()
        if file not in places.get(name, ())
    ]
    rows += [
        (name, found[0].name, "not in the index: ignore= leaves it out")
        for name, found in places.items()
        if name not in index and not ignored(name, ignore)
    ]
    if rows:
        raise ValueError(
            f"{where}: {path.name} and its files disagree on {counted(len(rows), 'tensor')}:\n{listing(rows)}"
        )


def _files(path: Path, where: str) -> tuple[list[Path], dict[str, Path] | None]:
    """The files to read, and which tensor is in which if there is an index."""
    if not path.exists():
        raise FileNotFoundError(f"{where}: there is nothing at {path}.")
    if path.is_dir():
        indices = sorted(path.glob("*.safetensors.index.json"))
        if len(indices) > 1:
            raise ValueError(f"{where}: {path} has {[f.name for f in indices]}. Pass one of them.")
        if indices:
            return _files(indices[0], where)
        found = sorted(path.glob("*.safetensors"))
        if not found:
            raise FileNotFoundError(f"{where}: no .safetensors file in {path}.")
        return [_regular(f, where) for f in found], None
    if _regular(path, where).suffix != ".json":
        return [path], None
    refuse(path, damaged([path]) if jax.process_index() == 0 else [], "Get or export it again.")
    index = {name: path.parent / file for name, file in _weight_map(path, where).items()}
    found = sorted(set(index.values()))
    missing = [f.name for f in found if not f.exists()]
    if missing:
        raise FileNotFoundError(
            f"{where}: {path.name} names files that are not beside it: {', '.join(missing)}."
        )
    return [_regular(f, where) for f in found], index


def _regular(file: Path, where: str) -> Path:
    """Raises ValueError for a pipe or a device, which would never end."""
    if not file.is_file():
        raise ValueError(f"{where}: {file} is not a regular file.")
    return file


def _weight_map(path: Path, where: str) -> dict[str, str]:
    """Which file each tensor is in, from an index.

    Raises:
      ValueError: it is not JSON with a weight_map, holds no names, or names a file outside of its folder.
    """
    try:
        found = json.loads(path.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{where}: {path} is not an index of safetensors files ({error!r}).") from None
    if not isinstance(found, dict) or not found or not all(isinstance(f, str) for f in found.values()):
        raise ValueError(f"{where}: weight_map in {path} must name the file of each tensor.")
    outside = sorted(
        {f for f in found.values() if Path(f).is_absolute() or ".." in Path(f).parts or "\0" in f}
    )
    if outside:
        raise ValueError(f"{where}: {path} names files outside of its folder, which are not read: {outside}.")
    return found


def ignored(name: str, patterns: Sequence[str]) -> bool:
    """True for a tensor whose name matches one of the patterns."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
