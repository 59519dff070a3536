"""A save is all or nothing: killed at any moment, on a full disk, in a directory that cannot be written."""

from __future__ import annotations

import os
import pathlib
import resource
import signal
import stat
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layouts import assert_same
from saver import state_of

from jzero import checkpoint
from jzero.checkpoint.store import TEMPORARY

HERE = pathlib.Path(__file__).parents[1]
KILLS = 50


def finished(folder):
    return sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit())


def left_overs(folder):
    return [p.name for p in folder.iterdir() if TEMPORARY in p.name]


def run_and_kill(folder, first, fraction):
    """Saves three steps; the third is killed after a part of the time that the second took: the steps told finished."""
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(HERE.parent), str(HERE)]))
    env.pop("XLA_FLAGS", None)
    command = [sys.executable, str(HERE / "saver.py"), str(folder), str(first)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            said = lambda: process.stdout.readline().split()  # noqa: E731
            assert [said(), said()] == [["saving", str(first)], ["saved", str(first)]]
            old = [name for name in left_overs(folder) if not name.startswith(f"{first + 1}.")]
            assert not old  # those of the run before are gone; the next save may have begun
            assert said() == ["saving", str(first + 1)]
            start = time.monotonic()
            assert said() == ["saved", str(first + 1)]
            length = time.monotonic() - start
            assert said() == ["saving", str(first + 2)]
            time.sleep(fraction * length)
        finally:
            process.send_signal(signal.SIGKILL)
        rest = [int(line.split()[1]) for line in process.stdout if line.startswith("saved ")]
    return [first, first + 1, *rest]


def kill_again_and_again(folder, count):
    """How many kills left files of an unfinished save behind."""
    saved, dirty = [], 0
    for i in range(count):
        saved += run_and_kill(folder, len(saved) + 1, 1.1 * (i + 0.5) / count)
        steps = finished(folder)
        assert steps in (saved, [*saved, len(saved) + 1])  # or killed before it could say so
        saved = steps
        for step in steps[-2:]:
            assert_same(checkpoint.restore(folder / str(step), state_of(0)), state_of(step))
        dirty += bool(left_overs(folder))
    last = len(saved) + 1
    checkpoint.save(folder / str(last), state_of(last))
    assert not left_overs(folder)
    for step in finished(folder)[:: max(count // 4, 1)]:
        assert_same(checkpoint.restore(folder / str(step), state_of(0)), state_of(step))
    return dirty


def flushes_of_a_save(folder, monkeypatch):
    """How often a save flushes something to the disk, in a folder that is there; the last time is after the rename."""
    numbers, flush = [], os.fsync
    checkpoint.save(folder / "1", state_of(1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: numbers.append(flush(handle)))
        checkpoint.save(folder / "2", state_of(2))
    return len(numbers)


@pytest.mark.parametrize(
    "share", [pytest.param(0, marks=pytest.mark.nightly), 0.5, pytest.param(1, marks=pytest.mark.nightly)]
)
def test_killed_before_a_flush(share, tmp_path, monkeypatch):
    """Of the first file, of one in the middle, of the folder that has the new name: by number, not by the clock."""
    count = flushes_of_a_save(tmp_path / "counted", monkeypatch)
    folder = tmp_path / "killed"
    command = [sys.executable, str(HERE / "saver.py"), str(folder), "1", str(max(1, round(share * count)))]
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(HERE.parent), str(HERE)]))
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stdout.split("\n")[-2] == "saving 2"
    steps = [1, 2] if share == 1 else [1]
    assert finished(folder) == steps
    assert bool(left_overs(folder)) == (share < 1)
    for step in steps:
        assert_same(checkpoint.restore(folder / str(step), state_of(0)), state_of(step))
    checkpoint.save(folder / str(len(steps) + 1), state_of(3))
    assert not left_overs(folder)


@pytest.mark.long
def test_killed_at_fifty_moments(tmp_path):
    dirty = kill_again_and_again(tmp_path, KILLS)
    assert dirty
    print(f"{KILLS} kills, {dirty} left files behind")


@pytest.fixture
def no_file_above():
    """No file may grow beyond so many bytes: what a full disk does to a save, in the middle of a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def limit(count):
        resource.setrlimit(resource.RLIMIT_FSIZE, (count, before[0][1]))

    yield limit
    limit(before[0][0])
    signal.signal(signal.SIGXFSZ, before[1])


# a file object that cannot flush its last bytes says so once more when it is collected
@pytest.mark.default_cases("False-5000", "True-200")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("limit", [200, 5_000, 2_000_000])
@pytest.mark.parametrize("background", [False, True])
def test_a_disk_that_is_full(limit, background, tmp_path, no_file_above):
    save = (lambda *a: checkpoint.save_async(*a).result()) if background else checkpoint.save
    save(tmp_path / "1", state_of(1))
    no_file_above(limit)
    start = time.monotonic()
    with pytest.raises(OSError, match="File too large"):
        save(tmp_path / "2", state_of(2))
    assert time.monotonic() - start < 20
    no_file_above(resource.RLIM_INFINITY)
    assert [p.name for p in tmp_path.iterdir()] == ["1"]
    assert_same(checkpoint.restore(tmp_path / "1", state_of(0)), state_of(1))
    save(tmp_path / "2", state_of(2))
    assert_same(checkpoint.restore(tmp_path / "2", state_of(0)), state_of(2))


def test_a_directory_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    checkpoint.save(tmp_path / "run" / "1", {"w": jnp.ones(3)})
    os.chmod(tmp_path / "run", stat.S_IRUSR | stat.S_IXUSR)
    if os.access(
        tmp_path / "run", os.W_OK
    ):  # root may write anywhere: the system's answer is given in its place
        from jzero.checkpoint import store

        def refused(**_):
            raise PermissionError(13, "Permission denied", str(tmp_path / "run"))

        monkeypatch.setattr(store.tempfile, "TemporaryFile", refused)
    with pytest.raises(PermissionError, match="Permission denied"):
        checkpoint.save(tmp_path / "run" / "2", {"w": jnp.ones(3)})
    os.chmod(tmp_path / "run", stat.S_IRWXU)
    assert finished(tmp_path / "run") == [1]
    assert not left_overs(tmp_path / "run")
    np.testing.assert_array_equal(
        checkpoint.restore(tmp_path / "run" / "1", {"w": jnp.zeros(3)})["w"], np.ones(3)
    )


def test_what_a_killed_save_left_is_no_checkpoint(tmp_path):
    checkpoint.save(tmp_path / "3", {"w": jnp.ones(3)})
    os.rename(tmp_path / "3", tmp_path / f"3{TEMPORARY}")
    with pytest.raises(FileNotFoundError, match=r"there is nothing at .*/3\.$"):
        checkpoint.restore(tmp_path / "3", {"w": jnp.ones(3)})
    (tmp_path / f"33{TEMPORARY}").mkdir()
    checkpoint.save(tmp_path / "3", {"w": jnp.ones(3)})
    assert left_overs(tmp_path) == [f"33{TEMPORARY}"]  # of another step: it may be under way
    jax.block_until_ready(checkpoint.restore(tmp_path / "3", {"w": jnp.ones(3)}))
