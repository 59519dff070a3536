"""Optimizer state in host memory: the same numbers as without, for any chain, and state that stays there."""

from __future__ import annotations

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from models import max_error
from optimizer_chains import CHAINS, params_of

import jzero
from jzero import offload
from jzero.stream import schedule, streaming
from jzero.stream.chunks import Form, chunks_of

P = jax.P
TINY = 1500  # bytes: a third of it is less than the shard of any matrix here
HOST = "pinned_host"


def batch():
    rng = np.random.default_rng(1)
    return {"x": jnp.asarray(rng.standard_normal((16, 32)), jnp.float32), "y": jnp.ones((16, 8))}


def loss_fn(params, batch):
    y = jnp.tanh(batch["x"] @ params["a"]) @ params["b"]
    if "stack" not in params:
        return jnp.mean((y - batch["y"]) ** 2).astype(jnp.float32)
    y = y + params["bias"].sum() + jnp.einsum("lij,ij->", params["stack"], params["stack"][0])
    return jnp.mean((y - batch["y"]) ** 2).astype(jnp.float32)


def train(tx, params, data, steps=6):
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state = jax.jit(tx.init)(params)
    for _ in range(steps):
        params, state, _ = step(params, state, data)
    assert step._cache_size() == 1  # nothing recompiles: every result lies where its argument lay
    return params, state


def offloaded(chain, stage, mesh, dtype=jnp.float32, bytes_=TINY):
    tier = jzero.Offload(in_flight_bytes=bytes_)
    plan = jzero.make_plan(params_of(dtype), stage=stage, mesh=mesh, min_shard_bytes=0, offload=tier)
    tx = jzero.zero(chain, plan)
    return *train(tx, plan.place(params_of(dtype)), plan.place_batch(batch())), plan


def assert_at_home(state, plan):
    """Every leaf lies in the memory and the layout that the plan says; all but single numbers on the host."""
    for x, sharding in zip(jax.tree.leaves(state), plan.state_shardings(state), strict=True):
        assert x.sharding == sharding, (x.shape, x.sharding, sharding)
        assert x.sharding.memory_kind == (HOST if x.size > 1 else "device")


@pytest.mark.default_cases("clip-3", "several-3")
@pytest.mark.filterwarnings("ignore:jzero. offload:UserWarning")  # adafactor and lamb cannot be cut so small
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", CHAINS)
def test_equals_the_run_without_jzero(name, stage, mesh):
    params, state, plan = offloaded(CHAINS[name](), stage, mesh)
    want, want_state = train(CHAINS[name](), params_of(), batch())
    assert_at_home(state, plan)
    assert any(x.sharding.spec for x in jax.tree.leaves(state))
    assert [x.sharding.spec for x in jax.tree.leaves(params)] == [x.stored for x in plan.layouts]
    assert max_error(params, want) < 3e-6
    assert max_error(jax.tree.leaves(state), jax.tree.leaves(want_state)) < 3e-6


SAME = {k: jnp.zeros((32, 32)) for k in "abc"}


def test_leaves_of_one_shape_keep_their_own_gradients(mesh):
    """Without masters what lands on a param is a difference, which fills the gradient's buffer chunk by chunk."""
    grads = {k: jnp.full_like(x, g) for (k, x), g in zip(SAME.items(), (1.0, -5.0, 3.0), strict=True)}

    def train(tx, params):
        @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
        def step(grads, state, params):
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        state = tx.init(params)
        for _ in range(3):
            params, state = step(jax.tree.map(jnp.copy, grads), state, params)
        return params

    plan = jzero.make_plan(
        SAME, stage=2, mesh=mesh, min_shard_bytes=0, offload=jzero.Offload(in_flight_bytes=600)
    )
    got = train(jzero.zero(optax.sgd(1.0, 0.9), plan), plan.place(SAME))
    want = train(optax.sgd(1.0, 0.9), jax.tree.map(jnp.copy, SAME))
    assert max_error(got, want) < 1e-6


def test_a_gradient_that_is_read_later_is_not_overwritten(mesh):
    """Results of other leaves, of a later chunk and of the end of the step read it: no shape tells that."""
    placement = schedule.Placement(NamedSharding(mesh, P("data"), memory_kind=HOST))
    g, h, m, n = (jnp.full((64, 8), v) for v in (1.0, 2.0, 10.0, 20.0))
    hosted = [jax.device_put(x, placement.sharding) for x in (m, n)]

    def fn(g, h, m, n):
        new_m, new_n = m + g, n + g + h  # g is read by both leaves and on its own, h by one leaf alone
        return [2 * new_m, 3 * new_n, new_m, new_n, g + 1]

    @jax.jit
    def run(*args):
        device = schedule.DEVICE
        lies = [device, device, schedule.Placement(placement.sharding, 2), schedule.Placement(placement.sharding, 3)]
        return streaming.stream(
            fn, args, [device, device, placement, placement], lambda: [device, *lies[1:], device],
            in_flight_bytes=200, gate=(0, 1),
        )  # fmt: skip

    for got, want in zip(run(g, h, *hosted), fn(g, h, m, n), strict=True):
        np.testing.assert_array_equal(np.asarray(got).reshape(64, 8), want)


def test_16_bit_params_are_the_cast_of_masters_on_the_host(mesh):
    params, state, plan = offloaded(CHAINS["clip"](), 2, mesh, jnp.bfloat16)
    assert_at_home(state, plan)
    for p, m in zip(jax.tree.leaves(params), jax.tree.leaves(state.master), strict=True):
        assert m.dtype == jnp.float32
        np.testing.assert_array_equal(np.asarray(p), np.asarray(m).astype(p.dtype))
    plan = jzero.make_plan(params_of(jnp.bfloat16), stage=2, mesh=mesh, min_shard_bytes=0)
    tx = jzero.zero(CHAINS["clip"](), plan)
    _, want = train(tx, plan.place(params_of(jnp.bfloat16)), plan.place_batch(batch()))
    assert max_error(state.master, want.master) < 1e-4


@pytest.mark.parametrize("jitted", [False, True])
def test_params_that_were_replaced_are_taken_over(jitted, mesh):
    tier = jzero.Offload(in_flight_bytes=TINY)
    plan = jzero.make_plan(params_of(jnp.bfloat16), stage=2, mesh=mesh, min_shard_bytes=0, offload=tier)
    tx = jzero.zero(optax.sgd(0.0), plan)
    state = tx.init(plan.place(params_of(jnp.bfloat16)))
    other = plan.place(jax.tree.map(lambda p: p + 1, params_of(jnp.bfloat16)))
    grads = jax.tree.map(jnp.zeros_like, other)

    def step(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    new, state = (jax.jit(step) if jitted else step)(grads, state, other)
    assert_at_home(state, plan)
    for p, q, m in zip(*map(jax.tree.leaves, (other, new, state.master)), strict=True):
        np.testing.assert_array_equal(np.asarray(p), np.asarray(m).astype(p.dtype))
        np.testing.assert_array_equal(np.asarray(p), np.asarray(q))


class Odd(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(11)(nn.gelu(nn.Dense(51)(nn.gelu(nn.Dense(33)(x)))))


def odd(tx):
    return TrainState.create(
        apply_fn=Odd().apply, params=Odd().init(jax.random.key(0), jnp.ones((1, 7)))["params"], tx=tx
    )


@functools.partial(jax.jit, donate_argnums=0)
def odd_step(state, x):
    def loss_fn(params):
        return jnp.mean(state.apply_fn({"params": params}, x) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def run_odd(state, data, steps=4):
    losses = []
    for _ in range(steps):
        state, loss = odd_step(state, data)
        losses.append(float(loss))
    return state, losses


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("born", [True, False])
def test_a_train_state_with_shapes_that_nothing_divides(stage, born, mesh):
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))
    x = jax.random.normal(jax.random.key(1), (16, 7))
    given = (lambda: odd(tx)) if born else odd(tx)
    state = jzero.shard(
        given, stage=stage, mesh=mesh, min_shard_bytes=0, offload=jzero.Offload(in_flight_bytes=TINY)
    )
    plan = jzero.plan_of(state)
    assert_at_home(state.opt_state, plan)
    state, losses = run_odd(state, plan.place_batch(x))
    assert_at_home(state.opt_state, plan)
    plain, want = run_odd(odd(tx), x)
    assert losses == pytest.approx(want, rel=1e-5)
    whole = jzero.unshard(state.opt_state, tx=state.tx)
    assert max_error(jax.tree.leaves(whole), jax.tree.leaves(plain.opt_state)) < 1e-6


def test_born_in_16_bit_the_masters_are_not_rounded(mesh):
    """Rounding to bfloat16 changes a value by up to 4e-3; two compiled programs differ by one unit of float32."""

    def drawn():
        return jax.random.normal(jax.random.key(0), (64, 64))

    def create():
        return TrainState.create(
            apply_fn=None, params={"w": drawn().astype(jnp.bfloat16)}, tx=optax.adam(1e-3)
        )

    fields = {"stage": 2, "mesh": mesh, "min_shard_bytes": 0}
    here = jzero.shard(create, **fields, offload=jzero.Offload(in_flight_bytes=TINY))
    there = jzero.shard(create, **fields)
    for state in (here, there):
        np.testing.assert_allclose(state.opt_state.master["w"], drawn(), rtol=5e-7)
        np.testing.assert_array_equal(state.params["w"], drawn().astype(jnp.bfloat16))
    assert_at_home(here.opt_state, jzero.plan_of(here))


@pytest.mark.default_cases("adam-2")
@pytest.mark.filterwarnings("ignore:jzero. offload:UserWarning")  # as above
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", ["adam", *(k for k in CHAINS if k != "several")])  # whose labels are a dict
def test_an_nnx_pair(name, stage, mesh):
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.up, self.down = nnx.Linear(16, 64, rngs=rngs), nnx.Linear(64, 8, rngs=rngs)

        def __call__(self, x):
            return self.down(jnp.tanh(self.up(x)))

    def create():
        model = Net(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-2) if name == "adam" else CHAINS[name](), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        loss_fn = jzero.gather_on_use(lambda m: jnp.mean(m(x) ** 2), jzero.plan_of(optimizer))
        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    x = jax.random.normal(jax.random.key(1), (16, 16))
    losses = {}
    for tier in (None, "host"):
        model, optimizer = jzero.shard(create, stage=stage, mesh=mesh, min_shard_bytes=0, offload=tier)
        data = jzero.plan_of(optimizer).place_batch(x)
        losses[tier] = [float(step(model, optimizer, data)) for _ in range(4)]
        kinds = {
            v.sharding.memory_kind for v in jax.tree.leaves(nnx.state(optimizer.opt_state)) if v.size > 1
        }
        assert kinds == {HOST if tier else "device"}
    assert losses["host"] == pytest.approx(losses[None], rel=1e-6)


def test_moved_there_and_back_with_every_bit(mesh):
    tx = optax.adam(1e-2)
    x = jax.random.normal(jax.random.key(1), (16, 7))
    state = jzero.shard(odd(tx), stage=1, mesh=mesh, min_shard_bytes=0)
    state, _ = run_odd(state, jzero.plan_of(state).place_batch(x))
    before = [np.asarray(v) for v in jax.tree.leaves(jzero.unshard(state.opt_state, tx=state.tx))]
    for fields in ({"stage": 3, "offload": "host"}, {"stage": 2, "offload": "host"}, {"stage": 1}):
        state = jzero.shard(state, **fields, mesh=mesh, min_shard_bytes=0)
        assert_home = assert_at_home if "offload" in fields else lambda *_: None
        assert_home(state.opt_state, jzero.plan_of(state))
        after = jax.tree.leaves(jzero.unshard(state.opt_state, tx=state.tx))
        for a, b in zip(before, after, strict=True):
            np.testing.assert_array_equal(a, np.asarray(b))


def test_select(mesh):
    plan = jzero.make_plan(params_of(), stage=2, mesh=mesh, min_shard_bytes=0, offload="host")
    tx = jzero.zero(optax.adam(1e-2), plan)
    params = plan.place(params_of())

    @jax.jit
    def step(params, state, take):
        updates, new = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
        return jzero.select(take, (optax.apply_updates(params, updates), new), (params, state))

    state = jax.jit(tx.init)(params)
    kept, kept_state = step(params, state, False)
    assert max_error((kept, kept_state), (params, state)) == 0
    moved, moved_state = step(params, state, True)
    assert_at_home(kept_state, plan)
    assert_at_home(moved_state, plan)
    assert max_error(moved, params) > 1e-3
    assert int(moved_state[0].count) == 1
    assert (
        max_error(
            jax.tree.leaves(moved_state[0].mu), jax.tree.leaves(jax.tree.map(lambda p: 0 * p + 0.1, params))
        )
        < 1e-6
    )
    with pytest.raises(ValueError, match="one structure"):
        jzero.select(True, {"a": 1}, {"b": 1})
    with pytest.raises(TypeError, match="must be a boolean scalar, not 1"):
        jzero.select(1, {"a": 1}, {"a": 1})
    with pytest.raises(ValueError, match=r"(?s)1 leaf has another shape in new than in old:.*\['a'\]  \(3,\)  \(\)"):
        jzero.select(True, {"a": jnp.ones(3)}, {"a": 1})
    with pytest.raises(ValueError, match="must be a scalar"):
        jzero.select(jnp.ones(2, bool), {"a": 1}, {"a": 1})


def test_orbax_saves_and_restores_to_the_host_and_from_it(mesh, tmp_path):
    tx = optax.adam(1e-2)
    x = jax.random.normal(jax.random.key(1), (16, 7))
    fields = {"stage": 2, "mesh": mesh, "min_shard_bytes": 0}
    state = jzero.shard(lambda: odd(tx), **fields, offload="host")
    state, _ = run_odd(state, jzero.plan_of(state).place_batch(x))
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "host", state)
        state, _ = run_odd(state, jzero.plan_of(state).place_batch(x), 1)  # donates what is being written
    with ocp.StandardCheckpointer() as saver:
        back = saver.restore(tmp_path / "host", jzero.abstract(lambda: odd(tx), **fields, offload="host"))
        there = saver.restore(tmp_path / "host", jzero.abstract(lambda: odd(tx), **fields))
    assert_at_home(back.opt_state, jzero.plan_of(back))
    assert {v.sharding.memory_kind for v in jax.tree.leaves(there.opt_state)} == {"device"}
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(there), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    again, _ = run_odd(back, jzero.plan_of(back).place_batch(x), 1)
    assert max_error(again.params, state.params) == 0
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "device", there)
    with ocp.StandardCheckpointer() as saver:
        moved = saver.restore(tmp_path / "device", jzero.abstract(lambda: odd(tx), **fields, offload="host"))
    assert_at_home(moved.opt_state, jzero.plan_of(moved))


def test_a_value_that_is_two_results_lies_in_both_homes(mesh):
    host = schedule.Placement(NamedSharding(mesh, P("data"), memory_kind=HOST))
    x = jax.device_put(jnp.arange(64.0), host.sharding)

    @jax.jit
    def run(x):
        placements = [schedule.DEVICE, schedule.Placement(host.sharding, 0), host]
        return streaming.stream(
            lambda x: jax.jit(lambda y: [y, y, y])(2 * x), [x], [host], lambda: placements, in_flight_bytes=48
        )

    found = run(x)
    assert [y.sharding.memory_kind for y in found] == ["device", HOST, HOST]
    for y in found:
        np.testing.assert_array_equal(np.asarray(y), 2 * np.arange(64))


def test_what_cannot_be_cut_is_named(mesh):
    def sorted_moments():
        def update(updates, state, params=None):
            new = jax.tree.map(lambda g, m: jnp.sort(0.9 * m + 0.1 * g, axis=0), updates, state)
            return new, new

        return optax.GradientTransformation(lambda p: jax.tree.map(jnp.zeros_like, p), update)

    with pytest.warns(
        UserWarning, match=r"(?s)up to 1.02 kB are on the device at once.*\['a'\].*1.02 kB +matrices that go to their"
    ):
        offloaded(sorted_moments(), 2, mesh, bytes_=900)


def test_nothing_to_hold(mesh):
    with pytest.warns(UserWarning, match="offload has nothing to hold"):
        jzero.shard(odd(optax.sgd(0.1)), stage=2, mesh=mesh, offload="host")


def test_a_matrix_is_cut_although_its_moments_are_vectors(mesh, monkeypatch):
    params = {k: p.astype(jnp.bfloat16) for k, p in params_of().items() if k in ("a", "b")}
    chain, found = optax.adafactor(1e-2, min_dim_size_to_factor=4), {}
    groups = schedule.Schedule._groups
    counts = []
    monkeypatch.setattr(schedule.Schedule, "_groups", lambda *args: counts.append(groups(*args)) or counts[-1])
    for name, tier in (("host", jzero.Offload(in_flight_bytes=512)), ("device", None)):
        plan = jzero.make_plan(params, stage=2, mesh=mesh, min_shard_bytes=0, offload=tier)
        given = plan.place(jax.tree.map(jnp.copy, params))
        _, found[name] = train(jzero.zero(chain, plan), given, plan.place_batch(batch()))
        if tier is not None:
            assert_at_home(found[name], plan)
            assert max(group.nbytes for some in counts for group in some) <= 512 // 3
    assert found["host"].inner[0].v_row["a"].shape == (32,)
    assert max_error(*map(jax.tree.leaves, found.values())) < 1e-5


def test_bad_configs(mesh):
    with pytest.raises(ValueError, match=r"names no folder. Pass jzero\.Offload\(tier='disk'"):
        jzero.ZeroConfig(offload="disk")
    with pytest.raises(ValueError, match="offload must be one of 'host'"):
        jzero.ZeroConfig(offload="nvme")
    with pytest.raises(ValueError, match=r"Offload\(tier='nvme'\)"):
        jzero.Offload(tier="nvme")
    with pytest.raises(ValueError, match="update must be one of 'device'"):
        jzero.Offload(update="cpu")
    with pytest.raises(ValueError, match="in_flight_bytes"):
        jzero.Offload(in_flight_bytes=0)
    with pytest.raises(ValueError, match=r"\(in_flight_bytes=1\): .* divided into \d+ groups.* at least \d"):
        jzero.shard(lambda: odd(optax.adam(1e-2)), stage=0, offload=jzero.Offload(in_flight_bytes=1))
    with pytest.raises(TypeError, match="prefetch must be True or False"):
        jzero.Offload(prefetch=2)
    with pytest.raises(TypeError, match=r"must be \"host\", a jzero.Offload or None"):
        jzero.ZeroConfig(offload=True)


class Gpu:
    """A device that says that it is a GPU of this process."""

    def __init__(self, device):
        self.device, self.platform, self.process_index = device, "gpu", 0


def test_what_does_not_fit_is_refused_before_it_is_allocated(mesh, monkeypatch):
    plan = jzero.make_plan(params_of(), stage=1, mesh=mesh, min_shard_bytes=0, offload="host")
    tx = jzero.zero(optax.adam(1e-2), plan)
    state = jax.eval_shape(tx.init, plan.shapes)
    needed = 2 * 4 * sum(math.prod(x.shape) for x in plan.layouts)
    assert 8 * offload.host_bytes(state, plan) == needed
    monkeypatch.setattr(offload, "available_memory", lambda: needed - 1)
    with pytest.raises(MemoryError, match=r"needs 2\d.\d\d kB .* 2\d.\d\d kB are free"):
        tx.init(plan.place(params_of()))
    monkeypatch.setattr(offload, "available_memory", lambda: 10**15)
    monkeypatch.setattr(offload, "local_devices", lambda plan: [Gpu(d) for d in plan.mesh.devices.flat])
    tx.init(plan.place(params_of()))
    monkeypatch.setenv(offload.LIMIT, "0")
    with pytest.raises(MemoryError, match=r"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=\d"):
        jzero.shard(odd(optax.adam(1e-2)), stage=1, mesh=mesh, offload="host")


def test_state_in_files_may_be_larger_than_memory(mesh, monkeypatch, tmp_path):
    """Gradients and the buffer must fit."""
    tier = jzero.Offload(tier="disk", path=tmp_path / "s", buffer_bytes=2**16)
    plan = jzero.make_plan(params_of(), stage=2, mesh=mesh, min_shard_bytes=0, offload=tier)
    tx = jzero.zero(optax.adam(1e-2), plan)
    grads = sum(4 * math.prod(x.shape) for x in plan.layouts)
    monkeypatch.setattr(offload, "available_memory", lambda: grads + 2**16 - 1)
    with pytest.raises(MemoryError, match=r"kB are free\.$"):
        tx.init(plan.place(params_of()))
    monkeypatch.setattr(offload, "available_memory", lambda: grads + 2**16)
    tx.init(plan.place(params_of()))


@pytest.mark.parametrize("shape", [(48,), (16, 6), (3, 16, 5), (1, 2, 24), (4, 4, 8, 3)])
@pytest.mark.parametrize("limit", [1, 7, 60, 10**6])
def test_pieces_cover_an_array_once(shape, limit, mesh):
    split = next(i for i, d in enumerate(shape) if d % 8 == 0)
    placement = NamedSharding(mesh, P(*[None] * split, "data"), memory_kind="device")
    size = 4 * math.prod(shape) // 8
    seen = np.zeros(shape, int)
    for chunk in chunks_of(Form(shape, shape, placement), size, limit):
        box = tuple(slice(a, a + b) for a, b in zip(chunk.start, chunk.shape, strict=True))
        seen.reshape(chunk.view)[box] += 1
        assert chunk.layout.shard_shape(chunk.shape)  # every chunk is a chunk of every shard
        held = 4 * math.prod(chunk.layout.shard_shape(chunk.shape))
        assert held <= max(limit, 4)
    assert (seen == 1).all()
