"""Offloaded state that is stored padded: in pieces as any other; its padding stays zero and counts nowhere."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from models import max_error

import jzero

TINY = 900  # bytes: a third of it is less than the shard of any matrix here
HOST = "pinned_host"


def shifted():
    """Moments, a norm and updates that are not zero where gradient and param are."""
    shift = optax.stateless(lambda updates, _: jax.tree.map(lambda g: g + 1, updates))
    return optax.chain(shift, optax.trace(0.9), optax.clip_by_global_norm(0.5), optax.scale(-0.1))


CHAINS = {
    "adam": lambda: optax.chain(optax.clip_by_global_norm(0.05), optax.adamw(1e-2)),
    "no epsilon": lambda: optax.adam(1e-2, eps=0.0),  # 0 / 0 in the padding
    "shifted": shifted,
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=16),
}
SHAPES = {"table": (61, 33), "kernel": (3, 5, 7, 9), "bias": (11,), "even": (16, 24)}


def params_of(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return {k: jnp.asarray(rng.standard_normal(s) / 8, dtype) for k, s in SHAPES.items()}


def loss_fn(params, x):
    parts = jax.tree.map(lambda p: jnp.mean(jnp.sin(3 * p.astype(jnp.float32))), params)
    return jnp.mean(x) * sum(jax.tree.leaves(parts))


def train(tx, params, x, steps=3):
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, x):
        grads = jax.grad(loss_fn)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(tx.init)(params)
    for _ in range(steps):
        params, state = step(params, state, x)
    assert step._cache_size() == 1
    return params, state


def offloaded(chain, stage, mesh, dtype=jnp.float32):
    tier = jzero.Offload(in_flight_bytes=TINY)
    plan = jzero.make_plan(params_of(dtype), stage=stage, mesh=mesh, min_shard_bytes=0, offload=tier)
    assert [x.name for x in plan.layouts if not x.padded] == ["['even']"]
    tx = jzero.zero(chain, plan)
    params, state = train(tx, plan.place(params_of(dtype)), plan.place_batch(jnp.ones(16)))
    for x, sharding in zip(jax.tree.leaves(state), plan.state_shardings(state), strict=True):
        assert x.sharding == sharding
        assert x.sharding.memory_kind == (HOST if x.size > 1 else "device")
    return params, state, plan


def without_padding(state, like):
    """The leaves of a state in their logical shape; what is cut off must be zero."""
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(like), strict=True):
        kept = tuple(slice(0, n) for n in y.shape)
        rest = np.asarray(x).copy()
        rest[kept] = 0
        assert not np.any(rest)
        yield np.asarray(x)[kept]


@pytest.mark.parametrize(
    ("name", "stage"), [("adam", 1), ("adam", 3), ("no epsilon", 1), ("shifted", 3), ("adafactor", 2)]
)
def test_equals_the_run_without_offload(name, stage, mesh):
    params, state, _ = offloaded(CHAINS[name](), stage, mesh)
    want, want_state = train(CHAINS[name](), params_of(), jnp.ones(16))
    assert max_error(params, want) < 1e-6
    assert max_error(list(without_padding(state, want_state)), jax.tree.leaves(want_state)) < 1e-6
