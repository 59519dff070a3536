"""train/processes/watch.py, what needs no second process: in what processes differ, and how that is said."""

from types import SimpleNamespace

import pytest

from train.processes import check_devices
from train.processes.watch import named, unfit

SAME = {"--lr": "0.001", "data (checksum)": "12ab"}


def said(*facts, error=None):
    """What each process publishes; `error`: of the last."""
    found = [{"where": f"host, pid {i}", "error": None, "facts": x} for i, x in enumerate(facts)]
    found[-1]["error"] = error
    return found


def test_the_same_settings_fit():
    assert unfit(said(SAME, SAME, SAME)) == []


def test_differences_are_named_with_who_has_what():
    found = unfit(said(SAME, SAME | {"--lr": "0.002"}, SAME | {"number of processes": 4}))
    assert found == [
        "the processes differ in --lr: 0.001 in processes 0, 2, 0.002 in process 1",
        "the processes differ in number of processes: nothing in processes 0, 1, 4 in process 2",
    ]


def test_an_error_goes_before_differences():
    found = unfit(said(SAME, SAME | {"data (checksum)": ""}, error="--data x: no such file or folder."))
    assert found == ["process 1 (host, pid 1): --data x: no such file or folder."]


def test_of_many_processes_eight_are_named():
    assert named([3]) == "process 3"
    assert named(range(11)) == "processes 0, 1, 2, 3, 4, 5, 6, 7 and 3 more"


def test_unlike_devices():
    devices = [
        SimpleNamespace(process_index=i, device_kind="H100" if i < 2 else "A100") for i in (0, 0, 1, 1, 2)
    ]
    text = "^the processes differ in their devices: 2 x H100 in processes 0, 1, 1 x A100 in process 2. Each must have"
    with pytest.raises(ValueError, match=text):
        check_devices(devices)
    check_devices(devices[:4])
