"""Offloaded state that is stored padded: in chunks as any other; its padding stays zero and counts nowhere."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from gpu_states import BOUND, abstract_state
from models import max_error

import jzero
from jzero.proof.hlo import parse
from jzero.proof.lifetimes import most_on_device
from jzero.proof.transfers import find_transfers

TINY = 900  # bytes: a third of it is less than the shard of any matrix here
HOST = "pinned_host"


def shifted():
    """Moments, a norm and updates that are not zero where gradient and param are."""
    shift = optax.stateless(lambda updates, _: jax.tree.map(lambda g: g + 1, updates))
    return optax.chain(shift, optax.trace(0.9), optax.clip_by_global_norm(0.5), optax.scale(-0.1))


CHAINS = {
    "adam": lambda: optax.chain(optax.clip_by_global_norm(0.05), optax.adamw(1e-2)),
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


@pytest.mark.default_cases("adam-3", "shifted-3")
@pytest.mark.parametrize(("name", "stage"), [("adam", 1), ("adam", 3), ("shifted", 3), ("adafactor", 2)])
def test_equals_the_run_without_offload(name, stage, mesh):
    params, state, _ = offloaded(CHAINS[name](), stage, mesh)
    want, want_state = train(CHAINS[name](), params_of(), jnp.ones(16))
    assert max_error(params, want) < 1e-6
    assert max_error(list(without_padding(state, want_state)), jax.tree.leaves(want_state)) < 1e-6


VOCAB, WIDTH = 50257, 10001  # 0.7 GB of state on each of 8 devices


@pytest.fixture(scope="module")
def large():
    """A plan for a param whose state is padded and many times the bound, on a pod, and its wrapped optimizer."""
    tier = jzero.Offload(in_flight_bytes=BOUND)
    params = {"table": jax.ShapeDtypeStruct((VOCAB, WIDTH), jnp.bfloat16)}
    plan = jzero.make_plan(params, stage=2, mesh=jzero.pod("h200").mesh({"data": 8}), offload=tier)
    assert plan.layouts[0].padded
    return plan, jzero.zero(CHAINS["adam"](), plan)


@pytest.mark.nightly
@pytest.mark.pod
def test_a_large_padded_leaf_is_within_the_bound(large):
    plan, tx = large

    def update(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    args = (plan.shapes, abstract_state(tx, plan), plan.shapes)
    compiled = jzero.pod("h200").compile(update, *args, donate_argnums=(0, 1, 2))
    memory, module = compiled.memory_analysis(), parse(compiled.as_text())
    stored = math.prod(plan.layouts[0].state_shape)
    held = memory.host_argument_size_in_bytes
    assert held == 12 * stored // 8 > 10 * BOUND
    assert most_on_device(module) <= BOUND
    # the new param is gathered padded and cut, with offload and without; and the shard of its gradient
    assert memory.temp_size_in_bytes <= 2 * stored * 9 // 8 + BOUND / 2
    assert memory.host_alias_size_in_bytes == held
    assert memory.host_temp_size_in_bytes == 0
    transfers = find_transfers(module)
    assert all(t.asynchronous for t in transfers)
    for to in ("device", "host"):
        assert sum(t.total_bytes for t in transfers if t.to == to) == held
    ops = {c.op for c in jzero.explain(compiled, plan).collectives if c.bytes > 10**6}
    assert ops == {"all-gather"}  # whole gradients came in; nothing moves between devices to be padded


@pytest.mark.nightly
@pytest.mark.pod
def test_a_large_padded_leaf_is_born_within_the_bound(large):
    plan, tx = large
    memory = jzero.pod("h200").compile(tx.init.trace, plan.shapes).memory_analysis()
    stored = math.prod(plan.layouts[0].state_shape)
    assert memory.host_output_size_in_bytes == 12 * stored // 8
    assert memory.host_temp_size_in_bytes == 0
    assert memory.temp_size_in_bytes <= 2 * stored // 8 + BOUND  # its shard of the param is padded first
