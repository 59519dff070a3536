"""Processes start together, with the same settings, and end together; all through JAX's coordination service.

JAX aborts every process when one of them stops sending heartbeats, or when the service, which is in process 0, is gone.
Here a thread asks the service who is alive, and the handler of that abort says what to do next.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import jax
from jax._src import distributed
from jax._src.lib import _jax

from train.processes.group import Group

LOOK, PARTING = 1.0, 4.0  # seconds between two looks at the others; for them to read why a process fails
SHOWN = 8  # processes or differences in a message
OF_OTHERS = ("JaxRuntimeError", "Gloo ", "NCCL ", "UNAVAILABLE: ", "Connection reset by peer")  # may be their fault


class Refused(ValueError):
    """The processes do not fit together, or one of them cannot run."""


def join(
    group: Group, facts: Mapping[str, Any], *, timeout: float, heartbeat: int, remedy: Callable[[], str],
    error: str | None = None,
) -> Watch:  # fmt: skip
    """Starts JAX's runtime for a group of processes, which must agree; before JAX is first used.

    Args:
      group: of this process.
      facts: what must be the same in all processes, as JSON: settings, versions, data.
      timeout: seconds to wait for the others; this process ends with status 1 if some do not come.
      heartbeat: seconds without a sign of a process after which the others end.
      remedy: called when the group ends early; what to do next, as a sentence.
      error: why this process cannot run. The others are told, and end too.

    Returns:
      The watch. As a context, it ends the group together, in order or with the error of one.

    Raises:
      Refused: processes differ, or one cannot run, or process 0's port is taken.
    """
    try:  # jaxlib 0.10.2 crashes where the port is taken, and shares it with another process 0
        if group.me == 0:
            socket.create_server(("", int(group.coordinator.rpartition(":")[2]))).close()
    except OSError as taken:
        raise Refused(f"--coordinator {group.coordinator}: {os.strerror(taken.errno or 0)}. Pass another.") from None
    watch = Watch(group, heartbeat, remedy)
    watch.lost = (
        f"not all {group.processes} processes came to {group.coordinator} within {timeout:g} s. JAX names two missing "
        "ones (tasks) above, unless process 0 is, or a `newer incarnation`: a second process with this number. See "
        "their logs, or give them longer: --start-timeout."
    )
    service = _jax.get_distributed_runtime_service  # without a limit of its own JAX names nobody
    limited = lambda *given, **more: service(*given, cluster_register_timeout=int(timeout), **more)  # noqa: E731
    times: Any = {"heartbeat_timeout_seconds": heartbeat, "shutdown_timeout_seconds": heartbeat}
    who = (group.coordinator, group.processes, group.me, group.local_devices, "deactivate")  # JAX's own detection
    with mock.patch.object(_jax, "get_distributed_runtime_service", limited):
        jax.distributed.initialize(*who, initialization_timeout=int(timeout) + 1, **times)
    watch.start(_agree(group, facts, error, int(timeout * 1000)))
    return watch


def _agree(group: Group, facts: Mapping[str, Any], error: str | None, ms: int) -> list[str]:
    """Host and pid of each process, once process 0 has compared the facts of all."""
    client: Any = distributed.global_state.client
    mine: dict[str, Any] = {"where": f"{os.uname().nodename}, pid {os.getpid()}", "error": error}
    mine["facts"] = {"number of processes": group.processes, **facts}
    client.key_value_set(f"jzero/facts/{group.me}", json.dumps(mine))
    if group.me == 0:
        said = [json.loads(client.blocking_key_value_get(f"jzero/facts/{i}", ms)) for i in range(group.processes)]
        client.key_value_set("jzero/verdict", json.dumps([unfit(said), [x["where"] for x in said]]))
    lines, where = json.loads(client.blocking_key_value_get("jzero/verdict", ms))
    if lines:
        jax.distributed.shutdown()  # when all have read it: process 0 has the service
        raise Refused("\n".join(lines[:SHOWN] + [f"and {len(lines) - SHOWN} more"] * (len(lines) > SHOWN)))
    return where


def unfit(said: Sequence[Mapping[str, Any]]) -> list[str]:
    """What keeps processes from running together: the errors of some, else a line for each fact that differs."""
    errors = [f"process {i} ({x['where']}): {x['error']}" for i, x in enumerate(said) if x["error"]]
    names = dict.fromkeys(name for x in said for name in x["facts"])
    lines = [_difference(name, [str(x["facts"].get(name, "nothing")) for x in said]) for name in names]
    return errors or [line for line in lines if line]


def _difference(name: str, values: Sequence[str]) -> str:
    """What each process has, if that is not the same: `... lr: 0.1 in processes 0, 2, 0.2 in process 1`."""
    who = {value: [i for i, x in enumerate(values) if x == value] for value in dict.fromkeys(values)}
    each = ", ".join(f"{value} in {named(processes)}" for value, processes in who.items())
    return f"the processes differ in {name}: {each}" if len(who) > 1 else ""


def named(who: Sequence[int]) -> str:
    """`process 2`, or `processes 1, 2, 3`; of many the first eight."""
    more = f" and {len(who) - SHOWN} more" if len(who) > SHOWN else ""
    return f"process{'es' if len(who) > 1 else ''} {', '.join(map(str, who[:SHOWN]))}{more}"


def check_devices(devices: Sequence[Any]) -> None:
    """Raises ValueError where `devices`, those of all processes, are not the same in each."""
    kinds: dict[int, Counter[str]] = {}
    for d in devices:
        kinds.setdefault(d.process_index, Counter())[d.device_kind] += 1
    texts = [" and ".join(f"{n} x {kind}" for kind, n in sorted(kinds[i].items())) for i in sorted(kinds)]
    if text := _difference("their devices", texts):
        raise ValueError(f"{text}. Each must have the same.")


class Watch(contextlib.AbstractContextManager):
    """One process's view of its group; it takes over SIGABRT, which JAX raises where no Python runs."""

    def __init__(self, group: Group, heartbeat: int, remedy: Callable[[], str]):
        self.group, self.heartbeat, self.remedy = group, heartbeat, remedy
        self.lost, self.where = "", []  # what an abort means; host and pid of each process
        self._done, self._ending = threading.Event(), threading.Lock()
        self._looking = threading.Thread(target=self._look, name="watch", daemon=True)
        self._handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._aborted)  # kept: C has a pointer to it
        ctypes.CDLL(None).signal(signal.SIGABRT, self._handler)

    def start(self, where: list[str]) -> None:
        """From here on this process ends when another one does; `where`: host and pid of each."""
        self.where, self.lost = where, f"JAX says above which task is gone, or it is process 0 ({where[0]}): no service"
        self._client: Any = distributed.global_state.client
        self._looking.start()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """All come here before one ends, since process 0 has the service; or the error of one ends all."""
        try:
            if error is None:
                self._client.wait_at_barrier("jzero/end", 7 * 24 * 3600 * 1000)
                self._done.set()
                jax.distributed.shutdown()
                self._looking.join()
                signal.signal(signal.SIGABRT, signal.SIG_DFL)
                return
        except RuntimeError as lost:
            error = lost
        told = isinstance(error, SystemExit)  # a text for a person
        text = str(error.code) if told else "".join(traceback.format_exception(error)).rstrip()
        self.say(text)
        if not told and any(x in text for x in OF_OTHERS) and "RESOURCE_EXHAUSTED" not in text:
            self.say(f"A process that is gone is named within {self.heartbeat + 6} s; else this one is the cause.")
            time.sleep(self.heartbeat + 6)  # `_look` or JAX ends this process
        self.lost = ""  # process 0 may end before
        with contextlib.suppress(RuntimeError):  # or be gone
            self._client.key_value_set(f"jzero/failed/{self.group.me}", text.splitlines()[0 if told else -1][:500])
        time.sleep(PARTING)
        self._end("")

    def say(self, text: str) -> None:
        """To stderr, every line with this process's number; not through buffers that another thread may hold."""
        os.write(2, "".join(f"[process {self.group.me}] {line}\n" for line in text.splitlines()).encode())

    def _end(self, text: str) -> None:
        if not self._ending.acquire(blocking=False):
            time.sleep(60)  # another thread is at it
        self.say(text)
        with contextlib.suppress(Exception):  # the disk may be what is gone
            self.say(self.remedy())
        os._exit(1)  # without the handlers of exit: JAX's waits for the process that is gone

    def _aborted(self, number: int) -> None:
        """In the thread that JAX aborts in. Has it brought `_look` an answer before, that one is the reason."""
        time.sleep(2 * LOOK if self.where else 0)
        self._end(self.lost)

    def _look(self) -> None:
        """The service answers when all that are alive have asked; JAX's abort holds up the answers after it."""
        everyone = list(range(self.group.processes))
        with contextlib.suppress(RuntimeError):  # the service is gone: JAX aborts, or all are done
            while not self._done.wait(LOOK):
                for key, why in self._client.key_value_dir_get("jzero/failed"):
                    if (me := int(key.rpartition("/")[2])) != self.group.me:
                        self._end(f"process {me} ({self.where[me]}) failed: {why}")
                live = self._client.get_live_nodes(everyone)
                gone = [i for i in everyone if i not in live]
                if gone and not self._done.is_set():
                    where = "; ".join(self.where[i] for i in gone[:SHOWN])
                    self._end(f"{named(gone)} ({where}) gone: killed, stopped, or on a lost host")
