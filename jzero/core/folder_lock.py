"""One writer per folder, on one host or on several: a lock file that names its holder and does not outlive it.

[Note: when a holder is dead]
On the holder's machine the kernel knows: the holder has a `flock` on the file, which ends with its process and which
nobody can take from a live one, even if it hangs. Hosts may not see each other's `flock`, and a file server may keep
that of a host which is gone. So the holder also renews the file. For other machines, and on file systems without
`flock`, the holder is dead once the time of the file has not changed for 60 s. Both times are those of the file system
(that of the lock, and of a file that the observer writes beside it), so the clocks of hosts need not agree. An observer
waits until the lock is renewed or stale: a job that is queued again on another host starts by itself.

[Note: one observer at a time]
Several observers may find the same stale lock. The one that gets the `flock` takes it over in place. A lock that a file
server keeps for a dead host is removed instead. An observer that looked at it long ago must not remove a newer one, so
each looks again while it alone holds a lock on the folder. After locking a file, an observer checks that the name still
refers to that file. It looks twice at a file of another process that names no holder yet. If nothing can be locked, the
process that takes over a stale lock checks after a moment that the file still contains what it wrote. Two hosts that
look within the same millisecond may both win; `check` then raises on one of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import platform
import sys
import threading
import time
import uuid
import weakref
from pathlib import Path

from jzero.core import durable

NAME = "writer.lock"
RENEWED = 10.0  # seconds between two renewals
STALE = 60.0  # seconds without one, of a holder on another machine
LOOK = 0.5  # seconds between two looks at a lock
_HELD: weakref.WeakSet[FolderLock] = weakref.WeakSet()


class FolderInUse(RuntimeError):
    """Another run is writing to a folder."""


@dataclasses.dataclass(frozen=True)
class Holder:
    """Who holds a lock: host, machine, process, and a name that no other lock has."""

    host: str
    machine: str
    pid: int
    token: str
    since: str

    @classmethod
    def me(cls) -> Holder:
        """The holder for this process, with a new token."""
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        return cls(platform.node(), _machine(), os.getpid(), uuid.uuid4().hex, since)

    @classmethod
    def of(cls, text: bytes) -> Holder | None:
        """The holder that the text of a lock names, or None."""
        try:
            fields = json.loads(text)
            return cls(**{f.name: fields[f.name] for f in dataclasses.fields(cls)})
        except (ValueError, KeyError, TypeError):
            return None

    @classmethod
    def read(cls, file: Path) -> Holder | None:
        """The holder that a file names; None if it cannot be read."""
        try:
            return cls.of(file.read_bytes())
        except OSError:
            return None

    @property
    def here(self) -> bool:
        """True on this machine, whose kernel knows whether the process lives."""
        return self.machine == _machine()


class FolderLock:
    """The lock of a folder.

    Args:
      folder: made if it does not exist.
      name: of the file.
      where, keeps, own, advice: for messages: the caller, what the folder holds, what to do if this process has the
        lock itself, and what to do if another one has it.
      renewed: seconds between two renewals.
      stale: seconds without a renewal after which a lock of another machine is taken over.
    """

    def __init__(
        self,
        folder: Path,
        name: str = NAME,
        *,
        where: str = "jzero",
        keeps: str = "files",
        own: str = "",
        advice: str = "",
        renewed: float = RENEWED,
        stale: float = STALE,
    ):
        self.file, self.me = folder / name, Holder.me()
        self._where, self._keeps, self._own, self._advice = where, keeps, own, advice
        self._renewed, self._stale = renewed, stale
        self._handle = -1
        self._released = threading.Event()

    def acquire(self, *, shared: bool = False, wait: bool = False) -> None:
        """Takes the lock, and renews it until `release`.

        Args:
          shared: others may share it, and nobody may write. A folder that cannot be written to is read without a lock.
          wait: wait as long as another process has it.

        Raises:
          FolderInUse: a live process has it; names host and process.
          OSError: nothing can be written there.
        """
        if not shared:
            durable.make_folder(self.file.parent)
        _HELD.add(self)
        try:
            locked = self._taken(shared, wait)
            if not shared:
                text = json.dumps(dataclasses.asdict(self.me)).encode()
                os.pwrite(self._handle, text, 0)
                os.ftruncate(self._handle, len(text))
                os.fsync(self._handle)  # after a power failure it is whole
                if not locked:
                    time.sleep(LOOK)
                    self.check()
        except BaseException:
            self._close()
            raise
        if not shared:
            threading.Thread(target=self._renew, daemon=True, name="jzero folder lock").start()

    def check(self) -> None:
        """Raises FolderInUse if another process has the lock now: it was not renewed for too long, or was removed."""
        holder = Holder.read(self.file)
        if holder != self.me:
            raise FolderInUse(
                f"{self._where}: this run has lost its lock on {self.file.parent}: it was not renewed for "
                f"{self._stale:.0f} s, or removed. {self._in_use(holder) if holder else 'Open the folder again.'}"
            )

    def release(self) -> None:
        """Removes the lock; a process that was forked from the holder leaves it alone."""
        if os.getpid() == self.me.pid and not self._released.is_set():
            self._released.set()
            if Holder.read(self.file) == self.me:
                self.file.unlink(missing_ok=True)
            self._close()

    def _taken(self, shared: bool, wait: bool) -> bool:
        """Returns once the lock may be taken: True if the kernel has locked the file, False if it cannot."""
        told, first = False, None
        while True:
            made, got = self._open(shared)
            if self._handle < 0:
                return False
            text, renewal = os.pread(self._handle, 4096, 0), os.fstat(self._handle).st_mtime
            holder, seen = Holder.of(text), (text, renewal)
            known = True  # whether it lives
            if made or not text.endswith(b"}"):  # another one that is about to write does so in a moment
                free = made or shared or first == seen
            elif got is not None and holder is not None and holder.here:
                free = got
            else:
                free, known = self._now() - renewal > self._stale, False
            live = known and got is False
            if free and not live:
                if got is not False:
                    return bool(got)
                self._remove(holder, renewal)
                continue
            self._close()
            if not wait and (live or first not in (None, seen)):
                raise FolderInUse(self._in_use(holder))
            if not known and not told:
                self._say(holder)
                told = True
            first = first or seen
            time.sleep(LOOK)

    def _open(self, shared: bool) -> tuple[bool, bool | None]:
        """Opens the file and locks it.

        Returns:
          Whether this call made it; and True: it has the lock, False: another process has it, None: there are no locks.
        """
        flags = os.O_RDONLY if shared else os.O_RDWR
        while True:
            self._close()
            made = False
            try:
                with contextlib.suppress(FileExistsError):
                    self._handle = os.open(self.file, flags | os.O_CREAT | os.O_EXCL, 0o644)
                    made = True
                if not made:
                    self._handle = os.open(self.file, flags)
                got = _flock(self._handle, shared=shared)
                if os.path.samestat(os.fstat(self._handle), self.file.stat()):
                    return made, got
            except FileNotFoundError:
                if not self.file.parent.is_dir():
                    raise
                continue  # removed between the two looks
            except OSError:
                if not shared:
                    raise
                return False, None

    def _close(self) -> None:
        if self._handle >= 0:
            handle, self._handle = self._handle, -1
            os.close(handle)

    def _now(self) -> float:
        """The time of the file system."""
        probe = self.file.with_name(f".{self.file.name}.{self.me.token}")
        try:
            probe.touch()
            return probe.stat().st_mtime
        finally:
            probe.unlink(missing_ok=True)

    def _remove(self, stale: Holder | None, renewal: float | None) -> None:
        """Removes a stale lock; see [Note: one observer at a time]."""
        folder = os.open(self.file.parent, os.O_RDONLY)
        try:
            _flock(folder, wait=True)
            if (Holder.read(self.file), _time_of(self.file)) == (stale, renewal):
                self.file.unlink(missing_ok=True)
        finally:
            os.close(folder)

    def _renew(self) -> None:
        while not self._released.wait(self._renewed):
            if Holder.read(self.file) not in (self.me, None):
                return  # `check` tells; what cannot be read now may be readable the next time
            with contextlib.suppress(OSError):
                os.utime(self.file)  # the time of the file system, not of this host

    def _in_use(self, holder: Holder | None) -> str:
        who, own = "another process, which reads it or has just begun", ""
        if holder is not None:
            who = f"process {holder.pid} on {holder.host} (since {holder.since})"
            if (holder.machine, holder.pid) == (self.me.machine, os.getpid()):
                own = f" That is this process: {self._own}."
        return (
            f"{self._where}: {self.file.parent} is in use by {who}, and two runs would overwrite each other's "
            f"{self._keeps}.{own} Pass another folder, or end that process. {self._advice}"
        )

    def _say(self, holder: Holder | None) -> None:
        who = f"process {holder.pid} on {holder.host}" if holder else "another process"
        print(
            f"{self._where}: {self.file.parent} is locked by {who}. Waiting up to {self._stale:.0f} s to see "
            "whether it is alive.",
            file=sys.stderr,
            flush=True,
        )


def _flock(handle: int, *, shared: bool = False, wait: bool = False) -> bool | None:
    """True if the kernel has locked an open file, False if another process has it locked, None without locks."""
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _time_of(file: Path) -> float | None:
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return None


def _machine() -> str:
    """An id that all processes under one kernel share, those in containers too: that of one boot of a machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


def _after_fork() -> None:
    """Closes the locks in a forked child, which would keep them after the parent is killed."""
    for lock in list(_HELD):
        lock._close()


os.register_at_fork(after_in_child=_after_fork)
