"""benchmarks/fragmentation.py: XLA's buffer assignment is read right, and a step's buffers share one allocation."""

from __future__ import annotations

import pytest

from benchmarks import fragmentation
from train.model import Model

TEXT = """BufferAssignment:
allocation 0: size 400, parameter 1, shape |f32[100]| at ShapeIndex {}, maybe-live-out:
 value: <1 param.1 @0> (size=400,offset=0): f32[100]{0}
 value: <2 grad @0> (size=400,offset=0): f32[100]{0}
allocation 1: size 8, thread-local:
 value: <9 add @0> (size=4,offset=0): f32[]
allocation 2: size 1000, preallocated-temp:
 value: <3 a @0> (size=400,offset=0): f32[100]{0}
 value: <4 b{0} @0> (size=400,offset=400): f32[100]{0}
 value: <5 c @0> (size=600,offset=0): f32[150]{0}
 value: <6 a.view @0> (size=400,offset=0): f32[100]{0}

Total bytes used: 1408 (1.4KiB)
 value: <3 a @0> (size=400,offset=0): f32[100]{0}
"""
RANGES = """HloLiveRange (max 9):
  BufferLiveRange:
    a{}:0-2
    a.view{}:1-3
    b{0}:2-4
    c{}:5-6
  Live ranges at 2 (peak):
    a: 400 bytes
"""


def test_the_assignment_is_read():
    given, inner, temp = fragmentation.assignment(TEXT)
    assert [v[0] for v in given.values] == ["param.1", "grad"]
    assert "maybe-live-out" in given.kind
    assert inner.kind == "thread-local"
    assert (temp.size, len(temp.values)) == (1000, 4)


def test_what_is_alive_counts_shared_bytes_once():
    temp = fragmentation.assignment(TEXT)[2]
    assert fragmentation.most_alive(temp, RANGES) == 800  # a and its view once, beside b
    assert fragmentation.most_alive(temp, RANGES.replace("c{}:5-6", "c{}:4-6")) == 800  # c over b
    assert fragmentation.most_alive(temp, RANGES.replace("b{0}:2-4", "b{0}:4-4")) == 600


@pytest.mark.nightly
@pytest.mark.pod
def test_a_step_has_one_temp_with_little_lost_in_it(monkeypatch):
    def shrunk(**fields):
        return Model(**{**fields, "width": 256, "layers": 2, "heads": 2, "seq": 128})

    monkeypatch.setattr(fragmentation, "Model", shrunk)
    cells = [c.strip() for c in fragmentation.row(2, False).split("|")]
    temp, shared, lost, lodgers = cells[6], cells[7], cells[8], cells[9]
    assert float(shared.split(", ")[1].split()[0]) > 2 * float(temp.split()[0])
    assert float(lost.split()[0]) < 2
    assert float(lodgers.split()[0]) > 0
    assert cells[5].startswith("2, 0.0 MB")  # the loss, and the tuple of the results: the state is in place
