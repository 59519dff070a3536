"""States of other forms than a plain `TrainState`: with statistics, an EMA and a key, and of NNX."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training.train_state import TrainState
from models import (
    DIM_IN,
    DIM_OUT,
)


class FullState(TrainState):
    batch_stats: Any = None
    dropout_key: Any = None
    ema: Any = None


class Norm(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        x = nn.BatchNorm(use_running_average=not train)(
            nn.Dense(32, use_bias=False)(x)
        )  # a bias here has no gradient
        x = nn.Dropout(0.1, deterministic=not train)(nn.relu(x))
        return nn.Dense(DIM_OUT)(x)


def create_full():
    model = Norm()
    variables = model.init(jax.random.key(0), jnp.ones((2, DIM_IN)), train=False)
    return FullState.create(
        apply_fn=model.apply, params=variables["params"], tx=optax.adam(1e-2), batch_stats=variables["batch_stats"],
        dropout_key=jax.random.key(7), ema=variables["params"],
    )  # fmt: skip


def full_step(state, batch):
    key, new_key = jax.random.split(state.dropout_key)

    def loss_fn(params):
        out, mutated = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats},
            batch["x"],
            mutable=["batch_stats"],
            rngs={"dropout": key},
        )
        return jnp.mean((out - batch["y"]) ** 2), mutated

    (loss, mutated), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    state = state.apply_gradients(grads=grads, batch_stats=mutated["batch_stats"], dropout_key=new_key)
    ema = jax.tree.map(lambda e, p: 0.9 * e + 0.1 * p, state.ema, state.params)
    return state.replace(ema=ema), loss


class NnxModel(nnx.Module):
    def __init__(self, rngs, dtype=jnp.float32):
        self.a = nnx.Linear(
            DIM_IN, 64, use_bias=False, rngs=rngs, param_dtype=dtype
        )  # a bias here has no gradient
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.b = nnx.Linear(64, DIM_OUT, rngs=rngs, param_dtype=dtype)

    def __call__(self, x):
        return self.b(self.drop(nnx.relu(self.norm(self.a(x)))))


def create_nnx(dtype=jnp.float32):
    model = NnxModel(nnx.Rngs(0), dtype)
    return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)


@nnx.jit
def nnx_step(model, optimizer, batch):
    def loss_fn(model):
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss
