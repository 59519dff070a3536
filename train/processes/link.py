"""A connection between two processes of a group: one JSON object per line, each way.

The kernel answers for a process that is busy, and closes the connection of one that is killed; so the other end knows
at once. Of a host that is gone the kernel's keep-alive tells, within the heartbeat.
"""

from __future__ import annotations

import json
import select
import socket
import time
from typing import Any

LONGEST = 1 << 20  # bytes of a line; what is longer does not come from this program
SENDING = 5.0  # seconds to send a message in


class Link:
    """One end.

    Args:
      connection: a connected socket.
      heartbeat: seconds after which a host that does not answer is taken for gone.
    """

    def __init__(self, connection: socket.socket, heartbeat: float):
        self._socket, self._rest = connection, b""
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        each = max(1, int(heartbeat / 5))  # the first question after one such time, then four more
        options = {"TCP_KEEPIDLE": each, "TCP_KEEPINTVL": each, "TCP_KEEPCNT": 4}
        options["TCP_USER_TIMEOUT"] = int(heartbeat * 1000)
        for name, value in options.items():
            if hasattr(socket, name):  # Linux has all of them
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def fileno(self) -> int:
        """For `selectors`."""
        return self._socket.fileno()

    def send(self, **message: Any) -> None:
        """Sends a message, or nothing to an end that is gone: what it missed, the reader of this end learns."""
        rest = json.dumps(message).encode() + b"\n"
        until = time.monotonic() + SENDING
        try:
            while rest and self._wait(select.POLLOUT, until - time.monotonic()):
                rest = rest[self._socket.send(rest) :]
        except OSError:
            pass

    def receive(self, timeout: float | None = None) -> list[dict[str, Any]] | None:
        """The messages that have come, waiting for at least one byte; None once the other end is gone.

        Raises:
          TimeoutError: nothing came within `timeout` seconds.
          ValueError: what came is no message of this program.
        """
        if not self._wait(select.POLLIN, timeout):
            raise TimeoutError
        try:
            got = self._socket.recv(65536)
        except OSError:
            return None
        if not got:
            return None
        *lines, self._rest = (self._rest + got).split(b"\n")
        if len(self._rest) > LONGEST:
            raise ValueError("a line without end")
        messages = [json.loads(line) for line in lines]
        if not all(isinstance(x, dict) for x in messages):
            raise ValueError("not an object")
        return messages

    def _wait(self, event: int, seconds: float | None) -> bool:
        """Not by the socket's own timeout: two threads use one socket, one to read and one to write."""
        poll = select.poll()
        poll.register(self._socket, event)
        return bool(poll.poll(None if seconds is None else max(0.0, seconds * 1000)))

    def close(self) -> None:
        """Ends the connection."""
        self._socket.close()
