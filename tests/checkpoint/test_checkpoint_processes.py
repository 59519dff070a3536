"""Saved by two processes with four devices each, restored by four with two, and by one with eight or five."""

from __future__ import annotations

import shutil

import pytest
from checkpoint_worker import restored
from layouts import mesh_of
from processes import launch

from jzero import checkpoint
from jzero.checkpoint.store import TEMPORARY


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two checkpoints of two processes, and copies of one with a flipped byte and without a file."""
    folder = tmp_path_factory.mktemp("run")
    saved = launch("checkpoint_worker.py", 2, 4, "save", folder, timeout=120)
    assert [w["devices"] for w in saved] == [8, 8]
    assert not [r for w in saved for r in w["runs"] if r["wrong"]]
    assert not [p for p in folder.iterdir() if TEMPORARY in p.name]
    for step in (2, 3):
        names = sorted(p.name for p in (folder / str(step) / "state" / "checksums").iterdir())
        assert names == ["0.json", "1.json"]  # a part of each process
        assert checkpoint.verify(folder / str(step)) > 100_000
    for name in ("flipped", "missing"):
        shutil.copytree(folder / "large", folder / name)
        file = max((folder / name / "state").rglob("d/*"), key=lambda f: f.stat().st_size)
        assert file.stat().st_size > 2**20
        data = bytearray(file.read_bytes())
        data[len(data) // 3] ^= 8
        file.write_bytes(data) if name == "flipped" else file.unlink()
    return folder


def check(worker):
    assert [r["wrong"] for r in worker["runs"]] == [[], []]
    assert worker["custom"] == {"stage": 3}
    assert "differs within bytes" in worker["flipped"] or "process" in worker["flipped"]
    assert "missing" in worker["missing"] or "process" in worker["missing"]
    for name in ("flipped", "missing"):
        assert "is damaged, and nothing of it is used" in worker[name]
        assert "The last good checkpoint beside it: " in worker[name]


@pytest.mark.nightly
def test_four_processes_with_two_devices(folder):
    found = launch("checkpoint_worker.py", 4, 2, "restore", folder, timeout=120)
    assert [w["devices"] for w in found] == [8] * 4
    for worker in found:
        check(worker)
    assert any("process" in w["flipped"] for w in found)  # those that did not read it know
    assert len({tuple(r["held"] for r in w["runs"]) for w in found}) == 1  # a quarter each


@pytest.mark.nightly
@pytest.mark.parametrize("devices", [8, 5])
def test_one_process(devices, folder):
    check(restored(str(folder), mesh_of(devices)))
