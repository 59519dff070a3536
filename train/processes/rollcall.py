"""Before JAX is started: every process is there, once, and all have the same settings; or all end with the reason.

JAX's own start would wait for a process that never comes and then abort without a name, and of processes with unlike
settings the first collective hangs or computes nonsense. So process 0 listens on the coordinator's port first, the
others connect and say who they are and what they would run, and process 0 answers all of them alike. After that the
port is JAX's; the connections stay, and `watch.py` has them.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from collections.abc import Mapping
from typing import Any

from train.processes.group import Group
from train.processes.link import Link

GRACE = 3.0  # seconds that process 0 waits for more differences once there is one
SHOWN = 8  # differences in a message


class Refused(ValueError):
    """The processes do not fit together, or some of them did not come."""


def meet(
    group: Group, facts: Mapping[str, Any], *, timeout: float, heartbeat: float, error: str | None = None
) -> tuple[dict[int, Link], dict[int, str]]:
    """Returns when all processes of a group are there with the same facts.

    Args:
      group: of this process.
      facts: what must be the same in all of them, as JSON.
      timeout: seconds to wait for the others.
      heartbeat: seconds after which a host that does not answer is taken for gone.
      error: why this process cannot run; it comes all the same, so that the others need not wait for it.

    Returns:
      On process 0 the links to all others, elsewhere the one to process 0; and where each of them runs, for messages.

    Raises:
      Refused: who is missing, or which settings differ in which process. All that came raise the same.
    """
    hello = {"jzero": 1, "me": group.me, "facts": {"number of processes": group.processes, **facts}}
    hello["error"] = error
    hello["where"] = f"{socket.gethostname()}, pid {os.getpid()}"
    until = time.monotonic() + timeout
    if group.me:
        return _call(group, hello, until, timeout, heartbeat)
    return _listen(group, hello, until, timeout, heartbeat)


def _listen(group: Group, hello: dict[str, Any], until: float, timeout: float, heartbeat: float):
    """Process 0: takes the names of all others, compares, answers."""
    try:
        server = _server(group)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            _twin(group, hello, until, heartbeat)
        raise Refused(
            f"process 0 cannot listen on {group.coordinator}: {os.strerror(error.errno or 0)}. Give another port: "
            "--coordinator, or JAX_COORDINATOR_PORT under srun and mpirun."
        ) from None
    told: list[tuple[dict[str, Any], Link | None]] = [(hello, None)]
    silent: set[Link] = set()  # have not said who they are
    grace = False
    with server, selectors.DefaultSelector() as ready:
        ready.register(server, selectors.EVENT_READ)
        while len({h["me"] for h, _ in told}) < group.processes and time.monotonic() < until:
            for key, _ in ready.select(min(1.0, max(0.0, until - time.monotonic()))):
                if key.fileobj is server:
                    link = Link(server.accept()[0], heartbeat)
                    silent.add(link)
                    ready.register(link, selectors.EVENT_READ)
                    continue
                link = key.fileobj
                assert isinstance(link, Link)
                came = _hello(link)
                if came is None or came:
                    ready.unregister(link)
                    silent.discard(link)
                if came:
                    told.append((came, link))
            if not grace and _unfit([h for h, _ in told]):
                grace, until = True, min(until, time.monotonic() + GRACE)
    text = _verdict(group, [h for h, _ in told], timeout)
    links = {h["me"]: link for h, link in told if link is not None}
    where = {h["me"]: h["where"] for h, _ in told}
    for _, link in told:
        if link is not None:
            link.send(**({"stop": text} if text else {"go": where}))
    for link in [*silent, *([x for _, x in told if x is not None] if text else [])]:
        link.close()
    if text:
        raise Refused(text)
    return links, where


def _twin(group: Group, hello: dict[str, Any], until: float, heartbeat: float) -> None:
    """Where another process 0 of this run has the port, both are told; returns if the port is somebody else's.

    Raises:
      Refused: that there are two.
    """
    try:
        _call(group, hello, min(until, time.monotonic() + 1), GRACE, heartbeat, answer=GRACE + 1)
    except Refused as refused:
        if "their numbers" in str(refused):
            raise


def _server(group: Group) -> socket.socket:
    """Listens on all addresses, as JAX does on this port afterwards; of a loopback coordinator on that alone."""
    host, port = group.address
    if host in ("localhost", "127.0.0.1"):
        return socket.create_server(("127.0.0.1", port), backlog=1024)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", port), backlog=1024)


def _hello(link: Any) -> dict[str, Any] | None:
    """What one process says of itself; empty while it is under way, None from what is no process of a run."""
    try:
        messages = link.receive(timeout=5)
        if messages == []:
            return {}
        if messages and {"jzero", "me", "where", "facts", "error"} <= set(messages[0]):
            return messages[0]
    except (TimeoutError, ValueError):
        pass
    link.close()
    return None


def _call(
    group: Group, hello: dict[str, Any], until: float, timeout: float, heartbeat: float, answer: float = 10
):
    """Any other process: finds process 0, says who it is, and waits for the answer, so many seconds beyond `until`."""
    why: Any = "no answer"
    while time.monotonic() < until:
        try:
            link = Link(socket.create_connection(group.address, timeout=5), heartbeat)
        except OSError as error:  # not there yet; in Kubernetes its name is not known yet either
            why = error.strerror or error
            time.sleep(0.1)
            continue
        link.send(**hello)
        messages: list[dict[str, Any]] | None = []
        try:
            while messages == []:
                messages = link.receive(timeout=max(0.1, until + answer - time.monotonic()))
        except (TimeoutError, ValueError):
            messages = None
        if messages is None:  # it ended, or this is somebody else's port
            link.close()
            why = "it closed the connection"
            time.sleep(0.5)
            continue
        if "stop" in messages[0]:
            link.close()
            raise Refused(messages[0]["stop"])
        return {0: link}, {int(k): where for k, where in messages[0]["go"].items()}
    raise Refused(
        f"process 0 did not answer at {group.coordinator} within {timeout:g} s ({why}). Is it running, and is this the "
        "address of its host? --coordinator must be the same in all processes."
    )


def _verdict(group: Group, said: list[dict[str, Any]], timeout: float) -> str | None:
    """Why the processes that came cannot run together; None if they can."""
    unfit = _unfit(said)
    if unfit:
        more = len(unfit) - SHOWN
        return "\n".join(unfit[:SHOWN] + ([f"and {more} more"] if more > 0 else []))
    there = {h["me"] for h in said}
    missing = sorted(set(range(group.processes)) - there)
    if missing:
        came = "; ".join(
            f"process {h['me']} ({h['where']})" for h in sorted(said, key=lambda h: h["me"])[:SHOWN]
        )
        return (
            f"{named(missing)} of {group.processes} did not come within {timeout:g} s. There: {came}"
            f"{' and more' if len(there) > SHOWN else ''}. See its own log, or give it longer: --start-timeout."
        )
    return None


def _unfit(said: list[dict[str, Any]]) -> list[str]:
    """The errors of those that came with one; else how they differ."""
    errors = [f"process {h['me']} ({h['where']}): {h['error']}" for h in said if h["error"]]
    return errors or [f"the processes differ in {line}" for line in _differences(said)]


def _differences(said: list[dict[str, Any]]) -> list[str]:
    """A line for each fact that is not the same everywhere, with who has what; and for a number that is there twice."""
    lines = []
    for me in sorted({h["me"] for h in said}):
        wheres = [h["where"] for h in said if h["me"] == me]
        if len(wheres) > 1:
            lines.append(f"their numbers: {me} is that of {len(wheres)} processes ({'; '.join(wheres)})")
    names = list(dict.fromkeys(name for h in said for name in h["facts"]))
    for name in names:
        by_value: dict[str, list[int]] = {}
        for h in said:
            by_value.setdefault(str(h["facts"].get(name, "nothing")), []).append(h["me"])
        if len(by_value) > 1:
            lines.append(
                f"{name}: " + ", ".join(f"{value} in {named(who)}" for value, who in by_value.items())
            )
    return lines


def named(who: list[int]) -> str:
    """`process 2`, or `processes 1, 2, 3`; of many the first eight."""
    who = sorted(set(who))
    more = f" and {len(who) - SHOWN} more" if len(who) > SHOWN else ""
    return f"process{'es' if len(who) > 1 else ''} {', '.join(map(str, who[:SHOWN]))}{more}"
