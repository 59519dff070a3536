"""Params that are not trained: every way to say so gives the numbers of plain optax over the trained ones alone."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, struct
from flax.training.train_state import TrainState
from jax.sharding import Mesh
from models import max_error

import jzero

DIM, RANK, LAYERS, ROWS = 24, 4, 2, 16
BF16 = jnp.bfloat16
# a norm over what is trained: the frozen weights must have no part in it
TX = optax.chain(optax.clip_by_global_norm(0.02), optax.adam(1e-2))


def names(path, leaf):
    return "lora" in path


def plain_params(lora=jnp.float32):
    def normal(seed, *shape):
        return 0.3 * jax.random.normal(jax.random.key(seed), shape)

    return {
        "base": {f"w{i}": normal(i, DIM, DIM).astype(BF16) for i in range(LAYERS)},
        "scale": jnp.full(DIM, 1.5, jnp.float32),
        "lora": {f"a{i}": normal(10 + i, DIM, RANK).astype(lora) for i in range(LAYERS)}
        | {f"b{i}": normal(20 + i, RANK, DIM).astype(lora) for i in range(LAYERS)},
    }


def apply_fn(variables, x):
    p = variables["params"]
    base, lora = p["base"], p["lora"]
    for i in range(LAYERS):
        x = jnp.tanh(x @ base[f"w{i}"].astype(x.dtype) + x @ lora[f"a{i}"] @ lora[f"b{i}"])
    return x * p["scale"]


def data(seed=0):
    keys = jax.random.split(jax.random.key(seed))
    return {k: jax.random.normal(key, (ROWS, DIM)) for k, key in zip("xy", keys, strict=True)}


def loss_of(out, batch):
    return jnp.mean((out - batch["y"]) ** 2)


@functools.cache
def plain_run(steps=3):
    """The params after some steps of plain optax over the trained ones, and the losses."""
    params = plain_params()
    lora, losses = params["lora"], []
    state = TX.init(lora)

    @jax.jit
    def step(lora, state, batch):
        value, grads = jax.value_and_grad(
            lambda lora: loss_of(apply_fn({"params": params | {"lora": lora}}, batch["x"]), batch)
        )(lora)
        updates, state = TX.update(grads, state, lora)
        return optax.apply_updates(lora, updates), state, value

    for i in range(steps):
        lora, state, value = step(lora, state, data(i))
        losses.append(float(value))
    return params | {"lora": lora}, losses


def check(params, losses, plan, opt_state):
    """Numbers as without jzero, frozen params to the bit, and no state of them."""
    want, want_losses = plain_run()
    np.testing.assert_allclose(losses, want_losses, rtol=1e-5)
    assert max_error(params["lora"], want["lora"]) < 1e-5
    for a, b in zip(jax.tree.leaves(params["base"]), jax.tree.leaves(want["base"]), strict=True):
        assert a.dtype == BF16
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert max_error(params["scale"], want["scale"]) == 0
    shapes = sorted(x.shape for x in jax.tree.leaves(opt_state) if x.ndim)
    assert shapes == sorted(2 * [x.shape for x in jax.tree.leaves(want["lora"])])
    frozen = [x for x in plan.layouts if x.frozen is not None]
    assert {x.name for x in frozen} == {"['base']['w0']", "['base']['w1']", "['scale']"}
    if plan.config.row.params:
        assert all(x.stored != x.used for x in frozen)


def train_state():
    return TrainState.create(apply_fn=apply_fn, params=plain_params(), tx=TX)


def over_a_part():
    params = plain_params()
    return TrainState(0, apply_fn, params, TX, TX.init({"lora": params["lora"]}))


def linen_step(state, batch):
    def loss(p):
        return loss_of(state.apply_fn({"params": p}, batch["x"]), batch)

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value


def part_step(state, batch):
    """Differentiates the trained params alone, and hands the optimizer them."""
    own = {"lora": state.params["lora"]}

    def loss(own):
        return loss_of(state.apply_fn({"params": state.params | own}, batch["x"]), batch)

    value, grads = jax.value_and_grad(loss)(own)
    updates, opt_state = state.tx.update(grads, state.opt_state, own)
    params = state.params | optax.apply_updates(own, updates)
    return state.replace(step=state.step + 1, params=params, opt_state=opt_state), value


TREE = {"base": False, "scale": False, "lora": True}
LINEN = {
    "filter": (train_state, {"trainable": names}, linen_step),
    "tree of bools": (train_state, {"trainable": TREE}, linen_step),
    "existing state": (lambda: train_state, {"trainable": names}, linen_step),
    "state of a part": (over_a_part, {}, part_step),
    "existing state of a part": (lambda: over_a_part, {}, part_step),
    "filter and step of a part": (train_state, {"trainable": names}, part_step),
}


@pytest.mark.default_cases("filter-3", "filter-0", "tree of bools-2", "existing state-3", "existing state of a part-3",
                           "state of a part-1", "filter and step of a part-3")  # fmt: skip
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("way", LINEN)
def test_linen(way, stage, mesh):
    create, given, step = LINEN[way]
    create = create() if way.startswith("existing") else create
    state = jzero.shard(create() if way.startswith("existing") else create, stage=stage, mesh=mesh,
                        min_shard_bytes=0, **given)  # fmt: skip
    plan, losses = jzero.plan_of(state), []
    run = jax.jit(lambda *args: step(*args))  # its own cache
    for i in range(3):
        state, value = run(state, plan.place_batch(data(i)))
        losses.append(float(value))
    check(state.params, losses, plan, state.opt_state)
    assert run._cache_size() == 1


class Layer(nnx.Module):
    def __init__(self, i):
        p = plain_params()
        self.w, self.a, self.b = (
            nnx.Param(p["base"][f"w{i}"]), nnx.LoRAParam(p["lora"][f"a{i}"]), nnx.LoRAParam(p["lora"][f"b{i}"])
        )  # fmt: skip

    def __call__(self, x):
        return jnp.tanh(x @ self.w[...].astype(x.dtype) + x @ self.a[...] @ self.b[...])


class Model(nnx.Module):
    def __init__(self):
        self.layers = nnx.List([Layer(i) for i in range(LAYERS)])
        self.scale = nnx.Param(plain_params()["scale"])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x * self.scale[...]


def as_plain(model):
    layers = dict(enumerate(model.layers))
    return {
        "base": {f"w{i}": x.w[...] for i, x in layers.items()},
        "lora": {f"a{i}": x.a[...] for i, x in layers.items()} | {f"b{i}": x.b[...] for i, x in layers.items()},
        "scale": model.scale[...],
    }


def pair(wrt=nnx.LoRAParam):
    model = Model()
    return model, nnx.Optimizer(model, TX, wrt=wrt)


NNX = {
    "wrt": (nnx.LoRAParam, None),
    "wrt and filter": (nnx.LoRAParam, nnx.LoRAParam),
    "filter": (nnx.Param, nnx.LoRAParam),
    "function": (nnx.Param, lambda path, leaf: path[-1] in ("a", "b")),
}


def renamed(plan):
    """The plan's names as those of the plain params."""
    new = {"['layers'][0]['w']": "['base']['w0']", "['layers'][1]['w']": "['base']['w1']"}
    return [new.get(x.name, x.name) for x in plan.layouts if x.frozen is not None]


@pytest.mark.default_cases("wrt-3-True", "wrt-1-False", "wrt and filter-3-False", "filter-3-False", "function-2-True")
@pytest.mark.parametrize("born", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("way", NNX)
def test_nnx(way, stage, born, mesh):
    wrt, trainable = NNX[way]
    create = functools.partial(pair, wrt)
    given = create if born else create()
    model, optimizer = jzero.shard(given, stage=stage, mesh=mesh, min_shard_bytes=0, trainable=trainable)
    plan, losses = jzero.plan_of(optimizer), []
    loss = jzero.gather_on_use(lambda model, batch: loss_of(model(batch["x"]), batch), plan)

    @nnx.jit
    def step(model, optimizer, batch):
        value, grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, wrt))(model, batch)
        optimizer.update(model, grads)
        return value

    for i in range(3):
        losses.append(float(step(model, optimizer, plan.place_batch(data(i)))))
    assert sorted(renamed(plan)) == ["['base']['w0']", "['base']['w1']", "['scale']"]
    want, want_losses = plain_run()
    np.testing.assert_allclose(losses, want_losses, rtol=1e-5)
    assert max_error(as_plain(model), want) < 1e-5
    assert as_plain(model)["base"]["w0"].dtype == BF16
    state = nnx.as_pure(optimizer.opt_state)
    assert sorted(x.shape for x in jax.tree.leaves(state) if x.ndim) == sorted(
        2 * [x.shape for x in jax.tree.leaves(want["lora"])]
    )
    stored = {x.name: x.stored for x in plan.layouts}
    assert model.layers[0].w.get_value().sharding.spec == stored["['layers'][0]['w']"]


@struct.dataclass
class PiState:
    """As openpi has it: an NNX state of all params, and an optimizer state of those that its filter trains."""

    step: Any
    params: nnx.State
    opt_state: Any
    ema_params: nnx.State
    graph: Any = struct.field(pytree_node=False)
    tx: Any = struct.field(pytree_node=False)


TRAINED = nnx.All(nnx.Param, nnx.Not(nnx.PathContains("w")), nnx.Not(nnx.PathContains("scale")))


def test_a_state_like_that_of_openpi(mesh):
    def create():
        graph, params = nnx.split(Model())
        return PiState(0, params, TX.init(params.filter(TRAINED)), params, graph, TX)

    state = jzero.shard(create, stage=3, mesh=mesh, min_shard_bytes=0)
    plan, losses = jzero.plan_of(state), []

    @jax.jit
    def step(state, batch):
        model = nnx.merge(state.graph, state.params)
        loss = jzero.gather_on_use(lambda model, batch: loss_of(model(batch["x"]), batch), plan)
        value, grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, TRAINED))(model, batch)
        own = state.params.filter(TRAINED)
        updates, opt_state = state.tx.update(grads, state.opt_state, own)
        nnx.update(model, optax.apply_updates(own, updates))
        return state.replace(step=state.step + 1, params=nnx.state(model), opt_state=opt_state), value

    for i in range(3):
        state, value = step(state, plan.place_batch(data(i)))
        losses.append(float(value))
    want, want_losses = plain_run()
    np.testing.assert_allclose(losses, want_losses, rtol=1e-5)
    assert max_error(as_plain(nnx.merge(state.graph, state.params)), want) < 1e-5
    assert state.params["layers"][0]["w"].get_value().sharding.spec == plan.layouts[2].stored
    assert state.ema_params["layers"][0]["w"].get_value().sharding.spec == plan.layouts[2].state
    assert jax.tree.structure(state.opt_state) == jax.tree.structure(create().opt_state)
    assert sorted(renamed(plan)) == ["['base']['w0']", "['base']['w1']", "['scale']"]


WAYS = {"all": lambda params: params, "a part": lambda params: {"lora": params["lora"]}}


@pytest.mark.default_cases("deferred-1-all", "deferred-3-a part", "delta-3-all")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("updates", ["deferred", "delta"])
def test_an_optax_loop(updates, way, stage, mesh):
    plan = jzero.make_plan(plain_params(), stage=stage, mesh=mesh, min_shard_bytes=0, trainable=names, updates=updates)
    tx, losses = jzero.zero(TX, plan), []
    params = plan.place(plain_params())
    state = tx.init(WAYS[way](params))
    loss = jzero.gather_on_use(lambda p, batch: loss_of(apply_fn({"params": p}, batch["x"]), batch), plan)

    @jax.jit
    def step(params, state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        own = WAYS[way](params)
        news, state = tx.update(WAYS[way](grads), state, own)
        return params | optax.apply_updates(own, news), state, value

    for i in range(3):
        params, state, value = step(params, state, plan.place_batch(data(i)))
        losses.append(float(value))
    check(params, losses, plan, state)


@pytest.mark.default_cases("2-microbatch-1")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("stage", "reduce"), [(1, "step"), (2, "microbatch"), (3, "microbatch")])
def test_gradients_of_micro_batches(stage, reduce, accumulate, mesh):
    state = jzero.shard(train_state, stage=stage, mesh=mesh, min_shard_bytes=0, trainable=names)
    plan, losses = jzero.plan_of(state), []

    def loss(params, batch):
        return loss_of(apply_fn({"params": params}, batch["x"]), batch)

    @jax.jit
    def step(state, batch):
        value, grads = jzero.value_and_grad(loss, plan, accumulate=accumulate, reduce=reduce)(state.params, batch)
        assert grads["base"] == {"w0": None, "w1": None}
        return state.apply_gradients(grads=grads), value

    for i in range(3):
        state, value = step(state, plan.place_batch(data(i)))
        losses.append(float(value))
    check(state.params, losses, plan, state.opt_state)


@pytest.mark.default_cases("2-wrt", "2-filter", "1-wrt")
@pytest.mark.parametrize("way", ["wrt", "filter"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_of_micro_batches_of_a_module(accumulate, way, mesh):
    wrt, trainable = NNX[way]
    model, optimizer = jzero.shard(pair(wrt), stage=3, mesh=mesh, min_shard_bytes=0, trainable=trainable)
    plan, losses = jzero.plan_of(optimizer), []
    grad = jzero.value_and_grad(lambda model, batch: loss_of(model(batch["x"]), batch), plan, accumulate=accumulate)

    @nnx.jit
    def step(model, optimizer, batch):
        value, grads = grad(model, batch)
        assert sorted(x.shape for x in jax.tree.leaves(grads)) == 2 * [(RANK, DIM)] + 2 * [(DIM, RANK)]
        optimizer.update(model, grads)
        return value

    for i in range(3):
        losses.append(float(step(model, optimizer, plan.place_batch(data(i)))))
    want, want_losses = plain_run()
    np.testing.assert_allclose(losses, want_losses, rtol=1e-5)
    assert max_error(as_plain(model), want) < 1e-5


def test_masters_are_of_trained_params_alone(mesh):
    def create():
        return TrainState.create(apply_fn=apply_fn, params=plain_params(BF16), tx=TX)

    state = jzero.shard(create, stage=2, mesh=mesh, min_shard_bytes=0, trainable=names)
    assert state.opt_state.master["base"] == {"w0": None, "w1": None}
    assert {x.dtype for x in jax.tree.leaves(state.opt_state.master["lora"])} == {jnp.dtype("float32")}
    estimate = jzero.estimate(jzero.plan_of(state), tx=state.tx)
    values = sum(x.size for x in jax.tree.leaves(state.params["lora"]))
    assert estimate.opt_state == 12 * values // 8 + 4
    assert estimate.grads == 2 * values // 8
    again, _ = jax.jit(linen_step)(state, jzero.plan_of(state).place_batch(data()))
    assert max_error(again.params["base"], state.params["base"]) == 0
    assert max_error(again.params["lora"], state.params["lora"]) > 0
    other = jzero.shard(again, stage=3, mesh=Mesh(np.array(jax.devices()[:4]), ("data",)), min_shard_bytes=0)
    assert max_error(other.opt_state.master["lora"], again.opt_state.master["lora"]) == 0
    assert [x.frozen for x in jzero.plan_of(other).layouts] == [x.frozen for x in jzero.plan_of(again).layouts]


def test_a_frozen_base_of_integers_is_split(mesh):
    """As a quantized one: its values are gathered as they are stored."""

    def quantized(variables, x):
        p = variables["params"]
        return x @ (p["base"]["q"].astype(x.dtype) * p["base"]["scale"]) + x @ p["lora"]["a"] @ p["lora"]["b"]

    lora = {"a": plain_params()["lora"]["a0"], "b": plain_params()["lora"]["b0"]}
    base = {"q": jnp.arange(DIM * DIM, dtype=jnp.int8).reshape(DIM, DIM), "scale": jnp.full(DIM, 0.01)}

    def made(lora):
        return {"base": base, "lora": lora}

    state = jzero.shard(
        lambda: TrainState(0, quantized, made(lora), TX, TX.init({"lora": lora})), stage=3, mesh=mesh, min_shard_bytes=0
    )
    assert state.params["base"]["q"].sharding.spec == jax.P("data")

    @jax.jit
    def step(state, batch):
        def loss(own):
            return loss_of(state.apply_fn({"params": state.params | own}, batch["x"]), batch)

        own = {"lora": state.params["lora"]}
        grads = jax.grad(loss)(own)
        updates, opt_state = state.tx.update(grads, state.opt_state, own)
        return state.replace(params=state.params | optax.apply_updates(own, updates), opt_state=opt_state), grads

    after, grads = step(state, jzero.plan_of(state).place_batch(data()))
    want = jax.grad(lambda lora: loss_of(quantized({"params": made(lora)}, data()["x"]), data()))(lora)
    assert max_error(grads["lora"], want) < 1e-5
    assert np.array_equal(after.params["base"]["q"], base["q"])


def test_within_a_node_a_frozen_param_needs_no_dim_for_all_devices():
    """It has no state: 12 rows are split over the 4 devices of a node, where the state of a trained one needs 8."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("node", "gpu"))
    params = {"base": jax.random.normal(jax.random.key(0), (12, 7)), "lora": jnp.ones((12, 7))}
    plan = jzero.make_plan(
        params, stage=3, mesh=mesh, axis=("node", "gpu"), param_axis="gpu", min_shard_bytes=0, trainable=names
    )
    assert [x.stored for x in plan.layouts if x.frozen] == [jax.P("gpu")]
    even = jzero.make_plan(
        {"base": jnp.ones((16, 7)), "lora": jnp.ones((12, 7))}, stage=3, mesh=mesh, axis=("node", "gpu"),
        param_axis="gpu", min_shard_bytes=0, trainable=names,
    )  # fmt: skip
    assert even.copy_specs({"base": jnp.ones((16, 7))}) == [jax.P(("gpu", "node"))]  # of an average

    def loss(params, x):
        return jnp.mean((x @ (params["base"] * params["lora"])) ** 2)

    x = jax.random.normal(jax.random.key(1), (16, 12))
    found = jax.jit(jax.grad(jzero.gather_on_use(loss, plan)))(plan.place(params), plan.place_batch(x))
    assert max_error(found["lora"], jax.grad(loss)(params, x)["lora"]) < 1e-5


def raises(kind, *parts):
    return pytest.raises(kind, match="(?s)" + ".*".join(map(__import__("re").escape, parts)))


def test_a_path_is_strings_for_modules_too(mesh):
    """`make_plan` and `shard` say so; Flax's own filters have numbers for positions in lists."""

    def trained(filter_):
        plan = jzero.plan_of(jzero.abstract(lambda: pair(nnx.Param), stage=3, mesh=mesh, trainable=filter_)[1])
        return [x.name for x in plan.layouts if x.frozen is None]

    assert all("['layers'][1]" in name for name in trained(lambda path, leaf: path[:2] == ("layers", "1")))
    assert trained(lambda path, leaf: "layers/1" in "/".join(path)) == trained(nnx.PathContains(1))
    with pytest.warns(UserWarning, match=r"does not name \('layers', '1'.*compare with \"1\""):
        trained(lambda path, leaf: 1 in path or path[-1] == "scale")


def test_a_bad_filter_is_refused_before_anything_is_compiled(mesh):
    given: Any = {"stage": 3, "mesh": mesh}
    with raises(ValueError, "jzero.shard: trainable names none of the 7 params", "nothing to train"):
        jzero.shard(train_state(), trainable=lambda path, leaf: "adapter" in path, **given)
    with raises(TypeError, "must answer with a bool", "['base']['w0'] bf16[24,24]", "None"):
        jzero.shard(train_state(), trainable=lambda path, leaf: None, **given)
    with raises(ValueError, "trainable is not a tree like the params"):
        jzero.shard(train_state(), trainable={"lora": True}, **given)
    with raises(TypeError, "trainable must be a function (path, leaf) -> bool", "nnx.LoRAParam", "'lora'"):
        jzero.make_plan(plain_params(), trainable="lora", **given)
    with raises(TypeError, "trainable must be a function"):
        jzero.shard(train_state(), trainable=nnx.LoRAParam, **given)
    with raises(TypeError, "trainable must be a function"):
        jzero.shard(pair(), trainable=3.5, **given)
    with raises(ValueError, "trainable names none of the 7 params"):
        jzero.shard(pair, trainable=nnx.BatchStat, **given)
    with raises(ValueError, "names 3 params that the optimizer does not train", "['layers'][0]['w']", "wrt="):
        jzero.shard(pair(), trainable=nnx.Param, **given)
    state = jzero.shard(train_state(), trainable=names, **given)
    with raises(ValueError, "sharded already", "other params"):
        jzero.shard(state, trainable=lambda path, leaf: "scale" in path, **given)
    assert jzero.plan_of(jzero.shard(state, trainable=names, **given)) == jzero.plan_of(state)
    dog = TrainState.create(apply_fn=apply_fn, params=plain_params(), tx=optax.contrib.dog(1.0, ("heuristic", 1e-3)))
    with raises(ValueError, "1 leaf of it would not be the same of the trained ones", ".max_dist", "tx.init(own)"):
        jzero.shard(dog, trainable=names, **given)
    with raises(ValueError, "jzero.zero: update", "['lora']['b0']", "absent"):
        state.tx.update({"lora": {"a0": 0}}, state.opt_state, {"lora": {"a0": state.params["lora"]["a0"]}})


def test_scales_of_fp8_layers_are_refused(mesh):
    params = {"params": {"w": jnp.ones((DIM, DIM))}, "_overwrite_with_gradient": {"scale": jnp.ones(1)}}
    create = functools.partial(TrainState.create, apply_fn=None, params=params, tx=optax.adam(1e-3))
    for given in (create, create()):
        with raises(TypeError, "the params hold '_overwrite_with_gradient'", "fp8"):
            jzero.shard(given, stage=3, mesh=mesh)


@pytest.mark.parametrize("kind", ["dict", "list"])
def test_a_state_in_a_list_is_not_cut_by_position(mesh, kind):
    """Its first leaves are not those of the trained params: refused, also as what a function creates."""
    named = {k: jnp.ones((DIM, DIM)) for k in ("base", "mid", "top")}
    params = named if kind == "dict" else list(named.values())
    listed = listing_moments()
    trained = lambda path, leaf: path[0] not in ("base", "0")  # noqa: E731
    given: Any = {"stage": 3, "mesh": mesh, "min_shard_bytes": 0, "trainable": trained}

    def create(own):
        return TrainState(0, None, params, listed, listed.init(own))

    for state in (create(params), lambda: create(params)):
        with raises(ValueError, "1 leaf differs", "not named like them", "tx.init(own)"):
            jzero.shard(state, **given)
    own = {**named, "base": None} if kind == "dict" else [None, *params[1:]]
    state = jzero.shard(create(own), **given)
    grads = {"base": None, "mid": 2.0, "top": 3.0} if kind == "dict" else [None, 2.0, 3.0]
    full = jax.tree.map(lambda g: jnp.full((DIM, DIM), g), grads)
    state = jax.jit(lambda s, g: s.apply_gradients(grads=g))(state, full)
    assert [float(x.mean()) for x in jzero.unshard(state).opt_state] == [2.0, 3.0]


def listing_moments():
    return optax.GradientTransformation(
        lambda params: list(map(jnp.zeros_like, jax.tree.leaves(params))),
        lambda grads, s, params=None: (grads, [m + g for m, g in zip(s, jax.tree.leaves(grads), strict=True)]),
    )


def test_an_update_is_read_once_for_all_plans_and_each_update_for_itself(mesh):
    calls = []

    def update(factor):
        def run(grads, state, params=None):
            calls.append(factor)
            return jax.tree.map(lambda g: factor * g if factor else jnp.zeros_like(g), grads), state

        return run

    init = lambda params: optax.EmptyState()  # noqa: E731
    trains, freezes = (optax.GradientTransformation(init, update(x)) for x in (2.0, 0.0))
    params = {"w": jnp.ones((16, 16))}
    frozen = []
    for tx in (trains, freezes, trains):
        for stage in (1, 2):
            state = TrainState(step=0, apply_fn=None, params=params, tx=tx, opt_state=tx.init(params))
            plan = jzero.plan_of(jzero.abstract(state, stage=stage, mesh=mesh))
            frozen.append(plan.layouts[0].frozen is not None)
    assert frozen == [False, False, True, True, False, False]
    assert calls.count(2.0) == 1


def test_positions_in_a_state_are_not_names_of_params(mesh):
    """Params named by numbers, and params in a list of which the state covers some: nothing says of which."""
    tx, given = listing_moments(), {"stage": 3, "mesh": mesh, "min_shard_bytes": 0}
    numbered = {str(i): jnp.full((DIM, DIM), float(i)) for i in range(12)}
    state = TrainState(0, None, numbered, tx, list(jax.tree.leaves(numbered)))
    with raises(ValueError, "not named like them"):
        jzero.shard(state, trainable=lambda path, leaf: len(path[0]) == 1, **given)
    params = [jnp.full((DIM, DIM), float(i)) for i in range(3)]
    with raises(ValueError, "name them with trainable="):
        jzero.shard(TrainState(0, None, params, tx, tx.init([None, *params[1:]])), **given)
    state = TrainState(0, None, params, tx, tx.init([None, *params[1:]]))
    state = jzero.shard(state, trainable=lambda path, leaf: path[0] != "0", **given)
    assert [x.frozen is None for x in jzero.plan_of(state).layouts] == [False, True, True]


def test_a_state_in_a_list_is_restored_for_the_same_params_alone(mesh, tmp_path):
    """Nothing in the list says of which params it is; the checkpoint tells which were trained."""
    w, tx = {k: jnp.ones((DIM, DIM)) for k in ("base", "mid", "top")}, listing_moments()

    def state_of(names):
        own = {k: x if k in names else None for k, x in w.items()}
        plain = TrainState(0, None, w, tx, tx.init(own))
        return jzero.shard(plain, stage=1, mesh=mesh, min_shard_bytes=0, trainable=lambda path, leaf: path[0] in names)

    saved = jzero.checkpoint.save(tmp_path / "saved", state_of(["base", "mid"]))
    with raises(ValueError, "other trained params", "opt_state/0", "It trained base, mid; the target trains mid, top"):
        jzero.checkpoint.restore(saved, state_of(["mid", "top"]))
    jzero.checkpoint.restore(saved, state_of(["mid", "top"]), only="params")
    jzero.checkpoint.restore(saved, state_of(["mid", "base"]))


def test_params_named_like_the_trees_around_them(mesh):
    """A subtree `params` (or `states`, in NNX) has its own layouts, not those of its namesake outside."""
    w = jnp.eye(DIM) / 2
    trained = lambda path, leaf: path[0] == "w"  # noqa: E731

    def apply(variables, x):
        params = variables["params"]
        return x @ params["params"]["w"] @ params["w"] + params["moment_scales"]

    params = {"w": w, "params": {"w": w}, "moment_scales": jnp.ones(DIM)}
    state = TrainState.create(apply_fn=apply, params=params, tx=optax.adam(1e-3))
    state = jzero.shard(state, stage=3, mesh=mesh, min_shard_bytes=0, trainable=trained)
    x = jzero.plan_of(state).place_batch(data()["x"])
    found = jax.jit(jax.grad(lambda p, x: jnp.sum(state.apply_fn({"params": p}, x) ** 2)))(state.params, x)
    want = jax.grad(lambda p, x: jnp.sum(apply({"params": p}, x) ** 2))(params, data()["x"])
    assert max_error(found["w"], want["w"]) < 1e-4
    jzero.shard(state.replace(tx=optax.adam(1e-3), opt_state=optax.adam(1e-3).init(params)), stage=1, mesh=mesh)

    class States(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(w)
            self.states = nnx.List([nnx.Dict(w=nnx.Variable(w))])

        def __call__(self, x):
            return x @ self.states[0]["w"] @ self.w

    model, optimizer = jzero.shard(lambda: (m := States(), nnx.Optimizer(m, optax.sgd(1.0), wrt=nnx.Param)),
                                   stage=3, mesh=mesh, min_shard_bytes=0)  # fmt: skip
    grads = jzero.jit(nnx.grad(lambda m, x: jnp.sum(m(x) ** 2)), jzero.plan_of(optimizer))(model, x)
    assert max_error(grads.w.get_value(), jax.grad(lambda v: jnp.sum((data()["x"] @ w @ v) ** 2))(w)) < 1e-4


class Codes(struct.PyTreeNode):
    """A weight in 8 bits, with a scale for each column."""

    codes: Any
    scale: Any


@pytest.mark.parametrize("stage", [1, 3])
def test_a_variable_that_holds_several_arrays(mesh, stage, tmp_path):
    """Frozen (a quantized base) it is split leaf by leaf; a trained one that holds a dict is refused."""

    class Quantized(nnx.Module):
        def __init__(self, held):
            self.base = nnx.Param(held)
            self.lora = nnx.LoRAParam(jnp.full((DIM, DIM), 0.1))

        def __call__(self, x):
            base = self.base.get_value()
            return x @ (base.codes * base.scale) + x @ self.lora

    def make(held, wrt):
        model = Quantized(held)
        return model, nnx.Optimizer(model, TX, wrt=wrt)

    def step(model, optimizer, batch):
        wrt = nnx.DiffState(0, nnx.LoRAParam)
        loss, grads = nnx.value_and_grad(lambda m: loss_of(m(batch["x"]), batch), argnums=wrt)(model)
        optimizer.update(model, grads)
        return loss

    codes = Codes(jnp.arange(DIM * DIM, dtype=jnp.int8).reshape(DIM, DIM), jnp.full(DIM, 0.01))
    plain, sharded = make(codes, nnx.LoRAParam), jzero.shard(lambda: make(codes, nnx.LoRAParam), stage=stage, mesh=mesh,
                                                             min_shard_bytes=0)  # fmt: skip
    run = jzero.jit(step, jzero.plan_of(sharded[1]))
    for seed in range(2):
        assert abs(float(step(*plain, data(seed))) - float(run(*sharded, data(seed)))) < 1e-4
    assert max_error(sharded[0].lora.get_value(), plain[0].lora.get_value()) < 1e-5
    assert isinstance(sharded[0].base.get_value(), Codes)
    with raises(TypeError, "the trained ['base'] of the model holds a dict", "nnx.Dict"):
        jzero.shard(make({"codes": codes.codes * 1.0, "scale": codes.scale}, nnx.Param), stage=stage, mesh=mesh)
    frozen = jzero.shard(make({"codes": codes.codes, "scale": codes.scale}, nnx.LoRAParam), stage=stage, mesh=mesh)
    assert type(frozen[0].base.get_value()) is dict
    again = jzero.checkpoint.restore(jzero.checkpoint.save(tmp_path / "saved", frozen), Quantized(
        {"codes": jnp.zeros((DIM, DIM), jnp.int8), "scale": jnp.zeros(DIM)}), only="params")  # fmt: skip
    assert max_error(again.base.get_value()["codes"], codes.codes) == 0


def test_params_named_like_fields_of_the_state_are_frozen(mesh):
    given: Any = {"stage": 3, "mesh": mesh, "min_shard_bytes": 0}
    w = jnp.ones((DIM, DIM))
    for params, frozen in (({"w": w, "mu": {"w": w}}, "mu"), ({"w": w, "mu": {"w": w}}, "w"),
                           ({"w": w, "count": jnp.ones(DIM)}, "count")):  # fmt: skip
        create = functools.partial(TrainState.create, apply_fn=None, params=params, tx=optax.adam(1e-3))
        state = jzero.shard(create(), trainable=lambda path, leaf, frozen=frozen: path[0] != frozen, **given)
        assert len(jax.tree.leaves(state.opt_state)) == 3


def test_what_stop_gradient_freezes_is_gathered_at_its_use(mesh):
    """A model that stops the gradient of its base by itself: the base is not kept whole for the backward pass."""
    plan = jzero.make_plan(plain_params(), stage=3, mesh=mesh, min_shard_bytes=0)

    def loss(params, batch):
        params = params | {"base": jax.lax.stop_gradient(params["base"])}
        return loss_of(apply_fn({"params": params}, batch["x"]), batch)

    params, batch = plan.place(plain_params()), plan.place_batch(data())
    run = jax.jit(jax.grad(jzero.gather_on_use(loss, plan)))
    assert max_error(run(params, batch)["lora"], jax.grad(loss)(plain_params(), data())["lora"]) < 1e-5
    text = str(jax.make_jaxpr(jax.grad(jzero.gather_on_use(loss, plan)))(params, batch))
    assert text.count("stop_gradient") == LAYERS
    kept = jax.eval_shape(lambda p, b: jax.vjp(lambda p: jzero.gather_on_use(loss, plan)(p, b), p)[1], params, batch)
    assert not any(x.shape == (DIM, DIM) and x.sharding.is_fully_replicated for x in jax.tree.leaves(kept)
                   if getattr(x, "sharding", None) is not None)  # fmt: skip


def as_bits(tree):
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(k): (str(x.dtype), np.asarray(x).tobytes()) for k, x in flat}


def test_a_checkpoint_goes_to_another_stage_and_into_a_plain_state(tmp_path, mesh):
    def create():
        return TrainState.create(apply_fn=apply_fn, params=plain_params(BF16), tx=TX)

    state = jzero.shard(create, stage=2, mesh=mesh, min_shard_bytes=0, trainable=names)
    state, _ = jax.jit(linen_step)(state, jzero.plan_of(state).place_batch(data()))
    jzero.checkpoint.save(tmp_path / "saved", state)
    few = Mesh(np.array(jax.devices()[:3]), ("data",))
    like = jzero.abstract(create, stage=3, mesh=few, min_shard_bytes=0, trainable=names)
    other = jzero.checkpoint.restore(tmp_path / "saved", like)
    assert as_bits(jzero.unshard(other.params)) == as_bits(state.params)
    whole = [jzero.unshard(s.opt_state, tx=s.tx) for s in (other, state)]
    assert as_bits(whole[0]) == as_bits(whole[1])
    assert other.params["base"]["w0"].sharding.spec == jax.P("data")
    own = create().params | {"base": dict.fromkeys(["w0", "w1"]), "scale": None}
    plain = TrainState(0, apply_fn, create().params, TX, TX.init(own))
    back = jzero.checkpoint.restore(tmp_path / "saved", plain, cast=True)
    assert as_bits(back.params) == as_bits(state.params)
    assert max_error(back.opt_state[1][0].mu["lora"], state.opt_state.inner[1][0].mu["lora"]) < 1e-2
    only = jzero.checkpoint.restore(tmp_path / "saved", create(), only="params")
    assert as_bits(only.params) == as_bits(state.params)


def test_a_checkpoint_of_a_module_goes_into_a_plain_one(tmp_path, mesh):
    model, optimizer = jzero.shard(pair, stage=3, mesh=mesh, min_shard_bytes=0)
    model.layers[0].w[...] = model.layers[0].w[...] * 2
    jzero.checkpoint.save(tmp_path / "saved", (model, optimizer))
    for like in (pair(), jzero.shard(pair, stage=1, mesh=mesh)):
        other, opt = jzero.checkpoint.restore(tmp_path / "saved", like)
        assert as_bits(as_plain(other)) == as_bits(as_plain(model))
        assert max_error(nnx.as_pure(opt.opt_state), nnx.as_pure(optimizer.opt_state)) == 0
