"""Nothing that jzero returns shares memory with what it was given: a donated step takes its own arrays alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jzero
from jzero.layout.aliasing import HeldMemory

P, NS = jax.P, jax.sharding.NamedSharding
TX = optax.adam(1e-3)


class State(TrainState):
    key: jax.Array
    ema: dict


def create():
    params = {"w": jnp.full((24, 40), 0.5), "uneven": jnp.full((7, 5), 0.5), "b": jnp.full(16, 0.5)}
    ema = jax.tree.map(jnp.copy, params)
    return State.create(apply_fn=None, params=params, tx=TX, key=jax.random.key(0), ema=ema)


def host(state):
    data = jax.random.key_data(state.key)
    return jax.device_get(state.replace(key=np.asarray(data)))


GIVEN = {
    "on one device": lambda mesh: create(),
    "replicated": lambda mesh: jax.device_put(create(), NS(mesh, P())),
    "numpy": lambda mesh: host(create()),
    "sharded": lambda mesh: jzero.shard(create, stage=2, mesh=mesh, min_shard_bytes=0),
    "on the host": lambda mesh: jzero.shard(create, stage=2, mesh=mesh, min_shard_bytes=0, offload="host"),
}


@jax.jit
def _numbers(tree):
    return jax.tree.map(
        lambda x: jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x, tree
    )


def numbers(tree):
    """The values, in memory of their own."""
    return [np.array(x) for x in jax.tree.leaves(_numbers(tree))]


def donate(tree):
    """As a donated step does: new values in the buffers of the old ones."""
    leaves = [
        x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.inexact)
    ]
    new = jax.jit(lambda xs: [x + 1 for x in xs], donate_argnums=0)(
        [x for x in leaves if x.sharding.memory_kind == "device"]
    )
    jax.block_until_ready(new)
    assert any(x.is_deleted() for x in leaves)


@pytest.mark.parametrize(
    "fields", [{"stage": 0}, {"stage": 2}, {"stage": 3}, {"stage": 2, "offload": "host"}], ids=str
)
@pytest.mark.parametrize("name", GIVEN)
def test_the_state_that_was_given_lives_on(name, fields, mesh):
    given = GIVEN[name](mesh)
    before, kept = numbers(given), HeldMemory(given)
    state = jzero.shard(given, mesh=mesh, min_shard_bytes=0, **fields)
    assert not any(kept.shares(x) for x in jax.tree.leaves(state))
    donate(state)
    for x, y in zip(numbers(given), before, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(("stage", "params"), [(2, {(24, 40), (7, 5), (16,)}), (3, {(7, 5)})])
def test_only_leaves_that_would_be_shared_are_copied(stage, params, mesh, monkeypatch):
    """From one device: whole params share its buffer; what is split lies elsewhere."""
    copied, device_put = [], jax.device_put

    def counted(x, *args, **kwargs):
        if kwargs.get("may_alias") is False:
            copied.append(x.shape)
        return device_put(x, *args, **kwargs)

    given = create()
    monkeypatch.setattr(jax, "device_put", counted)
    jzero.shard(given, stage=stage, mesh=mesh, min_shard_bytes=0)
    assert sorted(s for s in copied if s not in ((), (2,))) == sorted(
        [*params, (7, 5)]
    )  # an EMA is not padded
    copied.clear()
    jzero.shard(create, stage=stage, mesh=mesh, min_shard_bytes=0)
    assert copied == []


def test_params_that_are_placed_and_whole_ones(mesh):
    params = jax.device_put(create().params, NS(mesh, P()))
    plan = jzero.make_plan(params, stage=2, mesh=mesh)
    before = numbers(params)
    placed = plan.place(params)
    whole = jzero.unshard(placed)
    assert not any(HeldMemory(params).shares(x) for x in jax.tree.leaves(placed))
    assert not any(HeldMemory(placed).shares(x) for x in jax.tree.leaves(whole))
    donate(placed)
    for tree in (params, whole):
        for x, y in zip(numbers(tree), before, strict=True):
            np.testing.assert_array_equal(x, y)


def test_a_pair_that_is_filled_in_place_is_not_copied(mesh):
    model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    nnx.update(model, jax.device_put(nnx.state(model), NS(mesh, P())))
    before = HeldMemory(nnx.state(model))
    jzero.shard((model, optimizer), stage=2, mesh=mesh)
    assert all(before.shares(x) for x in jax.tree.leaves(nnx.state(model)))


@pytest.mark.parametrize("place", ["one device", "every device"])
@pytest.mark.parametrize("stage", [0, 2])
def test_no_two_leaves_of_a_state_lie_in_one_memory(stage, place, mesh):
    """COCOB's state begins with the params themselves, and with one array of zeros in several places."""
    tx = optax.contrib.cocob()
    model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    if place == "every device":
        nnx.update(model, jax.device_put(nnx.state(model), NS(mesh, P())))
    pair = model, nnx.Optimizer(model, tx, wrt=nnx.Param)
    tied = jnp.ones((16, 8))
    state = TrainState.create(apply_fn=None, params={"a": tied, "b": tied}, tx=tx)
    for given in (pair, state):
        made = jzero.shard(given, stage=stage, mesh=mesh, min_shard_bytes=0)
        tree = nnx.as_pure(nnx.state((made[0], made[1]))) if given is pair else made
        leaves = [x for x in jax.tree.leaves(tree) if x.dtype == jnp.float32]
        for i, x in enumerate(leaves):
            assert not HeldMemory(leaves[:i]).shares(x)
        donate(tree)


def test_a_platform_that_does_not_tell_is_copied(mesh, monkeypatch):
    monkeypatch.setattr("jzero.layout.aliasing._start", lambda data: None)
    x = jax.device_put(np.ones((8, 8), np.float32), NS(mesh, P("data")))
    assert HeldMemory([x]).shares(x)
    y = HeldMemory([x]).apart(x)
    np.testing.assert_array_equal(x, y)
    monkeypatch.undo()
    assert not HeldMemory([x]).shares(y)


@pytest.mark.parametrize("offload", [None, "host"])
@pytest.mark.parametrize("stage", [1, 3])
def test_abstract_of_a_sharded_state_with_padded_leaves(stage, offload, mesh):
    state = jzero.shard(create, stage=2, mesh=mesh, min_shard_bytes=0, offload=offload)
    assert any(x.padded for x in jzero.plan_of(state).layouts)
    shapes = jzero.abstract(state, stage=stage, mesh=mesh, min_shard_bytes=0)
    real = jzero.shard(state, stage=stage, mesh=mesh, min_shard_bytes=0)
    assert jax.tree.structure(shapes) == jax.tree.structure(real)
    for a, b in zip(jax.tree.leaves(shapes), jax.tree.leaves(real), strict=True):
        assert (a.shape, a.dtype, a.sharding) == (b.shape, b.dtype, b.sharding)
    again = jzero.abstract(shapes, stage=2, mesh=jax.make_mesh((5,), ("data",), devices=jax.devices()[:5]))
    assert jzero.plan_of(again).n == 5
