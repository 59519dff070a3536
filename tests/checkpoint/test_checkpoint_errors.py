"""What does not fit is refused: every leaf by its name, and nothing is changed."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoint_files import raw, values_of
from layouts import SHAPES, abstract, assert_same, create, mesh_of, scrambled, shard
from models import is_key
from states import create_nnx

import jzero
from jzero import checkpoint


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with one checkpoint: fp32, adamw."""
    folder = tmp_path_factory.mktemp("run")
    checkpoint.save(folder / "7", scrambled(shard(create(), "stage 2")))
    return folder


@pytest.fixture(scope="module")
def saved_16_bit(tmp_path_factory):
    return checkpoint.save(
        tmp_path_factory.mktemp("half") / "1", scrambled(shard(create(dtype=jnp.bfloat16), "stage 2"))
    )


def refuse(path, like, *texts, **kwargs):
    """The message of a restore that is refused, with these texts, and no others' leaves."""
    with pytest.raises(ValueError, match=r"jzero\.checkpoint\.restore: ") as caught:
        checkpoint.restore(path, like, **kwargs)
    message = str(caught.value)
    for text in texts:
        assert text in " ".join(message.split()), message
    return message


def other(shapes=None, tx=None, dtype=jnp.float32):
    """An abstract state of other params."""
    from flax.training.train_state import TrainState

    def make():
        params = {k: jnp.zeros(s, dtype) for k, s in (shapes or SHAPES).items()}
        return TrainState.create(apply_fn=None, params=params, tx=tx or optax.adamw(1e-2))

    return jzero.abstract(make, stage=2, mesh=mesh_of(8), min_shard_bytes=0)


def test_another_shape(saved):
    text = refuse(
        saved / "7",
        other(SHAPES | {"embed": (520, 33), "bias": (12,)}),
        "6 leaves of the checkpoint and the target differ, and nothing was read",
        "params/embed f32[517,33] f32[520,33] another shape",
        "opt_state/0/mu/bias f32[11] f32[12] another shape",
        "Restore into a state of the same model and optimizer; jzero.abstract(create, ...) makes one.",
    )
    assert "cast=True" not in text
    assert "kernel" not in text
    refuse(saved / "7", other(SHAPES | {"embed": (520, 33)}), "another shape", cast=True)


def test_a_leaf_that_is_missing_and_one_that_is_left_over(saved):
    shapes = {("scales" if k == "scale" else k): v for k, v in SHAPES.items()}
    text = refuse(
        saved / "7",
        other(shapes),
        "6 leaves",
        "params/scales absent f32[] missing",
        "params/scale f32[] absent not asked for",
        "opt_state/0/nu/scale f32[] absent not asked for",
    )
    assert "embed" not in text
    refuse(saved / "7", other(shapes), "6 leaves", cast=True)


def test_another_optimizer(saved):
    text = refuse(
        saved / "7",
        other(tx=optax.sgd(1e-2, momentum=0.9)),
        "opt_state/0/trace/bias absent f32[11] missing",
        "19 leaves",  # six of trace; six of mu, six of nu and count
        "opt_state/0/nu/scale f32[] absent not asked for",
    )
    assert "params/" not in text
    refuse(saved / "7", other(tx=optax.chain(optax.clip(1.0), optax.adamw(1e-2))), "26 leaves")


def test_another_dtype_is_converted_with_cast_alone(saved, saved_16_bit):
    half = other(dtype=jnp.bfloat16)
    text = refuse(
        saved / "7",
        half,
        "params/bias f32[11] bf16[11] another dtype",
        "master/embed f32[517,33] f32[517,33] starts as the param",
        "12 leaves",
        "Pass cast=True to convert the dtypes",
    )
    assert "mu" not in text
    want = scrambled(shard(create(), "stage 2"))
    back = checkpoint.restore(saved / "7", half, cast=True)
    for k, p in want.params.items():
        np.testing.assert_array_equal(np.asarray(back.params[k]), np.asarray(p, jnp.bfloat16))
        np.testing.assert_array_equal(cut(back.opt_state.master[k], p.shape), np.asarray(p))
    assert_same(back.opt_state.inner, want.opt_state)
    refuse(
        saved_16_bit,
        other(),
        "6 leaves",
        "params/bias bf16[11] f32[11] another dtype",
        "cast=True",
    )
    half = scrambled(shard(create(dtype=jnp.bfloat16), "stage 2"))
    wide = checkpoint.restore(saved_16_bit, other(), cast=True)
    for k, p in wide.params.items():
        param, master = np.asarray(half.params[k]), cut(half.opt_state.master[k], p.shape)
        replaced = master.astype(param.dtype) != param  # nearly all: each leaf is random by itself
        np.testing.assert_array_equal(np.asarray(p), np.where(replaced, np.float32(param), master))
    assert_same(wide.opt_state[0].mu["kernel"], half.opt_state.inner[0].mu["kernel"])


def test_cast_of_single_leaves(tmp_path):
    tree = {"a": jnp.arange(3.0), "n": jnp.int32(3), "on": jnp.array(True), "far": np.int64(2**40)}
    path = checkpoint.save(tmp_path / "saved", tree)
    refuse(
        path,
        tree | {"a": jnp.zeros(3, jnp.bfloat16)},
        "1 leaf of the checkpoint and the target differs",
        "a f32[3] bf16[3] another dtype",
    )
    refuse(path, tree | {"n": jnp.int8(0)}, "n i32[] i8[] another dtype")
    refuse(path, tree | {"on": jnp.int32(0)}, "on bool[] i32[] another dtype")
    refuse(path, tree | {"n": 0.5}, "n i32[] f64[] another dtype")
    refuse(path, tree | {"a": np.zeros(3)}, "a f32[3] f64[3] another dtype")
    back = checkpoint.restore(path, tree | {"a": np.zeros(3), "n": 0.5}, cast=True)
    assert (back["a"].dtype, back["a"].tolist(), back["n"]) == (np.float64, [0, 1, 2], 3.0)
    back = checkpoint.restore(path, tree | {"n": 0})
    assert (back["n"], type(back["n"])) == (3, int)


def test_an_nnx_pair_is_left_as_it_was(tmp_path):
    make = functools.partial(create_nnx, jnp.bfloat16)
    path = checkpoint.save(
        tmp_path / "saved", jzero.shard(make, stage=2, mesh=mesh_of(8), min_shard_bytes=300)
    )
    pair = create_nnx()
    before = values_of(pair)
    refuse(path, pair, "params/a/kernel bf16[24,64] f32[24,64] another dtype")
    assert values_of(pair) == before
    damage(path)
    like = jzero.shard(make, stage=2, mesh=mesh_of(8), min_shard_bytes=300)
    before = values_of(like)
    with pytest.raises(checkpoint.CheckpointDamaged):
        checkpoint.restore(path, like)
    assert values_of(like) == before


def cut(x, shape):
    return np.asarray(x)[tuple(map(slice, shape))]


def damage(path):
    file = max((path / "state").rglob("d/*"), key=lambda f: f.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_a_target_of_the_wrong_kind(saved, tmp_path):
    with pytest.raises(
        TypeError, match=r"restore: pass a state, .*, or jzero.abstract\(create, ...\), not a function"
    ):
        checkpoint.restore(saved / "7", lambda: create())
    tx = raw(8, 2)[1]
    with pytest.raises(
        TypeError, match=r"tx= is for a mapping of params and opt_state; this state has its own"
    ):
        checkpoint.restore(saved / "7", abstract("stage 2"), tx=tx)
    with pytest.raises(TypeError, match=r"with tx= pass a mapping with 'params' and 'opt_state', not list"):
        checkpoint.save(tmp_path / "x", [1, 2], tx=tx)
    half, _ = raw(8, 2, jnp.bfloat16)
    with pytest.raises(
        TypeError, match=r"holds the state of a transformation from jzero.zero. Pass a mapping"
    ):
        checkpoint.save(tmp_path / "x", {"weights": 1, "opt": half["opt_state"]})
    with pytest.raises(
        TypeError, match=r"save: 20 of 20 leaves are abstract or traced, with no values to save"
    ):
        checkpoint.save(tmp_path / "x", abstract("stage 2"))
    with pytest.raises(TypeError, match="abstract or traced"):
        jax.jit(lambda w: checkpoint.save(tmp_path / "x", {"w": w}) and w)(jnp.ones(3))
    assert not list(tmp_path.iterdir())
    refuse(saved / "7", {"w": jnp.ones(3)}, "21 leaves", "w absent f32[3] missing")


def test_paths(saved, tmp_path):
    like = abstract("stage 2")
    with pytest.raises(
        FileNotFoundError, match=r"(?s)there is nothing at .*/8\.\nCheckpoints beside it:\n  .*/7"
    ):
        checkpoint.restore(saved / "8", like)
    with pytest.raises(FileNotFoundError, match=r"there is nothing at .*/no/where\.$"):
        checkpoint.verify(tmp_path / "no" / "where")
    with pytest.raises(ValueError, match=r"is not a checkpoint but holds 1 checkpoint. Name one: .*/7"):
        checkpoint.restore(saved, like)
    with pytest.raises(ValueError, match=r"is not a checkpoint of a state: no folder 'state' in it"):
        checkpoint.restore(tmp_path, like)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match=r"is not a checkpoint of a state"):
        checkpoint.restore(tmp_path / "file", like)
    for there in (tmp_path / "file", saved / "7", saved):
        with pytest.raises(
            FileExistsError, match=r"save: .* exists and is not replaced. Save to another path"
        ):
            checkpoint.save(there, {"w": jnp.ones(3)})
    checkpoint.verify(saved / "7")
    assert [p.name for p in saved.iterdir()] == ["7"]


def test_a_parent_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(OSError, match=r"save: .*file is not a folder|Not a directory|File exists"):
        checkpoint.save(tmp_path / "file" / "1", {"w": jnp.ones(3)})
    assert checkpoint.save(tmp_path / "made" / "on" / "the" / "way", {"w": jnp.ones(3)}).is_dir()
    assert not is_key(jnp.ones(1))
