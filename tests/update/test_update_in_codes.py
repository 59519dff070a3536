"""`update_dtype="int8"`: what an update adds to a param travels in 8 bits, and nothing that the codes lose is lost."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import Mesh
from programs import QUICK, gpt_step, small_state, tokens
from safetensors.numpy import load_file

import jzero
from jzero.comm import comm_of
from jzero.comm.transport import InCodes
from jzero.layout.blocks import Blocks, update_blocks

BF16 = jnp.bfloat16
SHAPES = {"kernel": (128, 64), "stack": (3, 64, 64), "wide": (48, 256), "odd": (67, 129), "bias": (64,)}
CODED = {"kernel", "stack", "wide"}
PLACES: dict[str, Any] = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "hpz": {"stage": 3, "axis": ("host", "gpu"), "param_axis": "gpu"},
    "host": {"stage": 2, "offload": "host"},
}


def values(seed: int, scale: float) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(seed), len(SHAPES))
    rows = zip(keys, SHAPES.items(), strict=True)
    return {name: jax.random.normal(k, shape, BF16) * scale for k, (name, shape) in rows}


def create() -> TrainState:
    return TrainState.create(apply_fn=None, params=values(0, 0.1), tx=optax.adamw(2.0**-8))


def place(name: str) -> dict[str, Any]:
    fields = {"min_shard_bytes": 0, "quantize_block": 64, "scan_axes": {"stack": 0}, **PLACES[name]}
    shape, names = ((2, 4), ("host", "gpu")) if "axis" in fields else ((8,), ("data",))
    return {**fields, "mesh": Mesh(np.array(jax.devices()).reshape(shape), names)}


@jax.jit
def step(state, grads):
    return state.apply_gradients(grads=grads)


def trained(state, first: int = 0, steps: int = 3):
    for i in range(first, first + steps):
        state = step(state, values(100 + i, 1.0))
    return state


def masters(state) -> dict[str, np.ndarray]:
    """In fp32, whole."""
    return jax.tree.map(np.asarray, jzero.unshard(state.opt_state, tx=state.tx, params=state.params).master)


@functools.cache
def plain(steps: int) -> dict[str, np.ndarray]:
    """The masters of a run that sends whole params."""
    return masters(trained(jzero.shard(create(), **place("stage 2")), steps=steps))


def assert_close(got, want, part: float = 1e-6):
    """Equal to the rounding of fp32."""
    for name, x in want.items():
        np.testing.assert_allclose(got[name], x, rtol=0, atol=part * np.max(np.abs(x)), err_msg=name)


def test_codes_of_what_was_decoded_are_the_same_codes():
    """Also where the largest value is rounded to the last code; and a product of code and scale is exact."""
    x = jax.random.normal(jax.random.key(0), (64, 256)) * 2.0 ** jnp.arange(-32, 32)[:, None]
    x = x.at[:, 0].set(jnp.max(jnp.abs(x), axis=1) * jnp.linspace(1, 2, 64)).at[3].set(0).at[5, 7].set(jnp.inf)
    way = InCodes(Blocks.of(x.shape, None, 256), np.dtype(np.int8), jax.P(), jax.P(), jzero.mesh(), exact=True)
    codes, scales = way.encode(x)
    found = way.decode((codes, scales), np.dtype(np.float32))
    again = way.encode(found)
    rows = np.arange(64) != 5
    np.testing.assert_array_equal(again[0][rows], codes[rows])
    np.testing.assert_array_equal(again[1], scales)
    exact = np.asarray(codes, np.float64) * np.asarray(scales, np.float64)
    np.testing.assert_array_equal(np.asarray(found)[rows], exact[rows])
    assert np.isnan(found[5]).all()
    assert np.all(np.abs(found - x)[rows] <= np.max(np.abs(x), axis=1, keepdims=True)[rows] / 64)


@pytest.mark.default_cases("stage 2", "hpz")
@pytest.mark.parametrize("name", PLACES)
def test_masters_are_those_of_a_run_that_sends_whole_params(name):
    """For given gradients; and each param is its master but for what a code and bf16 have lost."""
    state = jzero.shard(create(), **place(name), update_dtype="int8")
    plan = jzero.plan_of(state)
    assert {x.keys[0] for x in plan.layouts if update_blocks(x, plan)} == CODED
    last = {k: np.float32(x) for k, x in state.params.items()}
    for i in range(3):
        state = trained(state, i, 1)
        want = plain(i + 1)
        assert_close(masters(state), want)
        for k, x in state.params.items():
            lost = 0.51 / 64 * np.max(np.abs(want[k] - last[k])) if k in CODED else 0.0
            assert np.all(np.abs(np.float32(x) - want[k]) <= lost + 2.0**-8 * np.abs(want[k])), k
            last[k] = np.float32(x)
    assert any(np.any(last[k] != np.float32(jnp.asarray(want[k], BF16))) for k in CODED)  # it was sent in codes at all


def test_nnx():
    """A module and its optimizer, in a step of `nnx.jit` that changes both in place."""

    class Model(nnx.Module):
        def __init__(self):
            for name, x in values(0, 0.1).items():
                setattr(self, name, nnx.Param(x))

    model = Model()
    optimizer = nnx.Optimizer(model, optax.adamw(2.0**-8), wrt=nnx.Param)
    fields = place("stage 2")
    model, optimizer = jzero.shard((model, optimizer), **fields, update_dtype="int8")

    @nnx.jit
    def run(model, optimizer, grads):
        optimizer.update(model, nnx.State({k: nnx.Param(g) for k, g in grads.items()}))

    for i in range(2):
        run(model, optimizer, values(100 + i, 1.0))
    params, opt_state = nnx.as_pure(nnx.state(model, nnx.Param)), nnx.as_pure(optimizer.opt_state)
    got = jzero.unshard(opt_state, tx=optimizer.tx, params=params).master
    assert_close({k: np.asarray(got[k]) for k in SHAPES}, plain(2))


def test_layer_by_layer(monkeypatch):
    """A large stack is added layer by layer, with the values that it has as a whole."""
    want = trained(jzero.shard(create(), **place("stage 2"), update_dtype="int8"), steps=1).params
    monkeypatch.setattr("jzero.comm.updates.LARGE", 0)
    got = jax.jit(lambda s, g: s.apply_gradients(grads=g))(
        jzero.shard(create(), **place("stage 2"), update_dtype="int8"), values(100, 1.0)
    ).params
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.default_cases("checkpoint-int8", "reshard-masters")
@pytest.mark.parametrize("becomes", [
    {"update_dtype": "int8"}, {}, {"master_dtype": "remainder"}, {"master_dtype": None},
], ids=["int8", "masters", "remainders", "none"])  # fmt: skip
@pytest.mark.parametrize("way", ["checkpoint", "reshard"])
def test_into_another_place(becomes, way, tmp_path):
    """The masters go along, whatever they are stored as; training goes on as if nothing had happened."""
    state = trained(jzero.shard(create(), **place("stage 2"), update_dtype="int8"), steps=2)
    want = masters(state)
    fields = {**place("stage 1"), **becomes}
    if way == "reshard":
        other = jzero.shard(state, **fields)
    else:
        jzero.checkpoint.save(tmp_path / "saved", state)
        cast = becomes.get("master_dtype", "auto") is None
        other = jzero.checkpoint.restore(tmp_path / "saved", jzero.shard(create(), **fields), cast=cast)
    if becomes.get("master_dtype", "auto") is None:
        for k, x in other.params.items():  # what the model has trained with, or its masters, rounded
            assert np.all(np.abs(np.float32(x) - want[k]) <= 2.0**-8 * np.abs(want[k]) + 2.0**-9 / 64)
        return
    jax.tree.map(np.testing.assert_array_equal, masters(other), want)
    if "update_dtype" in becomes:
        jax.tree.map(np.testing.assert_array_equal, other.params, state.params)
    assert_close(masters(trained(other, 2, 1)), plain(3))


@pytest.mark.nightly
def test_from_a_run_that_sends_whole_params(tmp_path):
    state = trained(jzero.shard(create(), **place("stage 2")), steps=2)
    jzero.checkpoint.save(tmp_path / "saved", state)
    other = jzero.checkpoint.restore(tmp_path / "saved", jzero.shard(create(), **place("hpz"), update_dtype="int8"))
    jax.tree.map(np.testing.assert_array_equal, masters(other), plain(2))
    jax.tree.map(np.testing.assert_array_equal, other.params, jzero.unshard(state.params))
    assert_close(masters(trained(other, 2, 1)), plain(3))


def test_a_replaced_param_keeps_what_codes_have_lost():
    state = trained(jzero.shard(create(), **place("stage 2"), update_dtype="int8"), steps=2)
    before, old = masters(state), np.float32(state.params["kernel"])
    new = jax.tree.map(lambda x: jnp.zeros_like(x), state.params["kernel"])
    state = state.replace(params={**state.params, "kernel": new})
    np.testing.assert_allclose(masters(state)["kernel"], before["kernel"] - old, rtol=0, atol=1e-9)


def test_unshard_wants_the_params():
    state = jzero.shard(create(), **place("stage 2"), update_dtype="int8")
    with pytest.raises(ValueError, match=r'update_dtype="int8" .*params=state\.params'):
        jzero.unshard(state.opt_state, tx=state.tx)


def test_describe_names_what_travels_whole():
    state = jzero.shard(create(), **place("stage 2"), update_dtype="int8")
    text = jzero.plan_of(state).describe()
    assert "updates of 3 of 5 params travel in int8, in blocks of 64; new params travel as they are:" in text
    assert "stored padded to" in text
    assert "fewer than 4096 values" in text


@pytest.mark.nightly
def test_an_exported_file_has_the_masters(tmp_path):
    state = trained(jzero.shard(create(), **place("stage 2"), update_dtype="int8"), steps=2)
    jzero.checkpoint.save(tmp_path / "saved", state)
    jzero.checkpoint.export(tmp_path / "saved", tmp_path / "model.safetensors")
    found = load_file(tmp_path / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, found, masters(state))


@pytest.mark.unit
@pytest.mark.parametrize(("fields", "said", "remedy"), [
    ({"stage": 0}, r"has no effect at stage 0: every device has all new params\. .*stage=1", {"stage": 1}),
    ({"stage": 3}, r"no new param is gathered\. .*pass stage=2", {"stage": 2}),
    ({"stage": 3, "axis": ("a", "b")}, "the axes of a host as param_axis", {"param_axis": "b"}),
    ({"updates": "delta"}, "exclude each other.* Leave updates out", {"updates": "deferred"}),
    ({"master_dtype": "remainder"}, "Leave master_dtype out", {"master_dtype": "auto"}),
    ({"master_dtype": None}, "Leave master_dtype out", {"master_dtype": "auto"}),
    ({"offload": jzero.Offload(update="host")}, "one of update_dtype and offload out", {"offload": None}),
    ({"update_dtype": "float8_e4m3fn"}, "must be int8 or None", {"update_dtype": None}),
    ({"update_dtype": "int4"}, "must be int8 or None", {"update_dtype": "int8"}),
])  # fmt: skip
def test_fields_that_do_not_go_with_it(fields, said, remedy):
    fields = {"stage": 2, "update_dtype": "int8", **fields}
    with pytest.raises(ValueError, match=said):
        jzero.ZeroConfig(**fields)
    jzero.ZeroConfig(**{**fields, **remedy})


@pytest.mark.unit
@pytest.mark.parametrize("name", ["update_dtype", "gather_dtype"])
def test_the_example_in_an_error_is_one_that_works(name):
    with pytest.raises(TypeError, match="such as 'int8'"):
        jzero.ZeroConfig(stage=3, **{name: "bogus"})
    jzero.ZeroConfig(stage=3, axis=("a", "b"), param_axis="b", **{name: "int8"})


@pytest.mark.unit
@pytest.mark.parametrize(("dtypes", "said"), [
    (["float32"], r"no trained param is bfloat16 \(they are float32\)"),
    (["bfloat16", "float16"], r"1 param is of a dtype that is not the upper half"),
])  # fmt: skip
def test_params_that_it_is_not_for(dtypes, said, mesh):
    params = {dtype: jax.ShapeDtypeStruct((64, 64), dtype) for dtype in dtypes}
    with pytest.raises(ValueError, match=said):
        jzero.make_plan(params, stage=2, mesh=mesh, update_dtype="int8")


@pytest.mark.pod
def test_the_program_sends_what_the_estimate_says():
    """1.5 Psi at stage 2: no large new param travels in 16 bits."""
    state, plan = small_state(2, scan=True, update_dtype="int8")
    program = jzero.pod("h200").compile(
        gpt_step, state, tokens(512), donate_argnums=0, plan=plan, compiler_options=QUICK
    )
    report, uses = jzero.explain(program, plan), jzero.param_uses(gpt_step, state, tokens(512))
    assert report.wire.total == pytest.approx(jzero.estimate(plan, uses=uses).wire, rel=0.02)
    gathers = [c for c in report.collectives if c.op == "all-gather"]
    assert all("s8" in c.dtype for c in gathers if c.bytes > 2**14)
    sent, updates = sum(c.total_wire_bytes for c in gathers), comm_of(plan).updates
    assert sent == pytest.approx(sum(b for x in plan.layouts for _, b in updates.wire(x)), rel=0.03)
    assert sent < 0.52 * plan.param_bytes
    assert not jzero.findings(program, plan)


def leaving(plan) -> float:
    """MB that leave a host in a step."""
    (line,) = re.findall(r"([\d.]+) MB leave each host in a step", jzero.estimate(plan).network())
    return float(line)


def test_what_leaves_a_host():
    """Relative to plain stage 3: 0.30 with gradients in int8 too, 0.23 with int4."""
    pod = jzero.pod("h200", hosts=8)
    params = {"w": jax.ShapeDtypeStruct((4096, 4096), BF16)}
    mesh = jzero.mesh({"host": "hosts", "gpu": "host"}, pod=pod)
    flat = jzero.make_plan(params, stage=3, mesh=jzero.mesh({"data": 64}, pod=pod))
    assert leaving(flat) == pytest.approx(99.09)
    for codes, part in (("int8", 0.301), ("int4", 0.227)):
        plan = jzero.make_plan(params, **PLACES["hpz"], mesh=mesh, reduce_dtype=codes, update_dtype="int8")
        assert leaving(plan) / leaving(flat) == pytest.approx(part, abs=0.002)
