"""`moment_dtype`: which leaves are stored in it, rounding that is right in the mean, and training as without it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from models import (
    assert_batch_is_split,
    assert_laid_out,
    batch,
    create_small,
    create_state,
    logical,
    max_error,
    shard,
    train_step,
)
from optax import contrib

import jzero
from jzero.update.moment_dtype import rounded, with_moment_dtype

BF16 = jnp.bfloat16
ULP = 2.0**-7  # of bf16, relative: the distance of two neighbours is between 2^-8 and 2^-7


def dtypes(tree):
    return {jax.tree_util.keystr(k): x.dtype for k, x in jax.tree_util.tree_leaves_with_path(tree)}


# --- the rounding ------------------------------------------------------------------------------------------------


def test_the_mean_of_many_roundings_is_the_value():
    values = jnp.asarray([1.0 + 1 / 1024, -3.3e-9, 7.77e20, 1e-30], jnp.float32)
    many = jax.vmap(lambda salt: rounded(values, BF16, salt))(jnp.arange(4096, dtype=jnp.uint32))
    many = np.asarray(many, np.float64)
    assert (np.abs(many / np.asarray(values, np.float64) - 1) < ULP).all()
    assert (np.ptp(many, axis=0) > 0).all()  # up and down
    # a standard error of at most 2^-8 / 2 / 64
    np.testing.assert_allclose(many.mean(0), np.asarray(values, np.float64), rtol=4 * 2.0**-15)


def test_what_bf16_holds_is_kept():
    exact = jnp.asarray([0.0, -0.0, 1.0, -2.5, 1e-40, jnp.inf, -jnp.inf, 3.3895314e38], BF16)
    got = rounded(exact.astype(jnp.float32), BF16, jnp.uint32(7))
    assert got.tobytes() == exact.tobytes()
    assert jnp.isnan(rounded(jnp.float32(jnp.nan), BF16, jnp.uint32(1)))
    assert rounded(jnp.float32(3.4e38), BF16, jnp.uint32(1)) >= 3.38e38  # no nan out of a carry


def average(rule, steps: int = 3000):
    """An average of ones with a decay of 0.999, from zero."""

    def step(x, i):
        return rule(0.999 * x.astype(jnp.float32) + 0.001, i.astype(jnp.uint32)), None

    return jax.lax.scan(step, jnp.zeros((), BF16), jnp.arange(steps))[0]


def test_a_slow_average_gets_there():
    nearest = average(lambda x, _: x.astype(BF16))
    assert float(nearest) == 0.25  # where rounding to nearest stops
    want = 1 - 0.999**3000
    assert float(average(lambda x, i: rounded(x, BF16, i))) == pytest.approx(want, rel=0.1)


# --- which leaves ------------------------------------------------------------------------------------------------


def narrowed(tx):
    params = {"w": jnp.ones((64, 128)), "b": jnp.ones(128)}
    plan = jzero.make_plan(params, stage=2, min_shard_bytes=0, moment_dtype="bfloat16")
    state = jzero.zero(tx, plan).init(params)
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(params))
    plain = dtypes(tx.init(params))
    return sorted(k.replace("['", ".").replace("']", "") for k, d in dtypes(state).items() if d != plain[k])


@pytest.mark.parametrize(
    ("tx", "names"),
    [
        (optax.adamw(1e-3), ["[0].mu.b", "[0].mu.w", "[0].nu.b", "[0].nu.w"]),
        (optax.adam(1e-3, mu_dtype=BF16), ["[0].nu.b", "[0].nu.w"]),
        (optax.sgd(1e-3, momentum=0.9), ["[0].trace.b", "[0].trace.w"]),
        (optax.sgd(1e-3), []),
        (optax.adafactor(1e-3), ["[0].v.b", "[0].v.w"]),
        (optax.adagrad(1e-3), ["[0].sum_of_squares.b", "[0].sum_of_squares.w"]),
        # averages of params are no moments
        (contrib.schedule_free_sgd(1e-3), []),
    ],
)
def test_moments_and_nothing_else(tx, names):
    assert narrowed(tx) == names


def test_hyper_parameters_stay():
    got = narrowed(optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3))
    assert [k.rsplit(".", 2)[1:] for k in got] == [["mu", "b"], ["mu", "w"], ["nu", "b"], ["nu", "w"]]


def test_sums_of_micro_steps_are_stored_in_it_too():
    got = narrowed(optax.MultiSteps(optax.sgd(1e-3), 4).gradient_transformation())
    assert got == [".acc_grads.b", ".acc_grads.w"]


# --- training ----------------------------------------------------------------------------------------------------


def adamw():
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, b2=0.999))


def run(state, place=lambda b: b, steps: int = 20):
    step, losses = jax.jit(train_step, donate_argnums=0), []
    for i in range(steps):
        state, loss = step(state, place(batch(i)))
        losses.append(float(loss))
    return state, losses


NIGHTLY = pytest.mark.nightly


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("stage", "dtype"),
    [(0, BF16), (1, BF16), (2, BF16), (3, BF16), (2, jnp.float32)]
    + [pytest.param(stage, jnp.float32, marks=NIGHTLY) for stage in (0, 1, 3)],
)
def test_a_run_stays_beside_that_with_full_moments(stage, dtype, mesh):
    state = shard(create_state(adamw(), dtype), mesh, stage, moment_dtype="bfloat16")
    plan = jzero.plan_of(state)
    inner = state.opt_state.inner if dtype == BF16 else state.opt_state
    assert {x.dtype for x in jax.tree.leaves((inner[1][0].mu, inner[1][0].nu))} == {jnp.dtype(BF16)}

    def place(batch):
        placed = plan.place_batch(batch)
        assert_batch_is_split(placed)
        return placed

    got, losses = run(state, place)
    assert_laid_out(got, plan)
    fp32 = shard(create_state(adamw(), dtype), mesh, stage)
    want, plain = run(fp32, place)
    np.testing.assert_allclose(losses, plain, rtol=5e-3)
    for name in ("mu", "nu"):
        ours = getattr((got.opt_state.inner if dtype == BF16 else got.opt_state)[1][0], name)
        theirs = getattr((want.opt_state.inner if dtype == BF16 else want.opt_state)[1][0], name)
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
            scale = np.abs(b).max()
            assert 0 < np.abs(a - b).max() < 0.1 * scale  # 0.037 here; other machines, other random bits


@pytest.mark.default_cases("2-adamw", "3-adamw", "2-lion")
@pytest.mark.parametrize(
    ("stage", "name"),
    [(2, name) for name in ("adamw", "lion", "sgd", "if finite", "steps")]
    + [(0, "adamw"), (1, "adamw"), (3, "adamw")]
    + [
        pytest.param(i, name, marks=NIGHTLY)
        for i in (0, 1, 3)
        for name in ("lion", "sgd", "if finite", "steps")
    ],
)
def test_shards_are_rounded_as_the_whole_is(stage, name, mesh):
    """Against the same transformation without any sharding, fed the same gradients: within one step of bf16."""
    tx = {
        "adamw": optax.adamw(1e-2),
        "lion": optax.lion(1e-2),
        "sgd": optax.sgd(1e-2, momentum=0.9),
        "if finite": optax.apply_if_finite(optax.adamw(1e-2), 3),
        "steps": optax.MultiSteps(optax.adamw(1e-2), 2).gradient_transformation(),
    }[name]
    state = shard(create_small(tx), mesh, stage, moment_dtype="bfloat16")
    plan = jzero.plan_of(state)
    alone: Any = with_moment_dtype(tx, plan, create_small(tx).params)
    plain = create_small(alone)
    step = jax.jit(lambda s, g: s.apply_gradients(grads=g))
    for i in range(6):
        rng = np.random.default_rng(i)
        grads = jax.tree.map(lambda p: jnp.asarray(rng.standard_normal(p.shape), p.dtype), plain.params)  # noqa: B023
        state = step(state, jax.device_put(grads, plan.sharding(jax.P())))
        plain = step(plain, grads)
    assert_laid_out(state, plan)
    assert dtypes(state.opt_state) == dtypes(plain.opt_state)
    assert any(d == BF16 for d in dtypes(state.opt_state).values())
    pairs = zip(jax.tree.leaves(logical(state)), jax.tree.leaves(plain.opt_state), strict=True)
    same = [np.asarray(a) == np.asarray(b) for a, b in pairs if b.dtype == BF16]
    # a last bit of fp32 that is fused another way gives an element other random bits, and no more than that
    assert np.mean(np.concatenate([x.ravel() for x in same])) > 0.95
    assert max_error(logical(state), plain.opt_state) <= 2 * ULP
    # a step of bf16 (2^-6) in a momentum of 4, times the rate, in each of six steps, of params up to 0.34, twice
    assert max_error(state.params, plain.params) <= 6e-3


def test_a_skipped_step_changes_no_bit(mesh):
    state = shard(create_small(optax.apply_if_finite(optax.adamw(1e-2), 3)), mesh, 2, moment_dtype="bfloat16")
    step = jax.jit(lambda s, g: s.apply_gradients(grads=g))
    ones = jax.tree.map(jnp.ones_like, state.params)
    state = step(step(state, ones), ones)
    after = step(state, jax.tree.map(lambda p: p * jnp.nan, ones))
    for a, b in zip(
        jax.tree.leaves(state.opt_state.inner_state),
        jax.tree.leaves(after.opt_state.inner_state),
        strict=True,
    ):
        assert a.tobytes() == b.tobytes()


def test_estimate_counts_it(mesh):
    state = shard(create_state(adamw(), BF16), mesh, 2, moment_dtype="bfloat16")
    plan = jzero.plan_of(state)
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state.opt_state))
    assert jzero.estimate(plan, tx=state.tx).opt_state == held
    assumed = jzero.estimate(plan).opt_state  # without single numbers
    assert assumed == pytest.approx(held, abs=64)
    whole = sum(x.size for x in plan.layouts)
    assert held < 1.3 * whole * 8 / 8  # 2 + 2 + 4 bytes over eight devices, and what stays whole


@pytest.mark.nightly
def test_with_state_on_the_host(mesh):
    make = lambda: create_state(adamw(), BF16)  # noqa: E731
    on_device, losses = run(shard(make(), mesh, 2, moment_dtype="bfloat16"), steps=5)
    on_host, others = run(shard(make(), mesh, 2, moment_dtype="bfloat16", offload="host"), steps=5)
    np.testing.assert_allclose(others, losses, rtol=1e-5)
    assert max_error(logical(on_host), logical(on_device)) <= ULP
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(on_host.opt_state) if x.ndim}
    assert kinds == {"pinned_host"}


@pytest.mark.nightly
def test_a_live_change_there_and_back(mesh):
    state, _ = run(shard(create_state(adamw(), BF16), mesh, 2), steps=3)
    full = state.opt_state.inner[1][0]
    state = shard(state, mesh, 3, moment_dtype="bfloat16")
    half = state.opt_state.inner[1][0]
    assert half.mu["Dense_0"]["kernel"].dtype == BF16
    assert max_error(half, full) <= ULP
    back = shard(state, mesh, 1)
    again = back.opt_state.inner[1][0]
    assert again.mu["Dense_0"]["kernel"].dtype == jnp.float32
    assert max_error(again, half) == 0
    run(back, steps=1)


def test_a_checkpoint_holds_what_is_stored(mesh, tmp_path):
    state, _ = run(shard(create_state(adamw(), BF16), mesh, 2, moment_dtype="bfloat16"), steps=2)
    jzero.checkpoint.save(tmp_path / "half", state)
    like = jzero.abstract(lambda: create_state(adamw(), BF16), stage=3, mesh=mesh, moment_dtype="bfloat16")
    got = jzero.checkpoint.restore(tmp_path / "half", like)
    for a, b in zip(jax.tree.leaves(logical(got)), jax.tree.leaves(logical(state)), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    like = jzero.abstract(lambda: create_state(adamw(), BF16), stage=2, mesh=mesh)
    with pytest.raises(ValueError, match=r"(?s)mu.*bf16|bfloat16"):
        jzero.checkpoint.restore(tmp_path / "half", like)


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn"])
def test_dtypes_that_squares_do_not_fit_are_refused(dtype):
    with pytest.raises(ValueError, match=r"moment_dtype=.*squares of gradients"):
        jzero.ZeroConfig(moment_dtype=dtype)
    with pytest.raises(ValueError, match="must be a floating dtype"):
        jzero.ZeroConfig(moment_dtype="int8")


def test_wider_moments_than_the_params(mesh):
    """bf16 params without a master: optax alone would keep bf16 moments."""
    state = shard(create_state(adamw(), BF16), mesh, 2, master_dtype=None, moment_dtype="float32")
    assert {x.dtype for x in jax.tree.leaves(state.opt_state[1][0].nu)} == {jnp.dtype(jnp.float32)}
    state, losses = run(state, steps=5)
    assert {x.dtype for x in jax.tree.leaves(state.opt_state[1][0].nu)} == {jnp.dtype(jnp.float32)}
    assert np.isfinite(losses).all()
