"""A finished checkpoint survives a power failure: what is flushed to the disk, and in which order."""

from __future__ import annotations

import os

import jax.numpy as jnp
import pytest

from jzero import checkpoint
from jzero.checkpoint.store import TEMPORARY
from jzero.core import durable


@pytest.fixture
def calls(monkeypatch):
    """Flushes and renames in order: ("flush", path) and ("rename", old, new)."""
    found, fsync, rename = [], os.fsync, os.rename

    def flushing(handle):
        found.append(("flush", os.readlink(f"/proc/self/fd/{handle}"), os.fstat(handle).st_size))
        fsync(handle)

    def renaming(old, new):
        found.append(("rename", str(old), str(new)))
        rename(old, new)

    monkeypatch.setattr(os, "fsync", flushing)
    monkeypatch.setattr(os, "rename", renaming)
    return found


@pytest.mark.parametrize("way", ["save", "steps"])
def test_all_is_flushed_before_the_name_and_the_name_after(way, tmp_path, calls):
    tree = {"w": jnp.ones((40, 30)), "b": jnp.ones(3)}
    path = tmp_path / "made" / "too" / "1"
    if way == "save":
        checkpoint.save(path, tree)
    else:
        with checkpoint.Steps(path.parent) as steps:
            steps.save(1, tree, metrics={"loss": 0.5})
    ((at, (_, staging, final)),) = [
        (i, c) for i, c in enumerate(calls) if c[0] == "rename" and c[2] == str(path)
    ]
    assert final == str(path)
    assert staging.startswith(f"{path}{TEMPORARY}")
    flushed = {c[1]: i for i, c in enumerate(calls[:at]) if c[0] == "flush"}
    sizes = {c[1]: c[2] for c in calls[:at] if c[0] == "flush"}
    names = list(path.rglob("*"))
    assert any(p.name == "_CHECKPOINT_METADATA" for p in names)
    assert any(p.parent.name == "checksums" for p in names)
    for p in [*names, path]:
        there = staging + str(p).removeprefix(final)
        assert there in flushed, p
        if p.is_file():
            assert sizes[there] == p.stat().st_size  # with all that is in it
        if p != path:
            assert flushed[there] < flushed[os.path.dirname(there)], p  # a folder after what it names
    assert ("flush", str(path.parent)) in [c[:2] for c in calls[at:]]  # the new name
    made = [c[1] for c in calls[:at] if c[0] == "flush"]
    assert {str(tmp_path), str(tmp_path / "made")} <= set(made)  # folders that were made on the way


def test_a_file_system_that_flushes_no_folders(tmp_path, monkeypatch):
    def refused(handle):
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refused)
    durable.flush(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(OSError, match="Invalid argument"):
        durable.flush(tmp_path / "file")


def test_an_export_too(tmp_path, calls):
    path = checkpoint.save(tmp_path / "1", {"w": jnp.ones(3)})
    calls.clear()
    checkpoint.export(path, tmp_path / "m.safetensors")
    names = [(c[0], os.path.basename(c[1])) for c in calls]
    assert names[0] == ("flush", ".m.safetensors.tmp")
    assert ("flush", "m.safetensors.xxh3") in names
