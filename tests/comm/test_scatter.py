"""Gradients along several or padded dims: the same values as without sharding, reduce-scattered, never whole."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equations import equations
from jax.sharding import AxisType
from layouts import mesh_of
from models import assert_batch_is_split, max_error

import jzero
from jzero.comm.reduce_scatter import needs_scatter

P = jax.P
SHAPES = {  # no dim is a multiple of 3 or 5
    "table": (34, 44),
    "up": (44, 2, 23),
    "kernel": (2, 2, 2, 11),
    "down": (77, 44),
    "experts": (2, 44, 23),
    "bias": (44,),
}
ROWS = 60


def weights(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return {k: jnp.asarray(rng.standard_normal(s) / 4, dtype) for k, s in SHAPES.items()}


def data():
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 34, (ROWS, 5), dtype=np.int32)
    return tokens, rng.standard_normal((ROWS, 5, 7, 2), dtype=np.float32)


def loss_fn(p, tokens, image):
    """A lookup, a matmul to two dims, a convolution, a transposed weight, experts, a bias."""
    h = jnp.take(p["table"], tokens, axis=0, mode="clip")
    q = jnp.einsum("bsd,dhk->bshk", h, p["up"])
    c = jax.lax.conv_general_dilated(
        image.astype(h.dtype), p["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    d = c.mean(1).reshape(-1, 77) @ p["down"] + p["bias"]
    e = jnp.einsum("ebd,edk->ebk", jnp.stack([d, d * 2]), p["experts"])
    back = jnp.tanh(h) @ p["table"].T
    return (q**2).mean() + (e**2).mean() + (back**2).mean() + (d**2).mean()


def compare(plan, params, grad, *, least, tolerance=2e-6):
    batch = plan.place_batch(data())
    assert_batch_is_split(batch, plan.batch_parts)
    fn = grad(loss_fn, plan)
    loss, grads = jax.jit(fn)(plan.place(params), *batch)
    want_loss, want = jax.value_and_grad(loss_fn)(params, *data())
    np.testing.assert_allclose(np.float32(loss), np.float32(want_loss), rtol=max(1e-6, tolerance))
    assert max_error(grads, want) < tolerance
    closed = jax.make_jaxpr(fn)(plan.place(params), *batch)
    scattered = [e for e in equations(closed) if e.primitive.name == "reduce_scatter"]
    assert len(scattered) >= least, "nothing was scattered: XLA would all-reduce whole gradients"
    return scattered


def on_use(loss_fn, plan):
    return jax.value_and_grad(jzero.gather_on_use(loss_fn, plan))


LAYOUTS = {
    "six devices": lambda: ({}, mesh_of(6)),
    "five devices": lambda: ({}, mesh_of(5)),
    "replicas": lambda: (
        {"axis": "data", "batch_axis": ("replica", "data")},
        mesh_of(6, replica=2, data=3),
    ),
    "params within the node": lambda: (
        {"axis": ("replica", "data"), "param_axis": "data"},
        mesh_of(6, replica=2, data=3),
    ),
}


@pytest.mark.default_cases("six devices-3")
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", LAYOUTS)
def test_equals_the_plain_gradients(name, stage):
    fields, mesh = LAYOUTS[name]()
    if stage == 2 and "param_axis" in fields:
        pytest.skip("params are whole at stage 2")
    params = weights()
    plan = jzero.make_plan(params, stage=stage, mesh=mesh, min_shard_bytes=0, bucket_bytes=512, **fields)
    odd = [x for x in plan.layouts if not x.vector and needs_scatter(x.shape, x.grad, plan)]
    assert {"table", "up", "kernel"} <= {x.keys[0] for x in odd}
    compare(plan, params, on_use, least=4)


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [2, 3])
def test_16_bit_weights(stage):
    params = weights(jnp.bfloat16)
    plan = jzero.make_plan(params, stage=stage, mesh=mesh_of(6), min_shard_bytes=0, bucket_bytes=512)
    scattered = compare(plan, params, on_use, least=5, tolerance=3e-2)
    assert {e.outvars[0].aval.dtype.name for e in scattered} == {"bfloat16"}


@pytest.mark.nightly
def test_reduced_in_fp32():
    params = weights(jnp.bfloat16)
    plan = jzero.make_plan(
        params, stage=2, mesh=mesh_of(6), min_shard_bytes=0, bucket_bytes=512, reduce_dtype="float32"
    )
    scattered = compare(plan, params, on_use, least=4, tolerance=3e-2)
    assert "float32" in {e.outvars[0].aval.dtype.name for e in scattered}


@pytest.mark.default_cases("2-step")
@pytest.mark.parametrize(
    ("stage", "reduce"), [(1, "step"), (2, "step"), (2, "microbatch"), (3, "microbatch")]
)
def test_micro_batches(stage, reduce):
    """Sums lie on padded pieces: at no time is one of them whole."""
    params = weights()
    plan = jzero.make_plan(params, stage=stage, mesh=mesh_of(6), min_shard_bytes=0, bucket_bytes=512)
    grad = functools.partial(
        jzero.value_and_grad, accumulate=2, reduce=reduce, batch_argnums=(1, 2), coupled="allow"
    )
    compare(plan, params, grad, least=5)
    sums = jax.make_jaxpr(grad(loss_fn, plan))(plan.place(params), *plan.place_batch(data()))
    if reduce == "microbatch":
        padded = {x.state_shape for x in plan.layouts if x.padded}
        carried = {v.aval.shape for e in equations(sums) if e.primitive.name == "scan" for v in e.outvars}
        assert padded
        assert padded <= carried


def test_beside_tensor_parallelism():
    params = {k: v for k, v in weights().items() if k != "experts"}
    mesh = jax.make_mesh(
        (2, 3), ("model", "data"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:6]
    )
    specs = {k: P(None, "model") if k == "table" else P() for k in params}
    plan = jzero.make_plan(params, stage=2, mesh=mesh, min_shard_bytes=0, bucket_bytes=512, param_specs=specs)

    def loss(p, tokens, image):
        return loss_fn({**p, "experts": jnp.zeros(SHAPES["experts"])}, tokens, image)

    batch = plan.place_batch(data())
    got = jax.jit(on_use(loss, plan))(plan.place(params), *batch)
    want = jax.value_and_grad(loss)(params, *data())
    assert max_error(got, want) < 2e-6
    closed = jax.make_jaxpr(on_use(loss, plan))(plan.place(params), *batch)
    assert sum(e.primitive.name == "reduce_scatter" for e in equations(closed)) >= 4


@pytest.mark.default_cases("None-step-2", "bfloat16-plain-3", "bfloat16-microbatch-2")
@pytest.mark.parametrize(
    ("mode", "stage"),
    [(mode, stage) for mode in ("plain", "step", "microbatch") for stage in (1, 2, 3) if (mode, stage) != ("step", 3)],
)
@pytest.mark.parametrize("reduce_dtype", [None, "bfloat16"])
def test_a_dim_that_both_axes_cut(reduce_dtype, mode, stage):
    """The pieces of a dim that tensor parallelism and ZeRO cut together keep their places; whole params beside them."""
    rng = np.random.default_rng(0)
    shapes = {"table": (11, 12), "kernel": (12, 20), "plain": (20, 8)}
    params = {k: jnp.asarray(rng.standard_normal(s), jnp.float32) for k, s in shapes.items()}
    specs = {"table": P(None, "model"), "kernel": P(None, "model"), "plain": P()}
    auto = {"axis_types": (AxisType.Auto,) * 2, "devices": jax.devices()[:4]}
    mesh = jax.make_mesh((2, 2), ("data", "model"), **auto)
    plan = jzero.make_plan(
        params, stage=stage, mesh=mesh, min_shard_bytes=0, param_specs=specs, reduce_dtype=reduce_dtype
    )
    assert P(None, ("model", "data")) in [x.state for x in plan.layouts]

    def loss(p, tokens, want):
        return ((jnp.tanh(p["table"][tokens]) @ p["kernel"] @ p["plain"] - want) ** 2).mean()

    batch = rng.integers(0, 11, (16, 3)), rng.standard_normal((16, 3, 8)).astype(np.float32)
    grad = on_use(loss, plan)
    if mode != "plain":
        grad = jzero.value_and_grad(loss, plan, accumulate=2, reduce=mode, batch_argnums=(1, 2))
    got = jax.jit(grad)(plan.place(params), *plan.place_batch(batch))
    want = jax.value_and_grad(loss)(params, *batch)
    assert max_error(got, want) < (2e-6 if reduce_dtype is None else 2e-2)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sums_of_16_bits_beside_another_axis(dtype):
    """XLA for CPUs aborts the process at a sum of bf16 over some of the axes; on GPUs it stays a sum of bf16."""
    params = {"w": jnp.ones((7, 15), dtype)}  # pieces that nothing divides: scattered by jzero
    auto = {"axis_types": (AxisType.Auto,) * 2, "devices": jax.devices()[:4]}
    mesh = jax.make_mesh((2, 2), ("data", "model"), **auto)
    plan = jzero.make_plan(params, stage=3, mesh=mesh, min_shard_bytes=0)
    x = np.random.default_rng(0).standard_normal((8, 7)).astype(dtype)

    def loss(p, x):
        return ((x @ p["w"]) ** 2).mean()

    got = jax.jit(on_use(loss, plan))(plan.place(params), plan.place_batch(x))
    assert max_error(got, jax.value_and_grad(loss)(params, x)) < 2e-2
    pod = jzero.pod("h200", gpus_per_host=4).mesh({"data": 2, "model": 2})
    plan = jzero.make_plan(params, stage=3, mesh=pod, min_shard_bytes=0)
    closed = jax.make_jaxpr(on_use(loss, plan))(plan.shapes, jax.ShapeDtypeStruct(x.shape, dtype))
    sums = [e.outvars[0].aval.dtype for e in equations(closed) if e.primitive.name == "reduce_scatter"]
    assert sums
    assert set(sums) == {jnp.dtype(dtype)}


@pytest.mark.pod
def test_only_the_data_axis_is_used_beside_tensor_parallelism():
    """XLA's own way with a reduce-scatter of an operand that is split: it gathers it over the other axis first."""
    pod = jzero.pod("h200", gpus_per_host=6)
    params, spec = {"w": jax.ShapeDtypeStruct((256, 512), jnp.float32)}, {"w": P(None, "model")}
    mesh = pod.mesh({"data": 3, "model": 2})
    plan = jzero.make_plan(params, stage=2, mesh=mesh, min_shard_bytes=0, param_specs=spec)
    fn = on_use(lambda p, x: jnp.mean((x @ p["w"]) ** 2), plan)
    batch = jax.ShapeDtypeStruct((3 * 512, 256), jnp.float32)
    report = jzero.explain(pod.compile(fn, plan.shapes, batch, plan=plan), plan)
    moved = [(c.op, c.axes, c.bytes) for c in report.collectives if c.bytes > 2**10]
    assert ("reduce-scatter", ("data",), 258 * 256 * 4) in moved
    assert {axes for _, axes, _ in moved} == {("data",)}


@pytest.mark.skipif(
    jax.__version_info__ >= (0, 11),
    reason="XLA of jax 0.12 aborts: pieces of unequal size under vmap (hlo_sharding_util.cc, `sliced.has_value()`)",
)
def test_gradients_of_each_example():
    """Under `vmap` a gradient is not summed, and there is nothing to scatter."""
    params = {k: v for k, v in weights().items() if k in ("up", "bias")}
    plan = jzero.make_plan(params, stage=3, mesh=mesh_of(6), min_shard_bytes=0, bucket_bytes=512)

    def loss(p, x):
        return (jnp.einsum("bd,dhk->bhk", x + p["bias"], p["up"]) ** 2).mean()

    x = np.random.default_rng(2).standard_normal((12, 44), dtype=np.float32)
    fn = jzero.gather_on_use(loss, plan)
    ours = jax.jit(jax.vmap(jax.grad(lambda p, x: fn(p, x[None])), in_axes=(None, 0)))
    each = jax.vmap(jax.grad(lambda p, x: loss(p, x[None])), in_axes=(None, 0))
    assert max_error(ours(plan.place(params), plan.place_batch(x)), each(params, x)) < 2e-5


@pytest.mark.parametrize("stage", [2, 3])
def test_checkpoint_policies_see_the_products(stage):
    """`dots_saveable` saves of a block what it saves where the devices divide the weights."""

    def saved(width):
        params = {k: jnp.ones((width, width)) for k in "ab"}
        plan = jzero.make_plan(params, stage=stage, mesh=mesh_of(6), min_shard_bytes=0, bucket_bytes=512)
        assert all(x.padded == (width == 44) for x in plan.layouts)
        policy = jax.checkpoint_policies.dots_saveable
        block = jax.checkpoint(lambda p, x: jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]), policy=policy)
        fn = jzero.gather_on_use(lambda p, x: (block(p, x) ** 2).mean(), plan)
        x = plan.place_batch(jnp.ones((12, width)))
        closed = jax.make_jaxpr(lambda p: jax.vjp(lambda p: fn(p, x), p))(params)
        made = {v for e in equations(closed) for v in e.outvars}
        return sum(v in made and v.aval.shape == x.shape for v in closed.jaxpr.outvars)

    assert saved(44) == saved(48) >= 2
