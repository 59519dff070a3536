"""train/gpt.py in several real processes: refused together at the start, ended together when one dies or fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import free_port

from train.processes import check_devices

ROOT = Path(__file__).resolve().parents[2]
FLAGS = [
    "--preset=tiny",
    "--width=32",
    "--layers=1",
    "--seq=16",
    "--eval-windows=16",
    "--log-every=1",
    "--devices=2",
]
HEARTBEAT, SLACK = 8, 8  # seconds; the second for a machine that others use too


@pytest.fixture
def start(tmp_path):
    """Starts a process of a group; all are ended after the test."""
    port, started = free_port(), []

    def one(me, count, *more, environ=()):
        group = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(count)}
        env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | group | {"JAX_PROCESS_ID": str(me)}
        env = {k: v for k, v in (env | dict(environ)).items() if v is not None}
        command = [sys.executable, "-u", "-m", "train.gpt", *FLAGS, f"--heartbeat={HEARTBEAT}", *more]
        command += [f"--out={tmp_path / 'run'}"]
        with open(tmp_path / f"{me}.out", "w") as out, open(tmp_path / f"{me}.err", "w") as err:
            started.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=err))
        return started[-1]

    yield one
    for process in started:
        process.kill()
        process.wait()


def said(tmp_path, me):
    return (tmp_path / f"{me}.err").read_text()


def wait_for_step(tmp_path, step, workers):
    until = time.monotonic() + 200
    while f"step {step}/" not in (tmp_path / "0.out").read_text():
        assert time.monotonic() < until, said(tmp_path, 0)
        assert all(w.poll() is None for w in workers), said(tmp_path, 0)
        time.sleep(0.05)


def test_other_settings_and_other_versions_are_refused_before_jax_starts(start, tmp_path):
    began = time.monotonic()
    workers = [start(0, 3), start(1, 3), start(2, 3, "--lr=0.5", environ={"XLA_FLAGS": "--xla_dump_to="})]
    for me, worker in enumerate(workers):
        assert worker.wait(timeout=120) == 1
        lines = said(tmp_path, me).splitlines()
        assert (
            f"[process {me}] error: the processes differ in --lr: 0.01 in processes 0, 1, 0.5 in process 2"
            in lines
        )
        assert f"[process {me}] the processes differ in XLA_FLAGS: not set in processes 0, 1, --xla_dump_to= in process 2" in lines  # fmt: skip  # noqa: E501
        assert "Traceback" not in said(tmp_path, me)
    assert time.monotonic() - began < 60
    assert not (tmp_path / "run").exists()


def test_missing_data_on_one_host_ends_all(start, tmp_path):
    (tmp_path / "text").write_text("some text\n" * 2000)
    workers = [start(0, 2, f"--data={tmp_path / 'text'}"), start(1, 2, f"--data={tmp_path / 'nowhere'}")]
    for me, worker in enumerate(workers):
        assert worker.wait(timeout=120) == 1
        assert f"[process {me}] error: process 1 (" in said(tmp_path, me)
        assert "nowhere: no such file or folder" in said(tmp_path, me)


@pytest.mark.nightly
def test_an_indexed_job_trains_and_a_stopped_process_ends_all_within_the_heartbeat(start, tmp_path):
    """The variables of docs/launch/kubernetes.yaml; SIGSTOP: what a process does that hangs, with its host alive."""
    workers = []
    for me in range(2):
        index = {
            "JAX_PROCESS_ID": None,
            "JOB_COMPLETION_INDEX": str(me),
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
        }
        workers.append(start(me, 2, "--steps=5000", "--save-every=5", environ=index))
    wait_for_step(tmp_path, 6, workers)
    workers[1].send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    assert workers[0].wait(timeout=HEARTBEAT + 6 + SLACK) != 0
    print(f"process 0 ended {time.monotonic() - stopped:.1f} s after process 1 was stopped")
    assert "unhealthy (stopped sending heartbeats):\n1" in said(tmp_path, 0).replace(
        "/job:jax_worker/replica:0/task:", ""
    )


@pytest.mark.nightly
def test_unlike_numbers_of_devices_are_refused(start, tmp_path):
    workers = [start(0, 2), start(1, 2, "--devices=3")]
    for me, worker in enumerate(workers):
        assert worker.wait(timeout=120) == 1
        assert (
            f"[process {me}] error: the processes differ in --devices: 2 in process 0, 3 in process 1"
            in said(tmp_path, me)
        )


def test_unlike_devices():
    devices = [
        SimpleNamespace(process_index=i, device_kind="H100" if i < 2 else "A100") for i in (0, 0, 1, 1, 2)
    ]
    text = "^the processes differ in their devices: 2 x H100 in processes 0, 1, 1 x A100 in process 2. Each must have"
    with pytest.raises(ValueError, match=text):
        check_devices(devices)
    check_devices(devices[:4])


@pytest.mark.nightly
def test_a_damaged_checkpoint_ends_all_with_the_reason(start, tmp_path):
    """An error after JAX has started: a checkpoint of nothing."""
    (tmp_path / "run" / "checkpoints" / "5").mkdir(parents=True)
    for worker in [start(0, 2, "--resume"), start(1, 2, "--resume")]:
        assert worker.wait(timeout=120) == 1
    text = said(tmp_path, 0) + said(tmp_path, 1)
    assert "] process 0 (" in text or "] process 1 (" in text
    assert ") failed: " in text
    assert str(tmp_path / "run" / "checkpoints" / "5") in text
