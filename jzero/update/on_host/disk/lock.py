"""One writer per folder: a `flock`, which the kernel ends with its process."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import platform
import time
import weakref
from pathlib import Path

NAME = "lock"
_HELD: weakref.WeakSet[FolderLock] = weakref.WeakSet()


class StoreInUse(RuntimeError):
    """Another run has a store open."""


class FolderLock:
    """The lock of a folder, taken when this is made.

    Args:
      folder: where the lock file lies, or is made.
      shared: others may read too, and none write. A folder without a lock file, or on a file system without locks,
        is read without one.
      where: for messages.

    Raises:
      StoreInUse: a live process has it; names process and host.
      OSError: the file system has no locks.
    """

    def __init__(self, folder: Path, *, shared: bool = False, where: str):
        self._file, self._shared, self._handle = folder / NAME, shared, -1
        try:
            self._handle = os.open(self._file, os.O_RDONLY if shared else os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(self._handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except FileNotFoundError:
            if not shared:
                raise
        except BlockingIOError:
            self._close()
            raise StoreInUse(self._in_use(where)) from None
        except OSError as error:
            self._close()
            if not shared or error.errno not in (errno.ENOLCK, errno.ENOTSUP):
                raise OSError(
                    error.errno, f"{where}: cannot lock: {error.strerror}", str(self._file)
                ) from error
        if not shared:
            since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
            me = {"pid": os.getpid(), "host": platform.node(), "since": since}
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, json.dumps(me).encode(), 0)
        _HELD.add(self)

    def release(self) -> None:
        """Gives the lock up; a process forked from the holder does not have it."""
        if self._handle >= 0 and not self._shared:
            with contextlib.suppress(OSError):
                os.ftruncate(self._handle, 0)
        self._close()

    def _close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _in_use(self, where: str) -> str:
        who, own = "another process, which reads it", ""
        with contextlib.suppress(OSError, ValueError, KeyError):
            holder = json.loads(self._file.read_text())
            who = f"process {holder['pid']} on {holder['host']} (since {holder['since']})"
            if (holder["pid"], holder["host"]) == (os.getpid(), platform.node()):
                own = " That is this process: delete the state that uses it."
        return (
            f"{where}: {self._file.parent} is in use by {who}, and two runs would overwrite each other's state.{own} "
            "Pass another folder, or end that process. To read a state while a run goes on, take a snapshot of it."
        )


def _after_fork() -> None:
    """Without this a forked child keeps the lock of a parent that was killed."""
    for lock in list(_HELD):
        lock._close()


os.register_at_fork(after_in_child=_after_fork)
