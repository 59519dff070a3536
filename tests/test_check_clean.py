"""`check`: clean programs of every stage, in which nothing may be found."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import PartitionSpec as P
from test_check import BOTH, QUICK, constrained, create, found_in, state_of, tokens, train_step

import jzero


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@BOTH
def test_clean(stage, scan):
    options = None if stage >= 2 else QUICK  # None: as everyone compiles it
    assert found_in(*state_of(stage, scan=scan), options=options) == {}


@BOTH
def test_clean_stage_3_without_remat(scan):
    assert found_in(*state_of(3, scan=scan, remat=False)) == {}


@pytest.mark.parametrize("stage", [2, 3])
@BOTH
def test_clean_large_batch(stage, scan):
    assert found_in(*state_of(stage, scan=scan), batch=tokens(512)) == {}


def tensor_parallel(params):
    """Megatron's layout: column, then row."""

    def spec(path, x):
        name = jax.tree_util.keystr(path)
        column = "Dense_0" in name or "Dense_2" in name
        entries = (None, "model") if column else ("model", None)
        return P(*[None] * (x.ndim - 2), *entries) if "Dense" in name else P()

    return jax.tree_util.tree_map_with_path(spec, params)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@BOTH
def test_clean_with_tensor_parallelism(stage, scan):
    mesh = jzero.pod("h200").mesh({"model": 2, "data": 4})
    specs = tensor_parallel(jax.eval_shape(lambda: create(scan)).params)
    assert found_in(*state_of(stage, scan=scan, mesh=mesh, param_specs=specs)) == {}


@BOTH
def test_clean_with_replicas(scan):
    mesh = jzero.pod("h200").mesh({"replica": 2, "data": 4})
    assert found_in(*state_of(2, scan=scan, mesh=mesh, batch_axis=("replica", "data"))) == {}


def test_batch_split_inside_of_the_step_is_no_fault():
    state, plan = state_of(2, scan=True)

    def step(state, batch):
        return train_step(state, constrained(batch, lambda x: plan.batch))

    assert found_in(state, plan, step, batch=tokens(8, plan.sharding(P()))) == {}
