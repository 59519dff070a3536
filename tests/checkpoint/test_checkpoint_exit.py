"""A process that ends while a checkpoint is written finishes it, or gives up within a bound, and says which."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import time

import jax.numpy as jnp
import pytest

from jzero import checkpoint

ROOT = pathlib.Path(__file__).parents[2]
BEGIN = """
import sys, time
import numpy as np
from jzero import checkpoint
from jzero.checkpoint import pending, checksums
write = checksums.write
def slow(*a, **k):
    time.sleep(0.3)  # the main thread has ended by then
    write(*a, **k)
checksums.write = slow
tree = {"w": np.ones(1000), "b": {str(i): np.ones(3) for i in range(20)}}
path = sys.argv[1]
"""
HANG = (
    "checksums.write = lambda *a, **k: time.sleep(1000)\npending.EXIT_SECONDS, pending.GRACE_SECONDS = 0.5, 0.5\n"
)
FAIL = "def full(*a, **k):\n    raise OSError(28, 'No space left on device')\nchecksums.write = full\n"
SAVE = "saving = checkpoint.save_async(path, tree)\n"
CASES = {
    "exception": SAVE + "raise RuntimeError('boom')\n",
    "normal": "checkpoint.save_async(path, tree)\n",
    "status": SAVE + "sys.exit(3)\n",
    "steps": "steps = checkpoint.Steps(path)\nsteps.save(1, tree)\n",
    "steps and an exception": "with checkpoint.Steps(path) as s:\n    s.save(1, tree)\n    raise ValueError('boom')\n",
    "abandoned": HANG + SAVE,
    "full": FAIL + SAVE,
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Each case in a process of its own, all at once: its status, what it said, its folder, its seconds."""
    folder = tmp_path_factory.mktemp("exit")
    env = dict(os.environ, PYTHONPATH=str(ROOT), JAX_PLATFORMS="cpu")
    env.pop("XLA_FLAGS", None)
    began, started = time.monotonic(), {}
    for i, (name, code) in enumerate(CASES.items()):
        command = [sys.executable, "-c", BEGIN + code, str(folder / str(i))]
        started[name] = (
            subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env),
            folder / str(i),
        )
    found = {}
    for name, (process, path) in started.items():
        try:
            _, said = process.communicate(timeout=90)
        finally:
            process.kill()
        found[name] = (process.returncode, said, path, time.monotonic() - began)
    return found


@pytest.mark.parametrize("case", ["exception", "normal", "status", "steps", "steps and an exception"])
def test_a_save_under_way_is_finished(case, ended):
    status, said, path, _ = ended[case]
    assert status == (1 if "exception" in case else 3 if case == "status" else 0), said
    assert ("boom" in said) == ("exception" in case)
    final = path / "1" if "steps" in case else path
    if case != "steps and an exception":  # there `with` waits
        assert f"the process ends while {final} is written. Waiting for it, at most 300 s." in said
        assert f"{final} is finished." in said
    assert checkpoint.restore(
        final, {"w": jnp.zeros(1000), "b": {str(i): jnp.zeros(3) for i in range(20)}}, cast=True
    )
    assert sorted(os.listdir(path)) == (["1"] if "steps" in case else sorted(os.listdir(final)))


def test_one_that_takes_too_long_is_abandoned(ended):
    status, said, path, seconds = ended["abandoned"]
    assert status == 1
    assert f"{path} is abandoned: it took too long. Nothing there is changed." in said
    assert not path.exists()
    assert seconds < 90


def test_one_that_failed_and_that_nobody_asked_about(ended):
    status, said, path, _ = ended["full"]
    assert status == 1
    assert f"{path} is not saved: [Errno 28] No space left on device" in said
    assert not path.exists()
