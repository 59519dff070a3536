"""What pages presume (`<!-- setup: tokens -->`): a model of tokens, batches, prompts."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState


class Model(nn.Module):
    """Tokens `[B, T]` to logits."""

    @nn.compact
    def __call__(self, tokens):
        return nn.Dense(64)(nn.gelu(nn.Dense(128)(nn.Embed(64, 64)(tokens))))


model, tx = Model(), optax.adamw(1e-2)
batches = [{"tokens": np.random.default_rng(0).integers(0, 64, (16, 12))}] * 2
prompts = batches[0]["tokens"][:, :4]


def create_state():
    params = model.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def train_step(state, batch):
    tokens = batch["tokens"]

    def loss_fn(params):
        return cross_entropy(state.apply_fn({"params": params}, tokens[:, :-1]), tokens[:, 1:])

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss
