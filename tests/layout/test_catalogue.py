"""Shapes of real models on 5 to 1024 devices: the optimizer state of no device is above 1.02 x total / N.

Pure shapes: nothing is placed, nothing compiled. Bytes are those of a 16-bit param's fp32 master and two moments.
"""

from __future__ import annotations

import functools
import math

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from shapes import MODELS

import jzero
from jzero.layout.specs import named_axes, shard_factor

DEVICES = (5, 64, *(pytest.param(n, marks=pytest.mark.nightly) for n in (8, 256, 1024)))


class Device:
    """Stands for a device in a mesh that only its shape is read of."""

    platform = device_kind = "none"
    process_index = 0

    def __init__(self, number: int):
        self.id = number


@functools.cache
def mesh_of(n: int) -> Mesh:
    return Mesh(np.array([Device(i) for i in range(n)], dtype=object), ("data",))


@functools.cache
def plan_for(model: str, n: int, stage: int = 2) -> jzero.Plan:
    shapes = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, "bfloat16"),
        MODELS[model][0](),
        is_leaf=lambda s: isinstance(s, tuple),
    )
    return jzero.make_plan(shapes, stage=stage, mesh=mesh_of(n))


def held(plan: jzero.Plan) -> int:
    """Values of the optimizer state on each device, per moment: all devices hold pieces of the same size."""
    return sum(math.prod(x.state_shape) // shard_factor(x.state, plan.mesh) for x in plan.layouts)


@pytest.mark.unit
@pytest.mark.parametrize("model", MODELS)
def test_count_is_the_published_one(model):
    assert sum(x.size for x in plan_for(model, 8).layouts) == MODELS[model][1]


@pytest.mark.unit
@pytest.mark.parametrize("n", DEVICES)
@pytest.mark.parametrize("model", MODELS)
def test_state_of_the_fullest_device(model, n):
    plan = plan_for(model, n)
    total = sum(x.size for x in plan.layouts)
    assert held(plan) <= 1.02 * total / n
    assert 12 * held(plan) == jzero.estimate(plan).opt_state
    whole = sum(x.size for x in plan.layouts if shard_factor(x.state, plan.mesh) == 1)
    assert whole * (n - 1) / n <= 0.01 * total / n
    for x in plan.layouts:
        pieces = shard_factor(x.state, plan.mesh)
        assert pieces in (1, n)
        assert all(new >= old for new, old in zip(x.state_shape, x.shape, strict=True))
        assert not x.scanned or not x.state or x.state[0] is None  # never the dim of a scan
        assert len(set(named_axes(x.state))) == len(named_axes(x.state))


@pytest.mark.unit
@pytest.mark.parametrize("n", DEVICES)
@pytest.mark.parametrize("model", MODELS)
def test_params_at_stage_3(model, n):
    """Stored as the model sees them: in equal pieces, whose devices also share the state of that piece."""
    plan = plan_for(model, n, 3)
    for x in plan.layouts:
        assert plan.sharding(x.stored).shard_shape(x.shape)  # even: raises where it is not
        state = list(x.state) + [None] * len(x.shape)
        assert all(e in (None, state[d]) for d, e in enumerate(x.stored))


@pytest.mark.unit
def test_threshold_is_told():
    plan = plan_for("llama3-70b", 8)
    norm = next(x for x in plan.layouts if x.shape == (8192,))
    assert plan.min_shard_bytes == 64 * 1024
    assert norm.reason == "16.38 kB < min_shard_bytes 65.54 kB"
    assert plan_for("gpt2", 1024).min_shard_bytes == 768 * 2


@pytest.mark.unit
def test_a_stored_shape_is_laid_out_as_the_logical_one():
    """A state leaf that is not a copy of a param is known by its shape alone, the logical or the stored one."""
    plan = plan_for("resnet50", 1024)
    rng = np.random.default_rng(0)
    for shape in rng.integers(1, 3000, (300, 3)).tolist():
        for dims in range(1, 4):
            (logical,) = plan.state_forms([leaf(shape[:dims])])
            assert plan.state_forms([leaf(logical[1])]) == [logical]


def leaf(shape):
    return jax.ShapeDtypeStruct(tuple(shape), "float32")
