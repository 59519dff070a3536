"""`moment_dtype="int8"`: the map and its blocks, which leaves are quantized, and where the codes go."""

from __future__ import annotations

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P
from optax import contrib
from programs import program
from safetensors.numpy import load_file

import jzero
from jzero.layout.blocks import Blocks, blocks_of
from jzero.update.int8_moments import decoded, encoded, quantize, scale_of
from jzero.update.zero_state import inner_of

ROW = Blocks.of((4, 256), None, 256)
CODES = jnp.tile(jnp.concatenate([jnp.arange(-127, 128), jnp.zeros(1)]).astype(jnp.int8), (4, 1))


# --- the map -----------------------------------------------------------------------------------------------------


@pytest.mark.unit
@pytest.mark.parametrize("salt", [None, 3])
def test_a_value_that_a_code_holds_is_kept(salt):
    scales = jnp.asarray([[1e-25], [3.3e-9], [1.0], [7.7e20]], jnp.float32)
    values = decoded(CODES, scales, ROW)
    np.testing.assert_array_equal(scale_of(values, ROW), scales)
    again = encoded(values, scales, ROW, None if salt is None else jnp.uint32(salt))
    np.testing.assert_array_equal(again, CODES)


@pytest.mark.unit
def test_random_rounding_has_the_right_mean():
    values = jnp.zeros(256).at[:5].set(jnp.asarray([1.0, 0.4321, -0.0123, 3e-5, 1e-7]))
    block = Blocks.of((256,), None, 256)
    scale = scale_of(values, block)
    one = lambda salt: decoded(encoded(values, scale, block, salt), scale, block)  # noqa: E731
    many = np.asarray(jax.vmap(one)(jnp.arange(4096, dtype=jnp.uint32)), np.float64)[:, :5]
    assert (np.ptp(many[:, 1:], axis=0) > 0).all()
    error = 4 * many.std(0) / 64 + 1e-7 * np.abs(many.mean(0))
    assert (np.abs(many.mean(0) - np.asarray(values[:5], np.float64)) <= error).all()


@pytest.mark.unit
def test_what_is_not_zero_never_becomes_zero():
    values = jnp.full(256, 1e-12).at[0].set(1.0).at[1].set(0.0)
    codes, scales = quantize(values, Blocks.of((256,), None, 256))
    assert (int(codes[0]), int(codes[1]), set(np.asarray(codes[2:]).tolist())) == (127, 0, {1})
    codes = encoded(values, scales, Blocks.of((256,), None, 256), jnp.uint32(5))
    assert set(np.asarray(codes[2:]).tolist()) == {1}


@pytest.mark.unit
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_a_value_that_is_not_finite_stays_visible(bad):
    block = Blocks.of((512,), None, 256)
    codes, scales = quantize(jnp.ones(512).at[3].set(bad), block)
    assert np.isfinite(scales).tolist() == [False, True]
    values = decoded(codes, scales, block)
    assert not np.isfinite(values[3])
    np.testing.assert_allclose(values[256:], 1.0)


# --- blocks ------------------------------------------------------------------------------------------------------


@pytest.mark.unit
@pytest.mark.parametrize(
    ("shape", "stack", "scales"),
    [
        ((1024,), None, (4,)), ((64, 512), None, (64, 2)), ((512, 100), None, (200,)), ((300, 7), None, (9,)),
        ((768, 12, 64), None, (768, 3)), ((4, 30, 10), 0, (4, 2)), ((4, 64, 512), 0, (4, 64, 2)),
    ],
)  # fmt: skip
def test_blocks_are_a_function_of_the_shape_and_the_stack(shape, stack, scales):
    blocks = Blocks.of(shape, stack, 256)
    assert blocks.scales_shape == scales
    values = jax.random.normal(jax.random.key(0), shape)
    flat = np.asarray(values).reshape(*shape[: blocks.lead], -1)
    for i in range(scales[-1]):
        run = np.abs(flat[..., 256 * i : 256 * (i + 1)]).max(-1)
        np.testing.assert_array_equal(np.asarray(scale_of(values, blocks))[..., i], run)
    known = Blocks.between(shape, scales)
    np.testing.assert_array_equal(scale_of(values, known), scale_of(values, blocks))


@pytest.mark.unit
@pytest.mark.parametrize(
    ("shape", "spec", "scales"),
    [
        ((64, 512), P("data"), P("data")), ((64, 2048), P(None, "data"), P(None, "data")),
        ((64, 512), P(None, "data"), None), ((512, 100), P("data"), P("data")), ((300, 8), P(None, "data"), None),
        ((768, 12, 64), P(None, "data"), None), ((4, 64, 512), P(None, "data"), P(None, "data")),
    ],
)  # fmt: skip
def test_a_layout_cuts_a_block_or_has_a_layout_of_scales(shape, spec, scales, mesh):
    assert Blocks.of(shape, 0 if shape[0] == 4 else None, 256).spec(spec, mesh) == scales


# --- a run -------------------------------------------------------------------------------------------------------

SHAPES = {"w": (128, 64), "up": (64, 512), "odd": (77, 81), "embedding": (256, 64), "bias": (512,), "cut": (5, 1000)}


def params(dtype=jnp.float32):
    return {k: jax.random.normal(jax.random.key(i), s).astype(dtype) for i, (k, s) in enumerate(SHAPES.items())}


def grads(step: int, like):
    flat, tree = jax.tree.flatten(like)
    keys = jax.random.split(jax.random.key(100 + step), len(flat))
    return tree.unflatten([jax.random.normal(k, x.shape).astype(x.dtype) for k, x in zip(keys, flat, strict=True)])


def created(tx, dtype=jnp.float32):
    return TrainState.create(apply_fn=len, params=params(dtype), tx=tx)


STEP = jax.jit(lambda state, g: state.apply_gradients(grads=g))
ADAMW = optax.adamw(1e-3)


def run(tx, steps=2, dtype=jnp.float32, **fields):
    """The state after a few updates, each from given gradients."""
    state = jzero.shard(lambda: created(tx, dtype), min_shard_bytes=0, **{"stage": 2, "moment_dtype": "int8", **fields})
    for i in range(steps):
        state = STEP(state, grads(i, state.params))
    return state


@pytest.mark.unit
def test_which_leaves_are_quantized(mesh):
    state = run(ADAMW, steps=1, mesh=mesh)
    kinds = {k: state.opt_state.inner[0].mu[k].dtype.name for k in SHAPES}
    wide = {"odd", "embedding", "bias", "cut"}
    assert kinds == {k: "float32" if k in wide else "int8" for k in SHAPES}
    text = jzero.plan_of(state).describe(state.tx)
    for name, why in (("odd", "padded"), ("embedding", "lookup"), ("bias", "fewer than 4096"), ("cut", "would cut")):
        assert re.search(rf"\['{name}'\] .*{why}", text), text
    share = (SHAPES["w"][0] * 64 + 64 * 512) / sum(np.prod(s) for s in SHAPES.values())
    assert f"moments of {share:.1%}" in text


@pytest.mark.unit
def test_layers_of_few_values_in_a_row_stay_wide(mesh):
    """Layers along the last dims: a scale for each value, or for eight, would take more than codes save."""
    shapes = {"last": (64, 128, 4), "rows": (64, 16, 8), "bias": (64, 4, 256)}
    stacks = {"last": 2, "rows": 1, "bias": 1}
    leaves = {k: jax.ShapeDtypeStruct(v, jnp.float32) for k, v in shapes.items()}
    plan = jzero.make_plan(leaves, stage=2, mesh=mesh, min_shard_bytes=0, scan_axes=stacks, moment_dtype="int8")
    assert {x.keys[0]: blocks_of(x, plan) is None for x in plan.layouts} == {"last": True, "rows": True, "bias": False}
    assert re.search(r"\['rows'\] .*only 8 of its values in a row belong to one layer", plan.describe(ADAMW))
    wide = jzero.make_plan(leaves, stage=2, mesh=mesh, min_shard_bytes=0, scan_axes=stacks)
    assert jzero.estimate(plan, tx=ADAMW).opt_state < jzero.estimate(wide, tx=ADAMW).opt_state


@pytest.mark.nightly
@pytest.mark.parametrize("fields", [{}, {"master_dtype": "float64"}])
def test_moments_are_seen_in_the_dtype_of_the_chain(mesh, fields):
    with jax.enable_x64(True):
        dtype = jnp.bfloat16 if fields else jnp.float64
        state = run(optax.apply_if_finite(optax.adam(1e-2), 10), dtype=dtype, steps=1, mesh=mesh, **fields)
        assert {x.dtype.name for x in jax.tree.leaves(state.opt_state.inner)} > {"int8"}


@pytest.mark.unit
@pytest.mark.parametrize(("dtype", "state"), [("int8", P(("model", "data"))), (None, P("model", "data"))])
def test_a_plan_splits_a_dim_that_cuts_no_block(dtype, state):
    """A kernel whose rows tensor parallelism has: pieces of its columns would have 128 values."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    shapes = {"w": jax.ShapeDtypeStruct((128, 512), jnp.float32)}
    given = {"param_specs": {"w": P("model")}, "mesh": mesh, "min_shard_bytes": 0, "scan_axes": {}}
    plan = jzero.make_plan(shapes, stage=3, moment_dtype=dtype, **given)
    assert (plan.layouts[0].state, plan.layouts[0].stored, plan.layouts[0].used) == (state, state, P("model"))
    assert (blocks_of(plan.layouts[0], plan) is None) == (dtype is None)


@pytest.mark.default_cases("fields1")
@pytest.mark.unit
@pytest.mark.parametrize("fields", [{}, {"master_dtype": "remainder", "stage": 3}])
def test_estimate_counts_codes_and_scales(mesh, fields):
    state = run(ADAMW, steps=1, dtype=jnp.bfloat16 if fields else jnp.float32, mesh=mesh, **fields)
    plan = jzero.plan_of(state)
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state.opt_state))
    assert jzero.estimate(plan, tx=state.tx).opt_state == held
    assert jzero.estimate(plan).opt_state == pytest.approx(held, abs=64)


@pytest.mark.default_cases("fields1-adamw", "fields3-muon")
@pytest.mark.parametrize("tx", [ADAMW, contrib.muon(1e-3)], ids=["adamw", "muon"])
@pytest.mark.parametrize("fields", [{}, {"stage": 3}, {"offload": "host"}, {"stage": 0}])
def test_an_update_computes_with_moments_that_are_not_rounded(fields, tx, mesh):
    """From one state the params are those of plain optax, and a moment is at most a code away from its."""
    state = jzero.shard(run(tx, mesh=mesh), **{"stage": 2, "moment_dtype": "int8", "mesh": mesh, "min_shard_bytes": 0}
                        | fields)  # fmt: skip
    start, own = values(state), jax.tree.map(np.asarray, state.params)
    plain = jax.jit(tx.init)(own)
    plain = jax.tree.unflatten(jax.tree.structure(plain), start)
    updates, plain = jax.jit(tx.update)(grads(7, own), plain, own)
    state = STEP(state, grads(7, state.params))
    want = optax.apply_updates(own, updates)
    for k in SHAPES:
        np.testing.assert_allclose(state.params[k], want[k], rtol=2e-5, atol=2e-7)
    for a, b in zip(values(state), jax.tree.leaves(plain), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        largest = np.abs(b).max(initial=0)
        gap = 4.6 / 127 * largest**0.25 * np.maximum(np.abs(a), np.abs(b)) ** 0.75 + 1e-6 * largest
        assert (np.abs(a - b) <= gap).all()


@pytest.mark.unit
def test_a_skipped_step_changes_no_bit(mesh):
    state = run(optax.apply_if_finite(optax.adamw(1e-2), 3), mesh=mesh)
    after = STEP(state, jax.tree.map(lambda p: p * jnp.nan, state.params)).opt_state
    pairs = ((state.opt_state.inner.inner_state, after.inner.inner_state),
             (state.opt_state.moment_scales, after.moment_scales))  # fmt: skip
    for a, b in pairs:
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.nightly
def test_a_slow_average_of_a_chain_without_a_count(mesh):
    """Rounding to nearest, or alike in every step, would leave it elsewhere."""
    state = run(optax.chain(optax.trace(decay=0.997), optax.scale(-1e-6)), steps=0, mesh=mesh)

    @jax.jit
    def many(state):
        def step(state, i):
            flips = jax.random.uniform(jax.random.fold_in(jax.random.key(0), i), (64, 512)) < 0.25
            g = jax.tree.map(jnp.zeros_like, state.params) | {"up": flips.astype(jnp.float32)}
            return state.apply_gradients(grads=g), None

        return jax.lax.scan(step, state, jnp.arange(800))[0]

    state = many(state)
    assert int(state.opt_state.rounding_count) == 800
    whole = jzero.unshard(state.opt_state, tx=state.tx)
    want = 0.25 / 0.003 * (1 - 0.997**800)
    assert float(jnp.mean(whole.inner[0].trace["up"])) == pytest.approx(want, rel=0.02)


# --- elsewhere ---------------------------------------------------------------------------------------------------

PLACES = {
    "stage 3": {"stage": 3, "moment_dtype": "int8"},
    "host": {"stage": 2, "moment_dtype": "int8", "offload": "host"},
    "4 devices": {"stage": 2, "moment_dtype": "int8", "n": 4},
    "5 devices": {"stage": 2, "moment_dtype": "int8", "n": 5},
    "blocks of 64": {"stage": 2, "moment_dtype": "int8", "quantize_block": 64},
    "blocks of 64, all wide": {"stage": 2, "moment_dtype": "int8", "quantize_block": 64, "n": 5},
    "fp32": {"stage": 2},
    "bf16": {"stage": 1, "moment_dtype": "bfloat16"},
}
SAME = ("stage 3", "host", "4 devices", "5 devices")


def values(state):
    return [np.asarray(x) for x in jax.tree.leaves(inner_of(jzero.unshard(state.opt_state, tx=state.tx)))]


@functools.cache
def trained():
    return run(ADAMW, mesh=jax.make_mesh((8,), ("data",)))


@pytest.mark.default_cases("5 devices")
@pytest.mark.parametrize("place", PLACES)
def test_resharding_and_checkpoints(place, mesh, tmp_path):
    fields = dict(PLACES[place])
    n = fields.pop("n", 8)
    fields |= {"mesh": jax.make_mesh((n,), ("data",), devices=jax.devices()[:n]), "min_shard_bytes": 0}
    there = jzero.shard(trained(), **fields)
    jzero.checkpoint.save(tmp_path / "codes", trained())
    like = jzero.abstract(lambda: created(ADAMW), **fields)
    if place in SAME:
        read = jzero.checkpoint.restore(tmp_path / "codes", like)
    else:
        with pytest.raises(ValueError, match="cast=True"):
            jzero.checkpoint.restore(tmp_path / "codes", like)
        read = jzero.checkpoint.restore(tmp_path / "codes", like, cast=True)
    kept = place not in ("blocks of 64", "bf16")
    for a, b, start in zip(values(there), values(read), values(trained()), strict=True):
        np.testing.assert_array_equal(a, b)
        assert not kept or (a == start).all()
    # and back
    jzero.checkpoint.save(tmp_path / "there", there)
    home = {"mesh": mesh, "min_shard_bytes": 0, "stage": 2, "moment_dtype": "int8"}
    like = jzero.abstract(lambda: created(ADAMW), **home)  # on 5 devices no leaf is quantized
    back = jzero.checkpoint.restore(tmp_path / "there", like, cast=place not in SAME[:3])
    if kept:
        for a, b in zip(jax.tree.leaves(back.opt_state), jax.tree.leaves(trained().opt_state), strict=True):
            np.testing.assert_array_equal(a, b)


def test_moments_are_exported_as_values(tmp_path):
    jzero.checkpoint.save(tmp_path / "codes", trained())
    (file,) = jzero.checkpoint.export(tmp_path / "codes", tmp_path / "m.safetensors", include=("opt_state",))
    (found,) = [x for name, x in load_file(file).items() if name.startswith("opt_state") and name.endswith("mu.up")]
    want = jzero.unshard(trained().opt_state, tx=trained().tx)
    np.testing.assert_array_equal(found, np.asarray(inner_of(want)[0].mu["up"], np.float32))


def test_wide_leaves_are_listed_with_their_own_bytes(mesh):
    shapes = {"w": jnp.ones((8, 8)), "block": {"w": jnp.ones((512, 512))}}
    plan = jzero.make_plan(shapes, stage=0, mesh=mesh, moment_dtype="int8")
    assert re.search(r"\['w'\] .*fewer than 4096 values +512 B of state", plan.describe(ADAMW))


@pytest.mark.unit
def test_what_is_refused(mesh):
    for size in (3, 100, 0, 4):
        with pytest.raises(ValueError, match="quantize_block"):
            jzero.ZeroConfig(moment_dtype="int8", quantize_block=size)
    for offload in (jzero.Offload(update="host"), jzero.Offload(tier="disk", path="/nowhere")):
        with pytest.raises(ValueError, match=r"moments in 16 bits or more.*bfloat16"):
            jzero.ZeroConfig(moment_dtype="int8", offload=offload)
    plan = jzero.make_plan(params(), mesh=mesh, stage=2, moment_dtype="int8")
    with pytest.raises(ValueError, match="has no moments"):
        jzero.zero(optax.sgd(1e-3), plan).init(params())


# --- compiled for GPUs -------------------------------------------------------------------------------------------


def stored_in_32_bits(text: str) -> set[int]:
    """How many values each result in 32 bits has, outside of fused computations, whose values stay in registers."""
    inside, within = set(re.findall(r"fusion\(.*calls=(%[\w.-]+)", text)), ""
    found = set()
    for line in text.splitlines():
        if begin := re.match(r"(?:ENTRY )?(%[\w.-]+) \(.*\{$", line):
            within = begin[1]
        result = re.match(r"\s+(?:ROOT )?%[\w.-]+ = (.*?) [\w-]+\(", line)
        if result and within not in inside:
            shapes = re.findall(r"\b[fsu]32\[([\d,]+)\]", result[1])
            found |= {math.prod(map(int, dims.split(","))) for dims in shapes}
    return found


@pytest.mark.pod
@pytest.mark.nightly
def test_what_an_offloaded_update_moves_over_pcie():
    """8.1 bytes per quantized param and step, both ways together, where fp32 masters and moments take 24."""
    small = program(stage=2, offload="host", master_dtype="remainder", moment_dtype="int8")
    moved = small.report.pcie
    assert moved["to_device"] == moved["to_host"] == small.estimate.to_device
    quantized = sum(x.size for x in small.plan.layouts if blocks_of(x, small.plan)) / 8
    others = sum(x.size for x in small.plan.layouts) / 8 - quantized
    assert 8 * quantized < sum(moved.values()) - 2 * 10 * others < 8.15 * quantized


@pytest.mark.pod
@pytest.mark.nightly
@pytest.mark.parametrize("stage", [2, 3])
def test_nothing_wide_is_alive_in_an_update(stage):
    """Four bytes per quantized param; temp as with fp32 state; nothing in 32 bits of the size of a shard is stored."""
    small = program(stage=stage, n=64, master_dtype="remainder", moment_dtype="int8")
    wide = program(stage=stage, n=64)
    total = sum(x.size for x in small.plan.layouts)
    share = sum(x.size for x in small.plan.layouts if blocks_of(x, small.plan)) / total
    assert share > 0.5
    per_value = jzero.estimate(small.plan).opt_state / (total / 64)
    assert per_value <= 1.02 * (2 + 2.03 * share + 8 * (1 - share))
    temps = [p.program.memory_analysis().temp_size_in_bytes for p in (small, wide)]
    assert temps[0] <= 1.02 * temps[1]
    shards = {x.size // 64 for x in small.plan.layouts if blocks_of(x, small.plan)}
    assert not shards & stored_in_32_bits(small.program.as_text())
    assert shards <= stored_in_32_bits(wide.program.as_text())  # the moments themselves
    assert jzero.findings(small.program, small.plan) == ()
