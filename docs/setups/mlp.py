"""What pages presume (`<!-- setup: mlp -->`): a small model, a loss, batches."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState


class Model(nn.Module):
    """Two layers."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(nn.tanh(nn.Dense(64)(x)))


model, tx, example = Model(), optax.adamw(3e-4), jnp.ones((1, 16))
batch = {"x": jnp.ones((16, 16)), "y": jnp.zeros((16, 8))}
data = [batch] * 2


def loss_of(out, batch):
    return jnp.mean((out - batch["y"]) ** 2)


def create_state():
    params = model.init(jax.random.key(0), example)["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def write_safetensors():
    """The params in the files of another program: `model.safetensors` and its index, as torch lays them out."""
    import json
    from pathlib import Path

    import numpy as np
    from safetensors.numpy import save_file

    layers = jax.device_get(create_state().params)
    tensors = {}
    for name, layer in layers.items():
        tensors[f"model.{name}.weight"] = np.ascontiguousarray(layer["kernel"].T)
        tensors[f"model.{name}.bias"] = layer["bias"]
    save_file(tensors, "model.safetensors")
    index = json.dumps({"weight_map": dict.fromkeys(tensors, "model.safetensors")})
    Path("model.safetensors.index.json").write_text(index)
