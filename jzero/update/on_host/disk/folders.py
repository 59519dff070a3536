"""Folders of a store: one per process in a common one, made only where the folder above is there."""

from __future__ import annotations

import errno
import re
from pathlib import Path

from jzero.core import durable
from jzero.core.errors import check_int, check_kind

_NAME = re.compile(r"process-(\d{5})-of-(\d{5})$")


def of(path: Path, process: tuple[int, int], *, where: str) -> Path:
    """The folder of a process.

    Raises:
      TypeError, ValueError: `process` is not (index, count), or `path` has folders of another number of processes.
    """
    check_kind(process, "process", tuple, "a pair: index, count", where=where)
    index, count = process
    check_int(count, "process", where=where, low=1)
    check_int(index, "process", where=where, low=0, high=count - 1)
    names = [p.name for p in path.iterdir()] if path.is_dir() else []
    found = [m for m in map(_NAME.match, names) if m]
    counts = sorted({int(m[2]) for m in found} - {count})
    if counts:
        raise ValueError(
            f"{where}: {path} holds the state of {counts[0]} processes, and this run has {count}. "
            f"As many processes read a state on disk as wrote it. Run with {counts[0]}, restore from a checkpoint (any "
            "number of processes reads those), or pass another folder."
        )
    return path / f"process-{index:05d}-of-{count:05d}"


def make(*folders: Path, where: str) -> None:
    """Makes folders, the outermost first, for good.

    What is above the first must be there: a disk that is not mounted must not become a folder of the root file system.

    Raises:
      OSError: it cannot be made, or written to; says where.
    """
    first = folders[0]
    if not first.parent.is_dir():
        what = f"{where}: there is no folder to make {first.name!r} in. Is the disk mounted?"
        raise FileNotFoundError(errno.ENOENT, what, str(first.parent))
    try:
        durable.make_folder(folders[-1])
    except OSError as error:
        what = f"{error.strerror}: {where} cannot make its folder"
        raise type(error)(error.errno, what, str(error.filename)) from error
