"""The Flax models of Hugging Face, trained as in its examples (run_clm_flax.py): ROW is the model."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import transformers as hf
from flax import traverse_util
from flax.training import train_state
from transformers.modeling_flax_utils import FlaxPreTrainedModel

import jzero  # +

# ruff: noqa: F821 - `benchmarks/compatibility.py` sets ROW and STAGE, and takes one of two lines
ROWS, TOKENS, VOCAB, WIDTH = 16, 32, 1024, 256
SMALL = {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4}


def make_model() -> FlaxPreTrainedModel:
    if ROW == "gpt2":
        config = hf.GPT2Config(vocab_size=VOCAB, n_positions=TOKENS, n_embd=WIDTH, n_layer=2, n_head=4)
        return hf.FlaxGPT2LMHeadModel(config, seed=0)
    if ROW == "bert":
        return hf.FlaxBertForMaskedLM(hf.BertConfig(**SMALL, intermediate_size=4 * WIDTH), seed=0)
    if ROW == "llama":
        sizes = {"intermediate_size": 3 * WIDTH, "num_key_value_heads": 2, "max_position_embeddings": 128}
        return hf.FlaxLlamaForCausalLM(hf.LlamaConfig(**SMALL, **sizes), (1, TOKENS), seed=0)
    if ROW == "t5":
        clip = jnp.clip  # jax 0.10 has no `a_max`, which T5's code names
        jnp.clip = lambda x, *bounds, a_max=None, **more: clip(x, *bounds, **({"max": a_max} if a_max else more))
        config = hf.T5Config(VOCAB, WIDTH, 64, 4 * WIDTH, num_layers=2, num_heads=4, decoder_start_token_id=0)
        return hf.FlaxT5ForConditionalGeneration(config, seed=0)
    if ROW == "vit":
        sizes = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "num_labels": 16}
        config = hf.ViTConfig(**sizes, intermediate_size=4 * WIDTH, image_size=32, patch_size=8)
        return hf.FlaxViTForImageClassification(config, seed=0)
    config = hf.WhisperConfig(
        vocab_size=VOCAB, d_model=WIDTH, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=4 * WIDTH, decoder_ffn_dim=4 * WIDTH, num_mel_bins=16,
        max_source_positions=TOKENS, max_target_positions=TOKENS, decoder_start_token_id=0, pad_token_id=1,
        bos_token_id=2, eos_token_id=2, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    return hf.FlaxWhisperForConditionalGeneration(config, (1, 16, 2 * TOKENS), seed=0)


def make_batch(seed: int):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(3, VOCAB, (ROWS, TOKENS))
    if ROW == "vit":
        images = rng.standard_normal((ROWS, 3, 32, 32), np.float32)
        return {"pixel_values": images, "labels": rng.integers(0, 16, (ROWS, 1))}
    if ROW in ("gpt2", "llama"):
        labels = np.pad(tokens[:, 1:], ((0, 0), (0, 1)), constant_values=-100)
        return {"input_ids": tokens, "attention_mask": np.ones_like(tokens), "labels": labels}
    if ROW == "bert":
        masked = rng.random(tokens.shape) < 0.15
        shown = np.where(masked, 0, tokens)
        labels = np.where(masked, tokens, -100)
        return {"input_ids": shown, "attention_mask": np.ones_like(tokens), "labels": labels}
    decoder = {"decoder_input_ids": np.pad(tokens[:, :-1], ((0, 0), (1, 0))), "labels": tokens}
    if ROW == "t5":
        return {"input_ids": tokens[:, ::-1].copy(), **decoder}
    return {"input_features": rng.standard_normal((ROWS, 16, 2 * TOKENS), np.float32), **decoder}


class TrainState(train_state.TrainState):
    dropout_rng: jax.Array


def decay_mask_fn(params):
    flat = traverse_util.flatten_dict(params)
    return traverse_util.unflatten_dict({path: path[-1] not in ("bias", "scale") for path in flat})


def loss_fn(logits, labels):
    if ROW == "vit":
        logits = logits[:, None]
    mask = labels != -100
    losses = optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, logits.shape[-1])) * mask
    return losses.sum() / mask.sum()


def train_step(state, batch):
    dropout_rng, new_dropout_rng = jax.random.split(state.dropout_rng)

    def compute_loss(params):
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits = state.apply_fn(**inputs, params=params, dropout_rng=dropout_rng, train=True)[0]
        return loss_fn(logits, batch["labels"])

    loss, grads = jax.value_and_grad(compute_loss)(state.params)
    return state.apply_gradients(grads=grads, dropout_rng=new_dropout_rng), loss


model = make_model()
tx = optax.adamw(1e-3, b2=0.98, weight_decay=0.01, mask=decay_mask_fn)
state = TrainState.create(
    apply_fn=model.__call__, params=model.params, tx=tx, dropout_rng=jax.random.PRNGKey(0)
)
state = jzero.shard(state, stage=STAGE)  # +
step = jax.jit(train_step, donate_argnums=0)  # -
step = jzero.jit(train_step, jzero.plan_of(state))  # +
args, batches = (state,), [make_batch(seed) for seed in range(5)]
