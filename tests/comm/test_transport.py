"""A transport that is new: one class in this file, entered in one table, and nothing else of jzero knows it.

Weights travel in 8 bits and are cast back where they arrive. A cast is not its own derivative, and the cast weight is
what a program might keep for the backward pass: both have been missed before.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import QUICK, gpt_loss, small_state, tokens

import jzero
from jzero.comm import comm_of
from jzero.comm.transport import TRANSPORTS, AsIs
from jzero.comm.uses import Use
from jzero.gather.sharded_weight import Weight

FLOAT8 = jnp.dtype("float8_e4m3fn")


class Float8(AsIs):
    def encode(self, shard):
        return (shard.astype(FLOAT8),)

    def decode(self, parts, dtype):
        return parts[0].astype(dtype)

    @property
    def sent_bytes(self):
        return self.held_bytes // self.dtype.itemsize


@pytest.fixture
def float8(monkeypatch):
    monkeypatch.setitem(TRANSPORTS, "weights", Float8)


def rounded(tree):
    return jax.tree.map(lambda x: x.astype(FLOAT8).astype(x.dtype), tree)


def params_of(seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    return {
        "table": jax.random.normal(keys[0], (16, 24)),
        "kernel": jax.random.normal(keys[1], (24, 40)) / 5,
        "bias": jax.random.normal(keys[2], (40,)),
    }


def loss_of(params, index):
    x = params["table"][index]
    return jnp.sum(jnp.tanh(x @ params["kernel"] + params["bias"]) ** 2)


INDEX = jnp.arange(8) % 5


@pytest.mark.usefixtures("float8")
def test_gradients_are_those_at_the_rounded_weights(mesh):
    params = params_of()
    plan = jzero.make_plan(params, stage=3, mesh=mesh, min_shard_bytes=0)
    want_loss, want = jax.value_and_grad(loss_of)(rounded(params), INDEX)
    got_loss, got = jax.jit(jax.value_and_grad(jzero.gather_on_use(loss_of, plan)))(
        plan.place(params), plan.place_batch(INDEX)
    )
    assert abs(want_loss - loss_of(params, INDEX)) > 1e-3  # the rounding is seen at all
    np.testing.assert_allclose(got_loss, want_loss, rtol=1e-6)
    for name in params:  # not rounded themselves
        np.testing.assert_allclose(got[name], want[name], rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("float8")
@pytest.mark.parametrize("fields", [{}, {"bucket_bytes": 1}], ids=["whole", "table in parts"])
def test_tangents_travel_as_they_are(mesh, fields):
    params = params_of()
    moves = params_of(1)
    plan = jzero.make_plan(params, stage=3, mesh=mesh, min_shard_bytes=0, **fields)
    fn = jzero.gather_on_use(loss_of, plan)
    placed, moved = plan.place(params), plan.place(moves)
    got = jax.jit(lambda p, m: jax.jvp(lambda q: fn(q, INDEX), (p,), (m,)))(placed, moved)
    want = jax.jvp(lambda q: loss_of(q, INDEX), (rounded(params),), (moves,))
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5)


@pytest.mark.usefixtures("float8")
def test_gradients_of_single_examples(mesh):
    params = {k: v for k, v in params_of().items() if k != "table"}

    def loss(params, x):
        return jnp.sum(jnp.tanh(x @ params["kernel"] + params["bias"]) ** 2)

    plan = jzero.make_plan(params, stage=3, mesh=mesh, min_shard_bytes=0)
    x = jax.random.normal(jax.random.key(2), (8, 24))
    each = jax.vmap(jax.grad(jzero.gather_on_use(loss, plan)), in_axes=(None, 0))
    got = jax.jit(each)(plan.place(params), plan.place_batch(x))
    want = jax.vmap(jax.grad(loss), in_axes=(None, 0))(rounded(params), x)
    for name in params:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-4, atol=1e-5)


@functools.cache
def compiled(*, kept: bool):
    """The step of an unrolled GPT for 8 H200; `kept`: all its weights gathered before the model runs."""
    state, plan = small_state(3, scan=False, remat=False)

    def step(state, batch):
        def loss(params):
            if not kept:
                return gpt_loss(state, params, batch)
            gather = comm_of(plan).weights
            rows = zip(jax.tree.leaves(params), plan.layouts, strict=True)
            whole = [straight_through(gather, p, x) if x.stored != x.used else p for p, x in rows]
            params = jax.tree.unflatten(jax.tree.structure(params), whole)
            return gpt_loss(state.replace(apply_fn=state.apply_fn.fn), params, batch)

        loss, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), loss

    program = jzero.pod("h200").compile(
        step, state, tokens(512), donate_argnums=0, plan=plan, compiler_options=QUICK
    )
    return program, plan


def straight_through(gather, param, x):
    @jax.custom_jvp
    def whole(param):
        return gather(param, x.stored, x.used)

    whole.defjvp(lambda p, t: (whole(p[0]), gather.tangent(t[0], x.stored, x.used)))
    return whole(param)


@pytest.mark.pod
@pytest.mark.usefixtures("float8")
def test_the_program_sends_what_the_estimate_says():
    program, plan = compiled(kept=False)
    report = jzero.explain(program, plan)
    gathers = [c for c in report.collectives if c.op == "all-gather"]
    sent = sum(c.wire_bytes * c.count * c.trips for c in gathers if c.dtype.startswith("f8e4m3fn"))
    uses = {x.name: ("lookup", "matmul") for x in plan.layouts if "embedding" in x.name}
    weights = comm_of(plan).weights
    kinds = ((x, map(Use, uses.get(x.name, ("matmul",)))) for x in plan.layouts)
    want = sum(b for x, some in kinds for _, b in weights.wire(x, 1, tuple(some)))
    assert sent == pytest.approx(want, rel=0.03)
    assert all(c.dtype.startswith("f8e4m3fn") for c in gathers if c.bytes > 2**12)
    estimate = jzero.estimate(plan, uses=uses)
    assert report.wire.total == pytest.approx(estimate.wire, rel=0.03)
    assert "weights_not_gathered_on_use" not in {f.kind for f in jzero.findings(program, plan)}


@pytest.mark.pod
@pytest.mark.usefixtures("float8")
def test_a_weight_that_is_kept_behind_the_cast_is_found():
    program, plan = compiled(kept=True)
    (kept,) = [f for f in jzero.findings(program, plan) if "still there in the backward pass" in f.text]
    assert kept.bytes >= 0.5 * plan.param_bytes  # decoded: in 16 bits


@pytest.mark.usefixtures("float8")
def test_the_wire_counts_what_travels_and_buckets_what_is_held(mesh):
    params = {f"w{i}": jnp.zeros((64, 64), jnp.bfloat16) for i in range(4)}
    plan = jzero.make_plan(params, stage=3, mesh=mesh, min_shard_bytes=0)
    x = plan.layouts[0]
    weight = Weight(params["w0"], x.stored, x.used, x.grad)
    form = comm_of(plan).weights.form(x.shape, x.dtype, x.stored, x.used)
    assert (form.parts, form.sent_bytes, form.held_bytes) == (8, 64 * 64, 2 * 64 * 64)
    assert weight.held_bytes(comm_of(plan)) == 2 * 64 * 64  # decoded
    assert weight.as_whole(params["w0"]).held_bytes(comm_of(plan)) == 2 * 64 * 64  # its gradient
    wire = jzero.estimate(plan).wire
    assert wire == pytest.approx(
        7 / 8 * 4 * 64 * 64 * (2 * 1 + 2)
    )  # two gathers in 8 bits, one gradient in 16
