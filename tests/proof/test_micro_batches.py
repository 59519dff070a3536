"""Micro-batches of the user's own loop, cut across the devices: `check` names them, and its remedy helps."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState
from programs import QUICK

import jzero

DIM, K = 256, 4


def create():
    def apply_fn(variables, x):
        for w in variables["params"].values():
            x = jnp.tanh(x @ w)
        return x

    params = {f"w{i}": jnp.ones((DIM, DIM)) for i in range(4)}
    return TrainState.create(apply_fn=apply_fn, params=params, tx=optax.adam(1e-3))


def by_reshape(batch, plan):
    return jax.tree.map(lambda x: x.reshape(K, -1, *x.shape[1:]), batch)


def by_slices(batch, plan):
    rows = batch["x"].shape[0] // K
    return [jax.tree.map(lambda x: x[i * rows : (i + 1) * rows], batch) for i in range(K)]  # noqa: B023


def by_plan(batch, plan):
    return plan.micro_batches(batch, K)


def in_scan(grads_of, zeros, parts):
    add = functools.partial(jax.tree.map, jnp.add)
    return jax.lax.scan(lambda total, part: (add(total, grads_of(part)), None), zeros, parts)[0]


def in_python(grads_of, zeros, parts):
    if not isinstance(parts, list):
        parts = [jax.tree.map(lambda x: x[i], parts) for i in range(K)]  # noqa: B023
    return functools.reduce(functools.partial(jax.tree.map, jnp.add), map(grads_of, parts), zeros)


def step_of(plan, cut, loop):
    def step(state, batch):
        def grads_of(part):
            loss = lambda p: jnp.mean((state.apply_fn({"params": p}, part["x"]) - part["y"]) ** 2)  # noqa: E731
            return jax.grad(loss)(state.params)

        zeros = jax.tree.map(jnp.zeros_like, state.params)
        return state.apply_gradients(grads=loop(grads_of, zeros, cut(batch, plan)))

    return step


def setting(mesh, stage=2):
    state = jzero.abstract(create, stage=stage, mesh=mesh, min_shard_bytes=0)
    plan = jzero.plan_of(state)
    x = jax.ShapeDtypeStruct((2 * K * plan.batch_parts, DIM), jnp.float32, sharding=plan.batch)
    return state, plan, {"x": x, "y": x}


@pytest.mark.remedy("cut_across_devices", "batch = plan.micro_batches(batch, k)")
@pytest.mark.pod
def test_a_reshape_and_its_remedy_on_16_gpus():
    pod = jzero.pod("h100", hosts=2)
    state, plan, batch = setting(pod.mesh({"data": 16}))

    def compiled(cut):
        step = step_of(plan, cut, in_scan)
        program = pod.compile(step, state, batch, donate_argnums=0, compiler_options=QUICK)
        return jzero.findings(program, plan), jzero.explain(program, plan).wire.psi

    (finding,), sent = compiled(by_reshape)  # what follows from it is not listed beside it
    assert finding.kind == "batch_not_split"
    assert finding.bytes > 2 * 2 * K * DIM * 4  # a device's part of both arrays
    assert "['x'][128,256], ['y'][128,256] move between them at jit(step)/while" in finding.text
    assert "x.reshape(k, B // k, ...)" in finding.text
    assert f"{sent:.1f} Psi" in finding.text
    assert "plan.micro_batches(batch, k)" in finding.remedy
    assert sent > 1.2 * (K + 1)
    found, sent = compiled(by_plan)
    assert found == ()
    assert sent == pytest.approx(K + 1, rel=0.01)


@pytest.mark.nightly
@pytest.mark.remedy("reduction_per_microbatch", "local gradients are summed")
@pytest.mark.pod
def test_a_loop_of_the_user_at_stage_1():
    """XLA reduces the gradients of every micro-batch; whole ones could be summed, and reduced once."""
    pod = jzero.pod("h100", hosts=1)
    state, plan, batch = setting(pod.mesh({"data": 8}), 1)
    for step, kinds in ((step_of(plan, by_plan, in_scan), ["reduction_per_microbatch"]), (accumulating(plan), [])):
        program = pod.compile(step, state, batch, donate_argnums=0, plan=plan, compiler_options=QUICK)
        assert [f.kind for f in jzero.findings(program, plan)] == kinds


@pytest.mark.default_cases("by_reshape-in_python")
@pytest.mark.parametrize(
    ("cut", "loop"), [(by_reshape, in_scan), (by_reshape, in_python), (by_slices, in_python)]
)
def test_programs_of_the_cpu(cut, loop, mesh):
    state, plan, batch = setting(mesh)

    def found(cut):
        step = step_of(plan, cut, loop)
        program = (
            jax.jit(step, donate_argnums=0).lower(state, batch).compile({"xla_backend_optimization_level": 0})
        )
        return [f.kind for f in jzero.findings(program, plan, uses=jzero.param_uses(step, state, batch))]

    assert found(cut) == ["batch_not_split"]
    assert found(by_plan) == []


def by_hand(batch, plan):
    """Micro-batches of rows that lie together on a device, which jzero does not know of."""
    return jax.tree.map(lambda x: jnp.swapaxes(x.reshape(-1, K, *x.shape[1:]), 0, 1), batch)


def accumulating(plan):
    def step(state, batch):
        loss = lambda p, part: jnp.mean((state.apply_fn({"params": p}, part["x"]) - part["y"]) ** 2)  # noqa: E731
        grads = jzero.value_and_grad(loss, plan, accumulate=K, reduce="step")(state.params, batch)[1]
        return state.apply_gradients(grads=grads)

    return step


@pytest.mark.parametrize(
    "stage",
    [
        pytest.param(2, marks=pytest.mark.remedy("reduction_per_microbatch", "local gradients are summed")),
        pytest.param(3, marks=pytest.mark.remedy("reduction_per_microbatch", "or a loop over plan.micro_batches")),
    ],
)
def test_reductions_per_micro_batch(stage, mesh):
    state, plan, batch = setting(mesh, stage)
    once = accumulating(plan) if stage == 2 else step_of(plan, by_plan, in_scan)
    for step, expected in ((step_of(plan, by_hand, in_scan), ["reduction_per_microbatch"]), (once, [])):
        program = jzero.jit(step, plan).lower(state, batch).compile()
        assert [f.kind for f in jzero.findings(program, plan)] == expected


@pytest.mark.parametrize("loop", [in_scan, in_python])
def test_uses_know_the_micro_batches(loop, mesh):
    state, plan, batch = setting(mesh, stage=3)
    assert jzero.param_uses(step_of(plan, by_plan, loop), state, batch).micro_batches == K
    assert jzero.param_uses(step_of(plan, by_reshape, loop), state, batch).micro_batches == 1


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(("reduce", "cuts"), [("microbatch", K), ("step", 1)])
def test_an_estimate_counts_the_micro_batches_of_value_and_grad(reduce, cuts, stage, mesh):
    """As many as reduce gradients; `accumulate=` outweighs what was found."""
    state, plan, batch = setting(mesh, stage=stage)

    def step(state, batch):
        loss_fn = lambda p, batch: jnp.mean((state.apply_fn({"params": p}, batch["x"]) - batch["y"]) ** 2)  # noqa: E731
        _, grads = jzero.value_and_grad(loss_fn, plan, accumulate=K, reduce=reduce)(state.params, batch)
        return state.apply_gradients(grads=grads)

    uses = jzero.param_uses(step, state, batch)
    assert uses.micro_batches == cuts
    assert jzero.estimate(plan, uses=uses).wire_psi == pytest.approx(1 + cuts)
    in_each = stage == 2 or reduce == "microbatch"
    assert jzero.estimate(plan, uses=uses, accumulate=2).wire_psi == pytest.approx(3 if in_each else 2)
