"""`jzero.param_uses`: what a step does with its params, read from its trace."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jzero
from benchmarks import wire

F32, BF16 = np.dtype("float32"), jnp.dtype("bfloat16")


def uses(case, stage, mesh, metric=None):
    """Of a case of `benchmarks/wire.py`, by the last name of a param: its kinds, and all dtypes."""
    plain = wire.step_of(case)
    step = plain if metric is None else lambda state, batch: (plain(state, batch), metric(state, batch))

    def create():
        return TrainState.create(apply_fn=case.apply, params=case.init(), tx=optax.adamw(1e-3))

    state = jzero.abstract(create, stage=stage, mesh=mesh, min_shard_bytes=0)
    batch = jax.ShapeDtypeStruct((8, *case.example.shape), case.example.dtype)
    found = jzero.param_uses(step, state, batch)
    return {k.removesuffix("']").split("['", 1)[1]: v for k, v in found.items()}


def kinds(found, end):
    (some,) = {tuple(use.kind for use in v) for k, v in found.items() if k.endswith(end)}
    return some


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("form", ["", "scan", "remat", "scan remat"])
def test_a_gpt(stage, form, mesh):
    fields = dict.fromkeys(form.split(), True)
    found = uses(
        wire.gpt(32, 2, 2, dtype="float32", param_dtype="bfloat16", tied=True, **fields), stage, mesh
    )
    for name in ("qkv']['kernel", "out']['kernel", "up']['kernel", "down']['kernel"):
        assert kinds(found, name) == ("matmul",)
    assert kinds(found, "norm_mlp']['scale") == ("matmul" if "remat" in form else "kept",)
    assert kinds(found, "norm_out']['scale") == ("kept",)
    assert kinds(found, "embedding") == ("lookup", "matmul")
    lookup, matmul = next(v for k, v in found.items() if k.endswith("embedding"))
    assert (lookup.rows, matmul.rows) == (8 * wire.SEQ, 0)
    assert (lookup.dtype, matmul.dtype) == (F32, F32)


def test_a_weight_of_a_loop_is_used_once_and_one_of_the_batch_is_read_forward_alone(mesh):
    found = uses(wire.lstm(), 3, mesh)
    assert {k: v[0].kind for k, v in found.items() if k.endswith("kernel")} == {
        **{f"params']['cell']['h{i}']['kernel": "matmul" for i in "fgio"},
        **{f"params']['cell']['i{i}']['kernel": "kept" for i in "fgio"},
    }
    assert all(len(v) == 1 for v in found.values())


@pytest.mark.parametrize("form", ["", "scan", "remat"])
def test_a_forward_pass_outside_of_grad_gathers_and_makes_no_gradient(form, mesh):
    case = wire.gpt(32, 2, 2, dtype="float32", param_dtype="float32", tied=True, **dict.fromkeys(form.split(), True))
    found = uses(case, 3, mesh, lambda state, batch: jnp.mean(state.apply_fn(state.params, batch)))
    assert kinds(found, "qkv']['kernel") == ("matmul", "evaluated")
    assert kinds(found, "embedding") == ("lookup", "matmul", "evaluated", "evaluated")
    assert uses(case, 3, mesh, lambda state, batch: optax.global_norm(state.params)) == uses(case, 3, mesh)


def test_what_is_evaluated_is_gathered_once_more_and_not_reduced(mesh):
    plan = jzero.make_plan({"w": jax.ShapeDtypeStruct((64, 64), F32)}, stage=3, mesh=mesh, min_shard_bytes=0)
    psi = [jzero.estimate(plan, uses={"['w']": words}).wire_psi for words in (["matmul"], ["matmul", "evaluated"])]
    assert psi == pytest.approx([3, 4])


@pytest.mark.parametrize("jit", [nnx.jit, jax.jit, lambda fn: fn])
def test_nnx(jit, mesh):
    def create():
        model = nnx.Sequential(*(nnx.Linear(16, 16, dtype=BF16, rngs=nnx.Rngs(i)) for i in range(2)))
        return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    model, optimizer = jzero.abstract(create, stage=2, mesh=mesh, min_shard_bytes=0)

    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    found = jzero.param_uses(jit(step), model, optimizer, jax.ShapeDtypeStruct((8, 16), F32))
    kernels = [v for k, v in found.items() if "kernel" in k]
    assert [[(use.kind, use.dtype) for use in v] for v in kernels] == [[("kept", BF16)], [("matmul", BF16)]]


def test_what_is_traced_for_it_is_not_used_for_the_step(mesh):
    """A jitted function inside of the step, which JAX traces once and keeps."""
    state = jzero.shard(
        TrainState.create(apply_fn=lambda p, x: x @ p["w"], params={"w": jnp.ones((64, 64))}, tx=optax.sgd(0.1)),
        stage=3, mesh=mesh, min_shard_bytes=0,
    )  # fmt: skip
    inner = jax.jit(lambda state, params, x: state.apply_fn(params, x))

    @jax.jit
    def step(state, x):
        grads = jax.grad(lambda p: (inner(state, p, x) ** 2).mean())(state.params)
        return state.apply_gradients(grads=grads)

    x = jax.ShapeDtypeStruct((8, 64), F32)
    assert jzero.param_uses(step, state, x).keys() == {"['w']"}
    assert "jzero.gather_weight" in step.lower(state, x).as_text(debug_info=True)


def test_a_frozen_weight_that_is_used_by_index_is_cut_on_its_shard(mesh):
    """As in the LoRA of openpi: each part is gathered by itself, half of the bytes of the whole."""
    shapes = {name: jax.ShapeDtypeStruct((2, 64, 64), BF16) for name in ("base", "lora")}
    plan = jzero.make_plan(
        shapes, stage=3, mesh=mesh, min_shard_bytes=0, scan_axes={}, trainable=lambda path, _: path == ("lora",)
    )

    def loss(params, x):
        return sum(((x @ params["lora"][i] + x @ params["base"][i]) ** 2).mean() for i in (0, 1))

    step = jax.grad(jzero.gather_on_use(loss, plan))
    found = jzero.param_uses(step, plan.shapes, jax.ShapeDtypeStruct((8, 64), F32), plan=plan)
    assert [[use.part for use in some] for some in found.values()] == [[0.5, 0.5], [0.5, 0.5]]
    step = jax.grad(jzero.gather_on_use(lambda p, x: (x @ (p["lora"][0] * p["lora"][1])).mean(), plan))
    found = jzero.param_uses(step, plan.shapes, jax.ShapeDtypeStruct((8, 64), F32), plan=plan)
    assert [use.part for use in found["['lora']"]] == [0.5, 0.5]


TERMS = {  # of a loss: what it adds, and how often it counts as a use of the weight
    "decay": (lambda w, x: (w**2).sum(), 0),
    "norm": (lambda w, x: optax.global_norm([w]), 0),
    "vdot": (lambda w, x: jnp.vdot(w, w), 0),
    "l1 of rows": (lambda w, x: jnp.abs(w).sum(0).max(), 0),
    "in remat": (jax.checkpoint(lambda w, x: jnp.sin(w**2).sum()), 0),
    "meets the batch": (lambda w, x: (x * (w**2).sum(0)).sum(), 1),
    "mixes": (lambda w, x: jnp.cumsum(w, 0).max(), 1),
    "product": (lambda w, x: ((w.T @ w) ** 2).sum(), 1),
}


@pytest.mark.parametrize("term", TERMS)
def test_a_term_of_weights_alone_is_computed_on_shards(term, mesh):
    """Compiled for 8 H200, the first three send what the same step sends without them."""
    plan = jzero.make_plan({"w": jax.ShapeDtypeStruct((64, 64), F32)}, stage=3, mesh=mesh, min_shard_bytes=0)
    more, times = TERMS[term]
    step = jax.grad(lambda p, x: jnp.sin(x @ p["w"]).sum() + more(p["w"], x))
    found = jzero.param_uses(step, plan.shapes, jax.ShapeDtypeStruct((8, 64), F32), plan=plan)
    assert len(found["['w']"]) == 1 + times


def test_the_estimate_says_why(mesh):
    plan = jzero.make_plan({"w": jax.ShapeDtypeStruct((64, 64), BF16)}, stage=3, mesh=mesh, min_shard_bytes=0)
    step = jax.grad(lambda p, x: jnp.tanh(jnp.tanh(x * p["w"][0, 0]) @ p["w"].astype(F32)).sum())
    dot = functools.partial(jzero.param_uses, plan=plan)(step, plan.shapes, jax.ShapeDtypeStruct((8, 64), F32))
    e = jzero.estimate(plan, uses={"['w']": dot["['w']"][-1:]})
    assert e.wire_psi == pytest.approx(4)
    assert "dtype of compute  +1.00 Psi" in str(e)
    assert jzero.estimate(plan).reasons == ()
    e = jzero.estimate(plan, uses={"['w']": dot["['w']"][-1:]}, accumulate=4)
    assert "micro-batches after the first" in str(e)
    whole = 3 * plan.param_bytes * 7 / 8
    assert e.wire == pytest.approx(whole + sum(size for _, size in e.reasons))
    narrow = jzero.make_plan(plan.shapes, stage=3, mesh=mesh, min_shard_bytes=0, reduce_dtype="bfloat16")
    assert jzero.estimate(narrow, uses={"['w']": dot["['w']"][-1:]}).wire_psi == pytest.approx(3)


def test_refusals(mesh):
    with pytest.raises(TypeError, match=r"jzero\.param_uses"):
        jzero.param_uses(lambda x: x, jnp.ones(8))
    plan = jzero.make_plan({"w": jnp.ones((64, 64))}, mesh=mesh)
    with pytest.raises(TypeError, match=r"jzero\.param_uses"):
        jzero.param_uses(3, plan=plan)  # pyright: ignore[reportArgumentType]
