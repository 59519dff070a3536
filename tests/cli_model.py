"""A user's file for the command line: a small model, steps that work and steps that do not."""

from __future__ import annotations

import os
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training.train_state import TrainState

import jzero


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(256)(jnp.tanh(nn.Dense(256)(x)))


FILE = __file__
SUBJECT = ["--create", f"{FILE}:create", "--step", f"{FILE}:step", "--batch", "x=f32[32,256], y=f32[32,256]"]
"""The arguments of a command that name this file."""
NET, ADAM = Net(), optax.adam(1e-3)


def create():
    params = NET.init(jax.random.key(0), jnp.ones((1, 256)))["params"]
    return TrainState.create(apply_fn=NET.apply, params=params, tx=ADAM)


def is_first(path, leaf):
    """What trains of a model that is frozen otherwise."""
    return path[0] == "Dense_0"


def create_with(width):
    return create()


def step(state, batch):
    def loss_of(params):
        return jnp.mean((state.apply_fn({"params": params}, batch["x"]) - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=grads), loss


def step_of_micro_batches(state, batch):
    def loss_of(params, batch):
        return jnp.mean((state.apply_fn({"params": params}, batch["x"]) - batch["y"]) ** 2)

    run = jzero.value_and_grad(loss_of, jzero.plan_of(state), accumulate=2)
    loss, grads = run(state.params, batch)
    return state.apply_gradients(grads=grads), loss


jitted = partial(jax.jit, donate_argnums=0)(step)


def step_of_arrays(state, x, y):
    return step(state, {"x": x, "y": y})


def batch_first(batch, state):
    return step(state, batch)


def three(state, batch, key):
    return step(state, batch)


def crash_at_stage_2(state, batch):
    """The process dies, as it does when a check in the compiler fails."""
    if state.tx.init.plan.config.stage == 2:
        os.abort()
    return step(state, batch)


def make_batch():
    return {name: jax.ShapeDtypeStruct((32, 256), "float32") for name in "xy"}


def create_pair():
    model = nnx.Linear(256, 256, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, ADAM, wrt=nnx.Param)


def pair_step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def create_reader():
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Embed(64, 16, rngs=rngs), nnx.Linear(16, 64, rngs=rngs))
    return model, nnx.Optimizer(model, ADAM, wrt=nnx.Param)


def read_step(model, optimizer, tokens):
    def loss_of(model, tokens):
        out = model(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(out, tokens[:, 1:]).mean()

    loss, grads = jzero.value_and_grad(loss_of, jzero.plan_of(optimizer), accumulate=2)(model, tokens)
    optimizer.update(model, grads)
    return loss
