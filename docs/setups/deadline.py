"""What pages presume (`<!-- setup: deadline -->`): a step, a state and batches."""

import jax.numpy as jnp


def train_step(state, batch):
    return state + batch, state.sum()


state, batches = jnp.zeros(4), [jnp.ones(4)] * 3
