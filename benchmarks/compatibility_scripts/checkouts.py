"""Code bases from a checkout or from PyPI, in the form of their own train loops.

ROW is "easylm" (LLaMA in remat blocks, a stateful key in the loss), "big_vision" (a ViT in one scan, its optax chain
with masks, a dict for a state), "gemma" (Flax's example, NNX, a tied and indexed weights) or "tunix" (LoRA on Llama 3,
the step of its PeftTrainer). FOLDER is where the checkouts lie.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState

import jzero  # +

# ruff: noqa: F821 - `benchmarks/compatibility.py` sets ROW, STAGE and FOLDER, and takes one of two lines
VOCAB, WIDTH, TOKENS = 1024, 256, 32


def easylm():
    from EasyLM.jax_utils import JaxRNG, cross_entropy_loss_and_accuracy
    from EasyLM.models.llama.llama_model import FlaxLLaMAForCausalLMModule, LLaMAConfigurator
    from EasyLM.optimizers import OptimizerFactory

    sizes = {"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "residue_dropout": 0.1, "scan_attention": False}
    clip = jnp.clip  # of jax 0.10, without `a_min`, which EasyLM's code names
    jnp.clip = lambda x, *bounds, a_min=None, **more: clip(x, *bounds, **(more if a_min is None else {"min": a_min}))
    config = LLaMAConfigurator.finalize_config(LLaMAConfigurator.get_default_config(sizes | {"scan_mlp": False}))
    model = FlaxLLaMAForCausalLMModule(config, dtype=jnp.float32, param_dtype=jnp.float32)
    tx, _ = OptimizerFactory.get_optimizer(OptimizerFactory.get_default_config())

    def init_fn():
        rngs = JaxRNG(jax.random.PRNGKey(0))(LLaMAConfigurator.rng_keys())
        inputs = jnp.zeros((4, TOKENS), jnp.int32)
        params = model.init(rngs, inputs, jnp.ones_like(inputs), inputs)
        return TrainState.create(params=params, tx=tx, apply_fn=None)

    state = init_fn()  # -easylm
    state = jzero.shard(init_fn, stage=STAGE)  # +easylm
    plan = jzero.plan_of(state)  # +easylm

    def train_step(state, rng, batch):
        rngs = JaxRNG(rng)

        def loss_and_accuracy(params):
            keys = rngs(LLaMAConfigurator.rng_keys())
            logits = model.apply(params, batch["x"], deterministic=False, rngs=keys).logits
            return cross_entropy_loss_and_accuracy(logits, batch["y"], jnp.ones(batch["y"].shape))

        loss_and_accuracy = jzero.gather_on_use(loss_and_accuracy, plan)  # +easylm
        (loss, _), grads = jax.value_and_grad(loss_and_accuracy, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads), rngs(), loss

    step = jax.jit(train_step, donate_argnums=0)  # -easylm
    step = jzero.jit(train_step, plan)  # +easylm
    return (state, jax.random.PRNGKey(1)), step


def big_vision():
    import big_vision.optax
    import big_vision.utils
    from big_vision.models import vit
    from ml_collections import ConfigDict

    model = vit.Model(num_classes=16, width=WIDTH, depth=2, num_heads=4, patch_size=(8, 8), dropout=0.1, scan=True)
    config = ConfigDict({"optax_name": "scale_by_adam", "optax": {"mu_dtype": "bfloat16"}, "lr": 1e-3, "wd": 1e-4})
    config.grad_clip_norm, config.schedule = 1.0, {"decay_type": "cosine", "warmup_steps": 2}
    params = model.init(jax.random.key(0), jnp.zeros((1, 32, 32, 3)))["params"]
    times = {"total_steps": 100, "batch_size": 16, "data_size": 1600}
    tx, _ = big_vision.optax.make(config, params, sched_kw=times)
    plan = jzero.make_plan(params, stage=STAGE)  # +big_vision
    tx, params = jzero.zero(tx, plan), plan.place(params)  # +big_vision
    state = {"params": params, "opt": tx.init(params)}  # -big_vision
    state = {"params": params, "opt": jax.jit(tx.init)(params)}  # +big_vision

    def update_fn(state, rng, batch):
        rng, used = jax.random.split(rng)

        def loss_fn(params):
            logits, _ = model.apply({"params": params}, batch["x"], train=True, rngs={"dropout": used})
            return big_vision.utils.softmax_xent(logits=logits, labels=jax.nn.one_hot(batch["y"], 16))

        loss_fn = jzero.gather_on_use(loss_fn, plan)  # +big_vision
        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, rng, loss

    step = jax.jit(update_fn, donate_argnums=0)  # -big_vision
    step = jzero.jit(update_fn, plan)  # +big_vision
    globals().update(tx=tx, plan=plan)  # +big_vision
    return (state, jax.random.key(1)), step


def gemma():
    import transformer
    import transformer_cfg

    layers = [transformer_cfg.AttentionType.LOCAL_SLIDING, transformer_cfg.AttentionType.GLOBAL]
    config = transformer_cfg.TransformerConfig(
        num_layers=2, num_embed=VOCAB, embed_dim=WIDTH, hidden_dim=3 * WIDTH, num_heads=4, head_dim=WIDTH // 4,
        num_kv_heads=1, final_logit_softcap=None, use_post_attn_norm=True, use_post_ffw_norm=True,
        attention_types=layers, sliding_window_size=8, use_qk_norm=True,
    )  # fmt: skip

    def create():
        model = transformer.Transformer(config, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    model, optimizer = create()  # -gemma
    model, optimizer = jzero.shard(create, stage=STAGE)  # +gemma
    plan = jzero.plan_of((model, optimizer))  # +gemma

    def train_step(model, optimizer, batch):
        def loss_fn(model):
            positions = jnp.broadcast_to(jnp.arange(TOKENS), batch["x"].shape)
            mask = jnp.broadcast_to(jnp.tri(TOKENS, dtype=bool), (*batch["x"].shape, TOKENS))
            logits, _ = model(batch["x"], positions, None, mask)
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

        loss_fn = jzero.gather_on_use(loss_fn, plan)  # +gemma
        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return (loss,)

    step = nnx.jit(train_step)  # -gemma
    step = jzero.jit(train_step, plan)  # +gemma
    return (model, optimizer), step


def tunix():
    import qwix
    from tunix.models.llama3 import model as llama3
    from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

    config = llama3.ModelConfig(
        num_layers=2, vocab_size=VOCAB, embed_dim=WIDTH, hidden_dim=3 * WIDTH, num_heads=4, head_dim=WIDTH // 4,
        num_kv_heads=2, rope_theta=10_000, norm_eps=1e-5,
    )  # fmt: skip
    base = llama3.Llama3(config, rngs=nnx.Rngs(0))
    lora = qwix.LoraProvider(module_path=".*q_proj|.*kv_proj|.*gate_proj|.*up_proj|.*down_proj", rank=8, alpha=8.0)
    model = qwix.apply_lora_to_model(base, lora, **base.get_model_input())
    trainer = PeftTrainer(model, optax.adamw(1e-3), TrainingConfig(eval_every_n_steps=1000, max_steps=5))
    pair = jzero.shard((trainer.model, trainer.optimizer), stage=STAGE, param_specs=jax.P())  # +tunix
    trainer.model, trainer.optimizer = pair  # +tunix
    plan = jzero.plan_of(pair)  # +tunix
    trainer.with_loss_fn(jzero.gather_on_use(trainer.loss_fn, plan))  # +tunix

    def train_step(model, optimizer, batch):
        inputs = {"input_tokens": batch["x"], "input_mask": jnp.ones(batch["x"].shape, bool)}
        inputs["positions"] = jnp.broadcast_to(jnp.arange(TOKENS), batch["x"].shape)
        inputs["attention_mask"] = jnp.broadcast_to(jnp.tri(TOKENS, dtype=bool), (*batch["x"].shape, TOKENS))
        loss, _, _ = trainer.create_train_step_fn()(model, optimizer, inputs)
        return (loss,)

    step = nnx.jit(train_step)  # -tunix
    step = jzero.jit(train_step, plan)  # +tunix
    return (trainer.model, trainer.optimizer), step


def make_batch(seed):
    rng = np.random.default_rng(seed)
    if ROW == "big_vision":
        return {"x": rng.standard_normal((16, 32, 32, 3), np.float32), "y": rng.integers(0, 16, 16)}
    tokens = rng.integers(0, VOCAB, (16, TOKENS + 1))
    return {"x": tokens[:, :-1], "y": tokens[:, 1:]}


if FOLDER is not None:
    sys.path[:0] = [str(Path(FOLDER) / name) for name in ("EasyLM", "big_vision", "flax/examples/gemma")]
batches = [make_batch(seed) for seed in range(5)]
args, step = {"easylm": easylm, "big_vision": big_vision, "gemma": gemma, "tunix": tunix}[ROW]()
