"""Copies of files that cost nothing where the file system can: a reflink, a hard link, or else the bytes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from jzero.core import durable
from jzero.core.folder_lock import NAME as LOCK
from jzero.update.on_host.disk import record as records

_FICLONE = 0x40049409  # linux/fs.h; Python has no name for it
_CANNOT = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS, errno.EPERM,
           errno.EMLINK, errno.EACCES}  # fmt: skip
WAYS = ("reflink", "hard link", "copy")


def take(record: records.Record, files: Iterable[Path], dest: Path) -> str:
    """Copies files and their record into a new folder, which gets its name once everything is on the disk.

    Returns:
      The most expensive way that any file needed: "reflink", "hard link" or "copy".

    Raises:
      OSError: `dest` cannot be written, or the disk is full. Nothing is left of it then.
    """
    temporary = dest.parent / f".{dest.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)  # of a snapshot that was killed
    temporary.mkdir()
    try:
        ways = [_duplicate(file, temporary / file.name) for file in files]
        (temporary / LOCK).touch()  # for readers who may not write there
        records.write(temporary, record)
        durable.flush(temporary)
        durable.rename(temporary, dest)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return max(ways, key=WAYS.index, default=WAYS[-1])


def _duplicate(source: Path, dest: Path) -> str:
    with contextlib.suppress(_Cannot):
        _reflink(source, dest)
        return WAYS[0]
    try:
        os.link(source, dest)  # what it links to has been flushed
        return WAYS[1]
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
    shutil.copyfile(source, dest)
    durable.flush(dest)
    return WAYS[2]


class _Cannot(Exception):
    """The file system has no reflinks."""


def _reflink(source: Path, dest: Path) -> None:
    with open(source, "rb") as old, open(dest, "xb") as new:
        try:
            fcntl.ioctl(new.fileno(), _FICLONE, old.fileno())
            os.fsync(new.fileno())
        except OSError as error:
            dest.unlink()
            if error.errno in _CANNOT:
                raise _Cannot from error
            raise
