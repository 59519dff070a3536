"""Dtypes on the wire of programs compiled for 8 H200: who casts before a gather, who reduces in what."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from gpu_states import abstract_state

import jzero
from benchmarks import precision

pytestmark = pytest.mark.pod

F32, BF16 = jnp.float32, jnp.bfloat16


@pytest.fixture(autouse=True, scope="module")
def small():
    """The model of the page, smaller."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"DIM": 512, "LAYERS": 2, "VOCAB": 1024, "TOKENS": 256}.items():
            patch.setattr(precision, name, value)
        yield


@functools.cache
def program(name, stage):
    return precision.compiled(precision.POLICIES[name], stage)


def sent(name, stage):
    """Bytes per parameter on the wire by op and dtype, of what is not a small leaf; and the plan."""
    compiled, plan = program(name, stage)
    report = jzero.explain(compiled, plan)
    unit = sum(x.size for x in plan.layouts) * 7 / 8
    out: dict[tuple[str, str], float] = {}
    for c in report.collectives:
        if c.bytes > 2**17:
            out[c.op, c.dtype] = out.get((c.op, c.dtype), 0.0) + c.total_wire_bytes / unit
    return out, report.wire.total / unit, plan


GATHERED, REDUCED = "all-gather", "reduce-scatter"
DEFAULT = [
    ("fp32 params, compute_dtype=bf16", 3, {(GATHERED, "bf16"): 4, (REDUCED, "bf16"): 2}),
]
NIGHTLY = [
    ('the same, reduce="microbatch"', 2, {(GATHERED, "bf16"): 2, (REDUCED, "f32"): 4}),
    ("fp32 params, layers in bf16", 3, {(GATHERED, "bf16"): 4, (REDUCED, "bf16"): 2}),
    ("fp32 params, layers in bf16, reduce_dtype=fp32", 3, {(GATHERED, "bf16"): 4, (REDUCED, "f32"): 4}),
    ("fp32 params, layers in bf16", 2, {(GATHERED, "f32"): 4, (REDUCED, "bf16"): 2}),
    ("fp32, reduce_dtype=bf16", 1, {(GATHERED, "f32"): 4, (REDUCED, "bf16"): 2}),
    ("bf16 params, reduce_dtype=fp32", 1, {(GATHERED, "bf16"): 2, (REDUCED, "f32"): 4}),
]
CASES = [*DEFAULT, *(pytest.param(*case, marks=pytest.mark.nightly) for case in NIGHTLY)]


@pytest.mark.parametrize(("name", "stage", "want"), CASES)
def test_what_is_sent(name, stage, want):
    got, total, plan = sent(name, stage)
    assert set(got) == set(want)
    for key, value in want.items():
        assert got[key] == pytest.approx(value, rel=0.04), key  # the lookup is gathered forward alone
    assert total == pytest.approx(sum(want.values()), rel=0.04)
    assert jzero.findings(program(name, stage)[0], plan) == ()
    if plan.config.compute_dtype or (plan.config.reduce_dtype and "layers" not in name):
        closed = jzero.estimate(plan).wire / (sum(x.size for x in plan.layouts) * 7 / 8)
        assert total == pytest.approx(closed, rel=0.04)


@pytest.mark.nightly
def test_gradients_reduced_in_place_are_not_held_whole():
    whole, plan = program("bf16 params, reduce_dtype=fp32", 2)
    in_place, _ = program('the same, reduce="microbatch"', 2)
    count = sum(x.size for x in plan.layouts)
    temps = [x.memory_analysis().temp_size_in_bytes / count for x in (whole, in_place)]
    assert temps[0] > 3.5  # fp32 sums, whole
    assert temps[1] < 0.7 * temps[0]


@pytest.mark.nightly
def test_moments_in_bf16_are_what_the_estimate_says():
    compiled, plan = program("bf16 params, moment_dtype=bf16", 2)
    memory = jzero.explain(compiled, plan).memory
    assert memory is not None
    state = jzero.estimate(plan).opt_state
    assert memory.opt_state == pytest.approx(state, rel=1e-3)
    assert memory.opt_state < 8.1 * sum(x.size for x in plan.layouts) / 8
    assert memory.temp < 4 * sum(x.size for x in plan.layouts)
    assert jzero.findings(compiled, plan) == ()


@pytest.mark.nightly
def test_moments_in_bf16_stream_within_the_bound():
    """Host state of 2 + 2 + 4 bytes: the units count what is stored, and what is widened is never whole."""
    pod, bound = jzero.pod("h200"), 16 * 2**20
    shapes = {f"w{i:02}": jax.ShapeDtypeStruct((4096, 2048), BF16) for i in range(12)}
    plan = jzero.make_plan(
        shapes, stage=3, mesh=pod.mesh({"data": 8}), moment_dtype=BF16,
        offload=jzero.Offload(in_flight_bytes=bound),
    )  # fmt: skip
    tx = jzero.zero(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), plan)

    def update(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    args = (plan.shapes, abstract_state(tx, plan), plan.shapes)
    memory = pod.compile(update, *args, donate_argnums=(0, 1, 2)).memory_analysis()
    leaf = 4096 * 2048 // 8
    assert memory.host_argument_size_in_bytes == 12 * leaf * 8
    assert memory.host_alias_size_in_bytes == memory.host_argument_size_in_bytes
    assert memory.host_temp_size_in_bytes == 0
    grads = 2 * 12 * leaf  # an argument cannot be filled in place
    assert memory.temp_size_in_bytes <= bound + grads
