"""A checkpoint holds the logical state: saved from any layout it is the same, and it restores into any other."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from layouts import (
    LAYOUTS,
    abstract,
    assert_laid_out_like,
    assert_same,
    bits,
    create,
    logical_values,
    mesh_of,
    scrambled,
    shard,
)
from models import adamw, batch, create_small, train_step
from orbax.checkpoint import v1 as ocp

import jzero
from jzero import checkpoint
from jzero.checkpoint import store
from jzero.layout.leaf_rule import path_keys

HOST = "pinned_host"
STAGES = [k for k in LAYOUTS if k.startswith("stage")]
OTHERS = [k for k in LAYOUTS if k not in STAGES]
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}


@functools.cache
def like(layout, dtype):
    return abstract(layout, dtype=DTYPES[dtype])


@functools.cache
def reference(dtype):
    return logical_values(scrambled(shard(create(dtype=DTYPES[dtype]), "stage 0")))


def named(tree):
    """Names as orbax stores them: tuples by their numbers, NamedTuples by their fields."""
    return {path_keys(k): bits(x) for k, x in jax.tree_util.tree_leaves_with_path(tree)}


@functools.cache
def expected(dtype):
    """What must be stored, whatever the layout: the tree of an ordinary TrainState, and the masters beside it."""
    state = scrambled(shard(create(dtype=DTYPES[dtype]), "stage 0"))
    tree = {"step": state.step, "params": state.params, "opt_state": state.opt_state}
    if dtype == "bf16":
        tree |= {"opt_state": state.opt_state.inner, "master": state.opt_state.master}
    return named(tree)


def moved(path, source, targets, dtype):
    """Saves from one layout, restores into the others, and compares every bit; returns what is stored."""
    state = scrambled(shard(create(dtype=DTYPES[dtype]), source))
    assert_same(logical_values(state), reference(dtype))
    assert_laid_out_like(state, like(source, dtype))
    assert checkpoint.save(path, state) == path
    for target in targets:
        back = checkpoint.restore(path, like(target, dtype))
        assert_same(logical_values(back), reference(dtype))
        assert_laid_out_like(back, like(target, dtype))
        assert jzero.plan_of(back) == jzero.plan_of(like(target, dtype))
    return state


CASES = (
    [(s, [*STAGES, OTHERS[i]], "f32") for i, s in enumerate(STAGES)]
    + [(s, [STAGES[i % 4], OTHERS[(i + 4) % 9]], "f32") for i, s in enumerate(OTHERS)]
    + [("stage 3", OTHERS[1::3], "bf16"), ("host of 5 devices", ["stage 1", "1 device", "host"], "bf16")]
    + [("1 device", ["stage 2", "model axis"], "bf16")]
)


@pytest.mark.default_cases("stage 1--f32", "5 devices--f32")
@pytest.mark.parametrize(("source", "targets", "dtype"), CASES, ids=lambda x: x if isinstance(x, str) else "")
def test_from_one_layout_into_others(source, targets, dtype, tmp_path):
    moved(tmp_path / "saved", source, targets, dtype)
    metadata = ocp.metadata(str(tmp_path / "saved")).metadata
    here = SingleDeviceSharding(jax.devices()[0])
    whole = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), metadata)
    stored = ocp.load(str(tmp_path / "saved"), whole)  # with plain orbax
    assert named(stored) == expected(dtype)
    flat = jax.tree_util.tree_leaves_with_path(metadata)
    assert {path_keys(k): (np.dtype(x.dtype), tuple(x.shape)) for k, x in flat} == {
        k: v[:2] for k, v in expected(dtype).items()
    }


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", LAYOUTS)
def test_from_every_layout_into_every_other(source, dtype, tmp_path):
    moved(tmp_path / "saved", source, LAYOUTS, dtype)


def test_16_bit_params_keep_the_masters_they_have(tmp_path):
    state = scrambled(shard(create(dtype=jnp.bfloat16), "stage 2"))
    checkpoint.save(tmp_path / "saved", state)
    back = checkpoint.restore(tmp_path / "saved", like("4 devices", "bf16"))
    for k, master in back.opt_state.master.items():
        assert master.dtype == jnp.float32
        assert not np.array_equal(
            np.asarray(master, jnp.bfloat16), np.asarray(master)
        )  # not made from 16 bits
        assert back.params[k].dtype == jnp.bfloat16


def test_memory_kinds(tmp_path):
    checkpoint.save(tmp_path / "a", scrambled(shard(create(), "stage 3")))
    there = checkpoint.restore(tmp_path / "a", like("host", "f32"))
    checkpoint.save(tmp_path / "b", there)
    back = checkpoint.restore(tmp_path / "b", like("stage 3", "f32"))
    again = checkpoint.restore(tmp_path / "b", like("host of 5 devices", "f32"))
    for state, kind in ((there, HOST), (back, "device"), (again, HOST)):
        kinds = {x.sharding.memory_kind for x in jax.tree.leaves(state.opt_state) if x.size > 1}
        assert kinds == {kind}
        assert {x.sharding.memory_kind for x in jax.tree.leaves(state.params)} == {"device"}
        assert_same(logical_values(state), reference("f32"))


# ------------------------------------------------------------------------------------------- training goes on


@functools.cache
def step():
    return jax.jit(train_step, donate_argnums=0)


def small():
    return create_small(adamw())


def trained(steps=2, **fields):
    state = jzero.shard(small, min_shard_bytes=0, **fields)
    for i in range(steps):
        state, _ = step()(state, jzero.plan_of(state).place_batch(batch(i)))
    return state


def go_on(state, place, steps=2):
    losses = []
    for i in range(2, 2 + steps):
        state, loss = step()(state, place(batch(i)))
        losses.append(float(loss))
    return state, losses


def test_training_goes_on_as_if_nothing_had_been_saved(tmp_path, mesh):
    state = trained(stage=3, mesh=mesh)
    checkpoint.save(tmp_path / "saved", state)
    target = jzero.abstract(small, stage=3, mesh=mesh, min_shard_bytes=0)
    back = checkpoint.restore(tmp_path / "saved", target)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    programs = step()._cache_size()
    place = jzero.plan_of(state).place_batch
    (a, losses), (b, again) = go_on(state, place), go_on(back, place)
    assert step()._cache_size() == programs  # nothing recompiles
    assert losses == again
    assert_same(a, b)
    target = jzero.abstract(small, stage=1, mesh=mesh_of(4), min_shard_bytes=0, offload="host")
    other = checkpoint.restore(tmp_path / "saved", target)
    assert go_on(other, jzero.plan_of(other).place_batch)[1] == pytest.approx(losses, rel=1e-5)
    plain = checkpoint.restore(tmp_path / "saved", small())
    assert go_on(plain, lambda x: x)[1] == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("layout", ["stage 2", "host of 5 devices"])
def test_a_step_may_donate_what_is_being_saved(layout, tmp_path):
    state = scrambled(shard(create(), layout))
    want = logical_values(state)
    grads = jax.tree.map(jnp.ones_like, state.params)
    donating = jax.jit(lambda s, g: s.apply_gradients(grads=g), donate_argnums=0)
    warm = donating(jax.tree.map(jnp.copy, state), grads)
    saving = checkpoint.save_async(tmp_path / "saved", state)
    after = donating(state, grads)
    for _ in range(3):
        after = donating(after, grads)
    assert saving.result() == tmp_path / "saved"
    assert saving.result() == tmp_path / "saved"  # as often as one asks
    assert any(x.is_deleted() for x in jax.tree.leaves((state.params, state.opt_state)))
    back = checkpoint.restore(tmp_path / "saved", like(layout, "f32"))
    assert_same(logical_values(back), want)
    del warm


@pytest.mark.parametrize("way", ["save_async", "Steps"])
def test_host_memory_is_donated_while_it_is_being_saved(way, tmp_path):
    """A GPU refuses to donate what orbax still reads; a CPU copies it, which shows in the addresses."""
    host = NamedSharding(Mesh(np.array(jax.devices()[:4]), ("data",)), P("data"), memory_kind="pinned_host")
    x = jax.jit(lambda: jnp.arange(2.0**20), out_shardings=host)()
    start = [shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards]
    want = np.array(x)
    steps = checkpoint.Steps(tmp_path / "steps")
    saving = checkpoint.save_async(tmp_path / "saved", {"w": x}) if way == "save_async" else None
    if saving is None:
        steps.save(1, {"w": x})
    after = jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    assert [shard.data.unsafe_buffer_pointer() for shard in after.addressable_shards] == start
    path = saving.result() if saving else (steps.close(), tmp_path / "steps/1")[1]
    np.testing.assert_array_equal(checkpoint.restore(path, {"w": jnp.zeros(2**20)})["w"], want)
    steps.close()


def test_a_save_leaves_no_view_of_host_memory(tmp_path, monkeypatch):
    """A GPU donates no memory of which there is a view (`benchmarks/gpu.py --parts donation`), and views stay with the
    arrays that orbax reads: other arrays than the caller's, over the same memory."""
    host = NamedSharding(Mesh(np.array(jax.devices()[:4]), ("data",)), P("data"), memory_kind="pinned_host")
    x, read = jax.device_put(jnp.arange(64.0), host), []
    write = checkpoint.commit.ocp.save_async
    monkeypatch.setattr(checkpoint.commit.ocp, "save_async", lambda p, t, **k: read.append(t["w"]) or write(p, t, **k))
    checkpoint.save(tmp_path / "saved", {"w": x})
    for mine, theirs in zip(x.addressable_shards, read[0].addressable_shards, strict=True):
        assert mine.data is not theirs.data
        assert mine.data.unsafe_buffer_pointer() == theirs.data.unsafe_buffer_pointer()


def test_saves_under_way_together(tmp_path):
    states = [scrambled(shard(create(), "stage 2"), seed) for seed in range(3)]
    savings = [checkpoint.save_async(tmp_path / str(i), s) for i, s in enumerate(states)]
    for i in (2, 0, 1):
        assert savings[i].result(timeout=60) == tmp_path / str(i)
    for i, state in enumerate(states):
        assert_same(
            logical_values(checkpoint.restore(tmp_path / str(i), like("stage 1", "f32"))),
            logical_values(state),
        )


def test_a_shard_may_touch_every_stored_chunk(tmp_path, monkeypatch):
    """Split along one dim, restored along the other: orbax reserves for each shard all chunks that it touches."""
    mesh = mesh_of(8)
    x = jax.device_put(
        np.random.default_rng(0).random((64, 48), np.float32), NamedSharding(mesh, jax.P("data"))
    )
    checkpoint.save(tmp_path / "saved", {"x": x})
    monkeypatch.setattr(store, "LEAST_READ_BYTES", 1)
    for spec in (jax.P(None, "data"), jax.P("data"), jax.P()):
        like = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
        back = checkpoint.restore(tmp_path / "saved", {"x": like})["x"]
        assert_same(back, x)
        assert back.sharding == like.sharding


def test_the_target_may_be_a_state_and_is_left_alone(tmp_path):
    state = scrambled(shard(create(), "stage 2"))
    checkpoint.save(tmp_path / "saved", state)
    target = scrambled(shard(create(), "replicas"), seed=1)
    before = logical_values(target)
    back = checkpoint.restore(str(tmp_path / "saved"), target)  # a path may be text
    assert_same(logical_values(back), reference("f32"))
    assert_same(logical_values(target), before)
    assert_laid_out_like(back, target)


def test_a_plain_state_on_one_device(tmp_path):
    plain = create(optax.adamw(1e-2))
    checkpoint.save(tmp_path / "plain", plain)
    back = checkpoint.restore(tmp_path / "plain", abstract("stage 3"))
    assert_same(logical_values(back), logical_values(shard(plain, "stage 0")))
    checkpoint.save(tmp_path / "sharded", back)
    again = checkpoint.restore(tmp_path / "sharded", plain)
    assert_same(again, plain)
    assert {type(x) for x in (again.step, plain.step)} == {int}
    assert all(len(x.sharding.device_set) == 1 for x in jax.tree.leaves(again.params))


def test_the_major_part_of_a_padded_dim_moves_to_another(tmp_path):
    """12 values over 3 x 2 devices are stored as 8 over 2, and layers over 3: jaxlib 0.12 aborts if asked at once."""
    mesh = jzero.mesh({"host": 2, "gpu": 3}, devices=jax.devices()[:6])
    params, fields = {"w": jnp.arange(24.0).reshape(3, 8)}, {"axis": ("host", "gpu"), "param_axis": "gpu"}
    plan = jzero.make_plan(params, stage=3, mesh=mesh, min_shard_bytes=0, scan_axes={"w": 0}, **fields)
    tx = jzero.zero(optax.adam(1e-2), plan)
    state = {"params": plan.place(params), "opt_state": jax.jit(tx.init)(plan.place(params))}
    grads = jax.tree.map(lambda x: x + 1, state["params"])
    state["opt_state"] = jax.jit(lambda *args: tx.update(*args)[1])(grads, state["opt_state"], state["params"])
    assert {x.shape for x in jax.tree.leaves(state["opt_state"]) if x.ndim} == {(3, 12)}
    checkpoint.save(tmp_path / "saved", state, tx=tx)
    metadata = ocp.metadata(str(tmp_path / "saved")).metadata
    stored = ocp.load(str(tmp_path / "saved"), jax.tree.map(lambda x: np.empty(x.shape, x.dtype), metadata))
    (mu,) = [x for path, x in jax.tree_util.tree_leaves_with_path(stored) if "mu" in jax.tree_util.keystr(path)]
    np.testing.assert_allclose(mu, 0.1 * (np.arange(24.0).reshape(3, 8) + 1), rtol=1e-6)
