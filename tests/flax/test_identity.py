"""When one program serves two states: exactly where plain Flax has one program for them (`==`, no look at contents)."""

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
from flax.training.train_state import TrainState

import jzero

X = np.ones((8, 16), np.float32)
RATE = {"lr": 1.0}


class Net(nn.Module):
    width: int = 8

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.width)(x)


@dataclasses.dataclass(frozen=True)
class Apply:
    """Equal where the modules are."""

    module: nn.Module

    def __call__(self, variables, x):
        return self.module.apply(variables, x)


class Scaled:
    """With an attribute that its method reads."""

    def __init__(self, scale):
        self.scale = scale

    def apply(self, variables, x):
        return self.scale * Net().apply(variables, x)


def by_rate():
    """Made by one code over one mutable object: equal contents, unequal functions."""
    return optax.sgd(lambda count: RATE["lr"])


NET, TX, SCALED = Net(), optax.adam(1e-2), Scaled(1.0)
LINEN = {
    "tx shared, apply_fn bound anew": (lambda: (NET.apply, TX), 1),
    "tx rebuilt": (lambda: (NET.apply, optax.adam(1e-2)), 2),
    "tx rebuilt over a mutable object": (lambda: (NET.apply, by_rate()), 2),
    "method of an equal module": (lambda: (Net().apply, TX), 2),
    "an equal module": (lambda: (Apply(Net()), TX), 1),
    "method of an equal object": (lambda: (Scaled(1.0).apply, TX), 2),
    "method of the same object": (lambda: (SCALED.apply, TX), 1),
    "no apply_fn": (lambda: (None, TX), 1),
}


def create(apply_fn: Any, tx):
    params = {"Dense_0": {"kernel": jnp.full((16, 8), 0.5), "bias": jnp.zeros(8)}}
    return TrainState.create(apply_fn=apply_fn, params=params, tx=tx)


def counted_step():
    """A train step, and the list that grows whenever it is traced."""
    traced = []

    def step(state, x):
        traced.append(state)
        apply_fn = state.apply_fn or NET.apply
        grads = jax.grad(lambda p: jnp.mean(apply_fn({"params": p}, x) ** 2))(state.params)
        return state.apply_gradients(grads=grads)

    return jax.jit(step), traced


def traces(states) -> int:
    step, traced = counted_step()
    for state in states:
        step.trace(state, X)
    return len(traced)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("name", LINEN)
def test_linen_states_are_traced_as_often_as_plain_ones(name, stage, mesh):
    make, programs = LINEN[name]
    plain = [create(*make()) for _ in range(2)]
    assert traces(plain) == programs
    fields = {"stage": stage, "mesh": mesh, "min_shard_bytes": 0}
    assert traces([jzero.shard(s, **fields) for s in plain]) == programs
    assert traces([jzero.abstract(s, **fields) for s in plain]) == programs


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(("make", "programs"), [(lambda: TX, 1), (lambda: optax.adam(1e-2), 2)])
def test_nnx_pairs_are_traced_as_often_as_plain_ones(make, programs, stage, mesh):
    def pair():
        model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, make(), wrt=nnx.Param)

    def count(pairs):
        traced = []

        @nnx.jit
        def step(model, optimizer, x):
            traced.append(model)

            def loss(model):
                return jnp.mean(model(x) ** 2)

            if type(optimizer.tx.init).__module__.startswith("jzero"):
                loss = jzero.gather_on_use(loss, jzero.plan_of(optimizer))
            optimizer.update(model, nnx.grad(loss)(model))

        for p in pairs:
            step(*p, X)
        return len(traced)

    assert count([pair(), pair()]) == programs
    pairs = [jzero.shard(pair(), stage=stage, mesh=mesh, min_shard_bytes=0) for _ in range(2)]
    assert count(pairs) == programs


def test_an_optimizer_that_reads_a_changed_value_is_not_the_one_before(mesh):
    step, _ = counted_step()

    def trained(place):
        return np.asarray(step(place(create(NET.apply, by_rate())), X).params["Dense_0"]["bias"])

    def both():
        plain = trained(lambda s: s)
        sharded = trained(lambda s: jzero.shard(s, stage=2, mesh=mesh, min_shard_bytes=0))
        np.testing.assert_allclose(sharded, plain, rtol=1e-5)
        return sharded

    first = both()
    RATE["lr"] = 0.1
    try:
        np.testing.assert_allclose(both(), first / 10, rtol=1e-5)
    finally:
        RATE["lr"] = 1.0


def test_a_step_compiled_ahead_of_time_takes_states_of_the_same_tx_alone(mesh):
    def place(s):
        return jzero.shard(s, stage=2, mesh=mesh, min_shard_bytes=0)

    for put in (lambda s: s, place):
        a, b, other = (put(create(NET.apply, tx)) for tx in (TX, TX, optax.adam(1e-2)))
        compiled = counted_step()[0].lower(a, X).compile()
        compiled(b, X)
        with pytest.raises(TypeError, match="pytree"):
            compiled(other, X)
