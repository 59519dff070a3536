"""What `explain` says of activations: saved, on the host, computed again; compiled for H200."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState
from programs import MlpBlock, Stack

import jzero

pytestmark = pytest.mark.pod

DIM, ROWS, LAYERS = 512, 256, 6  # of one device
INPUT = 2 * ROWS * DIM


@functools.cache
def report(remat, scan, accumulate=1):
    pod = jzero.pod("h200", hosts=1, gpus_per_host=8)
    block = functools.partial(nn.remat(MlpBlock, prevent_cse=not scan) if remat else MlpBlock, DIM, jnp.bfloat16)
    model = Stack(block, LAYERS, scan)

    def create():
        params = model.init(jax.random.key(0), jnp.zeros((8, DIM), jnp.bfloat16))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3))

    state = jzero.abstract(create, stage=2, mesh=pod.mesh({"data": 8}))
    gradient = jax.value_and_grad
    if accumulate > 1:
        gradient = functools.partial(jzero.value_and_grad, plan=jzero.plan_of(state), accumulate=accumulate)

    def step(state, x):
        def loss_of(params, x):
            return jnp.mean(state.apply_fn({"params": params}, x).astype(jnp.float32) ** 2)

        loss, grads = gradient(loss_of)(state.params, x)
        return state.apply_gradients(grads=grads), loss

    x = jax.ShapeDtypeStruct((8 * ROWS * accumulate, DIM), jnp.bfloat16)
    compiled = pod.compile(jax.jit(step, donate_argnums=0), state, x)
    return jzero.explain(compiled, jzero.plan_of(state))


@pytest.mark.default_cases("True")
@pytest.mark.parametrize("scan", [False, True])
def test_with_remat_block_inputs_are_saved(scan):
    found = report(True, scan).activations
    assert found is not None
    # the first input is an argument, and the last result is read by the loss
    assert (LAYERS - 1) * INPUT <= found.saved <= (LAYERS + 2) * INPUT
    assert found.recomputed >= LAYERS * 4 * INPUT  # the MLP's hidden values
    assert found.host == 0


@pytest.mark.default_cases("True")
@pytest.mark.parametrize("scan", [False, True])
def test_without_remat_nothing_is_computed_again(scan):
    found = report(False, scan).activations
    assert found is not None
    assert found.recomputed == 0
    assert found.saved >= LAYERS * 5 * INPUT
    assert found.saved <= report(False, scan).memory.temp


@pytest.mark.nightly
def test_each_micro_batch_saves_as_much_as_a_step_of_one():
    one, two = (report(False, True, k).activations for k in (1, 2))
    assert one is not None
    assert two is not None
    assert 0.9 * one.saved <= two.saved <= 1.1 * one.saved


@pytest.mark.nightly
def test_the_table_says_it():
    text = str(report(True, False))
    assert "from the forward to the backward pass" in text
    assert "computed again" in text


def test_a_program_without_a_backward_pass_has_none():
    assert jzero.explain(jax.jit(lambda x: x * 2).lower(jnp.ones(8)).compile()).activations is None
