"""Plain orbax and jzero: orbax saves and restores a jzero state as it is; each reads what the other wrote."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as v0
import pytest
from checkpoint_files import raw, values_of
from flax import nnx
from jax.sharding import SingleDeviceSharding
from layouts import (
    abstract,
    assert_laid_out_like,
    assert_same,
    create,
    logical_values,
    mesh_of,
    scrambled,
    shard,
)
from models import batch
from orbax.checkpoint import v1 as ocp
from programs import cached
from states import create_nnx, nnx_step

import jzero
from jzero import checkpoint

AS_IT_IS = ["stage 0", "stage 1", "stage 2", "stage 3", "host", "5 devices"]


def abstract_of(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def v1_there_and_back(path, state, like):
    ocp.save(str(path), state)
    return ocp.load(str(path), like)


def standard_there_and_back(path, state, like):
    with v0.StandardCheckpointer() as saver:
        saver.save(path, state)
    with v0.StandardCheckpointer() as saver:
        return saver.restore(path, like)


def managed_there_and_back(path, state, like):
    with v0.CheckpointManager(path) as manager:
        manager.save(3, args=v0.args.StandardSave(state))
        manager.wait_until_finished()
        assert manager.latest_step() == 3
        return manager.restore(3, args=v0.args.StandardRestore(like))


WAYS = {"v1": v1_there_and_back, "standard": standard_there_and_back, "manager": managed_there_and_back}


@pytest.mark.default_cases("v1-stage 3", "v1-host", "standard-stage 2", "manager-stage 1", "v1-5 devices")
@pytest.mark.parametrize("layout", AS_IT_IS)
@pytest.mark.parametrize("way", WAYS)
def test_plain_orbax_on_a_state_as_it_is(way, layout, tmp_path):
    dtype = jnp.bfloat16 if layout in ("stage 2", "host") else jnp.float32
    state, like = scrambled(shard(create(dtype=dtype), layout)), abstract(layout, dtype=dtype)
    back = WAYS[way](tmp_path / "saved", state, like)
    assert_laid_out_like(back, like)
    assert_same(back, state)
    assert jzero.plan_of(back) == jzero.plan_of(state)


@pytest.mark.default_cases("v1-host")
@pytest.mark.parametrize("tier", [None, "host"])
@pytest.mark.parametrize("way", WAYS)
def test_plain_orbax_on_an_nnx_state(way, tier, tmp_path):
    fields = {"stage": 3, "mesh": mesh_of(8), "min_shard_bytes": 300, "offload": tier}
    pair, like = jzero.shard(create_nnx, **fields), jzero.abstract(create_nnx, **fields)
    if tier is None:
        nnx_step(*pair, jzero.plan_of(pair).place_batch(batch()))
    tree = {"model": nnx.state(pair[0]), "optimizer": nnx.state(pair[1])}
    target = {"model": nnx.state(like[0]), "optimizer": nnx.state(like[1])}
    if way != "v1":  # v0 keeps keys as arrays alone
        tree, target = (jax.tree.map(lambda x: x, nnx.as_pure(t)) for t in (tree, target))
    back = WAYS[way](tmp_path / "saved", tree, target)
    nnx.update(like[0], back["model"])
    nnx.update(like[1], back["optimizer"])
    assert values_of(like) == values_of(pair)
    assert [x.sharding for x in jax.tree.leaves(nnx.state(like))] == [
        x.sharding for x in jax.tree.leaves(nnx.state(pair))
    ]


@pytest.mark.parametrize("tier", [None, "host"])
def test_plain_orbax_on_a_mapping(tier, tmp_path):
    state, _ = raw(8, 3, jnp.bfloat16, seed=1, updates="delta", offload=tier)
    state["seen"] = jnp.int32(7)
    back = v1_there_and_back(tmp_path / "saved", state, abstract_of(state))
    assert_laid_out_like(back, state)
    assert_same(back, state)


def test_async_with_a_donating_step(tmp_path):
    state = scrambled(shard(create(), "stage 2"))
    want, grads = logical_values(state), jax.tree.map(jnp.ones_like, state.params)
    step = jax.jit(lambda s, g: s.apply_gradients(grads=g), donate_argnums=0)
    step(jax.tree.map(jnp.copy, state), grads)
    saving = ocp.save_async(str(tmp_path / "saved"), state)
    step(step(state, grads), grads)
    saving.result()
    assert_same(logical_values(ocp.load(str(tmp_path / "saved"), abstract("stage 2"))), want)


# ------------------------------------------------------------------------------------ one writes, the other reads


@cached
def plain(dtype=jnp.float32):
    """An ordinary unsharded TrainState with random values, in a run: its step is an array."""
    return scrambled(create(dtype=dtype).replace(step=jnp.int32(0)))


def test_from_a_plain_checkpoint(tmp_path):
    ocp.save(str(tmp_path / "plain"), plain())
    for layout in ("stage 3", "host of 5 devices"):
        like = abstract(layout)
        with pytest.warns(
            UserWarning, match="plain has no checksums .plain orbax wrote it.: damage to it cannot"
        ):
            back = checkpoint.restore(tmp_path / "plain", like)
        assert_laid_out_like(back, like)
        assert_same(logical_values(back), logical_values(plain()))
    with pytest.raises(ValueError, match="has no checksums: plain orbax wrote it"):
        checkpoint.verify(tmp_path / "plain")
    with pytest.raises(ValueError, match="has no custom JSON: plain orbax wrote it"):
        checkpoint.custom(tmp_path / "plain")


def test_a_plain_run_in_16_bit_gets_masters_with_cast_alone(tmp_path):
    """Of fp32 params: the masters take them whole. Of 16-bit ones: there is nothing better than they are."""
    ocp.save(str(tmp_path / "wide"), plain())
    half = plain(jnp.bfloat16).replace(opt_state=plain().opt_state)
    ocp.save(str(tmp_path / "half"), half)
    like = abstract("stage 2", dtype=jnp.bfloat16)
    for path, source in ((tmp_path / "wide", plain()), (tmp_path / "half", half)):
        with (
            pytest.warns(UserWarning, match="no checksums"),
            pytest.raises(
                ValueError, match=r"(?s)master/bias +\w+\[11\] +f32\[11\] +starts as the param.*cast=True"
            ),
        ):
            checkpoint.restore(path, like)
        with pytest.warns(UserWarning, match="no checksums"):
            back = checkpoint.restore(path, like, cast=True)
        assert_laid_out_like(back, like)
        for k, p in source.params.items():
            cut = np.asarray(back.opt_state.master[k])[tuple(map(slice, p.shape))]
            np.testing.assert_array_equal(cut, np.asarray(p, np.float32))
            np.testing.assert_array_equal(np.asarray(back.params[k]), np.asarray(p, jnp.bfloat16))


def test_into_a_plain_state_by_plain_orbax(tmp_path, caplog):
    state = scrambled(shard(create(), "host of 5 devices"))
    checkpoint.save(tmp_path / "saved", state)
    here = SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.asarray(x).dtype, sharding=here), create()
    )
    back = ocp.load(str(tmp_path / "saved"), like)
    assert type(back) is type(create())
    assert_same(back, plain())
    assert_same(checkpoint.restore(tmp_path / "saved", plain()), plain())
    assert "No handler found" not in caplog.text  # orbax knows by whom it was written
    with v0.StandardCheckpointer() as reader:
        older = reader.restore(tmp_path / "saved" / "state", like)
    assert_same(older, plain())


def test_what_plain_orbax_makes_of_masters(tmp_path):
    """They lie beside the params: an ordinary state is read without them, by `partial_load`."""
    state = scrambled(shard(create(optax.adamw(1e-2), jnp.bfloat16), "stage 3"))
    checkpoint.save(tmp_path / "saved", state)
    metadata = ocp.metadata(str(tmp_path / "saved")).metadata
    assert set(metadata) == {"params", "opt_state", "step", "master"}
    here = SingleDeviceSharding(jax.devices()[0])
    params = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), {"params": metadata["params"]}
    )
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    with context:
        back = ocp.load(str(tmp_path / "saved"), params)
    assert_same(back["params"], state.params)
