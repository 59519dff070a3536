"""`reduce_dtype="int8"` and `"int4"`: gradients travel in codes, and are summed in fp32."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh
from programs import QUICK, gpt_step, small_state, tokens
from rounded_weights import rounded

import jzero
from jzero.comm import reduce_in_codes
from jzero.comm.reduce_scatter import of_batch, reduce_scatter

P = jax.P
BLOCK = 32
SHAPE = (48, 80)


def exchanged(values, dim, sizes, codes, order):
    """What numpy makes of devices' values `[*sizes, *shape]`: the pieces along `dim`.

    `codes`: of each exchange. `order`: in which they run.
    """
    k = len(sizes)
    shape = values.shape[k:]
    cut = (*shape[:dim], *sizes, shape[dim] // np.prod(sizes), *shape[dim + 1 :])
    values = values.reshape(*sizes, *cut).astype(np.float32)
    left = list(range(k))
    for at in order:
        rows = np.moveaxis(values, k + dim + left.index(at), k)  # devices, then the row of each receiver
        coded = np.empty_like(rows)
        for where in itertools.product(*map(range, (*sizes, rows.shape[k]))):
            coded[where] = rounded(rows[where].reshape(1, -1), codes[at], BLOCK).reshape(rows[where].shape)
        values = np.moveaxis(coded.sum(at), k - 1, at)
        left.remove(at)
    return values  # [*sizes, *piece]


LAYOUTS = {
    "rows": ((8,), ("data",), P("data"), [(0, [8])]),
    "columns": ((8,), ("data",), P(None, "data"), [(1, [8])]),
    "over two hosts": ((8,), ("data",), P(None, "data"), [(1, [2, 4])]),
    "two axes along one dim": ((2, 4), ("host", "gpu"), P(("host", "gpu")), [(0, [2, 4])]),
    "hosts cut the pieces of a host": ((2, 4), ("host", "gpu"), P(("gpu", "host")), [(0, [4, 2])]),
    "int4 over two hosts": ((8,), ("data",), P(None, "data"), [(1, [2, 4])]),
    "int4 on one host": ((2, 4), ("host", "gpu"), P(("host", "gpu")), [(0, [2, 4])]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_are_those_of_numpy(layout, monkeypatch):
    """Pieces, blocks and roundings; each device has other values."""
    shape, names, spec, ((dim, sizes),) = LAYOUTS[layout]
    asked, codes = "int4" if "int4" in layout else "int8", ["int8"] * len(sizes)
    of = (7, 8) if "int4" in layout else SHAPE  # seven values do not fill their bytes
    order = [0, 1] if spec == P(("gpu", "host")) else reversed(range(len(sizes)))
    if "hosts" in layout:
        codes[0] = asked
        monkeypatch.setattr(reduce_in_codes, "hosts_along", lambda mesh, axis: 1 if axis == "gpu" else 2)
    mesh = Mesh(np.array(jax.devices()).reshape(shape), names)
    fields = {"axis": names, "reduce_dtype": asked, "quantize_block": BLOCK}
    plan = jzero.make_plan({"w": jax.ShapeDtypeStruct((64, 64), "float32")}, mesh=mesh, **fields)
    values = np.random.default_rng(0).standard_normal((8, *of)).astype(np.float32)

    def own(x):
        return reduce_scatter(x[0], spec, plan, codes=plan.config.reduce_dtype)

    run = jax.jit(jax.shard_map(own, mesh=mesh, in_specs=P(names), out_specs=of_batch(spec, plan), check_vma=False))
    got = np.asarray(run(values))
    even = of if of[dim] % 8 == 0 else (8, 8)
    values = np.pad(values, [(0, 0)] + [(0, n - m) for n, m in zip(even, of, strict=True)])
    devices = values.reshape(*shape, *even)
    devices = devices.swapaxes(0, 1) if spec == P(("gpu", "host")) else devices
    want = exchanged(devices.reshape(*sizes, *even), dim, sizes, codes, order)
    flat = want.reshape(-1, *want.shape[len(sizes) :])
    np.testing.assert_allclose(got, np.concatenate(list(flat), axis=dim), rtol=1e-6, atol=1e-6)
    off = np.abs(got - values.sum(0)).max() / np.abs(values).max()
    assert 1e-3 < off < 8 * len(sizes) / (14 if "int4" in codes else 254)


def test_groups_of_an_axis_over_hosts():
    pod = jzero.pod("h100", hosts=2)
    found = reduce_in_codes.exchanges_along(jzero.mesh({"data": -1}, pod=pod), "data")
    assert found == [
        ("data", 2, [[i, i + 8] for i in range(8)], True),
        ("data", 8, [list(range(8)), list(range(8, 16))], False),
    ]
    uneven = Mesh(np.array(pod.devices)[[0, 1, 2, 8]], ("data",))
    with pytest.raises(ValueError, match=r"reduce_dtype=int8.*'data' of 4 devices hosts have different numbers"):
        jzero.make_plan({"w": jax.ShapeDtypeStruct((64, 64), "float32")}, mesh=uneven, reduce_dtype="int8")


@pytest.mark.pod
def test_what_leaves_a_host_is_an_eighth_of_a_gradient():
    """With hpZ the axes of a host are the major ones of every piece, and hosts exchange last all the same."""
    pod = jzero.pod("h200", hosts=8)
    leaf = {"w": jax.ShapeDtypeStruct((4096, 4096), "bfloat16")}
    sent = {}
    for names in (("host", "gpu"), ("gpu", "host")):
        sizes = {"host": "hosts", "gpu": "host"}
        mesh = jzero.mesh({name: sizes[name] for name in names}, pod=pod)
        for codes in (None, "int8", "int4"):
            plan = jzero.make_plan(leaf, stage=3, mesh=mesh, axis=names, param_axis="gpu", reduce_dtype=codes)
            sent[names, codes] = jzero.estimate(plan).wire_by_axes["host"] / plan.param_bytes
    gathered = 7 / 8 / 8  # new params between hosts, in 16 bits
    for names in (("host", "gpu"), ("gpu", "host")):
        assert sent[names, "int8"] == pytest.approx(gathered * (1 + (1 + 4 / 256) / 2))
        assert sent[names, "int4"] == pytest.approx(gathered * (1 + (0.5 + 4 / 256) / 2))


def make(flavour, dtype=jnp.float32):
    """(params, loss) of a table that is looked up, a matmul, a convolution, and a small matrix."""
    keys = jax.random.split(jax.random.key(0), 5)
    params = {
        "table": jax.random.normal(keys[0], (128, 64)),
        "kernel": jax.random.normal(keys[1], (64, 128)) / 8,
        "conv": jax.random.normal(keys[2], (3, 128, 64)) / 20,
        "small": jax.random.normal(keys[3], (64, 8)) / 8,
        "bias": jnp.zeros(8),
    }
    params = jax.tree.map(lambda x: x.astype(dtype), params)

    def loss(p, index):
        x = jnp.tanh(p["table"][index] @ p["kernel"])
        dims = jax.lax.conv_dimension_numbers(x.shape, p["conv"].shape, ("NWC", "WIO", "NWC"))
        x = jax.lax.conv_general_dilated(x, p["conv"], (1,), "SAME", dimension_numbers=dims)
        return jnp.mean((x @ p["small"] + p["bias"]) ** 2)

    if flavour == "plain":
        return params, loss

    class Model(nnx.Module):
        def __init__(self):
            for name, value in params.items():
                setattr(self, name, nnx.Param(value))

    def of_module(model, index):
        return loss({name: getattr(model, name)[...] for name in params}, index)

    return Model(), of_module


INDEX = jax.random.randint(jax.random.key(9), (16, 6), 0, 128)
IN_CODES = {"table", "kernel", "conv"}


@pytest.mark.default_cases("plain-3-flat", "nnx-2-flat", "plain-2-replicas", "plain-3-tensor parallelism")
@pytest.mark.parametrize("axes", ["flat", "replicas", "hpz", "tensor parallelism"])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("flavour", ["plain", "nnx"])
def test_gradients_are_rounded_and_no_others(flavour, stage, axes):
    params, loss = make(flavour)
    mesh, fields = jax.devices(), {"stage": stage, "min_shard_bytes": 0, "quantize_block": BLOCK, "bucket_bytes": 2**14}
    mesh = Mesh(np.array(mesh).reshape(2, 4), ("a", "b"))
    fields |= {"axis": ("a", "b")}
    if axes == "replicas":
        fields |= {"axis": "b", "batch_axis": ("a", "b")}
    if axes == "hpz":
        fields |= {"param_axis": "b"} if stage == 3 else {}
    if axes == "tensor parallelism":
        fields |= {"axis": "b"}
    state = nnx.state(params, nnx.Param) if flavour == "nnx" else params
    specs = jax.tree.map(lambda _: P(), state)
    if axes == "tensor parallelism":
        fields["param_specs"] = specs | {"kernel": P(None, "a")} if flavour == "plain" else None
        fields = {k: v for k, v in fields.items() if v is not None}
    plan = jzero.make_plan(state, mesh=mesh, reduce_dtype="int8", **fields)
    grad = (nnx.grad if flavour == "nnx" else jax.grad)(jzero.gather_on_use(loss, plan))
    run = (nnx.jit if flavour == "nnx" else jax.jit)(grad)
    want = (nnx.grad if flavour == "nnx" else jax.grad)(loss)(params, INDEX)
    if flavour == "nnx":
        nnx.update(params, plan.place(state))
    got = run(params if flavour == "nnx" else plan.place(params), plan.place_batch(INDEX))
    if flavour == "nnx":
        want, got = (nnx.to_pure_dict(g) for g in (want, got))
    for name, g in got.items():
        off = float(jnp.max(jnp.abs(g - want[name])) / jnp.max(jnp.abs(want[name])))
        if name in IN_CODES:
            assert 1e-4 < off < 0.03, name
        else:
            assert off < 1e-5, name


def compiled(pod, stage, *, scan, **fields):
    """(what was found in the step, the state's plan, the estimate)"""
    mesh = fields.pop("mesh", None) or jzero.mesh({"data": -1}, pod=pod)
    state, plan = small_state(stage, scan=scan, mesh=mesh, **{"reduce_dtype": "int8"} | fields)
    program = pod.compile(gpt_step, state, tokens(512), donate_argnums=0, plan=plan, compiler_options=QUICK)
    uses = jzero.param_uses(gpt_step, state, tokens(512))
    return jzero.explain(program, plan), jzero.findings(program, plan), plan, jzero.estimate(plan, uses=uses)


@pytest.mark.pod
def test_the_program_sends_what_the_estimate_says():
    """Weights and gradients in 8 bits, a scan; every large gradient travels in codes."""
    report, findings, plan, estimate = compiled(jzero.pod("h200"), 3, scan=True, gather_dtype="int8")
    assert report.wire.total == pytest.approx(estimate.wire, rel=0.03)
    assert report.wire.total < 1.65 * plan.param_bytes
    sent = [c for c in report.collectives if c.op == "all-to-all"]
    assert {c.dtype for c in sent} == {"s8"}
    exchanged = sum(c.total_wire_bytes for c in sent)
    matrices = sum(x.size for x in plan.layouts if not x.vector and x.layer_shape[0] * x.layer_shape[1] >= 4096)
    assert exchanged == pytest.approx(7 / 8 * matrices * (1 + 4 / 256), rel=0.2)  # and tied tables once more
    assert not findings


@pytest.mark.nightly
@pytest.mark.pod
@pytest.mark.parametrize(("codes", "smaller"), [("int8", 1), ("int4", (0.5 + 4 / 256) / (1 + 4 / 256))])
def test_the_links_within_a_host_come_first(codes, smaller):
    """One axis over two hosts: what leaves a device for the other host is an eighth of what it sends to its own."""
    report, findings, _, estimate = compiled(jzero.pod("h200", hosts=2), 2, scan=False, reduce_dtype=codes)
    assert report.wire.total == pytest.approx(estimate.wire, rel=0.03)
    sizes = {}
    for c in report.collectives:
        if c.op == "all-to-all":
            sizes[c.group_size] = sizes.get(c.group_size, 0) + c.total_wire_bytes
    assert set(sizes) == {2, 8}
    assert sizes[2] * 14 == pytest.approx(sizes[8] * smaller, rel=0.02)  # 1/2 of an eighth, beside 7/8
    assert not findings


@pytest.mark.nightly
@pytest.mark.pod
@pytest.mark.parametrize("names", [("host", "gpu"), ("gpu", "host")])
def test_hosts_exchange_last_where_they_cut_the_pieces_of_a_host(names):
    """hpZ: the axes of a host are the major ones of every piece, whatever the order of the mesh."""
    pod, sizes = jzero.pod("h200", hosts=2), {"host": "hosts", "gpu": "host"}
    mesh = jzero.mesh({name: sizes[name] for name in names}, pod=pod)
    report, findings, plan, estimate = compiled(pod, 3, scan=False, mesh=mesh, axis=names, param_axis="gpu")
    assert report.wire.total == pytest.approx(estimate.wire, rel=0.03)
    sent = dict.fromkeys(("host", "gpu"), 0)
    for c in report.collectives:
        if c.op == "all-to-all":
            (axis,) = c.axes
            sent[axis] += c.total_wire_bytes
    assert sent["host"] * 14 == pytest.approx(sent["gpu"], rel=0.02)
    assert not findings, plan
