"""train/processes/watch.py: the process that is gone is named, also where the error that it leaves comes first."""

import re
import subprocess
import sys

import jax
import pytest
from processes import HERE, free_port

from train.processes.watch import of_a_collective

GLOO = "UNKNOWN: Gloo AllGather failed: Read error [127.0.0.1]:3468: Connection reset by peer"
SCRIPT = """
import os, signal, sys, time
from train.processes.group import Group
from train.processes.rollcall import meet
from train.processes.watch import Watch

me, port, text = int(sys.argv[1]), sys.argv[2], sys.argv[3]
group = Group(f"127.0.0.1:{port}", 3, me)
watch = Watch(group, *meet(group, {}, timeout=30, heartbeat=5), heartbeat=5, remedy=lambda: "start all again")
watch.start()
with watch:
    if me == 2:  # dies, but its connection to the watch is closed later than the one to its peers
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError(text)
"""


@pytest.mark.parametrize("text", [GLOO, "list index out of range"])
def test_the_process_that_is_gone_is_named(text):
    port = free_port()
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(me), port, text], cwd=HERE.parent, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for me in range(3)
    ]  # fmt: skip
    said = [w.communicate(timeout=60)[1] for w in workers]
    assert [w.returncode for w in workers] == [1, 1, -9]
    for me in (0, 1):
        assert re.search(
            rf"\[process {me}\] process 2 \(.*, pid {workers[2].pid}\) is gone: killed", said[me]
        ), said[me]
        assert f"[process {me}] start all again" in said[me]


def test_errors_of_collectives():
    outer = RuntimeError("the checkpoint could not be written")
    outer.__cause__ = ValueError(GLOO)
    assert of_a_collective(outer)
    assert of_a_collective(jax.errors.JaxRuntimeError("INTERNAL: x"))
    assert not of_a_collective(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"))
    assert not of_a_collective(ValueError("list index out of range"))
