"""What a user sees of the package: its names, how its objects print, and what can be pickled."""

from __future__ import annotations

import pickle

import jax.numpy as jnp
import optax
import pytest

import jzero
from jzero.layout import mesh_pickling

PARAMS = {"w": jnp.ones((1600, 30)), "b": jnp.ones(7)}

pytestmark = pytest.mark.unit


@pytest.fixture
def plan(mesh):
    return jzero.make_plan(PARAMS, stage=3, mesh=mesh, min_shard_bytes=0)


def test_dir_shows_the_public_names():
    assert set(dir(jzero)) == {*jzero.__all__, "__version__"}
    assert all(hasattr(jzero, name) for name in dir(jzero))
    assert jzero.__version__[0].isdigit()


@pytest.mark.parametrize(
    ("name", "now"),
    [
        ("Transformer", r"jzero\.estimate\(plan, model="), ("describe_mesh", r"jzero\.estimate\(plan\)\.network"),
        ("unwrap", r"jzero\.zero takes"), ("uses_of", r"jzero\.param_uses"),
    ],
)  # fmt: skip
def test_an_old_name_says_the_new_one(name, now):
    with pytest.raises(AttributeError, match=rf"jzero\.{name} is gone\. .*{now}"):
        getattr(jzero, name)


def test_a_plan_prints_as_its_table(plan):
    assert repr(plan) == plan.describe()
    assert "['w']" in repr(plan)


def test_what_is_wrapped_prints_on_one_line(plan):
    tx = jzero.zero(optax.adam(1e-3), plan)
    assert repr(tx) == "<jzero.zero: an optax transformation, stage 3 over data=8>"
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    for part in tx:
        assert "\n" not in repr(part)
    wrapped = jzero.gather_on_use(sum, plan)
    assert repr(wrapped) == "<jzero.gather_on_use: sum, stage 3 over data=8>"
    params = plan.place(PARAMS)
    updates, _ = tx.update(params, tx.init(params), params)
    assert repr(updates["w"]) == "<jzero update of a param f32[1600,30]>"


def test_a_plan_can_be_pickled(plan):
    assert plan.array_mesh.size == 8  # cached, and not pickled
    copy = pickle.loads(pickle.dumps(plan))
    assert copy == plan
    assert hash(copy) == hash(plan)
    assert copy.array_mesh == plan.array_mesh
    assert copy.tree == plan.tree


def test_a_plan_for_devices_that_are_not_here(plan, monkeypatch):
    data = pickle.dumps(plan)
    here = mesh_pickling.jax.devices()
    monkeypatch.setattr(mesh_pickling.jax, "devices", lambda platform=None: here[:4])
    with pytest.raises(ValueError, match=r"pickled for 8 cpu devices.*no device 4.*jzero.make_plan\("):
        pickle.loads(data)


@pytest.mark.pod
def test_a_plan_for_a_pod_says_why_not():
    mesh = jzero.pod("h200").mesh({"data": 8})
    plan = jzero.make_plan(PARAMS, stage=2, mesh=mesh)
    with pytest.raises(TypeError, match=r"only compiled for.*plan.config"):
        pickle.dumps(plan)
