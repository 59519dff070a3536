"""Killed at any moment, a run with its state on a disk goes on from a whole step (tests/disk_kill_loop.py)."""

from __future__ import annotations

import pytest
from disk_kill_loop import Loop


@pytest.mark.nightly
def test_killed_and_continued(tmp_path):
    loop = Loop(tmp_path, seed=1)
    loop.run(5)
    assert loop.reached > 5


@pytest.mark.long
def test_killed_200_times(tmp_path):
    loop = Loop(tmp_path, seed=2)
    loop.run(200)
    assert loop.reached > 200
