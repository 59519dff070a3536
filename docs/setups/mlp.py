"""What pages presume (`<!-- setup: mlp -->`): a small model, a loss, batches."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState


class Model(nn.Module):
    """Two layers."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(nn.tanh(nn.Dense(64)(x)))


model, tx, example = Model(), optax.adamw(3e-4), jnp.ones((1, 16))
batch = {"x": jnp.ones((16, 16)), "y": jnp.zeros((16, 8))}
data = [batch] * 2


def loss_of(out, batch):
    return jnp.mean((out - batch["y"]) ** 2)


def create_state():
    params = model.init(jax.random.key(0), example)["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)
