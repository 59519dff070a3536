"""`check` where arrays are alike: stacks, layers and leaves of equal sizes, and a model as small as a few rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState
from programs import QUICK

import jzero

pytestmark = pytest.mark.pod
DIM = 128


def found_in(shapes, loss, *, stacks=(), rows=64, dim=DIM):
    pod = jzero.pod("h200")
    create = lambda: TrainState.create(  # noqa: E731
        apply_fn=lambda variables, x: loss(variables["params"], x), tx=optax.adam(1e-3),
        params={name: jnp.ones(shape) for name, shape in shapes.items()},
    )  # fmt: skip
    axes = dict.fromkeys(stacks, 0)
    state = jzero.abstract(create, stage=3, mesh=pod.mesh({"data": 8}), min_shard_bytes=0, scan_axes=axes)
    plan = jzero.plan_of(state)

    def step(state, x):
        return state.apply_gradients(
            grads=jax.grad(lambda p: (state.apply_fn({"params": p}, x) ** 2).mean())(state.params)
        )

    x = jax.ShapeDtypeStruct((rows, dim), jnp.float32)
    program = pod.compile(step, state, x, donate_argnums=0, plan=plan, compiler_options=QUICK)
    return {f.kind: f for f in jzero.findings(program, plan)}


def through(stack, x):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, stack)[0]


def test_a_layer_as_large_as_another_stack():
    def loss(p, x):
        def block(h, w):
            up = jnp.einsum("bd,kdh->bkh", h, w["up"])  # a layer: [4, 128, 128], as the stack `a`
            return h + jnp.tanh(up.reshape(-1, 4 * DIM)) @ w["down"], None

        return jax.lax.scan(block, through(p["a"], x), {"up": p["up"], "down": p["down"]})[0]

    shapes = {"a": (4, DIM, DIM), "up": (2, 4, DIM, DIM), "down": (2, 4 * DIM, DIM)}
    assert found_in(shapes, loss, stacks=shapes) == {}


def test_a_leaf_that_is_shaped_like_a_stack():
    def loss(p, x):
        return jnp.einsum("bd,hdk->bk", through(p["a"], x), p["heads"])

    assert found_in({"a": (4, DIM, DIM), "heads": (4, DIM, DIM)}, loss, stacks=["a"]) == {}


def test_of_two_stacks_with_as_many_values_the_one_that_is_gathered_whole():
    def loss(p, x):
        return through(p["z"], x) @ p["wide"].sum(0)[:, :DIM]

    found = found_in({"wide": (2, DIM, 4 * DIM), "z": (8, DIM, DIM)}, loss, stacks=["wide", "z"])
    finding = found["weights_not_gathered_on_use"]
    assert finding.bytes == 2 * DIM * 4 * DIM * 4
    assert finding.text.endswith("['wide'][2,128,512].")


def test_a_layer_of_a_stack_that_nobody_named():
    """`a` is as large as one layer of `up`, which a loop gathers; neither is known to be a stack."""

    def loss(p, x):
        block = lambda h, w: (h + jnp.tanh(h @ w["up"]) @ w["down"], None)  # noqa: E731
        return jax.lax.scan(block, through(p["a"], x), {"up": p["up"], "down": p["down"]})[0]

    found = found_in({"a": (4, DIM, DIM), "up": (4, DIM, 4 * DIM), "down": (4, 4 * DIM, DIM)}, loss)
    assert found == {}


def test_a_few_rows_beside_a_small_model():
    def loss(p, x):
        return jnp.roll(x, 1, 0) @ p["a"] @ p["b"]

    assert found_in({"a": (8, 8), "b": (8, 8)}, loss, dim=8) == {}
