"""What the program compiled for 64 H200 does with weights that several dims divide, and with padded ones."""

from __future__ import annotations

import collections

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState

import jzero

pytestmark = pytest.mark.pod

N, ROWS = 64, 128


class Mlp(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            kw = {"use_bias": False, "dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
            x = jnp.tanh(nn.Dense(self.width, **kw)(x))
        return x


def create(width):
    params = Mlp(width).init(jax.random.key(0), jnp.ones((1, width)))["params"]
    return TrainState.create(apply_fn=Mlp(width).apply, params=params, tx=optax.adamw(1e-3))


def step(state, x):
    loss, grads = jax.value_and_grad(lambda p: jnp.mean(state.apply_fn({"params": p}, x) ** 2))(state.params)
    return state.apply_gradients(grads=grads), loss


# parts of a param at stage 3: 1000 = 8 x 125 is cut 8 x 8; 1001 is odd, its state is padded and the param whole
@pytest.mark.default_cases("2-1001-1", "3-1000-64", "1-1000-64")
@pytest.mark.parametrize(("width", "parts"), [(1000, 64), (1001, 1)])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_are_reduced_once_and_params_gathered(stage, width, parts):
    pod = jzero.pod("h200", hosts=8)
    state = jzero.abstract(lambda: create(width), stage=stage, mesh=pod.mesh({"data": N}))
    plan = jzero.plan_of(state)
    assert all(x.several_dims and x.padded == (parts == 1) for x in plan.layouts)
    x = jax.ShapeDtypeStruct((N * ROWS, width), jnp.bfloat16)
    compiled = pod.compile(step, state, x, donate_argnums=0)
    report, estimate = jzero.explain(compiled, plan), jzero.estimate(plan, tx=state.tx)
    assert report.memory is not None
    batch = ROWS * width * 2
    states = report.memory.arguments - batch
    assert states == pytest.approx(estimate.params + estimate.opt_state, rel=1e-3)
    assert estimate.opt_state <= 1.02 * 12 * (plan.param_bytes // 2) / N
    assert report.memory.arguments - report.memory.aliased <= batch + 256
    assert estimate.params == pytest.approx(plan.param_bytes / (parts if stage == 3 else 1), rel=1e-3)
    sent = collections.Counter()
    for c in report.collectives:
        sent[c.op] += c.total_wire_bytes / plan.param_bytes
    # no all-to-all, no permute, and no all-reduce, which is what XLA makes for such pieces
    assert {op for op, share in sent.items() if share > 1e-3} == {"reduce-scatter", "all-gather"}
    assert sent["reduce-scatter"] == pytest.approx(1, rel=0.05)
    gathers = 2 if stage == 3 and parts > 1 else 1
    assert sent["all-gather"] == pytest.approx(gathers, rel=0.2)
    first = (gathers - 1) / 3  # the input has no gradient: its weight is not gathered again
    assert report.wire.psi == pytest.approx(estimate.wire_psi - first, rel=0.02)
    whole = stage == 3 and parts == 1
    found = jzero.findings(compiled, plan)
    assert [f.kind for f in found] == ["state_too_large"] * whole
    assert all("stay whole on every device" in f.text for f in found)
