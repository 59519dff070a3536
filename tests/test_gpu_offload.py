"""Offloaded state in programs compiled for H200: what is on the device at once, in place on the host, beside what."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import optax
import pytest

import jzero

pytest.importorskip(
    "jax_plugins.xla_cuda12", reason="compile-only pods need the jax-cuda12-plugin (jzero[pod])"
)

MIB = 2**20
BOUND = 64 * MIB
SHAPES = [(1024, 4096), (4096, 2048), (2048, 1024), (8192, 1024), (4096, 1536), (768,)]
CHAINS = {
    "adam": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "if finite": lambda: optax.apply_if_finite(CHAINS["adam"](), 3),
    "steps": lambda: optax.MultiSteps(optax.adamw(1e-3), 4).gradient_transformation(),
    "lion": lambda: optax.lion(1e-3),
    "adafactor": lambda: optax.adafactor(1e-3),
    "clipped updates": lambda: optax.chain(optax.adam(1e-3), optax.clip_by_global_norm(1.0)),
}


def plan_for(count, stage, wider=1, **fields):
    shapes = [SHAPES[i % len(SHAPES)] for i in range(count)]
    params = {
        f"w{i:02}": jax.ShapeDtypeStruct((s[0] * wider, *s[1:]), jnp.bfloat16) for i, s in enumerate(shapes)
    }
    mesh = jzero.pod("h200").mesh({"data": 8})
    tier = jzero.Offload(in_flight_bytes=BOUND, **fields)
    return jzero.make_plan(params, stage=stage, mesh=mesh, offload=tier)


def abstract_state(tx, plan):
    state = jax.eval_shape(tx.init, plan.shapes)
    leaves = zip(jax.tree.leaves(state), plan.state_shardings(state), strict=True)
    return jax.tree.unflatten(
        jax.tree.structure(state), [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s) for x, s in leaves]
    )


@functools.cache
def program(count, chain, *, stage=3, wider=1, **fields):
    """An update alone: params, gradients and state as arguments, split as the stage says."""
    plan = plan_for(count, stage, wider, **fields)
    tx = jzero.zero(CHAINS[chain](), plan)

    def update(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    args = (plan.shapes, abstract_state(tx, plan), plan.shapes)
    return jzero.pod("h200").compile(update, *args, donate_argnums=(0, 1, 2)), plan


@functools.cache
def creation(count, wider=1):
    plan = plan_for(count, 3, wider)
    tx = jzero.zero(CHAINS["adam"](), plan)
    return jzero.pod("h200").compile(tx.init.trace, plan.shapes), plan


def group_bytes(plan, per_value=12):
    """Bytes of the state of the largest param on one device."""
    return max(per_value * math.prod(x.state_shape) // 8 for x in plan.layouts)


@pytest.mark.parametrize("chain", CHAINS)
def test_what_is_on_the_device_does_not_grow_with_the_leaves(chain):
    for count in (12, 48) if chain in ("adam", "steps") else (48,):
        compiled, plan = program(count, chain)
        memory = compiled.memory_analysis()
        assert memory.temp_size_in_bytes <= BOUND + group_bytes(plan)
        assert memory.host_argument_size_in_bytes >= sum(
            4 * math.prod(x.state_shape) // 8 for x in plan.layouts
        )
        assert memory.host_alias_size_in_bytes == memory.host_argument_size_in_bytes
        assert memory.host_output_size_in_bytes == memory.host_argument_size_in_bytes
        assert memory.host_temp_size_in_bytes == 0
