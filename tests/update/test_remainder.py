"""`master_dtype="remainder"`: the pair of bits, and training, files and layouts beside fp32 masters, bit for bit."""

from __future__ import annotations

import functools
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from layouts import LAYOUTS, SHAPES, create
from models import adamw, create_state
from optax import contrib
from programs import program
from states import NnxModel

import jzero
from jzero.update.remainder import INFINITY, NAN, join, split

BF16, F32 = jnp.bfloat16, jnp.float32


def bits_of(x) -> np.ndarray:
    x = np.asarray(x)
    return x.view({2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


# --- the pair ----------------------------------------------------------------------------------------------------


@jax.jit
def wrong_pairs(bits):
    """How many masters do not come back; how many params differ from rounding to even, on ties and elsewhere."""
    master = jax.lax.bitcast_convert_type(bits, F32)
    param, rest = split(master)
    back = jax.lax.bitcast_convert_type(join(param, rest), jnp.uint32)
    upper = jax.lax.bitcast_convert_type(param, jnp.uint16).astype(jnp.uint32)
    nan = (bits & 0x7FFFFFFF) > (INFINITY << 16)
    even = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    tie = (bits & 0xFFFF) == 0x8000
    lost = jnp.where(nan, (upper != NAN) | (rest != 0) | (back != NAN << 16), back != bits)
    other = ~nan & (upper != even)
    return jnp.sum(lost), jnp.sum(other & ~tie), jnp.sum(other & tie)


@pytest.mark.parametrize("all_of_them", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_pair_gives_its_master_back(all_of_them):
    """All 2^32 patterns nightly; else random ones, and those around zeros, denormals, ties, infinities and NaNs."""
    if all_of_them:
        parts = (jnp.uint32(i * 2**26) + jnp.arange(2**26, dtype=jnp.uint32) for i in range(64))
    else:
        near = np.array([0, 0x8000, 0x10000, 0x800000, 0x7F7F8000, 0x7F800000, 0x7FC00000, 0x7FFFFFFF], np.uint32)
        edges = near[:, None] + np.arange(-4, 5).astype(np.uint32)
        drawn = np.random.default_rng(0).integers(0, 2**32, 2**20, np.uint32)
        parts = [jnp.asarray(np.concatenate([edges.ravel(), edges.ravel() | 2**31, drawn]))]
    lost, elsewhere, ties = np.sum([list(map(int, wrong_pairs(x))) for x in parts], axis=0)
    assert (lost, elsewhere) == (0, 0)
    assert ties > 0  # on half of the ties the even rule rounds toward zero
    if all_of_them:
        assert ties == 255 * 2**8 // 2 - 255 * 128 + 2 * 255 * 64


@pytest.mark.parametrize(("param", "rest", "want"), [
    (0x7F80, -1, 0x7F7FFFFF), (0xFF80, -0x8000, 0xFF7F8000),  # the largest finite masters
    (0x7F80, 5, 0x7F800000), (0xFF80, 5, 0xFF800000), (0x0000, -5, 0), (0x8000, -5, 0x80000000),  # of no master
    (0x0000, 5, 5), (0x8000, 5, 0x80000005),  # denormals
])  # fmt: skip
def test_pairs_at_the_ends(param, rest, want):
    value = jax.lax.bitcast_convert_type(jnp.uint16(param), BF16)
    assert bits_of(join(value, jnp.int16(rest))) == want


# --- training ----------------------------------------------------------------------------------------------------

HALF = 0.5
LR = 2.0**-7
CHAINS: dict[str, Any] = {
    "adamw": optax.adamw(LR, b1=HALF, b2=HALF, weight_decay=LR),
    "clip, adam": optax.chain(
        optax.clip(0.25), optax.adam(optax.piecewise_constant_schedule(LR, {2: HALF}), HALF, HALF)
    ),
    "sgd": optax.sgd(LR),
    "momentum": optax.sgd(LR, momentum=HALF, nesterov=True),
    "lion": optax.lion(LR, b1=HALF, b2=HALF, weight_decay=HALF),
    "adafactor": optax.adafactor(LR, min_dim_size_to_factor=8, multiply_by_parameter_scale=False),
    "rmsprop": optax.rmsprop(LR, decay=HALF),
    "adagrad": optax.adagrad(LR),
    "lamb": optax.lamb(LR, b1=HALF, b2=HALF),
    "muon": contrib.muon(LR, beta=HALF),
    "steps": optax.MultiSteps(optax.adamw(LR, HALF, HALF), 2).gradient_transformation(),
    "hyperparams": optax.inject_hyperparams(optax.sgd)(LR),
}
"""XLA on CPUs fuses some products and sums into one rounding, and not the same ones in both programs. With powers of
two the product is exact, so fusion changes nothing."""
ADAMW = CHAINS["adamw"]


KINDS = ("remainder", "auto")


def masters(state) -> list[np.ndarray]:
    """The bits of the fp32 masters of a state, in logical shapes."""
    whole = jzero.unshard(state.opt_state, tx=state.tx, params=state.params)
    return [bits_of(x) for x in jax.tree.leaves(whole.master)]


@functools.cache
def step_of(_):
    return jax.jit(lambda state, grads: state.apply_gradients(grads=grads), donate_argnums=0)


def trained(state, steps: int = 4, first: int = 0):
    """A state after some steps with gradients that depend on nothing but the number of the step."""
    for i in range(first, first + steps):
        rng = np.random.default_rng(i)
        grads = {k: jnp.asarray(rng.standard_normal(s), BF16) for k, s in SHAPES.items()}
        state = step_of(state.tx)(state, grads)
    return state


def made(layout: str, master_dtype: str, tx=None, **fields):
    fields = {**LAYOUTS[layout](), **fields, "master_dtype": master_dtype, "min_shard_bytes": 0}
    return jzero.shard(lambda: create(ADAMW if tx is None else tx, BF16), **fields)


def assert_masters(got, want):
    for a, b in zip(masters(got), masters(want), strict=True):
        np.testing.assert_array_equal(a, b)


def assert_params_of(state):
    """The params are the masters, rounded by the rule of the state's plan."""
    stores = jzero.plan_of(state).config.master_dtype == "remainder"
    rounded = (lambda x: split(x)[0]) if stores else (lambda x: x.astype(BF16))
    for p, m in zip(jax.tree.leaves(jzero.unshard(state.params)), masters(state), strict=True):
        np.testing.assert_array_equal(bits_of(p), bits_of(rounded(jnp.asarray(m.view(np.float32)))))


LAYOUTS_OF_RUNS = [k for k in LAYOUTS if k != "model axis"]


@pytest.mark.default_cases("clip, adam-host")
@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, "stage 3") for name in CHAINS] + [("adamw", layout) for layout in LAYOUTS_OF_RUNS[:3] + LAYOUTS_OF_RUNS[4:]]
    + [("muon", "5 devices"), ("clip, adam", "host")],
)
def test_masters_are_those_of_a_run_with_fp32_masters(name, layout):
    got, want = (trained(made(layout, kind, CHAINS[name])) for kind in KINDS)
    assert {x.dtype for x in jax.tree.leaves(got.opt_state.master)} == {jnp.dtype(jnp.int16)}
    assert any(m.any() for m in map(np.asarray, jax.tree.leaves(got.opt_state.master)))
    assert_masters(got, want)
    assert_params_of(got)
    plan = jzero.plan_of(got)
    leaves = jax.tree.leaves(got.opt_state)
    for x, spec in zip(leaves, plan.state_specs(got.opt_state), strict=True):
        assert x.sharding.shard_shape(x.shape) == plan.sharding(spec).shard_shape(x.shape)
    held = [sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(s.opt_state)) for s in (got, want)]
    stored = sum(x.addressable_shards[0].data.size for x in jax.tree.leaves(got.opt_state.master))
    assert held[1] - held[0] == 2 * stored


@pytest.mark.default_cases("True")
@pytest.mark.parametrize("born", [False, True])
def test_nnx(born, mesh):
    """The optimizer of an NNX pair, made before or in `jzero.shard`; a step of `nnx.jit` changes both in place."""

    def pair():
        model = NnxModel(nnx.Rngs(0), BF16)
        return model, nnx.Optimizer(model, ADAMW, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, grads):
        optimizer.update(model, grads)

    found = []
    for kind in KINDS:
        fields: Any = {"stage": 2, "mesh": mesh, "min_shard_bytes": 0, "master_dtype": kind}
        model, optimizer = jzero.shard(pair if born else pair(), **fields)
        for i in range(3):
            rng = np.random.default_rng(i)
            grads = jax.tree.map(
                lambda p: jnp.asarray(rng.standard_normal(p.shape), p.dtype),  # noqa: B023
                nnx.state(model, nnx.Param),
            )
            step(model, optimizer, grads)
        params, opt_state = nnx.as_pure(nnx.state(model, nnx.Param)), nnx.as_pure(optimizer.opt_state)
        whole = jzero.unshard(opt_state, tx=optimizer.tx, params=params)
        found.append([bits_of(x) for x in jax.tree.leaves(whole.master)])
        dtype = jnp.int16 if kind == "remainder" else F32
        assert {x.dtype for x in jax.tree.leaves(opt_state.master)} == {jnp.dtype(dtype)}
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_bytes_of_the_estimate(mesh):
    """With moments in bf16: 6 bytes per param, not 12."""
    fields: Any = {"stage": 2, "mesh": mesh, "min_shard_bytes": 0, "moment_dtype": "bfloat16"}
    state = jzero.shard(create_state(adamw(), BF16), master_dtype="remainder", **fields)
    plan = jzero.plan_of(state)
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state.opt_state))
    assert jzero.estimate(plan, tx=state.tx).opt_state == held
    assert jzero.estimate(plan).opt_state == pytest.approx(held, abs=64)
    padded = sum(np.prod(x.state_shape) if x.state_shape else 1 for x in plan.layouts)
    assert held == pytest.approx(6 * padded / 8, rel=0.02)


def test_a_skipped_step_changes_no_bit():
    state = trained(made("stage 2", "remainder", optax.apply_if_finite(optax.adamw(1e-2), 3)))
    before = masters(state), [bits_of(p) for p in jax.tree.leaves(state.params)]
    bad = {k: jnp.full(s, jnp.nan, BF16) for k, s in SHAPES.items()}
    state = step_of(state.tx)(state, bad)
    after = masters(state), [bits_of(p) for p in jax.tree.leaves(state.params)]
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(a, b)


# --- params that the user replaces -------------------------------------------------------------------------------


def test_a_replaced_param_keeps_the_old_remainder():
    """Pruning gives no NaN, no master is more than half a unit of bf16 away, and remainders can be set to zero."""
    state = trained(made("stage 3", "remainder"))
    assert any((np.asarray(m) < 0).any() for m in jax.tree.leaves(state.opt_state.master))
    pruned = jax.tree.map(lambda p: jnp.where(jnp.arange(p.size).reshape(p.shape) % 2 == 0, 0, p + p), state.params)
    replaced = state.replace(params=jzero.plan_of(state).place(pruned))
    for m, p in zip(masters(replaced), jax.tree.leaves(pruned), strict=True):
        master, param = m.view(np.float32), np.asarray(p, np.float32)
        assert np.isfinite(master).all()
        assert (np.abs(master - param) <= 2.0**-8 * np.abs(param) + 1e-38).all()
    fresh = jax.tree.map(jnp.zeros_like, replaced.opt_state.master)
    fresh = replaced.replace(opt_state=replaced.opt_state._replace(master=fresh))
    for m, p in zip(masters(fresh), jax.tree.leaves(pruned), strict=True):
        np.testing.assert_array_equal(m.view(np.float32), np.asarray(p, np.float32))
    assert all(np.isfinite(m.view(np.float32)).all() for m in masters(trained(replaced, 1)))


# --- other layouts, and files ------------------------------------------------------------------------------------

PLACES = [("stage 2", "host of 5 devices"), ("host", "stage 3"), ("1 device", "replicas"), ("stage 0", "stage 1")]
MOVES = [
    (a, b, *kinds) for a, b in PLACES
    for kinds in itertools.product(KINDS, KINDS) if kinds != ("auto", "auto")
]  # fmt: skip


@pytest.mark.default_cases("stage 2-host of 5 devices-auto-remainder")
@pytest.mark.parametrize(("old", "new", "was", "becomes"), MOVES)
def test_resharding_and_checkpoints(old, new, was, becomes, tmp_path):
    """Into another layout and the other kind of master: masters to the bit, params by the rule of the target."""
    reference = trained(made("stage 2", "auto"))
    state = trained(made(old, was))
    jzero.checkpoint.save(tmp_path / "saved", state)
    fields: Any = {**LAYOUTS[new](), "master_dtype": becomes, "min_shard_bytes": 0}
    moved = jzero.shard(state, **fields)
    like = jzero.abstract(functools.partial(create, ADAMW, BF16), **fields)
    restored = jzero.checkpoint.restore(tmp_path / "saved", like)
    for got in (moved, restored):
        assert_masters(got, reference)
        assert_params_of(got)
    more = trained(made("stage 2", "auto"), 6)
    assert_masters(trained(restored, 2, first=4), more)


def test_a_checkpoint_of_one_bare_array(mesh, tmp_path):
    """Its names have one key each: `rounding_count` is not taken for a param."""

    def made(kind):
        plan = jzero.make_plan(
            jnp.ones((16, 5), BF16), stage=1, mesh=mesh, min_shard_bytes=0, master_dtype=kind, moment_dtype="bfloat16"
        )
        tx = jzero.zero(optax.sgd(LR, momentum=HALF), plan)
        params = plan.place(jnp.full((16, 5), 0.3, BF16))
        return {"params": params, "opt_state": jax.jit(tx.init)(params)}, tx

    state, tx = made("remainder")
    jzero.checkpoint.save(tmp_path / "saved", state, tx=tx)
    like, tx = made("auto")
    got = jzero.checkpoint.restore(tmp_path / "saved", like, tx=tx)
    np.testing.assert_array_equal(got["opt_state"].master, np.asarray(state["params"], np.float32))


@pytest.mark.default_cases("auto")
@pytest.mark.parametrize("kind", KINDS)
def test_safetensors(kind, tmp_path):
    """An export holds the fp32 masters; they are read into pairs."""
    reference = trained(made("stage 2", "auto"))
    jzero.checkpoint.save(tmp_path / "saved", trained(made("stage 3", kind)))
    jzero.checkpoint.export(tmp_path / "saved", tmp_path / "model.safetensors")
    got = jzero.checkpoint.load_safetensors(tmp_path / "model.safetensors", made("5 devices", "remainder"), cast=True)
    assert_masters(got, reference)
    assert_params_of(got)


def mixed(dtype):
    """A state whose bias is of another dtype."""
    state = create(ADAMW, BF16)
    params = {**state.params, "bias": state.params["bias"].astype(dtype)}
    return state.replace(params=params, opt_state=ADAMW.init(params))


@pytest.mark.parametrize("only", [None, "params"])
def test_a_checkpoint_of_pairs_into_a_state_with_one_wider_param(only, tmp_path, mesh):
    """Leaf by leaf: a pair stays one, and a param in fp32 is read from its master."""
    state = trained(made("stage 2", "remainder"))
    jzero.checkpoint.save(tmp_path / "saved", state)
    like = jzero.abstract(lambda: mixed(F32), stage=2, mesh=mesh, master_dtype="remainder", min_shard_bytes=0)
    got = jzero.checkpoint.restore(tmp_path / "saved", like, cast=True, only=only)
    want = jzero.unshard(state.opt_state, tx=state.tx, params=state.params).master["bias"]
    np.testing.assert_array_equal(jzero.unshard(got.params["bias"]), want)


@pytest.mark.nightly
def test_params_in_fp16_are_read_from_masters(tmp_path, mesh):
    """They are the masters, rounded once: else the next update would take them for params that someone replaced."""
    state = trained(made("stage 2", "remainder"))
    state = state.replace(params={**state.params, "kernel": state.params["kernel"] + 1})
    fields: Any = {"stage": 2, "mesh": mesh, "min_shard_bytes": 0}
    like = jzero.abstract(functools.partial(create, ADAMW, jnp.float16), **fields)
    for kind in KINDS:
        jzero.checkpoint.save(tmp_path / kind, jzero.shard(state, master_dtype=kind, **fields))
        got = jzero.checkpoint.restore(tmp_path / kind, like, cast=True)
        for p, m in zip(jax.tree.leaves(got.params), jax.tree.leaves(got.opt_state.master), strict=True):
            np.testing.assert_array_equal(p, m[tuple(map(slice, p.shape))].astype(jnp.float16))
    large = state.replace(params={**state.params, "kernel": state.params["kernel"] + 1e6})
    jzero.checkpoint.save(tmp_path / "large", large)
    with pytest.raises(ValueError, match="values of f32 cannot be held by f16"):
        jzero.checkpoint.restore(tmp_path / "large", like, cast=True)


@pytest.mark.nightly
def test_explicit_meshes_and_params_elsewhere(tmp_path):
    """Masters of params on one device; unshard, conversion and safetensors under a mesh with Explicit axes."""
    want = trained(made("stage 2", "remainder"))
    own = jax.device_put(jzero.unshard(want.params), jax.devices()[3])
    for m, w in zip(jax.tree.leaves(jzero.unshard(want.opt_state, tx=want.tx, params=own).master), masters(want),
                    strict=True):  # fmt: skip
        np.testing.assert_array_equal(bits_of(m), w)
    alone = trained(made("stage 2", "auto"))
    alone = alone.replace(params=jax.device_put(jzero.unshard(alone.params), jax.devices()[3]))
    fields: Any = {**LAYOUTS["stage 3"](), "master_dtype": "remainder", "min_shard_bytes": 0}
    assert_masters(jzero.shard(alone, **fields), want)
    jzero.checkpoint.save(tmp_path / "saved", want)
    jzero.checkpoint.export(tmp_path / "saved", tmp_path / "model.safetensors")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    wanted = masters(want)
    with jax.set_mesh(mesh):
        state = jzero.shard(lambda: create(ADAMW, BF16), stage=3, master_dtype="remainder", min_shard_bytes=0)
        state = jzero.checkpoint.load_safetensors(tmp_path / "model.safetensors", state, cast=True)
        for m, w in zip(masters(state), wanted, strict=True):
            np.testing.assert_array_equal(m, w)


def test_unshard_makes_masters_of_params_and_remainders():
    state = made("stage 2", "remainder")
    with pytest.raises(ValueError, match=r"unshard: .*params=state\.params"):
        jzero.unshard(state.opt_state, tx=state.tx)
    for wrong in (jnp.ones((1,), BF16), state.params["bias"].astype(F32)):
        with pytest.raises(ValueError, match="unshard: params"):
            jzero.unshard(state.opt_state, tx=state.tx, params={**state.params, "bias": wrong})
    whole = jzero.unshard(state.opt_state, tx=state.tx, params=state.params)
    assert {x.dtype for x in jax.tree.leaves(whole.master)} == {jnp.dtype(F32)}
    assert {k: x.shape for k, x in whole.master.items()} == SHAPES
    fields: Any = {"stage": 1, "master_dtype": "remainder", "min_shard_bytes": 2**20, "offload": "host"}
    state = jzero.shard(state, mesh=jzero.plan_of(state).mesh, **fields)  # whole leaves, in host memory
    again = jzero.unshard(state.opt_state, tx=state.tx, params=state.params)
    jax.tree.map(np.testing.assert_array_equal, again.master, whole.master)


# --- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.unit
@pytest.mark.parametrize(("fields", "said"), [
    ({"updates": "delta"}, "exclude each other"),
    ({"offload": jzero.Offload(update="host")}, "has no params beside its masters"),
    ({"offload": jzero.Offload(tier="disk", path="never written")}, "has no params beside its masters"),
], ids=["delta", "host", "disk"])  # fmt: skip
def test_fields_that_do_not_go_with_it(fields, said):
    with pytest.raises(ValueError, match=said):
        jzero.ZeroConfig(stage=2, master_dtype="remainder", **fields)


@pytest.mark.unit
@pytest.mark.parametrize(("dtypes", "said"), [
    ({"a": F32, "b": F32}, "no param is bfloat16|bfloat16, or leave master_dtype out"),
    ({"a": jnp.float16, "b": BF16}, "Cast the params to bfloat16"),
    ({"a": jnp.float8_e4m3fn, "b": BF16}, "not the upper half of float32"),
], ids=["fp32", "fp16", "fp8"])  # fmt: skip
def test_params_that_it_is_not_for(dtypes, said, mesh):
    params = {k: jax.ShapeDtypeStruct((16, 16), d) for k, d in dtypes.items()}
    with pytest.raises(ValueError, match=said):
        jzero.make_plan(params, stage=2, mesh=mesh, master_dtype="remainder")


@pytest.mark.unit
def test_wider_params_beside_bf16_have_no_master(mesh):
    params = {"w": jnp.ones((16, 16), BF16), "norm": jnp.ones(16)}
    plan = jzero.make_plan(params, stage=2, mesh=mesh, master_dtype="remainder", min_shard_bytes=0)
    state = jax.eval_shape(jzero.zero(optax.adamw(1e-3), plan).init, params)
    assert (state.master["w"].dtype, state.master["norm"]) == (jnp.int16, None)


# --- compiled for GPUs -------------------------------------------------------------------------------------------


@pytest.mark.pod
@pytest.mark.nightly
@pytest.mark.parametrize("offload", [None, "host"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_no_more_is_alive_than_with_fp32_masters(stage, offload):
    """State is 6 bytes per param, not 12; temp is the same; and the halves of every pair come out of one fusion."""
    pair = program(stage=stage, n=64, offload=offload, master_dtype="remainder", moment_dtype="bfloat16")
    wide = program(stage=stage, n=64, offload=offload)
    estimates = [jzero.estimate(p.plan) for p in (pair, wide)]
    held = [x.opt_state + x.host for x in estimates]
    assert held[0] == pytest.approx(held[1] / 2, rel=0.01)
    temps = [p.program.memory_analysis().temp_size_in_bytes for p in (pair, wide)]
    assert temps[0] <= 1.01 * temps[1]
    assert jzero.findings(pair.program, pair.plan) == ()
    fused = re.findall(r"^%\S*fus\S* \((.*)\) -> (.*) \{$", pair.program.as_text(), re.MULTILINE)
    made = [re.findall(r"\b[us]16(\[[\d,]+\])", out) for given, out in fused if re.search(r" s16\[[\d,]+\]", given)]
    made = [x for x in made if x]
    assert len(made) >= 6
    for shapes in made:
        assert all(shapes.count(x) % 2 == 0 for x in shapes), shapes
