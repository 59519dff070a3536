"""What pages presume (`<!-- setup: wide -->`): an MLP of width 1024 in bf16."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState


class Mlp(nn.Module):
    """Two layers."""

    @nn.compact
    def __call__(self, x):
        dense = partial(nn.Dense, param_dtype=jnp.bfloat16, dtype=jnp.bfloat16)
        return dense(1024)(nn.gelu(dense(4096)(x)))


model, tx = Mlp(), optax.adamw(1e-3)


def create_state():
    params = model.init(jax.random.key(0), jnp.ones((1, 1024)))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def train_step(state, batch):
    def loss_fn(params):
        return jnp.mean(state.apply_fn({"params": params}, batch) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss
