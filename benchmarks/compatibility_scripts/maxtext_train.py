"""MaxText's NNX decoder (layers in one scan, full remat) in the `train_step` of its trainer, with its own optimizer.

The step takes and returns an NNX state of MaxText's `TrainStateNNX`, as its training loop does. Its data pipeline,
checkpoints and metric loggers are not used.
"""

import functools

import jax
import numpy as np
from flax import nnx
from flax.core.spmd import logical_axis_rules
from maxtext.common.train_state_nnx import TrainStateNNX
from maxtext.configs import pyconfig
from maxtext.trainers.pre_train import train
from maxtext.utils import maxtext_utils, model_creation_utils, train_utils

import jzero  # +

# ruff: noqa: F821 - `benchmarks/compatibility.py` sets STAGE, and takes one of two lines
VOCAB, WIDTH, TOKENS, ROWS = 1024, 256, 32, 16

config = pyconfig.initialize(
    run_name="jzero", base_output_directory="unused", hardware="cpu", skip_jax_distributed_system=True,
    log_config=False, enable_checkpointing=False, dataset_type="synthetic", steps=10, dtype="float32",
    attention="dot_product", vocab_size=VOCAB, max_target_length=TOKENS, base_emb_dim=WIDTH, head_dim=WIDTH // 4,
    base_num_query_heads=4, base_num_kv_heads=2, base_mlp_dim=3 * WIDTH, base_num_decoder_layers=2,
    per_device_batch_size=ROWS / jax.device_count(), learning_rate=1e-3,
)  # fmt: skip
mesh = maxtext_utils.get_mesh_from_config(config, jax.devices()[:1])  # -
mesh = jzero.mesh()  # +
create_model = model_creation_utils.get_nnx_create_model_fn(config, mesh)
_, tx = train_utils.create_training_optimizer(config, None)


def create():
    model = create_model()
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def train_step(graphdef, state, batch):
    with logical_axis_rules(config.logical_axis_rules):
        state, metrics = train.train_step(graphdef, config, None, None, state, batch)
    return state, metrics["scalar"]["learning/loss"]


def make_batch(seed):
    tokens = np.random.default_rng(seed).integers(0, VOCAB, (ROWS, TOKENS + 1), np.int32)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    for name in ("inputs", "targets"):
        batch[f"{name}_position"] = np.tile(np.arange(TOKENS, dtype=np.int32), (ROWS, 1))
        batch[f"{name}_segmentation"] = np.ones((ROWS, TOKENS), np.int32)
    return batch


batches = [make_batch(seed) for seed in range(5)]
model, optimizer = create()  # -
model, optimizer = jzero.shard(create, stage=STAGE, param_specs=jax.P())  # +
plan = jzero.plan_of(optimizer)  # +
train.loss_fn = jzero.gather_on_use(train.loss_fn, plan)  # +
graphdef, state = nnx.split(TrainStateNNX(model, optimizer))
step = jax.jit(functools.partial(train_step, graphdef), donate_argnums=0)  # -
step = jzero.jit(functools.partial(train_step, graphdef), plan)  # +
tx, args = optimizer.tx, (state,)
