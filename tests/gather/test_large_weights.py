"""Weights that are too large to be whole: the same numbers, and a program that never holds one."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from models import max_error

import jzero
from jzero import sharding
from jzero.gather import large_weights

ROWS, DIM = 16, 32
LOSSES = {
    "head": lambda p, y: jnp.tanh(p["embed"][y] @ p["w"]) @ p["head"],
    "tied": lambda p, y: jnp.tanh(p["embed"][y] @ p["w"]) @ p["embed"].T,
    "weight first": lambda p, y: jnp.einsum("ed,bd->eb", p["w"], p["embed"][y]),
    "remat": jax.checkpoint(lambda p, y: jnp.tanh(p["embed"][y] @ p["w"]) @ p["head"]),
    "loop": lambda p, y: jax.lax.scan(lambda h, _: (jnp.tanh(h @ p["w"]), None), p["embed"][y], None, length=3)[0],
}


def params_of():
    rng = np.random.default_rng(0)
    shapes = {"embed": (96, DIM), "w": (DIM, DIM), "head": (DIM, 96)}
    return {k: jnp.asarray(rng.standard_normal(s) / 4, jnp.float32) for k, s in shapes.items()}


def small(monkeypatch, size):
    """A bound that these weights exceed."""
    monkeypatch.setattr(sharding.Plan, "whole_bytes", property(lambda plan: size))


FIELDS = {"plain": {}, "buckets": {"bucket_bytes": 2000}, "codes": {"gather_dtype": "int8", "quantize_block": 8}}


@pytest.mark.default_cases("head-plain", "tied-buckets", "remat-codes", "loop-plain")
@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
@pytest.mark.parametrize("name", LOSSES)
def test_pieces_change_no_number(name, fields, mesh, monkeypatch):
    """Weights in codes stay whole: pieces would have other blocks."""
    monkeypatch.setattr("jzero.layout.blocks.LEAST_QUANTIZED", 16)
    labels = np.random.default_rng(1).integers(0, 96, ROWS)
    plan = jzero.make_plan(params_of(), stage=3, mesh=mesh, min_shard_bytes=0, **fields)
    placed, batch = plan.place(params_of()), plan.place_batch(labels)

    def value_and_grad():
        fn = jzero.gather_on_use(lambda p, y: (LOSSES[name](p, y) ** 2).mean(), plan)
        return jax.jit(jax.value_and_grad(fn))(placed, batch)

    want = value_and_grad()
    small(monkeypatch, 1500)
    made, cut = [], large_weights._pieces
    monkeypatch.setattr(large_weights, "_pieces", lambda *args: made.append(args) or cut(*args))
    assert max_error(value_and_grad(), want) < 2e-6
    assert bool(made) == (name != "loop" and "gather_dtype" not in fields), "a loop gathers its constants before it"


@pytest.mark.parametrize("tied", [False, True])
def test_a_program_never_holds_a_large_weight(tied, monkeypatch):
    """Compiled for 8 H200: no array of its size but its shards, the same bytes on the wire, less memory."""
    pod, classes, width = jzero.pod("h200"), 32768, 1024
    mesh = pod.mesh({"data": 8})

    def create():
        shapes = {"embed": (classes, width), **({} if tied else {"head": (width, classes)})}
        params = {k: jnp.zeros(s, jnp.bfloat16) for k, s in shapes.items()}
        return TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1e-3))

    state = jzero.abstract(create, stage=3, mesh=mesh, bucket_bytes=2**20)
    plan = jzero.plan_of(state)

    def loss(p, y):
        logits = jnp.tanh(p["embed"][y]) @ (p["embed"].T if tied else p["head"])
        return (logits.astype(jnp.float32) ** 2).mean()

    def compiled():
        def step(state, y):  # each time another one: JAX keeps what it has traced
            return state.apply_gradients(grads=jzero.value_and_grad(loss, plan)(state.params, y)[1])

        labels = jax.ShapeDtypeStruct((64, 4), jnp.int32)
        program = pod.compile(step, state, labels, donate_argnums=0)
        uses = jzero.param_uses(step, state, labels)
        return program, jzero.explain(program, plan), jzero.estimate(plan, uses=uses)

    program, whole, _ = compiled()
    gathered = re.compile(rf"bf16\[({classes},{width}|{width},{classes})\]\S* all-gather")
    assert gathered.search(program.as_text())
    small(monkeypatch, 2**23)
    assert re.search(r"gathered in pieces .* more than 8\.39 MB: \['embed'\] \(67\.11 MB\)", plan.describe())
    program, cut, estimate = compiled()
    assert not gathered.search(program.as_text())
    assert cut.memory.temp < 0.5 * whole.memory.temp
    assert cut.wire.total <= 1.01 * max(whole.wire.total, estimate.wire)
    assert not jzero.findings(program, plan)
