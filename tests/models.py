"""Small models and states that the tests share. Odd sizes on purpose; every one has leaves that 8 divides.

No attention biases: the gradient of a key bias is zero but for rounding, and Adam-like optimizers divide by it.
"""

from __future__ import annotations

from functools import cache, partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import jzero

DIM_IN, DIM_OUT, BATCH = 24, 6, 16


class Mlp(nn.Module):
    """Leaves that split (24x40, 40x40, 40), one that does not (6) and 3-D kernels of Flax's attention."""

    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x):
        dense = partial(nn.Dense, param_dtype=self.dtype, dtype=self.dtype)
        x = nn.gelu(dense(40)(x))
        x = (
            x
            + nn.MultiHeadDotProductAttention(
                num_heads=5, use_bias=False, param_dtype=self.dtype, dtype=self.dtype
            )(x[None])[0]
        )
        x = nn.gelu(dense(40)(x))
        return dense(DIM_OUT)(x).astype(jnp.float32)


class Small(nn.Module):
    """Two layers: what the table of optimizers is run on."""

    @nn.compact
    def __call__(self, x):
        x = jnp.tanh(nn.Dense(32)(x))
        return nn.Dense(DIM_OUT)(x)


SMALL, MLPS = Small(), {jnp.dtype(t): Mlp(t) for t in (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64)}


@partial(jax.jit, static_argnums=(0, 1))
def params_of(model, dtype):
    """Under jit: eager initialisation compiles one op at a time."""
    return model.init(jax.random.key(0), jnp.ones((1, DIM_IN), dtype))["params"]


def create_small(tx):
    """A fresh TrainState of the Small model; equal in kind to another one with this `tx`."""
    return TrainState.create(apply_fn=SMALL.apply, params=params_of(SMALL, jnp.float32), tx=tx)


@cache
def adamw():
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def create_state(tx=None, dtype=jnp.float32):
    """A fresh TrainState of the Mlp; equal in kind to another one of this dtype (and of this `tx`)."""
    model = MLPS[jnp.dtype(dtype)]
    return TrainState.create(
        apply_fn=model.apply, params=params_of(model, dtype), tx=adamw() if tx is None else tx
    )


def batch(seed: int = 0):
    rng = np.random.default_rng(seed)
    return {
        "x": rng.standard_normal((BATCH, DIM_IN), dtype=np.float32),
        "y": rng.standard_normal((BATCH, DIM_OUT), dtype=np.float32),
    }


def loss_of(apply_fn, params, batch):
    return jnp.mean((apply_fn({"params": params}, batch["x"]) - batch["y"]) ** 2)


def train_step(state, batch):
    """The user's step: nothing of jzero in it."""
    loss, grads = jax.value_and_grad(lambda p: loss_of(state.apply_fn, p, batch))(state.params)
    return state.apply_gradients(grads=grads), loss


def specs(tree):
    """The PartitionSpec of every array of a tree."""
    return [x.sharding.spec for x in jax.tree.leaves(tree)]


def assert_batch_is_split(placed, parts: int = 8):
    for x in jax.tree.leaves(placed):
        assert x.sharding.shard_shape(x.shape)[0] * parts == x.shape[0], "the batch is not split"


def assert_laid_out(state, plan):
    """Params and optimizer state live where the plan says, and the stage really splits something."""
    got = specs(state.params)
    assert got == [x.stored for x in plan.layouts]
    assert specs(state.opt_state) == plan.state_specs(state.opt_state)
    assert any(p != jax.P() for p in got) == (plan.config.stage == 3)
    if jax.tree.leaves(state.opt_state) and any(np.ndim(x) for x in jax.tree.leaves(state.opt_state)):
        split = [s for s in specs(state.opt_state) if s != jax.P()]
        assert bool(split) == (plan.config.stage > 0)


def logical(state):
    """The optimizer state of a sharded state in the shapes of the plain one."""
    return jzero.unshard(state.opt_state, tx=state.tx)


def is_key(x) -> bool:
    return hasattr(x, "dtype") and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def max_error(tree, reference):
    """Largest difference of two trees in units of each leaf's largest value."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(reference), strict=True):
        a, b = (np.asarray(jax.random.key_data(x) if is_key(x) else x, np.float64) for x in (a, b))
        assert a.shape == b.shape
        scale = np.max(np.abs(b)) if b.size else 0.0
        worst = max(
            worst, float(np.max(np.abs(a - b)) / scale) if scale else float(np.max(np.abs(a), initial=0.0))
        )
    return worst


def shard(state, mesh, stage, **fields):
    return jzero.shard(
        state, stage=stage, mesh=mesh, min_shard_bytes=fields.pop("min_shard_bytes", 0), **fields
    )
