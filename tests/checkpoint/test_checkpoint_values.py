"""No value is changed in silence: names that collide, conversions that lose numbers, params alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoint_files import raw
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from layouts import SHAPES, abstract, assert_same, create, mesh_of, scrambled, shard
from models import batch
from states import create_full, create_nnx, full_step, nnx_step

import jzero
from jzero import checkpoint
from jzero.checkpoint import converting

# -------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    "tree",
    [
        {"layer": {"w": jnp.zeros(2)}, "layer.w": jnp.ones(2)},
        {"a": [jnp.zeros(2)], "a.0": jnp.ones(2)},
        {"a": {"b": {"c": jnp.zeros(2)}, "b.c": jnp.ones(2)}},
    ],
    ids=["dots", "numbers", "below"],
)
def test_two_leaves_of_one_name_are_refused(tree, tmp_path):
    saves = [
        lambda: checkpoint.save(tmp_path / "x", tree),
        lambda: checkpoint.save_async(tmp_path / "x", tree),
        lambda: checkpoint.Steps(tmp_path / "run").save(1, tree),
    ]
    for save in saves:
        with pytest.raises(
            ValueError, match=r"1 name would be that of several leaves:\n.* and .*\n.*Rename one"
        ):
            save()
    assert not list(tmp_path.iterdir())
    path = checkpoint.save(tmp_path / "x", {"w": jnp.ones(3)})
    with pytest.raises(ValueError, match="restore: 1 name would be that of several leaves"):
        checkpoint.restore(path, tree)


def test_dots_that_do_not_collide(tmp_path):
    tree = {"layer": {"w": jnp.zeros(2)}, "layer.b": jnp.ones(2), "": {"x": jnp.ones(1)}}
    path = checkpoint.save(tmp_path / "x", tree)
    assert_same(checkpoint.restore(path, jax.tree.map(jnp.zeros_like, tree)), tree)


# -------------------------------------------------------------------------------------------------- values

STORED = {
    "far": np.int64(2**40 + 7),
    "step": 2**40,
    "near": 7,
    "row": np.array([1, 2**40]),
    "z": np.array([1 + 2j]),
    "nan": np.array([1.5, np.nan], np.float32),
    "wide": np.array([1.5, -2.75], np.float32),
    "huge": np.array([1.0, 1e6], np.float32),
    "endless": np.array([1.0, np.inf], np.float32),
    "ints": np.array([300, -1], np.int32),
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    return checkpoint.save(tmp_path_factory.mktemp("values") / "1", STORED)


@pytest.mark.parametrize(
    ("name", "target", "text"),
    [
        ("far", jnp.int32(0), "far: 1 of 1 values of i64 cannot be held by i32, the first is 1099511627783"),
        (
            "step",
            jnp.int32(0),
            "step: 1 of 1 values of i64 cannot be held by i32, the first is 1099511627776",
        ),
        ("step", jax.ShapeDtypeStruct((), jnp.int32), "cannot be held by i32"),
        ("row", jnp.zeros(2, jnp.int32), r"row +i64\[2\] +i32\[2\] +another dtype"),
        (
            "row",
            jax.ShapeDtypeStruct((2,), np.int64),
            r"row +i64\[2\] +i32\[2\] +64 bits need jax_enable_x64",
        ),
        ("row", np.zeros(2, np.int32), r"row +i64\[2\] +i32\[2\] +another dtype"),
        ("nan", np.zeros(2), r"nan +f32\[2\] +f64\[2\] +another dtype"),
        ("ints", np.zeros(2, np.uint32), r"ints +i32\[2\] +u32\[2\] +another dtype"),
    ],
)
def test_without_cast_no_dtype_is_narrowed(name, target, text, stored):
    with pytest.raises(ValueError, match=text):
        checkpoint.restore(stored, STORED | {name: target})


def test_a_number_of_python_fits_where_its_value_does(stored):
    back = checkpoint.restore(stored, STORED | {"near": jnp.int32(0)})
    assert (back["near"].dtype, int(back["near"])) == (jnp.int32, 7)
    assert (back["step"], type(back["step"])) == (2**40, int)


LOSSES = [
    ("z", np.zeros(1), r"z +complex128\[1\] +f64\[1\] +complex"),
    ("z", jnp.zeros(1, jnp.int32), "complex"),
    ("nan", jnp.zeros(2, jnp.int32), "1 of 2 values of f32 cannot be held by i32, the first is nan"),
    ("endless", np.zeros(2, np.int64), "the first is inf"),
    ("huge", jnp.zeros(2, jnp.int8), r"the first is 1000000\.0"),
    (
        "huge",
        jnp.zeros(2, jnp.float16),
        r"1 of 2 values of f32 cannot be held by f16, the first is 1000000\.0",
    ),
    ("huge", np.zeros(2, np.float16), "cannot be held by f16"),
    ("huge", jnp.zeros(2, jnp.float8_e4m3fn), "cannot be held by float8_e4m3fn"),
    ("ints", jnp.zeros(2, jnp.int8), "1 of 2 values of i32 cannot be held by i8, the first is 300"),
    ("ints", np.zeros(2, np.uint32), "the first is -1"),
    ("ints", np.zeros(2, bool), "2 of 2 values of i32 cannot be held by bool"),
    ("row", jnp.zeros(2, jnp.int32), "the first is 1099511627776"),
    ("far", jnp.int32(0), "the first is 1099511627783"),
]


@pytest.mark.parametrize(("name", "target", "text"), LOSSES, ids=[f"{n} {t.dtype}" for n, t, _ in LOSSES])
def test_with_cast_a_number_may_be_rounded_and_not_replaced(name, target, text, stored):
    with pytest.raises(ValueError, match=text):
        checkpoint.restore(stored, STORED | {name: target}, cast=True)


def test_what_is_rounded(stored):
    mesh = mesh_of(2)
    split = jax.device_put(jnp.zeros(2, jnp.int16), NamedSharding(mesh, jax.P("data")))
    like = STORED | {
        "wide": np.zeros(2, np.int8),
        "endless": jnp.zeros(2, jnp.float16),  # infinite before and after
        "huge": jnp.zeros(2, jnp.bfloat16),
        "ints": split,
        "row": np.zeros(2, np.float32),
        "near": jnp.int8(0),
    }
    back = checkpoint.restore(stored, like, cast=True)
    assert back["wide"].tolist() == [1, -2]
    assert back["endless"].tolist() == [1, np.inf]
    assert back["huge"].tolist() == [1.0, 999424.0]
    assert back["ints"].tolist() == [300, -1]
    assert back["ints"].sharding == split.sharding
    assert back["row"].tolist() == [1, 2**40]
    assert int(back["near"]) == 7


@pytest.mark.parametrize(
    "wanted", ["int4", "uint4", "int8", "float8_e5m2", "float16", "bool", "complex64", "uint64"]
)
def test_every_kind_of_dtype_can_be_asked_for(wanted):
    value = np.array([0, 1, 1], np.float32)
    assert converting.converted(value, jnp.dtype(wanted), "x").astype(np.complex64).tolist() == [0, 1, 1]


@pytest.mark.parametrize("cast", ["False", 1, None, 0.0])
def test_cast_is_a_bool(cast, stored):
    with pytest.raises(TypeError, match=r"restore\(cast=.*\): cast must be True or False, not"):
        checkpoint.restore(stored, STORED, cast=cast)


# --------------------------------------------------------------------------------------------- params alone


def fresh(layout="stage 2", tx=None, dtype=jnp.float32):
    """A sharded state of the same model, other values, perhaps another optimizer."""
    return scrambled(shard(create(tx or optax.adamw(1e-2), dtype=dtype), layout), seed=3)


@pytest.mark.parametrize(
    "tx", [None, optax.sgd(1e-2, momentum=0.9), optax.adafactor(1e-2)], ids=["same", "sgd", "adafactor"]
)
def test_params_alone(tx, tmp_path):
    saved = scrambled(shard(create(), "stage 3"))
    path = checkpoint.save(tmp_path / "1", saved)
    like = fresh(tx=tx)
    if tx is not None:
        with pytest.raises(
            ValueError, match=r'Or pass only="params": the params fit, and optimizer state, step and all'
        ):
            checkpoint.restore(path, like)
    back = checkpoint.restore(path, like, only="params")
    assert_same(jax.device_get(back.params), jax.device_get(jzero.unshard(saved.params)))
    for a, b in zip(
        jax.tree.leaves((back.opt_state, back.step)),
        jax.tree.leaves((like.opt_state, like.step)),
        strict=True,
    ):
        assert a is b
    assert [x.sharding for x in jax.tree.leaves(back.params)] == [
        x.sharding for x in jax.tree.leaves(like.params)
    ]
    assert jzero.plan_of(back) == jzero.plan_of(like)
    with checkpoint.Steps(tmp_path / "run") as steps:
        steps.save(1, saved)
        steps.wait()
        assert_same(steps.restore(like, only="params").params, back.params)


def test_params_alone_with_masters(tmp_path):
    saved = scrambled(shard(create(dtype=jnp.bfloat16), "stage 2"))
    path = checkpoint.save(tmp_path / "1", saved)
    like = fresh("4 devices", optax.sgd(1e-2, momentum=0.9), jnp.bfloat16)
    back = checkpoint.restore(path, like, only="params")
    for k, shape in SHAPES.items():
        cut = tuple(map(slice, shape))
        master = np.asarray(back.opt_state.master[k])[cut]
        np.testing.assert_array_equal(master, np.asarray(saved.opt_state.master[k])[cut])
        np.testing.assert_array_equal(np.asarray(back.params[k]), np.asarray(saved.params[k]))
    assert_same(back.opt_state.inner, like.opt_state.inner)
    # 16-bit params of a state that has no masters: those of the checkpoint are of no interest
    plain = {"params": {k: jnp.zeros(s, jnp.bfloat16) for k, s in SHAPES.items()}}
    assert_same(
        checkpoint.restore(path, plain, only="params")["params"], jax.device_get(jzero.unshard(saved.params))
    )


def test_params_alone_for_evaluation(tmp_path):
    """Of an abstract target the rest stays abstract: no memory for an optimizer that nobody runs."""
    saved = scrambled(shard(create(), "stage 2"))
    path = checkpoint.save(tmp_path / "1", saved)
    back = checkpoint.restore(path, abstract("stage 3"), only="params")
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(back.params))
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(back.opt_state))
    plain = create()
    assert checkpoint.restore(path, plain, only="params").opt_state is not None
    bare = checkpoint.restore(path, {"params": plain.params, "seen": 3}, only="params")
    assert (bare["seen"], type(bare["seen"])) == (3, int)


def test_params_alone_of_an_nnx_pair_and_a_mapping(tmp_path):
    pair = jzero.shard(create_nnx, stage=2, mesh=mesh_of(8), min_shard_bytes=300)
    path = checkpoint.save(tmp_path / "1", pair)
    other = create_nnx()
    other[1].step[...] += 5
    before = jax.device_get(nnx.state(other[1]))
    assert checkpoint.restore(path, other, only="params")[0] is other[0]
    np.testing.assert_array_equal(np.asarray(other[0].a.kernel[...]), np.asarray(pair[0].a.kernel[...]))
    assert_same(jax.device_get(nnx.state(other[1])), before)
    state, tx = raw(8, 3, jnp.bfloat16, seed=1, updates="delta")
    path = checkpoint.save(tmp_path / "2", state, tx=tx)
    like, tx = raw(5, 2, jnp.bfloat16)
    back = checkpoint.restore(path, like, tx=tx, only="params")
    assert_same(back["params"], state["params"])
    assert (int(back["epoch"]), back["seen"]) == (3, 0)


class Packed(nnx.Variable):
    """Weights of 4 bits, eight in a number."""


class OnPacked(nnx.Module):
    """A frozen base in packed codes, one in floats under the name of a trained param, and a trained part."""

    def __init__(self, seed):
        key = jax.random.key(seed)
        self.codes = nnx.Dict(base=Packed(jax.random.bits(key, (16, 2), jnp.uint32)))
        self.base = nnx.Dict(kernel=nnx.Variable(jax.random.normal(key, (16, 16))))
        self.kernel, self.bias = nnx.Param(jnp.ones((16, 16))), nnx.Param(jnp.ones(16))


def test_weights_that_look_like_keys_or_averages_come_with_the_params(tmp_path):
    def pair(seed):
        model = OnPacked(seed)
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    saved = jzero.shard(pair(0), stage=1, mesh=mesh_of(8))
    path = checkpoint.save(tmp_path / "1", saved)
    found = jzero.shard(pair(1), stage=1, mesh=mesh_of(8))
    checkpoint.restore(path, found, only="params")
    alone = checkpoint.restore(path, OnPacked(1), only="params")
    (file,) = checkpoint.export(path, tmp_path / "model.safetensors")
    loaded = jzero.shard(pair(2), stage=1, mesh=mesh_of(8))
    checkpoint.load_safetensors(file, loaded)
    for model in (found[0], alone, loaded[0]):
        assert_same(jax.device_get(nnx.state(model)), jax.device_get(nnx.state(saved[0])))


def test_params_alone_come_with_statistics(tmp_path):
    """Without them a model with BatchNorm evaluates wrong. Keys and averages are those of the target."""
    pair = jzero.shard(create_nnx, stage=2, mesh=mesh_of(8), min_shard_bytes=300)
    nnx_step(*pair, jzero.plan_of(pair).place_batch(batch()))
    path = checkpoint.save(tmp_path / "1", pair)
    model, _ = checkpoint.restore(path, create_nnx(), only="params")
    for x in ("mean", "var"):
        want = np.asarray(getattr(pair[0].norm, x)[...])
        np.testing.assert_array_equal(np.asarray(getattr(model.norm, x)[...]), want)
    assert int(model.drop.rngs.count[...]) == 0
    plain = create_nnx()[0]  # no optimizer: for inference
    assert checkpoint.restore(path, plain, only="params") is plain
    assert_same(jax.device_get(nnx.state(plain)), jax.device_get(nnx.state(model)))
    with pytest.raises(ValueError, match=r'of a whole state. To read its model alone, pass only="params"'):
        checkpoint.restore(path, create_nnx()[0])
    # an abstract model is whole then, keys and counts too, or no program takes it; the optimizer stays abstract
    like = jzero.abstract(create_nnx, stage=3, mesh=mesh_of(4), min_shard_bytes=300)
    model, optimizer = checkpoint.restore(path, like, only="params")
    assert int(model.drop.rngs.count[...]) == int(pair[0].drop.rngs.count[...]) > 0
    assert any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(nnx.state(optimizer)))
    model.eval()
    run = jzero.gather_on_use(lambda model, x: model(x), jzero.plan_of(optimizer))
    out = nnx.jit(run)(model, jzero.plan_of(optimizer).place_batch(batch()["x"]))
    plain.eval()
    np.testing.assert_allclose(out, plain(batch()["x"]), rtol=1e-5, atol=1e-6)
    state, _ = jax.jit(full_step)(jzero.shard(create_full, stage=2, mesh=mesh_of(8)), batch())
    path = checkpoint.save(tmp_path / "2", state)
    like = create_full()
    back = checkpoint.restore(path, like, only="params")
    assert_same(back.batch_stats, jax.device_get(state.batch_stats))
    assert np.any(np.asarray(back.batch_stats["BatchNorm_0"]["mean"]))
    for name in ("ema", "dropout_key", "opt_state", "step"):
        kept, given = (jax.tree.leaves(getattr(s, name)) for s in (back, like))
        assert all(a is b for a, b in zip(kept, given, strict=True))
    for_evaluation = checkpoint.restore(path, jzero.abstract(create_full, stage=3, mesh=mesh_of(4)), only="params")
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves((for_evaluation.params, for_evaluation.batch_stats)))
    path = checkpoint.save(tmp_path / "3", {"params": state.params, "opt_state": state.opt_state}, tx=state.tx)
    with pytest.warns(UserWarning, match=r"(?s)the checkpoint lacks 2 arrays.*batch_stats/BatchNorm_0/mean  f32\[32\]"):
        assert checkpoint.restore(path, like, only="params").batch_stats is not None


def test_params_that_do_not_fit_are_still_refused(tmp_path):
    path = checkpoint.save(tmp_path / "1", scrambled(shard(create(), "stage 2")))
    params = {k: jnp.zeros((3,) if k == "bias" else s) for k, s in SHAPES.items()}
    like = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1e-2))
    with pytest.raises(ValueError, match=r"1 leaf .*\n.*\n +params/bias +f32\[11\] +f32\[3\] +another shape"):
        checkpoint.restore(path, like, only="params")
    with pytest.raises(ValueError, match="params/bias") as caught:
        checkpoint.restore(path, like)
    assert 'only="params"' not in str(caught.value)
    with pytest.raises(ValueError, match=r"restore\(only='opt_state'\): only must be one of 'params' or None"):
        checkpoint.restore(path, like, only="opt_state")
    with pytest.raises(TypeError, match="this tree has none"):
        checkpoint.restore(path, params, only="params")


# -------------------------------------------------------------------------------------------------- paths


@pytest.mark.parametrize("name", ["a%20b", "50%", "a#b", "a?b", "a b", "ü&=+;", "a:b"])
def test_names_of_folders_that_a_url_would_change(name, tmp_path):
    tree = {"w": jnp.arange(3.0)}
    path = checkpoint.save(tmp_path / name / name, tree)
    assert path == tmp_path / name / name
    checkpoint.verify(path)
    assert_same(checkpoint.restore(path, {"w": jnp.zeros(3)}), tree)
    (file,) = checkpoint.export(path, tmp_path / name / f"{name}.safetensors")
    assert file.exists()
    with checkpoint.Steps(tmp_path / name / "run") as steps:
        steps.save(1, tree)
    assert steps.steps == [1]


@pytest.mark.parametrize("address", ["gs://bucket/run", "s3://bucket/run", "file:///tmp/x", "hdfs:/x"])
def test_an_address_is_no_path(address, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tree = {"w": jnp.ones(3)}
    calls = [
        lambda: checkpoint.save(address, tree),
        lambda: checkpoint.save_async(address, tree),
        lambda: checkpoint.restore(address, tree),
        lambda: checkpoint.verify(address),
        lambda: checkpoint.custom(address),
        lambda: checkpoint.Steps(address),
        lambda: checkpoint.export(address, "m.safetensors"),
        lambda: checkpoint.load_safetensors(address, create()),
    ]
    for call in calls:
        with pytest.raises(
            NotImplementedError, match=f"{address} is not a path of a file system.*can be mounted"
        ):
            call()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", [None, 3, b"x", ["x"]])
def test_what_is_no_path_at_all(path):
    for call in (
        checkpoint.verify,
        checkpoint.custom,
        checkpoint.Steps,
        lambda p: checkpoint.save(p, {"w": jnp.ones(1)}),
    ):
        with pytest.raises(TypeError, match=r"a path must be a string or a pathlib\.Path, not"):
            call(path)
