"""What keeps the peak low changes no number: gradients reduced on the way back, stacks that land by layers.

Buckets are small here (`bucket_bytes=`), so that tables of small models are made in parts too; MLPs are so wide that
a stack of layers is copied by layers (16 MiB). `benchmarks/peak.py` prints the peaks.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import models as m
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import jzero
from jzero.comm import updates
from jzero.core.linear import linear

VOCAB, DIM, HEADS, LAYERS, SEQ = 48, 24, 3, 4, 8


class Block(nn.Module):
    """With the 3-D kernels of Flax's attention, which are split on another dim than their first."""

    dtype: jnp.dtype
    hidden: int

    @nn.compact
    def __call__(self, x, _=None):
        kw = {"dtype": self.dtype, "param_dtype": self.dtype}
        x = x + nn.MultiHeadDotProductAttention(HEADS, use_bias=False, **kw)(nn.LayerNorm(**kw)(x))
        return x + nn.Dense(DIM, **kw)(nn.gelu(nn.Dense(self.hidden, **kw)(nn.LayerNorm(**kw)(x)))), None


class Gpt(nn.Module):
    """A tied embedding, layers in a scan or unrolled, under remat."""

    scan: bool
    dtype: jnp.dtype
    tied: bool = True
    hidden: int = 2 * DIM
    vocab: int = VOCAB

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(self.vocab, DIM, dtype=self.dtype, param_dtype=self.dtype)
        x, block = embed(tokens), nn.remat(Block, prevent_cse=not self.scan)
        if self.scan:
            stack = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
            x, _ = stack(self.dtype, self.hidden, name="blocks")(x, None)
        else:
            for i in range(LAYERS):
                x, _ = block(self.dtype, self.hidden, name=f"block_{i}")(x)
        logits = embed.attend(x) if self.tied else nn.Dense(self.vocab, dtype=self.dtype, name="head")(x)
        return logits.astype(jnp.float32)


def create(scan, dtype, tied=True, tx=None, **size):
    model = Gpt(scan, dtype, tied, **size)
    params = model.init(jax.random.key(0), jnp.zeros((1, SEQ), jnp.int32))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx or m.adamw())


def loss_of(apply_fn, params, tokens):
    logits = apply_fn({"params": params}, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def train_step(state, tokens):
    loss, grads = jax.value_and_grad(lambda p: loss_of(state.apply_fn, p, tokens))(state.params)
    return state.apply_gradients(grads=grads), loss


def tokens():
    return np.random.default_rng(0).integers(0, VOCAB, (16, SEQ + 1), np.int32)


SMALL_BUCKETS = {"bucket_bytes": 2048}


def large(scan, dtype):
    """Sizes with which a leaf has 16 MiB: a stack of kernels, else an embedding that is split along its second dim."""
    itemsize = jnp.dtype(dtype).itemsize
    if scan:
        return {"hidden": -(-16 * 2**20 // (LAYERS * DIM * itemsize) // 8) * 8}
    return {"vocab": 16 * 2**20 // (DIM * itemsize) + 2}


NIGHTLY = pytest.mark.nightly
CASES = [(1, True), (2, False), (3, False), (3, True)] + [
    pytest.param(*c, marks=NIGHTLY) for c in ((1, False), (2, True))
]


@pytest.mark.nightly
@pytest.mark.parametrize(("stage", "scan"), CASES)
def test_steps_equal_the_unsharded_ones(mesh, stage, scan):
    size = large(scan, jnp.float32) if scan and stage < 3 else {}
    # Adam divides by gradients that are zero but for rounding, and with larger steps this model diverges
    tx = optax.sgd(0.01, momentum=0.9)
    first = plain = create(scan, jnp.float32, tx=tx, **size)
    state = m.shard(create(scan, jnp.float32, tx=tx, **size), mesh, stage, **SMALL_BUCKETS)
    layouts = jzero.plan_of(state).layouts
    assert any(updates.goes_by_layers(x) for x in layouts) == (scan and stage < 3)
    step, batch = jax.jit(train_step), tokens()
    for _ in range(3):
        plain, want = step(plain, batch)
        state, loss = step(state, jzero.plan_of(state).place_batch(batch))
        assert float(loss) == pytest.approx(float(want), rel=1e-5)
    assert m.max_error(state.params, plain.params) < 1e-5
    assert m.max_error(first.params, plain.params) > 1e-2


@pytest.mark.default_cases("3-True")
@pytest.mark.parametrize(("stage", "scan"), CASES)
def test_16_bit_params_are_the_cast_of_their_masters(mesh, stage, scan):
    size = large(scan, jnp.bfloat16) if stage < 3 else {}
    state = m.shard(create(scan, jnp.bfloat16, **size), mesh, stage, **SMALL_BUCKETS)
    if stage < 3 and not scan:  # one copy at a time: some leaf is split on another dim than its first
        assert any(updates.is_copied(x) for x in jzero.plan_of(state).layouts)
    state, _ = jax.jit(train_step, donate_argnums=0)(state, jzero.plan_of(state).place_batch(tokens()))
    m.assert_laid_out(state, jzero.plan_of(state))
    for param, master in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(state.opt_state.master), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(param), np.asarray(master).astype(param.dtype))


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_of_examples_and_forward_derivatives(mesh, stage):
    plain = create(False, jnp.float32)
    state = m.shard(create(False, jnp.float32), mesh, stage, **SMALL_BUCKETS)
    batch = jzero.plan_of(state).place_batch(tokens())

    @jax.jit
    def each(state, batch):
        grad = jax.grad(lambda p, x: loss_of(state.apply_fn, p, x[None]))
        return jax.vmap(grad, (None, 0))(state.params, batch)

    @jax.jit
    def forward(state, batch):
        return jax.jvp(lambda p: loss_of(state.apply_fn, p, batch), (state.params,), (state.params,))[1]

    assert m.max_error(each(state, batch), each(plain, tokens())) < 1e-4
    assert float(forward(state, batch)) == pytest.approx(float(forward(plain, tokens())), rel=1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize("tied", [True, False])
def test_small_weights_leave_the_function_alone(mesh, tied):
    """But for a tied embedding, whose lookup has its own gradient: else its gradient is reduced twice."""
    state = m.shard(create(False, jnp.float32, tied), mesh, 2)
    text = str(jax.make_jaxpr(train_step)(state, tokens()))
    assert text.count("jzero_linear[") == tied


def test_a_linear_function_with_its_own_transpose():
    def doubled(x):  # the transpose says three: it is what is asked
        return linear(lambda s, x: [x * s], lambda s, c: [3 * c], [jnp.float32(2)], [x])[0]

    x = jnp.arange(3.0)
    assert jax.grad(lambda x: doubled(x).sum())(x).tolist() == [3, 3, 3]
    assert jax.jvp(doubled, (x,), (x,))[1].tolist() == [0, 2, 4]
    assert jax.vmap(doubled)(x).tolist() == [0, 2, 4]
    assert jax.jit(jax.grad(jax.checkpoint(lambda x: doubled(x).sum())))(x).tolist() == [3, 3, 3]
