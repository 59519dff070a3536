"""A store of jzero: what is written is read, through a buffer smaller than the state; what is refused, and how."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from disk_units import UNITS, advance, check_whole, same, values

from jzero.core.folder_lock import FolderInUse
from jzero.update.on_host.disk import DamagedStore, DiskStore, FileUnit, slots, transfers

pytestmark = pytest.mark.unit
BUFFER = 4 * max(u.nbytes for u in UNITS)
MANY = tuple(FileUnit(f"u{i}", (((1000 + 77 * i,), "float32"),)) for i in range(32))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state"


def create(path, units=UNITS, *, steps=0, **fields):
    fields = {"identity": {"model": "gpt", "layers": [1, 2]}, "buffer_bytes": 2**20, **fields}
    store = DiskStore.create(path, units, **fields)
    for _ in range(steps):
        advance(store)
    return store


def write_all(step, generation):
    for i in range(len(UNITS)):
        step.write(i, values(i, generation))
    step.commit()


def slot_files(store):
    return [store._slots.file(i, s) for i, s in enumerate(store._record.slots)]


def test_round_trip_of_dtypes_and_odd_sizes(path):
    with create(path, steps=3) as store:
        check_whole(store)
    with DiskStore.open(path, UNITS, identity={"layers": [1, 2], "model": "gpt"}) as store:
        assert (store.generation, store.extra, store.units) == (3, b"3", UNITS)
        assert store.identity == {"model": "gpt", "layers": [1, 2]}
        check_whole(store)
        advance(store)
        for unit, file in zip(
            UNITS, slot_files(store), strict=True
        ):  # nothing of other units lies in the gaps
            at, count = unit.spans[-1]
            assert not any(file.read_bytes()[at + count :])
    with DiskStore.open(path, read_only=True) as store:
        check_whole(store)
        with store.begin() as step, pytest.raises(ValueError, match="read_only=True"):
            step.write(0, values(0, 1))


def test_blocks_and_requests_of_a_large_unit(path, monkeypatch):
    monkeypatch.setattr(transfers, "BLOCK", 4096)
    monkeypatch.setattr(transfers, "REQUEST", 8192)
    with create(path, steps=2) as store:
        assert store._record.digests[0].size == -(-UNITS[0].nbytes // 4096) > 4
        check_whole(store)
    with DiskStore.open(path) as store:
        check_whole(store)


def test_views_are_aligned_and_writable_and_lie_in_the_buffer(path):
    with create(path, steps=1, buffer_bytes=BUFFER) as store, store.begin() as step:
        for array in step.read(0):
            assert array.ctypes.data % 64 == 0
            assert array.flags.writeable
        assert store._frames.size * store._frames.count <= BUFFER


def test_arrays_of_the_frame_may_change_places(path):
    unit = FileUnit("pair", (((1000,), "float32"), ((1000,), "float32")))
    with create(path, [unit]) as store:
        a, b = np.arange(1000, dtype=np.float32), np.ones(1000, np.float32)
        with store.begin() as step:
            step.write(0, [a, b])
            step.commit()
        with store.begin() as step:
            step.write(0, step.read(0)[::-1])
            step.commit()
        with store.begin() as step:
            assert same(step.read(0), [b, a])


def test_nothing_of_another_unit_lies_between_arrays():
    frames = [np.full(u.nbytes, 255, np.uint8) for u in UNITS]
    for i, (unit, frame) in enumerate(zip(UNITS, frames, strict=True)):
        unit.put(frame, values(i, 1), where="here")
        assert same(unit.views(frame), values(i, 1))
        assert frame.sum() == sum(x.view(np.uint8).sum() for a in values(i, 1) for x in [a.reshape(-1)])


def test_the_slots_alternate_and_a_unit_that_is_not_written_stays(path):
    with create(path, steps=2) as store:
        before = {f: f.read_bytes() for f in slot_files(store)}
        first = store._record.slots
        with store.begin() as step:
            step.write(1, values(1, 7))
            step.commit()
        assert [a != b for a, b in zip(first, store._record.slots, strict=True)] == [
            False,
            True,
            False,
            False,
        ]
        assert all(f.read_bytes() == data for f, data in before.items())
        with store.begin() as step:
            step.read_ahead([1, 3])
            assert same(step.read(1), values(1, 7))
            assert same(step.read(3), values(3, 2))


def test_an_abandoned_step_never_happened(path):
    with create(path, steps=2) as store:
        with store.begin() as step:
            step.read_ahead([2, 1, 0])
            step.read(2)
            step.write(2, values(2, 9))
        assert store._frames.free == store._frames.count
        check_whole(store)
        with pytest.raises(RuntimeError, match="has ended"):
            step.read(1)
        with store.begin(), pytest.raises(RuntimeError, match="a step is open"):
            store.begin()


def test_a_buffer_smaller_than_the_state(path, monkeypatch):
    """Writes are slow: reads wait for frames, and no more units are under way than the buffer has frames."""
    least, most, slow = [99], [0], os.pwritev

    def pwritev(*args):
        least[0] = min(least[0], store._frames.free)
        time.sleep(0.001)
        return slow(*args)

    size = max(u.nbytes for u in MANY)
    with create(path, MANY, buffer_bytes=5 * size) as store:
        monkeypatch.setattr(os, "pwritev", pwritev)
        take = store._frames.take
        monkeypatch.setattr(
            store._frames,
            "take",
            lambda: (most.append(store._frames.count - store._frames.free + 1), take())[1],
        )
        for _ in range(3):
            advance(store)
        check_whole(store)
        assert store._frames.count == 5
        assert (max(most), least[0]) == (5, 0)


def test_units_released_before_they_are_written(path):
    """As a driver does that copies to a device: all frames could be full of what nobody has asked for yet."""
    with create(path, MANY, steps=1, buffer_bytes=4 * max(u.nbytes for u in MANY)) as store:
        with store.begin() as step:
            step.read_ahead(range(32))
            for i in range(32):
                assert same(step.read(i), values(i, 1, MANY))
                step.release(i)
                if i:
                    step.write(i - 1, values(i - 1, 2, MANY))
            step.write(31, values(31, 2, MANY))
            step.commit(b"2")
        check_whole(store)


def test_a_caller_that_holds_all_frames_is_told(path):
    with (
        create(path, MANY, steps=1, buffer_bytes=4 * max(u.nbytes for u in MANY)) as store,
        store.begin() as step,
    ):
        for i in range(4):
            step.read(i)
        with pytest.raises(
            RuntimeError, match=r"(?s)all 4 frames.*4 units were read.*unit 0 *u0.*buffer_bytes"
        ):
            step.read(4)
        step.release(2)
        step.read(4)


def test_reads_run_ahead_of_the_caller(path):
    with create(path, MANY, steps=1) as store, store.begin() as step:
        begun = threading.Event()
        step.read_ahead(range(32))
        for _ in range(1000):
            if all(t.finished.is_set() for t, _ in step._ahead.values()):
                begun.set()
                break
            time.sleep(0.005)
        assert begun.is_set()
        assert len(step._ahead) == 32


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda s: s.read(9), "integer from 0 to 3"),
        (lambda s: s.read_ahead([1, 1]), r"unit 1 \('blocks'\) is announced already"),
        (lambda s: (s.read_ahead([1, 2]), s.read(2)), r"unit 1 \('blocks'\) was announced next"),
        (lambda s: (s.read(1), s.read(1)), "is held: write or release it first"),
        (lambda s: (s.write(1, values(1, 5)), s.read(1)), "was written in this step"),
        (lambda s: (s.write(1, values(1, 5)), s.write(1, values(1, 5))), "was written in this step already"),
        (lambda s: (s.read_ahead([1]), s.write(1, values(1, 5))), "is announced to be read"),
        (lambda s: s.write(2, values(1, 5)), r"'norm': float64\[13\], bool\[1\], and float32\[3,1001\]"),
        (lambda s: s.release(1), "unit 1 is not held"),
    ],
)
def test_what_a_step_refuses(path, act, message):
    with create(path, steps=1) as store, store.begin() as step, pytest.raises(ValueError, match=message):
        act(step)


def test_the_first_step_writes_all(path):
    with create(path) as store, store.begin() as step:
        with pytest.raises(ValueError, match="has never been written: generation 0"):
            step.read(0)
        step.write(1, values(1, 1))
        with pytest.raises(ValueError, match=r"(?s)3 of 4 units have never been written:.*unit 0 *embed"):
            step.commit()


@pytest.mark.parametrize("when", ["write", "record"])
def test_a_disk_that_fills_up(path, monkeypatch, when):
    """The error names the file, and comes at the next call; the generation stays whole, and the next step works."""
    full = OSError(errno.ENOSPC, "No space left on device")

    def refuse(*args):
        raise full

    with create(path, steps=2) as store:
        with monkeypatch.context() as patch, store.begin() as step:
            patch.setattr(*((os, "pwritev", refuse) if when == "write" else (os, "fsync", refuse)))
            with pytest.raises(OSError, match="No space left") as caught:
                write_all(step, 3)
            assert caught.value.errno == errno.ENOSPC
            if when == "write":
                assert "unit-0000" in str(caught.value)
                with pytest.raises(OSError, match="could not write unit"):
                    step.release(0)
        assert store.generation == 2
        if when == "record":  # the record may be on the disk, and could not be taken back
            with pytest.raises(RuntimeError, match="Close and reopen the store"):
                store.begin()
            return
        check_whole(store)
        advance(store)
        check_whole(store)


def test_a_record_that_was_not_flushed_is_taken_back(path, monkeypatch):
    """Or else a kill in the next step would find it, with slots that this step has overwritten."""
    real, calls = os.fsync, []

    def once(handle):
        calls.append(handle)
        if len(calls) == 1:
            raise OSError(errno.EIO, "Input/output error")
        real(handle)

    with create(path, steps=2) as store:
        with monkeypatch.context() as patch, store.begin() as step:
            step.write(0, values(0, 3))
            patch.setattr(os, "fsync", once)
            with pytest.raises(OSError, match="Input/output"):
                step.commit()
        with store.begin() as step:
            step.write(0, values(0, 4))
    with DiskStore.open(path) as store:
        assert store.generation == 2
        check_whole(store)


@pytest.mark.parametrize("what", ["flip", "cut", "missing"])
def test_damage_is_found_when_it_is_read(path, monkeypatch, what):
    monkeypatch.setattr(transfers, "BLOCK", 4096)
    with create(path, steps=2) as store:
        file = slot_files(store)[3]
    data = bytearray(file.read_bytes())
    data[9000] ^= 1
    if what == "missing":
        file.unlink()
    else:
        file.write_bytes(data if what == "flip" else data[:8192])
    with DiskStore.open(path) as store, store.begin() as step:
        assert same(step.read(2), values(2, 2))
        kind, message = {
            "flip": (DamagedStore, f"'head': {file} has another checksum.* block 2, bytes 8192 to 12288"),
            "cut": (DamagedStore, f"'head': {file} ends after 8192 bytes"),
            "missing": (FileNotFoundError, f"could not read unit 'head'.*{file}"),
        }[what]
        with pytest.raises(kind, match=message):
            step.read(3)


def test_nothing_is_overwritten(path):
    create(path, steps=2).close()
    files = sorted((p.name, p.read_bytes()) for p in path.rglob("*") if p.is_file())
    with pytest.raises(
        ValueError, match=r"generation 2 with 4 units, and nothing is over"
    ):
        create(path)
    assert files == sorted((p.name, p.read_bytes()) for p in path.rglob("*") if p.is_file())


def test_another_number_of_processes(path):
    for i in range(2):
        create(path, process=(i, 2), steps=1).close()
    assert sorted(p.name for p in path.iterdir()) == ["process-00000-of-00002", "process-00001-of-00002"]
    for how in (DiskStore.open, create):
        with pytest.raises(ValueError, match="state of 2 processes, and this run has 4"):
            how(path, process=(0, 4))


def test_other_units_and_another_identity(path):
    create(path, steps=1).close()
    other = (*UNITS[:2], FileUnit("norm", (((14,), "float64"), ((1,), "bool"))), UNITS[3])
    with pytest.raises(ValueError, match=r"(?s)1 of 4 units .*unit 2 *stored 'norm': float64\[13\].*\[14\]"):
        DiskStore.open(path, other)
    with pytest.raises(ValueError, match="has 4 units, and 3 were passed"):
        DiskStore.open(path, UNITS[:3])
    with pytest.raises(ValueError, match=r"(?s)is of another run.*layers *stored \[1, 2\] *passed nothing"):
        DiskStore.open(path, identity={"model": "gpt"})
    with pytest.raises(ValueError, match="of another run") as error:
        DiskStore.open(path, identity={"layers": [1, 3], "model": "bert"})
    assert "layers[1]  stored 2  passed 3" in str(error.value)
    assert "jzero.checkpoint.save" in str(error.value)
    assert "bert" not in str(error.value)
    with pytest.raises(TypeError, match="must be a mapping of JSON"):
        DiskStore.open(path, identity={"model": object()})


def test_paths_that_cannot_be_used(path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="Is the disk mounted"):
        create(path / "below")
    assert not path.exists()
    with pytest.raises(FileNotFoundError, match=r"there is no optimizer state"):
        DiskStore.open(path)
    with pytest.raises(OSError, match=r"cannot make its folder.*/proc/jzero"):  # nobody may write there
        create("/proc/jzero")
    path.write_text("a file")
    with pytest.raises(OSError, match="cannot make its folder"):
        create(path)


def test_a_disk_that_is_too_small_is_found_at_once(path, monkeypatch):
    size = 2 * sum(u.nbytes for u in UNITS)
    monkeypatch.setattr(os, "posix_fallocate", lambda *a: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(OSError, match=rf"create needs {size / 1e3:.2f} kB for 8 files, and .* are free"):
        create(path)
    monkeypatch.undo()
    assert list(path.iterdir()) == []
    large = [FileUnit(f"u{i}", (((2**50,), "uint8"),)) for i in range(3)]
    with pytest.raises(OSError, match=r"needs 6755.40 TB for 6 files"):
        slots.Slots(path, large, requests=1).preallocate(
            [(i, s) for i in range(3) for s in (0, 1)], where="x"
        )
    create(path).close()


def test_what_create_refuses(path):
    with pytest.raises(
        ValueError, match=r"2 of 4 units are larger than a quarter .*'embed'.*buffer_bytes=114688"
    ):
        create(path, buffer_bytes=95_000)
    with pytest.raises(ValueError, match=r"(?s)1 unit name used twice:.*norm"):
        create(path, [*UNITS, UNITS[2]])
    with pytest.raises(TypeError, match="must be pairs of a shape and a dtype"):
        FileUnit("x", ((3,),))  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="must be a dtype"):
        FileUnit("x", (((3,), "float33"),))
    assert not path.exists()


def test_one_run_per_folder(path):
    store = create(path, steps=1)
    with pytest.raises(
        FolderInUse, match=rf"in use by process {os.getpid()} on .*That is this process: delete"
    ):
        DiskStore.open(path)
    with pytest.raises(FolderInUse, match="in use by"):
        DiskStore.open(path, read_only=True)
    with pytest.raises(FolderInUse, match="in use by"):  # and not that it may be removed
        create(path)
    store.close()
    with (
        DiskStore.open(path, read_only=True),
        DiskStore.open(path, read_only=True),
        pytest.raises(FolderInUse, match="another process, which reads it"),
    ):
        DiskStore.open(path)
    DiskStore.open(path).close()


def test_the_lock_of_a_killed_run_is_taken_over_even_if_its_child_lives(path):
    create(path, steps=1).close()
    code = (
        "import os, sys, time, warnings\n"
        "from jzero.update.on_host.disk import DiskStore; warnings.simplefilter('ignore')\n"
        f"store = DiskStore.open({str(path)!r})\n"
        "if os.fork() == 0: print(os.getpid(), flush=True)\n"
        "time.sleep(100)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout
    child = int(owner.stdout.readline())  # printed by the child: its copy of the lock is closed by then
    try:
        with pytest.raises(FolderInUse, match=rf"process {owner.pid} on "):
            DiskStore.open(path)
        owner.kill()
        owner.wait()
        os.kill(child, 0)
        with DiskStore.open(path) as store:
            check_whole(store)
    finally:
        owner.kill()
        owner.stdout.close()
        os.kill(child, 9)


def test_without_direct_io(path, monkeypatch):
    real = os.open

    def refuse(file, flags, *args, **fields):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument", str(file))
        return real(file, flags, *args, **fields)

    monkeypatch.setattr(os, "open", refuse)
    with create(path, steps=2) as store:
        assert not store.direct
        check_whole(store)
