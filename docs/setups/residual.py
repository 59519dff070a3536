"""What pages presume (`<!-- setup: residual -->`): residual layers of width 1024 in bf16."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState


class Model(nn.Module):
    """Residual layers in bf16."""

    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = x + nn.Dense(1024, param_dtype=jnp.bfloat16, dtype=jnp.bfloat16)(nn.tanh(x))
        return x


model, tx = Model(), optax.adamw(1e-3)


def create_state():
    params = model.init(jax.random.key(0), jnp.ones((1, 1024)))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def train_step(state, batch):
    def loss_fn(params):
        return jnp.mean((state.apply_fn({"params": params}, batch["x"]) - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss
