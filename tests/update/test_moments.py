"""`moment_dtype`: which leaves are stored in it, rounding that is right in the mean, and training as without it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
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


def inner(opt_state):
    """The state of the chain itself."""
    return opt_state.inner if isinstance(opt_state, jzero.ZeroState) else opt_state


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
    state = inner(jzero.zero(tx, plan).init(params))
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
        # averages of params are not moments
        (contrib.schedule_free_sgd(1e-3), []),
    ],
)
def test_moments_and_nothing_else(tx, names):
    assert narrowed(tx) == names


def test_hyper_parameters_stay():
    got = narrowed(optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3))
    assert [k.rsplit(".", 2)[1:] for k in got] == [["mu", "b"], ["mu", "w"], ["nu", "b"], ["nu", "w"]]


def test_a_hyper_parameter_with_the_name_of_a_param_is_no_moment():
    """0.999 is 1 in bf16, and the second step NaN."""
    tx = optax.inject_hyperparams(optax.adam)(1e-3)
    params = {"w": jnp.ones((16, 16)), "b2": jnp.zeros(())}
    plan = jzero.make_plan(params, stage=1, moment_dtype="bfloat16", min_shard_bytes=0)
    state = jzero.unshard(jzero.zero(tx, plan).init(plan.place(params)))
    assert float(state.hyperparams["b2"]) == pytest.approx(0.999, abs=1e-6)
    assert state.inner_state[0].mu["w"].dtype == jnp.bfloat16


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
    counted = isinstance(state.opt_state, jzero.ZeroState)

    @jax.jit
    def plain_step(state, grads, more):
        updates, opt_state = alone.update(grads, state.opt_state, state.params, **more)
        return state.replace(params=optax.apply_updates(state.params, updates), opt_state=opt_state)

    for i in range(6):
        rng = np.random.default_rng(i)
        grads = jax.tree.map(lambda p: jnp.asarray(rng.standard_normal(p.shape), p.dtype), plain.params)  # noqa: B023
        state = step(state, jax.device_put(grads, plan.sharding(jax.P())))
        plain = plain_step(plain, grads, {"rounding_count": jnp.int32(i)} if counted else {})
    assert_laid_out(state, plan)
    got = inner(logical(state))
    assert dtypes(got) == dtypes(plain.opt_state)
    assert any(d == BF16 for d in dtypes(got).values())
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(plain.opt_state), strict=True)
    same = [np.asarray(a) == np.asarray(b) for a, b in pairs if b.dtype == BF16]
    # a last bit of fp32 that is fused another way gives an element other random bits, and no more than that
    assert np.mean(np.concatenate([x.ravel() for x in same])) > 0.95
    assert max_error(got, plain.opt_state) <= 2 * ULP
    # a step of bf16 (2^-6) in a momentum of 4, times the rate, in each of six steps, of params up to 0.34, twice
    assert max_error(state.params, plain.params) <= 6e-3


def test_a_skipped_step_changes_no_bit(mesh):
    state = shard(create_small(optax.apply_if_finite(optax.adamw(1e-2), 3)), mesh, 2, moment_dtype="bfloat16")
    step = jax.jit(lambda s, g: s.apply_gradients(grads=g))
    ones = jax.tree.map(jnp.ones_like, state.params)
    state = step(step(state, ones), ones)
    after = step(state, jax.tree.map(lambda p: p * jnp.nan, ones))
    for a, b in zip(
        jax.tree.leaves(inner(state.opt_state).inner_state),
        jax.tree.leaves(inner(after.opt_state).inner_state),
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


@pytest.mark.nightly
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


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn", "int4", "int16"])
def test_dtypes_that_squares_do_not_fit_are_refused(dtype):
    with pytest.raises(ValueError, match=r"moment_dtype=.*squares of gradients"):
        jzero.ZeroConfig(moment_dtype=dtype)


@pytest.mark.default_cases("int8")
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_an_injected_decay_of_16_bit_params_is_not_rounded(dtype, mesh):
    """0.999 is 1 in bf16, and Adam then divides by zero."""
    tx = optax.inject_hyperparams(optax.adam)(1e-3)
    fields = {"master_dtype": None, "moment_dtype": dtype}
    for state in (lambda: create_state(tx, BF16), create_state(tx, BF16)):
        state = shard(state, mesh, 2, **fields)
        assert float(inner(state.opt_state).hyperparams["b2"]) == pytest.approx(0.999, abs=1e-6)
    state, _ = run(state, steps=2)
    assert all(jnp.isfinite(p).all() for p in jax.tree.leaves(state.params))


def test_wider_moments_than_the_params(mesh):
    """bf16 params without a master: optax alone would keep bf16 moments."""
    state = shard(create_state(adamw(), BF16), mesh, 2, master_dtype=None, moment_dtype="float32")
    assert {x.dtype for x in jax.tree.leaves(state.opt_state[1][0].nu)} == {jnp.dtype(jnp.float32)}
    state, losses = run(state, steps=5)
    assert {x.dtype for x in jax.tree.leaves(state.opt_state[1][0].nu)} == {jnp.dtype(jnp.float32)}
    assert np.isfinite(losses).all()


@pytest.mark.parametrize("tx", [
    optax.apply_if_finite(contrib.adopt(1e-2), 5), contrib.mechanize(optax.sgd(1e-2), s_init=0.5),
], ids=["condition", "bound"])  # fmt: skip
def test_wider_moments_in_a_chain_that_wants_one_dtype(mesh, tx):
    """Zeros like gradients beside updates made of fp32 moments; a copy of the params between bounds made of these."""
    params = {"w": jnp.ones((8, 8), BF16)}
    plan = jzero.make_plan(params, stage=2, mesh=mesh, min_shard_bytes=0, master_dtype=None, moment_dtype="float32")
    wrapped = jzero.zero(tx, plan)
    grads = jax.tree.map(lambda p: p / 3, params)
    placed = plan.place(params)
    first = wrapped.init(placed)
    state = jax.jit(lambda *args: wrapped.update(*args)[1])(grads, first, placed)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), (grads, params))
    want = tx.update(wide[0], tx.init(wide[1]), wide[1])[1]
    for got, before, plain in zip(*map(jax.tree.leaves, (state, first, want)), strict=True):
        assert got.dtype == before.dtype
        np.testing.assert_allclose(np.float32(got), np.float32(plain), rtol=1e-6 if got.dtype != BF16 else 1e-2)


# --- chains that count no steps ----------------------------------------------------------------------------------

RMSPROP = optax.rmsprop(1e-3, decay=0.999)
COUNTLESS = {
    "rmsprop": RMSPROP,
    "adagrad": optax.adagrad(1e-3),
    "momentum": optax.sgd(1e-3, momentum=0.999),
    "steps": optax.MultiSteps(RMSPROP, 2).gradient_transformation(),
    "masked": optax.masked(RMSPROP, {"w": True}),
}
COUNTING = {
    "adam": optax.adam(1e-3),
    "lion": optax.lion(1e-3),
    "schedule": optax.rmsprop(optax.linear_schedule(1e-3, 0.0, 100)),
    "hyperparams": optax.inject_hyperparams(optax.rmsprop)(learning_rate=1e-3),
    "of a group": optax.multi_transform({"a": optax.adam(1e-3)}, {"w": "a"}),
    "no moments": optax.sgd(1e-3),
}
CONDITIONAL = {
    "if finite": optax.apply_if_finite(optax.adam(1e-3), 3),
    "micro-steps": optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation(),
    "other steps": optax.MultiSteps(RMSPROP, lambda step: 1 + step % 2).gradient_transformation(),
}
RNG = np.random.default_rng(0)
WEIGHTS, GRADS = ({"w": jnp.asarray(RNG.standard_normal((64, 64)), jnp.float32)} for _ in range(2))


def after_steps(tx, mesh, steps, dtype=jnp.float32, **fields):
    """The state after steps of the same gradients for params that do not move, in one program."""
    params = jax.tree.map(lambda x: x.astype(dtype), WEIGHTS)
    plan = jzero.make_plan(params, stage=2, mesh=mesh, min_shard_bytes=0, **fields)
    tx, params = jzero.zero(tx, plan), plan.place(params)
    run = jax.jit(lambda s: jax.lax.fori_loop(0, steps, lambda _, s: tx.update(GRADS, s, params)[1], s))
    return run(tx.init(params))


@pytest.mark.default_cases("rmsprop-float32", "momentum-bfloat16", "steps-float32")
@pytest.mark.parametrize("dtype", [jnp.float32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", COUNTLESS)
def test_moments_of_constant_gradients_get_where_fp32_ones_do(name, dtype, mesh):
    tx = COUNTLESS[name]
    got = after_steps(tx, mesh, 1500, dtype, moment_dtype="bfloat16")
    want = inner(after_steps(tx, mesh, 1500, dtype))
    assert int(got.rounding_count) == 1500
    assert jax.tree.structure(got.inner) == jax.tree.structure(want)
    rows = list(zip(jax.tree.leaves(got.inner), jax.tree.leaves(want), strict=True))
    assert [a.dtype == BF16 for a, _ in rows] == [a.ndim > 0 for a, _ in rows]
    for a, b in rows:
        mean, wanted = (float(np.abs(np.asarray(x, np.float64)).mean()) for x in (a, b))
        assert mean == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize("name", [*COUNTLESS, *COUNTING, *CONDITIONAL])
def test_which_chains_get_a_count(name, mesh):
    """Those in whose state no integer is raised by every update: a count that waits, or starts again, is none."""
    tx = {**COUNTLESS, **COUNTING, **CONDITIONAL}[name]
    for moments in ("bfloat16", "float32", None):
        plan = jzero.make_plan(WEIGHTS, stage=2, mesh=mesh, min_shard_bytes=0, moment_dtype=moments)
        state = jzero.zero(tx, plan).init(WEIGHTS)
        counted = moments == "bfloat16" and name not in COUNTING
        assert isinstance(state, jzero.ZeroState) == counted
        assert jax.tree.structure(inner(state)) == jax.tree.structure(tx.init(WEIGHTS))
        if counted:
            assert jax.tree.leaves(state.master) == []
            assert (state.rounding_count.dtype, state.rounding_count.sharding.spec) == (jnp.int32, jax.P())


def momentum(dtype=jnp.float32):
    return create_state(optax.sgd(1e-2, momentum=0.99), dtype)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [jnp.float32, BF16])
def test_a_count_stays_through_layouts_and_checkpoints(dtype, mesh, tmp_path):
    def made(stage, moments="bfloat16", **fields):
        return jzero.abstract(
            lambda: momentum(dtype), stage=stage, mesh=mesh, min_shard_bytes=0, moment_dtype=moments, **fields
        )

    counted, _ = run(shard(momentum(dtype), mesh, 2, moment_dtype="bfloat16"), steps=3)
    assert jax.tree.structure(counted.opt_state) == jax.tree.structure(made(2).opt_state)
    plain = shard(counted, mesh, 1)
    assert isinstance(plain.opt_state, jzero.ZeroState) == (dtype == BF16)
    assert getattr(plain.opt_state, "rounding_count", None) is None
    assert int(shard(counted, mesh, 3, moment_dtype="bfloat16", uneven="pad").opt_state.rounding_count) == 3
    assert int(shard(plain, mesh, 3, moment_dtype="bfloat16").opt_state.rounding_count) == 0
    assert int(logical(shard(counted, mesh, 3, moment_dtype="bfloat16", uneven="pad")).rounding_count) == 3
    jzero.checkpoint.save(tmp_path / "counted", counted)
    jzero.checkpoint.save(tmp_path / "plain", plain)
    other = made(3)
    assert int(jzero.checkpoint.restore(tmp_path / "counted", other).opt_state.rounding_count) == 3
    new = jzero.checkpoint.restore(tmp_path / "plain", other, cast=True)
    assert int(new.opt_state.rounding_count) == 0
    run(new, steps=1)
    back = jzero.checkpoint.restore(tmp_path / "counted", made(1, None), cast=True)
    assert jax.tree.structure(back.opt_state) == jax.tree.structure(plain.opt_state)
    assert max_error(back.opt_state, plain.opt_state) == 0
    old = plain.replace(tx=shard(momentum(dtype), mesh, 1, moment_dtype="bfloat16").tx)
    with pytest.raises(ValueError, match=r"has no rounding_count, and its plan needs one"):
        run(old, steps=1)
    with pytest.raises(ValueError, match=r"has a rounding_count, and its plan needs none"):
        run(counted.replace(tx=plain.tx), steps=1)


@pytest.mark.nightly
def test_a_count_of_an_nnx_pair_and_of_state_elsewhere(mesh, tmp_path):
    """In host memory it is a leaf in device memory; of an update outside of the program it is the generation."""

    def create():
        model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.sgd(1e-2, momentum=0.99), wrt=nnx.Param)

    def step(pair):
        model, optimizer = pair
        optimizer.update(model, jax.tree.map(lambda p: jnp.full_like(p, 0.3), nnx.state(model, nnx.Param)))

    def elsewhere(pair, **options):
        return jzero.shard(pair, stage=2, mesh=mesh, min_shard_bytes=0, moment_dtype="bfloat16", **options)

    def count(pair):
        return int(pair[1].opt_state.rounding_count[...])

    def trace(pair):
        return np.asarray(jax.tree.leaves(nnx.as_pure(pair[1].opt_state))[0])

    pair = elsewhere(create)
    for _ in range(2):
        step(pair)
    assert count(pair) == 2
    jzero.checkpoint.save(tmp_path / "pair", pair)
    host = elsewhere(pair, offload="host")
    assert count(host) == 2
    assert host[1].opt_state.rounding_count[...].sharding.memory_kind == "device"
    step(host)
    for i, options in enumerate([{"update": "host"}, {"tier": "disk", "path": tmp_path / "files"}]):
        outside = elsewhere(host, offload=jzero.Offload(**options))
        for _ in range(2):
            step(outside)
        host = elsewhere(outside)
        assert count(host) == 5 + 2 * i
    restored = jzero.checkpoint.restore(tmp_path / "pair", elsewhere(create))
    assert count(restored) == 2
    for _ in range(5):
        step(restored)
    np.testing.assert_array_equal(trace(restored), trace(host))  # the same random bits wherever it was


@pytest.mark.nightly
def test_a_count_under_an_explicit_mesh():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        state = shard(momentum(), mesh, 2, moment_dtype="bfloat16")
        state, _ = run(state, jzero.plan_of(state).place_batch, steps=3)
        assert int(state.opt_state.rounding_count) == 3
        assert jax.typeof(state.opt_state.rounding_count).sharding.spec == jax.P()
        assert int(shard(state, mesh, 3, moment_dtype="bfloat16").opt_state.rounding_count) == 3
