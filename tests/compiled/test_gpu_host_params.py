"""`Offload(params="host")` in programs compiled for GPUs: what is on the device, on the host and on the bus.

From jaxlib 0.11.2 on; before, backward loops read the wrong slices of host arrays, and it is refused.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import QUICK, gpt_state, gpt_step, program, tokens, workspace

import jzero
from jzero.core.xla_options import params_on_host_limit
from jzero.proof.hlo import parse
from jzero.proof.lifetimes import most_on_device
from jzero.proof.offsets import wrong_slices
from jzero.proof.transfers import find_transfers

pytestmark = pytest.mark.pod

OLD = bool(params_on_host_limit("gpu", "here"))
IN_FLIGHT = 2**18
HOST = jzero.Offload(params="host", in_flight_bytes=IN_FLIGHT)
STATE = jzero.Offload(in_flight_bytes=IN_FLIGHT)
new = pytest.mark.skipif(OLD, reason="jaxlib < 0.11.2: see the test of the refusal")
SIZE = (("dim", 256), ("heads", 4), ("vocab", 1024))


def compiled(scan, offload, layers=None, n=8):
    size = (*SIZE, ("scan", scan), ("layers", layers or (4 if scan else 2)))
    return program("gpt", 3, n, size, offload=offload, bucket_bytes=2**18)


@pytest.mark.skipif(not OLD, reason="this jaxlib reads host arrays in backward loops rightly")
def test_an_old_jaxlib_is_refused_before_anything_is_compiled():
    with pytest.raises(
        NotImplementedError, match=r'Offload\(params="host"\) is refused on GPUs .* 46231.*0.11.2'
    ):
        compiled(True, HOST)


@new
@pytest.mark.default_cases("False", "True")
@pytest.mark.parametrize("scan", [False, True])
def test_what_is_where_and_what_moves(scan):
    there, here = compiled(scan, HOST), compiled(scan, STATE)
    values = sum(x.size for x in there.plan.layouts) // 8
    held, without = there.program.memory_analysis(), here.program.memory_analysis()
    # bf16 params beside fp32 masters and moments, all updated in place; gradients during the step, nothing else
    assert held.host_argument_size_in_bytes == pytest.approx(14 * values, rel=0.01)
    assert held.host_alias_size_in_bytes == held.host_argument_size_in_bytes
    assert held.host_temp_size_in_bytes == pytest.approx(2 * values, rel=0.01)
    assert without.host_argument_size_in_bytes == pytest.approx(12 * values, rel=0.01)
    # on the device: neither the params nor, where a loop writes them as it goes, their gradients at the peak
    totals = [x.report.memory.total - workspace(x.program) for x in (there, here)]
    assert totals[0] < totals[1] - (2 * values if scan else 0)
    moved = there.report.pcie
    table = 2 * 1024 * 256 // 8  # is looked up, and read by the head: a fetch, and one more in each direction
    down = 2 + 2 + 12 + 2 + 2
    assert moved["to_device"] == pytest.approx(down * values + table, rel=0.02)
    assert moved["to_host"] == pytest.approx((12 + 2 + 2) * values, rel=0.02)
    assert there.report.wire.psi == pytest.approx(here.report.wire.psi, rel=0.01)
    assert "all-gather" in {c.op for c in there.report.collectives}
    jzero.check(there.program, there.plan)


@new
@pytest.mark.parametrize("scan", [False, True])
def test_nothing_waits_and_every_slice_is_where_its_index_points(scan):
    module = parse(compiled(scan, HOST).program.as_text())
    transfers = find_transfers(module)
    assert len(transfers) > 40
    assert all(t.asynchronous for t in transfers)
    assert wrong_slices(module) == ([], [])
    loops = [t for t in transfers if t.loops]
    assert bool(loops) == scan
    assert {t.to for t in loops} == ({"device", "host"} if scan else set())
    layer = 2 * 4 * 256 * 256 // 8  # of the largest kernel
    assert all(t.bytes <= layer for t in loops)


@new
@pytest.mark.default_cases("False")
@pytest.mark.parametrize("scan", [False, True])
def test_what_is_on_the_device_does_not_grow_with_the_layers(scan):
    """Of arrays from the host and for it; benchmarks/infinity.py has the whole device's memory, of 24 to 96 layers."""
    few, many = (compiled(scan, HOST, layers=n) for n in ((4, 12) if scan else (2, 4)))
    assert sum(x.size for x in many.plan.layouts) > 1.6 * sum(x.size for x in few.plan.layouts)
    alive = [most_on_device(parse(x.program.as_text())) for x in (few, many)]
    assert alive[1] <= 1.02 * alive[0]
    assert alive[1] <= 1.02 * IN_FLIGHT


@new
@pytest.mark.nightly
def test_one_gpu_holds_a_layer():
    """Nothing is split, and all of it is on the host."""
    pod = jzero.pod("h200", hosts=1, gpus_per_host=1)
    mesh = pod.mesh({"data": 1})
    state = jzero.abstract(
        lambda: gpt_state(True, 4, dim=256, heads=4, vocab=1024), stage=3, mesh=mesh, offload=HOST
    )
    compiled = pod.compile(gpt_step, state, tokens(1), donate_argnums=0, compiler_options=QUICK)
    held, plan = compiled.memory_analysis(), jzero.plan_of(state)
    values = sum(x.size for x in plan.layouts)
    assert held.host_argument_size_in_bytes == pytest.approx(14 * values, rel=0.01)
    assert held.argument_size_in_bytes < 2**16
    assert jzero.explain(compiled, plan).memory.total < 6 * 2**20 + workspace(compiled)


def test_numbers_of_the_model_of_these_programs():
    """On the CPU, with the buckets of above: what the programs compute."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    batch = {"tokens": jnp.arange(8 * 16).reshape(8, 16) % 64}
    losses = []
    for offload in (None, HOST):
        state = jzero.shard(
            gpt_state(True, 3, dim=32, heads=4, vocab=64, dtype=jnp.float32), stage=3, mesh=mesh, offload=offload,
            min_shard_bytes=0, bucket_bytes=2**12,
        )  # fmt: skip
        step = jax.jit(gpt_step)
        for _ in range(3):
            state, loss = step(state, jzero.plan_of(state).place_batch(batch))
        losses.append(loss)
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)
