"""`zero(tx, plan)` as an optax transformation: structures, landing, and the places people put it."""

from __future__ import annotations

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from models import BATCH, DIM_IN, DIM_OUT, batch, create_state, max_error, shard, train_step

import jzero
from jzero.optim import whole_state

P = jax.P


def params_of(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return {
        "a": jnp.asarray(rng.standard_normal((DIM_IN, 64)) / 5, dtype),
        "b": jnp.asarray(rng.standard_normal((64, DIM_OUT)) / 8, dtype),
    }


def loss_fn(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["a"]) @ params["b"] - batch["y"]) ** 2).astype(jnp.float32)


def loop(params, tx, data, steps=5):
    @jax.jit
    def step(params, state, batch):
        grads = jax.grad(loss_fn)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(tx.init)(params)
    for _ in range(steps):
        params, state = step(params, state, data)
    return params, state


@functools.cache
def plain_loop():
    return loop(params_of(), optax.adamw(1e-2), batch())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("updates", ["deferred", "delta"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_optax_loop(stage, updates, dtype, mesh):
    plan = jzero.make_plan(params_of(dtype), stage=stage, mesh=mesh, min_shard_bytes=0, updates=updates)
    tx = jzero.zero(optax.adamw(1e-2), plan)
    got, state = loop(plan.place(params_of(dtype)), tx, plan.place_batch(batch()))
    plain, plain_state = plain_loop()
    assert [x.sharding.spec for x in jax.tree.leaves(got)] == [x.stored for x in plan.layouts]
    assert [x.sharding.spec for x in jax.tree.leaves(state)] == plan.state_specs(state)
    if dtype == jnp.float32:
        assert jax.tree.structure(state) == jax.tree.structure(plain_state)
        assert max_error(got, plain) < 1e-5
    else:
        assert isinstance(state, jzero.ZeroState)
        assert max_error(state.master, plain) < 0.1
        for p, m in zip(jax.tree.leaves(got), jax.tree.leaves(state.master), strict=True):
            wrong = np.mean(np.asarray(p) != np.asarray(m.astype(dtype)))
            assert wrong == 0 if updates == "deferred" else wrong < 1e-3


def one_param_step(tx, plan):
    """A step of params with one array."""

    def loss_fn(params, x):
        return jnp.mean((x @ jax.tree.leaves(params)[0]) ** 2)

    def step(params, state, x):
        loss, grads = jax.value_and_grad(jzero.gather_on_use(loss_fn, plan))(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_params_that_are_one_bare_array(stage, mesh):
    """Its path is empty. Moments in their dtype and old values donated, as of the same array with a name."""
    w, x = jax.random.normal(jax.random.key(0), (64, 32), jnp.bfloat16), np.ones((16, 64), jnp.bfloat16)
    found = []
    for given in (w, {"w": w}):
        plan = jzero.make_plan(given, stage=stage, mesh=mesh, min_shard_bytes=0, moment_dtype="bfloat16")
        tx = jzero.zero(optax.adamw(1e-2), plan)
        params = plan.place(given)
        state = jax.jit(tx.init)(params)
        assert [a.dtype for a in jax.tree.leaves(state.inner)] == ["int32", "bfloat16", "bfloat16"]
        assert plan.copies({"average": params, "x": x}) == [plan.layouts[0], None]  # placed as the moments
        new, new_state, _ = jzero.jit(one_param_step(tx, plan), plan)(params, state, x)
        assert all(a.is_deleted() for a in jax.tree.leaves((params, state.master)))
        found.append(jax.tree.leaves((new, new_state)))
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.sharding == b.sharding


@pytest.mark.unit
def test_a_bare_array_is_told_from_its_shape_alone(mesh):
    plan = jzero.make_plan(jnp.ones((4, 4)), stage=2, mesh=mesh, min_shard_bytes=0, offload="host", scan_axes={"*": 0})
    assert plan.layouts[0].scan_dim == 0
    state = jax.eval_shape(optax.contrib.muon(1e-2).init, jnp.ones((4, 4)))
    large = [x.shape for x, off in zip(jax.tree.leaves(state), plan.offloaded(state), strict=True) if off]
    assert set(large) == {(4, 4)}  # the coefficients belong to no param
    kinds = [plan.kind_of(p, s) for p, s in (("[0][0]", (4, 4)), ("[0][1][0].mu", (4, 4)), ("[0][2]", (8,)))]
    assert kinds == ["params", "opt_state", "rest"]


@pytest.mark.unit
def test_a_layer_may_be_named_like_a_field_of_the_state(mesh):
    params = {"opt_state": {"w": jnp.ones((4, 4))}, "params": {"w": jnp.ones((4, 4))}}
    plan = jzero.make_plan(params, stage=2, mesh=mesh, min_shard_bytes=0)
    args, state = ("[0][0].params", "[0][0]"), ("[0][0].opt_state[0].mu", "[0][1][0].mu", "[1]['opt_state'][0].mu")
    for x in plan.layouts:
        assert {plan.kind_of(arg + x.name) for arg in args} == {"params"}
        assert {plan.kind_of(arg + x.name) for arg in state} == {"opt_state"}


def test_eager_updates_and_numpy_params(mesh):
    plan = jzero.make_plan(params_of(), stage=2, mesh=mesh, min_shard_bytes=0)
    tx = jzero.zero(optax.adam(1e-2), plan)
    params, grads = params_of(), jax.tree.map(jnp.ones_like, params_of())
    state = tx.init(params)
    assert state[0].mu["a"].sharding.spec == P("data")
    updates, state = tx.update(grads, state, params)
    new = optax.apply_updates(params, updates)
    plain_updates, _ = optax.adam(1e-2).update(grads, optax.adam(1e-2).init(params), params)
    want = optax.apply_updates(params, plain_updates)
    assert max_error(new, want) < 1e-6
    as_numpy = jax.tree.map(np.asarray, params)
    assert max_error(jax.tree.map(lambda p, u: p + u, as_numpy, updates), want) < 1e-6


def test_inside_a_chain(mesh):
    """`chain(clip, zero(tx))`: the clip stands outside of the wrapped transformation."""
    plan = jzero.make_plan(params_of(), stage=2, mesh=mesh, min_shard_bytes=0)
    tx = optax.chain(optax.clip_by_global_norm(0.1), jzero.zero(optax.adam(1e-2), plan))
    plain = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))
    got, _ = loop(plan.place(params_of()), tx, plan.place_batch(batch()))
    assert max_error(got, loop(params_of(), plain, batch())[0]) < 1e-5


def test_delta_stands_anywhere_in_a_chain_and_under_apply_if_finite(mesh):
    plan = jzero.make_plan(params_of(), stage=2, mesh=mesh, min_shard_bytes=0, updates="delta")
    tx = optax.apply_if_finite(optax.chain(jzero.zero(optax.adam(1e-2), plan), optax.scale(0.5)), 3)
    plain = optax.chain(optax.adam(1e-2), optax.scale(0.5))
    got, _ = loop(plan.place(params_of()), tx, plan.place_batch(batch()))
    assert max_error(got, loop(params_of(), plain, batch())[0]) < 1e-5


def test_hyper_parameters_are_found_and_set(mesh):
    for dtype in (jnp.float32, jnp.bfloat16):
        state = shard(
            lambda d=dtype: create_state(optax.inject_hyperparams(optax.sgd)(learning_rate=0.1), d), mesh, 2
        )
        assert float(optax.tree.get(state.opt_state, "learning_rate")) == pytest.approx(0.1)
        frozen = state.replace(opt_state=optax.tree.set(state.opt_state, learning_rate=jnp.float32(0.0)))
        data = jzero.plan_of(state).place_batch(batch())
        after, _ = jax.jit(train_step)(frozen, data)
        assert max_error(after.params, state.params) == 0


def test_a_scan_of_steps_with_an_ema_and_a_cond_round_a_step(mesh):
    state = shard(create_state, mesh, 2)
    plan = jzero.plan_of(state)

    @jax.jit
    def many(state, batches):
        def body(carry, batch):
            state, ema = carry
            new, loss = jax.lax.cond(
                loss_ok(batch), train_step, lambda s, b: (s, jnp.float32(0)), state, batch
            )
            ema = jax.tree.map(lambda e, p: 0.5 * e + 0.5 * p.astype(e.dtype), ema, new.params)
            return (new, ema), loss

        ema = jax.tree.map(lambda p: p.astype(jnp.float32), state.params)
        return jax.lax.scan(body, (state, ema), batches)

    def loss_ok(batch):
        return jnp.isfinite(batch["x"]).all()

    batches = {k: np.stack([batch(i)[k] for i in range(3)]) for k in batch()}
    batches["x"][1, 0, 0] = np.nan  # the middle step is skipped
    placed = jax.device_put(batches, plan.sharding(P(None, "data")))
    (after, _), losses = many(state, placed)
    step = jax.jit(train_step)
    want = state
    for i in (0, 2):
        want, _ = step(want, plan.place_batch(batch(i)))
    assert losses[1] == 0
    assert int(after.step) == 2
    assert max_error(after.params, want.params) < 1e-5


def test_a_line_search_sees_params_as_the_model_knows_them(mesh):
    def run(params, tx, data):
        @jax.jit
        def step(params, state, batch):
            value_fn = lambda p: loss_fn(p, batch)  # noqa: E731
            value, grads = jax.value_and_grad(value_fn)(params)
            updates, state = tx.update(grads, state, params, value=value, grad=grads, value_fn=value_fn)
            return optax.apply_updates(params, updates), state, value

        state = jax.jit(tx.init)(params)
        for _ in range(4):
            params, state, value = step(params, state, data)
        return params, value

    def make():
        return optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(8))

    plan = jzero.make_plan(params_of(), stage=2, mesh=mesh, min_shard_bytes=0)
    got, value = run(plan.place(params_of()), jzero.zero(make(), plan), plan.place_batch(batch()))
    want, plain_value = run(params_of(), make(), batch())
    np.testing.assert_allclose(value, plain_value, rtol=1e-4)
    assert max_error(got, want) < 1e-3


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_equinox(stage, mesh):
    model = eqx.nn.MLP(DIM_IN, DIM_OUT, 64, 2, key=jax.random.key(0))

    def loss(model, batch):
        return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)

    def run(params, static, tx, data):
        @jax.jit
        def step(params, state, batch):
            value, grads = jax.value_and_grad(lambda p: loss(eqx.combine(p, static), batch))(params)
            updates, state = tx.update(grads, state, params)
            return eqx.apply_updates(params, updates), state, value

        state = jax.jit(tx.init)(params)
        for i in range(5):
            params, state, value = step(params, state, data(i))
        return params, value

    params, static = eqx.partition(model, eqx.is_inexact_array)
    plan = jzero.make_plan(params, stage=stage, mesh=mesh, min_shard_bytes=0)
    tx = jzero.zero(optax.adam(1e-2), plan)
    got, value = run(plan.place(params), static, tx, lambda i: plan.place_batch(batch(i)))
    want, plain_value = run(params, static, optax.adam(1e-2), batch)
    np.testing.assert_allclose(value, plain_value, rtol=1e-5)
    assert max_error(got, want) < 1e-5
    assert [x.sharding.spec for x in jax.tree.leaves(got)] == [x.stored for x in plan.layouts]


def test_named_scopes_tell_the_parts_of_the_update_apart(mesh):
    state = shard(lambda: create_state(dtype=jnp.bfloat16), mesh, 2)
    text = jax.jit(train_step).lower(state, batch()).as_text(debug_info=True)
    for scope in ("jzero.reduce_grads", "jzero.master", "jzero.update", "jzero.gather_params"):
        assert scope in text


def test_wrapped_transformations_are_equal_where_the_plain_ones_and_the_plans_are(mesh):
    plan = jzero.make_plan(params_of(), stage=2, mesh=mesh)
    again = jzero.make_plan(params_of(), stage=2, mesh=mesh)
    tx, rebuilt = optax.adamw(1e-3), optax.adamw(1e-3)
    assert jzero.zero(tx, plan) == jzero.zero(tx, again)
    assert hash(jzero.zero(tx, plan)) == hash(jzero.zero(tx, again))
    assert tx != rebuilt
    assert jzero.zero(tx, plan) != jzero.zero(rebuilt, plan)
    assert jzero.zero(tx, plan) != jzero.zero(tx, jzero.make_plan(params_of(), stage=1, mesh=mesh))
    other = jzero.make_plan(params_of(), stage=1, mesh=mesh)
    assert jzero.zero(jzero.zero(tx, other), plan) == jzero.zero(tx, plan)


@pytest.mark.default_cases("0-float32", "1-bfloat16", "2-float32", "3-bfloat16")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_estimate_counts_live_bytes(stage, dtype, mesh):
    state = shard(lambda: create_state(dtype=dtype), mesh, stage)
    plan = jzero.plan_of(state)
    estimate = jzero.estimate(plan, tx=state.tx)
    one = jax.devices()[0]

    def held(tree):
        shards = (s for x in jax.tree.leaves(tree) for s in x.addressable_shards)
        return sum(s.data.nbytes for s in shards if s.device == one)

    assert estimate.params == held(state.params)
    assert estimate.opt_state == held(state.opt_state)
    assert estimate.total == estimate.params + estimate.grads + estimate.opt_state
    again = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    assert jzero.estimate(plan, tx=again) == estimate


def test_a_replicated_batch_would_not_pass(mesh):
    """The guard of the parity tests: it fails on a batch that every device holds whole."""
    from models import assert_batch_is_split

    whole = jax.device_put(batch(), jax.NamedSharding(mesh, P()))
    with pytest.raises(AssertionError, match="not split"):
        assert_batch_is_split(whole)
    assert whole["x"].shape[0] == BATCH


@pytest.mark.default_cases("2")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_lookahead(stage, mesh):
    """Its params are a pair of trees, and its slow params move by whole differences."""

    def run(params, tx, data):
        @jax.jit
        def step(params, state, batch):
            grads = jax.grad(loss_fn)(params.fast, batch)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        state = jax.jit(tx.init)(params)
        for _ in range(7):
            params, state = step(params, state, data)
        return params

    pair = optax.LookaheadParams.init_synced(params_of())
    plan = jzero.make_plan(pair.fast, stage=stage, mesh=mesh, min_shard_bytes=0)
    inner = jzero.zero(optax.adam(1e-2), plan)
    placed = optax.LookaheadParams.init_synced(plan.place(pair.fast))
    with pytest.raises(TypeError, match=r"an update is not an array.*ZeroConfig\(updates=.delta.\)"):
        run(placed, optax.lookahead(inner, 3, 0.5), plan.place_batch(batch()))
    plan = jzero.make_plan(pair.fast, stage=stage, mesh=mesh, min_shard_bytes=0, updates="delta")
    got = run(placed, optax.lookahead(jzero.zero(optax.adam(1e-2), plan), 3, 0.5), plan.place_batch(batch()))
    want = run(pair, optax.lookahead(optax.adam(1e-2), 3, 0.5), batch())
    assert max_error(got, want) < 1e-5


@pytest.mark.default_cases("3-bfloat16")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_layouts_hold_through_a_scan_of_steps(stage, dtype, mesh):
    state = shard(lambda: create_state(dtype=dtype), mesh, stage)
    data = jzero.plan_of(state).place_batch(batch())
    steps = jax.jit(lambda s, b: jax.lax.scan(lambda s, _: train_step(s, b), s, None, length=3))
    first = [x.sharding.spec for x in jax.tree.leaves(state)]
    for _ in range(2):
        state, _ = steps(state, data)
        assert [x.sharding.spec for x in jax.tree.leaves(state)] == first
    assert steps._cache_size() == 1


def test_an_update_that_starts_at_zero_is_not_frozen(mesh):
    """A gradient that is applied one step late: its first update is zero, its param still needs a master."""

    def init(params):
        return jax.tree.map(jnp.zeros_like, params)

    def update(grads, state, params=None):
        return state, jax.tree.map(lambda g: -1e-4 * g, grads)

    tx = optax.GradientTransformation(init, update)
    params = {"w": jnp.ones((64, 64), jnp.bfloat16)}
    plan = jzero.make_plan(params, stage=2, mesh=mesh, min_shard_bytes=0)
    tx = jzero.zero(tx, plan)
    params = plan.place(params)
    state = tx.init(params)
    assert isinstance(state, jzero.ZeroState)

    @jax.jit
    def step(params, state):
        updates, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(200):
        params, state = step(params, state)
    np.testing.assert_allclose(np.asarray(params["w"], np.float32), 0.98, atol=2e-3)


def test_a_transformation_that_reads_extra_arguments(mesh):
    def update(grads, state, params=None, **extra):
        return jax.tree.map(lambda g: -g * extra["loss"], grads), state

    tx = optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), update)
    params = {"w": jnp.ones((64, 64))}
    plan = jzero.make_plan(params, stage=2, mesh=mesh, min_shard_bytes=0)
    tx, params = jzero.zero(tx, plan), plan.place(params)
    updates, _ = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params, loss=0.25)
    np.testing.assert_allclose(optax.apply_updates(params, updates)["w"], 0.75)


@pytest.mark.parametrize("where", [None, "host", "disk"])
def test_no_update_changes_the_dtype_of_state(where, mesh, tmp_path):
    """A chain keeps the gradient of a frozen bf16 param, which has no master."""

    def update(grads, last, params=None):
        return jax.tree.map(lambda g, t: jnp.sum(t).astype(g.dtype) - g, grads, last), grads

    keeps = optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)
    freeze = optax.masked(optax.set_to_zero(), {"w": False, "base": True})
    params = {"w": jnp.ones((64, 64), jnp.bfloat16), "base": jnp.ones((64, 64), jnp.bfloat16)}
    disk = jzero.Offload(tier="disk", path=tmp_path / "state")
    offload = {None: None, "host": jzero.Offload(update="host"), "disk": disk}[where]
    plan = jzero.make_plan(params, stage=2, mesh=mesh, min_shard_bytes=0, offload=offload)
    tx, placed = jzero.zero(optax.chain(keeps, freeze), plan), plan.place(params)
    state = tx.init(placed)
    first = [x.dtype for x in jax.tree.leaves(whole_state(state, placed, tx)[0])]
    for _ in range(2):
        updates, state = tx.update(jax.tree.map(jnp.copy, placed), state, placed)
        placed = optax.apply_updates(placed, updates)
    assert [x.dtype for x in jax.tree.leaves(whole_state(state, placed, tx)[0])] == first
    assert jnp.float32 in first
    assert jnp.bfloat16 not in first
    np.testing.assert_array_equal(np.asarray(placed["base"]), 1)
