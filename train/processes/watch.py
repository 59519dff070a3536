"""Processes start together, with the same settings, and end together; all through JAX's coordination service.

JAX aborts every process when one of them stops sending heartbeats, or when the service, which is in process 0, is gone.
Here a thread asks the service who is alive, and the handler of that abort says what to do next.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
    group: Group,
    facts: Mapping[str, Any],
    *,
    timeout: float,
    heartbeat: int,
    remedy: Callable[[], str],
    error: str | None = None,
) -> Watch:
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
      Refused: processes differ, or one cannot run; or this one cannot use its port.
    """
    watch = Watch(group, heartbeat, remedy)
    watch.lost = (
        f"the {group.processes} processes did not come together within {timeout:g} s at {group.coordinator}. JAX names "
        "two of those that are missing above (tasks), unless process 0 is. A `newer incarnation` is a second process "
        "with this number. See their logs, or give them longer: --start-timeout."
    )
    service = _jax.get_distributed_runtime_service  # without a limit of its own JAX names nobody
    _jax.get_distributed_runtime_service = functools.partial(service, cluster_register_timeout=int(timeout))
    who = (group.coordinator, group.processes, group.me, group.local_devices, "deactivate")  # JAX's own detection
    try:
        jax.distributed.initialize(
            *who, initialization_timeout=int(timeout) + 1,
            heartbeat_timeout_seconds=heartbeat, shutdown_timeout_seconds=heartbeat,
        )  # fmt: skip
        watch.start(_agree(group, facts, error, int(timeout * 1000)))
    except (jax.errors.JaxRuntimeError, Refused) as failed:
        watch.close()
        port = "If the port is taken, give another: --coordinator, or JAX_COORDINATOR_PORT under srun and mpirun."
        started = isinstance(failed, Refused)
        raise failed if started else Refused(f"cannot start at {group.coordinator}: {failed}. {port}") from None
    finally:
        _jax.get_distributed_runtime_service = service
    return watch


def _agree(group: Group, facts: Mapping[str, Any], error: str | None, ms: int) -> list[str]:
    """Host and pid of each process, once process 0 has compared the facts of all."""
    client: Any = distributed.global_state.client
    mine: dict[str, Any] = {"where": f"{os.uname().nodename}, pid {os.getpid()}", "error": error}
    mine["facts"] = {"number of processes": group.processes, **facts}
    client.key_value_set(f"jzero/facts/{group.me}", json.dumps(mine))
    if group.me == 0:
        keys = [f"jzero/facts/{i}" for i in range(group.processes)]
        said = [json.loads(client.blocking_key_value_get(key, ms)) for key in keys]
        client.key_value_set("jzero/verdict", json.dumps([unfit(said), [x["where"] for x in said]]))
    lines, where = json.loads(client.blocking_key_value_get("jzero/verdict", ms))
    if lines:
        raise Refused("\n".join(lines[:SHOWN] + [f"and {len(lines) - SHOWN} more"] * (len(lines) > SHOWN)))
    return where


def unfit(said: Sequence[Mapping[str, Any]]) -> list[str]:
    """What keeps processes from running together: the errors of some, else a line for each fact that differs."""
    errors = [f"process {i} ({x['where']}): {x['error']}" for i, x in enumerate(said) if x["error"]]
    names = dict.fromkeys(name for x in said for name in x["facts"])
    values = {name: [str(x["facts"].get(name, "nothing")) for x in said] for name in names}
    return errors or [f"the processes differ in {n}: {_owners(v)}" for n, v in values.items() if len(set(v)) > 1]


def _owners(values: Sequence[str]) -> str:
    """`0.1 in processes 0, 2, 0.2 in process 1`, from the value of each process."""
    who = {value: [i for i, x in enumerate(values) if x == value] for value in dict.fromkeys(values)}
    return ", ".join(f"{value} in {named(processes)}" for value, processes in who.items())


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
    if len(set(texts)) > 1:
        raise ValueError(f"the processes differ in their devices: {_owners(texts)}. Each must have the same.")


class Watch(contextlib.AbstractContextManager):
    """One process's view of its group; it takes over SIGABRT, which JAX raises where no Python runs."""

    def __init__(self, group: Group, heartbeat: float, remedy: Callable[[], str]):
        self.group, self.heartbeat, self.remedy = group, heartbeat, remedy
        self.lost, self.where = "", []  # what an abort means; host and pid of each process
        self._done, self._ending = threading.Event(), threading.Lock()
        self._looking = threading.Thread(target=self._look, name="watch", daemon=True)
        self._handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._aborted)
        ctypes.CDLL(None).signal(signal.SIGABRT, self._handler)

    def start(self, where: list[str]) -> None:
        """From here on this process ends when another one does; `where`: host and pid of each."""
        self.where, self.lost = where, f"process 0 ({where[0]}) is gone: killed, or its host is lost"
        self._client: Any = distributed.global_state.client
        self._looking.start()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """All come here before one ends, since process 0 has the service; or the error of one ends all.

        A failed collective has its reason in another process, if one is gone: `_look` or JAX ends this one then.
        """
        try:
            if error is None:
                self._client.wait_at_barrier("jzero/end", 7 * 24 * 3600 * 1000)
                return self.close()
        except RuntimeError as lost:
            error = lost
        told = isinstance(error, SystemExit)
        text = str(error.code) if told else "".join(traceback.format_exception(error)).rstrip()
        self.say(text)
        if not told and any(x in text for x in OF_OTHERS) and "RESOURCE_EXHAUSTED" not in text:
            seconds = self.heartbeat + 6
            self.say(f"A process that is gone is named within {seconds:g} s; else the error is of this one.")
            time.sleep(seconds)
        with contextlib.suppress(RuntimeError):  # process 0 may be gone
            short = text.splitlines()[0 if told else -1][:500]
            self._client.key_value_set(f"jzero/failed/{self.group.me}", short)
        time.sleep(PARTING)
        self._end("")

    def close(self) -> None:
        """Leaves JAX's runtime, in order."""
        self._done.set()
        jax.distributed.shutdown()
        if self.where:
            self._looking.join()
        signal.signal(signal.SIGABRT, signal.SIG_DFL)

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
        """The service answers when all that are alive have asked: after the heartbeat of one that is not.

        That answer is the last: JAX aborts in the thread that would bring more.
        """
        everyone = range(self.group.processes)
        with contextlib.suppress(RuntimeError):  # the service is gone: JAX aborts, or all are done
            while not self._done.wait(LOOK):
                for key, why in self._client.key_value_dir_get("jzero/failed"):
                    me = int(key.rpartition("/")[2])
                    if me != self.group.me:
                        self._end(f"process {me} ({self.where[me]}) failed: {why}")
                live = self._client.get_live_nodes(list(everyone))
                gone = [i for i in everyone if i not in live]
                if gone and not self._done.is_set():
                    where = "; ".join(self.where[i] for i in gone[:SHOWN])
                    self._end(f"{named(gone)} ({where}) gone: killed, stopped, or on a lost host")
