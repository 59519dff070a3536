"""Buckets: what goes together, that numbers stay, and what the programs compiled for 8 and 64 H200 do with them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jaxlib
import models as m
import numpy as np
import pytest
from programs import SEQ, cached, gpt_state, gpt_step

import jzero
from benchmarks import buckets as bench
from benchmarks import peak
from jzero.core import jaxprs, xla_options
from jzero.core.linear import linear
from jzero.core.products import dot_gradient
from jzero.gather import buckets
from jzero.gather.weight_graph import WeightGraph

MIB = 2**20


def mlp(params, x):
    for i in range(len(params)):
        x = jnp.tanh(x @ params[i])
    return x


def found(fn, params, x, limit, prefetch=1):
    """The names of the weights in each bucket, and the ties."""
    jaxpr, consts = jaxprs.trace(lambda *flat: [fn(list(flat[:-1]), flat[-1])], *params, x)
    flat = WeightGraph(jaxpr, consts, [True] * len(params) + [False])
    sizes = {k: p.nbytes for k, p in zip(flat.ins, params, strict=False)}
    rows = buckets.find_buckets(flat, sizes, limit, prefetch)
    number = {k: i for i, k in enumerate(flat.ins)}
    names = [[number[flat.root(k)] for k in b.weights] for b in rows]
    return names, [
        (t.after, [number[flat.root(k)] for k in t.gather], [number[flat.root(k)] for k in t.reduce])
        for t in buckets.find_ties(flat, rows, prefetch)
    ]


def squares(count, dim=16):
    return [jnp.ones((dim, dim)) for _ in range(count)]


@pytest.mark.parametrize(
    ("limit", "want"),
    [
        (1, [[0], [1], [2], [3], [4]]),
        (2 * 1024, [[0, 1, 2], [3, 4]]),  # what is left over goes with its neighbour
        (3 * 1024, [[0, 1, 2, 3, 4]]),
        (10**9, [[0, 1, 2, 3, 4]]),
    ],
)
def test_small_weights_share_a_bucket(limit, want):
    assert found(mlp, squares(5), jnp.ones((2, 16)), limit)[0] == want


def test_a_bucket_begins_where_its_first_weight_is_read():
    """A scale is broadcast before it meets an activation; a tie behind that would not hold its gradient."""

    def scaled(scale, weight, x):
        x = x - jnp.mean(x)
        return [(x * jnp.broadcast_to(scale, x.shape)) @ weight]

    jaxpr, consts = jaxprs.trace(scaled, jnp.ones(16), jnp.ones((16, 16)), jnp.ones((2, 16)))
    flat = WeightGraph(jaxpr, consts, [True, True, False])
    sizes = dict.fromkeys(flat.ins[:2], 1024)
    (tie,) = buckets.find_ties(flat, buckets.find_buckets(flat, sizes, 10**6, 1), 1)
    first = next(i for i, node in enumerate(flat.nodes) if flat.ins[0] in flat.weights_of(node))
    assert flat.nodes[first].name == "broadcast_in_dim"
    assert tie.at == first
    assert set(tie.reduce) == set(flat.ins[:2])


def test_each_bucket_is_tied_to_the_one_before():
    _, ties = found(mlp, squares(4), jnp.ones((2, 16)), 1)
    assert ties == [(False, [1], [0, 1]), (False, [2], [2]), (False, [3], [3]), (False, [], [])]
    _, ties = found(mlp, squares(4), jnp.ones((2, 16)), 1, prefetch=2)
    assert [gather for _, gather, _ in ties] == [[2], [3], [], []]


def test_what_comes_after_a_loop_waits_for_its_end():
    def fn(params, x):
        x = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params[0])[0]
        return x @ params[1] @ params[2]

    names, ties = found(fn, [jnp.ones((4, 16, 16)), *squares(2)], jnp.ones((2, 16)), 1)
    assert names == [[0], [1], [2]]
    assert ties == [(False, [], []), (True, [1], [1]), (False, [2], [2]), (False, [], [])]


def test_a_region_that_holds_a_bucket_has_its_own_inside():
    def fn(params, x):
        for i in (0, 3):
            x = jax.checkpoint(mlp)(params[i : i + 3], x)
        return x @ params[6]

    names, ties = found(fn, squares(7), jnp.ones((2, 16)), 1024)
    assert names == [[0, 1, 2], [3, 4, 5], [6]]
    assert [gather for _, gather, _ in ties if gather] == [[3], [6]]  # of a region the first bucket alone
    assert [(after, reduce) for after, _, reduce in ties if reduce] == [(True, [6])]
    assert found(fn, squares(7), jnp.ones((2, 16)), 10**9)[0] == [[0, 1, 2, 3, 4, 5, 6]]


def test_a_jitted_part_and_a_cast_are_seen_through():
    def fn(params, x):
        inner = jax.jit(lambda w, x: jnp.tanh(x @ w.astype(jnp.bfloat16)))
        for w in params:
            x = inner(w, x)
        return x

    assert found(fn, squares(3), jnp.ones((2, 16), jnp.bfloat16), 1)[0] == [[0], [1], [2]]


@pytest.mark.default_cases("2-1-1", "2-600-3", "3-1-3", "3-2000-1")
@pytest.mark.parametrize("prefetch", [1, 3])
@pytest.mark.parametrize("bucket", [1, 600, 2000, 10**9])
@pytest.mark.parametrize("stage", [2, 3])
def test_numbers_stay(mesh, stage, bucket, prefetch):
    rng = np.random.default_rng(0)
    params = {
        "blocks": [rng.normal(size=(16, 16)).astype(np.float32) for _ in range(4)],
        "stack": rng.normal(size=(3, 16, 16)).astype(np.float32),
        "embed": rng.normal(size=(32, 16)).astype(np.float32),
        "scale": rng.normal(size=(16,)).astype(np.float32),
    }
    params = jax.tree.map(lambda x: x / 4, params)
    tokens = rng.integers(0, 32, (16, 5), np.int32)

    def loss(p, tokens):
        x = p["embed"][tokens] * p["scale"]
        for i in (0, 2):
            x = x + jax.checkpoint(mlp)(p["blocks"][i : i + 2], x)
        x = jax.lax.scan(lambda x, w: (x + jax.jit(jnp.tanh)(x @ w), None), x, p["stack"])[0]
        return jnp.mean(jnp.square(x @ p["embed"].T))

    plan = jzero.make_plan(
        params, stage=stage, mesh=mesh, min_shard_bytes=0, bucket_bytes=bucket, prefetch=prefetch
    )
    placed, batch = plan.place(params), plan.place_batch(tokens)
    m.assert_batch_is_split(batch)
    got = jax.jit(jax.value_and_grad(jzero.gather_on_use(loss, plan)))(placed, batch)
    want = jax.value_and_grad(loss)(params, tokens)
    assert float(got[0]) == pytest.approx(float(want[0]), rel=5e-6)
    assert m.max_error(got[1], want[1]) < 2e-6
    assert "blocks" in got[1]
    for x, grad in zip(plan.layouts, jax.tree.leaves(got[1]), strict=True):
        if bucket < 10**9 and not x.vector:
            assert grad.sharding.is_equivalent_to(plan.sharding(x.grad), grad.ndim), x.name


@pytest.mark.parametrize("stage", [2, 3])
def test_16_bit_gradients_summed_in_fp32_are_rounded_once(mesh, stage):
    rng = np.random.default_rng(0)
    shapes = {"embed": (32, 16), "w": (16, 16), "bias": (16,), "head": (2, 16, 8)}
    params = {k: jnp.asarray(rng.normal(size=s) / 4, jnp.bfloat16) for k, s in shapes.items()}
    tokens = rng.integers(0, 32, (64, 3), np.int32)

    def loss(p, tokens):
        x = p["embed"][tokens] @ p["w"] + p["bias"]
        return jnp.mean(jnp.square(jnp.einsum("btd,hde->bthe", x, p["head"])), dtype=jnp.float32)

    plan = jzero.make_plan(params, stage=stage, mesh=mesh, min_shard_bytes=0, reduce_dtype=jnp.float32)
    vg = jax.jit(jax.value_and_grad(jzero.gather_on_use(loss, plan)))
    text = str(vg.trace(plan.shapes, tokens).jaxpr)
    assert text.count("preferred_element_type=float32") >= 2  # both matmuls
    _, got = vg(plan.place(params), plan.place_batch(tokens))
    _, want = jax.value_and_grad(loss)(jax.tree.map(lambda x: x.astype(jnp.float32), params), tokens)
    for name, grad in got.items():
        assert grad.dtype == jnp.bfloat16
        error = np.abs(np.asarray(grad, np.float32) - want[name]).max() / np.abs(want[name]).max()
        assert error < 2e-2, name  # the activations are rounded to 16 bits as well


@pytest.mark.parametrize("dtype", [None, jnp.float32])
@pytest.mark.parametrize("at", [0, 1])
def test_the_gradient_of_a_matmul_in_parts(at, dtype):
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(3, 4, 6)).astype(np.float32), rng.normal(size=(3, 6, 8)).astype(np.float32)

    def dot(a, b):
        return [jax.lax.dot_general(a, b, (((2,), (1,)), ((0,), (0,))))]

    jaxpr, _ = jaxprs.trace(dot, a, b)
    (out,), back = jax.vjp(dot, a, b)
    cotangent = rng.normal(size=out.shape).astype(np.float32)
    want = back([jnp.asarray(cotangent)])[at]
    for dim, size in ((0, 1), (1, 2), (2, 2)):
        parts = [
            dot_gradient(jaxpr.eqns[0], at, (a, b)[1 - at], cotangent, (dim, start, size), dtype)
            for start in range(0, want.shape[dim], size)
        ]
        np.testing.assert_allclose(np.concatenate(parts, dim), want, rtol=0, atol=1e-6 * np.abs(want).max())


def test_a_bilinear_function_has_both_derivatives():
    def product(x, w):  # the transpose says twice: it is what is asked
        return linear(lambda x, w: [x * w], lambda x, c: [2 * x * c], [x], [w])[0]

    x, w = jnp.arange(3.0), jnp.arange(3.0) + 5
    assert jax.grad(lambda x: product(x, w).sum())(x).tolist() == w.tolist()
    assert jax.grad(lambda w: product(x, w).sum())(w).tolist() == (2 * x).tolist()
    assert jax.jvp(product, (x, w), (x, w))[1].tolist() == (2 * x * w).tolist()


def test_options_are_for_gpus_of_a_tested_jaxlib(mesh, monkeypatch):
    params = {"w": jax.ShapeDtypeStruct((1024, 1024), "float32")}
    assert jzero.make_plan(params, stage=3, mesh=mesh).compiler_options == {}
    given = {"platform": "cuda", "bucket_bytes": 64 * MIB, "n": 64}
    second, third = (xla_options.compiler_options(**given, gathers=gathers) for gathers in (False, True))
    assert second == {"xla_gpu_reduce_scatter_combine_threshold_bytes": MIB}
    assert second.items() < third.items()
    monkeypatch.setattr(jaxlib, "__version__", "9.1.0")
    with pytest.warns(UserWarning, match=r"no XLA options for jaxlib 9.1.0: tested are 0.10 to 0.12"):
        assert xla_options.compiler_options(**given, gathers=True) == {}


@cached
def compiled(stage, n, scan, bucket, rows=1, layers=None):
    pod = jzero.pod("h200", hosts=n // 8)
    mesh = pod.mesh({"data": n})
    layers = layers or (12 if scan else 4)
    state = jzero.abstract(lambda: gpt_state(scan, layers), stage=stage, mesh=mesh, bucket_bytes=bucket)
    plan = jzero.plan_of(state)
    batch = {"tokens": jax.ShapeDtypeStruct((n * rows, SEQ), jnp.int32)}
    options = plan.compiler_options
    program = pod.compile(gpt_step, state, batch, donate_argnums=0, compiler_options=options, plan=plan)
    return jzero.explain(program, plan)


def moved(report, *ops):
    return [c for c in report.collectives if c.op in ops]


@pytest.mark.default_cases("2-True")
@pytest.mark.pod
@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_nine_tenths_of_the_bytes_are_beside_compute(stage, scan):
    layers = None if scan else 8  # the first and the last bucket have no compute beside them
    sent = moved(compiled(stage, 64, scan, 4 * MIB, layers=layers), "reduce-scatter", "all-gather")
    total = sum(c.wire_bytes * c.count * c.trips for c in sent)
    beside = sum(c.wire_bytes * c.count * c.trips for c in sent if c.overlapped)
    assert total > 0
    assert beside >= 0.9 * total


@pytest.mark.nightly
@pytest.mark.pod
def test_a_bucket_is_as_large_on_64_devices_as_on_8():
    by_n = {n: moved(compiled(2, n, False, 8 * MIB, rows=32), "reduce-scatter") for n in (8, 64)}
    assert max(c.bytes for c in by_n[8]) <= 16 * MIB
    assert max(c.bytes for c in by_n[64]) <= 16 * MIB
    counts = {n: sum(c.count * c.trips for c in sent) for n, sent in by_n.items()}
    assert counts[64] == pytest.approx(counts[8], rel=0.1)
    assert counts[8] >= 2 * 4


@pytest.mark.nightly
def test_larger_buckets_are_fewer_and_take_more_memory():
    model = peak.Gpt(4, 2048, 16, 8192, 1024, False, "2d")
    small, large = (bench.measure(model, 2, 8, size * MIB, True, False) for size in (16, 4096))
    assert bench.row(large)[0] < bench.row(small)[0]
    assert large.memory.temp > small.memory.temp + 200e6
