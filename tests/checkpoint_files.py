"""A plain optax loop to save, and the names and bits of an NNX pair."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from layouts import (
    SHAPES,
    bits,
    mesh_of,
)

import jzero
from jzero.layout.leaf_rule import path_keys


def values_of(pair):
    """Names and bits of a pair, without padding (there is none: every shape here divides, or is small)."""
    model, optimizer = pair
    tree = nnx.as_pure((nnx.state(model), nnx.state(optimizer)))
    return {path_keys(k): bits(x) for k, x in jax.tree_util.tree_leaves_with_path(tree)}


def raw(n, stage, dtype=jnp.float32, seed=0, **fields):
    """(mapping, wrapped transformation) of a plain optax loop."""
    params = {
        k: jnp.asarray(np.random.default_rng([seed, len(s)]).standard_normal(s), dtype)
        for k, s in SHAPES.items()
    }
    plan = jzero.make_plan(params, stage=stage, mesh=mesh_of(n), min_shard_bytes=0, **fields)
    tx = jzero.zero(optax.adam(1e-2), plan)
    params = plan.place(params)
    opt_state = tx.init(params)
    grads = jax.tree.map(lambda p: p / 8, params)
    updates, opt_state = jax.jit(tx.update)(grads, opt_state, params) if seed else (None, opt_state)
    del updates
    return {"params": params, "opt_state": opt_state, "epoch": jnp.int32(3 + seed), "seen": 7 * seed}, tx
