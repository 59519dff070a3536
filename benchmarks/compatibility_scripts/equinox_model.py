"""A transformer of Equinox modules, in the loop of its docs: ROW is "partition" (jax.jit) or "filter" (eqx.filter_jit)."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jzero  # +

# ruff: noqa: F821, E501 - `benchmarks/compatibility.py` sets ROW and STAGE, and takes one of two lines
VOCAB, WIDTH, TOKENS = 1024, 256, 32


class Block(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    norms: list[eqx.nn.LayerNorm]
    mlp: eqx.nn.MLP

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(4, WIDTH, key=first)
        self.norms = [eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)]
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, jax.nn.gelu, key=second)

    def __call__(self, x):
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attention(y, y, y, mask=jnp.tril(jnp.ones((len(x), len(x)), bool)))
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


class Transformer(eqx.Module):
    embedding: eqx.nn.Embedding
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.embedding = eqx.nn.Embedding(VOCAB, WIDTH, key=keys[0])
        self.blocks = [Block(key) for key in keys[1:3]]
        self.head = eqx.nn.Linear(WIDTH, VOCAB, key=keys[3])

    def __call__(self, tokens):
        x = jax.vmap(self.embedding)(tokens)
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(x)


def loss_fn(model, tokens):
    logits = jax.vmap(model)(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


model, tx = Transformer(jax.random.key(0)), optax.adamw(1e-3)
batches = [np.random.default_rng(seed).integers(0, VOCAB, (16, TOKENS)) for seed in range(5)]

if ROW == "filter":
    plan = jzero.make_plan(eqx.filter(model, eqx.is_array), stage=STAGE)  # +filter
    tx, loss_fn = jzero.zero(tx, plan), jzero.gather_on_use(loss_fn, plan)  # +filter
    arrays, rest = eqx.partition(model, eqx.is_array)  # +filter
    model = eqx.combine(plan.place(arrays), rest)  # +filter
    opt_state = tx.init(eqx.filter(model, eqx.is_array))  # -filter
    opt_state = eqx.filter_jit(tx.init)(eqx.filter(model, eqx.is_array))  # +filter
    batches = [plan.place_batch(b) for b in batches]  # +filter

    @eqx.filter_jit
    def step(model, opt_state, tokens):
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, tokens)
        updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), opt_state, loss

    args = (model, opt_state)
else:
    params, static = eqx.partition(model, eqx.is_inexact_array)
    plan = jzero.make_plan(params, stage=STAGE)  # +partition
    tx, params = jzero.zero(tx, plan), plan.place(params)  # +partition
    opt_state = tx.init(params)  # -partition
    opt_state = jax.jit(tx.init)(params)  # +partition

    def loss_of(params, tokens):
        return loss_fn(eqx.combine(params, static), tokens)

    def train_step(params, opt_state, tokens):
        loss, grads = jax.value_and_grad(loss_of)(params, tokens)  # -partition
        loss, grads = jax.value_and_grad(jzero.gather_on_use(loss_of, plan))(params, tokens)  # +partition
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    step = jax.jit(train_step, donate_argnums=(0, 1))  # -partition
    step = jzero.jit(train_step, plan)  # +partition
    args = (params, opt_state)
