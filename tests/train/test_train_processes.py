"""train/gpt.py in several real processes: refused together at the start, ended together when one dies or fails."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import free_port, names

ROOT = Path(__file__).resolve().parents[2]
FLAGS = [
    "--preset=tiny", "--width=32", "--layers=1", "--seq=16", "--eval-windows=16", "--log-every=1", "--devices=2",
]  # fmt: skip
HEARTBEAT, SLACK = 6, 8  # seconds; the second for a machine that others use too


class Run:
    """The processes of one group; `start` adds one, with what it says in files."""

    def __init__(self, folder):
        self.folder, self.port, self.workers = folder, free_port(), []

    def start(self, me, count, *more, **environ):
        group = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{self.port}", "JAX_NUM_PROCESSES": str(count)}
        env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | group
        env |= environ or {"JAX_PROCESS_ID": str(me)}
        command = [sys.executable, "-u", "-m", "train.gpt", *FLAGS, f"--heartbeat={HEARTBEAT}", *more]
        command += [f"--out={self.folder / 'run'}"]
        with open(self.folder / f"{me}.out", "w") as out, open(self.folder / f"{me}.err", "w") as err:
            self.workers.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=err))

    def said(self, me):
        return (self.folder / f"{me}.err").read_text()

    def wait_for_step(self, step):
        until = time.monotonic() + 200
        while f"step {step}/" not in (self.folder / "0.out").read_text():
            assert time.monotonic() < until, self.said(0)
            assert all(w.poll() is None for w in self.workers), self.said(0)
            time.sleep(0.05)

    def all_end_with(self, text):
        """Every process ends with status 1 and a line that has this text."""
        for me, worker in enumerate(self.workers):
            assert worker.wait(timeout=120) == 1, self.said(me)
            assert any(text in x for x in self.said(me).splitlines() if x.startswith(f"[process {me}] ")), self.said(me)


@pytest.fixture
def run(tmp_path):
    """A group; its processes are ended after the test."""
    run = Run(tmp_path)
    yield run
    for process in run.workers:
        process.kill()
        process.wait()


@pytest.mark.nightly
def test_other_settings_are_refused_by_name_in_all_processes(run):
    began = time.monotonic()
    for me in range(3):
        run.start(me, 3, *(["--lr=0.5"] if me == 2 else []))
    run.all_end_with("error: the processes differ in --lr: 0.01 in processes 0, 1, 0.5 in process 2")
    assert not any("Traceback" in run.said(me) for me in range(3))
    assert time.monotonic() - began < 60
    assert not (run.folder / "run").exists()


@pytest.mark.nightly
def test_garbage_at_the_port_kills_nothing_and_a_kill_ends_all(run):
    for me in range(3):
        run.start(me, 3, "--steps=5000", "--save-every=4", "--batch=12")
    run.wait_for_step(3)
    noise = random.Random(0)
    for text in (b"GET / HTTP/1.1\r\n\r\n", b'{"me": 1}\n', b"", noise.randbytes(100_000)):
        with socket.create_connection(("127.0.0.1", int(run.port))) as s:
            s.settimeout(5)
            try:
                s.sendall(text)
                s.recv(100)
            except OSError:  # it hangs up
                pass
    run.wait_for_step(10 + int(re.findall(r"step (\d+)/", (run.folder / "0.out").read_text())[-1]))

    run.workers[1].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    for me in (0, 2):
        assert run.workers[me].wait(timeout=HEARTBEAT + SLACK) == 1, run.said(me)
        # process 0 hears of it first; when it has ended before process 2 asks, that one is told of process 0
        assert names(run.said(me), me, 1) or (me == 2 and names(run.said(me), me, 0)), run.said(me)
        assert "start all again with --resume." in run.said(me)  # a log line of JAX may come after it
    print(f"the others ended {time.monotonic() - killed:.1f} s after the kill")


@pytest.mark.nightly
@pytest.mark.parametrize("later", [0, 1])
def test_one_that_does_not_come_is_named(run, later):
    for me in range(3):
        if me != later:
            run.start(me, 3, "--start-timeout=10")
        else:
            run.workers.append(subprocess.Popen(["false"]))
            (run.folder / f"{me}.err").write_text(f"[process {me}] not all 3 processes came")
    run.all_end_with("not all 3 processes came")
    if later:
        assert "timed out task names:\n1\n" in run.said(0)
        assert "timed out task names:\n1\n" in run.said(2)


@pytest.mark.nightly
def test_missing_data_on_one_host_ends_all(run):
    (run.folder / "text").write_text("some text\n" * 2000)
    run.start(0, 2, f"--data={run.folder / 'text'}")
    run.start(1, 2, f"--data={run.folder / 'nowhere'}")
    run.all_end_with("nowhere: no such file or folder")
    assert "error: process 1 (" in run.said(0)


@pytest.mark.nightly
def test_a_port_that_is_taken(run):
    with socket.create_server(("", int(run.port))):
        run.start(0, 2)
        run.all_end_with("Address already in use. Pass another.")


@pytest.mark.nightly
def test_an_indexed_job_trains_and_a_stopped_process_ends_all_within_the_heartbeat(run):
    """The variables of docs/launch/kubernetes.yaml; SIGSTOP: what a process does that hangs, with its host alive."""
    for me in range(2):
        index = {"JOB_COMPLETION_INDEX": str(me), "KUBERNETES_SERVICE_HOST": "127.0.0.1"}
        run.start(me, 2, "--steps=5000", "--save-every=5", **index)
    run.wait_for_step(6)
    run.workers[1].send_signal(signal.SIGSTOP)
    assert run.workers[0].wait(timeout=HEARTBEAT + SLACK) == 1
    assert names(run.said(0), 0, 1), run.said(0)


@pytest.mark.nightly
def test_process_0_may_be_killed_too(run):
    for me in range(3):
        run.start(me, 3, "--steps=5000", "--save-every=4", "--batch=12")
    run.wait_for_step(9)
    run.workers[0].send_signal(signal.SIGKILL)
    for me in (1, 2):
        assert run.workers[me].wait(timeout=SLACK) == 1, run.said(me)
        assert names(run.said(me), me, 0), run.said(me)
        assert "start all again" in run.said(me).splitlines()[-1]


@pytest.mark.nightly
def test_a_damaged_checkpoint_ends_all_with_the_reason(run):
    """An error after the processes have met: a checkpoint of nothing."""
    (run.folder / "run" / "checkpoints" / "5").mkdir(parents=True)
    for me in range(2):
        run.start(me, 2, "--resume")
    run.all_end_with(str(run.folder / "run" / "checkpoints" / "5"))
    assert ") failed: " in run.said(0) + run.said(1)
