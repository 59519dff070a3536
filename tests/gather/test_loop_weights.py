"""Weights that every round of a loop uses: the values of the plain function, and what is gathered and kept."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equations import equations, is_gather
from loop_losses import CASES, DIM, data, loss, params
from models import max_error

import jzero
from jzero.comm import weights as weights_module


def made(fn, stage, mesh, **fields):
    plan = jzero.make_plan(params(), stage=stage, mesh=mesh, min_shard_bytes=0, **fields)
    return plan, jzero.gather_on_use(fn, plan), plan.place(params()), plan.place_batch(data())


@pytest.mark.default_cases("keys-2", "nested-3", "scan-1", "lookup-2", "remat inside-3", "while-1", "cast-2")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients(case, stage, mesh):
    fn = loss(case)
    _, ours, placed, batch = made(fn, stage, mesh)
    value, grads = jax.jit(jax.value_and_grad(ours))(placed, batch)
    want, want_grads = jax.value_and_grad(fn)(params(), data())
    np.testing.assert_allclose(value, want, rtol=1e-6)
    assert max_error(grads, want_grads) < (1e-2 if case == "cast" else 1e-5)


@pytest.mark.default_cases("scan", "keys")
@pytest.mark.parametrize("case", ["scan", "remat inside", "nested", "keys"])
def test_forward_and_second_derivatives(case, mesh):
    """`jvp`, and a Hessian times a vector both ways round."""
    fn = loss(case)
    _, ours, placed, batch = made(fn, 3, mesh)
    for derivative in (
        lambda f: lambda p, x: jax.jvp(lambda p: f(p, x), (p,), (p,))[1],
        lambda f: lambda p, x: jax.jvp(lambda p: jax.grad(f)(p, x), (p,), (p,))[1],
        lambda f: lambda p, x: jax.grad(lambda x: f(p, x))(x),
        lambda f: lambda p, x: jax.vmap(lambda x: f(p, x[None]))(x),
    ):
        got = jax.jit(derivative(ours))(placed, batch)
        assert max_error(got, derivative(fn)(params(), data())) < 1e-5


def gathers(fn, *args):
    return [e for e in equations(jax.make_jaxpr(fn)(*args)) if is_gather(e)]


@pytest.mark.parametrize("case", ["scan", "cast", "remat inside"])
def test_gathered_once_forward_and_once_backward(case, mesh):
    """Outside of the loops, and nothing that is gathered is kept in between."""
    _, ours, placed, batch = made(loss(case), 3, mesh)
    read = {"scan": 2, "cast": 1, "remat inside": 2}[case]
    forward = jax.make_jaxpr(lambda p: jax.vjp(lambda p: ours(p, batch), p))(placed)
    found = [e for e in equations(forward) if is_gather(e)]
    assert len(found) == read
    whole = [v.aval.shape for v in forward.jaxpr.outvars].count((DIM, DIM))
    assert whole <= len(params())  # the shards; a gathered weight, or its cast, would be one more
    assert not {v for e in found for v in e.outvars} & {v for v in forward.jaxpr.outvars if not hasattr(v, "val")}
    loops = [e for e in equations(forward) if e.primitive.name == "scan"]
    assert loops
    assert not any(is_gather(e) for loop in loops for e in equations(loop.params["jaxpr"]))


def test_a_weight_beyond_the_bound_is_gathered_in_every_round(mesh, monkeypatch):
    monkeypatch.setattr(weights_module, "LOOP_BYTES", 2 * DIM * 4)
    monkeypatch.setattr(weights_module, "LOOP_BUCKETS", 0)
    fn = loss("scan")
    _, ours, placed, batch = made(fn, 3, mesh)
    loops = [e for e in equations(jax.make_jaxpr(ours)(placed, batch)) if e.primitive.name == "scan"]
    shapes = [e.outvars[0].aval.shape for e in equations(loops[0].params["jaxpr"]) if is_gather(e)]
    assert shapes == [(DIM, DIM)]  # and not the bias
    assert max_error(jax.jit(jax.grad(ours))(placed, batch), jax.grad(fn)(params(), data())) < 1e-5


@pytest.mark.default_cases("3-bfloat16-0.02")
@pytest.mark.parametrize(("stage", "dtype", "tolerance"), [(1, None, 1e-5), (3, None, 1e-5), (3, "bfloat16", 2e-2)])
def test_an_lstm(stage, dtype, tolerance, mesh):
    """Through `apply_fn` of Flax: `nn.RNN` is a scan of a cell whose weights are constant, and cast to its dtype."""
    model = nn.RNN(nn.OptimizedLSTMCell(DIM, dtype=dtype))
    x = jax.random.normal(jax.random.key(1), (8, 6, DIM))
    weights = model.init(jax.random.key(0), x)["params"]
    plan = jzero.make_plan(weights, stage=stage, mesh=mesh, min_shard_bytes=0)

    def fn(p, x):
        return (model.apply({"params": p}, x) ** 2).mean()

    got = jax.jit(jax.grad(jzero.gather_on_use(fn, plan)))(plan.place(weights), plan.place_batch(x))
    want = jax.grad(fn)(weights, x)
    assert {g.dtype for g in jax.tree.leaves(got)} == {jnp.dtype("float32")}
    assert max_error(got, want) < tolerance
