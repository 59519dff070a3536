"""Two real processes with four devices each give the losses of one process with eight, and hold half of it each."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys

import numpy as np

HERE = pathlib.Path(__file__).parent


def free_port() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def launch(count: int) -> list[dict]:
    port = free_port()
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(HERE.parent), str(HERE)]))
    env.pop("XLA_FLAGS", None)
    workers = [
        subprocess.Popen(
            [sys.executable, str(HERE / "worker.py"), str(rank), str(count), port],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
        )
        for rank in range(count)
    ]
    try:
        texts = [w.communicate(timeout=300)[0] for w in workers]
    finally:
        for w in workers:
            w.kill()
    for w, text in zip(workers, texts, strict=True):
        assert w.returncode == 0, text[-4000:]
    lines = [next(line for line in t.splitlines() if line.startswith("RESULT ")) for t in texts]
    return [json.loads(line.removeprefix("RESULT ")) for line in lines]


def test_two_processes_equal_one_and_hold_half_each():
    one, two = launch(1)[0], launch(2)
    assert one["devices"] == 8
    assert [w["devices"] for w in two] == [8, 8]
    for index, single in enumerate(one["runs"]):
        for worker in two:
            run = worker["runs"][index]
            assert (run["stage"], run["existing"]) == (single["stage"], single["existing"])
            np.testing.assert_allclose(run["losses"], single["losses"], rtol=1e-6)
            np.testing.assert_allclose(run["norm"], single["norm"], rtol=1e-5)
            assert run["held"] * 2 == single["held"]
    by_stage = {r["stage"]: r["held"] for r in one["runs"] if not r["existing"]}
    assert by_stage[3] < by_stage[2] == by_stage[1] < by_stage[0]
