"""Gather on use in models of every kind: custom derivatives, Pallas, branches, loops, shared weights, Equinox.

Each case is a loss of params. Loss and gradients equal those without jzero, all gradients come back whole in value
and laid out as the plan says, and in the forward pass no gathered weight is handed to the backward pass.
"""

from __future__ import annotations

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equations import equations, is_gather
from flax import nnx
from gather_losses import (
    CASES,
    DIM,
    LAYERS,
    clipped_matmul,
    data,
    squared_matmul,
    through,
    weights,
)
from models import assert_batch_is_split, max_error

import jzero

P = jax.P


def compare(fn, params, mesh, *args, grad=jax.value_and_grad, jit=jax.jit, **fields):
    """Loss and gradients of `fn(params, *args)` with gather on use, sharded, against the plain ones."""
    plan = jzero.make_plan(params, stage=3, mesh=mesh, min_shard_bytes=0, **fields)
    placed, batch = plan.place(params), plan.place_batch(args)
    assert all(x.sharding.spec != P() for x in jax.tree.leaves(placed) if x.ndim > 1)
    assert_batch_is_split(batch)
    gathering = jzero.gather_on_use(fn, plan)
    loss, grads = jit(grad(gathering))(placed, *batch)
    want_loss, want = jit(grad(fn))(params, *args)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    assert max_error(grads, want) < 2e-6
    for g, x in zip(jax.tree.leaves(grads), plan.layouts, strict=True):
        laid_out = g.sharding.is_equivalent_to(plan.sharding(x.grad), g.ndim)
        assert laid_out or not jnp.any(g), x.name  # zeros of a weight that is not read lie as XLA likes
    return plan, jax.make_jaxpr(lambda p: jax.vjp(lambda p: gathering(p, *batch), p))(placed)


def kept_weights(closed):
    """Gathered weights that the forward pass hands to the backward pass, and how many it gathers in all."""
    gathers = [e for e in equations(closed) if is_gather(e)]
    whole = {v for e in gathers for v in e.outvars}
    return whole & {v for v in closed.jaxpr.outvars if not hasattr(v, "val")}, len(gathers)


@pytest.mark.default_cases(
    "custom_vjp-3",
    "custom_jvp-3",
    "cond-3",
    "switch-3",
    "while-3",
    "fori_loop-3",
    "scan-3",
    "scan in scan-1",
    "vmap-3",
    "tied-3",
    "cut-3",
    "unused-3",
)
@pytest.mark.parametrize("prefetch", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients(case, prefetch, mesh):
    fn = CASES[case]
    _, forward = compare(lambda p, x: (fn(p, x) ** 2).mean(), weights(), mesh, data(), prefetch=prefetch)
    kept, gathers = kept_weights(forward)
    assert not kept
    assert gathers


class Module(nnx.Module):
    """The weights, each in a Variable."""

    def __init__(self):
        for name, value in weights().items():
            setattr(self, name, nnx.Param(value))


@pytest.mark.default_cases("while")
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_with_nnx(case, mesh):
    def loss_fn(model, x):
        return (CASES[case]({name: getattr(model, name)[...] for name in weights()}, x) ** 2).mean()

    make = lambda: (model := Module(), nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param))  # noqa: E731
    model, optimizer = jzero.shard(make, stage=3, mesh=mesh, min_shard_bytes=0)
    run = jzero.jit(nnx.value_and_grad(jzero.gather_on_use(loss_fn, plan := jzero.plan_of(optimizer))), plan)
    want, grads = nnx.jit(nnx.value_and_grad(loss_fn))(Module(), data())
    found, got = run(model, data())
    np.testing.assert_allclose(found, want, rtol=1e-6)
    assert max_error(nnx.to_pure_dict(got), nnx.to_pure_dict(grads)) < 2e-6
    assert all(x.sharding.spec != P() for x in jax.tree.leaves(nnx.state(model)))


@pytest.mark.default_cases("cond", "scan", "tied")
@pytest.mark.parametrize("case", CASES)
def test_kept_for_the_backward_pass(case, mesh):
    """`reshard_after_forward=False`: the same numbers and layouts, and the backward pass gathers nothing."""

    def loss_fn(p, x):
        return (CASES[case](p, x) ** 2).mean()

    plan, forward = compare(loss_fn, weights(), mesh, data(), reshard_after_forward=False)
    in_all = gathers_of(jax.value_and_grad(jzero.gather_on_use(loss_fn, plan)), plan)
    assert in_all == kept_weights(forward)[1]
    dropped = jzero.make_plan(weights(), stage=3, mesh=mesh, min_shard_bytes=0)
    twice = gathers_of(jax.value_and_grad(jzero.gather_on_use(loss_fn, dropped)), dropped)
    assert in_all < twice or case == "while"  # whose backward pass reads no weight


def gathers_of(fn, plan):
    closed = jax.make_jaxpr(fn)(plan.place(weights()), plan.place_batch(data()))
    return sum(is_gather(e) for e in equations(closed))


class Scanned(nn.Module):
    """`nn.scan` with remat and dropout."""

    @nn.compact
    def __call__(self, x):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                y = nn.Dropout(0.4, deterministic=False)(nn.silu(nn.Dense(2 * DIM)(nn.LayerNorm()(x))))
                return x + nn.Dense(DIM)(y), None

        layer = nn.remat(Layer, prevent_cse=False)
        rngs = {"params": True, "dropout": True}
        x, _ = nn.scan(layer, variable_axes={"params": 0}, split_rngs=rngs, length=LAYERS)()(x, None)
        return nn.Dense(DIM)(x)


@pytest.mark.nightly
def test_linen_scan_with_dropout(mesh):
    model, keys = Scanned(), {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    params = model.init(keys, data())["params"]

    def loss_fn(p, x):
        return (model.apply({"params": p}, x, rngs={"dropout": jax.random.key(2)}) ** 2).mean()

    plan, _ = compare(loss_fn, params, mesh, data())
    assert any(x.scanned for x in plan.layouts)


class Net(eqx.Module):
    """Equinox: static fields, a list of layers, and a linear layer used twice."""

    layers: list
    shared: eqx.nn.Linear
    activation: object = eqx.field(static=True)

    def __init__(self):
        keys = jax.random.split(jax.random.key(0), 3)
        self.layers = [eqx.nn.Linear(DIM, DIM, key=k) for k in keys[:2]]
        self.shared = eqx.nn.Linear(DIM, DIM, key=keys[2])
        self.activation = jax.nn.silu

    def __call__(self, x):
        for layer in self.layers:
            x = self.activation(self.shared(layer(x)))
        return x


def test_equinox_partitioned(mesh):
    params, static = eqx.partition(Net(), eqx.is_inexact_array)

    def loss_fn(params, x):
        return (jax.vmap(eqx.combine(params, static))(x) ** 2).mean()

    compare(loss_fn, params, mesh, data(), grad=eqx.filter_value_and_grad, jit=eqx.filter_jit)


def test_equinox_whole_module(mesh):
    """`eqx.filter_value_and_grad` of a function of the module itself, with a plan of its arrays."""
    model = Net()
    plan = jzero.make_plan(eqx.filter(model, eqx.is_inexact_array), stage=3, mesh=mesh, min_shard_bytes=0)

    def loss_fn(model, x):
        return (jax.vmap(model)(x) ** 2).mean()

    arrays, static = eqx.partition(model, eqx.is_inexact_array)
    placed = eqx.combine(plan.place(arrays), static)
    fn = eqx.filter_jit(eqx.filter_value_and_grad(jzero.gather_on_use(loss_fn, plan)))
    loss, grads = fn(placed, plan.place_batch(data()))
    want_loss, want = eqx.filter_value_and_grad(loss_fn)(model, data())
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    assert max_error(eqx.filter(grads, eqx.is_array), eqx.filter(want, eqx.is_array)) < 2e-6


# --- the program compiled for 64 H100 -------------------------------------------------------------------------

WIDE, TOKENS, TURNS = 2048, 128, 5
POD_CASES = {
    "custom_vjp": through(clipped_matmul),
    "custom_jvp": through(squared_matmul),
    "cond": lambda p, x: jax.lax.cond(
        x.mean() > 0, lambda h: jnp.tanh(h @ p["a"]) @ p["b"], lambda h: h @ p["c"] @ p["b"], x
    ),
    "scan": lambda p, x: jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["stack"])[0] @ p["a"],
    "while": lambda p, x: (
        jax.lax.while_loop(
            lambda s: s[1] < TURNS,
            lambda s: (jnp.tanh(s[0] @ jax.lax.stop_gradient(p["d"])), s[1] + 1),
            (x, 0),
        )[0]
        @ p["a"]
    ),
}


@pytest.mark.default_cases("scan")
@pytest.mark.pod
@pytest.mark.parametrize("case", POD_CASES)
def test_compiled_for_a_pod(case):
    """Each weight is gathered once per use in the forward pass, and again where the backward pass reads it."""
    pod = jzero.pod("h100", hosts=8)
    mesh = pod.mesh({"data": 64})
    shapes = {"a": (WIDE, 2 * WIDE), "b": (2 * WIDE, WIDE), "c": (WIDE, 2 * WIDE), "d": (WIDE, WIDE)}
    shapes["stack"] = (LAYERS, WIDE, WIDE)
    params = {k: jax.ShapeDtypeStruct(s, jnp.bfloat16) for k, s in shapes.items()}
    plan = jzero.make_plan(params, stage=3, mesh=mesh)
    layouts = dict(zip(sorted(params), plan.layouts, strict=True))
    params = {
        k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=plan.sharding(layouts[k].stored))
        for k, x in params.items()
    }
    x = jax.ShapeDtypeStruct((64 * TOKENS, WIDE), jnp.bfloat16, sharding=plan.batch)
    fn = jzero.gather_on_use(lambda p, x: (POD_CASES[case](p, x).astype(jnp.float32) ** 2).mean(), plan)
    report = jzero.explain(pod.compile(jax.value_and_grad(fn), params, x), plan)
    gathered = sum(c.bytes * c.count * c.trips for c in report.collectives if c.op == "all-gather")
    size = {k: x.nbytes for k, x in layouts.items()}
    want = {  # x has no gradient: what it is multiplied by is not gathered again, unless a derivative reads it
        "custom_vjp": size["a"] + 2 * (size["b"] + size["c"]),
        "custom_jvp": 2 * (size["a"] + size["b"] + size["c"]),
        "cond": size["a"] + size["c"] + 4 * size["b"],  # both branches counted
        "scan": 2 * (size["stack"] + size["a"]),
        "while": size["a"] + size["d"],  # once for all turns
    }[case]
    assert gathered == pytest.approx(want, rel=0.02)
