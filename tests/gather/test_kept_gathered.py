"""`kept_gathered_bytes`: which weights stay gathered for the backward pass, and what that sends and holds."""

from __future__ import annotations

import jax
import pytest
from programs import program

import jzero
from jzero.layout.gathered import held_gathered

unit, pod = pytest.mark.unit, pytest.mark.pod
SHAPES = {
    "small": jax.ShapeDtypeStruct((64, 8), "bfloat16"),
    "middle": jax.ShapeDtypeStruct((64, 64), "bfloat16"),
    "layers": {"stack": jax.ShapeDtypeStruct((4, 64, 64), "float32")},
}
SIZES = {"['small']": 1024, "['middle']": 8192, "['layers']['stack']": 65536}


def plan_of(**fields):
    return jzero.make_plan(SHAPES, stage=3, scan_axes={"layers": 0}, min_shard_bytes=0, **fields)


@unit
@pytest.mark.parametrize(("size", "count"), [(0, 0), (1023, 0), (1024, 1), (9215, 1), (9216, 2), (74752, 3)])
def test_the_smallest_stay_within_the_bytes(size, count):
    plan = plan_of(kept_gathered_bytes=size)
    assert {x.name: held_gathered(x, plan) for x in plan.layouts} == SIZES
    assert plan.kept_gathered == set(list(SIZES)[:count])
    said = f"{count} of 3 params stay gathered for the backward pass"
    assert (said in plan.describe()) == (size > 0)


@unit
def test_they_are_counted_as_the_model_computes():
    plan = plan_of(kept_gathered_bytes=1024 + 8192 + 32768, compute_dtype="bfloat16")
    assert plan.kept_gathered == set(SIZES)


@unit
def test_weights_in_pieces_do_not_stay():
    shapes = {"head": jax.ShapeDtypeStruct((4096, 262144), "bfloat16"), "w": SHAPES["middle"]}
    assert jzero.make_plan(shapes, stage=3, min_shard_bytes=0, kept_gathered_bytes=10**12).kept_gathered == {"['w']"}
    assert jzero.make_plan(shapes, stage=2).kept_gathered == frozenset()


@unit
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stage": 2}, "has no effect at stage 2"),
        ({"stage": 3, "reshard_after_forward": False}, "has no effect beside reshard_after_forward=False"),
        ({"stage": 3, "offload": jzero.Offload(params="host")}, "kept_gathered_bytes keeps weights on the device"),
    ],
)
def test_what_does_not_go_together(fields, message):
    with pytest.raises(ValueError, match=message):
        jzero.ZeroConfig(kept_gathered_bytes=8, **fields)


@unit
def test_the_wire_falls_with_what_stays():
    sent = [jzero.estimate(plan_of(kept_gathered_bytes=n)).wire_psi for n in (0, 9216, 74752)]
    share = (1024 + 8192) / (1024 + 8192 + 65536)
    assert sent == pytest.approx([3, 3 - share, 2])
    reasons = dict(jzero.estimate(plan_of(kept_gathered_bytes=9216)).reasons)
    assert set(reasons) == {"weights that stay gathered for the backward pass"}


@pod
@pytest.mark.default_cases("scan")
@pytest.mark.parametrize("scan", [True, False], ids=["scan", "unrolled"])
def test_the_program_sends_and_holds_what_the_closed_form_says(scan):
    size = (("scan", scan), ("layers", 4))
    none = program(stage=3, size=size)
    every = sum(held_gathered(x, none.plan) for x in none.plan.layouts)
    some = program(stage=3, size=size, kept_gathered_bytes=every // 2)
    kept = sum(held_gathered(x, some.plan) for x in some.plan.layouts if x.name in some.plan.kept_gathered)
    assert 0 < kept <= every // 2
    assert some.report.wire.psi == pytest.approx(some.estimate.wire_psi, rel=0.02)
    assert some.report.wire.psi < none.report.wire.psi - 0.2
    more = some.report.memory.temp - none.report.memory.temp
    # unrolled, the last ones are there at the peak in any case
    assert (0.7 if scan else 0.4) * kept < more < 1.3 * kept
    assert some.found == {}


@pod
@pytest.mark.nightly
def test_check_still_sees_others_that_stay():
    """A plan that keeps little, beside a program that keeps all."""
    size = (("scan", True), ("layers", 4))
    found = program(stage=3, size=size, reshard_after_forward=False)
    few = program(stage=3, size=size, kept_gathered_bytes=3_000_000)
    assert 0 < len(few.plan.kept_gathered) < len(few.plan.layouts)
    kinds = {f.kind for f in jzero.findings(found.program, few.plan)}
    assert kinds & {"weights_saved", "weights_not_gathered_on_use"}
