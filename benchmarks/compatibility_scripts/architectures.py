"""Models rebuilt from their architectures, as their authors would train them with Flax and optax: ROW is the model."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state

import jzero  # +

# ruff: noqa: F821 - `benchmarks/compatibility.py` sets ROW and STAGE, and takes one of two lines
VOCAB, WIDTH, TOKENS, BATCH = 1024, 256, 32, 16


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


class EncoderDecoder1DBlock(nn.Module):
    """Of lm1b: pre-norm attention and MLP."""

    @nn.compact
    def __call__(self, x, mask, train):
        y = nn.LayerNorm()(x)
        y = nn.MultiHeadDotProductAttention(4, use_bias=False, dropout_rate=0.1, deterministic=not train)(
            y, mask=mask
        )
        x = x + nn.Dropout(0.1, deterministic=not train)(y)
        y = nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))
        y = nn.Dense(WIDTH)(nn.Dropout(0.1, deterministic=not train)(nn.relu(y)))
        return x + nn.Dropout(0.1, deterministic=not train)(y)


class TransformerLM(nn.Module):
    """lm1b: an embedding shared with the logits, learned positions."""

    @nn.compact
    def __call__(self, tokens, train=False):
        embed = nn.Embed(VOCAB, WIDTH, embedding_init=nn.initializers.normal(1.0))
        positions = self.param("positions", nn.initializers.normal(0.02), (1, TOKENS, WIDTH))
        x = embed(jnp.pad(tokens[:, :-1], ((0, 0), (1, 0)))) + positions
        mask = nn.combine_masks(nn.make_attention_mask(tokens > 0, tokens > 0), nn.make_causal_mask(tokens))
        for _ in range(2):
            x = EncoderDecoder1DBlock()(x, mask, train)
        return embed.attend(nn.LayerNorm()(x)) / jnp.sqrt(WIDTH)


class EncoderLSTM(nn.Module):
    @nn.compact
    def __call__(self, x):
        lstm = nn.scan(
            nn.OptimizedLSTMCell,
            variable_broadcast="params",
            in_axes=1,
            out_axes=1,
            split_rngs={"params": False},
        )(WIDTH)
        carry = lstm.initialize_carry(jax.random.key(0), x[:, 0].shape)
        return lstm(carry, x)[0]


class DecoderLSTM(nn.Module):
    """One step: teacher forcing or its own last token."""

    @nn.compact
    def __call__(self, carry, x):
        rng, lstm_state, last = carry
        carry_rng, sample_rng = jax.random.split(rng)
        x = x if self.is_initializing() else jnp.where(jax.random.bernoulli(carry_rng, 0.5), x, last)
        lstm_state, y = nn.OptimizedLSTMCell(WIDTH)(lstm_state, x)
        logits = nn.Dense(128)(y)
        sampled = jax.random.categorical(sample_rng, logits)
        return (carry_rng, lstm_state, jax.nn.one_hot(sampled, 128, dtype=jnp.float32)), logits


class Seq2seq(nn.Module):
    """Of Flax's examples: one-hot characters, an LSTM after an LSTM."""

    @nn.compact
    def __call__(self, encoder_inputs, decoder_inputs):
        state = EncoderLSTM()(encoder_inputs)
        decoder = nn.scan(
            DecoderLSTM, variable_broadcast="params", in_axes=1, out_axes=1, split_rngs={"params": False}
        )()
        carry = (jax.random.key(7), state, decoder_inputs[:, 0])
        return decoder(carry, decoder_inputs)[1]


class ResNetBlock(nn.Module):
    filters: int
    strides: int

    @nn.compact
    def __call__(self, x, train):
        y = nn.Conv(self.filters, (3, 3), self.strides, use_bias=False)(x)
        y = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(y))
        y = nn.Conv(self.filters, (3, 3), use_bias=False)(y)
        y = nn.BatchNorm(use_running_average=not train, momentum=0.9, scale_init=nn.initializers.zeros)(y)
        if x.shape != y.shape:
            x = nn.Conv(self.filters, (1, 1), self.strides, use_bias=False)(x)
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        return nn.relu(x + y)


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(nn.Conv(64, (3, 3), use_bias=False)(x)))
        for i in range(4):
            x = ResNetBlock(64 * 2 ** min(i, 2), 1 if i == 0 else 2)(x, train)
        return nn.Dense(16)(x.mean((1, 2)))


class Generator(nn.Module):
    @nn.compact
    def __call__(self, z):
        x = nn.relu(nn.Dense(4 * 4 * 256)(z)).reshape(-1, 4, 4, 256)
        for width in (128, 64):
            x = nn.relu(nn.GroupNorm(8)(nn.ConvTranspose(width, (4, 4), (2, 2))(x)))
        return jnp.tanh(nn.ConvTranspose(3, (4, 4), (2, 2))(x))


class Discriminator(nn.Module):
    @nn.compact
    def __call__(self, x):
        for width in (64, 128, 256):
            x = nn.leaky_relu(nn.Conv(width, (4, 4), (2, 2))(x), 0.2)
        return nn.Dense(1)(x.reshape(len(x), -1))[:, 0]


class GraphNet(nn.Module):
    """Message passing over one graph of the batch: gather the senders, sum at the receivers."""

    @nn.compact
    def __call__(self, nodes, senders, receivers):
        h = nn.Dense(WIDTH)(nodes)
        for _ in range(3):
            messages = nn.relu(nn.Dense(WIDTH)(jnp.concatenate([h[senders], h[receivers]], -1)))
            gathered = jax.ops.segment_sum(messages, receivers, num_segments=len(h))
            h = h + nn.Dense(WIDTH)(nn.relu(nn.Dense(2 * WIDTH)(jnp.concatenate([h, gathered], -1))))
            h = nn.LayerNorm()(h)
        return nn.Dense(16)(h)


class MoE(nn.Module):
    """Top-2 of eight experts with capacity: dispatch and combine by one-hot einsums, and a loss that balances them."""

    experts: int = 8

    @nn.compact
    def __call__(self, x):
        tokens = x.reshape(-1, WIDTH)
        capacity = 2 * 2 * len(tokens) // self.experts
        probs = jax.nn.softmax(nn.Dense(self.experts, use_bias=False, name="router")(tokens))
        gates, chosen = jax.lax.top_k(probs, 2)
        mask = jax.nn.one_hot(chosen, self.experts)  # [tokens, 2, experts]
        flat = mask.transpose(1, 0, 2).reshape(-1, self.experts)
        place = ((jnp.cumsum(flat, 0) - 1) * flat).reshape(2, -1, self.experts).transpose(1, 0, 2)
        slot = jax.nn.one_hot(place.astype(int), capacity) * mask[..., None]  # dropped beyond the capacity
        combine = jnp.einsum("tk,tkec->tec", gates, slot)
        up = self.param("up", nn.initializers.lecun_normal(batch_axis=0), (self.experts, WIDTH, 2 * WIDTH))
        down = self.param(
            "down", nn.initializers.lecun_normal(batch_axis=0), (self.experts, 2 * WIDTH, WIDTH)
        )
        inputs = jnp.einsum("tec,td->ecd", (combine > 0).astype(x.dtype), tokens)
        outputs = jnp.einsum("ech,ehd->ecd", nn.gelu(jnp.einsum("ecd,edh->ech", inputs, up)), down)
        balance = self.experts * jnp.sum(probs.mean(0) * mask[:, 0].mean(0))
        self.sow("losses", "balance", balance)
        return jnp.einsum("tec,ecd->td", combine, outputs).reshape(x.shape)


class MoeLM(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, WIDTH)(tokens)
        for _ in range(2):
            x = x + nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x), mask=nn.make_causal_mask(tokens))
            x = x + MoE()(nn.LayerNorm()(x))
        return nn.Dense(VOCAB)(nn.LayerNorm()(x))


class TrainState(train_state.TrainState):
    batch_stats: Any = None
    key: Any = None


def create(model, tx, *inputs):
    def state():
        variables = model.init(jax.random.key(0), *inputs)
        stats = variables.get("batch_stats")
        return TrainState.create(
            apply_fn=model.apply, params=variables["params"], tx=tx, batch_stats=stats, key=jax.random.key(1)
        )

    return state


def lm_step(state, batch):
    def loss_fn(params):
        rngs = {"dropout": jax.random.fold_in(state.key, state.step)}
        logits = state.apply_fn({"params": params}, batch["tokens"], train=True, rngs=rngs)
        return cross_entropy(logits, batch["tokens"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def seq2seq_step(state, batch):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch["query"], batch["answer"][:, :-1])
        labels = batch["answer"][:, 1:]
        mask = jnp.arange(labels.shape[1]) < batch["lengths"][:, None]
        return -(jnp.sum(nn.log_softmax(logits) * labels, -1) * mask).sum() / mask.sum()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def resnet_step(state, batch):
    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, new = state.apply_fn(variables, batch["x"], train=True, mutable=["batch_stats"])
        decay = 1e-4 * sum(jnp.sum(p**2) for p in jax.tree.leaves(params) if p.ndim > 1)
        return cross_entropy(logits, batch["y"]).mean() + decay, new

    (loss, new), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, batch_stats=new["batch_stats"]), loss


def gan_step(generator, discriminator, batch):
    def generator_loss(params):
        fake = generator.apply_fn({"params": params}, batch["z"])
        logits = discriminator.apply_fn({"params": discriminator.params}, fake)
        return optax.sigmoid_binary_cross_entropy(logits, jnp.ones_like(logits)).mean(), fake

    def discriminator_loss(params, fake):
        real = discriminator.apply_fn({"params": params}, batch["x"])
        made = discriminator.apply_fn({"params": params}, fake)
        bce = optax.sigmoid_binary_cross_entropy
        return bce(real, jnp.ones_like(real)).mean() + bce(made, jnp.zeros_like(made)).mean()

    (g_loss, fake), g_grads = jax.value_and_grad(generator_loss, has_aux=True)(generator.params)
    d_loss, d_grads = jax.value_and_grad(discriminator_loss)(discriminator.params, fake)
    generator, discriminator = (
        generator.apply_gradients(grads=g_grads),
        discriminator.apply_gradients(grads=d_grads),
    )
    return generator, discriminator, g_loss + d_loss


def dpo_step(state, reference, batch):
    def log_prob(params, tokens):
        logits = state.apply_fn({"params": params}, tokens)
        return -cross_entropy(logits, tokens).sum(-1)

    def loss_fn(params):
        policy = log_prob(params, batch["chosen"]) - log_prob(params, batch["rejected"])
        frozen = log_prob(reference, batch["chosen"]) - log_prob(reference, batch["rejected"])
        return -jax.nn.log_sigmoid(0.1 * (policy - jax.lax.stop_gradient(frozen))).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def graph_step(state, batch):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch["nodes"], batch["senders"], batch["receivers"])
        return cross_entropy(logits, batch["labels"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def experts_step(state, batch):
    def loss_fn(params):
        logits, new = state.apply_fn({"params": params}, batch["tokens"], mutable=["losses"])
        balance = sum(jax.tree.leaves(new["losses"]))
        return cross_entropy(logits[:, :-1], batch["tokens"][:, 1:]).mean() + 0.01 * balance

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def make_batch(seed):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape, np.float32)

    def tokens(*shape):
        return rng.integers(1, VOCAB, shape)

    def letters(*shape):
        return np.eye(128, dtype=np.float32)[rng.integers(0, 128, shape)]

    if ROW == "seq2seq":
        return {"query": letters(BATCH, 9), "answer": letters(BATCH, 8), "lengths": rng.integers(1, 8, BATCH)}
    if ROW == "batchnorm":
        return {"x": normal(BATCH, 32, 32, 3), "y": rng.integers(0, 16, BATCH)}
    if ROW == "gan":
        return {"z": normal(BATCH, 128), "x": normal(BATCH, 32, 32, 3)}
    if ROW == "dpo":
        return {"chosen": tokens(BATCH, TOKENS), "rejected": tokens(BATCH, TOKENS)}
    if ROW == "graph":
        edges = {name: rng.integers(0, 512, 2048) for name in ("senders", "receivers")}
        return {"nodes": normal(512, 64), "labels": rng.integers(0, 16, 512), **edges}
    return {"tokens": tokens(BATCH, TOKENS)}


batches = [make_batch(seed) for seed in range(5)]
if ROW == "gan":
    tx = optax.adam(2e-4, b1=0.5)
    create_generator = create(Generator(), tx, batches[0]["z"])
    create_discriminator = create(Discriminator(), tx, batches[0]["x"])
    generator, discriminator = create_generator(), create_discriminator()  # -gan
    generator = jzero.shard(create_generator, stage=STAGE)  # +gan
    discriminator = jzero.shard(create_discriminator, stage=STAGE)  # +gan
    step = jax.jit(gan_step, donate_argnums=(0, 1))  # -gan
    step = jzero.jit(gan_step, jzero.plan_of(generator))  # +gan
    args = (generator, discriminator)
else:
    model, train_step, inputs = {
        "lm1b": (TransformerLM(), lm_step, ("tokens",)),
        "seq2seq": (Seq2seq(), seq2seq_step, ("query", "answer")),
        "batchnorm": (ResNet(), resnet_step, ("x",)),
        "dpo": (TransformerLM(), dpo_step, ("chosen",)),
        "graph": (GraphNet(), graph_step, ("nodes", "senders", "receivers")),
        "experts": (MoeLM(), experts_step, ("tokens",)),
    }[ROW]
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    create_state = create(model, tx, *(batches[0][name] for name in inputs))
    state = create_state()  # -
    state = jzero.shard(create_state, stage=STAGE)  # +
    step = jax.jit(train_step, donate_argnums=0)  # -
    step = jzero.jit(train_step, jzero.plan_of(state))  # +
    args = (state,)
    if ROW == "dpo":  # the policy starts as the reference
        reference = jax.tree.map(jnp.copy, state.params)
        args = (state, reference)
