"""What the program compiled for 8 and 64 H200 does: communication, memory, donation. No GPU is needed.

The GPT of tests/programs.py has bf16 params and Flax's unmodified `apply_gradients`. Activations and embedding are kept
small (one short sequence per device), so that what is measured is the model states. Norms stay whole.
"""

from __future__ import annotations

import math

import jax
import pytest
from programs import MODELS, SEQ, cached, program, sent, workspace

pytestmark = pytest.mark.pod


@cached
def made(stage, n, scan=False, min_shard_bytes=16 * 1024, reshard=True):
    return program(
        stage=stage, n=n, size=(("scan", scan), ("layers", 12 if scan else 4)), min_shard_bytes=min_shard_bytes,
        reshard_after_forward=reshard,
    )  # fmt: skip


def compiled(*args, **fields):
    found = made(*args, **fields)
    return found.plan, found.estimate, found.report


SIZES = [8, pytest.param(64, marks=pytest.mark.nightly)]
BATCH_BYTES, SCALARS = SEQ * 4, 64  # the second: step, count and the like


def batch_bytes(model):
    """Of one row: a device has one."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(MODELS[model][2](1)))


@pytest.mark.default_cases("3-8")
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_argument_bytes_equal_the_estimate(stage, n):
    _, estimate, report = compiled(stage, n)
    assert report.memory is not None
    states = report.memory.arguments - BATCH_BYTES
    assert abs(states - (estimate.params + estimate.opt_state)) <= 1e-3 * states + SCALARS


@pytest.mark.default_cases("2-8")
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_argument_bytes_equal_the_papers_table_when_all_is_split(stage, n):
    plan, _, report = compiled(stage, n, scan=True, min_shard_bytes=0)
    psi = plan.param_bytes // 2
    table = {0: 14 * psi, 1: (2 + 12 / n) * psi, 2: (2 + 12 / n) * psi, 3: 14 / n * psi}[stage]
    assert report.memory is not None
    assert abs(report.memory.arguments - BATCH_BYTES - table) <= 1e-3 * table + SCALARS


@pytest.mark.default_cases("2-8", "3-8")
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_donated_state_is_aliased_completely(stage, n):
    report = compiled(stage, n)[2]
    assert report.memory is not None
    assert report.memory.arguments - report.memory.aliased <= BATCH_BYTES + 256


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(("stage", "scan"), [(1, False), (2, False), (2, True)])
def test_stages_1_and_2_reduce_scatter_and_gather_16_bit(stage, scan, n):
    plan, estimate, report = compiled(stage, n, scan)
    vectors = [x for x in plan.layouts if x.reason or len(x.shape) - x.scanned == 1]
    small = sum(x.nbytes for x in vectors)  # reduced whole, then cut: under the threshold in every layer
    scattered = sent(report, "reduce-scatter")
    assert abs(scattered - plan.param_bytes) <= 0.02 * plan.param_bytes
    gathered = [c for c in report.collectives if c.op == "all-gather"]
    assert abs(sent(report, "all-gather") - plan.param_bytes) <= 0.02 * plan.param_bytes
    # XLA gathers the tokens (s32) and their cotangents for the split gradient of the embedding; nothing is fp32
    assert {d for c in gathered for d in c.dtype.split("+")} <= {"bf16", "s32"}
    assert sent(report, "all-reduce") <= 2 * small + SCALARS  # some of them in fp32
    assert report.wire.psi == pytest.approx(2, rel=0.02)
    assert estimate.wire_psi == pytest.approx(2, rel=0.02)


@pytest.mark.nightly
def test_a_tied_embedding_is_not_gathered_to_be_reduced_again():
    """3.1 Psi where the gradient of its second use is reduced, gathered and reduced again."""
    made = program(stage=1, n=64, size=(("vocab", 32768),), min_shard_bytes=16 * 1024, seq=1024, quick=False)
    assert max(x.nbytes for x in made.plan.layouts) / made.plan.param_bytes > 0.5
    assert made.report.wire.psi == pytest.approx(2, rel=0.01)


@pytest.mark.parametrize("n", SIZES)
def test_stage_0_all_reduces_the_gradient_once(n):
    plan, _, report = compiled(0, n)
    assert abs(sent(report, "all-reduce") - plan.param_bytes) <= 0.02 * plan.param_bytes
    assert sent(report, "all-gather", "reduce-scatter") == 0
    assert report.wire.psi == pytest.approx(2, rel=0.02)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("scan", [False, True])
def test_stage_3_gathers_weights_twice_and_no_activations(scan, n):
    plan, estimate, report = compiled(3, n, scan)
    assert report.wire.psi == pytest.approx(3, rel=0.02)
    assert estimate.wire_psi == pytest.approx(3, rel=0.02)
    assert abs(sent(report, "reduce-scatter") - plan.param_bytes) <= 0.02 * plan.param_bytes
    assert abs(sent(report, "all-gather") - 2 * plan.param_bytes) <= 0.04 * plan.param_bytes
    assert sent(report, "all-to-all", "collective-permute") == 0


@pytest.mark.default_cases("True")
@pytest.mark.parametrize("scan", [False, True])
def test_weights_that_are_kept_are_gathered_once(scan):
    """Under remat too, whose region reads what was gathered before it; the tied embedding once for both uses."""
    plan, estimate, report = compiled(3, 8, scan, reshard=False)
    assert report.wire.psi == pytest.approx(2, rel=0.02)
    assert estimate.wire_psi == pytest.approx(2, rel=0.02)
    assert abs(sent(report, "all-gather") - plan.param_bytes) <= 0.02 * plan.param_bytes
    late = [c for c in report.collectives if c.op == "all-gather" and c.phase != "forward"]
    assert sum(c.bytes * c.count * c.trips for c in late if set(c.dtype.split("+")) == {"bf16"}) == 0
    dropped = compiled(3, 8, scan)[2]
    assert report.memory is not None
    assert dropped.memory is not None
    assert report.memory.arguments == dropped.memory.arguments
    # all params whole at the end of the forward pass, where else two buckets are
    more = report.memory.temp - dropped.memory.temp
    assert 0.5 * plan.param_bytes < more < 1.05 * plan.param_bytes


@pytest.mark.parametrize("n", SIZES)
def test_stage_2_old_and_new_params_are_not_alive_together(n):
    found = made(2, n)
    psi, memory = found.plan.param_bytes // 2, found.report.memory
    assert memory is not None
    assert memory.total - workspace(found.program) <= 1.06 * (2 + 14 / n) * psi


@pytest.mark.default_cases("experts-3")
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("model", ["conv", "experts"])
def test_a_conv_net_and_a_mixture_of_experts(model, stage):
    """Kernels with three and four dims: on the closed form, split where the plan says, without a finding."""
    found = program(model, stage)
    assert found.report.wire.psi == pytest.approx(stage if stage == 3 else 2, rel=0.03)
    assert found.estimate.wire_psi == pytest.approx(stage if stage == 3 else 2, rel=0.03)
    assert found.report.memory.arguments == pytest.approx(
        found.estimate.params + found.estimate.opt_state + batch_bytes(model), rel=0.02
    )
    assert found.found == {}
