"""`Offload(params="host")`: the numbers of the run without it, with params and gradients in host memory.

On the CPU host memory is a name, and numbers and layouts are what can be seen; tests/compiled/test_gpu_host_params.py
reads the program compiled for GPUs.
"""

from __future__ import annotations

import flax.linen as nn
import gather_losses as breadth
import jax
import jax.numpy as jnp
import loop_losses as loops
import nnx_losses as modules
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from models import assert_batch_is_split, batch, create_state, loss_of, max_error, train_step
from orbax.checkpoint import v1 as ocp

import jzero

HOST = jzero.Offload(params="host")
SPACE = jax.memory.Space
P = jax.P


def kinds(tree):
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree)}


def mesh_of(devices):
    return jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("data",))


def assert_on_host(arrays, specs):
    """Each array in host memory, split as its spec says, and something is split at all."""
    for x, spec in zip(jax.tree.leaves(arrays), specs, strict=True):
        assert x.sharding.memory_kind == "pinned_host"
        assert x.sharding.is_equivalent_to(
            jax.NamedSharding(x.sharding.mesh, spec, memory_kind="pinned_host"), x.ndim
        )
    assert any(spec != P() for spec in specs)


def assert_where_they_live(tree, plan):
    """Params, or gradients: all in host memory but a bias of six numbers."""
    for x, leaf in zip(plan.layouts, jax.tree.leaves(tree), strict=True):
        assert leaf.sharding.memory_kind == ("pinned_host" if x.size > 16 else "device"), x.name


def compared(fn, params, mesh, *args, tol=2e-6, **fields):
    """Loss and gradients with params in host memory against the plain ones."""
    plan = jzero.make_plan(params, stage=3, offload=HOST, mesh=mesh, min_shard_bytes=0, **fields)
    placed, split = plan.place(params), plan.place_batch(args)
    assert_on_host(placed, [x.stored for x in plan.layouts])
    assert_batch_is_split(split)
    loss, grads = jax.jit(jax.value_and_grad(jzero.gather_on_use(fn, plan)))(placed, *split)
    want_loss, want = jax.jit(jax.value_and_grad(fn))(params, *args)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    assert max_error(grads, want) < tol
    read = [(g, x.grad) for g, x in zip(jax.tree.leaves(grads), plan.layouts, strict=True) if np.any(g)]
    assert_on_host([g for g, _ in read], [spec for _, spec in read])
    return plan


@pytest.mark.default_cases("cond-1000", "scan in scan-1", "tied-1", "unused-1000")
@pytest.mark.parametrize("bucket", [1, 1000])
@pytest.mark.parametrize("case", [c for c in breadth.CASES if c != "pallas"])
def test_every_kind_of_use(case, bucket, mesh):
    """Buckets of one weight each, which ties order, and one bucket."""
    fn = breadth.CASES[case]
    params = breadth.weights()
    compared(lambda p, x: (fn(p, x) ** 2).mean(), params, mesh, breadth.data(), bucket_bytes=bucket * 2**10)


def test_a_stack_that_is_read_by_two_scans_and_beside_them(mesh):
    """Three gradients in host memory, added in device memory."""

    def twice(p, x):
        for _ in range(2):
            x, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["stack"])
        return x @ p["stack"][1]

    compared(lambda p, x: (twice(p, x) ** 2).mean(), breadth.weights(), mesh, breadth.data(), bucket_bytes=2**10)


@pytest.mark.default_cases("scan", "remat inside", "lookup")
@pytest.mark.parametrize("case", loops.CASES)
def test_weights_in_loops(case, mesh):
    tol = 1e-2 if case == "cast" else 1e-5
    compared(loops.loss(case), loops.params(), mesh, loops.data(), tol=tol, bucket_bytes=2**10)


@pytest.mark.default_cases("remat inside")
@pytest.mark.parametrize("case", ["scan", "remat inside", "nested"])
def test_forward_and_second_derivatives(case, mesh):
    fn = loops.loss(case)
    plan = jzero.make_plan(
        loops.params(), stage=3, offload=HOST, mesh=mesh, min_shard_bytes=0, bucket_bytes=2**10
    )
    ours, placed, split = (
        jzero.gather_on_use(fn, plan),
        plan.place(loops.params()),
        plan.place_batch(loops.data()),
    )
    for derivative in (
        lambda f: lambda p, x: jax.jvp(lambda p: f(p, x), (p,), (p,))[1],
        lambda f: lambda p, x: jax.jvp(lambda p: jax.grad(f)(p, x), (p,), (p,))[1],
    ):
        got = jax.jit(derivative(ours))(placed, split)
        assert max_error(got, derivative(fn)(loops.params(), loops.data())) < 1e-5


@pytest.mark.default_cases("scan remat")
@pytest.mark.parametrize("kind", ["list tied", "scan remat"])
def test_modules(kind, mesh):
    """NNX, with dropout and batch statistics: three steps in place, compiled once."""
    runs = []
    for offload in (None, HOST):
        model, optimizer, plan = modules.sharded(kind, mesh, offload=offload, bucket_bytes=2**12)
        fn = jzero.gather_on_use(modules.loss_of, plan)

        @nnx.jit
        def step(model, optimizer, x, fn=fn):
            loss, grads = nnx.value_and_grad(fn)(model, x)
            optimizer.update(model, grads)
            return loss

        losses = [step(model, optimizer, plan.place_batch(modules.data(seed))) for seed in range(3)]
        runs.append((losses, model))
    (want, plain), (losses, model) = runs
    np.testing.assert_allclose(losses, want, rtol=1e-6)
    assert max_error(modules.values(model), modules.values(plain)) < 1e-6
    assert kinds(modules.values(nnx.state(model, nnx.Param))) == {"pinned_host"}


def test_a_module_without_jit(mesh):
    """Its gradient passes by the weights that leave the loss with the module, which have none."""
    x = jnp.ones((8, 8))

    def step(model, optimizer, fn, x):
        loss, grads = nnx.value_and_grad(fn)(model, x)
        optimizer.update(model, grads)
        return loss

    found = []
    for offload in (None, HOST):
        model = nnx.Linear(8, 24, rngs=nnx.Rngs(0))
        pair = model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        plan = jzero.plan_of(jzero.shard(pair, stage=3, offload=offload, mesh=mesh, min_shard_bytes=0))
        fn = jzero.gather_on_use(lambda m, x: (jnp.sin(m(x)) ** 2).mean(), plan)
        losses = [step(*pair, fn, plan.place_batch(x)) for _ in range(3)]
        found.append((losses, nnx.state(model, nnx.Param)))
    (want, plain), (losses, params) = found
    np.testing.assert_allclose(losses, want, rtol=1e-6)
    assert max_error(params, plain) < 1e-6
    assert_where_they_live(params, plan)


CHAINS = {
    "adamw": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
    "steps": lambda: optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "finite": lambda: optax.apply_if_finite(optax.adafactor(1e-2, min_dim_size_to_factor=8), 3),
    "muon": lambda: optax.contrib.muon(1e-2),
    "frozen": lambda: optax.multi_transform(
        {"on": optax.adam(1e-2), "off": optax.set_to_zero()},
        lambda p: jax.tree_util.tree_map_with_path(lambda k, _: "off" if "Dense_0" in str(k) else "on", p),
    ),
}


@pytest.mark.default_cases("muon-f32")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("chain", CHAINS)
def test_steps_are_those_of_the_run_without_it(chain, dtype, mesh):
    """Leaves of 6 that 8 devices do not divide, 3-D kernels, masters, and one program for all steps."""
    tx, runs = CHAINS[chain](), []
    for offload in ("host", HOST):
        state = jzero.shard(
            create_state(tx, dtype),
            stage=3,
            offload=offload,
            mesh=mesh,
            min_shard_bytes=0,
            bucket_bytes=2**12,
        )
        plan, traced = jzero.plan_of(state), []

        def counted(state, data, traced=traced):
            traced.append(None)
            return train_step(state, data)

        step, split = jax.jit(counted, donate_argnums=0), plan.place_batch(batch())
        for _ in range(4):
            state, _ = step(state, split)
        assert len(traced) == 1
        runs.append(state)
    want, got = runs
    assert kinds(want.params) == {"device"}
    assert_where_they_live(got.params, plan)
    assert max_error(got.params, want.params) < 1e-6
    assert max_error(got.opt_state, want.opt_state) < 1e-6


UNEVEN = {"several": (6, 20), "padded": (11, 3), "even": (16, 8)}


def loss_of_uneven(params, x):
    return sum(jnp.mean(jnp.tanh(x[:, : p.shape[0]] @ p) ** 2) for p in params.values())


def grads_of_uneven(params, x):
    """In float64."""
    found = {}
    for name, p in params.items():
        rows = np.asarray(x[:, : p.shape[0]], np.float64)
        t = np.tanh(rows @ np.asarray(p, np.float64))
        found[name] = rows.T @ (2 * t * (1 - t * t) / t.size)
    return found


@pytest.mark.default_cases("through the device-host", "files-device")
@pytest.mark.parametrize("params_on", ["host", "device"])
@pytest.mark.parametrize("tier", ["through the device", "by the CPU", "files"])
def test_leaves_that_no_one_dim_divides(tier, params_on, mesh, tmp_path):
    """One is cut along several dims together, one is stored padded, in every tier of the optimizer's state."""
    tiers = {
        "through the device": {},
        "by the CPU": {"update": "host"},
        "files": {"tier": "disk", "path": tmp_path / "s", "buffer_bytes": 2**18},
    }
    offload = jzero.Offload(params=params_on, **tiers[tier])
    rng = np.random.default_rng(0)
    params, loss = {k: jnp.asarray(rng.standard_normal(s), jnp.float32) for k, s in UNEVEN.items()}, loss_of_uneven

    def train(tx, params, x, gradients, jitted):
        def step(grads, state, params):
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        step, state = jax.jit(step) if jitted else step, tx.init(params)
        for _ in range(3):
            params, state = step(gradients(params, x), state, params)
        return params

    x = jnp.asarray(rng.standard_normal((8, 16)), jnp.float32)
    plan = jzero.make_plan(params, stage=3, mesh=mesh, min_shard_bytes=0, offload=offload)
    several, padded = (next(y for y in plan.layouts if k in y.name) for k in ("several", "padded"))
    assert len([e for e in several.state if e]) == 2
    assert padded.padded
    gradients = jax.jit(jax.grad(jzero.gather_on_use(loss, plan)))
    outside = plan.config.updates_outside
    got = train(jzero.zero(optax.adam(0.1), plan), plan.place(params), plan.place_batch(x), gradients, not outside)
    assert max_error(got, train(optax.adam(0.1), params, x, jax.jit(jax.grad(loss)), True)) < 1e-5


def test_params_within_the_node(mesh_2x4):
    """hpZ: params are split over 4, state and gradients over all 8."""
    config = {"axis": ("model", "data"), "param_axis": "data"}
    runs = []
    for offload in (None, HOST):
        state = jzero.shard(
            create_state(), stage=3, offload=offload, mesh=mesh_2x4, min_shard_bytes=0, **config
        )
        plan = jzero.plan_of(state)
        for _ in range(3):
            state, loss = jax.jit(train_step, donate_argnums=0)(state, plan.place_batch(batch()))
        runs.append((state, loss))
    (want, plain), (got, loss) = runs
    assert any(x.stored != x.state for x in plan.layouts)
    np.testing.assert_allclose(loss, plain, rtol=1e-6)
    assert_where_they_live(got.params, plan)
    assert max_error(got.params, want.params) < 1e-6


@pytest.mark.default_cases("unscaled")
@pytest.mark.parametrize("scale", [None, jzero.LossScale(initial=2.0**10)], ids=["unscaled", "scaled"])
def test_micro_batches(scale, mesh):
    """Sums of gradients lie in host memory too."""
    state = create_state()
    found = []
    for offload in (None, HOST):
        plan = jzero.make_plan(state.params, stage=3, offload=offload, mesh=mesh, min_shard_bytes=0)
        value_and_grad = jzero.value_and_grad(
            lambda p, b: loss_of(state.apply_fn, p, b), plan, accumulate=2, scale=scale, coupled="allow"
        )
        found.append(jax.jit(value_and_grad)(plan.place(state.params), plan.place_batch(batch())))
    (want_loss, want), (loss, grads) = found
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    assert max_error(grads, want) < 1e-6
    assert_where_they_live(grads, plan)


@pytest.mark.parametrize("reduce", ["auto", "microbatch"])
def test_micro_batches_of_leaves_that_no_one_dim_divides(reduce, mesh):
    """Sums of their gradients, whose pieces are unequal."""
    rng = np.random.default_rng(0)
    params = {k: jnp.asarray(rng.standard_normal(s), jnp.float32) for k, s in UNEVEN.items()}
    x = jnp.asarray(rng.standard_normal((32, 16)), jnp.float32)
    plan = jzero.make_plan(params, stage=3, mesh=mesh, min_shard_bytes=0, offload=HOST)
    assert {y.padded for y in plan.layouts} == {True, False}
    run = jax.jit(jzero.value_and_grad(loss_of_uneven, plan, accumulate=2, reduce=reduce))
    loss, grads = run(plan.place(params), plan.place_batch(x))
    want_loss, want = jax.value_and_grad(loss_of_uneven)(params, x)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    exact = grads_of_uneven(params, x)  # on some CPUs one rounding of tanh is as large as the sums' difference
    assert max_error(grads, exact) < 2 * max_error(want, exact) < 4e-6
    assert_where_they_live(grads, plan)


class Normed(nn.Module):
    """BatchNorm and dropout. No bias before the norm: its gradient is rounding alone, by which Adam divides."""

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(40, use_bias=False)(x))
        return nn.Dense(6)(nn.Dropout(0.2, deterministic=not train)(nn.relu(x)))


class NormedState(TrainState):
    batch_stats: dict


def test_statistics_and_dropout(mesh):
    model = Normed()
    variables = model.init(jax.random.key(0), batch()["x"], train=False)
    tx = optax.adam(1e-2)

    @jax.jit
    def step(state, data, key):
        def loss_fn(params):
            out, new = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats}, data["x"], mutable=["batch_stats"],
                rngs={"dropout": key},
            )  # fmt: skip
            return jnp.mean((out - data["y"]) ** 2), new

        (loss, new), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, batch_stats=new["batch_stats"]), loss

    states = []
    for offload in (None, HOST):
        state = NormedState.create(
            apply_fn=model.apply, params=variables["params"], tx=tx, batch_stats=variables["batch_stats"]
        )
        state = jzero.shard(state, stage=3, offload=offload, mesh=mesh, min_shard_bytes=0)
        for i in range(3):
            state, _ = step(state, jzero.plan_of(state).place_batch(batch(i)), jax.random.key(i))
        states.append(state)
    want, got = states
    assert max_error(got.params, want.params) < 1e-6
    assert max_error(got.batch_stats, want.batch_stats) < 1e-6


def test_a_state_that_is_there_and_one_that_is_born(mesh):
    """From and to every other tier, values kept."""
    there = jzero.shard(create_state(), stage=3, offload=HOST, mesh=mesh, min_shard_bytes=0)
    born = jzero.shard(create_state, stage=3, offload=HOST, mesh=mesh, min_shard_bytes=0)
    assert max_error(born.params, there.params) < 1e-6  # another program makes the values
    for state in (there, born):
        assert_where_they_live(state.params, jzero.plan_of(state))
        assert [p.sharding.spec for p in jax.tree.leaves(state.params)] == [
            x.stored for x in jzero.plan_of(state).layouts
        ]
    assert kinds(jzero.unshard(born.params)) == {"device"}
    for fields in ({"stage": 2}, {"stage": 3, "offload": "host"}, {"stage": 1, "offload": None}):
        other = jzero.shard(there, mesh=mesh, min_shard_bytes=0, **fields)
        assert kinds(other.params) == {"device"}
        assert max_error(other.params, there.params) == 0
        back = jzero.shard(other, stage=3, offload=HOST, mesh=mesh, min_shard_bytes=0)
        assert_where_they_live(back.params, jzero.plan_of(back))
        assert max_error(back.opt_state, there.opt_state) == 0


@pytest.mark.parametrize(
    "tiers", [(None, HOST), (HOST, None), (HOST, HOST), (None, "host")], ids=["to", "from", "there", "state alone"]
)
def test_laid_out_again_on_other_devices(tiers):
    """Leaves that every device holds change their memory and their devices at once."""
    params = {k: jnp.arange(np.prod(s), dtype=jnp.float32).reshape(s) for k, s in UNEVEN.items()}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(0.1))
    fields = {"stage": 3, "min_shard_bytes": 0, "uneven": "replicate"}
    first = jzero.shard(state, mesh=mesh_of(8), offload=tiers[0], **fields)
    assert first.params["padded"].sharding.is_fully_replicated
    first = first.apply_gradients(grads=first.params)
    for devices in (4, 2):
        again = jzero.shard(first, mesh=mesh_of(devices), offload=tiers[1], **fields)
        for x, y in zip(jzero.plan_of(again).layouts, jax.tree.leaves(again.params), strict=True):
            assert y.sharding == jzero.plan_of(again).param_sharding(x)
        assert max_error(again.params, first.params) == 0
        assert max_error(again.opt_state, first.opt_state) == 0


def test_checkpoints_from_and_to_every_tier(mesh, tmp_path):
    """One of jzero, across stages and tiers, and plain orbax into the same layout."""
    tiers = {"there": (3, HOST), "state": (3, "host"), "here": (2, None)}
    states = {
        k: jzero.shard(create_state(), stage=s, offload=o, mesh=mesh, min_shard_bytes=0)
        for k, (s, o) in tiers.items()
    }
    for name in ("there", "here"):
        jzero.checkpoint.save(tmp_path / name, states[name])
        for other, like in states.items():
            found = jzero.checkpoint.restore(tmp_path / name, like)
            assert max_error(found.params, states[name].params) == 0
            assert [x.sharding for x in jax.tree.leaves(found)[1:]] == [
                x.sharding for x in jax.tree.leaves(like)[1:]
            ], other
    checkpointer = ocp.save_pytree(tmp_path / "orbax", states["there"].params)
    assert checkpointer is None
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), states["there"].params
    )
    found = ocp.load_pytree(tmp_path / "orbax", abstract)
    assert_where_they_live(found, jzero.plan_of(states["there"]))
    assert max_error(found, states["there"].params) == 0


def test_what_small_leaves_do(mesh):
    """Below `min_shard_bytes` a leaf is whole, and in device memory, as its gradient."""
    state = jzero.shard(create_state(), stage=3, offload=HOST, mesh=mesh, min_shard_bytes=1000)
    plan = jzero.plan_of(state)
    for x, p in zip(plan.layouts, jax.tree.leaves(state.params), strict=True):
        assert p.sharding.memory_kind == ("pinned_host" if x.nbytes >= 1000 else "device"), x.name
    assert len(kinds(state.params)) == 2
    state, _ = jax.jit(train_step, donate_argnums=0)(state, plan.place_batch(batch()))
    assert len(kinds(state.params)) == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stage": 2}, "needs stage 3"),
        ({"stage": 3, "reshard_after_forward": False}, "reshard_after_forward=False keeps weights"),
        ({"stage": 3, "updates": "delta"}, 'updates="delta" exclude each other'),
    ],
)
def test_what_does_not_go_together(fields, message):
    with pytest.raises(ValueError, match=message):
        jzero.ZeroConfig(offload=HOST, **fields)


def test_an_unknown_place():
    with pytest.raises(ValueError, match="params"):
        jzero.Offload(params="disk")
