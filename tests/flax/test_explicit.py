"""Under `jax.set_mesh` with Explicit axes, as `jax.make_mesh` makes them: the same values, layouts as types."""

from __future__ import annotations

import contextlib
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh
from models import BATCH, DIM_OUT, adamw, batch, create_small, create_state, loss_of, max_error, train_step

import jzero

P = jax.P
VOCAB = 48


class Words(nn.Module):
    """An embedding, whose plain use fails under an Explicit mesh, batch statistics and dropout."""

    @nn.compact
    def __call__(self, tokens, train=True):
        h = nn.Embed(VOCAB, 24)(tokens).mean(1)
        h = nn.BatchNorm(use_running_average=not train)(nn.Dense(40, use_bias=False)(h))
        return nn.Dense(DIM_OUT)(nn.Dropout(0.25, deterministic=not train)(nn.gelu(h)))


class WordsState(TrainState):
    batch_stats: dict


def create_words():
    model = Words()
    variables = jax.jit(lambda: model.init({"params": jax.random.key(0)}, jnp.zeros((1, 5), jnp.int32), False))()
    return WordsState.create(
        apply_fn=model.apply, params=variables["params"], tx=adamw(), batch_stats=variables["batch_stats"]
    )


def words_batch():
    return {**batch(), "x": np.random.default_rng(1).integers(0, VOCAB, (BATCH, 5), dtype=np.int32)}


def words_step(state, batch, key):
    def loss(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        out, new = state.apply_fn(variables, batch["x"], rngs={"dropout": key}, mutable=["batch_stats"])
        return jnp.mean((out - batch["y"]) ** 2), new["batch_stats"]

    (loss, stats), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, batch_stats=stats), loss


@pytest.fixture
def explicit():
    """The context; what it yields is its mesh."""
    mesh = jax.make_mesh((8,), ("data",))
    assert mesh.axis_types == (AxisType.Explicit,)
    with jax.set_mesh(mesh):
        yield mesh


@functools.cache
def plain_words():
    state, step = create_words(), jax.jit(words_step)
    for i in range(3):
        state, loss = step(state, words_batch(), jax.random.key(i))
    return state, float(loss)


def typed(tree):
    return [jax.typeof(x).sharding.spec for x in jax.tree.leaves(tree)]


def full(specs, tree):
    """Specs as types write them: one entry per dim."""
    rows = zip(specs, jax.tree.leaves(tree), strict=True)
    return [P(*s, *[None] * (np.ndim(x) - len(s))) for s, x in rows]


@pytest.mark.parametrize("made", ["created", "existing"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_linen_state_trains_as_unsharded(stage, made, explicit):
    want, want_loss = plain_words_outside()
    state = jzero.shard(create_words if made == "created" else create_words(), stage=stage, min_shard_bytes=0)
    plan, step = jzero.plan_of(state), jax.jit(lambda *args: words_step(*args), donate_argnums=0)
    data, first = plan.place_batch(words_batch()), state
    for i in range(3):
        state, loss = step(state, data, jax.random.key(i))
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    assert max_error((state.params, state.batch_stats), (want.params, want.batch_stats)) < 1e-5
    assert max_error(jzero.unshard(state.opt_state, tx=state.tx), want.opt_state) < 1e-5
    assert typed(state.params) == full([x.stored for x in plan.layouts], state.params)
    assert typed(state.opt_state) == full(plan.state_specs(state.opt_state), state.opt_state)
    assert all(entry is None for spec in typed(state.batch_stats) for entry in spec)
    assert all(x.is_deleted() for x in jax.tree.leaves(first.params)), "the step was donated its state"
    assert step._cache_size() == 1, "the types of the state that a step returns are those that it takes"


def plain_words_outside():
    with jax.set_mesh(Mesh(np.array(jax.devices()[:1]), ("data",))):
        return plain_words()


class Net(nnx.Module):
    """An embedding, batch statistics and dropout in NNX."""

    def __init__(self, rngs):
        self.words = nnx.Embed(VOCAB, 24, rngs=rngs)
        self.first = nnx.Linear(24, 40, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(40, rngs=rngs)
        self.drop = nnx.Dropout(0.25, rngs=rngs)
        self.last = nnx.Linear(40, DIM_OUT, rngs=rngs)

    def __call__(self, tokens):
        h = self.norm(self.first(self.words(tokens).mean(1)))
        return self.last(self.drop(nnx.gelu(h)))


def create_net():
    model = Net(nnx.Rngs(0, dropout=1))
    return model, nnx.Optimizer(model, adamw(), wrt=nnx.Param)


def net_loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


@functools.cache
def plain_net():
    model, optimizer = create_net()

    @nnx.jit
    def step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(net_loss)(model, batch)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer, words_batch())) for _ in range(3)]
    return nnx.to_pure_dict(nnx.state(model)), losses[-1]


@pytest.mark.parametrize("jitted", ["jzero.jit", "nnx.jit"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_nnx_pair_trains_through_gather_on_use(stage, jitted, explicit):
    with jax.set_mesh(Mesh(np.array(jax.devices()[:1]), ("data",))):
        want, want_loss = plain_net()
    model, optimizer = jzero.shard(create_net, stage=stage, min_shard_bytes=0)
    plan = jzero.plan_of(optimizer)
    loss_fn = jzero.gather_on_use(net_loss, plan)

    def step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)
        return loss

    run, data = nnx.jit(step), plan.place_batch(words_batch())
    if jitted == "jzero.jit":
        run, data = jzero.jit(step, plan), words_batch()
    losses = [float(run(model, optimizer, data)) for _ in range(3)]
    np.testing.assert_allclose(losses[-1], want_loss, rtol=1e-5)
    got = nnx.to_pure_dict(nnx.state(model))
    keys = [jax.tree.leaves(jax.tree.map(jzero_keys, tree)) for tree in (got, want)]
    assert max_error(*keys) < 1e-5
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    assert typed(params) == full([x.stored for x in plan.layouts], params)


def jzero_keys(x):
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


@pytest.mark.parametrize("stage", [1, 3])
def test_jzero_jit_places_batches_and_donates(stage, explicit):
    with jax.set_mesh(Mesh(np.array(jax.devices()[:1]), ("data",))):
        want, want_loss = jax.jit(train_step)(create_state(), batch())
    first = jzero.shard(create_state, stage=stage, min_shard_bytes=0)
    step = jzero.jit(train_step, jzero.plan_of(first))
    state, loss = step(first, batch())
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    assert max_error(state.params, want.params) < 1e-5
    assert all(x.is_deleted() for x in jax.tree.leaves(first.params))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_bare_optax_loop(stage, explicit):
    """`make_plan`, `place`, `zero`; the loss of params in `gather_on_use`, whose embedding needs it at every stage."""
    params = {"table": np.linspace(-1, 1, VOCAB * 24, dtype=np.float32).reshape(VOCAB, 24), "out": np.ones((24, 8), np.float32)}
    tx, tokens = optax.adam(1e-2), np.arange(BATCH * 3).reshape(BATCH, 3) % VOCAB

    def loss_fn(params, tokens):
        return jnp.mean(jnp.tanh(params["table"][tokens].mean(1) @ params["out"]) ** 2)

    def train(loss_fn, tx, params, tokens):
        state = tx.init(params)

        @jax.jit
        def step(params, state, tokens):
            loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss

        for _ in range(3):
            params, state, loss = step(params, state, tokens)
        return params, state, loss

    with jax.set_mesh(Mesh(np.array(jax.devices()[:1]), ("data",))):
        want = train(loss_fn, tx, jax.tree.map(jnp.asarray, params), tokens)
    plan = jzero.make_plan(params, stage=stage, min_shard_bytes=0)
    got = train(
        jzero.gather_on_use(loss_fn, plan), jzero.zero(tx, plan), plan.place(params), plan.place_batch(tokens)
    )
    assert max_error(got, want) < 1e-5
    assert typed(got[1]) == full(plan.state_specs(got[1]), got[1])


@pytest.mark.parametrize(("stage", "fields"), [(1, {}), (2, {"reduce": "step"}), (2, {}), (3, {})])
def test_value_and_grad_over_micro_batches_with_a_loss_scale(stage, fields, explicit):
    with jax.set_mesh(Mesh(np.array(jax.devices()[:1]), ("data",))):
        plain = create_small(optax.adam(1e-2))
        want = jax.jit(jax.value_and_grad(lambda p, b: loss_of(plain.apply_fn, p, b)))(plain.params, batch())
    state = jzero.shard(lambda: create_small(optax.adam(1e-2)), stage=stage, min_shard_bytes=0)
    plan = jzero.plan_of(state)

    @jax.jit
    def gradients(params, batch, scale):
        loss_fn = functools.partial(loss_of, state.apply_fn)
        return jzero.value_and_grad(loss_fn, plan, accumulate=2, scale=scale, **fields)(params, batch)

    loss, grads = gradients(state.params, plan.place_batch(batch()), jzero.LossScale(64.0))
    assert max_error((loss, grads), want) < 1e-5


@pytest.mark.parametrize("uneven", ["pad", "replicate"])
def test_leaves_that_nothing_divides(uneven, explicit):
    def create():
        params = {"w": jnp.linspace(-1, 1, 24 * 9).reshape(24, 9), "odd": jnp.linspace(0, 1, 9)}
        return TrainState.create(
            apply_fn=lambda p, x: jnp.tanh(x @ p["w"] + p["odd"]), params=params, tx=optax.adam(1e-2)
        )

    def step(state, batch):
        grads = jax.grad(lambda p: jnp.mean(state.apply_fn(p, batch["x"]) ** 2))(state.params)
        return state.apply_gradients(grads=grads)

    with jax.set_mesh(Mesh(np.array(jax.devices()[:1]), ("data",))):
        want = jax.jit(step)(create(), batch())
    state = jzero.shard(create, stage=2, min_shard_bytes=0, uneven=uneven)
    state = jax.jit(step)(state, jzero.plan_of(state).place_batch(batch()))
    assert max_error(state.params, want.params) < 1e-5
    assert max_error(jzero.unshard(state.opt_state, tx=state.tx), want.opt_state) < 1e-5


@pytest.mark.parametrize("stage", [0, 3])
def test_a_checkpoint_is_saved_and_restored(stage, explicit, tmp_path):
    state = jzero.shard(create_words, stage=stage, min_shard_bytes=0)
    data = jzero.plan_of(state).place_batch(words_batch())
    state, _ = jax.jit(words_step)(state, data, jax.random.key(0))
    jzero.checkpoint.save(tmp_path / "step", state)
    for like in (jzero.abstract(create_words, stage=3), jzero.shard(create_words, stage=2, min_shard_bytes=0)):
        back = jzero.checkpoint.restore(tmp_path / "step", like)
        assert max_error(back.params, state.params) == 0
        assert typed(back.params) == typed(like.params)
        jax.jit(words_step)(back, data, jax.random.key(1))
    with jax.set_mesh(Mesh(np.array(jax.devices()), ("data",))):
        like = jzero.shard(create_words, stage=1, min_shard_bytes=0)
        assert max_error(jzero.checkpoint.restore(tmp_path / "step", like).params, state.params) == 0


def test_the_outputs_of_an_eager_call_are_split_as_the_batch(explicit):
    state = jzero.shard(create_words, stage=3, min_shard_bytes=0)
    data = jzero.plan_of(state).place_batch(words_batch())
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    out = state.apply_fn(variables, data["x"], train=False)
    assert jax.typeof(out).sharding.spec == P("data", None)
