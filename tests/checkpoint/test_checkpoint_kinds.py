"""Checkpoints of every kind of state and of many optimizers, from one layout into another and into a plain state."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoint_files import raw, values_of
from flax import nnx
from layouts import (
    LAYOUTS,
    abstract,
    assert_laid_out_like,
    assert_same,
    create,
    logical_values,
    mesh_of,
    scrambled,
)
from layouts import shard as shard_in
from models import batch, is_key, max_error
from optax import contrib
from states import FullState, create_full, create_nnx, full_step, nnx_step

import jzero
from jzero import checkpoint

OPTIMIZERS = {
    "clip, adamw": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "multi steps": lambda: optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "muon": lambda: contrib.muon(1e-2),
    "hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(1e-2, 0, 10)),
    "if finite": lambda: optax.apply_if_finite(optax.adam(1e-2), 3),
    "frozen": lambda: optax.multi_transform(
        {"train": optax.adam(1e-2), "freeze": optax.set_to_zero()},
        lambda params: {k: "freeze" if k in ("embed", "bias") else "train" for k in params},
    ),
    "none": lambda: optax.sgd(1e-2),
}


IN_16_BIT = ["frozen", "none"]
CASES = [(name, jnp.float32) for name in OPTIMIZERS] + [(name, jnp.bfloat16) for name in IN_16_BIT]


@pytest.mark.default_cases("clip, adamw-float32", "adafactor-float32", "muon-float32", "frozen-bfloat16")
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_optimizers(name, dtype, tmp_path):
    tx = OPTIMIZERS[name]()
    state = scrambled(shard_in(create(tx, dtype), "stage 3"))
    checkpoint.save(tmp_path / "saved", state)
    for layout in ("4 devices", "host of 5 devices"):
        if layout.startswith("host") and name == "none" and dtype == jnp.float32:
            continue  # nothing to hold there
        target = abstract(layout, tx, dtype)
        back = checkpoint.restore(tmp_path / "saved", target)
        assert_same(logical_values(back), logical_values(state))
        assert_laid_out_like(back, target)


def test_a_train_state_with_more_fields(tmp_path):
    state = jzero.shard(create_full, min_shard_bytes=0, stage=3, mesh=mesh_of(8))
    state, _ = jax.jit(full_step)(state, jzero.plan_of(state).place_batch(batch()))
    checkpoint.save(tmp_path / "saved", state)
    target = jzero.abstract(create_full, stage=1, mesh=mesh_of(5), min_shard_bytes=0)
    back = checkpoint.restore(tmp_path / "saved", target)
    assert type(back) is FullState
    assert_laid_out_like(back, target)
    names = ("params", "step", "batch_stats", "ema", "dropout_key")
    for name in names:
        assert_same(getattr(back, name), getattr(state, name))
    assert back.dropout_key.dtype == state.dropout_key.dtype  # still a typed key
    assert_same(logical_values(back), logical_values(state))
    plain = checkpoint.restore(tmp_path / "saved", create_full())
    assert (type(plain.step), plain.step) == (int, 1)  # as Flax makes it
    for name in set(names) - {"step"}:
        assert_same(getattr(plain, name), getattr(state, name))
    same = checkpoint.restore(tmp_path / "saved", state)
    placed = jzero.plan_of(state).place_batch(batch(1))
    assert_same(jax.jit(full_step)(state, placed), jax.jit(full_step)(same, placed))


@pytest.mark.nightly
@pytest.mark.parametrize("source", [k for k in LAYOUTS if k != "model axis"])  # names the leaves of another state
def test_an_nnx_pair_from_one_layout_into_others(source, tmp_path):
    """And from each of these into plain NNX: moments are padded on five devices."""

    def made(make, layout):
        return make(create_nnx, min_shard_bytes=0, **LAYOUTS[layout]())

    def updated(pair):
        pair[1].update(pair[0], jax.tree.map(jnp.ones_like, nnx.state(pair[0], nnx.Param)))
        return pair

    checkpoint.save(tmp_path / "saved", updated(made(jzero.shard, source)))
    want = checkpoint.restore(tmp_path / "saved", create_nnx())
    twin = updated(create_nnx())
    for i in (0, 1):
        assert max_error(nnx.as_pure(nnx.state(want[i])), nnx.as_pure(nnx.state(twin[i]))) < 1e-6
    for target in ("stage 0", "replicas", "5 devices", "host"):
        empty = made(jzero.abstract, target)
        layouts = [x.sharding for x in jax.tree.leaves(nnx.state(empty))]
        back = checkpoint.restore(tmp_path / "saved", empty)
        assert [x.sharding for x in jax.tree.leaves(nnx.state(back))] == layouts
        checkpoint.save(tmp_path / target, back)
        assert values_of(checkpoint.restore(tmp_path / target, create_nnx())) == values_of(want)


@pytest.mark.nightly
@pytest.mark.parametrize("offload", [None, "host"])
@pytest.mark.parametrize("way", ["save_async", "Steps"])
def test_an_nnx_pair_goes_on_while_it_is_being_saved(way, offload, tmp_path):
    """The objects change in place, and the step donates their arrays."""
    make = functools.partial(create_nnx, jnp.bfloat16)
    pair = jzero.shard(make, stage=2, mesh=mesh_of(8), min_shard_bytes=0, offload=offload)
    step, want = jzero.jit(nnx_step.__wrapped__, jzero.plan_of(pair)), values_of(pair)
    with checkpoint.Steps(tmp_path / "steps") as steps:
        saving = checkpoint.save_async(tmp_path / "saved", pair) if way == "save_async" else steps.save(1, pair)
        for seed in range(3):
            step(*pair, batch(seed))
        path = saving.result() if saving else tmp_path / "steps/1"
    assert values_of(pair) != want
    back = checkpoint.restore(path, jzero.abstract(make, stage=2, mesh=mesh_of(8), min_shard_bytes=0))
    assert values_of(back) == want


@pytest.mark.default_cases("bfloat16")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_an_nnx_pair(dtype, tmp_path):
    make = functools.partial(create_nnx, dtype)
    pair = jzero.shard(make, stage=3, mesh=mesh_of(8), min_shard_bytes=300)
    nnx_step(*pair, jzero.plan_of(pair).place_batch(batch()))
    want = values_of(pair)
    checkpoint.save(tmp_path / "saved", pair)
    target = jzero.abstract(make, stage=1, mesh=mesh_of(4), min_shard_bytes=300)
    layouts = [x.sharding for x in jax.tree.leaves(nnx.state(target))]
    back = checkpoint.restore(tmp_path / "saved", target)
    assert back[0] is target[0]
    assert back[1] is target[1]
    assert values_of(back) == want
    assert [x.sharding for x in jax.tree.leaves(nnx.state(back))] == layouts
    real = jzero.shard(make, stage=3, mesh=mesh_of(8), min_shard_bytes=300)
    checkpoint.restore(tmp_path / "saved", real)
    losses = [nnx_step(*p, jzero.plan_of(p).place_batch(batch(1))) for p in (pair, real)]
    assert losses[0] == losses[1]
    assert values_of(real) == values_of(pair) != want
    if dtype == jnp.float32:
        plain = make()
        assert values_of(checkpoint.restore(tmp_path / "saved", plain)) == want


def test_a_mapping_with_its_transformation(tmp_path):
    state, tx = raw(8, 3, jnp.bfloat16, seed=1, updates="delta")
    checkpoint.save(tmp_path / "saved", state, tx=tx)
    for n, stage, fields in ((5, 1, {}), (8, 2, {"offload": "host"})):
        like, other = raw(n, stage, jnp.bfloat16, **fields)
        back = checkpoint.restore(tmp_path / "saved", like, tx=other)
        for name in ("params", "opt_state", "epoch"):
            assert_laid_out_like(back[name], like[name])
        assert (type(back["seen"]), back["seen"], int(back["epoch"])) == (int, 7, 4)
        assert_same(back["params"], state["params"])
        mine, theirs = (jzero.unshard(s["opt_state"], tx=t) for s, t in ((back, other), (state, tx)))
        assert_same(mine, theirs)


LEAVES = {
    "a bool": True,
    "an int": 5_000_000_000,
    "a float": 2.5,
    "a complex": 1 + 2j,
    "numpy's bool": np.bool_(True),
    "numpy's numbers": [np.float32(2), np.float64(2.5), np.int64(2**40)],
    "numpy's arrays": [np.arange(3), np.arange(3.0), np.array([True, False]), np.zeros((0, 2))],
    "empty": jnp.zeros((0, 3)),
    "short": [jnp.ones(3, jnp.int8), jnp.ones(4, jnp.float8_e4m3fn), jnp.array([True, False])],
    "keys": [jax.random.key(1), jax.random.split(jax.random.key(1), 3), jax.random.PRNGKey(0)],
    "none": None,
}


def test_any_tree_of_arrays_and_numbers(tmp_path):
    checkpoint.save(tmp_path / "saved", LEAVES)
    other = jax.tree.map(lambda x: x if is_key(x) or np.asarray(x).dtype == bool else x * 0, LEAVES)
    back = checkpoint.restore(tmp_path / "saved", other)
    assert_same(back, LEAVES)
    assert [type(x) for x in jax.tree.leaves(back)] == [type(x) for x in jax.tree.leaves(LEAVES)]
    assert jax.tree.structure(back) == jax.tree.structure(LEAVES)
    with pytest.raises(TypeError, match=r"(?s)save: 2 of 3 leaves are neither.*a/0 +str.*b +object.*custom="):
        checkpoint.save(tmp_path / "text", {"a": ["text"], "b": object(), "c": jnp.ones(1)})
    with pytest.raises(TypeError, match="there are no arrays in this dict"):
        checkpoint.save(tmp_path / "text", {"a": None, "b": np.zeros(0)})
    assert [p.name for p in tmp_path.iterdir()] == ["saved"]


def test_custom(tmp_path):
    position = {"shard": 3, "offset": [1, 2.5, None, True, "x"]}
    checkpoint.save(tmp_path / "a", {"w": jnp.ones(3)}, custom=position)
    checkpoint.save(tmp_path / "b", {"w": jnp.ones(3)})
    assert checkpoint.custom(tmp_path / "a") == position
    assert checkpoint.custom(tmp_path / "b") is None
    with pytest.raises(TypeError, match=r"custom must be JSON \(numbers"):
        checkpoint.save(tmp_path / "c", {"w": jnp.ones(3)}, custom={"x": jnp.ones(1)})
    with pytest.raises(TypeError, match="custom must be JSON"):
        checkpoint.save_async(tmp_path / "c", {"w": jnp.ones(3)}, custom=object())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]
