"""After a kill or a power failure at any moment a store opens at the last generation committed, or the one before."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import pytest
from disk_units import UNITS, advance, check_whole

from jzero.update.on_host.disk import DamagedStore, DiskStore, record, snapshots

BUFFER = 2**20


def opened(path, **fields):
    return DiskStore.open(path, UNITS, buffer_bytes=BUFFER, **fields)


def killed(path: Path, when: Callable[[TextIO], object]) -> int:
    """Forks a process that steps, kills it when `when` returns; the last generation that it knew committed.

    Args:
      when: called with the pipe from which the generations can be read.
    """
    import disk_worker

    inside, outside = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            disk_worker.steps(str(path), outside)
        finally:
            os._exit(1)
    os.close(outside)
    with os.fdopen(inside) as pipe:
        when(pipe)
        os.kill(child, 9)
        _, status = os.waitpid(child, 0)
        said = pipe.read()
    assert os.WIFSIGNALED(status), f"it ended before it was killed:\n{said}"
    return int(said.splitlines()[-1]) if said else -1


def seconds_of_three_steps(path: Path) -> float:
    """How long this disk takes to create a store and to commit three steps."""
    start = time.monotonic()
    killed(path, lambda pipe: [pipe.readline() for _ in range(4)])
    return time.monotonic() - start


def kills(path: Path, count: int, seed: int) -> None:
    rng, reached = random.Random(seed), -1
    longest = 2 * seconds_of_three_steps(path.parent / "timed")
    for _ in range(count):
        told = killed(path, lambda _: time.sleep(rng.uniform(0.0, longest)))
        reached = max(reached, told)
        try:
            store = opened(path)
        except FileNotFoundError:  # killed while it was created
            assert reached == -1
            continue
        with store:
            assert store.generation in (reached, reached + 1), (store.generation, reached)
            check_whole(store)
            reached = store.generation
    assert reached > count / 4
    for snapshot in path.parent.glob(f"{path.name}-*"):
        names = [p.name for p in snapshot.iterdir() if not p.name.startswith(".")]  # a killed one has none
        if names:
            with DiskStore.open(snapshot, buffer_bytes=BUFFER, read_only=True) as store:
                assert str(store.generation) == snapshot.name.rpartition("-")[2]
                check_whole(store)


@pytest.mark.filterwarnings("ignore:os.fork.. was called:RuntimeWarning")  # the child runs no JAX
def test_killed_at_any_moment(tmp_path):
    kills(tmp_path / "state", 12, seed=1)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:os.fork.. was called:RuntimeWarning")
def test_killed_at_any_moment_200_times(tmp_path):
    kills(tmp_path / "state", 200, seed=2)


@pytest.mark.unit
@pytest.mark.parametrize("how", ["empty", "half", "flip", "zeros", "missing"])
def test_a_record_that_was_torn(tmp_path, how):
    """The generation before counts: the step has not touched its slots."""
    with DiskStore.create(tmp_path / "state", UNITS, identity={}, buffer_bytes=BUFFER) as store:
        for _ in range(4):
            advance(store)
        file, files = (
            record.file_of(store.folder, 4),
            [store._slots.file(i, s) for i, s in enumerate(store._record.slots)],
        )
    data = file.read_bytes()
    flipped = data[:50] + bytes([data[50] ^ 4]) + data[51:]
    torn = {"empty": b"", "half": data[: len(data) // 2], "flip": flipped, "zeros": bytes(len(data))}
    if how == "missing":
        file.unlink()
    else:
        file.write_bytes(torn[how])
    for slot in files:  # what was written for the generation that does not count
        slot.write_bytes(b"x" * 100)
    with opened(tmp_path / "state") as store:
        assert store.generation == 3
        check_whole(store)
        advance(store)
        advance(store)
    with opened(tmp_path / "state") as store:
        assert store.generation == 5
        check_whole(store)


@pytest.mark.unit
def test_without_a_whole_record_nothing_is_read_or_overwritten(tmp_path):
    with DiskStore.create(tmp_path / "state", UNITS, identity={}, buffer_bytes=BUFFER) as store:
        advance(store)
        files = [record.file_of(store.folder, n) for n in (0, 1)]
    for file in files:
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DamagedStore, match=r"no record in .* is whole"):
        opened(tmp_path / "state")
    with pytest.raises(DamagedStore, match=r"no record in .* is whole"):
        DiskStore.create(tmp_path / "state", UNITS, identity={}, buffer_bytes=BUFFER)


class Disk:
    """What a disk would hold of a folder after a power failure at each flush: a file has what it had when last flushed.

    Of what was not flushed since, a power failure keeps nothing, all, or some files cut in the middle: three images.
    """

    def __init__(self, folder: Path, images: Path, monkeypatch):
        self.folder, self.images, self.flushed, self.count = folder, images, {}, 0
        self.random = random.Random(3)
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, self.flushing(getattr(os, name)))

    def flushing(self, real):
        def flush(handle):
            self.fail()
            real(handle)
            file = Path(os.readlink(f"/proc/self/fd/{handle}"))
            if file.is_file() and file.parent == self.folder:
                self.flushed[file.name] = file.read_bytes()
            self.fail()

        return flush

    def fail(self) -> None:
        now = {p.name: p.read_bytes() for p in self.folder.iterdir()}
        for keep in (lambda: 0.0, lambda: 1.0, self.random.random):
            image = self.images / str(self.count) / "state" / self.folder.name
            image.mkdir(parents=True)
            self.count += 1
            for name, data in now.items():
                old = self.flushed.get(name, b"")
                cut = int(len(data) * keep())
                (image / name).write_bytes(data if data == old else data[:cut] + old[cut:])


@pytest.mark.unit
def test_power_fails_at_every_flush(tmp_path, monkeypatch):
    with DiskStore.create(tmp_path / "state", UNITS, identity={}, buffer_bytes=BUFFER, requests=1) as store:
        advance(store)
        advance(store)
        disk = Disk(store.folder, tmp_path / "images", monkeypatch)
        disk.flushed = {p.name: p.read_bytes() for p in store.folder.iterdir()}
        begun = []
        for _ in range(2):
            begun.append(disk.count)
            advance(store)
        ends = [*begun[1:], disk.count]
        monkeypatch.undo()
    assert disk.count == 2 * 3 * 2 * (
        len(UNITS) + 1
    )  # a flush of each unit and of the record, before and after
    for step, (first, end) in enumerate(zip(begun, ends, strict=True)):
        found = set()
        for n in range(first, end):
            with opened(disk.images / str(n) / "state") as store:
                assert store.generation in (2 + step, 3 + step)
                check_whole(store)
                found.add(store.generation)
        assert found == {2 + step, 3 + step}


@pytest.mark.unit
def test_a_record_left_in_the_page_cache_is_flushed_before_any_slot_is_written(tmp_path, monkeypatch):
    """A run is killed between writing and flushing its record, and the power fails in the next run."""
    with DiskStore.create(tmp_path / "state", UNITS, identity={}, buffer_bytes=BUFFER) as store:
        for _ in range(3):
            advance(store)
        folder, old = store.folder, {p.name: p.read_bytes() for p in store.folder.iterdir()}
        advance(store)
    disk = Disk(folder, tmp_path / "images", monkeypatch)
    disk.flushed = {p.name: p.read_bytes() for p in folder.iterdir()}
    disk.flushed["record.0"] = old["record.0"]  # that of generation 4 has not reached the disk
    with opened(tmp_path / "state", requests=1) as store:
        assert store.generation == 4
        advance(store)
    monkeypatch.undo()
    for n in range(disk.count):
        with opened(disk.images / str(n) / "state") as store:
            assert store.generation in (3, 4, 5)
            check_whole(store)


@pytest.mark.unit
def test_a_creation_that_was_killed_can_be_repeated(tmp_path):
    with DiskStore.create(tmp_path / "state", UNITS, identity={}, buffer_bytes=BUFFER) as store:
        file = record.file_of(store.folder, 0)
    file.rename(store.folder / "record.tmp")  # killed before the first record had its name
    with pytest.raises(FileNotFoundError, match=r"its creation did not end. Remove it"):
        opened(tmp_path / "state")
    with DiskStore.create(tmp_path / "state", UNITS[:2], identity={}, buffer_bytes=BUFFER) as store:
        assert len(list(store.folder.glob("unit-*"))) == 4


@pytest.fixture
def stepped(tmp_path):
    with DiskStore.create(tmp_path / "state", UNITS, identity={"a": 1}, buffer_bytes=BUFFER) as store:
        for _ in range(3):
            advance(store)
        yield store


@pytest.mark.unit
@pytest.mark.parametrize("links", [True, False])
def test_later_steps_leave_a_snapshot_as_it_was(stepped, tmp_path, monkeypatch, links):
    if not links:
        monkeypatch.setattr(
            os, "link", lambda *a: (_ for _ in ()).throw(OSError(18, "Invalid cross-device link"))
        )
    how = stepped.snapshot(tmp_path / "snap")
    assert how in ("reflink", "hard link" if links else "copy")
    with pytest.raises(ValueError, match="exists, and nothing is overwritten"):
        stepped.snapshot(tmp_path / "snap")
    data = {p.name: p.read_bytes() for p in (tmp_path / "snap" / stepped.folder.name).iterdir()}
    for _ in range(3):
        advance(stepped)
        with DiskStore.open(tmp_path / "snap", buffer_bytes=BUFFER, read_only=True) as snap:
            assert (snap.generation, snap.identity) == (3, {"a": 1})
            check_whole(snap)
    assert data == {p.name: p.read_bytes() for p in (tmp_path / "snap" / stepped.folder.name).iterdir()}
    shutil.rmtree(tmp_path / "snap")
    advance(stepped)
    check_whole(stepped)


@pytest.mark.unit
def test_new_slots_have_their_names_on_the_disk_before_a_record_counts_on_them(
    stepped, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        "jzero.update.on_host.disk.snapshots._reflink", lambda *a: (_ for _ in ()).throw(snapshots._Cannot)
    )
    stepped.snapshot(tmp_path / "snap")
    advance(stepped)
    flushed, real = [], os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda h: (flushed.append(Path(os.readlink(f"/proc/self/fd/{h}")).name), real(h))
    )
    advance(stepped)
    assert flushed == [stepped.folder.name, "record.1"]


@pytest.mark.unit
def test_a_run_goes_on_from_a_snapshot_of_a_snapshot(stepped, tmp_path):
    stepped.snapshot(tmp_path / "snap")
    with DiskStore.open(tmp_path / "snap", buffer_bytes=BUFFER, read_only=True) as snap:
        snap.snapshot(tmp_path / "again")
    with opened(tmp_path / "again") as again:
        for _ in range(2):
            advance(again)
        check_whole(again)
    with DiskStore.open(tmp_path / "snap", buffer_bytes=BUFFER, read_only=True) as snap:
        check_whole(snap)
    check_whole(stepped)


@pytest.mark.unit
def test_a_snapshot_that_fails_leaves_nothing(stepped, tmp_path, monkeypatch):
    with stepped.begin(), pytest.raises(RuntimeError, match="a step is open"):
        stepped.snapshot(tmp_path / "snap")
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", lambda *a: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        patch.setattr("fcntl.ioctl", lambda *a: (_ for _ in ()).throw(OSError(95, "Not supported")))
        with pytest.raises(OSError, match="No space"):
            stepped.snapshot(tmp_path / "snap")
    assert list((tmp_path / "snap").iterdir()) == []
    stepped.snapshot(tmp_path / "snap")


@pytest.mark.unit
def test_generation_0_has_no_snapshot(tmp_path):
    with DiskStore.create(tmp_path / "state", UNITS, identity={}, buffer_bytes=BUFFER) as store:
        with pytest.raises(ValueError, match="generation 0 has no contents"):
            store.snapshot(tmp_path / "snap")
        assert not (tmp_path / "snap").exists()


@pytest.mark.unit
def test_a_step_back(tmp_path):
    """Where other processes have not committed the last step; the generation before that one is gone."""
    with DiskStore.create(tmp_path / "state", UNITS, identity={}, buffer_bytes=BUFFER) as store:
        for _ in range(3):
            advance(store)
        store.step_back()
        assert store.generation == 2
        check_whole(store)
        with pytest.raises(DamagedStore, match="no whole record of the one before"):
            store.step_back()
    with opened(tmp_path / "state") as store:
        assert store.generation == 2
        check_whole(store)
        advance(store)
        check_whole(store)
