"""openpi's pi0 (a SigLIP tower, two Gemma experts, linen in NNX bridges) in the train step of its `scripts/train.py`.

The state is openpi's own: type-checked, with an NNX state of all params and an EMA of it. ROW is "openpi", or
"openpi_lora": LoRA in both experts, whose other weights are frozen and kept in bf16. FOLDER holds a checkout. torch is
replaced by an empty module: openpi imports it for a second version of its model, which is not used here.
"""

import dataclasses
import sys
import types
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jzero  # +

# ruff: noqa: F821 - `benchmarks/compatibility.py` sets ROW, STAGE and FOLDER, and takes one of two lines
for name in ("torch", "torch.nn", "torch.nn.functional", "openpi.models_pytorch", "openpi.models_pytorch.pi0_pytorch"):
    sys.modules.setdefault(name, mock.MagicMock())
sys.modules["torch"].Tensor = types.new_class("Tensor")
sys.path.insert(0, str(Path(FOLDER) / "openpi/src"))

from openpi.models import gemma, lora, pi0_config, siglip
from openpi.training import optimizer as _optimizer
from openpi.training import utils as training_utils

WIDTH, VOCAB = 256, 1024
LORA = {k: lora.LoRAConfig(rank=4, alpha=4.0) for k in ("attn", "ffn")} if ROW == "openpi_lora" else {}
SIZES = gemma.Config(
    width=WIDTH, depth=2, mlp_dim=2 * WIDTH, num_heads=4, num_kv_heads=1, head_dim=WIDTH // 4, lora_configs=LORA
)
VARIANT = "gemma_2b_lora" if LORA else "dummy"  # by its name openpi says what is frozen
tower = siglip.Module if not hasattr(siglip.Module, "func") else siglip.Module.func
siglip.Module = lambda **fields: tower(**fields | {"variant": "mu/16"})
gemma.get_config, gemma.PALIGEMMA_VOCAB_SIZE = lambda variant: SIZES, VOCAB
config = pi0_config.Pi0Config(
    dtype="float32", paligemma_variant=VARIANT, action_expert_variant=VARIANT, action_dim=8, action_horizon=4,
    max_token_len=8,
)  # fmt: skip
trainable_filter = nnx.All(nnx.Param, nnx.Not(config.get_freeze_filter()))
tx = _optimizer.create_optimizer(_optimizer.AdamW(), _optimizer.CosineDecaySchedule(warmup_steps=1))


def init():
    model = config.create(jax.random.key(0))
    params = nnx.state(model)
    frozen = nnx.filterlib.to_predicate(config.get_freeze_filter())  # openpi's `state_map` is older than flax 0.12
    flat = nnx.to_flat_state(params)
    rows = [(k, p.replace(p.get_value().astype(jnp.bfloat16)) if frozen(k, p) else p) for k, p in flat]
    params = nnx.from_flat_state(rows)
    return training_utils.TrainState(
        step=0, params=params, model_def=nnx.graphdef(model), tx=tx, opt_state=tx.init(params.filter(trainable_filter)),
        ema_decay=0.99, ema_params=params,
    )  # fmt: skip


def train_step(state, rng, batch):
    model = nnx.merge(state.model_def, state.params)
    model.train()

    def loss_fn(model, rng, observation, actions):
        return jnp.mean(model.compute_loss(rng, observation, actions, train=True))

    loss_fn = jzero.gather_on_use(loss_fn, plan)  # +
    train_rng = jax.random.fold_in(rng, state.step)
    observation, actions = batch
    diff_state = nnx.DiffState(0, trainable_filter)
    loss, grads = nnx.value_and_grad(loss_fn, argnums=diff_state)(model, train_rng, observation, actions)
    params = state.params.filter(trainable_filter)
    updates, new_opt_state = state.tx.update(grads, state.opt_state, params)
    new_params = optax.apply_updates(params, updates)
    nnx.update(model, new_params)
    new_params = nnx.state(model)
    new_state = dataclasses.replace(state, step=state.step + 1, params=new_params, opt_state=new_opt_state)
    averaged = jax.tree.map(
        lambda old, new: state.ema_decay * old + (1 - state.ema_decay) * new, state.ema_params, new_params
    )
    return dataclasses.replace(new_state, ema_params=averaged), loss


def make_batch(seed):
    rng = np.random.default_rng(seed)

    def value(x):
        if x.dtype == bool:
            return np.ones(x.shape, bool)
        drawn = rng.integers(0, VOCAB, x.shape) if x.dtype == jnp.int32 else rng.uniform(-1, 1, x.shape)
        return drawn.astype(x.dtype)

    return jax.tree.map(value, config.inputs_spec(batch_size=8))


batches = [make_batch(seed) for seed in range(5)]
state = jax.jit(init)()  # -
state = jzero.shard(init, stage=STAGE)  # +
plan = jzero.plan_of(state)  # +
step = jax.jit(train_step, donate_argnums=0)  # -
step = jzero.jit(train_step, plan)  # +
args = (state, jax.random.key(1))
