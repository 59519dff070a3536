"""Bad input: a clear error before anything is compiled; the text is part of the contract."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax.training.train_state import TrainState
from jax.sharding import Mesh
from models import batch, create_state, train_step

import jzero

F32 = jnp.float32


def raises(kind, *parts):
    """`pytest.raises` whose message holds every part, in order."""
    return pytest.raises(kind, match="(?s)" + ".*".join(map(_escaped, parts)))


def _escaped(text):
    import re

    return re.escape(text)


@pytest.mark.unit
@pytest.mark.parametrize("stage", [4, -1])
def test_a_stage_out_of_range(stage):
    with raises(
        ValueError, f"ZeroConfig(stage={stage})", "an integer from 0 to 3", "Pass stage=0, 1, 2 or 3."
    ):
        jzero.ZeroConfig(stage=stage)


@pytest.mark.unit
@pytest.mark.parametrize("stage", [True, False, 2.0, "2", None])
def test_a_stage_that_is_no_integer(stage):
    with raises(TypeError, "ZeroConfig(stage=", "an integer from 0 to 3", type(stage).__name__):
        jzero.shard(create_state, stage=stage)


@pytest.mark.unit
def test_an_axis_that_the_mesh_has_not(mesh_2x4):
    with raises(ValueError, "the mesh {'model': 2, 'data': 4} has no axis 'dta'", "Did you mean 'data'?"):
        jzero.shard(create_state, stage=2, axis="dta", mesh=mesh_2x4)


@pytest.mark.unit
def test_an_unknown_config_field():
    with raises(
        TypeError, "jzero.shard: unknown config field 'stag'", "Did you mean 'stage'?", "min_shard_bytes"
    ):
        jzero.shard(create_state, stag=2)


@pytest.mark.unit
def test_config_and_fields_together():
    with raises(TypeError, "pass config= or its fields (stage), not both"):
        jzero.shard(create_state, jzero.ZeroConfig(), stage=2)


@pytest.mark.unit
def test_a_config_of_another_kind():
    with raises(TypeError, "config must be a jzero.ZeroConfig, not dict"):
        jzero.shard(create_state, {"stage": 2})


@pytest.mark.unit
def test_choices_and_dtypes():
    with raises(ValueError, "updates must be one of 'deferred', 'delta'", "Did you mean 'delta'?"):
        jzero.ZeroConfig(updates="deltas")
    with raises(ValueError, "it is called 'deferred' now"):
        jzero.ZeroConfig(updates="land")
    assert jzero.ZeroConfig(updates="deferred") == jzero.ZeroConfig()  # the remedy
    with raises(ValueError, "min_shard_bytes must be an integer of at least 0"):
        jzero.ZeroConfig(min_shard_bytes=-1)
    for size in (0, -1):
        with raises(ValueError, f"ZeroConfig(bucket_bytes={size})", "an integer of at least 1"):
            jzero.ZeroConfig(bucket_bytes=size)
    with raises(TypeError, "bucket_bytes must be an integer of at least 1, not str"):
        jzero.ZeroConfig(bucket_bytes="64MiB")
    with raises(TypeError, "master_dtype must be a dtype"):
        jzero.ZeroConfig(master_dtype="float31")
    with raises(ValueError, "master_dtype must be a floating dtype"):
        jzero.ZeroConfig(master_dtype="int32")
    with raises(ValueError, "compute_dtype=bfloat16) has no effect at stage 2"):
        jzero.ZeroConfig(compute_dtype="bfloat16")
    with raises(ValueError, "param_axis='x'", "is not within axis='data'"):
        jzero.ZeroConfig(stage=3, param_axis="x")
    for stage in range(3):
        with raises(
            ValueError, f"reshard_after_forward=False) has no effect at stage {stage}", "pass stage=3"
        ):
            jzero.ZeroConfig(stage=stage, reshard_after_forward=False)
    with raises(TypeError, "reshard_after_forward=8", "True or False", "pass param_axis="):
        jzero.ZeroConfig(stage=3, reshard_after_forward=8)
    with raises(ValueError, "an axis is named twice"):
        jzero.ZeroConfig(axis=("data", "data"))
    with raises(TypeError, "axis must be the name of a mesh axis"):
        jzero.ZeroConfig(axis=3)
    with raises(TypeError, "logical_axis_rules must be a sequence of pairs"):
        jzero.ZeroConfig(logical_axis_rules={"mlp": "model"})
    with raises(ValueError, "('embed', 'data') names axis='data'", "Pass ('embed', None)"):
        jzero.ZeroConfig(logical_axis_rules=[("embed", "data")])


@pytest.mark.unit
def test_a_state_of_an_unknown_kind():
    with raises(
        TypeError,
        "jzero.shard: a state of type dict is not known",
        "TrainState",
        "nnx.Module",
        "jzero.zero(tx",
    ):
        jzero.shard({"params": 1}, stage=2)
    with raises(TypeError, "the creation function make", "a state of type list is not known"):
        jzero.shard(make, stage=2)


def make():
    return [jnp.ones(3)]


@pytest.mark.unit
def test_an_optimizer_with_arrays_of_the_creation_function(tmp_path):
    def create(rate=None, key=None):
        rate = jnp.linspace(1e-3, 1e-2, 4) if rate is None else rate
        key = jax.random.key(0) if key is None else key
        tx = optax.chain(optax.add_noise(0.1, 0.5, key), optax.sgd(lambda count: rate[count]))
        return TrainState.create(apply_fn=None, params={"w": jnp.ones((8, 8))}, tx=tx)

    rate, disk = jnp.ones(4), jzero.Offload(tier="disk", path=tmp_path)
    for shard in (jzero.shard, jzero.abstract):
        with raises(TypeError, "(f32[4])", "Make the optimizer outside of the creation function."):
            shard(create, stage=2)
    jzero.shard(lambda: create(rate), stage=2)
    with raises(TypeError, "a random key (key<fry>[])", "Make the optimizer outside"):
        jzero.shard(lambda: create(rate), stage=2, offload=disk)
    key = jax.random.key(0)
    jzero.shard(lambda: create(rate, key), stage=2, offload=disk)


@pytest.mark.unit
def test_a_creation_function_that_needs_arguments():
    def create(config, seed=0):
        return create_state()

    with raises(TypeError, "'create' needs arguments (config)", "lambda: create(config)"):
        jzero.shard(create, stage=2)
    with raises(TypeError, "jzero.abstract:", "needs arguments (config)"):
        jzero.abstract(create, stage=2)


def test_an_optimizer_state_that_does_not_belong_to_the_params(mesh):
    state = create_state(optax.adam(1e-3))
    other = {"w": jnp.ones((8, 8))}
    with raises(ValueError, "the optimizer state does not belong to the params", "absent", "tx.init(params)"):
        jzero.shard(state.replace(opt_state=state.tx.init(other)), stage=1, mesh=mesh)
    with raises(ValueError, "does not belong", "(8, 8)", "(8, 9)"):
        wrong = state.tx.init({"w": jnp.ones((8, 9))})
        jzero.shard(TrainState(0, None, other, state.tx, wrong), stage=1, mesh=mesh)


@pytest.mark.unit
def test_integer_and_empty_params(mesh):
    with raises(
        ValueError, "1 of 2 params are not floating-point", "['table']", "i32[8]", "keep them outside"
    ):
        jzero.make_plan({"w": jnp.ones((8, 8)), "table": jnp.arange(8)}, stage=2, mesh=mesh)
    with raises(ValueError, "the params are empty"):
        jzero.make_plan({}, stage=2, mesh=mesh)
    with raises(TypeError, "leaves of the params are not arrays", "['act']", "eqx.filter"):
        jzero.make_plan({"w": jnp.ones((8, 8)), "act": jax.nn.relu}, stage=2, mesh=mesh)


@pytest.mark.unit
def test_uneven_leaves_as_an_error(mesh):
    shapes = {
        "embed": jax.ShapeDtypeStruct((50257, 769), jnp.bfloat16),
        "ok": jax.ShapeDtypeStruct((1024, 64), F32),
    }
    with raises(
        ValueError, "1 of 2 leaves cannot be split over mesh axis 'data' (size 8)", "['embed']", "bf16[50257,769]",
        "no dim divisible by 8", 'uneven="pad") (costs 8.07 kB', 'uneven="replicate" (costs', "more per device",
    ):  # fmt: skip
        jzero.make_plan(shapes, stage=2, mesh=mesh, uneven="error")
    plan = jzero.make_plan(shapes, stage=2, mesh=mesh, uneven="replicate")
    assert "no dim divisible by 8" in plan.describe()
    assert "77.30 MB" in plan.describe()  # what stays whole, in bytes


def test_a_mesh_of_one_device_works_and_says_so():
    one = Mesh(np.array(jax.devices()[:1]), ("data",))
    state = jzero.shard(create_state, stage=3, mesh=one)
    plan = jzero.plan_of(state)
    assert "nothing is shared" in plan.describe()
    state, loss = jax.jit(train_step)(state, plan.place_batch(batch()))
    np.testing.assert_allclose(loss, jax.jit(train_step)(create_state(), batch())[1], rtol=1e-6)


@pytest.mark.unit
def test_arrays_committed_to_devices_outside_of_the_mesh():
    four = Mesh(np.array(jax.devices()[:4]), ("data",))
    state = jax.device_put(create_state(), jax.devices()[7])
    with raises(
        ValueError, "arrays are committed to devices that are not in the mesh of 4", "jax.device_get(state)"
    ):
        jzero.shard(state, stage=2, mesh=four)
    params = jax.device_put({"w": jnp.ones((64, 64))}, jax.devices()[7])
    tx = jzero.zero(optax.adam(1e-3), jzero.make_plan({"w": jnp.ones((64, 64))}, stage=1, mesh=four))
    with raises(ValueError, "1 param is committed to other devices", "params = plan.place(params)"):
        tx.init(params)


@pytest.mark.unit
def test_zero_refuses_what_is_no_transformation(mesh):
    plan = jzero.make_plan({"w": jnp.ones((64, 64))}, stage=1, mesh=mesh)
    with raises(TypeError, "tx must be an optax transformation, not int"):
        jzero.zero(3, plan)
    tx = jzero.zero(optax.sgd(1e-3), plan)
    with raises(ValueError, "update needs the params"):
        tx.update({"w": jnp.ones((64, 64))}, tx.init({"w": jnp.ones((64, 64))}))
    with raises(ValueError, "not the one that the plan was made for", "['w']", "[64,64]", "[8,8]"):
        tx.init({"w": jnp.ones((8, 8))})
    with raises(TypeError, "this TrainState has no plan. Pass a TrainState from jzero.shard"):
        jzero.plan_of(create_state())


def test_a_batch_given_to_place_and_uneven_batches(mesh):
    plan = jzero.plan_of(jzero.shard(create_state, stage=2, mesh=mesh))
    with raises(ValueError, "plan.place:", "if it is a batch, use plan.place_batch(batch)"):
        plan.place(batch())
    with raises(
        ValueError, "1 leaves cannot be split over batch axes ('data',) (8 parts)", "['x']", "f32[12,3]",
        "12 = 1 x 8 + 4", "a multiple of 8",
    ):  # fmt: skip
        plan.place_batch({"x": np.ones((12, 3), np.float32), "scale": 1.0})


@pytest.mark.nightly
def test_updates_only_land_on_their_own_params(mesh):
    state = jzero.shard(create_state, stage=2, mesh=mesh)
    grads = jax.tree.map(jnp.ones_like, state.params)
    updates, _ = state.tx.update(grads, state.opt_state, state.params)
    leaf = updates["Dense_0"]["kernel"]
    with raises(TypeError, "lands on a param f32[24,40] and cannot be added to 0", 'updates="delta"'):
        sum([leaf])
    with raises(TypeError, "cannot be added to f32[3]"):
        jnp.ones(3) + leaf
    with raises(TypeError, "stands on the right of the sum"):
        leaf + jnp.ones((24, 40))
    with raises(AttributeError, "an update is not an array, and has no 'real'", 'updates="delta"'):
        optax.global_norm(updates)
    with raises(TypeError, "use_ZeroConfig_updates_delta_for_plain_arrays"):
        jax.jit(state.tx.update)(grads, state.opt_state, state.params)


@pytest.mark.unit
def test_layouts_that_do_not_fit_the_mesh(mesh_2x4):
    shapes = {"w": jax.ShapeDtypeStruct((9, 64), F32)}
    with raises(ValueError, "['w']", "has no axis 'modl'", "Did you mean 'model'?"):
        jzero.make_plan(shapes, stage=2, mesh=mesh_2x4, param_specs={"w": jax.P(None, "modl")})
    with raises(ValueError, "['w']", "9 is not divisible by 2"):
        jzero.make_plan(shapes, stage=2, mesh=mesh_2x4, param_specs={"w": jax.P("model")})
    with raises(TypeError, "mesh must be a jax.sharding.Mesh, not list"):
        jzero.make_plan(shapes, stage=2, mesh=[1])


@pytest.mark.unit
def test_per_example_gradients_are_refused(mesh):
    params = {"w": jnp.ones((64, 64))}
    tx = jzero.zero(optax.contrib.dpsgd(1e-2, 1.0, 1.0, 0), jzero.make_plan(params, stage=2, mesh=mesh))
    with raises(
        ValueError, "1 gradient has another shape", "['w']", "f32[64,64]", "f32[8,64,64]", "Per-example"
    ):
        tx.update({"w": jnp.ones((8, 64, 64))}, tx.init(params), params)


def test_params_replaced_by_another_dtype(mesh):
    state = jzero.shard(lambda: create_state(dtype=jnp.bfloat16), stage=2, mesh=mesh)
    fp32 = jax.tree.map(lambda p: p.astype(F32), state.params)
    with raises(
        TypeError,
        "params have another dtype than in the plan",
        "['Dense_0']['bias']",
        "bf16[40]",
        "f32[40]",
        "Cast",
    ):
        state.replace(params=fp32).apply_gradients(grads=fp32)


@pytest.mark.unit
def test_a_config_where_a_plan_belongs():
    with raises(TypeError, "plan must be a jzero.Plan, not ZeroConfig", "jzero.make_plan(params, ...)"):
        jzero.zero(optax.sgd(1e-3), jzero.ZeroConfig(stage=2))


def test_what_is_no_batch_of_arrays(mesh):
    plan = jzero.plan_of(jzero.shard(create_state, stage=2, mesh=mesh))
    with raises(TypeError, "['x'][0] is a float in a list", "np.asarray(the list)"):
        plan.place_batch({"x": [1.0] * 8})
    with raises(TypeError, "is a traced value. Place the batch outside of jit"):
        jax.jit(plan.place_batch)(batch())


@pytest.mark.unit
def test_an_abstract_state_or_pod_given_to_shard(mesh):
    with raises(TypeError, "jzero.shard: this state is abstract", "jzero.abstract"):
        jzero.shard(jax.eval_shape(create_state), stage=2, mesh=mesh)


@pytest.mark.pod
def test_a_mesh_of_compile_only_devices(mesh):
    pod = jzero.pod("h200")
    for state in (create_state, create_state()):
        with raises(TypeError, "compile-only devices (jzero.pod)", "jzero.abstract(state"):
            jzero.shard(state, stage=2, mesh=pod.mesh({"data": 8}))
    elsewhere = jzero.abstract(create_state, stage=2, mesh=mesh)
    with raises(ValueError, "leaves are not laid out on this pod", "mesh=pod.mesh(...)"):
        pod.compile(train_step, elsewhere, batch())
