"""Weights out of a checkpoint and into a sharded state, as safetensors."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import xxhash
from flax import nnx
from flax.training.train_state import TrainState
from layouts import mesh_of
from models import batch, logical
from orbax.checkpoint import v1 as ocp
from safetensors.numpy import load_file, save_file
from states import create_nnx, nnx_step

import jzero
from jzero import checkpoint
from jzero.checkpoint import exporting
from jzero.checkpoint.disk_state import held_in_files


class Net(nn.Module):
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, x):
        kw = {"dtype": self.dtype, "param_dtype": self.dtype}
        embed = nn.Embed(517, 33, **kw)  # 517 x 33: padded on 8 devices
        x = nn.Dense(64, **kw)(embed(x))
        x = nn.BatchNorm(use_running_average=True, **kw)(x)
        return embed.attend(nn.Dense(33, **kw)(x))  # tied: one leaf, used twice


class State(TrainState):
    batch_stats: Any


def create(dtype=jnp.bfloat16, seed=0):
    model = Net(dtype)
    variables = model.init(jax.random.key(seed), jnp.zeros((1, 4), jnp.int32))
    return State.create(apply_fn=model.apply, params=variables["params"], tx=optax.adamw(1e-2),
                        batch_stats=variables["batch_stats"])  # fmt: skip


@jax.jit
def step(state, x):
    def loss(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        return jnp.mean(state.apply_fn(variables, x).astype(jnp.float32) ** 2)

    return state.apply_gradients(grads=jax.grad(loss)(state.params))


def train(state, steps=2):
    x = jax.random.randint(jax.random.key(1), (8, 4), 0, 517)
    for _ in range(steps):
        state = step(state, jzero.plan_of(state).place_batch(x))
    return state


def flat(tree):
    return {
        ".".join(k.key for k in path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }


def whole(params):
    return flat(jax.device_get(jzero.unshard(params)))


def statistics(state):
    """A model without them is another one."""
    return flat({"batch_stats": state.batch_stats})


def equal(a, b):
    assert set(a) == set(b)
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


@pytest.fixture(scope="module")
def trained():
    state = train(jzero.shard(create, stage=3, mesh=mesh_of(8), min_shard_bytes=0))
    return state.replace(batch_stats=jax.tree.map(lambda x: x + 0.3, state.batch_stats))


@pytest.fixture(scope="module")
def path(trained, tmp_path_factory):
    return checkpoint.save(tmp_path_factory.mktemp("weights") / "2", trained)


# -- out


def test_the_masters_are_exported(path, trained, tmp_path):
    (file,) = checkpoint.export(path, tmp_path / "m.safetensors")
    tensors = load_file(file)
    assert {x.dtype for x in tensors.values()} == {np.dtype(np.float32)}
    equal(tensors, flat(logical(trained).master) | statistics(trained))
    assert "Embed_0.embedding" in tensors
    assert len(tensors) == len(jax.tree.leaves((trained.params, trained.batch_stats)))  # the tied weight once


def test_in_16_bits_they_are_the_params(path, trained, tmp_path):
    (file,) = checkpoint.export(path, tmp_path / "m.safetensors", dtype="bfloat16")
    equal(load_file(file), whole(trained.params) | statistics(trained))  # these in 32


def test_large_weights_are_split_with_an_index(path, tmp_path):
    seen = []
    *files, index = checkpoint.export(
        path, tmp_path / "m.safetensors", max_file_bytes=12_000, names=lambda n: f"model.{n}",
        include=("batch_stats",), progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    assert [f.name for f in files] == [
        f"m-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)
    ]
    assert len(files) > 1
    found = json.loads(index.read_text())
    tensors = {name: x for f in files for name, x in load_file(f).items()}
    for name, file in found["weight_map"].items():
        assert name in load_file(tmp_path / file)
    assert set(found["weight_map"]) == set(tensors)
    assert "model.batch_stats.BatchNorm_0.mean" in tensors
    total = sum(x.nbytes for x in tensors.values())
    assert found["metadata"]["total_size"] == total
    assert seen[-1] == (total, total)
    one = [f for f in files if sum(x.nbytes for x in load_file(f).values()) > 12_000]
    assert all(len(load_file(f)) == 1 for f in one)  # a tensor above the limit is alone
    other = tmp_path / "m-00001-of-00001.safetensors"
    other.write_bytes(b"of someone else")
    (whole_file,) = checkpoint.export(path, tmp_path / "m.safetensors")
    assert other.exists()
    other.unlink()
    assert {f.name for f in tmp_path.glob("m*")} == {"m.safetensors", "m.safetensors.xxh3"}  # no older file is left
    index.write_text("{}")
    with pytest.raises(ValueError, match="is not of an earlier export"):
        checkpoint.export(path, tmp_path / "m.safetensors")
    assert set(load_file(whole_file)) == {name.removeprefix("model.") for name in tensors}


def test_weights_that_plain_orbax_wrote(tmp_path):
    state = create(jnp.float32)
    ocp.save(str(tmp_path / "plain"), state)
    with pytest.warns(UserWarning, match="has no checksums"):
        (file,) = checkpoint.export(tmp_path / "plain", tmp_path / "m.safetensors")
    equal(load_file(file), flat(state.params) | statistics(state))
    ocp.save(str(tmp_path / "bare"), state.params)  # params alone
    with pytest.warns(UserWarning, match="has no checksums"):
        (file,) = checkpoint.export(tmp_path / "bare", tmp_path / "b.safetensors")
    equal(load_file(file), flat(state.params))


def test_an_export_that_fails_leaves_nothing(path, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")
        yield

    monkeypatch.setattr(exporting, "_values", full)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.export(path, tmp_path / "out" / "m.safetensors")
    assert not list((tmp_path / "out").iterdir())


def test_what_cannot_be_exported(path, tmp_path):
    with pytest.raises(ValueError, match=r"must end in \.safetensors"):
        checkpoint.export(path, tmp_path / "m.bin")
    with pytest.raises(ValueError, match=r"no 'batch_stat', only .*Did you mean 'batch_stats'"):
        checkpoint.export(path, tmp_path / "m.safetensors", include=("batch_stat",))
    with pytest.raises(ValueError, match="gives 1 name twice"):
        checkpoint.export(path, tmp_path / "m.safetensors", names=lambda n: "x")
    with pytest.raises(FileNotFoundError, match="there is nothing at"):
        checkpoint.export(tmp_path / "3", tmp_path / "m.safetensors")
    assert not list(tmp_path.iterdir())


# -- in


@pytest.mark.nightly
def test_before_the_state_is_in_files(path, trained, tmp_path):
    """A state in files is changed by its updates alone; the refusal says what to do, and that works."""
    (file,) = checkpoint.export(path, tmp_path / "m.safetensors")
    offload = jzero.Offload(tier="disk", path=str(tmp_path / "state"), buffer_bytes=2**20)
    fields = {"stage": 2, "mesh": mesh_of(8), "min_shard_bytes": 0}
    filed = jzero.shard(lambda: create(seed=1), offload=offload, **fields)
    with pytest.raises(TypeError, match="Load into one that is not"):
        checkpoint.load_safetensors(file, filed, cast=True)
    del filed
    state = checkpoint.load_safetensors(file, jzero.shard(lambda: create(seed=1), **fields), cast=True)
    filed = jzero.shard(state, offload=dataclasses.replace(offload, path=str(tmp_path / "new")), **fields)
    equal(whole(filed.params), whole(trained.params))
    _, kept = held_in_files(filed)
    arrays, masters = kept.store.leaves(), jax.tree.leaves(state.opt_state.master)
    found = {i: arrays[at] for i, at in kept.chain.master_leaves.items() if arrays[at] is not None}
    assert len(found) > 3
    assert all(np.array_equal(x, masters[i]) for i, x in found.items())  # the fp32 values of the file


@pytest.mark.parametrize(
    ("n", "fields"),
    [(8, {"stage": 3}), (5, {"stage": 2}), (8, {"stage": 2, "offload": "host"}), (1, {"stage": 0})],
)
def test_into_any_layout(n, fields, path, trained, tmp_path):
    (file,) = checkpoint.export(path, tmp_path / "m.safetensors")
    state = jzero.shard(lambda: create(seed=1), mesh=mesh_of(n), min_shard_bytes=0, **fields)
    before = jax.tree.map(lambda x: x.sharding, (state.params, state.opt_state))
    loaded = checkpoint.load_safetensors(file, state, cast=True)
    equal(whole(loaded.params), whole(trained.params))
    # the fp32 values, not the cast of the params
    equal(flat(logical(loaded).master) | statistics(loaded), load_file(file))
    assert jax.tree.map(lambda x: x.sharding, (loaded.params, loaded.opt_state)) == before
    embedding = np.asarray(loaded.opt_state.master["Embed_0"]["embedding"])
    assert (embedding.shape != (517, 33)) == (n > 1)
    assert (embedding[517:] == 0).all()
    assert (embedding[:, 33:] == 0).all()


def test_from_a_model_of_another_library(path, trained, tmp_path):
    """Other names, kernels transposed, tensors that nobody needs."""
    (file,) = checkpoint.export(path, tmp_path / "m.safetensors", dtype="bfloat16")
    theirs = {}
    for name, x in load_file(file).items():
        kernel = name.endswith(".kernel")
        theirs["net." + name.replace(".kernel", ".weight")] = np.ascontiguousarray(x.T) if kernel else x
    theirs["net.mask"] = np.zeros((4, 4), bool)
    save_file(theirs, tmp_path / "theirs.safetensors")

    def names(name):
        renamed = "net." + name.replace(".kernel", ".weight")
        return (renamed, (1, 0)) if name.endswith(".kernel") else renamed

    state = jzero.shard(lambda: create(seed=1), stage=3, mesh=mesh_of(8), min_shard_bytes=0)
    theirs_file = tmp_path / "theirs.safetensors"
    loaded = checkpoint.load_safetensors(theirs_file, state, names=names, ignore=["*.mask"])
    equal(whole(loaded.params), whole(trained.params))
    with pytest.raises(ValueError, match="nothing was read") as caught:
        checkpoint.load_safetensors(theirs_file, state)
    text = str(caught.value)
    assert "params/Dense_0/kernel" in text
    assert "no such tensor. Did you mean 'net.Dense_0." in text
    assert "net.mask" in text


def test_split_files_by_index_and_by_folder(path, trained, tmp_path):
    *_, index = checkpoint.export(path, tmp_path / "m.safetensors", max_file_bytes=9_000, dtype="bfloat16")
    state = jzero.shard(lambda: create(seed=1), stage=2, mesh=mesh_of(8))
    for files in (index, tmp_path):
        equal(whole(checkpoint.load_safetensors(files, state).params), whole(trained.params))
    next(tmp_path.glob("m-00001*")).unlink()
    with pytest.raises(FileNotFoundError, match="names files that are not beside it: m-00001"):
        checkpoint.load_safetensors(index, state)


def test_what_does_not_fit_is_listed_and_nothing_changes(path, tmp_path):
    (file,) = checkpoint.export(path, tmp_path / "m.safetensors")
    state = jzero.shard(lambda: create(seed=1), stage=2, mesh=mesh_of(8))
    rows = r"another dtype: cast=True converts(.|\n)*Pass cast=True"
    with pytest.raises(ValueError, match=rf"7 params and tensors do not fit(.|\n)*{rows}"):
        checkpoint.load_safetensors(file, state)
    tensors = load_file(file)
    tensors["Dense_0.kernel"] = tensors["Dense_0.kernel"].T.copy()
    save_file(tensors, file)
    (tmp_path / "m.safetensors.xxh3").unlink()
    with pytest.raises(ValueError, match=r"float32\[64, 33\]\s+another shape"):
        checkpoint.load_safetensors(file, state, cast=True)
    with pytest.raises(ValueError, match="is not an order of its dims"):
        checkpoint.load_safetensors(
            file, state, cast=True, names={"Dense_0.kernel": ("Dense_0.kernel", (1, 1))}
        )
    with pytest.raises(TypeError, match="this state is abstract"):
        checkpoint.load_safetensors(file, jzero.abstract(create, stage=2, mesh=mesh_of(8)))
    with pytest.raises(FileNotFoundError, match="there is nothing at"):
        checkpoint.load_safetensors(tmp_path / "no.safetensors", state)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no \.safetensors file in"):
        checkpoint.load_safetensors(tmp_path / "empty", state)


def test_an_nnx_model_goes_out_and_in_with_its_statistics(tmp_path):
    """They stand in its modules. A file without them is named; random keys and averages are no part of a model."""
    pair = jzero.shard(create_nnx, stage=3, mesh=mesh_of(8), min_shard_bytes=0)
    for i in range(2):
        nnx_step(*pair, jzero.plan_of(pair).place_batch(batch(i)))
    path = checkpoint.save(tmp_path / "1", pair)
    (file,) = checkpoint.export(path, tmp_path / "m.safetensors")
    tensors = load_file(file)
    assert set(tensors) == {"a.kernel", "b.bias", "b.kernel", *(f"norm.{x}" for x in ("scale", "bias", "mean", "var"))}
    np.testing.assert_array_equal(tensors["norm.mean"], np.asarray(pair[0].norm.mean[...]))
    fresh = jzero.shard(create_nnx, stage=1, mesh=mesh_of(4))
    model, _ = checkpoint.load_safetensors(file, fresh)
    for x, name in ((model.norm.mean, "norm.mean"), (model.norm.var, "norm.var"), (model.a.kernel, "a.kernel")):
        np.testing.assert_array_equal(np.asarray(x[...]), tensors[name])
    save_file({k: v for k, v in tensors.items() if k not in ("norm.mean", "norm.var")}, tmp_path / "p.safetensors")
    with pytest.warns(UserWarning, match=r"the file lacks 2 arrays that the model needs.*\n.*norm/mean +f32\[64\]"):
        checkpoint.load_safetensors(tmp_path / "p.safetensors", fresh)


# -- files that are not what they seem


def small(seed=0):
    """A state of two params, and its weights."""
    params = {"w": jnp.full((4, 3), seed + 1.0), "attn": {"bias": jnp.full(3, seed + 2.0)}}
    return TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1e-2))


WEIGHTS = {"w": np.full((4, 3), 7, np.float32), "attn.bias": np.full(3, 8, np.float32)}


def pieces(folder, files, index=None, name="m"):
    """Files of tensors, and an index."""
    folder.mkdir(exist_ok=True)
    for file, tensors in files.items():
        save_file(tensors, folder / file)
    if index is None:
        return folder
    path = folder / f"{name}.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": index}))
    return path


def loaded(path, **more):
    return checkpoint.load_safetensors(path, small(), **more).params


OLD = {k: np.zeros_like(v) for k, v in WEIGHTS.items()}
MAP = {"w": "a.safetensors", "attn.bias": "b.safetensors"}


def test_the_index_tells_which_file(tmp_path):
    files = {"a.safetensors": WEIGHTS, "b.safetensors": WEIGHTS, "z.safetensors": OLD}
    index = pieces(tmp_path, files, MAP)
    for path in (index, tmp_path):  # a folder with an index is read by it
        assert loaded(path)["w"][0, 0] == 7
        assert loaded(path)["attn"]["bias"][0] == 8
    pieces(
        tmp_path, {"b.safetensors": OLD | {"attn.bias": WEIGHTS["attn.bias"]}}, MAP
    )  # the last file has another w
    assert loaded(index)["w"][0, 0] == 7


def test_a_tensor_in_two_files_without_an_index(tmp_path):
    pieces(tmp_path, {"a.safetensors": WEIGHTS, "b.safetensors": OLD})
    with pytest.raises(
        ValueError, match=r"2 tensors in more than one file of .*\n.*a\.safetensors, b\.safetensors"
    ):
        loaded(tmp_path)


@pytest.mark.parametrize(
    ("index", "text"),
    [
        (MAP | {"w": "b.safetensors"}, r"disagree on 1 tensor:\n +w +b\.safetensors +not in that file"),
        ({"w": "a.safetensors"}, "attn.bias"),
        (MAP | {"w": "../x.safetensors"}, r"names files outside of its folder, .*\['\.\./x\.safetensors'\]"),
        (MAP | {"w": "/etc/passwd"}, "names files outside of its folder"),
        (MAP | {"w": 3}, "must name the file of each tensor"),
        ({}, "must name the file of each tensor"),
        ([], "must name the file of each tensor"),
    ],
)
def test_an_index_that_is_wrong(index, text, tmp_path):
    files = {"a.safetensors": {"w": WEIGHTS["w"]}, "b.safetensors": {"attn.bias": WEIGHTS["attn.bias"]}}
    save_file(WEIGHTS, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=text):
        loaded(pieces(tmp_path / "m", files, index))


@pytest.mark.parametrize("text", ["", "[]", "{", "{}", "null", "[" * 100_000])
def test_an_index_that_is_none(text, tmp_path):
    (tmp_path / "m.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match="is not an index of safetensors files"):
        loaded(tmp_path / "m.safetensors.index.json")


def test_several_indices(tmp_path):
    pieces(tmp_path, {"a.safetensors": WEIGHTS}, dict.fromkeys(WEIGHTS, "a.safetensors"))
    pieces(tmp_path, {}, dict.fromkeys(WEIGHTS, "a.safetensors"), name="n")
    with pytest.raises(ValueError, match=r"Pass one of them"):
        loaded(tmp_path)


def test_what_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.safetensors")
    os.mkfifo(tmp_path / "b.json")
    for path in (tmp_path, tmp_path / "a.safetensors", tmp_path / "b.json"):
        with pytest.raises(ValueError, match="is not a regular file"):
            loaded(path)
    index = pieces(tmp_path / "m", {}, {"w": "p"})
    os.mkfifo(tmp_path / "m" / "p")
    with pytest.raises(ValueError, match="is not a regular file"):
        loaded(index)
    (tmp_path / "c.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        loaded(tmp_path / "c.safetensors")


def test_every_flipped_bit_of_an_export_is_seen(tmp_path):
    state = small(3)
    path = checkpoint.save(tmp_path / "1", state)
    *files, index = checkpoint.export(path, tmp_path / "m.safetensors", max_file_bytes=30)
    assert len(files) == 2
    sums = tmp_path / "m.safetensors.xxh3"
    lines = [f"XXH3_{xxhash.xxh3_64_hexdigest(f.read_bytes())}  {f.name}" for f in (*files, index)]
    assert sums.read_text().splitlines()[:-1] == lines
    for file in (*files, index, sums):
        data = file.read_bytes()
        for at in range(0, len(data), 5):
            file.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
            text = rf"{file.name}: (differs from its checksum in|its own checksum is wrong)"
            with pytest.raises(checkpoint.CheckpointDamaged, match=text):
                loaded(index)
        file.write_bytes(data)
    equal(flat(loaded(index)), flat(state.params))
    sums.write_text("")
    with pytest.raises(checkpoint.CheckpointDamaged, match="Get or export it again"):
        loaded(index)
    checkpoint.export(path, tmp_path / "m.safetensors", max_file_bytes=30)  # over the old one
    equal(flat(loaded(index)), flat(state.params))


def test_values_that_the_dtype_cannot_hold(tmp_path):
    save_file(WEIGHTS | {"w": np.full((4, 3), np.nan, np.float32)}, tmp_path / "m.safetensors")
    state = small()
    ints = state.replace(params=jax.tree.map(lambda x: x.astype(jnp.int32), state.params))
    with pytest.raises(
        ValueError, match=r"load_safetensors: w: 12 of 12 values of f32 cannot be held by i32"
    ):
        checkpoint.load_safetensors(tmp_path / "m.safetensors", ints, cast=True)
    path = checkpoint.save(tmp_path / "1", {"w": jnp.full(3, 1e6)})
    with pytest.raises(ValueError, match=r"export: w: 3 of 3 values of f32 cannot be held by f16"):
        checkpoint.export(path, tmp_path / "half.safetensors", dtype="float16")
    assert not list(tmp_path.glob("*half*"))
    with pytest.raises(ValueError, match="must be a floating dtype"):
        checkpoint.export(path, tmp_path / "half.safetensors", dtype="int8")


def test_one_text_is_no_list(path, tmp_path):
    save_file(WEIGHTS | {"x.attn.bias": np.ones(3), "extra": np.ones(3)}, tmp_path / "m.safetensors")
    with pytest.raises(
        TypeError, match=r"ignore='\*\.attn\.bias'\): ignore must be a list. Pass ignore=\['\*\.attn\.bias'\]"
    ):
        loaded(tmp_path / "m.safetensors", ignore="*.attn.bias")
    with pytest.raises(ValueError, match=r"1 params and tensors do not fit(.|\n)*extra"):
        loaded(tmp_path / "m.safetensors", ignore=["*.attn.bias"])
    with pytest.raises(TypeError, match="include must be a list"):
        checkpoint.export(path, tmp_path / "e.safetensors", include="batch_stats")
    with pytest.raises(TypeError, match=r"names gives None for .*every tensor needs a name"):
        checkpoint.export(path, tmp_path / "e.safetensors", names=lambda name: None)
    with pytest.raises(TypeError, match="ignore must be a list of strings"):
        loaded(tmp_path / "m.safetensors", ignore=[3])
    with pytest.raises(TypeError, match="names must be a function or a mapping"):
        loaded(tmp_path / "m.safetensors", names=["w"])
    with pytest.raises(TypeError, match=r"a pair of name and dims, \(name, \(1, 0\)\)"):
        loaded(tmp_path / "m.safetensors", names=lambda name: 3)
    with pytest.raises(TypeError, match="cast must be True or False"):
        loaded(tmp_path / "m.safetensors", cast="no")


def test_params_of_one_name(tmp_path):
    save_file({"a.b": np.ones(3)}, tmp_path / "m.safetensors")
    params = {"a": {"b": jnp.zeros(3)}, "a.b": jnp.zeros(3)}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1e-2))
    with pytest.raises(ValueError, match="load_safetensors: 1 name would be that of several leaves"):
        checkpoint.load_safetensors(tmp_path / "m.safetensors", state)


def test_an_nnx_pair_is_filled_in_place(tmp_path):
    def make(seed):
        model = nnx.Linear(16, 64, rngs=nnx.Rngs(seed))
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    pair = jzero.shard(lambda: make(0), stage=2, mesh=mesh_of(8), min_shard_bytes=0)
    want = np.asarray(pair[0].kernel[...])
    path = checkpoint.save(tmp_path / "1", pair)
    (file,) = checkpoint.export(path, tmp_path / "m.safetensors")
    assert set(load_file(file)) == {"kernel", "bias"}
    other = jzero.shard(lambda: make(1), stage=3, mesh=mesh_of(8), min_shard_bytes=0)
    assert not np.array_equal(np.asarray(other[0].kernel[...]), want)
    assert checkpoint.load_safetensors(file, other) is other
    np.testing.assert_array_equal(np.asarray(other[0].kernel[...]), want)


def halves(**fields):
    """A function that makes a state of two bf16 params, and that state, sharded."""

    def create(dtype=jnp.bfloat16):
        params = {"base": jnp.zeros((64, 64), dtype), "lora": jnp.zeros((64, 64), dtype)}
        return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))

    return create, jzero.shard(create, stage=2, min_shard_bytes=0, **fields)


@pytest.mark.parametrize("offload", [None, "host"])
def test_what_was_replaced_since_the_last_update_is_read_in_place_of_its_master(tmp_path, offload):
    """Exported, and into params of other dtypes; what was not replaced is its master, unrounded."""
    create, state = halves(offload=offload)
    master = jax.tree.map(lambda m: jax.device_put(jnp.full(m.shape, 1.0001), m.sharding), state.opt_state.master)
    ones = jzero.plan_of(state).place(jax.tree.map(lambda p: jnp.ones_like(p).at[0].set(5), state.params))
    state = state.replace(params=ones, opt_state=state.opt_state._replace(master=master))
    path = jzero.checkpoint.save(tmp_path / "saved", state)
    want = np.full((64, 64), 1.0001, np.float32)
    want[0] = 5
    (file,) = jzero.checkpoint.export(path, tmp_path / "params.safetensors")
    assert all((x == want).all() for x in load_file(file).values())
    fields = {"stage": 2, "min_shard_bytes": 0}
    pairs = jzero.checkpoint.restore(path, jzero.abstract(create, **fields, master_dtype="remainder"))
    assert all((np.asarray(x) == want.astype(x.dtype)).all() for x in jax.tree.leaves(pairs.params))
    for dtype in ("float32", "float16"):
        like = jzero.abstract(functools.partial(create, dtype), **fields)
        found = jzero.checkpoint.restore(path, like, cast=True)
        assert all((np.asarray(x) == want.astype(dtype)).all() for x in jax.tree.leaves(found.params))
        if dtype == "float16":
            assert all((np.asarray(x) == want).all() for x in jax.tree.leaves(found.opt_state.master))


def test_params_of_a_lora_go_into_a_state_that_trains_all(tmp_path):
    _, state = halves(trainable=lambda keys, x: keys == ("lora",))
    path = jzero.checkpoint.save(tmp_path / "saved", state)
    found = jzero.checkpoint.restore(path, halves()[1], only="params", cast=True)
    assert found.opt_state.master["base"].dtype == jnp.float32
