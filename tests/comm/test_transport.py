"""`gather_dtype`: weights travel in codes of 8 bits.

An encoding is not its own derivative, and the decoded weight is what a program might keep for the backward pass: both
have been missed before.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from programs import QUICK, gpt_loss, gpt_step, small_state, tokens
from rounded_weights import after_codes

import jzero
from jzero.comm import comm_of
from jzero.comm.transport import InCodes
from jzero.comm.uses import Use
from jzero.layout.blocks import Blocks

P = jax.P
CODES = ("int8", "float8_e4m3fn")


def params_of(seed=0, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(seed), 4)
    params = {
        "table": jax.random.normal(keys[0], (128, 64)),
        "kernel": jax.random.normal(keys[1], (64, 256)) / 8,
        "stack": jax.random.normal(keys[3], (3, 256, 256)) / 16,
        "bias": jax.random.normal(keys[2], (256,)),
    }
    return jax.tree.map(lambda x: x.astype(dtype), params)


def loss_of(params, index):
    """The table is looked up and is the head, so it is used transposed too; the stack runs in a scan."""
    x = jnp.tanh(params["table"][index] @ params["kernel"] + params["bias"])
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["stack"])
    return jnp.mean(((x @ params["kernel"].T) @ params["table"].T) ** 2)


INDEX = jnp.arange(16) % 5
SIZES = {"min_shard_bytes": 0, "quantize_block": 32, "scan_axes": {"stack": 0}}


def rounded(params, plan):
    rows = zip(jax.tree.leaves(params), after_codes(params, plan), strict=True)
    return jax.tree.structure(params).unflatten([p if x is None else x for p, x in rows])


@pytest.mark.default_cases("int8-drops-two hops")
@pytest.mark.parametrize("axes", ["flat", "hpz", "two hops"])
@pytest.mark.parametrize("reshard", [True, False], ids=["drops", "keeps"])
@pytest.mark.parametrize("codes", CODES)
def test_gradients_are_those_at_the_rounded_weights(codes, reshard, axes):
    params, mesh = params_of(), Mesh(np.array(jax.devices()).reshape(2, 4), ("host", "gpu"))
    fields = {"axis": ("host", "gpu"), "gather_dtype": {"host": codes} if axes == "two hops" else codes}
    if axes == "hpz":
        fields["param_axis"] = "gpu"
    if axes == "two hops":
        with pytest.raises(ValueError, match=r"'host' first, so it must come after 'gpu' .*transpose\(1, 0\)"):
            jzero.make_plan(params, stage=3, mesh=mesh, **fields)
        mesh = Mesh(mesh.devices.transpose(1, 0), ("gpu", "host"))
    plan = jzero.make_plan(params, stage=3, mesh=mesh, reshard_after_forward=reshard, **fields, **SIZES)
    want_loss, want = jax.value_and_grad(loss_of)(rounded(params, plan), INDEX)
    got_loss, got = jax.jit(jax.value_and_grad(jzero.gather_on_use(loss_of, plan)))(
        plan.place(params), plan.place_batch(INDEX)
    )
    assert abs(want_loss / loss_of(params, INDEX) - 1) > 1e-4  # the rounding is seen at all
    np.testing.assert_allclose(got_loss, want_loss, rtol=1e-6)
    for name in params:  # not rounded themselves
        np.testing.assert_allclose(got[name], want[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fields", [{}, {"bucket_bytes": 1}], ids=["whole", "table in parts"])
def test_tangents_travel_as_they_are(mesh, fields):
    params = params_of()
    moves = params_of(1)
    plan = jzero.make_plan(params, stage=3, mesh=mesh, gather_dtype="int8", **SIZES, **fields)
    fn = jzero.gather_on_use(loss_of, plan)
    placed, moved = plan.place(params), plan.place(moves)
    got = jax.jit(lambda p, m: jax.jvp(lambda q: fn(q, INDEX), (p,), (m,)))(placed, moved)
    want = jax.jvp(lambda q: loss_of(q, INDEX), (rounded(params, plan),), (moves,))
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-4)


def test_gradients_of_single_examples(mesh):
    params = {k: v for k, v in params_of().items() if k in ("kernel", "bias")}

    def loss(params, x):
        return jnp.sum(jnp.tanh(x @ params["kernel"] + params["bias"]) ** 2)

    plan = jzero.make_plan(params, stage=3, mesh=mesh, gather_dtype="int8", min_shard_bytes=0)
    x = jax.random.normal(jax.random.key(2), (8, 64))
    each = jax.vmap(jax.grad(jzero.gather_on_use(loss, plan)), in_axes=(None, 0))
    got = jax.jit(each)(plan.place(params), plan.place_batch(x))
    want = jax.vmap(jax.grad(loss), in_axes=(None, 0))(rounded(params, plan), x)
    for name in params:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-4, atol=1e-5)


@pytest.mark.unit
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
@pytest.mark.parametrize("codes", CODES)
def test_what_is_not_finite_arrives_as_nan(codes, bad):
    way = InCodes(Blocks.of((2, 64), None, 32), jnp.dtype(codes), P(), P(), Mesh(np.array(jax.devices()), ("data",)))
    x = jnp.ones((2, 64), jnp.bfloat16).at[1, 5].set(bad).at[0, 40:].set(0)
    got = np.asarray(way.decode(way.encode(x), x.dtype), np.float32)
    assert np.isnan(got[1, :32]).all()
    np.testing.assert_array_equal(got[1, 32:], 1)
    np.testing.assert_array_equal(got[0], np.asarray(x[0], np.float32))


@pytest.mark.unit
def test_what_travels_as_it_is_is_named():
    shapes = {"wide": (64, 256), "small": (64, 8), "odd": (24, 250)}
    params = {k: jax.ShapeDtypeStruct(shape, "bfloat16") for k, shape in shapes.items()}
    params["ids"] = jax.ShapeDtypeStruct((64, 256), "int32")
    mesh = Mesh(np.array(jax.devices()), ("data",))
    trainable = dict.fromkeys(shapes, True) | {"ids": False}
    fields = {"stage": 3, "mesh": mesh, "gather_dtype": "int8", "min_shard_bytes": 0}
    plan = jzero.make_plan(params, trainable=trainable, **fields)
    text = plan.describe()
    assert "weights of 1 of 4 params are gathered in int8, in blocks of 256" in text
    for name, why in (("small", "fewer than 4096 values"), ("odd", "would cut blocks of 256"), ("ids", "int32")):
        assert any(name in line and why in line for line in text.splitlines()), text
    assert "0 of 1" in jzero.make_plan({"w": params["odd"]}, **fields).describe()


@pytest.mark.unit
@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"gather_dtype": "bfloat16"}, r"gather_dtype=bfloat16\) must be one of int8, float8_e4m3fn.*compute_dtype"),
        ({"gather_dtype": {"host": "int8"}}, r"not gathered over 'host', but over 'data'"),
        ({"gather_dtype": {"host": "int8"}, "axis": ("host", "gpu"), "param_axis": "gpu"}, r"not gathered over 'host'"),
        ({"gather_dtype": "int8", "quantize_block": 100}, r"power of two"),
        ({"gather_dtype": "int8", "stage": 2}, r"has no effect at stage 2: only stage 3 gathers weights.*stage=3"),
    ],
)
def test_bad_fields(fields, says):
    with pytest.raises(ValueError, match=says):
        jzero.ZeroConfig(**{"stage": 3} | fields)
    with pytest.raises(TypeError, match=r"keys"):
        jzero.ZeroConfig(stage=3, gather_dtype={})


@functools.cache
def compiled(*, kept: bool):
    """The step of an unrolled GPT for 8 H200; `kept`: all its weights gathered before the model runs."""
    state, plan = small_state(3, scan=False, remat=False, gather_dtype="int8")

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
        return gather(param, x.stored, x.used, order=gather.order(x))

    whole.defjvp(lambda p, t: (whole(p[0]), gather(t[0], x.stored, x.used)))
    return whole(param)


@pytest.mark.pod
def test_the_program_sends_what_the_estimate_says():
    program, plan = compiled(kept=False)
    report = jzero.explain(program, plan)
    gathers = [c for c in report.collectives if c.op == "all-gather"]
    uses = {x.name: ("lookup", "matmul") for x in plan.layouts if "embedding" in x.name}
    weights = comm_of(plan).weights
    kinds = ((x, map(Use, uses.get(x.name, ("matmul",)))) for x in plan.layouts)
    want = sum(b for x, some in kinds for _, b in weights.wire(x, 1, tuple(some)))
    assert sum(c.total_wire_bytes for c in gathers) == pytest.approx(want, rel=0.03)
    assert all("s8" in c.dtype for c in gathers if c.bytes > 2**14)
    estimate = jzero.estimate(plan, uses=uses)
    assert report.wire.total == pytest.approx(estimate.wire, rel=0.03)
    assert "weights_not_gathered_on_use" not in {f.kind for f in jzero.findings(program, plan)}


@pytest.mark.pod
def test_a_weight_that_is_kept_behind_the_cast_is_found():
    program, plan = compiled(kept=True)
    (kept,) = [f for f in jzero.findings(program, plan) if "still there in the backward pass" in f.text]
    assert kept.bytes >= 0.5 * plan.param_bytes  # decoded: in 16 bits


@pytest.mark.nightly
@pytest.mark.pod
def test_between_hosts_alone():
    """Two hops are two collectives, and gradients are still reduce-scattered."""
    pod = jzero.pod("h200", hosts=2)
    mesh = jzero.mesh({"gpu": "host", "host": "hosts"}, pod=pod)
    fields = {"axis": ("gpu", "host"), "gather_dtype": {"host": "int8"}}
    state, plan = small_state(3, scan=True, mesh=mesh, **fields)
    program = pod.compile(gpt_step, state, tokens(512), donate_argnums=0, plan=plan, compiler_options=QUICK)
    report, uses = jzero.explain(program, plan), jzero.param_uses(gpt_step, state, tokens(512))
    want = jzero.estimate(plan, uses=uses).wire_by_axes
    assert want["host"] < want["gpu"] / 20  # half of a sixteenth, in half the bits
    for axes, size in want.items():
        assert report.wire.by_axis[axes] == pytest.approx(size, rel=0.03)
    assert not jzero.findings(program, plan)


@pytest.mark.pod
def test_a_gather_that_stayed_in_16_bits_is_found():
    state, _ = small_state(3, scan=False, remat=False)
    _, plan = small_state(3, scan=False, remat=False, gather_dtype="int8")
    program = jzero.pod("h200").compile(gpt_step, state, tokens(512), donate_argnums=0, compiler_options=QUICK)
    assert "more_than_closed_form" in {f.kind for f in jzero.findings(program, plan)}


def test_the_wire_counts_what_travels_and_buckets_what_is_held(mesh):
    params = {f"w{i}": jnp.zeros((64, 256), jnp.bfloat16) for i in range(4)}
    plan = jzero.make_plan(params, stage=3, mesh=mesh, min_shard_bytes=0, gather_dtype="int8")
    assert comm_of(plan).weights.held_bytes(plan.layouts[0]) == 2 * 64 * 256  # decoded
    # two gathers in 8 bits with a scale of 32 bits per 256 values, one gradient in 16
    assert jzero.estimate(plan).wire == pytest.approx(7 / 8 * 4 * 64 * 256 * (2 * (1 + 4 / 256) + 2))


@pytest.mark.unit
@pytest.mark.parametrize("stage", [1, 3])
def test_axes_may_be_in_another_order_than_those_of_the_mesh(stage):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("host", "gpu"))
    fields = {"gather_dtype": "int8"} if stage == 3 else {}
    plan = jzero.make_plan({"w": jnp.zeros((64, 256))}, stage=stage, axis=("gpu", "host"), mesh=mesh, **fields)
    assert plan.layouts[0].state == P(("gpu", "host"))
    two_hops = {"axis": ("host", "gpu"), "gather_dtype": {"host": "int8"}}
    assert jzero.make_plan({"w": jnp.zeros((64, 256))}, stage=3, **two_hops).mesh.axis_names == ("gpu", "host")


@pytest.mark.unit
def test_a_stack_over_pipeline_stages_is_gathered_by_the_devices_of_its_stage():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("pipe", "data"))
    plan = jzero.make_plan(
        {"w": jax.ShapeDtypeStruct((8, 256, 256), "bfloat16")}, stage=3, mesh=mesh, param_specs={"w": P("pipe")},
        scan_axes={"w": 0}, min_shard_bytes=0,
    )  # fmt: skip
    ((axes, size),) = comm_of(plan).weights.wire(plan.layouts[0], 1, (Use("matmul"),))
    assert axes == ("data",)
    assert size == 2 * 3 / 4 * plan.layouts[0].nbytes / 2


@pytest.mark.parametrize(("shape", "dim", "known", "keeps"), [
    ((64, 3, 64), 1, False, False), ((3, 64, 64), 0, False, True),
    ((64, 3, 64), 1, True, True), ((64, 64, 3), 2, True, True),
])  # fmt: skip
def test_layers_of_a_loop_have_the_values_of_the_whole_weight_or_are_exact(mesh, shape, dim, known, keeps):
    """Of a stack that the plan does not know the layers may have other blocks than the whole weight."""
    w = jax.random.normal(jax.random.key(0), shape)
    fields = {"scan_axes": {"w": dim} if known else {}, "min_shard_bytes": 0, "gather_dtype": "int8"}
    plan = jzero.make_plan({"w": w}, stage=3, mesh=mesh, **fields)

    def layers_and_whole(p):
        _, layers = jax.lax.scan(lambda _, layer: (None, layer * 1), None, jnp.moveaxis(p["w"], dim, 0))
        return jnp.moveaxis(layers, 0, dim), p["w"] * 1

    layers, whole = jax.jit(jzero.gather_on_use(layers_and_whole, plan))(plan.place({"w": w}))
    assert (np.asarray(whole) != w).mean() > 0.5
    np.testing.assert_array_equal(layers, whole if keeps else w)


def test_pieces_have_the_values_of_the_whole_weight_or_are_exact(mesh):
    """In blocks of 256 those of 384 columns go over rows, and a slice would have blocks of its own."""
    w = jax.random.normal(jax.random.key(0), (256, 384))
    plan = jzero.make_plan({"w": w}, stage=3, mesh=mesh, min_shard_bytes=0, gather_dtype="int8")
    fn = jax.jit(jzero.gather_on_use(lambda p: (p["w"][:, :128] * 1, p["w"] * 1), plan))
    piece, whole = fn(plan.place({"w": w}))
    np.testing.assert_array_equal(piece, w[:, :128])
    np.testing.assert_array_equal(whole, rounded({"w": w}, plan)["w"])
    plan = jzero.make_plan({"w": w}, stage=3, mesh=mesh, min_shard_bytes=0, gather_dtype="int8", quantize_block=128)
    parts = jax.jit(jzero.gather_on_use(lambda p: [x * 1 for x in jnp.split(p["w"], (128, 200), 1)], plan))
    for part, want in zip(parts(plan.place({"w": w})), jnp.split(w, (128, 200), 1), strict=True):
        np.testing.assert_array_equal(part, want)  # all of them: one cut is inside of a block
    parts = jax.jit(jzero.gather_on_use(lambda p: [x * 1 for x in jnp.split(p["w"], (128, 256), 1)], plan))
    for part, want in zip(parts(plan.place({"w": w})), jnp.split(rounded({"w": w}, plan)["w"], 3, 1), strict=True):
        np.testing.assert_array_equal(part, want)
    layers = jzero.make_plan({"w": w.reshape(2, 128, 384)}, stage=3, mesh=mesh, min_shard_bytes=0, gather_dtype="int8")
    fn = jax.jit(jzero.gather_on_use(lambda p: p["w"][1] * 1, layers))
    got = fn(layers.place({"w": w.reshape(2, 128, 384)}))
    np.testing.assert_allclose(got, rounded({"w": w.reshape(2, 128, 384)}, layers)["w"][1], rtol=1e-6)
