"""Loss scaling: overflow on one shard skips the step everywhere, the scale adapts, gradients are those without it."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState
from models import assert_batch_is_split, assert_laid_out, logical, max_error

import jzero

HALF = {"dtype": jnp.float16, "param_dtype": jnp.float16}


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, **HALF)(nn.tanh(nn.Dense(64, **HALF)(x)))


class State(TrainState):
    scale: Any


def create(chain=None, scale=None):
    params = Net().init(jax.random.key(0), jnp.zeros((1, 16), jnp.float16))["params"]
    tx = optax.apply_if_finite(chain or optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)), 10**6)
    return State.create(
        apply_fn=Net().apply, params=params, tx=tx, scale=scale or jzero.LossScale(initial=2.0**10)
    )


def by_hand(state):
    """The same state with fp32 params in place of masters."""
    params = jax.tree.map(lambda p: p.astype(jnp.float32), state.params)
    return state.replace(params=params, opt_state=state.tx.init(params))


def loss_of(apply_fn, params, batch):
    out = apply_fn({"params": params}, batch["x"]).astype(jnp.float32)
    return jnp.mean((out - batch["y"]) ** 2)


def batch(seed, bad=None):
    """Sixteen examples, two per device; `bad` names one whose target overflows fp16 gradients."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((16, 16)).astype(np.float16)
    y = rng.standard_normal((16, 8)).astype(np.float32)
    if bad is not None:
        y[bad] = 1e9
    return {"x": x, "y": y}


def make_step(plan=None, **options):
    def step(state, batch):
        def loss_fn(params, batch):
            return loss_of(state.apply_fn, params, batch)

        if plan is None:  # by hand: fp32 params, of which the model sees the cast
            factor = state.scale.value
            half = jax.tree.map(lambda p: p.astype(jnp.float16), state.params)
            scaled, grads = jax.value_and_grad(lambda p: factor * loss_fn(p, batch))(half)
            loss, grads = scaled / factor, jax.tree.map(lambda g: g.astype(jnp.float32) / factor, grads)
        else:
            vg = jzero.value_and_grad(loss_fn, plan, scale=state.scale, **options)
            loss, grads = vg(state.params, batch)
        state = state.apply_gradients(grads=grads)
        return state.replace(scale=state.scale.update(state.opt_state)), loss

    return jax.jit(step)


CASES = {
    "stage 1": ({"stage": 1}, {}),
    "stage 2": ({"stage": 2}, {}),
    "stage 3": ({"stage": 3}, {}),
    "stage 1, once after the loop": ({"stage": 1}, {"accumulate": 2}),
    "stage 2, in every micro-batch": ({"stage": 2}, {"accumulate": 2}),
    "stage 2, offloaded": ({"stage": 2, "offload": "host"}, {}),
    "stage 3, offloaded, micro-batches": ({"stage": 3, "offload": "host"}, {"accumulate": 2}),
}


@pytest.mark.default_cases("stage 2, in every micro-batch")
@pytest.mark.parametrize("name", CASES)
def test_an_overflow_on_one_shard_skips_the_step_everywhere(name, mesh):
    fields, options = CASES[name]
    state = jzero.shard(create, mesh=mesh, min_shard_bytes=0, **fields)
    plan, plain = jzero.plan_of(state), by_hand(create())
    step, plain_step = make_step(plan, **options), make_step()
    for i in range(6):
        data = batch(i, bad=7 if i in (2, 3) else None)  # an example of device 3
        placed = plan.place_batch(data)
        assert_batch_is_split(placed)
        before = jax.device_get((state.params, state.opt_state))
        state, loss = step(state, placed)
        plain, plain_loss = plain_step(plain, data)
        if i in (2, 3):
            after = jax.device_get((state.params, state.opt_state))
            same = jax.tree.map(np.array_equal, before[0], after[0])
            assert all(jax.tree.leaves(same))
            inner = [s.inner if hasattr(s, "inner") else s for s in (before[1], after[1])]
            moments = [s.inner_state for s in inner]
            assert all(jax.tree.leaves(jax.tree.map(np.array_equal, *moments)))  # the count as well
            assert not inner[1].last_finite
        else:
            np.testing.assert_allclose(loss, plain_loss, rtol=1e-4)  # fp16 params may round to a neighbour
        assert float(state.scale.value) == float(plain.scale.value)
    assert int(state.scale.skipped) == 2
    assert float(state.scale.value) == 2.0**8
    assert_laid_out(state, plan)
    # gradients of two examples each are rounded to fp16 before they are summed over devices
    assert max_error(logical(state).master, plain.params) < 4e-3


class NnxNet(nnx.Module):
    """`Net`, with its weights."""

    def __init__(self):
        self.first, self.last = (nnx.Linear(*shape, **HALF, rngs=nnx.Rngs(0)) for shape in ((16, 64), (64, 8)))
        for layer, name in ((self.first, "Dense_1"), (self.last, "Dense_0")):
            given = create().params[name]
            layer.kernel[...], layer.bias[...] = given["kernel"], given["bias"]

    def __call__(self, x):
        return self.last(nnx.tanh(self.first(x)))


@pytest.mark.default_cases("3-2")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("stage", [2, 3])
def test_an_overflow_with_nnx(stage, accumulate, mesh):
    """The scale is an argument of the step, and reads the optimizer's state; the objects keep what they had."""

    def make():
        model = NnxNet()
        return model, nnx.Optimizer(model, create().tx, wrt=nnx.Param)

    def step(model, optimizer, scale, batch):
        def loss_fn(model, batch):
            return loss_of(lambda _, x: model(x), {}, batch)

        loss, grads = jzero.value_and_grad(loss_fn, plan, scale=scale, accumulate=accumulate)(model, batch)
        optimizer.update(model, grads)
        return scale.update(optimizer.opt_state), loss

    (model, optimizer), plain = jzero.shard(make, stage=stage, mesh=mesh, min_shard_bytes=0), by_hand(create())
    plan = jzero.plan_of(optimizer)
    run, plain_step, scale = jzero.jit(step, plan), make_step(), jzero.LossScale(initial=2.0**10)
    for i in range(5):
        data = batch(i, bad=7 if i == 2 else None)
        before = jax.device_get(nnx.as_pure(nnx.state(model)))
        scale, loss = run(model, optimizer, scale, data)
        plain, plain_loss = plain_step(plain, data)
        same = jax.tree.leaves(jax.tree.map(np.array_equal, before, jax.device_get(nnx.as_pure(nnx.state(model)))))
        assert all(same) if i == 2 else not any(same)
        if i != 2:
            np.testing.assert_allclose(loss, plain_loss, rtol=1e-4)
        assert float(scale.value) == float(plain.scale.value)
    assert float(scale.value) == 2.0**9
    master = nnx.as_pure(jzero.unshard(nnx.as_pure(optimizer.opt_state), tx=optimizer.tx)).master
    for name, want in (("first", "Dense_1"), ("last", "Dense_0")):
        assert max_error({k: master[name][k] for k in ("bias", "kernel")}, plain.params[want]) < 4e-3
    assert {x.dtype for x in jax.tree.leaves(nnx.as_pure(nnx.state(model)))} == {jnp.dtype("float16")}


@pytest.mark.default_cases("3-2")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_power_of_two_changes_no_bit_of_fp32_gradients(stage, accumulate, mesh):
    params = {
        "w": jax.random.normal(jax.random.key(0), (16, 64)),
        "v": jax.random.normal(jax.random.key(1), (64, 8)),
    }
    plan = jzero.make_plan(params, stage=stage, mesh=mesh, min_shard_bytes=0)
    data = plan.place_batch({k: v.astype(np.float32) for k, v in batch(0).items()})

    def loss_fn(params, batch):
        return jnp.mean((jnp.tanh(batch["x"] @ params["w"]) @ params["v"] - batch["y"]) ** 2)

    def run(scale):
        return jax.jit(jzero.value_and_grad(loss_fn, plan, accumulate=accumulate, scale=scale))(
            plan.place(params), data
        )

    (loss, grads), (want_loss, want) = run(jzero.LossScale(initial=2.0**15)), run(None)
    assert float(loss) == float(want_loss)
    assert max_error(grads, want) == 0
    assert max_error(run(3.0)[1], want) < 1e-6


def test_small_gradients_survive(mesh):
    params = {"w": jnp.ones((64, 64), jnp.float16)}
    plan = jzero.make_plan(params, stage=2, mesh=mesh, min_shard_bytes=0)
    x = plan.place_batch(np.full((8, 64), 1e-3, np.float16))

    def loss_fn(params, x):
        return jnp.mean((x @ params["w"]).astype(jnp.float32)) * 1e-4

    def gradient(scale):
        return np.asarray(jzero.value_and_grad(loss_fn, plan, scale=scale)(plan.place(params), x)[1]["w"])

    assert (gradient(None) == 0).all()  # 1e-3 * 1e-4 / 64 = 1.6e-9, and fp16 ends at 6e-8
    np.testing.assert_allclose(gradient(2.0**14), 1e-7 / 64, rtol=5e-3)


def test_the_scale_follows_the_rules():
    rng = np.random.default_rng(0)
    given = {"initial": 64.0, "growth_interval": 3, "hysteresis": 2, "minimum": 4.0, "maximum": 256.0}
    scale, update = jzero.LossScale(**given), jax.jit(lambda s, ok: s.update(ok))
    value, good, bad, skipped = 64.0, 0, 0, 0
    seen = set()
    for ok in rng.random(300) < np.repeat([0.95, 0.4, 0.95], 100):
        scale = update(scale, jnp.bool_(ok))
        good, bad, skipped = (good + 1, bad, skipped) if ok else (0, bad + 1, skipped + 1)
        if bad == 2:
            value, bad = max(value / 2, 4.0), 0
        elif good == 3:
            value, good, bad = min(value * 2, 256.0), 0, 0
        assert (float(scale.value), int(scale.skipped)) == (value, skipped)
        seen.add(value)
    assert {4.0, 256.0} <= seen


@pytest.mark.nightly
def test_flax_dynamic_scale_keeps_working(mesh):
    def step(state, batch):
        half = jax.tree.map(lambda p: p.astype(jnp.float16), state.params)
        vg = state.scale.value_and_grad(lambda p: loss_of(state.apply_fn, p, batch))
        scale, finite, loss, grads = vg(half)
        new = state.apply_gradients(grads=grads)
        return jzero.select(finite, new, state).replace(scale=scale), loss

    plain = by_hand(create(scale=DynamicScale(scale=2.0**10)))
    state = jzero.shard(create(scale=DynamicScale(scale=2.0**10)), stage=2, mesh=mesh, min_shard_bytes=0)
    plan = jzero.plan_of(state)
    for i in range(4):
        data = batch(i, bad=7 if i == 1 else None)
        state, loss = jax.jit(step)(state, plan.place_batch(data))
        plain, want = jax.jit(step)(plain, data)
        if i != 1:
            np.testing.assert_allclose(loss, want, rtol=1e-4)
    assert int(state.step) == 3
    assert float(state.scale.scale) == 2.0**9
    assert_laid_out(state, plan)
    assert max_error(logical(state).master, plain.params) < 4e-3


def test_bad_input(mesh):
    for field, value, rule in (
        ("initial", 0.5, "at least the minimum, 1.0"),
        ("initial", 2.0**30, "at most the maximum"),
        ("initial", float("nan"), "a finite number above 0"),
        ("minimum", 0.0, "a finite number above 0"),
        ("growth", 1.0, "a finite number above 1"),
        ("backoff", 1.5, "a number between 0 and 1"),
        ("hysteresis", 0, "an integer from 1"),
        ("growth_interval", 0, "an integer from 1"),
    ):
        with pytest.raises(ValueError, match=f"jzero.LossScale\\({field}=.*must be {rule}"):
            jzero.LossScale(**{field: value})
    scale, plain = jzero.LossScale(), optax.adam(1e-2)
    with pytest.raises(
        TypeError, match=r"found 0 states of optax\.apply_if_finite in this tuple, not one"
    ):
        scale.update(plain.init({"w": jnp.ones(3)}))
    plan = jzero.make_plan({"w": jnp.ones((16, 16))}, stage=1, mesh=mesh)
    with pytest.raises(TypeError, match=r"a jzero\.LossScale or a finite number above 0, not str"):
        jzero.value_and_grad(lambda p, x: 0.0, plan, scale="dynamic")


def test_it_is_data(mesh):
    """In a jit, a scan, a checkpoint's tree: its numbers are leaves, its settings are not."""
    scale = jzero.LossScale(initial=4.0)
    assert len(jax.tree.leaves(scale)) == 4
    again = jax.tree.unflatten(jax.tree.structure(scale), jax.tree.leaves(scale))
    assert dataclasses.replace(again, value=None).initial == 4.0
    shapes = jax.eval_shape(lambda: jzero.LossScale(initial=4.0))
    assert isinstance(shapes.value, jax.ShapeDtypeStruct)
