"""The front door: what `shard` takes, what comes back, and that it stays so from step to step."""

from __future__ import annotations

import inspect
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding
from models import (
    DIM_IN,
    DIM_OUT,
    MLPS,
    adamw,
    assert_batch_is_split,
    assert_laid_out,
    batch,
    create_state,
    logical,
    max_error,
    shard,
    specs,
    train_step,
)
from programs import QUICK
from states import FullState, create_full, create_nnx, full_step, nnx_step

import jzero
from jzero.flax import creation

P = jax.P


@pytest.mark.default_cases("3-donate0")
@pytest.mark.parametrize("donate", [(), (0,)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_layouts_hold_for_a_hundred_steps_and_nothing_recompiles(stage, donate, mesh):
    plain, plain_step = create_state(), jax.jit(train_step)
    step = jax.jit(lambda state, batch: train_step(state, batch), donate_argnums=donate)  # its own cache
    state = shard(create_state, mesh, stage)
    plan = jzero.plan_of(state)
    assert type(state) is TrainState
    first = specs((state.params, state.opt_state, state.step))
    assert_laid_out(state, plan)
    for i in range(100):
        placed = plan.place_batch(batch(i % 4))
        assert_batch_is_split(placed)
        state, loss = step(state, placed)
        if i < 10:
            plain, plain_loss = plain_step(plain, batch(i % 4))
            np.testing.assert_allclose(loss, plain_loss, rtol=1e-5)
        if i in (0, 1, 99):
            assert specs((state.params, state.opt_state, state.step)) == first
    assert step._cache_size() == 1
    assert int(state.step) == 100


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_states_of_one_kind_have_equal_trees(stage, mesh):
    a, b = shard(create_state, mesh, stage), shard(create_state(), mesh, stage)
    assert jax.tree.structure(a) == jax.tree.structure(b)
    assert max_error(a.params, b.params) < 1e-6
    step = jax.jit(lambda state, batch: train_step(state, batch))
    placed = jzero.plan_of(a).place_batch(batch())
    step(a, placed)
    step(b, placed)
    assert step._cache_size() == 1
    other = shard(lambda: create_state(optax.adamw(2e-2)), mesh, stage)
    assert jax.tree.structure(a) != jax.tree.structure(other)


@pytest.mark.nightly
def test_two_states_in_one_jit(mesh):
    a, b = shard(create_state, mesh, 2), shard(lambda: create_state(optax.lion(1e-3)), mesh, 3)

    @jax.jit
    def both(a, b, batch):
        return train_step(a, batch)[0], train_step(b, batch)[0]

    placed = jzero.plan_of(a).place_batch(batch())
    a2, b2 = both(a, b, placed)
    assert_laid_out(a2, jzero.plan_of(a))
    assert_laid_out(b2, jzero.plan_of(b))
    assert max_error(a2.params, jax.jit(train_step)(create_state(), batch())[0].params) < 1e-5


# ---------------------------------------------------------------------------------------------- born sharded


def test_a_creation_function_never_makes_more_than_a_shard(mesh, monkeypatch):
    """Read from the compiled creation: outputs are shards, and temp is below the bytes of the largest leaf."""
    big = 1024

    def create():
        params = {"w": jax.random.normal(jax.random.key(0), (big, big)), "v": jnp.zeros((big, big))}
        return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))

    run, programs = creation._run, []
    monkeypatch.setattr(creation, "_run", lambda born: programs.append(born) or run(born))
    state = jzero.shard(create, stage=3, mesh=mesh)
    for x in jax.tree.leaves((state.params, state.opt_state)):
        if x.ndim:
            assert {s.data.nbytes for s in x.addressable_shards} == {x.nbytes // 8}
    memory = programs[0].lower().compile().memory_analysis()
    whole = 4 * big * big
    assert memory.output_size_in_bytes < 6 * whole / 8 + 1024
    assert memory.temp_size_in_bytes < whole


def test_a_replicated_creation_would_fail_the_test_above(mesh):
    """The same creation without jzero holds whole leaves: the assertion can fail."""
    w = jax.jit(
        lambda: jax.random.normal(jax.random.key(0), (1024, 1024)), out_shardings=NamedSharding(mesh, P())
    )()
    assert {s.data.nbytes for s in w.addressable_shards} == {w.nbytes}


def whole_run(existing, mesh, **fields):
    """Creation and three steps in one program, as RL code does it."""

    def run(seed, batches):
        def create():
            params = MLPS[jnp.dtype("float32")].init(jax.random.key(seed), jnp.ones((1, DIM_IN)))["params"]
            return create_state().replace(params=params, opt_state=adamw().init(params))

        state = create() if existing else create
        state = state if mesh is None else shard(state, mesh, 3, **fields)
        return jax.lax.scan(train_step, state, batches)

    return jax.jit(run)(3, jax.tree.map(lambda *x: np.stack(x), *map(batch, range(3))))


@pytest.mark.default_cases("False-host")
@pytest.mark.parametrize("fields", [{}, {"offload": "host"}], ids=["device", "host"])
@pytest.mark.parametrize("existing", [True, False])
def test_inside_of_a_jit(existing, fields, mesh):
    """The whole run is one program: a traced state is laid out as one that a function creates."""
    state, losses = whole_run(existing, mesh, **fields)
    plain, want = whole_run(True, None)
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    assert_laid_out(state, jzero.plan_of(state))
    assert max_error((state.params, logical(state)), (plain.params, plain.opt_state)) < 1e-5


@pytest.mark.nightly
def test_an_nnx_pair_and_another_stage_inside_of_a_jit(mesh):
    def run(batch):
        pair = create_nnx()
        assert shard(pair, mesh, 2)[0] is pair[0]
        return nnx.state(pair), nnx_step(*pair, batch)

    pair = create_nnx()
    arrays, loss = jax.jit(run)(batch())
    assert P("data") in specs(arrays[1])
    np.testing.assert_allclose(loss, nnx_step(*pair, batch()), rtol=1e-5)
    state = shard(create_state(dtype=jnp.bfloat16), mesh, 1)
    moved = jax.jit(lambda state: shard(state, mesh, 3))(state)
    assert_laid_out(moved, jzero.plan_of(moved))
    assert max_error((moved.params, logical(moved)), (state.params, logical(state))) == 0
    shapes = jax.eval_shape(lambda: jzero.abstract(create_state, stage=2, mesh=mesh) and jnp.zeros(3))
    assert shapes.shape == (3,)


@pytest.mark.nightly
@pytest.mark.pod
@pytest.mark.remedy("not_checked", "jzero.shard before jax.jit, and the state as an argument of the run")
def test_a_whole_run_that_shards_its_state_is_proven_for_a_pod():
    pod = jzero.pod("h200")
    mesh = pod.mesh({"data": 8})

    def run(batches):
        state = jzero.shard(create_state(), stage=3, mesh=mesh, min_shard_bytes=0)
        plans.append(jzero.plan_of(state))
        return jax.lax.scan(train_step, state, batches)

    plans = []
    split = NamedSharding(mesh, jax.P(None, "data"))
    batches = jax.tree.map(lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype, sharding=split), batch(0))
    program = pod.compile(jax.jit(run), batches, compiler_options=QUICK)
    (plan,), report = plans, jzero.explain(program, plans[0])
    assert {c.trips for c in report.collectives if c.op == "all-gather"} == {3}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the trace that is read again gathers nothing
        found = {f.kind: f.text for f in jzero.findings(program, plan)}
    assert "makes its state itself" in found["not_checked"]
    assert "not_trained" not in found
    outside = jzero.abstract(create_state, stage=3, mesh=mesh, min_shard_bytes=0)
    options = {"compiler_options": QUICK, "donate_argnums": 0}
    program = pod.compile(partial(jax.lax.scan, train_step), outside, batches, **options)
    assert {f.kind for f in jzero.findings(program, jzero.plan_of(outside))} == found.keys() - {"not_checked"}
    assert jzero.explain(program, jzero.plan_of(outside)).wire.total == report.wire.total
    with pytest.raises(TypeError, match=r"compile-only devices"):
        jzero.shard(create_state, stage=3, mesh=mesh)


def test_what_does_not_work_inside_of_a_jit_says_so(mesh):
    outside = {"stage": 2, "mesh": mesh, "offload": jzero.Offload(update="host")}
    with pytest.raises(NotImplementedError, match=r"jzero\.shard: with an update outside .* Call it outside, state ="):
        jax.jit(lambda: jzero.shard(create_state, **outside))()
    with jax.set_mesh(jax.make_mesh((8,), ("data",))):
        for call in (jzero.shard, jzero.abstract):
            with pytest.raises(NotImplementedError, match=r"under an Explicit mesh this does not work inside"):
                jax.jit(lambda call=call: call(create_state, stage=2) and 0)()


class CheckedState(TrainState):
    """Its `__init__` takes arrays alone, as a type checker does (openpi); jax and flax unflatten without it."""

    def __post_init__(self):
        files = {frame.filename for frame in inspect.stack()}
        if not any("jax/_src/tree" in name for name in files):
            bad = [x for x in jax.tree.leaves(self) if not isinstance(x, (jax.Array, int))]
            assert not bad, f"no arrays: {bad[:1]}"


def test_a_state_that_checks_its_fields_when_it_is_made(mesh):
    """`abstract` makes one of abstract leaves without its `__init__`."""

    def create():
        plain = create_state()
        return CheckedState.create(apply_fn=plain.apply_fn, params=plain.params, tx=adamw())

    for source in (create, create()):
        like = jzero.abstract(source, stage=3, mesh=mesh, min_shard_bytes=0)
        assert type(like) is CheckedState
        state = shard(source, mesh, 3)
        assert jax.tree.structure(like) == jax.tree.structure(state)
    plan, step = jzero.plan_of(state), jzero.jit(train_step)
    compiled = step.lower(state, plan.place_batch(batch())).compile()
    assert jzero.explain(compiled, plan).memory.opt_state
    state, _ = step(state, plan.place_batch(batch()))
    assert int(state.step) == 1


def test_random_values_do_not_depend_on_the_layout(mesh):
    born = shard(create_state, mesh, 3)
    assert max_error(born.params, create_state().params) < 1e-6


# ------------------------------------------------------------------------------------------- 16-bit params


def bf16_state(tx=None):
    return create_state(tx, dtype=jnp.bfloat16)


@pytest.mark.default_cases("3-0.01")
@pytest.mark.parametrize("lr", [3e-4, 1e-2, 1.0])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_params_are_exactly_the_cast_of_the_master(stage, lr, mesh):
    state = shard(lambda: bf16_state(optax.adamw(lr)), mesh, stage)
    plan = jzero.plan_of(state)
    assert isinstance(state.opt_state, jzero.ZeroState)
    assert {x.dtype for x in jax.tree.leaves(state.opt_state.inner)} == {
        jnp.dtype("int32"),
        jnp.dtype("float32"),
    }
    step = jax.jit(train_step, donate_argnums=0)
    for i in range(3):
        state, _ = step(state, plan.place_batch(batch(i)))
        for p, m in zip(jax.tree.leaves(state.params), jax.tree.leaves(logical(state).master), strict=True):
            assert m.dtype == jnp.float32
            np.testing.assert_array_equal(np.asarray(p), np.asarray(m.astype(p.dtype)))
    assert_laid_out(state, plan)


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_16_bit_run_equals_a_hand_written_fp32_master_run(stage, mesh):
    """Fed the same 16-bit gradients: fp32 masters within 1e-6, and no drift of small updates (lr 3e-5)."""
    tx = optax.adamw(3e-5)
    start = bf16_state(tx)
    master = jax.tree.map(lambda p: p.astype(jnp.float32), start.params)
    inner = tx.init(master)
    state = shard(bf16_state(tx), mesh, stage)
    apply = jax.jit(lambda s, g: s.apply_gradients(grads=g))

    @jax.jit
    def by_hand(master, inner, grads):
        updates, inner = tx.update(jax.tree.map(lambda g: g.astype(jnp.float32), grads), inner, master)
        return optax.apply_updates(master, updates), inner

    for i in range(10):
        rng = np.random.default_rng(i)
        grads = jax.tree.map(
            lambda p, rng=rng: jnp.asarray(rng.standard_normal(p.shape), jnp.bfloat16), start.params
        )
        master, inner = by_hand(master, inner, grads)
        state = apply(state, grads)
    assert max_error(logical(state).master, master) < 1e-6
    assert max_error(logical(state).inner, inner) < 1e-6
    for p, m in zip(jax.tree.leaves(state.params), jax.tree.leaves(master), strict=True):
        off = np.asarray(p, np.float32) != np.asarray(m.astype(jnp.bfloat16), np.float32)
        assert off.mean() < 1e-3  # a master 1e-7 away may round to the neighbour


def test_the_master_starts_from_the_fp32_values_of_the_creation_function(mesh):
    def fp32_params():
        return {
            "w": jax.random.normal(jax.random.key(1), (64, 32)),
            "v": {"b": jax.random.normal(jax.random.key(2), (64,))},
        }

    @jax.jit
    def cast(tree):
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)

    def create():
        return TrainState.create(apply_fn=None, params=cast(fp32_params()), tx=optax.adam(1e-3))

    state = shard(create, mesh, 2)
    for m, exact in zip(jax.tree.leaves(logical(state).master), jax.tree.leaves(fp32_params()), strict=True):
        np.testing.assert_allclose(m, exact, rtol=1e-6)
        assert np.any(np.asarray(m) != np.asarray(exact.astype(jnp.bfloat16), np.float32))
    from_rounded = shard(create(), mesh, 2)
    for m, p in zip(
        jax.tree.leaves(logical(from_rounded).master), jax.tree.leaves(create().params), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(m), np.asarray(p, np.float32))


@pytest.mark.default_cases("2")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_params_replaced_between_steps_are_taken_over(stage, mesh):
    """Half of one leaf pruned by the user: the master follows there, and keeps its extra bits elsewhere."""
    state = shard(lambda: bf16_state(optax.sgd(1e-3)), mesh, stage)
    plan, step = jzero.plan_of(state), jax.jit(train_step)
    state, _ = step(state, plan.place_batch(batch()))
    before = np.asarray(state.opt_state.master["Dense_0"]["kernel"])
    pruned = np.asarray(state.params["Dense_0"]["kernel"]).copy()
    pruned[:12] = 0
    params = {**state.params, "Dense_0": {**state.params["Dense_0"], "kernel": jnp.asarray(pruned)}}
    zero_grads = jax.tree.map(jnp.zeros_like, params)
    after = jax.jit(lambda s, g: s.apply_gradients(grads=g))(state.replace(params=params), zero_grads)
    master = np.asarray(after.opt_state.master["Dense_0"]["kernel"])
    np.testing.assert_array_equal(master[:12], 0)
    np.testing.assert_array_equal(master[12:], before[12:])
    np.testing.assert_array_equal(np.asarray(after.params["Dense_0"]["kernel"], np.float32)[:12], 0)


# --------------------------------------------------------------------------------- more fields, frozen params


@pytest.mark.default_cases("1-born")
@pytest.mark.parametrize("create", [create_full, create_full()], ids=["born", "existing"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_state_with_batch_stats_dropout_keys_and_an_ema(stage, create, mesh):
    plain, step = create_full(), jax.jit(full_step)
    state = shard(create, mesh, stage, min_shard_bytes=256)
    plan = jzero.plan_of(state)
    assert type(state) is FullState
    first = specs(state)
    ema = state.ema["Dense_0"]["kernel"].sharding.spec
    assert ema == (P("data") if stage else P())
    for i in range(5):
        state, loss = step(state, plan.place_batch(batch(i)))
        plain, plain_loss = jax.jit(full_step)(plain, batch(i))
        np.testing.assert_allclose(loss, plain_loss, rtol=1e-5)
        assert specs(state) == first
    assert max_error(state.ema, plain.ema) < 1e-5
    assert max_error(state.batch_stats, plain.batch_stats) < 1e-5


def test_frozen_params_get_no_master_and_no_moments(mesh):
    def labels(params):
        return {name: "train" if name == "Dense_0" else "freeze" for name in params}

    tx = optax.multi_transform({"train": optax.adam(1e-2), "freeze": optax.set_to_zero()}, labels)
    state = shard(lambda: bf16_state(tx), mesh, 2)
    plan = jzero.plan_of(state)
    master = state.opt_state.master
    assert {k for k, v in master.items() if jax.tree.leaves(v)} == {"Dense_0"}
    moments = [x for x in jax.tree.leaves(state.opt_state.inner) if x.ndim]
    assert len(moments) == 2 * len(jax.tree.leaves(master["Dense_0"]))
    after, _ = jax.jit(train_step)(state, plan.place_batch(batch()))
    for name in state.params:
        same = max_error(after.params[name], state.params[name]) == 0
        assert same == (name != "Dense_0")
    jax.jit(train_step)(after, plan.place_batch(batch()))


def test_lora_adapters_beside_a_base_that_is_none(mesh):
    """The LoRA habit: trainable leaves in one tree, the base outside of the params as None."""
    base = jax.random.normal(jax.random.key(0), (DIM_IN, DIM_OUT), jnp.bfloat16)
    params = {
        "base": None,
        "a": jnp.ones((DIM_IN, 8), jnp.bfloat16) * 0.1,
        "b": jnp.zeros((8, DIM_OUT), jnp.bfloat16),
    }
    plan = jzero.make_plan(params, stage=2, mesh=mesh, min_shard_bytes=0)
    tx = jzero.zero(optax.adam(1e-2), plan)
    params = plan.place(params)
    state = jax.jit(tx.init)(params)
    assert state.master["base"] is None

    @jax.jit
    def step(params, state, batch):
        def loss(p):
            return jnp.mean((batch["x"] @ (base + p["a"] @ p["b"]) - batch["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    losses = []
    for _ in range(20):
        params, state, value = step(params, state, plan.place_batch(batch()))
        losses.append(float(value))
    assert losses[-1] < losses[0]
    assert params["base"] is None


# ------------------------------------------------------------------------------ a live change of stage or mesh


@pytest.mark.default_cases("float32")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_live_change_of_stage_and_mesh_keeps_every_bit(dtype, mesh):
    state = shard(lambda: create_state(dtype=dtype), mesh, 1)
    for i in range(2):
        state, _ = jax.jit(train_step)(state, jzero.plan_of(state).place_batch(batch(i)))
    smaller = Mesh(np.array(jax.devices()[:4]), ("data",))
    for stage, to in ((3, mesh), (2, smaller), (0, smaller), (2, mesh)):
        moved = shard(state, to, stage)
        assert jzero.plan_of(moved).config.stage == stage
        assert_laid_out(moved, jzero.plan_of(moved))
        both = ((s.params, logical(s), s.step) for s in (moved, state))
        for a, b in zip(*map(jax.tree.leaves, both), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        state = moved
    jax.jit(train_step)(state, jzero.plan_of(state).place_batch(batch(2)))


def test_a_state_in_training_keeps_its_moments(mesh):
    plain = create_state()
    for i in range(3):
        plain, _ = jax.jit(train_step)(plain, batch(i))
    state = shard(plain, mesh, 2)
    assert max_error(logical(state), plain.opt_state) == 0
    a, _ = jax.jit(train_step)(state, jzero.plan_of(state).place_batch(batch(3)))
    b, _ = jax.jit(train_step)(plain, batch(3))
    assert max_error(a.params, b.params) < 1e-5


# ---------------------------------------------------------------------------------------------------- NNX


@pytest.mark.default_cases("3-float32-False")
@pytest.mark.parametrize("born", [True, False])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_nnx_pair(stage, dtype, born, mesh):
    pair = create_nnx(dtype)
    model, optimizer = shard((lambda: create_nnx(dtype)) if born else pair, mesh, stage, min_shard_bytes=300)
    if not born:
        assert model is pair[0]
        assert optimizer is pair[1]
    plan = jzero.plan_of((model, optimizer))
    assert plan == jzero.plan_of(optimizer)
    kernel = model.a.kernel.get_value()
    assert kernel.sharding.spec == (P("data") if stage == 3 else P())
    first = specs((nnx.state(model), nnx.state(optimizer)))
    assert (P("data") in specs(nnx.state(optimizer))) == (stage > 0)
    plain_model, plain_optimizer = create_nnx(dtype)
    for i in range(5):
        placed = plan.place_batch(batch(i))
        assert_batch_is_split(placed)
        loss = nnx_step(model, optimizer, placed)
        plain_loss = nnx_step(plain_model, plain_optimizer, batch(i))
        if dtype == jnp.float32:
            np.testing.assert_allclose(loss, plain_loss, rtol=1e-5)
        assert specs((nnx.state(model), nnx.state(optimizer))) == first
    if dtype == jnp.float32:
        pure = nnx.as_pure(nnx.state(model, nnx.Param))
        assert max_error(pure, nnx.as_pure(nnx.state(plain_model, nnx.Param))) < 1e-5


def test_nnx_live_change_of_stage(mesh):
    pair = shard(create_nnx, mesh, 1)
    nnx_step(*pair, jzero.plan_of(pair).place_batch(batch()))
    before = [np.asarray(x) for x in jax.tree.leaves(nnx.as_pure(nnx.state(pair[0], nnx.Param)))]
    again = shard(pair, mesh, 3)
    assert again[0] is pair[0]
    assert jzero.plan_of(pair).config.stage == 3
    after = [np.asarray(x) for x in jax.tree.leaves(nnx.as_pure(nnx.state(pair[0], nnx.Param)))]
    for a, b in zip(after, before, strict=True):
        np.testing.assert_array_equal(a, b)
    nnx_step(*pair, jzero.plan_of(pair).place_batch(batch()))


# ------------------------------------------------------------------------------------------ abstract, unshard


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_abstract_is_the_state_without_arrays(stage, mesh):
    for dtype in (jnp.float32, jnp.bfloat16):
        real = shard(lambda d=dtype: create_state(dtype=d), mesh, stage)
        for source in (lambda d=dtype: create_state(dtype=d), create_state(dtype=dtype)):
            shapes = jzero.abstract(source, stage=stage, mesh=mesh, min_shard_bytes=0)
            assert jax.tree.structure(shapes) == jax.tree.structure(real)
            for a, b in zip(jax.tree.leaves(shapes), jax.tree.leaves(real), strict=True):
                assert (a.shape, a.dtype, a.sharding.spec) == (b.shape, b.dtype, b.sharding.spec)


def test_abstract_nnx_pair(mesh):
    model, _ = jzero.abstract(create_nnx, stage=3, mesh=mesh, min_shard_bytes=0)
    kernel = model.a.kernel.get_value()
    assert isinstance(kernel, jax.ShapeDtypeStruct)
    assert kernel.sharding.spec == P("data")


def test_unshard_gives_whole_arrays(mesh):
    state = shard(create_state, mesh, 3)
    full = jzero.unshard(state.params)
    assert all(x.is_fully_replicated for x in jax.tree.leaves(full))
    assert max_error(full, create_state().params) < 1e-6


def test_what_lies_outside_of_the_params_is_reported(mesh):
    plan = jzero.plan_of(shard(create_full, mesh, 3))
    assert "4 arrays outside of the params stay whole on every device, 288 B in all" in plan.describe()
    assert " and 1 more)." in plan.describe()

    class Table(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx.LoRALinear(64, 64, lora_rank=8, rngs=rngs)
            self.table = nnx.Variable(jnp.ones((64, 64)))

    def create():
        model = Table(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.LoRAParam)

    pair = shard(create, mesh, 3)
    notes = jzero.plan_of(pair).describe()
    assert "1 array outside of the params stays whole" in notes  # the kernel is a frozen param
    assert "(['table'])" in notes


def test_unshard_brings_what_is_whole_in_host_memory_to_the_device():
    params = {"w": jnp.ones((512, 512))}
    mesh = jzero.mesh(devices=jax.devices()[:1])
    plan = jzero.make_plan(params, stage=3, offload=jzero.Offload(params="host"), mesh=mesh)
    whole = jzero.unshard(plan.place(params))["w"]
    np.testing.assert_array_equal(jnp.ones((4, 512)) @ whole, 512)
