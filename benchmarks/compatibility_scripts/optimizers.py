"""Optimizers that are not jzero's or optax's own core, on a plain Flax model: ROW is the optimizer."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import jzero  # +

# ruff: noqa: F821 - `benchmarks/compatibility.py` sets ROW and STAGE, and takes one of two lines
LR, WIDTH = 1e-3, 256


def make_tx():
    if ROW in ("kron", "prism"):
        import rollfast

        # its default key is one array for all states, which a donated step would delete
        return rollfast.prism(LR) if ROW == "prism" else rollfast.kron(LR, key=jax.random.PRNGKey(0))
    if ROW == "psgd":
        from psgd_jax.kron import kron

        return kron(LR)
    if ROW == "mechanize":
        return optax.contrib.mechanize(optax.adam(LR))
    return getattr(optax.contrib, ROW)(LR)


class Mixer(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            y = nn.LayerNorm()(x)
            x = x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(y)))
        return nn.Dense(16)(x)


model, tx = Mixer(), make_tx()


def create():
    params = model.init(jax.random.key(0), jnp.ones((1, WIDTH)))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def train_step(state, batch):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def make_batch(seed):
    rng = np.random.default_rng(seed)
    return {"x": rng.standard_normal((64, WIDTH), np.float32), "y": rng.integers(0, 16, 64)}


# not donated in the plain script: the first states of prodigy and mechanize share arrays with the params
state = create()  # -
state = jzero.shard(create, stage=STAGE)  # +
step = jax.jit(train_step)  # -
step = jzero.jit(train_step, jzero.plan_of(state))  # +
args, batches = (state,), [make_batch(seed) for seed in range(5)]
