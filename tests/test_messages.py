"""Mistakes that used to be called by another name: the message says what was passed, and what to pass."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import jax_utils, nnx
from flax.training.train_state import TrainState
from jax.tree_util import Partial

import jzero

TX = optax.adam(1e-3)
X = jnp.ones((8, 8))


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(x)


class Nnx(nnx.Module):
    def __init__(self):
        self.dense = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.dense(x)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Tree:
    """A model that is a tree of arrays and can be called, as in Equinox."""

    w: Any

    def __call__(self, x):
        return x @ self.w


def create(apply_fn=None, seed=None):
    params = {"w": X if seed is None else jax.random.normal(seed, (8, 8))}
    return TrainState.create(apply_fn=apply_fn, params=params, tx=TX)


def says(*parts):
    return "(?s)" + ".*".join(map(re.escape, parts))


@pytest.mark.parametrize("door", [jzero.shard, jzero.abstract])
def test_a_model_in_place_of_a_state(door):
    name = f"jzero.{door.__name__}"
    model = Nnx()
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    pair = says(
        f"{name}: Nnx is not a train state", f"{name}((model, optimizer), stage=2)", "nnx.Optimizer(model, tx"
    )
    for args in ((model, optimizer), (model,), (Nnx,)):
        with pytest.raises(TypeError, match=pair):
            door(*args)
    for swapped in ((optimizer, model), lambda: (optimizer, model)):
        with pytest.raises(TypeError, match=says("one pair, the model first")):
            door(swapped, stage=2)
    with pytest.raises(ValueError, match=says("not a tree like the params", "nnx.get_partition_spec(nnx.state(")):
        door((model, optimizer), stage=2, param_specs={"w": jax.P()})
    for linen in (Linen(), Linen):
        with pytest.raises(
            TypeError, match=says(f"{name}: Linen is a model, not a train state", "TrainState.create(")
        ):
            door(linen, stage=2)
    with pytest.raises(
        TypeError, match=says(f"{name}: Tree is a model", "plan.place(params)", "jzero.zero(tx, plan)")
    ):
        door(Tree(X), stage=2)
    with pytest.raises(TypeError, match=says(f"{name}: a state of type dict is not known")):
        door({"w": X}, TX)


def test_what_can_be_called_and_holds_arrays_may_still_create(mesh):
    state = jzero.abstract(Partial(create, None, jax.random.key(0)), stage=1, mesh=mesh)
    assert state.step.shape == ()


def test_several_states_in_one(mesh):
    keys = jax.random.split(jax.random.key(0), 4)
    many = jax.vmap(lambda key: create(seed=key))(keys)
    text = says("jzero: this is 4 states in one: its step has the shape (4,)", "jax.vmap(init)(keys)")
    for state in (many, lambda: jax.vmap(lambda key: create(seed=key))(keys)):
        with pytest.raises(ValueError, match=text):
            jzero.abstract(state, stage=2, mesh=mesh)
    with pytest.raises(ValueError, match=text):
        jzero.shard(many, stage=2, mesh=mesh)
    with pytest.raises(ValueError, match=says("8 states in one", "flax.jax_utils.unreplicate")):
        jzero.abstract(jax_utils.replicate(create()), stage=2)


def test_the_remedy_for_an_ensemble_is_one(mesh):
    params = jax.vmap(lambda key: create(seed=key).params)(jax.random.split(jax.random.key(0), 4))
    state = TrainState.create(apply_fn=None, params=params, tx=TX)
    laid_out = jzero.abstract(state, stage=2, mesh=mesh, min_shard_bytes=0)
    assert laid_out.opt_state[0].mu["w"].sharding.spec == jax.P(None, "data")


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_apply_fn_that_takes_its_params_by_keyword(stage, mesh):
    class Pretrained:
        """As the Flax models of Hugging Face are called."""

        def __call__(self, input_ids, params: Any = None, train=False):
            return input_ids @ params["w"] * (2.0 if train else 1.0)

    plan = jzero.make_plan({"w": X}, stage=stage, mesh=mesh, min_shard_bytes=0)
    state = jzero.shard(create(Pretrained().__call__), stage=stage, mesh=mesh, min_shard_bytes=0)
    x = plan.place_batch(X)
    for call in (
        lambda params: state.apply_fn(x, params=params, train=True),
        lambda params: state.apply_fn(input_ids=x, params=params, train=True),
    ):
        traced = jax.jit(call).trace(state.params)
        np.testing.assert_array_equal(traced.lower().compile()(state.params), X @ X * 2)
        assert ("jzero.gather_weight" in traced.lower().as_text(debug_info=True)) == (stage == 3)

    def first(params, x, scale=1.0):
        return x.sum() * params["w"].sum() * scale

    fn, x = jzero.gather_on_use(first, plan), X[:3]
    assert fn(params={"w": X}, x=x, scale=2.0) == fn({"w": X}, x, scale=2.0) == 3072.0  # as Python binds them
    if stage == 3:
        with pytest.raises(TypeError, match=says("called without the params", "params must come first")):
            fn(x=X)


def test_params_as_an_argument_of_the_models_own(mesh):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, params):
            return nn.Dense(8)(x) * params

    model = Model()
    params = model.init(jax.random.key(0), X, 1.0)["params"]
    state = jzero.shard(TrainState.create(apply_fn=model.apply, params=params, tx=TX), stage=0, mesh=mesh)
    assert state.apply_fn({"params": state.params}, X[:3], params=2.0).shape == (3, 8)


def test_a_curried_apply_fn(mesh):
    state = jzero.abstract(
        create(lambda params: lambda x: x @ params["w"]), stage=3, mesh=mesh, min_shard_bytes=0
    )
    text = says("returns a function (curried, or a bound model)", "lambda params, x: curried(params)(x)")
    with pytest.raises(TypeError, match=text):
        jax.eval_shape(lambda p, x: state.apply_fn(p)(x), {"w": X}, X)
    with pytest.raises(TypeError, match=text):
        state.apply_fn({"w": X})


def test_arithmetic_on_updates(mesh):
    plan = jzero.make_plan({"w": X}, stage=1, mesh=mesh, min_shard_bytes=0)
    tx = jzero.zero(TX, plan)

    def updates(params):
        return tx.update(params, tx.init(params), params)[0]

    text = says(
        "jzero: an update is not an array", "optax.global_norm(grads)", "jzero.zero wraps", 'updates="delta"'
    )
    calls = (
        optax.global_norm, lambda u: u["w"] * 2, lambda u: 2 * u["w"], lambda u: X * u["w"], lambda u: -u["w"],
        lambda u: u["w"] - 1, lambda u: X - u["w"], lambda u: u["w"] / 2, lambda u: abs(u["w"]), lambda u: u["w"] ** 2,
        lambda u: u["w"] @ X, lambda u: u["w"][0],
    )  # fmt: skip
    for call in calls:
        with pytest.raises((TypeError, AttributeError), match=text):
            jax.eval_shape(lambda p, call=call: call(updates(p)), {"w": X})
