"""A folder of steps: one writer, readers that change nothing, metrics that can be trusted, nothing lost in rotation."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest
import xxhash
from layouts import assert_same
from orbax.checkpoint import v1 as ocp
from saver import state_of

from jzero import checkpoint
from jzero.checkpoint import checksums, pending, store
from jzero.checkpoint.store import TEMPORARY
from jzero.core import folder_lock as lock
from jzero.core.folder_lock import FolderLock, Holder


def tree(step=0):
    return {"w": jnp.full(3, step, jnp.float32)}


def fill(folder, losses, **more):
    """Saves a step for each loss, from 1."""
    with checkpoint.Steps(folder, best="loss", **more) as steps:
        for step, loss in enumerate(losses, 1):
            steps.save(step, tree(step), metrics={"loss": loss})
    return steps


def everything(folder):
    """What lies below a folder: names, sizes and times."""
    found = {}
    for path in sorted(folder.rglob("*")):
        info = path.lstat()
        found[str(path.relative_to(folder))] = (info.st_size, info.st_mtime_ns, info.st_ino)
    return found


@pytest.fixture
def held(monkeypatch):
    """Saves stop before their checksums, until the event is set."""
    go, write, there = threading.Event(), checksums.write, threading.Event()

    def waiting(*args, **kwargs):
        there.set()
        assert go.wait(30)
        return write(*args, **kwargs)

    monkeypatch.setattr(checksums, "write", waiting)
    go.there = there
    yield go
    go.set()


# ------------------------------------------------------------------------------------ readers beside a writer


def test_a_reader_changes_nothing_while_a_save_is_under_way(tmp_path, held):
    held.set()
    fill(tmp_path, [3.0])
    held.clear()
    held.there.clear()
    with checkpoint.Steps(tmp_path, best="loss") as writer:
        writer.save(2, tree(2), metrics={"loss": 1.0})
        assert held.there.wait(30)
        before = everything(tmp_path)
        assert any(TEMPORARY in name for name in before)
        with checkpoint.Steps(tmp_path, best="loss") as reader:
            assert (reader.steps, reader.best) == ([1], 1)
            assert reader.restore(tree())["w"].tolist() == [1, 1, 1]
        assert everything(tmp_path) == before
        held.set()
        writer.wait()
        assert reader.steps == [1, 2]  # a reader sees what has come since
    assert checkpoint.verify(tmp_path / "2") > 0


def test_a_reader_of_a_folder_that_is_not_there_does_not_make_it(tmp_path):
    steps = checkpoint.Steps(tmp_path / "none", best="loss")
    assert (steps.steps, steps.best) == ([], None)
    with pytest.raises(FileNotFoundError, match="no step in"):
        steps.restore(tree())
    steps.close()
    assert not list(tmp_path.iterdir())


def test_a_step_above_32_bits(tmp_path):
    with checkpoint.Steps(tmp_path) as steps:
        steps.save(3_000_000_000, tree(), custom={"tokens": 1})
        steps.wait()
        assert steps.custom() == {"tokens": 1}
        steps.restore(tree())


def test_a_step_that_is_removed_while_it_is_read(tmp_path, monkeypatch):
    fill(tmp_path, [3.0, 2.0])
    small = checksums.Checksums.small

    def removed(sums):
        shutil.rmtree(tmp_path / "2", ignore_errors=True)
        return small(sums)

    monkeypatch.setattr(checksums.Checksums, "small", removed)
    with pytest.raises(FileNotFoundError, match=r"2 is not there: .* There are \[1\] now"):
        checkpoint.Steps(tmp_path).restore(tree())


# ------------------------------------------------------------------------------------------------ one writer


@pytest.fixture
def other(tmp_path):
    """Another live process, which holds the lock of the folder, whatever the file says."""
    code = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); input()"
    there = [sys.executable, "-c", code, str(tmp_path / lock.NAME)]
    with subprocess.Popen(there, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline()
        yield process
        process.kill()


def locked_by(folder, **fields):
    """A lock as another process makes it."""
    folder.mkdir(exist_ok=True)
    me = Holder.me()
    lock_file = folder / lock.NAME
    lock_file.write_text(json.dumps(vars(me) | {"token": "other"} | fields))
    return lock_file


def test_a_second_live_writer_is_refused(tmp_path, request):
    fill(tmp_path, [3.0])
    other = request.getfixturevalue("other")
    os.utime(locked_by(tmp_path, pid=other.pid), (0, 0))  # live is live, however long it stands still
    before = everything(tmp_path)
    text = (
        rf"{tmp_path} is in use by process {other.pid} on .*overwrite each other's checkpoints.*"
        rf"Pass another folder, or end that process.*remove {tmp_path}/writer.lock"
    )
    with pytest.raises(checkpoint.FolderInUse, match=text):
        checkpoint.Steps(tmp_path).save(2, tree(2))
    with pytest.raises(checkpoint.FolderInUse, match="is in use by"):
        checkpoint.Steps(tmp_path, write=True)
    assert checkpoint.Steps(tmp_path).steps == [1]  # reading is free
    assert everything(tmp_path) == before
    other.kill()  # not yet waited for: a zombie holds no lock
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    with checkpoint.Steps(tmp_path) as steps:
        steps.save(2, tree(2))
    assert steps.steps == [1, 2]
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]


def test_two_writers_in_one_process(tmp_path):
    first = checkpoint.Steps(tmp_path, write=True)
    with pytest.raises(
        checkpoint.FolderInUse, match="That is this process: close the Steps that wrote there"
    ):
        checkpoint.Steps(tmp_path).save(1, tree())
    del first  # what is collected has let go
    with checkpoint.Steps(tmp_path) as steps:
        steps.save(1, tree())


def test_a_number_that_another_process_has_now(tmp_path):
    locked_by(tmp_path, pid=os.getppid())  # which lives, and holds nothing
    with checkpoint.Steps(tmp_path, write=True):
        pass
    assert not list(tmp_path.iterdir())


def test_a_lock_of_another_host(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lock, "LOOK", 0.01)
    file = locked_by(tmp_path, host="elsewhere", machine="another", pid=7)
    stop = threading.Event()

    def renew():
        time.sleep(0.05)
        while not stop.wait(0.02):
            os.utime(file)

    thread = threading.Thread(target=renew)
    thread.start()
    with pytest.raises(checkpoint.FolderInUse, match="by process 7 on elsewhere"):
        FolderLock(tmp_path, stale=30.0).acquire()
    stop.set()
    thread.join()
    assert "is locked by process 7 on elsewhere. Waiting up to 30 s" in capsys.readouterr().err
    mine = FolderLock(tmp_path, stale=0.2)  # nobody renews it any more: waits so long, and takes it
    mine.acquire()
    mine.check()
    mine.release()
    os.utime(locked_by(tmp_path, host="elsewhere", machine="another"), (time.time() - 61,) * 2)
    start = time.monotonic()
    mine = FolderLock(tmp_path)  # the real bound: at once
    mine.acquire()
    assert time.monotonic() - start < 5
    mine.release()
    assert not list(tmp_path.iterdir())


def test_a_lock_that_cannot_be_read_counts_as_one_of_another_host(tmp_path):
    (tmp_path / lock.NAME).write_text("{}")
    os.utime(tmp_path / lock.NAME, (time.time() - 61,) * 2)
    mine = FolderLock(tmp_path)
    mine.acquire()
    mine.release()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("text", "waits"), [("{", False), ('{"of": "another version"}', True)])
def test_a_lock_that_was_torn_is_free_and_one_of_another_version_is_not(tmp_path, monkeypatch, capsys, text, waits):
    monkeypatch.setattr(lock, "LOOK", 0.01)
    (tmp_path / lock.NAME).write_text(text)
    mine = FolderLock(tmp_path, stale=0.2)
    mine.acquire()
    mine.release()
    assert ("by another process. Waiting" in capsys.readouterr().err) == waits


def test_what_a_file_server_keeps_for_a_host_that_is_gone(tmp_path, other):
    os.utime(locked_by(tmp_path, host="elsewhere", machine="another"), (time.time() - 61,) * 2)
    mine = FolderLock(tmp_path)
    mine.acquire()  # a new file, since the old one stays locked
    mine.check()
    with pytest.raises(checkpoint.FolderInUse, match="in use by"):
        FolderLock(tmp_path).acquire()
    mine.release()
    assert other.poll() is None
    assert not list(tmp_path.iterdir())


def test_a_file_system_without_locks(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lock, "_flock", lambda *args, **fields: None)
    monkeypatch.setattr(lock, "LOOK", 0.05)
    first = FolderLock(tmp_path, renewed=0.02)
    first.acquire()
    with pytest.raises(checkpoint.FolderInUse, match=f"in use by process {os.getpid()} "):
        FolderLock(tmp_path).acquire()
    first.release()
    locked_by(tmp_path, pid=2**22 + 1)  # of this host; whether it lives only the file's time tells
    mine = FolderLock(tmp_path, stale=0.2)
    mine.acquire()
    mine.release()
    assert capsys.readouterr().err.count("Waiting up to") == 2
    assert not list(tmp_path.iterdir())


def test_it_is_renewed(tmp_path):
    mine = FolderLock(tmp_path, renewed=0.02)
    mine.acquire()
    os.utime(mine.file, (0, 0))
    deadline = time.monotonic() + 10
    while mine.file.stat().st_mtime < time.time() - 60:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    mine.release()


def test_an_observer_that_comes_late_does_not_touch_the_new_lock(tmp_path):
    locked_by(tmp_path, pid=2**22 + 1)
    file = tmp_path / lock.NAME
    stale, seen = Holder.read(file), file.stat().st_mtime
    winner = FolderLock(tmp_path)
    winner.acquire()
    before = file.stat()
    FolderLock(tmp_path)._remove(stale, seen)
    assert file.stat().st_ctime_ns == before.st_ctime_ns  # not even moved away and back
    winner.release()


def test_of_many_that_find_a_stale_lock_one_takes_it(tmp_path):
    for _ in range(5):
        locked_by(tmp_path, pid=2**22 + 1)  # beyond any process
        found = []

        def take(found=found):
            mine = FolderLock(tmp_path)
            try:
                mine.acquire()
                found.append(mine)
            except checkpoint.FolderInUse:
                pass

        threads = [threading.Thread(target=take) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 1
        found[0].check()
        found[0].release()
        assert not list(tmp_path.iterdir())


def test_a_writer_that_lost_its_lock_commits_nothing(tmp_path, held):
    steps = checkpoint.Steps(tmp_path)
    steps.save(1, tree())
    locked_by(tmp_path, host="elsewhere", machine="another")
    held.set()
    with pytest.raises(checkpoint.FolderInUse, match="this run has lost its lock on"):
        steps.wait()
    steps.close()
    assert os.listdir(tmp_path) == [lock.NAME]  # that of the other


def test_a_forked_process_leaves_the_lock_alone(tmp_path):
    mine = FolderLock(tmp_path)
    mine.acquire()
    mine.me = type(mine.me)(**(vars(mine.me) | {"pid": os.getpid() + 1}))
    mine.release()
    assert mine.file.exists()


def test_after_an_exception_a_save_that_hangs_is_not_waited_for_forever(tmp_path, held, monkeypatch):
    """The lock stays until it is finished, or the process ends."""
    monkeypatch.setattr(pending, "EXIT_SECONDS", 0.1)
    with pytest.raises(TimeoutError) as caught, checkpoint.Steps(tmp_path) as steps:  # noqa: PT012
        steps.save(1, tree())
        raise ValueError("boom")
    assert isinstance(caught.value.__context__, ValueError)
    assert (tmp_path / lock.NAME).exists()
    held.set()
    steps.close()
    assert os.listdir(tmp_path) == ["1"]


# ---------------------------------------------------------------------------------------- metrics in doubt


def flip(file, at):
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("how", ["orbax's file is garbled", "empty", "missing", "flipped", "gone"])
def test_a_step_whose_metrics_are_damaged_is_named_and_kept(how, tmp_path):
    fill(tmp_path, [0.1, 0.9, 0.5], keep=3)
    sums = tmp_path / "1" / "state" / "checksums" / "0.json"
    harmless = how == "orbax's file is garbled"
    if harmless:  # it is for plain orbax
        (tmp_path / "1" / "metrics" / "metrics").write_text("")
    elif how == "empty":
        sums.write_bytes(b"")
    elif how == "missing":
        sums.unlink()
    elif how == "gone":
        shutil.rmtree(sums.parent)
    else:
        flip(sums, sums.read_bytes().index(b"0.1"))
    with checkpoint.Steps(tmp_path, keep=1, best="loss") as steps:
        if harmless:
            assert steps.best == 1
            steps.save(4, tree(4), metrics={"loss": 0.7})
        else:
            with pytest.warns(
                UserWarning, match=rf"metrics of step 1 in {tmp_path} cannot be trusted.*not deleted"
            ):
                assert steps.best == 3
            steps.save(4, tree(4), metrics={"loss": 0.7})
            steps.save(5, tree(5), metrics={"loss": 0.6})
        steps.wait()
        assert steps.steps == ([1, 4] if harmless else [1, 3, 5])
        assert steps.restore(tree(), step=3 if not harmless else 4)["w"][0] == (4 if harmless else 3)


def test_a_step_that_its_writer_removes_meanwhile_is_in_no_doubt(tmp_path, monkeypatch):
    fill(tmp_path, [0.1, 0.9])
    sealed = store.has_checksums
    monkeypatch.setattr(
        store, "has_checksums", lambda path: shutil.rmtree(path) if path.name == "1" else sealed(path)
    )
    assert checkpoint.Steps(tmp_path, best="loss").best == 2


def test_steps_of_others_are_in_doubt(tmp_path):
    """Those that plain orbax wrote, and an earlier version, whose checksums were of the data alone."""
    fill(tmp_path, [0.3])
    with ocp.training.Checkpointer(str(tmp_path)) as plain:
        plain.save(2, tree(2), metrics={"loss": 0.1}, force=True)
    fill(tmp_path / "old", [0.2])
    sums = tmp_path / "old" / "1" / "state" / "checksums" / "0.json"
    body = json.loads(sums.read_bytes().partition(b"\n")[2])
    body |= {"version": 1, "files": {n[6:]: x for n, x in body["files"].items() if n.startswith("state/")}}
    del body["metrics"]
    text = json.dumps(body).encode()
    sums.write_bytes(xxhash.xxh3_64_hexdigest(text).encode() + b"\n" + text)
    assert checkpoint.verify(tmp_path / "old" / "1") > 0
    assert_same(checkpoint.restore(tmp_path / "old" / "1", tree()), tree(1))
    (tmp_path / "old" / "1").rename(tmp_path / "3")
    with checkpoint.Steps(tmp_path, keep=1, best="loss") as steps:
        with pytest.warns(UserWarning, match="cannot be trusted") as told:
            assert steps.best == 1
        assert ["step 2" in str(w.message) for w in told] == [True, False]
        assert "an earlier version wrote it" in str(told[1].message)
        steps.save(4, tree(4), metrics={"loss": 0.5})
        steps.wait()
        assert steps.steps == [1, 2, 3, 4]


def test_metrics_are_what_was_passed(tmp_path):
    metrics = {
        "loss": jnp.float32(0.5),
        "n": np.int64(3),
        "half": jnp.bfloat16(0.25),
        "one": jnp.ones(1),
        "on": True,
    }
    with checkpoint.Steps(tmp_path, best="loss", mode="max") as steps:
        steps.save(1, tree(), metrics=metrics)
        steps.save(2, tree(), metrics={"loss": float("nan")})
        steps.wait()
        assert (steps.steps, steps.best) == ([1, 2], 1)
    assert checksums.Checksums(tmp_path / "1").metrics == {"loss": 0.5, "n": 3, "half": 0.25, "one": 1.0, "on": True}
    with ocp.training.Checkpointer(str(tmp_path)) as plain:  # and plain orbax finds them
        assert next((c.step, c.metrics["loss"]) for c in plain.checkpoints) == (1, 0.5)
    with checkpoint.Steps(tmp_path, best="acc") as steps:
        assert steps.best is None


@pytest.mark.parametrize(
    "bad", [{"loss": "0.5"}, {"loss": None}, {"loss": jnp.ones(2)}, {"loss": 1j}, {1: 0.5}, [0.5], "loss"]
)
def test_metrics_that_are_no_numbers_fail_at_once(bad, tmp_path):
    with checkpoint.Steps(tmp_path) as steps, pytest.raises(TypeError, match="metric"):
        steps.save(1, tree(), metrics=bad)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("bad", [2.5, float("nan"), "3", True, None, np.float32(2)])
def test_a_step_is_an_integer(bad, tmp_path):
    steps = checkpoint.Steps(tmp_path)
    with pytest.raises(TypeError, match="step must be an integer of at least 0"):
        steps.save(bad, tree())
    with pytest.raises(ValueError, match="step must be an integer of at least 0"):
        steps.save(-1, tree())
    assert not list(tmp_path.iterdir())


# -------------------------------------------------------------------------------------------- what is kept


def test_links_and_other_things_among_the_steps(tmp_path):
    folder = tmp_path / "run"
    elsewhere = checkpoint.save(tmp_path / "elsewhere", tree(7))
    folder.mkdir()
    (folder / "1").symlink_to(elsewhere)
    (folder / "latest").symlink_to("2")
    (folder / "3").mkdir()
    (folder / "0004").mkdir()
    (folder / "notes.txt").write_text("x")
    with checkpoint.Steps(folder, keep=1) as steps:
        steps.save(2, tree(2))
        with pytest.raises(FileExistsError, match=r"save: .*/3 exists and is not replaced"):
            steps.save(3, tree(3))
        for step in (5, 6):
            steps.save(step, tree(step))
        steps.wait()
        assert steps.steps == [1, 6]  # a link is read, and not deleted
        assert steps.restore(tree(), step=1)["w"][0] == 7
    assert sorted(os.listdir(folder)) == ["0004", "1", "3", "6", "latest", "notes.txt"]
    assert checkpoint.verify(elsewhere) > 0


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # of files that cannot be flushed
@pytest.mark.parametrize("limit", [300, 8_000, 3_000_000])
def test_after_a_full_disk_nothing_is_left_and_the_next_save_works(limit, tmp_path):
    """Threads of orbax go on for a while when one has failed, and make anew what was removed."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    steps = fill(tmp_path, [1.0])
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[0][1]))
        with pytest.raises(OSError, match=r"File too large: .*/2 is not saved"):  # noqa: PT012 (by either)
            steps.save(2, state_of(2), metrics={"loss": 0.5})
            steps.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before[0])
        signal.signal(signal.SIGXFSZ, before[1])
    time.sleep(0.1)
    assert sorted(os.listdir(tmp_path)) == ["1", lock.NAME]
    steps.save(2, tree(2), metrics={"loss": 0.5})
    steps.close()
    assert steps.steps == [1, 2]


def test_what_threads_of_a_failed_save_make_anew_is_removed_again(tmp_path, monkeypatch):
    left = tmp_path / f"2{TEMPORARY}-whole" / "state" / "d"
    looks = iter(range(store.RETRIES))

    def made_anew(_):
        if next(looks) < 3:
            left.mkdir(parents=True)  # what was there has been removed

    left.mkdir(parents=True)
    monkeypatch.setattr(store.time, "sleep", made_anew)
    store.clean(tmp_path / "2", failed=True)
    assert next(looks) == 4  # it stayed away once
    assert not list(tmp_path.iterdir())


def test_what_a_killed_run_left_goes_with_the_first_save(tmp_path):
    left = tmp_path / f"9{TEMPORARY}-whole{TEMPORARY}"
    left.mkdir()
    (tmp_path / f"mine{TEMPORARY}").mkdir()
    assert checkpoint.Steps(tmp_path).steps == []
    assert left.exists()
    with checkpoint.Steps(tmp_path) as steps:
        steps.save(1, tree())
    assert sorted(os.listdir(tmp_path)) == ["1", f"mine{TEMPORARY}"]
