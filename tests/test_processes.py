"""Two real processes with four devices each give the losses of one process with eight, and hold half of it each."""

from __future__ import annotations

import numpy as np
from processes import launch


def test_two_processes_equal_one_and_hold_half_each():
    (one,) = launch("worker.py", 1, timeout=300)
    two = launch("worker.py", 2, timeout=300)
    assert one["devices"] == 8
    assert [w["devices"] for w in two] == [8, 8]
    for index, single in enumerate(one["runs"]):
        for worker in two:
            run = worker["runs"][index]
            assert (run["stage"], run["existing"]) == (single["stage"], single["existing"])
            np.testing.assert_allclose(run["losses"], single["losses"], rtol=1e-6)
            np.testing.assert_allclose(run["norm"], single["norm"], rtol=1e-5)
            assert run["held"] * 2 == single["held"]
    by_stage = {r["stage"]: r["held"] for r in one["runs"] if not r["existing"]}
    assert by_stage[3] < by_stage[2] == by_stage[1] < by_stage[0]
