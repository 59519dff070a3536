"""train/processes/rollcall.py: everyone is there with the same settings, or all end with the reason. Real sockets."""

import socket
import threading
import time

import pytest
from processes import free_port

from train.processes.group import Group
from train.processes.rollcall import Refused, meet

SAME = {"--lr": "0.001", "data (checksum)": "12ab"}


def gather(said, *, port=None, timeout=10.0, later=()):
    """What each of several processes (threads here) gets from `meet`; `said`: (number, of how many, facts, error)."""
    port, found = port or free_port(), [None] * len(said)

    def one(i, me, count, facts, error):
        if i in later:
            time.sleep(0.5)
        try:
            group = Group(f"127.0.0.1:{port}", count, me)
            found[i] = meet(group, facts, timeout=timeout, heartbeat=10, error=error)
        except Refused as refused:
            found[i] = str(refused)

    threads = [threading.Thread(target=one, args=(i, *x)) for i, x in enumerate(said)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout=30)
    for x in found:
        if isinstance(x, tuple):
            for link in x[0].values():
                link.close()
    assert None not in found
    return found


def test_all_are_there_whoever_comes_first():
    for later in ((0,), (1, 2)):
        zero, one, two = gather([(i, 3, SAME, None) for i in range(3)], later=later)
        assert set(zero[0]) == {1, 2}
        assert set(one[0]) == set(two[0]) == {0}
        assert set(zero[1]) == set(one[1]) == {0, 1, 2}


def test_other_settings_are_named_in_every_process_and_at_once():
    other = SAME | {"--lr": "0.002"}
    start = time.monotonic()
    found = gather([(0, 3, SAME, None), (1, 3, SAME, None), (2, 3, other, None)], timeout=60)
    assert time.monotonic() - start < 5
    assert found == ["the processes differ in --lr: 0.001 in processes 0, 1, 0.002 in process 2"] * 3


def test_one_that_does_not_come_is_named():
    start = time.monotonic()
    found = gather([(0, 4, SAME, None), (1, 4, SAME, None), (3, 4, SAME, None)], timeout=2)
    assert 1.9 < time.monotonic() - start < 6
    assert len(set(found)) == 1
    assert found[0].startswith("process 2 of 4 did not come within 2 s. There: process 0 (")
    assert "--start-timeout" in found[0]


def test_process_0_does_not_come():
    (found,) = gather([(1, 2, SAME, None)], timeout=1)
    assert found.startswith("process 0 did not answer at 127.0.0.1:")
    assert "within 1 s (Connection refused)" in found


def test_unlike_numbers_of_processes():
    found = gather([(0, 2, SAME, None), (1, 3, SAME, None)])
    assert found == ["the processes differ in number of processes: 2 in process 0, 3 in process 1"] * 2


def test_one_number_twice():
    found = gather([(0, 3, SAME, None), (1, 3, SAME, None), (1, 3, SAME, None)])
    assert len(set(found)) == 1
    assert found[0].startswith("the processes differ in their numbers: 1 is that of 2 processes (")


def test_two_processes_0():
    """The second cannot have the port; it asks who has it, and both are told, whatever is still missing."""
    start = time.monotonic()
    found = gather([(0, 3, SAME, None), (0, 3, SAME, None)], timeout=60, later=(1,))
    assert time.monotonic() - start < 8
    assert len(set(found)) == 1
    assert found[0].startswith("the processes differ in their numbers: 0 is that of 2 processes (")


def test_a_process_that_cannot_run_tells_the_others():
    found = gather(
        [(0, 2, SAME, None), (1, 2, SAME | {"data (checksum)": ""}, "--data x: no such file or folder.")]
    )
    assert len(set(found)) == 1
    assert found[0].startswith("process 1 (")
    assert found[0].endswith("): --data x: no such file or folder.")


def test_strangers_on_the_port_are_ignored():
    port = free_port()

    def knock():
        time.sleep(0.3)
        for text in (b"GET / HTTP/1.1\r\n\r\n", b'{"me": 1}\n', b""):
            with socket.create_connection(("127.0.0.1", int(port))) as s:
                s.sendall(text)

    threading.Thread(target=knock).start()
    zero, one = gather([(0, 2, SAME, None), (1, 2, SAME, None)], port=port, later=(1,))
    assert set(zero[0]) == {1}
    assert set(one[0]) == {0}


@pytest.mark.nightly
def test_a_port_that_is_taken():
    taken = r"^process 0 cannot listen on 127\.0\.0\.1:\d+: Address already in use\. Give another port"
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(Refused, match=taken):
        meet(Group(f"127.0.0.1:{other.getsockname()[1]}", 2, 0), SAME, timeout=1, heartbeat=10)
