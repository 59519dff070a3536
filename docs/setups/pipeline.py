"""What pages presume (`<!-- setup: pipeline -->`): the layers of a pipeline, and its state."""

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from jax import lax

STAGES, LAYERS, MICRO, DIM = 2, 4, 8, 512
SPECS = {"up": jax.P("stage"), "down": jax.P("stage")}  # dim 0 of every param is the stage
tx = optax.adamw(1e-3)
batch = {"x": jax.random.normal(jax.random.key(1), (64, DIM), jnp.bfloat16), "y": jnp.zeros((64, DIM))}


def create_state():
    up, down = jax.random.split(jax.random.key(0))
    params = {
        "up": jax.random.normal(up, (STAGES, LAYERS, DIM, 4 * DIM)) * DIM**-0.5,
        "down": jax.random.normal(down, (STAGES, LAYERS, 4 * DIM, DIM)) * 0.1 * DIM**-0.5,
    }
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    return TrainState.create(apply_fn=None, params=params, tx=tx)


def layers(params, x):  # the layers of one stage
    @jax.checkpoint
    def layer(x, p):
        return x + jnp.tanh(x @ p["up"]) @ p["down"], None

    return lax.scan(layer, x, params)[0]


def check(state, loss, train_step, placed):
    """The pipeline's loss is that of its layers one after the other, and a second step lowers it."""
    whole, x = create_state().params, batch["x"]
    for s in range(STAGES):
        x = layers({k: v[s] for k, v in whole.items()}, x)
    want = jnp.mean(x.astype(jnp.float32) ** 2)
    assert abs(loss - want) < 1e-3 * want, (loss, want)
    assert train_step(state, placed)[1] < loss
