"""A killed process: who is named, how soon the others end, what the next run continues with (tests/kill_loop.py)."""

import pytest
from kill_loop import HEARTBEAT, SLACK, Loop


@pytest.mark.nightly
def test_killed_and_continued_on_other_numbers_of_processes(tmp_path):
    table = Loop(tmp_path, seed=1, show=True).run(2, [(2, 4), (4, 1), (1, 4)])
    assert [row["devices"] for row in table] == [8, 4, 4]
    assert all(row["seconds"] < HEARTBEAT + SLACK for row in table[:-1])


@pytest.mark.long
def test_ten_rounds(tmp_path):
    kills = 0
    for run in range(10):
        folder = tmp_path / str(run)
        folder.mkdir()
        kills += sum("killed" in row for row in Loop(folder, seed=100 + run, show=True).run(3))
        if kills >= 10:
            break
    assert kills >= 10
