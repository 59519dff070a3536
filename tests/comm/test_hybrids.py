"""Hybrids: shared inside a node or across. Numbers on 8 simulated devices, wire bytes per axis on H200."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from models import assert_batch_is_split, batch, create_small, loss_of, max_error
from programs import QUICK, SEQ, cached, gpt_state, gpt_step

import jzero

BOTH = ("replica", "data")
KINDS = {
    "HSDP, stage 2": {"stage": 2, "axis": "data", "batch_axis": BOTH},
    "HSDP or MiCS, stage 3": {"stage": 3, "axis": "data", "batch_axis": BOTH},
    "hpZ": {"stage": 3, "axis": BOTH, "param_axis": "data"},
    "all at once": {"stage": 3, "axis": BOTH},
}


@pytest.mark.default_cases("HSDP, stage 2", "hpZ")
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_plain_run(kind):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), BOTH)
    plain = create_small(optax.adamw(1e-2))
    state = jzero.shard(create_small(optax.adamw(1e-2)), mesh=mesh, min_shard_bytes=0, **KINDS[kind])
    plan = jzero.plan_of(state)

    @jax.jit
    def step(state, batch):
        loss, grads = jax.value_and_grad(lambda p: loss_of(state.apply_fn, p, batch))(state.params)
        return state.apply_gradients(grads=grads), loss

    for i in range(5):
        placed = plan.place_batch(batch(i))
        assert_batch_is_split(placed)
        state, loss = step(state, placed)
        plain, expected = step(plain, batch(i))
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    assert max_error(state.params, plain.params) < 1e-4
    kernel = state.params["Dense_0"]["kernel"]
    assert kernel.sharding.spec == (
        P() if plan.config.stage == 2 else P(BOTH) if kind == "all at once" else P("data")
    )


@pytest.mark.parametrize("kind", ["walked", "as written", "a part walked"])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_weight_that_is_used_value_by_value_beside_a_slice_of_a_tensor_parallel_one(stage, kind):
    """The layout of its gradient spreads back into the forward pass, and XLA computes another loss there."""
    size, mesh = 13, Mesh(np.array(jax.devices()).reshape(2, 2, 2), (*BOTH, "model"))
    shapes = {"w": (size, 2 * size), "v": (size, size)}
    params = {k: jax.random.normal(jax.random.key(i), s) for i, (k, s) in enumerate(shapes.items())}
    plan = jzero.make_plan(params, stage=stage, mesh=mesh, axis=BOTH, param_specs={"v": P(), "w": P(None, "model")},
                           min_shard_bytes=0)  # fmt: skip

    def first(params, x):
        return x @ params["w"][:, :size]

    def loss(params, x, first=first):
        h = first(params, x)
        return jnp.mean((h + h @ (params["v"] * jnp.mean(params["v"] ** 2, 0))) ** 2)

    def step(loss, tx):
        def run(params, state, x):
            value, grads = jax.value_and_grad(loss)(params, x)
            updates, state = tx.update(grads, state, params)
            return value, optax.apply_updates(params, updates)

        return jax.jit(run)

    x, tx, plain = jax.random.normal(jax.random.key(2), (8, size)), jzero.zero(optax.sgd(1e-3), plan), optax.sgd(1e-3)
    placed = plan.place(params)
    part = functools.partial(loss, first=jzero.gather_on_use(first, plan))  # which does not read what is used so
    sharded = {"walked": jzero.gather_on_use(loss, plan), "as written": loss, "a part walked": part}[kind]
    found = step(sharded, tx)(placed, tx.init(placed), plan.place_batch(x))
    right = step(loss, plain)(params, plain.init(params), x)
    assert float(found[0]) == pytest.approx(float(right[0]), rel=1e-5)
    assert max_error(found[1], right[1]) < 1e-4


@cached
def compiled(kind, tensor_parallel=False, scan=True):
    pod = jzero.pod("h200")
    sizes = {"replica": 2, "data": 2, "model": 2} if tensor_parallel else {"replica": 2, "data": 4}
    specs = column_then_row(jax.eval_shape(lambda: gpt_state(scan)).params) if tensor_parallel else None
    state = jzero.abstract(lambda: gpt_state(scan), mesh=pod.mesh(sizes), param_specs=specs, **KINDS[kind])
    plan = jzero.plan_of(state)
    tokens = jax.ShapeDtypeStruct((2 * plan.batch_parts, SEQ), jnp.int32)
    built = pod.compile(gpt_step, state, {"tokens": tokens}, donate_argnums=0, compiler_options=QUICK)
    return jzero.estimate(plan, tx=state.tx), jzero.explain(built, plan), jzero.findings(built, plan)


def column_then_row(params):
    """Megatron's layout of `programs.Block`."""

    def spec(path, x):
        name = jax.tree_util.keystr(path)
        if "Dense" not in name or "kernel" not in name:
            return P()
        pair = (None, "model") if "Dense_0" in name or "Dense_2" in name else ("model", None)
        return P(*[None] * (x.ndim - 2), *pair)

    return jax.tree_util.tree_map_with_path(spec, params)


@pytest.mark.default_cases("hpZ")
@pytest.mark.pod
@pytest.mark.parametrize("kind", KINDS)
def test_wire_bytes_per_axis_are_the_closed_form(kind):
    """What crosses `replica` is what crosses the slow network."""
    estimate, report, found = compiled(kind)
    large = {axes: size for axes, size in estimate.wire_by_axes.items() if size > 0.01 * estimate.wire}
    assert large
    for axes, size in large.items():
        assert report.wire.by_axis[axes] == pytest.approx(size, rel=0.02), axes
    assert report.wire.total == pytest.approx(estimate.wire, rel=0.02)
    assert found == ()


@pytest.mark.nightly
@pytest.mark.pod
@pytest.mark.parametrize("kind", ["HSDP, stage 2", "HSDP or MiCS, stage 3"])
def test_with_tensor_parallelism(kind):
    estimate, report, found = compiled(kind, tensor_parallel=True)
    assert report.wire.by_axis["data"] == pytest.approx(estimate.wire_by_axes["data"], rel=0.05)
    assert report.wire.by_axis["replica"] == pytest.approx(estimate.wire_by_axes["replica"], rel=0.05)
    assert found == ()
