"""Gather on use: the same losses and gradients as without it, weights that are never kept, and what it walks into."""

from __future__ import annotations

import re
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equations import equations, is_gather
from models import BATCH, DIM_IN, DIM_OUT, batch, create_state, loss_of, max_error, train_step

import jzero

P = jax.P


class Scanned(nn.Module):
    remat: bool

    @nn.compact
    def __call__(self, x):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return x + nn.tanh(nn.Dense(DIM_IN)(nn.LayerNorm()(x))), None

        layer = nn.remat(Layer, prevent_cse=False) if self.remat else Layer
        x, _ = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)()(x, None)
        return nn.Dense(DIM_OUT)(x)


class Remat(nn.Module):
    policy: str | None = None

    @nn.compact
    def __call__(self, x):
        policy = None if self.policy is None else getattr(jax.checkpoint_policies, self.policy)
        dense = nn.remat(nn.Dense, policy=policy)
        for _ in range(4):
            x = jnp.tanh(dense(DIM_IN)(x))
        return nn.Dense(DIM_OUT)(x)


class Dropout(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dense(DIM_OUT)(nn.Dropout(0.5, deterministic=not train)(nn.Dense(40)(x)))


@jax.custom_vjp
def scaled_matmul(x, w):
    return x @ w


scaled_matmul.defvjp(lambda x, w: (x @ w, (x, w)), lambda r, g: (g @ r[1].T, r[0].T @ g))


def plain_models():
    """Functions of (params, x), each with an equation of another kind that reads a weight."""
    rng = np.random.default_rng(0)
    w = {k: jnp.asarray(rng.standard_normal(s) / 5, jnp.float32) for k, s in WEIGHTS.items()}

    def tied(p, x):
        return (jnp.tanh(x @ p["a"]) @ p["b"]) @ p["b"].T @ p["c"]

    def cond(p, x):
        h = jnp.tanh(x @ p["a"])
        return jax.lax.cond(h.sum() > 0, lambda h: h @ p["c"], lambda h: -(h @ p["c"]), h)

    def while_loop(p, x):
        h = jax.lax.stop_gradient(jax.lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ p["d"]), x))
        return (x + h) @ p["a"] @ p["c"]

    def carried(p, x):
        w, ys = jax.lax.scan(lambda w, _: (w * 0.9, (x @ w).sum(0)), p["a"], None, length=3)
        return x @ w @ p["c"] + ys.mean()

    def custom(p, x):
        return scaled_matmul(jax.jit(lambda x, w: jnp.tanh(x @ w))(x, p["a"].astype(jnp.float32)), p["c"])

    def transposed(p, x):
        return x @ p["a"] @ jnp.swapaxes(p["ct"], 0, 1) + p["bias"][None, :]

    return w, [tied, cond, while_loop, carried, custom, transposed]


WEIGHTS = {
    "a": (DIM_IN, 40),
    "b": (40, 64),
    "c": (40, DIM_OUT),
    "ct": (DIM_OUT, 40),
    "d": (DIM_IN, DIM_IN),
    "bias": (DIM_OUT,),
}


def compare(fn, params, mesh, *args, **fields):
    """Loss and gradients of `fn(params, *args)` with gather on use against the plain ones, sharded."""
    plan = jzero.make_plan(params, stage=3, mesh=mesh, min_shard_bytes=0, **fields)
    gathered = jzero.gather_on_use(fn, plan)
    placed, split = plan.place(params), plan.place_batch(args)
    assert any(s != P() for s in (x.sharding.spec for x in jax.tree.leaves(placed)))
    loss, grads = jax.jit(jax.value_and_grad(gathered))(placed, *split)
    plain_loss, plain_grads = jax.value_and_grad(fn)(params, *args)
    np.testing.assert_allclose(loss, plain_loss, rtol=1e-5)
    assert max_error(grads, plain_grads) < 1e-5
    return plan


KEPT = {"reshard_after_forward": False}


@pytest.mark.default_cases("0-dropped", "1-dropped", "2-kept", "3-dropped", "4-dropped", "5-kept")
@pytest.mark.parametrize("fields", [{}, KEPT], ids=["dropped", "kept"])
@pytest.mark.parametrize("index", range(6))
def test_every_kind_of_equation(index, fields, mesh):
    params, models = plain_models()
    data = batch()
    compare(
        lambda p, x, y: jnp.mean((models[index](p, x) - y) ** 2), params, mesh, data["x"], data["y"], **fields
    )


MATMULS = {  # whose results are wider than the weight
    "activations": lambda x, w: x @ w,
    "asked": lambda x, w: jax.lax.dot(x.astype("bfloat16"), w, preferred_element_type=jnp.float32),
    "of its columns": lambda x, w: jnp.einsum("md,bd->bm", w.T, x),
}


@pytest.mark.default_cases("activations-dropped", "asked-reduce", "of its columns-kept")
@pytest.mark.parametrize("fields", [{}, KEPT, {"reduce_dtype": "bfloat16"}], ids=["dropped", "kept", "reduce"])
@pytest.mark.parametrize("way", MATMULS)
def test_a_matmul_wider_than_its_weight(way, fields, mesh):
    """Gradients are sums in float32, rounded once to bfloat16 (8 bits); with `reduce_dtype` each device rounds."""
    data, dot, keys = batch(), MATMULS[way], jax.random.split(jax.random.key(0), 2)
    shapes = zip(keys, ((DIM_IN, 40), (40, DIM_OUT)), strict=True)
    params = [jax.random.normal(k, s, "bfloat16") / 5 for k, s in shapes]
    plan = jzero.make_plan(params, stage=3, mesh=mesh, min_shard_bytes=0, **fields)

    def fn(p, x, y):
        return jnp.mean((dot(jnp.tanh(dot(x, p[0])), p[1]) - y) ** 2)

    args = data["x"], data["y"]
    loss, grads = jax.jit(jax.value_and_grad(jzero.gather_on_use(fn, plan)))(
        plan.place(params), *plan.place_batch(args)
    )
    want, wanted = jax.value_and_grad(fn)(params, *args)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    for a, b in zip(grads, wanted, strict=True):
        assert a.dtype == jnp.bfloat16
        assert a.sharding.spec != P()
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        assert abs(a - b).max() <= abs(b).max() / (64 if "reduce_dtype" in fields else 256)


@pytest.mark.default_cases("dropped-Scanned", "kept-Remat")
@pytest.mark.parametrize(
    "model",
    [Scanned(False), Scanned(True), Remat(), Remat("everything_saveable")],
    ids=["Scanned", "Scanned, remat", "Remat", "everything saved"],
)
@pytest.mark.parametrize(
    "fields", [{"prefetch": 1}, {"prefetch": 3}, KEPT], ids=["dropped", "prefetch 3", "kept"]
)
def test_linen_models(model, fields, mesh):
    data = batch()
    params = model.init(jax.random.key(0), data["x"])["params"]
    plan = compare(
        lambda p, x, y: loss_of(model.apply, p, {"x": x, "y": y}),
        params,
        mesh,
        data["x"],
        data["y"],
        **fields,
    )
    if isinstance(model, Scanned):
        stacked = [x for x in plan.layouts if x.scanned]
        assert stacked
        assert all(not x.stored or x.stored[0] is None for x in stacked), "the scanned dim must not be split"


def test_dropout_and_static_arguments(mesh):
    model, data, key = Dropout(), batch(), jax.random.key(3)
    params = model.init(jax.random.key(0), data["x"])["params"]
    plan = jzero.make_plan(params, stage=3, mesh=mesh, min_shard_bytes=0)
    apply = jzero.gather_on_use(model.apply, plan)
    args = {"train": True, "rngs": {"dropout": key}}
    want = model.apply({"params": params}, data["x"], **args)
    got = jax.jit(lambda p, x: apply({"params": p}, x, **args))(
        plan.place(params), plan.place_batch(data)["x"]
    )
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bucket_bytes", [None, 64], ids=["one bucket", "cut"])
def test_rows_of_a_gathered_table_are_arrays_of_their_own(bucket_bytes, mesh):
    """Else XLA looks them up again in the backward pass of a norm that reads them: the table is alive until then."""
    params = {"table": jnp.ones((64, 16)), "w": jnp.ones((16, 16))}

    def loss_of(params, index):
        return jnp.sum((params["table"][index] @ params["w"]) ** 2)

    def barriers(stage):
        plan = jzero.make_plan(params, stage=stage, mesh=mesh, min_shard_bytes=0, bucket_bytes=bucket_bytes)
        rows = jax.ShapeDtypeStruct((8,), jnp.int32)
        text = jax.jit(jax.grad(jzero.gather_on_use(loss_of, plan))).lower(params, rows).as_text()
        return len(re.findall(r"optimization_barrier %\w+ : tensor<8x16xf32>", text))

    assert barriers(3) >= 1
    assert barriers(2) == 0


def test_the_gathered_weight_is_never_kept_for_the_backward_pass(mesh):
    """From the jaxpr of the forward pass: no gathered weight is among what it hands to the backward pass."""
    state = jzero.shard(create_state, stage=3, mesh=mesh, min_shard_bytes=0)
    data = jzero.plan_of(state).place_batch(batch())
    closed = jax.make_jaxpr(lambda p: jax.vjp(lambda p: loss_of(state.apply_fn, p, data), p))(state.params)
    assert [e for e in equations(closed) if is_gather(e)]
    whole = {v for e in closed.eqns if is_gather(e) for v in e.outvars}
    assert not whole & {v for v in closed.jaxpr.outvars if hasattr(v, "count") or not hasattr(v, "val")}


def test_compute_dtype_casts_on_the_shard(mesh):
    """fp32 weights, bf16 compute: the gather carries bf16, and the result is that of the cast params."""
    data = batch()
    params = {"a": jnp.ones((DIM_IN, 40)) / 7, "c": jnp.ones((40, DIM_OUT)) / 3}

    def fn(p, x):
        return (x.astype(p["a"].dtype) @ p["a"] @ p["c"]).astype(jnp.float32).sum()

    plan = jzero.make_plan(params, stage=3, mesh=mesh, min_shard_bytes=0, compute_dtype=jnp.bfloat16)
    cast = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    gathered = jax.jit(jzero.gather_on_use(fn, plan))
    x = plan.place_batch(data)["x"]
    np.testing.assert_allclose(gathered(plan.place(params), x), fn(cast, data["x"]), rtol=2e-2)
    gathers = [
        e for e in equations(jax.make_jaxpr(jzero.gather_on_use(fn, plan))(params, data["x"])) if is_gather(e)
    ]
    assert len(gathers) == 2
    assert all(e.outvars[0].aval.dtype == jnp.bfloat16 for e in gathers)


def test_a_param_that_is_returned_is_the_param_and_not_its_cast(mesh):
    params = {"w": jnp.full((64, 8), 1 / 3), "v": jnp.full((64,), 1 / 3), "z": jnp.full((64,), 1 + 1j)}
    params["half"] = params["v"].astype(jnp.bfloat16)
    plan = jzero.make_plan(params, stage=3, mesh=mesh, min_shard_bytes=0, compute_dtype="bfloat16")

    def fn(p, x):
        return x @ p["w"].astype(x.dtype), p, p["v"].astype(jnp.float32), p["half"].astype(jnp.float32)

    _, back, *wide = jax.jit(jzero.gather_on_use(fn, plan))(plan.place(params), plan.place_batch(jnp.ones((16, 64))))
    assert [(x.dtype, x.sharding.spec) for x in jax.tree.leaves(back)] == [(x.dtype, x.stored) for x in plan.layouts]
    jax.tree.map(np.testing.assert_array_equal, back, params)
    for x in wide:  # what it casts itself is what it has computed
        np.testing.assert_array_equal(x, params["half"].astype(jnp.float32), strict=True)


def test_compares_by_function_and_plan(mesh):
    plan = jzero.make_plan({"w": jnp.ones((64, 64))}, stage=3, mesh=mesh)
    again = jzero.make_plan({"w": jnp.ones((64, 64))}, stage=3, mesh=mesh)

    def make(scale):
        return lambda p, x: (x @ p["w"]).sum() * scale

    fn = make(2)
    assert jzero.gather_on_use(fn, plan) == jzero.gather_on_use(fn, again)
    assert hash(jzero.gather_on_use(fn, plan)) == hash(jzero.gather_on_use(fn, again))
    assert jzero.gather_on_use(fn, plan) != jzero.gather_on_use(make(2), plan)  # as two functions are, whatever they do


def test_a_function_that_does_not_take_the_params_first(mesh):
    plan = jzero.make_plan({"w": jnp.ones((64, 64))}, stage=3, mesh=mesh)
    fn = jzero.gather_on_use(lambda x, p: (x @ p["w"]).sum(), plan)
    with pytest.raises(ValueError, match=r"the first argument holds none of the plan's params.*\['w'\]"):
        jax.eval_shape(fn, jnp.ones((8, 64)), {"w": jnp.ones((64, 64))})


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_eager_call_with_a_whole_batch_warns(stage, mesh):
    state = jzero.shard(create_state, stage=stage, mesh=mesh, min_shard_bytes=0)
    plan, data = jzero.plan_of(state), batch()
    with pytest.warns(UserWarning, match=r"is not split over batch axes \('data',\).*plan.place_batch"):
        state.apply_fn({"params": state.params}, data["x"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = state.apply_fn({"params": state.params}, plan.place_batch(data)["x"])
    plain = create_state()
    np.testing.assert_allclose(out, plain.apply_fn({"params": plain.params}, data["x"]), rtol=1e-4, atol=1e-5)
    assert out.shape == (BATCH, DIM_OUT)


def test_a_loss_that_gathers_nothing_warns_once(mesh):
    state = jzero.shard(create_state, stage=3, mesh=mesh, min_shard_bytes=0, bucket_bytes=1001)  # a plan of its own
    data, apply = jzero.plan_of(state).place_batch(batch()), create_state().apply_fn

    def closes_over_the_model(state, data):
        grads = jax.grad(lambda p: loss_of(apply, p, data))(state.params)
        return state.apply_gradients(grads=grads)

    with pytest.warns(UserWarning, match=r"no weight was gathered where it is used.*state\.apply_fn") as found:
        state = jax.jit(closes_over_the_model)(state, data)
    assert [x.filename for x in found] == [__file__]  # not a line of jzero, Flax or JAX
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.jit(lambda *args: closes_over_the_model(*args))(state, data)
        state = jzero.shard(create_state, stage=3, mesh=mesh, min_shard_bytes=0, bucket_bytes=1002)
        jax.jit(train_step)(state, data)


def test_optax_loop_with_a_gathered_loss(mesh):
    """DESIGN (d) and (f): raw optax at stage 3, ten steps equal to the plain loop."""
    params, models = plain_models()
    plan = jzero.make_plan(params, stage=3, mesh=mesh, min_shard_bytes=0)
    tx, plain_tx = jzero.zero(optax.adam(1e-2), plan), optax.adam(1e-2)
    fn = lambda p, b: jnp.mean((models[0](p, b["x"]) - b["y"]) ** 2)  # noqa: E731

    def make(fn, tx):
        @jax.jit
        def step(params, state, batch):
            loss, grads = jax.value_and_grad(fn)(params, batch)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss

        return step

    ours, plain = make(jzero.gather_on_use(fn, plan), tx), make(fn, plain_tx)
    a, sa = plan.place(params), jax.jit(tx.init)(plan.place(params))
    b, sb = params, plain_tx.init(params)
    for i in range(10):
        a, sa, loss = ours(a, sa, plan.place_batch(batch(i)))
        b, sb, plain_loss = plain(b, sb, batch(i))
        np.testing.assert_allclose(loss, plain_loss, rtol=1e-5)
    assert [x.sharding.spec for x in jax.tree.leaves(a)] == [x.stored for x in plan.layouts]
    used = [k for k in params if k in ("a", "b", "c")]  # the rest has no gradient in this model
    assert max_error({k: a[k] for k in used}, {k: b[k] for k in used}) < 1e-4
