"""Haiku's own modules in the loop of its examples: ROW is "transformer" (with dropout) or "resnet" (with BatchNorm)."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jzero  # +

# ruff: noqa: F821 - `benchmarks/compatibility.py` sets ROW and STAGE, and takes one of two lines
VOCAB, WIDTH, TOKENS = 1024, 256, 32


def transformer(batch):
    x = hk.Embed(VOCAB, WIDTH)(batch["x"])
    mask = jnp.tril(jnp.ones((1, 1, TOKENS, TOKENS)))
    init = hk.initializers.VarianceScaling(1.0)
    for _ in range(2):
        y = hk.LayerNorm(-1, True, True)(x)
        y = hk.MultiHeadAttention(4, WIDTH // 4, w_init=init)(y, y, y, mask=mask)
        x = x + hk.dropout(hk.next_rng_key(), 0.1, y)
        y = hk.nets.MLP([4 * WIDTH, WIDTH], activation=jax.nn.gelu)(hk.LayerNorm(-1, True, True)(x))
        x = x + hk.dropout(hk.next_rng_key(), 0.1, y)
    return hk.Linear(VOCAB)(x)


def resnet(batch):
    net = hk.nets.ResNet((1, 1, 1, 1), 16, channels_per_group=(64, 128, 256, 256), bottleneck=False)
    return net(batch["x"], is_training=True)


def make_batch(seed):
    rng = np.random.default_rng(seed)
    if ROW == "resnet":
        return {"x": rng.standard_normal((16, 32, 32, 3), np.float32), "y": rng.integers(0, 16, 16)}
    tokens = rng.integers(0, VOCAB, (16, TOKENS + 1))
    return {"x": tokens[:, :-1], "y": tokens[:, 1:]}


forward = hk.transform_with_state(transformer if ROW == "transformer" else resnet)
tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
batches = [make_batch(seed) for seed in range(5)]
params, net_state = jax.jit(forward.init)(jax.random.key(0), batches[0])
plan = jzero.make_plan(params, stage=STAGE)  # +
tx, params = jzero.zero(tx, plan), plan.place(params)  # +
net_state = jax.device_put(net_state, plan.sharding(jax.P()))  # +resnet
opt_state = tx.init(params)  # -
opt_state = jax.jit(tx.init)(params)  # +


def loss_fn(params, net_state, key, batch):
    logits, net_state = forward.apply(params, net_state, key, batch)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean(), net_state


def train_step(params, opt_state, net_state, key, batch):
    key, used = jax.random.split(key)
    grad = jax.value_and_grad(loss_fn, has_aux=True)  # -
    grad = jax.value_and_grad(jzero.gather_on_use(loss_fn, plan), has_aux=True)  # +
    (loss, net_state), grads = grad(params, net_state, used, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, net_state, key, loss


step = jax.jit(train_step, donate_argnums=(0, 1))  # -
step = jzero.jit(train_step, plan)  # +
args = (params, opt_state, net_state, jax.random.key(1))
