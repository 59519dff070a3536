"""A restore holds little beside its target: measured in processes of their own, 648 MiB of state, leaves of 128 MiB.

Peak over the target and what the process had before, on two busy cores (November 2026, jax 0.10.2): 200 to 250 MiB on 8
devices, 220 to 235 on the host tier; 350 onto 5 devices that hold every leaf whole. Of it 64 are in flight by
orbax's count; the rest are encoded chunks, threads' stacks and heaps. Without the limit it is the state once more.
A save takes 580 to 800: orbax copies the state before it returns.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parents[1]
MIB = 2**20


def measure(what, folder):
    """The peak over what was there before and the state itself, and the bytes of both."""
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(HERE.parent), str(HERE)]))
    env.pop("XLA_FLAGS", None)
    command = [sys.executable, str(HERE / "restore_memory.py"), what, str(folder / "1")]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    found = json.loads(line.removeprefix("RESULT "))
    assert found["state"] >= 640 * MIB
    return found


@pytest.mark.nightly
def test_what_a_save_and_a_restore_hold_beside_the_state(tmp_path):
    saved = measure("save", tmp_path)
    assert saved["peak"] - saved["before"] < 1.5 * saved["state"]
    for what in ("device", "host"):
        found = measure(what, tmp_path)
        beside = found["peak"] - found["before"] - found["state"]
        assert beside < max(found["largest"], 256 * MIB) + 64 * MIB, (what, found)


@pytest.mark.long  # 0.49 to 0.60 GB, by how many leaves orbax has read before the first are placed: the load decides
def test_what_a_restore_onto_five_devices_holds(tmp_path):
    measure("save", tmp_path)
    found = measure("five", tmp_path)
    beside = found["peak"] - found["before"] - found["state"]
    whole = found["largest"]  # every leaf whole: the copy that the devices' are made of
    assert beside < max(found["largest"], 256 * MIB) + whole + 64 * MIB, found
