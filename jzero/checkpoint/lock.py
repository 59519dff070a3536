"""One writer per folder of checkpoints: a lock file, renewed while its holder lives, that a dead holder does not keep.

[Note: when a lock is stale]
If host, boot and process namespace are the observer's, it looks for the process: it is gone, or its number is that of a
process which started at another time. Elsewhere the time of the lock must stand still for 60 s. Both times come from
the file system (the lock's, and that of a file which the observer writes beside it): clocks of hosts need not agree. An
observer waits until the lock is renewed, or stale: a job that is queued again on another host starts by itself.

[Note: one observer at a time]
Several observers may find the same stale lock. One that looked at it long ago must not remove what another has put in
its place since, so each looks again and removes while it alone holds the folder (`flock`, which the kernel ends with
the process). Where a file system has no such lock, two observers that look within the same millisecond may both win.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from jzero.core import durable

NAME = "writer.lock"
RENEWED = 10.0  # seconds between two renewals
STALE = 60.0  # seconds without one, of a holder on another host
LOOK = 0.5  # seconds between two looks at a lock that may be stale


class FolderInUse(RuntimeError):
    """Another run is writing to a folder of checkpoints."""


@dataclasses.dataclass(frozen=True)
class Holder:
    """Who holds a lock: host, process, when the process started, and a name that no other lock has."""

    host: str
    place: str
    pid: int
    started: str
    token: str
    since: str

    @classmethod
    def me(cls) -> Holder:
        """The holder that this process is, with a new token."""
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        return cls(platform.node(), _place(), os.getpid(), _started(os.getpid()), uuid.uuid4().hex, since)

    @classmethod
    def read(cls, file: Path) -> Holder | None:
        """The holder that a lock names; None where nothing can be read."""
        try:
            fields = json.loads(file.read_text())
            return cls(**{f.name: fields[f.name] for f in dataclasses.fields(cls)})
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @property
    def here(self) -> bool:
        """A process that this one can see."""
        return (self.host, self.place) == (platform.node(), _place())

    @property
    def alive(self) -> bool:
        """Of a holder here: its process is there, and is the one that took the lock."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # there, and another user's
            pass
        return _started(self.pid) == self.started


class WriterLock:
    """The lock of a folder.

    Args:
      folder: made if it is not there.
      renewed: seconds between two renewals.
      stale: seconds without a renewal after which a lock of another host is taken over.
    """

    def __init__(self, folder: Path, *, renewed: float = RENEWED, stale: float = STALE):
        self.file, self.me = folder / NAME, Holder.me()
        self._renewed, self._stale = renewed, stale
        self._mine = folder / f".{NAME}.{self.me.token}"
        self._released = threading.Event()

    def acquire(self) -> None:
        """Takes the lock, and renews it until `release`.

        Raises:
          FolderInUse: a live process has it; names host and process.
        """
        told, first = False, None
        durable.make_folder(self.file.parent)
        while True:
            now = self._write()
            try:
                if self._link():
                    break
                holder, renewal = Holder.read(self.file), _time_of(self.file)
                if renewal is None:
                    continue  # released between the two looks
                first = first or (holder, renewal)
                if not self._abandoned(holder, now - renewal):
                    if (holder is not None and holder.here) or first != (holder, renewal):
                        raise FolderInUse(self._in_use(holder))
                    if not told:
                        self._say(holder)
                        told = True
                    time.sleep(LOOK)
                    continue
                self._remove(holder, renewal)
            finally:
                self._mine.unlink(missing_ok=True)
        threading.Thread(target=self._renew, daemon=True, name="jzero writer lock").start()

    def check(self) -> None:
        """Raises FolderInUse where the lock is no longer this one's: it stood still for too long, or was removed."""
        holder = Holder.read(self.file)
        if holder != self.me:
            raise FolderInUse(
                f"jzero.checkpoint.Steps: this run has lost its lock on {self.file.parent}: it was not renewed for "
                f"{self._stale:.0f} s, or removed. {self._in_use(holder) if holder else 'Open the folder again.'}"
            )

    def release(self) -> None:
        """Removes the lock; a process that was forked from the holder leaves it alone."""
        if os.getpid() == self.me.pid and not self._released.is_set():
            self._released.set()
            if Holder.read(self.file) == self.me:
                self.file.unlink(missing_ok=True)

    def _write(self) -> float:
        """Writes what is to become the lock; returns what time the file system has."""
        self._mine.write_text(json.dumps(dataclasses.asdict(self.me)))
        return self._mine.stat().st_mtime

    def _link(self) -> bool:
        """Makes the lock, with its contents, unless there is one."""
        try:
            os.link(self._mine, self.file)
        except FileExistsError:
            return False
        except OSError:  # no hard links here: made empty, and then filled
            return self._create()
        return True

    def _create(self) -> bool:
        try:
            with open(self.file, "x") as file:
                file.write(self._mine.read_text())
        except FileExistsError:
            return False
        return True

    def _abandoned(self, holder: Holder | None, age: float) -> bool:
        return not holder.alive if holder is not None and holder.here else age > self._stale

    def _remove(self, stale: Holder | None, renewal: float) -> None:
        """Takes a stale lock away; see [Note: one observer at a time]."""
        with _alone(self.file.parent):
            if (Holder.read(self.file), _time_of(self.file)) == (stale, renewal):
                self.file.unlink(missing_ok=True)

    def _renew(self) -> None:
        while not self._released.wait(self._renewed):
            if Holder.read(self.file) not in (self.me, None):
                return  # `check` tells; what cannot be read now may be readable the next time
            with contextlib.suppress(OSError):
                os.utime(self.file)  # the time of the file system, not of this host

    def _in_use(self, holder: Holder | None) -> str:
        folder = self.file.parent
        who = f"process {holder.pid} on {holder.host} (since {holder.since})" if holder else "another process"
        own = (
            " That is this process: close the Steps that wrote there." if holder and self._own(holder) else ""
        )
        return (
            f"{folder} is being written to by {who}, and two runs would overwrite each other's checkpoints.{own} Pass "
            f"another folder, or end that process. To read, open the folder without saving; if you are certain that "
            f"it is gone, remove {self.file}."
        )

    def _own(self, holder: Holder) -> bool:
        return holder.here and holder.pid == os.getpid()

    def _say(self, holder: Holder | None) -> None:
        who = f"process {holder.pid} on {holder.host}" if holder else "another process"
        print(
            f"jzero.checkpoint: {self.file.parent} is locked by {who}. Waiting up to {self._stale:.0f} s to see "
            "whether it is alive.",
            file=sys.stderr,
            flush=True,
        )


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Holds a folder against the other observers of its lock, where the file system can."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _time_of(file: Path) -> float | None:
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return None


def _place() -> str:
    """What processes share that see each other's numbers: one boot of one machine, one namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> str:
    """When a process started, in ticks since the boot: with the number it names one process. Empty if it is unknown.

    Also empty for a process that has ended but that its parent has not yet waited for (a zombie).
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def everywhere(lock: WriterLock) -> None:
    """Process 0 takes the lock for all; where it cannot, all raise.

    Raises:
      FolderInUse: another run has it.
    """
    error: FolderInUse | OSError | None = None
    if jax.process_index() == 0:
        try:
            lock.acquire()
        except (FolderInUse, OSError) as found:
            error = found
    failed = error is not None
    if jax.process_count() > 1:
        failed = bool(multihost_utils.broadcast_one_to_all(np.int32(failed)))
    if failed and error is None:
        error = FolderInUse(f"{lock.file.parent}: process 0 could not lock the folder; its error says why.")
    if error is not None:
        raise error
