"""What pages presume (`<!-- setup: fp16 -->`): a small model in fp16."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp


class Model(nn.Module):
    """Two layers in fp16."""

    @nn.compact
    def __call__(self, x):
        dense = partial(nn.Dense, dtype=jnp.float16, param_dtype=jnp.float16)
        return dense(8)(nn.tanh(dense(64)(x))).astype(jnp.float32)


model = Model()
params = model.init(jax.random.key(0), jnp.ones((1, 16)))["params"]


def loss_fn(params, batch):
    return jnp.mean((model.apply({"params": params}, batch["x"]) - batch["y"]) ** 2)


def check(train_step, state, plan):
    """Twenty steps lower the loss."""
    batch = plan.place_batch({"x": jnp.ones((16, 16)), "y": jnp.zeros((16, 8))})
    state, first = train_step(state, batch)
    for _ in range(20):
        state, last = train_step(state, batch)
    assert last < first, (first, last)
