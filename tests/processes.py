"""Several real processes of a script in this folder: `script rank count port ...`, each of which prints a RESULT."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys

HERE = pathlib.Path(__file__).parent


def free_port() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def names(text: str, me: int, gone: int) -> bool:
    """Whether process `me` says which one is gone, by itself or with JAX's words before."""
    if f"[process {me}] process {gone} (" in text:
        return True
    reason = f"(stopped sending heartbeats):\n{gone}\n" if gone else "PollForError"
    return reason in text and f"[process {me}] JAX says above which task is gone" in text


def start(script: str, count: int, *given: object) -> list[subprocess.Popen]:
    """`count` processes of a script; what they print is in their `stdout`."""
    port = free_port()
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(HERE.parent), str(HERE)]))
    env.pop("XLA_FLAGS", None)
    return [
        subprocess.Popen(
            [sys.executable, str(HERE / script), str(rank), str(count), port, *map(str, given)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
        )
        for rank in range(count)
    ]


def launch(script: str, count: int, *given: object, timeout: int) -> list[dict]:
    """What each of `count` processes says; one that hangs longer than `timeout` seconds is a failure."""
    workers = start(script, count, *given)
    try:
        texts = [w.communicate(timeout=timeout)[0] for w in workers]
    finally:
        for w in workers:
            w.kill()
    for w, text in zip(workers, texts, strict=True):
        assert w.returncode == 0, text[-4000:]
    lines = [next(line for line in t.splitlines() if line.startswith("RESULT ")) for t in texts]
    return [json.loads(line.removeprefix("RESULT ")) for line in lines]
