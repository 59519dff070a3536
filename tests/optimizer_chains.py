"""Optimizers whose state is streamed, and the params that they update."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax


def decayed(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


def labels(params):
    return {k: "slow" if k == "b" else "fast" for k in params}


CHAINS = {
    "clip": lambda: optax.chain(optax.clip_by_global_norm(0.05), optax.adamw(1e-2, mask=decayed)),
    "clipped updates": lambda: optax.chain(optax.adam(1e-2), optax.clip_by_global_norm(0.05)),
    "if finite": lambda: optax.apply_if_finite(
        optax.chain(optax.clip_by_global_norm(0.05), optax.adam(1e-2)), 3
    ),
    "steps": lambda: optax.MultiSteps(optax.adamw(1e-2), 2).gradient_transformation(),
    "lion": lambda: optax.lion(1e-3),
    "hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(1e-2, 0, 10)),
    "several": lambda: optax.multi_transform(
        {"fast": optax.adam(1e-2), "slow": optax.sgd(0.01, 0.9)}, labels
    ),
    "lamb": lambda: optax.lamb(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=16),
}


def params_of(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    shapes = {"a": (32, 64), "b": (64, 8), "bias": (40,), "stack": (3, 8, 16)}
    return {k: jnp.asarray(rng.standard_normal(s) / 8, dtype) for k, s in shapes.items()}
