"""While a group trains: a process that dies or fails ends all others at once, and each says which one it was.

Without this the others wait in a collective for a process that is gone. On the CPU that fails soon, but names an
address and not a process; on GPUs it waits for ever, and JAX ends it after its heartbeat with an abort. Here process 0
has a connection to each of the others (`rollcall.py`), and the kernel closes it with the process. A thread of process 0
reads them all and tells the rest; a thread of the others reads the one to process 0.

JAX's heartbeat stays beneath this: it ends the group for a process that is there but does not run (stopped, or on a
host that cannot be reached).
"""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax

from train.processes.group import Group
from train.processes.link import Link
from train.processes.rollcall import named

TOGETHER = 0.5  # seconds in which several processes of one host die
PARTING = 5.0  # seconds that process 0 waits for the others to have read why they end


def of_a_collective(error: BaseException | None) -> bool:
    """True for an error whose reason may be another process: of JAX's runtime, or with a transport's name in it.

    Of a function that was compiled before, jax 0.10.2 raises a plain ValueError ("UNKNOWN: Gloo AllGather failed").
    """
    while error is not None:
        text = str(error)
        runtime = isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in text
        if runtime or any(
            word in text for word in ("Gloo ", "NCCL ", "UNAVAILABLE: ", "Connection reset by peer")
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


class Watch:
    """One process's view of its group.

    Args:
      group: of this process.
      links: to the others, as `rollcall.meet` returns them.
      where: host and pid of each process.
      heartbeat: seconds after which JAX takes a process for gone.
      remedy: called when the group ends early; what to do next, as a sentence.
    """

    def __init__(
        self,
        group: Group,
        links: dict[int, Link],
        where: dict[int, str],
        *,
        heartbeat: float,
        remedy: Callable[[], str],
    ):
        self.group, self.links, self.where = group, links, where
        self.heartbeat, self.remedy = heartbeat, remedy
        self._done, self._left, self._ending = threading.Event(), threading.Event(), threading.Lock()

    def start(self) -> None:
        """From here on this process ends when another one does."""
        # JAX aborts when process 0 is gone, and from a thread where no Python runs. Asleep for six seconds (the
        # number of the signal) it leaves `_follow` the time to say so and to end this process in order.
        libc = ctypes.CDLL(None)
        libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
        libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))
        target = self._follow if self.group.me else self._lead
        threading.Thread(target=target, name="watch", daemon=True).start()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.leave()
        else:
            self.fail(error)

    def leave(self) -> None:
        """Returns when all processes have come here: none of them ends before, and none needs another any more."""
        if self.group.me:
            self.links[0].send(done=True)
        self._done.set()
        self._left.wait()
        signal.signal(signal.SIGABRT, signal.SIG_DFL)

    def fail(self, error: BaseException) -> None:
        """Ends this process with an error, and all others with the news; does not return.

        Args:
          error: what went wrong here: `SystemExit` with a text for a person, any other with its traceback. A failed
            collective has its reason in another process, if one is gone: the watch says so within the heartbeat.
        """
        told = isinstance(error, SystemExit)
        text = str(error.code) if told else "".join(traceback.format_exception(error)).rstrip()
        self.say(text)
        if of_a_collective(error):
            self.say(
                f"A process that is gone is named within {self.heartbeat:g} s; else the error is of this one."
            )
            time.sleep(self.heartbeat)
        elif not told:
            time.sleep(2 * TOGETHER)  # any error may come from what a process that dies leaves undone
        short = text.splitlines()[0 if told else -1][:500]
        if self.group.me:
            self.links[0].send(failed=short)
            time.sleep(PARTING)  # process 0 answers by ending the group
            self._end("process 0 does not answer")
        self._end(f"process 0 ({self.where[0]}) failed: {short}", tell=self.links)

    def say(self, text: str) -> None:
        """To stderr, every line with this process's number; not through buffers that another thread may hold."""
        os.write(2, "".join(f"[process {self.group.me}] {line}\n" for line in text.splitlines()).encode())

    def _end(self, text: str, tell: dict[int, Link] | None = None) -> None:
        """Ends this process, once, with the reason; process 0 after all others have it."""
        if not self._ending.acquire(blocking=False):
            time.sleep(60)  # another thread is at it
        for link in (tell or {}).values():
            link.send(stop=text)
        self.say(text)
        try:
            self.say(self.remedy())
        except Exception as error:  # the disk may be what is gone
            self.say(f"what is saved could not be read: {error}")
        until = time.monotonic() + PARTING
        for link in (tell or {}).values():
            try:
                while link.receive(timeout=max(0.01, until - time.monotonic())) is not None:
                    pass
            except (TimeoutError, ValueError):
                pass
        os._exit(1)  # without the handlers of exit: JAX's waits for the process that is gone

    def _follow(self) -> None:
        while True:
            messages = self._read(self.links[0])
            if messages is None:
                self._end(f"process 0 ({self.where[0]}) is gone: it was killed, or its host is lost")
            for message in messages or ():
                if "stop" in message:
                    self._end(message["stop"])
                if "go" in message:
                    self._left.set()
                    return

    def _lead(self) -> None:
        done: set[int] = set()
        with selectors.DefaultSelector() as ready:
            for me, link in self.links.items():
                ready.register(link, selectors.EVENT_READ, me)
            while not (self._done.is_set() and len(done) == len(self.links)):
                self._listen(ready, done, 0.2)
        for link in self.links.values():
            link.send(go=True)
        self._left.set()

    def _listen(self, ready: Any, done: set[int], seconds: float) -> None:
        """One look at all links; ends the group when one of them is closed, or tells of a failure."""
        gone: list[int] = []
        failed = None
        until = None
        while until is None or time.monotonic() < until:
            for key, _ in ready.select(seconds if until is None else until - time.monotonic()):
                messages = self._read(key.fileobj)
                if messages is None:
                    ready.unregister(key.fileobj)
                    gone.append(key.data)
                for message in messages or ():
                    if "done" in message:
                        done.add(key.data)
                    if "failed" in message:
                        failed = f"process {key.data} ({self.where[key.data]}) failed: {message['failed']}"
            if failed:
                self._end(failed, tell=self.links)
            if not gone:
                return
            until = time.monotonic() + TOGETHER if until is None else until
        who = f"{named(gone)} ({'; '.join(self.where[i] for i in sorted(gone)[:4])})"
        verb = "is" if len(gone) == 1 else "are"
        self._end(
            f"{who} {verb} gone: killed, or the host is lost",
            tell={i: link for i, link in self.links.items() if i not in gone},
        )

    @staticmethod
    def _read(link: Any) -> list[dict[str, Any]] | None:
        try:
            return link.receive()
        except ValueError:
            return None
