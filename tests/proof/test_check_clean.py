"""`check`: clean programs of every stage, in which nothing may be found."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P
from mistakes import BOTH, constrained, found_in, in_a_loop
from programs import QUICK, gpt_loss, gpt_step, small_gpt, small_state, tokens

import jzero

pytestmark = pytest.mark.pod


@pytest.mark.default_cases("scan-3")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@BOTH
def test_clean(stage, scan):
    options = None if stage >= 2 else QUICK  # None: as everyone compiles it
    assert found_in(*small_state(stage, scan=scan), options=options) == {}


@pytest.mark.nightly
@BOTH
def test_clean_stage_3_without_remat(scan):
    assert found_in(*small_state(3, scan=scan, remat=False)) == {}


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [2, 3])
@BOTH
def test_clean_large_batch(stage, scan):
    assert found_in(*small_state(stage, scan=scan), batch=tokens(512)) == {}


def tensor_parallel(params):
    """Megatron's layout: column, then row."""

    def spec(path, x):
        name = jax.tree_util.keystr(path)
        column = "Dense_0" in name or "Dense_2" in name
        entries = (None, "model") if column else ("model", None)
        return P(*[None] * (x.ndim - 2), *entries) if "Dense" in name else P()

    return jax.tree_util.tree_map_with_path(spec, params)


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@BOTH
def test_clean_with_tensor_parallelism(stage, scan):
    mesh = jzero.pod("h200").mesh({"model": 2, "data": 4})
    specs = tensor_parallel(jax.eval_shape(lambda: small_gpt(scan)).params)
    assert found_in(*small_state(stage, scan=scan, mesh=mesh, param_specs=specs)) == {}


@pytest.mark.nightly
@BOTH
def test_clean_with_replicas(scan):
    mesh = jzero.pod("h200").mesh({"replica": 2, "data": 4})
    assert found_in(*small_state(2, scan=scan, mesh=mesh, batch_axis=("replica", "data"))) == {}


@pytest.mark.nightly
def test_batch_split_inside_of_the_step_is_no_fault():
    state, plan = small_state(2, scan=True)

    def step(state, batch):
        return gpt_step(state, constrained(batch, lambda x: plan.batch))

    assert found_in(state, plan, step, batch=tokens(8, plan.sharding(P()))) == {}


def in_a_scan(stage, scan, unroll, step=gpt_step):
    """Four steps in a loop, compiled, and their plan."""
    state, plan = small_state(stage, scan=scan)
    batches = jax.tree.map(lambda x: jax.ShapeDtypeStruct((4, *x.shape), x.dtype), tokens())
    batches = jax.tree.map(lambda x: x.update(sharding=plan.sharding(P(None, "data"))), batches)

    def steps(state, batches):
        return jax.lax.scan(step, state, batches, unroll=unroll)

    pod = jzero.pod("h200")
    return pod.compile(steps, state, batches, donate_argnums=0, compiler_options=QUICK), plan


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("stage", "scan", "unroll"),
    [(0, False, 4), (1, False, 4), (1, True, 1), (2, False, 2), (2, True, 1), (2, True, 4), (3, True, 2)],
)
def test_clean_steps_in_a_scan(stage, scan, unroll):
    compiled, plan = in_a_scan(stage, scan, unroll)
    assert jzero.findings(compiled, plan) == ()
    state, _ = small_state(stage, scan=scan)
    one = jzero.pod("h200").compile(
        gpt_step, state, tokens(), donate_argnums=0, plan=plan, compiler_options=QUICK
    )
    wire = jzero.explain(one, plan).wire.total
    assert jzero.explain(compiled, plan).wire.total == pytest.approx(4 * wire, rel=0.01)


@pytest.mark.nightly
@pytest.mark.parametrize("unroll", [1, 2])
def test_micro_batches_are_still_found_in_a_scan_of_steps(unroll):
    def step(state, batch):
        def grads_of(part):
            return jax.grad(lambda p: gpt_loss(state, p, part))(state.params)

        parts = jax.tree.map(lambda x: jnp.stack([(x + k) % 512 for k in range(4)]), batch)
        zeros = jax.tree.map(jnp.zeros_like, state.params)
        return state.apply_gradients(grads=in_a_loop(grads_of, zeros, parts)), 0

    compiled, plan = in_a_scan(2, True, unroll, step)
    found = {f.kind: f.text for f in jzero.findings(compiled, plan)}
    assert "reduced 4.0 times in a step" in found["reduction_per_microbatch"]


def test_clean_params_of_one_bare_array():
    """A leaf without a name is a param, comes back, and is donated."""
    mesh = jzero.pod("h200").mesh({"data": 8})
    shape = jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16)
    plan = jzero.make_plan(shape, stage=2, mesh=mesh, min_shard_bytes=0)
    tx = jzero.zero(optax.adamw(1e-3), plan)
    state = jax.eval_shape(tx.init, plan.shapes)
    shardings = [*plan.state_shardings(state.inner), plan.sharding(plan.layouts[0].state)]
    leaves = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
        for x, s in zip(jax.tree.leaves(state), shardings, strict=True)
    ]
    state = jax.tree.unflatten(jax.tree.structure(state), leaves)

    def step(params, state, x):
        grads = jax.grad(lambda p: jnp.mean((x @ p) ** 2))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    x = jax.ShapeDtypeStruct((64, 1024), jnp.bfloat16)
    compiled = jzero.pod("h200").compile(jzero.jit(step, plan, compiler_options=QUICK), plan.shapes, state, x)
    assert jzero.findings(compiled, plan) == ()
    memory = jzero.explain(compiled, plan).memory
    assert (memory.params, memory.rest) == (2 * 1024 * 512, 2 * 64 * 1024 // 8)  # x
    assert memory.opt_state == 3 * 4 * 1024 * 512 // 8 + 4  # moments and master in fp32, and the count
