"""Files and folders that survive a power failure: flushed to the disk in the order that makes a rename safe.

The files of a checkpoint first, then the folders that name them, then the rename, then the folder that holds the new
name. After each of these the disk holds either no checkpoint of that name or all of it.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

_NO_FOLDERS = (errno.EINVAL, errno.ENOTSUP)  # some network file systems flush no folders, and need not


def flush(file: Path) -> None:
    """Flushes a file to the disk; for a folder, the names in it.

    Raises:
      OSError: the disk did not take it. A file system that flushes no folders is not an error.
    """
    handle = os.open(file, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if not (file.is_dir() and error.errno in _NO_FOLDERS):
            raise
    finally:
        os.close(handle)


def flush_folders(root: Path) -> None:
    """Flushes the names of all files below a folder, the innermost first."""
    for folder, _, _ in os.walk(root, topdown=False):
        flush(Path(folder))


def rename(old: Path, new: Path) -> None:
    """Renames a flushed file or folder, durably. A file or an empty folder of the new name is replaced."""
    os.rename(old, new)
    flush(new.parent)


def write(file: Path, data: bytes) -> None:
    """Writes a file, and flushes it."""
    with open(file, "wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())


def make_folder(folder: Path) -> None:
    """Makes a folder and the missing ones above it, durably."""
    missing = [f for f in (folder, *folder.parents) if not f.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in reversed(missing):
        flush(made.parent)
