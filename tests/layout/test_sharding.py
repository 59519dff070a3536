"""The leaf rule, the plan and its table, and layouts that the user brings (tensor parallelism)."""

from __future__ import annotations

import contextlib
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh, NamedSharding
from models import DIM_IN, DIM_OUT, assert_batch_is_split, batch, create_state, loss_of, max_error, train_step
from states import nnx_step

import jzero
from jzero.config import EFFECTS
from jzero.layout.split import add_axes

P = jax.P


@pytest.mark.unit
@pytest.mark.parametrize(
    ("shape", "base", "want"),
    [
        ((64, 40), P(), P("data")),
        ((50257, 768), P(), P(None, "data")),
        ((3, 3, 64, 128), P(), P(None, None, "data")),
        ((5, 7), P(), None),
        ((), P(), None),
        ((0, 8), P(), P(None, "data")),
        ((64, 40), P("model"), P("model", "data")),
        ((64, 40), P(None, "model"), P("data", "model")),
        ((64, 5), P("model"), P(("model", "data"))),  # no free dim divides: it shares one
        ((12, 5), P("model"), None),  # 12 / 2 = 6, and 4 does not divide it
    ],
)
def test_leaf_rule(shape, base, want, mesh_2x4):
    assert add_axes(shape, base, ("data",), mesh_2x4) == want


@pytest.mark.unit
def test_min_shard_bytes_keeps_small_leaves_whole_and_says_so(mesh):
    shapes = {
        "small": jax.ShapeDtypeStruct((64, 32), jnp.float32),
        "big": jax.ShapeDtypeStruct((64, 64), jnp.float32),
    }
    plan = jzero.make_plan(shapes, stage=3, mesh=mesh, min_shard_bytes=16 * 1024)
    big, small = plan.layouts
    assert (big.stored, small.stored) == (P("data"), P())
    assert small.reason == "8.19 kB < min_shard_bytes 16.38 kB"
    assert "1 whole over the ZeRO axis (8.19 kB)" in plan.describe()
    assert jzero.make_plan(shapes, stage=3, mesh=mesh, min_shard_bytes=0).layouts[1].stored == P("data")


@pytest.mark.unit
def test_plans_are_hashable_values(mesh):
    shapes = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}
    a, b = (jzero.make_plan(shapes, stage=2, mesh=mesh) for _ in range(2))
    assert a == b
    assert hash(a) == hash(b)
    assert a != jzero.make_plan(shapes, stage=1, mesh=mesh)
    assert len({a, b}) == 1


@pytest.mark.unit
def test_a_stage_is_a_row_of_layouts(mesh):
    shapes = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}
    rows = {}
    for stage in range(4):
        x = jzero.make_plan(shapes, stage=stage, mesh=mesh, min_shard_bytes=0).layouts[0]
        rows[stage] = [s == P("data") for s in (x.stored, x.used, x.grad, x.state)]
    assert rows == {
        0: [False, False, False, False],
        1: [False, False, False, True],
        2: [False, False, True, True],
        3: [True, False, True, True],
    }


def test_describe_has_a_row_per_leaf(mesh):
    state = jzero.shard(lambda: create_state(dtype=jnp.bfloat16), stage=3, mesh=mesh, min_shard_bytes=256)
    plan = jzero.plan_of(state)
    text = plan.describe(state.tx)
    for layout in plan.layouts:
        assert layout.name in text
    row = next(line for line in text.splitlines() if line.startswith("['Dense_1']['kernel']"))
    assert row.split() == [
        "['Dense_1']['kernel']", "bf16[40,40]", "P('data',)", "P()", "P('data',)", "P('data',)", "800", "B",
    ]  # fmt: skip
    assert ".master['Dense_1']['kernel']" in text
    bias = next(line for line in text.splitlines() if line.startswith("['Dense_0']['bias']"))
    assert "80 B < min_shard_bytes 256 B" in bias


@pytest.mark.unit
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_micro_batches_lie_on_all_devices(kind):
    """Micro-batch i has the i-th part of every device's rows: inside of jit, outside of it, and for abstract leaves."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    x = np.arange(64 * 3, dtype=np.float32).reshape(64, 3)
    want = [np.concatenate([x[8 * d + 2 * i : 8 * d + 2 * i + 2] for d in range(8)]) for i in range(4)]
    with jax.set_mesh(mesh) if kind == AxisType.Explicit else contextlib.nullcontext():
        plan = jzero.make_plan({"w": jnp.ones((64, 64))}, stage=2, mesh=mesh)
        cut = jax.jit(lambda batch: plan.micro_batches(batch, 4))
        given = plan.place_batch({"x": x})
        program = cut.lower(given).compile().as_text()
        assert not re.search("all-|permute", program)  # nothing moves
        abstract = plan.micro_batches(
            jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), given), 4
        )
        for found in (cut(given), plan.micro_batches(given, 4), plan.micro_batches({"x": x}, 4)):
            assert found["x"].sharding.shard_shape((4, 16, 3)) == (4, 2, 3)
            assert abstract["x"].sharding.is_equivalent_to(found["x"].sharding, 3)
            np.testing.assert_array_equal(found["x"], want)
        assert abstract["x"].shape == (4, 16, 3)


def test_micro_batches_refuse_what_cannot_be_cut(mesh):
    plan = jzero.make_plan({"w": jnp.ones((64, 64))}, stage=2, mesh=mesh)
    bad = {"x": jnp.ones((64, 3)), "y": jnp.ones((40, 2)), "scale": jnp.ones(())}
    message = (
        r"^plan.micro_batches: 8 devices x 4 micro-batches cannot split 2 of 3 leaves evenly:\n"
        r"  \['scale'\]  f32\[\]    +no dim 0\n  \['y'\]      f32\[40,2\]  40 = 1 x 32 \+ 8\n.*multiple of 32"
    )
    for call in (plan.micro_batches, jax.jit(plan.micro_batches, static_argnums=1)):
        with pytest.raises(ValueError, match=message):
            call(bad, 4)
    with pytest.raises(TypeError, match="not arrays"):
        plan.micro_batches([1, 2], 4)
    with pytest.raises(ValueError, match="k=0"):
        plan.micro_batches(bad, 0)


def test_place_batch_takes_numpy_jnp_scalars_and_placed_arrays(mesh):
    plan = jzero.plan_of(jzero.shard(create_state, stage=2, mesh=mesh))
    placed = plan.place_batch({**batch(), "j": jnp.ones((8, 2)), "scale": 2.0})
    assert_batch_is_split({k: v for k, v in placed.items() if k != "scale"})
    assert placed["scale"].is_fully_replicated
    assert plan.batch == NamedSharding(plan.mesh, P("data"))
    again = plan.place_batch(placed)
    assert all(a is b for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(placed), strict=True))


# ------------------------------------------------------------------------------------- tensor parallelism


class Tensor(nn.Module):
    """Megatron-like: the first kernel split by columns, the second by rows; names in linen metadata."""

    boxed: bool = True

    @nn.compact
    def __call__(self, x):
        def init(names):
            base = nn.initializers.lecun_normal()
            return nn.with_partitioning(base, names) if self.boxed else base

        x = jnp.tanh(nn.Dense(64, kernel_init=init((None, "model")))(x))
        return nn.Dense(DIM_OUT, kernel_init=init(("model", None)))(x)


def create_tensor(boxed=True):
    model = Tensor(boxed)
    params = model.init(jax.random.key(0), jnp.ones((2, DIM_IN)))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-2))


WANT = {0: [P(None, "model"), P("model")], 3: [P("data", "model"), P(("model", "data"))]}


@pytest.mark.default_cases("3-param_specs", "2-metadata")
@pytest.mark.parametrize("given", ["metadata", "param_specs", "arrays"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_tensor_parallel_layouts_are_kept_and_the_zero_axis_added(stage, given, mesh_2x4):
    specs = {
        "Dense_0": {"kernel": P(None, "model"), "bias": P()},
        "Dense_1": {"kernel": P("model", None), "bias": P()},
    }
    kwargs = {"stage": stage, "mesh": mesh_2x4, "min_shard_bytes": 256}
    if given == "metadata":
        state = jzero.shard(create_tensor, **kwargs)
    elif given == "param_specs":
        state = jzero.shard(lambda: create_tensor(False), param_specs=specs, **kwargs)
    else:
        plain = create_tensor(False)
        laid = jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh_2x4, s)), plain.params, specs)
        state = jzero.shard(plain.replace(params=laid, opt_state=plain.tx.init(laid)), **kwargs)
    plan = jzero.plan_of(state)
    by_name = {x.keys[:2]: x for x in plan.layouts}
    kernels = [by_name[name, "kernel"] for name in ("Dense_0", "Dense_1")]
    assert [x.used for x in kernels] == WANT[0]
    assert [x.stored for x in kernels] == WANT[3 if stage == 3 else 0]
    assert [x.state for x in kernels] == WANT[3 if stage else 0]
    plain, step = create_tensor(False), jax.jit(lambda s, b: train_step(s, b))
    for i in range(5):
        placed = plan.place_batch(batch(i))
        assert_batch_is_split(placed, 4)
        state, loss = step(state, placed)
        plain, plain_loss = step(plain, batch(i))
        np.testing.assert_allclose(loss, plain_loss, rtol=1e-5)
    got = [x.sharding.spec for x in jax.tree.leaves(state.params)]
    assert got == [x.stored for x in plan.layouts]
    assert max_error(nn.meta.unbox(state.params), plain.params) < 1e-5


@pytest.mark.unit
def test_nnx_metadata_is_kept(mesh_2x4):
    class Model(nnx.Module):
        def __init__(self, rngs):
            init = nnx.with_partitioning(
                nnx.initializers.lecun_normal(), (None, "model"), eager_sharding=False
            )
            self.a = nnx.Linear(DIM_IN, 64, kernel_init=init, rngs=rngs)

    def create():
        model = Model(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    model, optimizer = jzero.shard(create, stage=3, mesh=mesh_2x4, min_shard_bytes=0)
    assert model.a.kernel.get_value().sharding.spec == P("data", "model")
    assert jzero.plan_of(optimizer).layouts[1].used == P(None, "model")


LOGICAL = {"scale": ("norm",), "up": ("embed", "mlp"), "down": ("mlp", "embed")}


def logical_linen():
    """Names as MaxText has them, none of them a mesh axis."""
    shapes = {"scale": (DIM_IN,), "up": (DIM_IN, 64), "down": (64, DIM_IN)}
    params = {k: nn.LogicallyPartitioned(jnp.ones(s), LOGICAL[k]) for k, s in shapes.items()}
    return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-2))


class LogicalNnx(nnx.Module):
    def __init__(self):
        for name, shape in {"scale": (DIM_IN,), "up": (DIM_IN, 64), "down": (64, DIM_IN)}.items():
            setattr(self, name, nnx.Param(jnp.ones(shape), sharding_names=LOGICAL[name], eager_sharding=False))


def logical_nnx():
    model = LogicalNnx()
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


@pytest.mark.unit
@pytest.mark.parametrize("create", [logical_linen, logical_nnx])
def test_logical_names_are_ignored_or_translated(create, mesh_2x4):
    """The message names both ways in full, and both work."""

    def used(**given):
        state = jzero.abstract(create, stage=3, mesh=mesh_2x4, min_shard_bytes=0, **given)
        plan = jzero.plan_of(state[1] if isinstance(state, tuple) else state)
        assert all("data" in str(x.stored) for x in plan.layouts)
        return {x.keys[0]: x.used for x in plan.layouts}

    with pytest.raises(ValueError, match="has no axis 'mlp'") as error:
        used()
    offered = re.findall(r"(param_specs|logical_axis_rules)=(jax\.P\(\)|\[.*?\])", str(error.value))
    assert [name for name, _ in offered] == ["param_specs", "logical_axis_rules"]
    for name, value in offered:
        assert used(**{name: eval(value)}) == {"scale": P(), "up": P(), "down": P()}
    rules = [("mlp", "model"), ("embed", "model"), ("norm", None)]  # the second finds its axis taken
    for order in (rules, rules[::-1]):
        flax = {k: tuple(nn.logical_to_mesh_axes(names, order)) for k, names in LOGICAL.items()}
        got = used(logical_axis_rules=order)
        assert {k: tuple(got[k]) + (None,) * (len(names) - len(got[k])) for k, names in LOGICAL.items()} == flax
    assert got["up"] == P("model")
    with pytest.raises(ValueError, match="no axis 'norm'"):
        used(logical_axis_rules=rules[:2])
    rules = [("mlp", "model"), ("embed", ("expert", "tensor")), ("norm", None)]  # MaxText's name axes of its own mesh
    with pytest.raises(ValueError, match="has no axis 'expert'") as error:
        used(logical_axis_rules=rules)
    offered = re.search(r"logical_axis_rules=(\[.*?\])", str(error.value))[1]
    got = used(logical_axis_rules=eval(offered, {"rules": rules}))
    assert got == {"scale": P(), "up": P(None, "model"), "down": P("model")}


@pytest.mark.unit
@pytest.mark.parametrize("form", ["state", "param_specs"])
def test_a_variable_has_rules_of_its_own(form, mesh_2x4):
    """`sharding_rules`, as `nnx.with_partitioning(..., sharding_rules=)` puts them into the metadata."""
    own = {"up": {"mlp": "model", "embed": None}, "down": {"embed": "model", "mlp": None}, "scale": {"norm": None}}

    def create():
        model = LogicalNnx()
        for name, rules in own.items():
            getattr(model, name).set_metadata(sharding_rules=list(rules.items()))
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    given = {"param_specs": nnx.get_partition_spec(nnx.state(create()[0]))} if form == "param_specs" else {}
    pair = jzero.abstract(create, stage=3, mesh=mesh_2x4, min_shard_bytes=0, **given)
    used = {x.keys[0]: x.used for x in jzero.plan_of(pair).layouts}
    assert used == {"scale": P(), "up": P(None, "model"), "down": P(None, "model")}


class Apart(nnx.Module):
    """Metadata for the moments alone, on a dim that jzero would not choose; statistics and keys beside the params."""

    def __init__(self, optimizer_sharding):
        names = {"optimizer_sharding": optimizer_sharding, "eager_sharding": False}
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"), **names)
        rngs = nnx.Rngs(0, dropout=1)
        self.up = nnx.Linear(DIM_IN, 64, use_bias=False, kernel_init=init, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(64, rngs=rngs), nnx.Dropout(0.0, rngs=rngs)
        self.down = nnx.List([nnx.Linear(64, DIM_OUT, rngs=rngs)])

    def __call__(self, x):
        return self.down[0](self.dropout(self.norm(jnp.tanh(self.up(x)))))


def create_apart(optimizer_sharding=(None, ("model", "data"))):
    model = Apart(optimizer_sharding)
    return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)


FORMS = {  # what Flax gives for a model, and for the pair
    "specs of the model": lambda model, optimizer, mesh: nnx.get_partition_spec(nnx.state(model)),
    "specs of the params": lambda model, optimizer, mesh: nnx.get_partition_spec(nnx.state(model, nnx.Param)),
    "shardings of the model": lambda model, optimizer, mesh: nnx.get_named_sharding(nnx.state(model), mesh),
    "specs of the pair": lambda model, optimizer, mesh: nnx.get_partition_spec(nnx.state((model, optimizer))),
    "shardings of the pair": lambda model, optimizer, mesh: nnx.get_named_sharding((model, optimizer), mesh),
}


@pytest.mark.unit
@pytest.mark.parametrize("form", FORMS)
def test_nnx_states_and_modules_give_layouts(form, mesh_2x4):
    pair = create_apart()
    given = FORMS[form](*pair, mesh_2x4)
    mesh = None if "shardings" in form else mesh_2x4  # shardings have one
    fields = {"stage": 3, "mesh": mesh, "param_specs": given, "min_shard_bytes": 0}
    params = nnx.state(pair[0], nnx.Param)
    for plan in jzero.plan_of(jzero.abstract(create_apart, **fields)), jzero.make_plan(params, **fields):
        assert plan.mesh == mesh_2x4
        up = plan.by_keys["up", "kernel"]
        assert (up.used, up.stored, up.state) == (P(None, "model"), *[P(None, ("model", "data"))] * 2)
        assert plan.by_keys["down", "0", "kernel"].stored == P("data")
    whole = jzero.abstract(create_apart, stage=3, mesh=mesh_2x4, param_specs=P(), min_shard_bytes=0)
    assert jzero.plan_of(whole).by_keys["up", "kernel"].state == P("data")  # the metadata ignored


@pytest.mark.unit
def test_a_train_state_of_layouts_gives_those_of_its_params(mesh_2x4):
    specs = nn.get_sharding(jax.eval_shape(create_tensor), mesh_2x4)
    state = jzero.abstract(lambda: create_tensor(False), stage=3, param_specs=specs, min_shard_bytes=256)
    by_name = jzero.plan_of(state).by_keys
    assert [by_name[name, "kernel"].stored for name in ("Dense_0", "Dense_1")] == WANT[3]


@pytest.mark.unit
def test_nnx_specs_of_other_things_are_refused(mesh_2x4):
    model, _ = create_apart()
    some = [nnx.get_partition_spec(nnx.state(model, f)) for f in (nnx.BatchStat, nnx.PathContains("up"))]
    for given, error, text in [
        (nnx.state(model), TypeError, "must be a tree of PartitionSpec or NamedSharding, not ArrayImpl"),
        (some[0], ValueError, r"has no layout for 5 of 5 params:\n.*down"),
        (some[1], ValueError, "has no layout for 4 of 5"),
    ]:
        with pytest.raises(error, match=text):
            jzero.abstract(create_apart, stage=2, mesh=mesh_2x4, param_specs=given)


@pytest.mark.unit
@pytest.mark.parametrize("bad", [("data", None), (("model", "data"), None), ("data", ("model", "data")), (None, None)])
def test_optimizer_sharding_that_is_no_zero_layout_is_refused(bad, mesh_2x4):
    """Over the axis "model" the moments would lie otherwise than their param."""
    with pytest.raises(ValueError, match=r"\['up'\]\['kernel'\] .*optimizer_sharding=P\(.*jzero chooses"):
        jzero.abstract(lambda: create_apart(bad), stage=1, mesh=mesh_2x4)


@pytest.mark.default_cases("2")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_optimizer_sharding_names_the_dim_of_the_state(stage, mesh_2x4):
    """Small as the param is; at stage 3 it is stored so, too. Trained, and laid out again at another stage."""
    model, optimizer = jzero.shard(create_apart, stage=stage, mesh=mesh_2x4)
    plan = jzero.plan_of(optimizer)
    base, apart = P(None, "model"), P(None, ("model", "data"))
    moment = optimizer.opt_state[0].mu["up"]["kernel"]
    assert ("optimizer_sharding" in str(plan.notes)) == (stage == 0)
    plain = create_apart()
    for i in range(3):
        assert moment.get_value().sharding.spec == (apart if stage else base)
        assert model.up.kernel.get_value().sharding.spec == (apart if stage == 3 else base)
        loss = nnx_step(model, optimizer, plan.place_batch(batch(i)))
        np.testing.assert_allclose(loss, nnx_step(*plain, batch(i)), rtol=1e-5)
    other = jzero.plan_of(jzero.shard((model, optimizer), stage=3 - stage))
    assert other.by_keys["up", "kernel"].state == (apart if stage < 3 else base)


# ------------------------------------------------------------------------------------------ axes of a mesh


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_explicit_axes_work_on_an_auto_mesh_over_the_same_devices(stage):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    state = jzero.shard(create_state, stage=stage, mesh=mesh, min_shard_bytes=0)
    plan = jzero.plan_of(state)
    assert "the mesh has Explicit axes" in plan.describe()
    state, loss = jax.jit(train_step)(state, plan.place_batch(batch()))
    np.testing.assert_allclose(loss, jax.jit(train_step)(create_state(), batch())[1], rtol=1e-5)


@pytest.mark.unit
def test_no_mesh_takes_all_devices_on_one_axis():
    plan = jzero.make_plan({"w": jnp.ones((64, 64))}, stage=2)
    assert dict(plan.mesh.shape) == {"data": 8}
    assert dict(jzero.make_plan({"w": jnp.ones((64, 64))}, stage=2, axis="fsdp").mesh.shape) == {"fsdp": 8}


@pytest.mark.default_cases("2")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_replicas_and_shards_on_two_axes(stage):
    """HSDP: state over "data", the batch over both axes."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("replica", "data"))
    fields = {"axis": "data", "batch_axis": ("replica", "data"), "min_shard_bytes": 0}
    state = jzero.shard(create_state, stage=stage, mesh=mesh, **fields)
    plan = jzero.plan_of(state)
    placed = plan.place_batch(batch())
    assert_batch_is_split(placed, 8)
    state, loss = jax.jit(train_step)(state, placed)
    plain, plain_loss = jax.jit(train_step)(create_state(), batch())
    np.testing.assert_allclose(loss, plain_loss, rtol=1e-5)
    assert max_error(state.params, plain.params) < 1e-5
    assert {x.state for x in plan.layouts if not x.reason} <= {
        P("data"),
        P(None, "data"),
        P(None, None, "data"),
    }


@pytest.mark.nightly
def test_params_within_the_node_and_state_over_all():
    """hpZ: stage 3 params over a part of the axes that share the state."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("node", "gpu"))
    state = jzero.shard(
        create_state, stage=3, mesh=mesh, axis=("node", "gpu"), param_axis="gpu", min_shard_bytes=0
    )  # fmt: skip
    plan = jzero.plan_of(state)
    kernel = next(x for x in plan.layouts if x.keys == ("Dense_0", "kernel"))
    assert (kernel.stored, kernel.state) == (P("gpu"), P(("gpu", "node")))  # a part of the stored shard
    data = plan.place_batch(batch())
    state, loss = jax.jit(train_step)(state, data)
    np.testing.assert_allclose(loss, jax.jit(train_step)(create_state(), batch())[1], rtol=1e-5)
    assert loss_of(state.apply_fn, state.params, data) < loss


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("stage", [1, 3])
def test_params_that_an_earlier_run_split_are_not_taken_for_tensor_parallelism(stage, mesh):
    old = jzero.shard(create_state, stage=3, mesh=mesh, min_shard_bytes=0)
    fresh = TrainState.create(apply_fn=create_state().apply_fn, params=old.params, tx=optax.adam(1e-3))
    plan = jzero.plan_of(jzero.shard(fresh, stage=stage, mesh=mesh, min_shard_bytes=0))
    want = jzero.plan_of(jzero.shard(create_state, stage=stage, mesh=mesh, min_shard_bytes=0))
    assert plan.layouts == want.layouts


@pytest.mark.unit
def test_no_mesh_takes_the_mesh_that_the_params_are_split_on(mesh_2x4):
    w = jax.device_put(jnp.ones((64, 64)), NamedSharding(mesh_2x4, P(None, "model")))
    plan = jzero.make_plan({"w": w}, stage=2, min_shard_bytes=0)
    assert plan.mesh == mesh_2x4
    assert plan.layouts[0].state == P("data", "model")


def test_a_batch_on_another_mesh_is_moved_to_the_plans():
    explicit = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    state = jzero.shard(create_state, stage=2, mesh=explicit)
    plan = jzero.plan_of(state)
    placed = plan.place_batch(jax.device_put(batch(), NamedSharding(explicit, P("data"))))
    assert all(x.sharding == plan.batch for x in jax.tree.leaves(placed))
    jax.jit(train_step)(state, placed)


def test_kind_of_an_argument(mesh):
    state = jzero.shard(lambda: create_state(dtype=jnp.bfloat16), stage=2, mesh=mesh, min_shard_bytes=0)
    plan = jzero.plan_of(state)
    compiled = jax.jit(train_step).lower(state, plan.place_batch(batch())).compile()
    memory = jzero.explain(compiled, plan).memory
    assert memory is not None
    estimate = jzero.estimate(plan, tx=state.tx)
    assert (memory.params, memory.opt_state) == (estimate.params, estimate.opt_state)


@pytest.mark.unit
def test_a_field_that_plain_grad_ignores_is_noted():
    plan = jzero.make_plan({"w": jax.ShapeDtypeStruct((64, 64), "bfloat16")}, stage=1, reduce_dtype="float32")
    assert "reduce_dtype=float32 has no effect on plain jax.grad at stage 1" in plan.describe()


@pytest.mark.unit
@pytest.mark.parametrize("name", EFFECTS)
def test_a_field_below_its_stage_is_refused_or_noted(name):
    value = {
        "compute_dtype": "bfloat16", "reshard_after_forward": False, "param_axis": "data", "prefetch": 3,
        "bucket_bytes": 2**20, "reduce_dtype": "float32", "gather_dtype": "int8",
        "update_dtype": "int8", "kept_gathered_bytes": 2**20,
    }[name]  # fmt: skip
    shapes, effect = {"w": jax.ShapeDtypeStruct((64, 64), "bfloat16")}, EFFECTS[name]
    told = f"{name}={value if name == 'reduce_dtype' else repr(value)} has no effect"
    for stage in range(3 if name == "update_dtype" else 4):  # which stage 3 takes with param_axis alone
        if effect.refused and stage < effect.stage:
            told_stage = f"{name}=.* has no effect at stage {stage}.*pass stage={effect.stage}"
            with pytest.raises(ValueError, match=told_stage):
                jzero.make_plan(shapes, stage=stage, **{name: value})
            continue
        plan = jzero.make_plan(shapes, stage=stage, **{name: value})
        assert any(note.startswith(told) for note in plan.notes) == (stage < effect.stage)
        assert not any("has no effect" in note for note in jzero.make_plan(shapes, stage=stage).notes)


@pytest.mark.unit
@pytest.mark.parametrize(("moments", "told"), [("int8", False), ("bfloat16", True)])
def test_a_block_of_moments_that_have_none_is_told(moments, told):
    shapes = {"w": jax.ShapeDtypeStruct((64, 64), "bfloat16")}
    notes = jzero.make_plan(shapes, stage=2, moment_dtype=moments, quantize_block=64).notes
    assert any(note.startswith("quantize_block=64 has no effect without gather_dtype") for note in notes) == told


@pytest.mark.unit
@pytest.mark.parametrize("stage", [1, 3])
def test_param_axis_below_stage_3_is_told(stage):
    mesh = jzero.mesh({"replica": 2, "data": -1})
    plan = jzero.make_plan(
        {"w": jnp.ones((64, 64))}, stage=stage, mesh=mesh, axis=("replica", "data"), param_axis="data"
    )
    assert ("param_axis='data' has no effect at stage 1: params are whole" in plan.describe()) == (stage == 1)


@pytest.mark.pod
def test_params_within_the_node_are_cut_along_the_dim_of_their_state():
    """Else all of a new param would cross the network, and not only the part that the node has not."""
    mesh = jzero.mesh({"replica": "hosts", "data": "host"}, pod=jzero.pod("h200", hosts=512))
    shapes = {"up": (2048, 8192), "down": (8192, 2048), "square": (2048, 2048)}
    params = {k: jax.ShapeDtypeStruct(s, jnp.bfloat16) for k, s in shapes.items()}
    plan = jzero.make_plan(params, stage=3, mesh=mesh, axis=("replica", "data"), param_axis="data")
    found = {x.keys[0]: (x.stored, x.state) for x in plan.layouts}
    assert found == {
        "up": (P(None, "data"), P(None, ("data", "replica"))),
        "down": (P("data"), P(("data", "replica"))),
        "square": (P("data"), P("data", "replica")),
    }
    psi, wire = plan.param_bytes, jzero.estimate(plan).wire_by_axes
    assert wire["replica"] < 0.15 * psi * 2  # new params, and the second step of the square's gradient
    assert wire["replica+data"] == pytest.approx(psi * 8 / 9, rel=0.01)
