"""Leaves that no dim divides: several dims are cut, or the state is padded. The optimizer sees the logical shape."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from models import assert_batch_is_split, logical, loss_of, max_error, specs
from optax import contrib

import jzero
from jzero.layout.specs import shard_factor

VOCAB, DIM, HIDDEN, OUT = 517, 33, 51, 11  # nothing that 8 or 5 divides


class Odd(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(HIDDEN)(nn.Embed(VOCAB, DIM)(x))
        return nn.Dense(OUT)(nn.Conv(7, (3,))(nn.gelu(x)))


class Several(nn.Module):
    """On 8 devices: four kernels and a bias that two dims divide, an embedding of which one is padded, biases."""

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(4, (3, 3))(nn.Embed(VOCAB + 2, 6)(x))
        x = nn.DenseGeneral((20, 4))(jnp.tanh(nn.Dense(6)(x)))
        return nn.DenseGeneral(OUT, axis=(-2, -1))(nn.gelu(x))


SHARDS = {  # of the state on 8 devices: how a shape is stored, and the piece of one device
    (3, 3, 6, 4): ((3, 3, 6, 4), (3, 3, 3, 1)),
    (6, 20, 4): ((6, 20, 4), (3, 5, 4)),
    (20, 4): ((20, 4), (5, 2)),
    (20, 4, 11): ((20, 4, 11), (5, 2, 11)),
    (4, 6): ((4, 6), (1, 3)),
    (519, 6): ((520, 6), (130, 3)),
    (4,): ((8,), (1,)),
    (6,): ((8,), (1,)),
    (11,): ((16,), (2,)),
}


def create(tx, model=Odd, tokens=(6,)):
    params = model().init(jax.random.key(0), jnp.zeros((1, *tokens), jnp.int32))["params"]
    return TrainState.create(apply_fn=model().apply, params=params, tx=tx)


def create_several(tx):
    return create(tx, Several, (5, 5))


def batch(n, tokens=(6,)):
    rng = np.random.default_rng(0)
    shape = (2 * n, *tokens)
    return {
        "x": rng.integers(0, VOCAB, shape).astype(np.int32),
        "y": rng.standard_normal((*shape, OUT), dtype=np.float32),
    }


def step(state, batch):
    loss, grads = jax.value_and_grad(lambda p: loss_of(state.apply_fn, p, batch))(state.params)
    return state.apply_gradients(grads=grads), (loss, grads)


def mesh_of(n):
    return Mesh(np.array(jax.devices()[:n]), ("data",))


OPTIMIZERS = {
    "adamw": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
    "factored": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "per matrix": lambda: contrib.muon(1e-2),
    "accumulating": lambda: optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "n", "stage"),
    [
        *((name, n, stage) for name in ("adamw", "factored") for n, stage in ((8, 1), (8, 2), (5, 3))),
        *((name, n, stage) for name in ("per matrix", "accumulating") for n, stage in ((8, 2), (5, 3))),
        *(pytest.param(name, 8, 1, marks=pytest.mark.nightly) for name in ("per matrix", "accumulating")),
    ],
)
def test_equals_the_plain_run(name, n, stage):
    tx = OPTIMIZERS[name]()
    state, plain, grads = run_both(create(tx), create(tx), stage, n, batch(n))
    assert set(specs(grads)) == {P()}  # results of the step that are not state stay whole
    if name == "adamw":  # every moment is split, whatever its shape
        assert P() not in specs([x for x in jax.tree.leaves(state.opt_state) if x.ndim])
        held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state.opt_state))
        total = sum(x.nbytes for x in jax.tree.leaves(plain.opt_state))
        assert held <= 1.02 * total / n + 8


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "stage"),
    [
        *((name, stage) for name in ("adamw", "factored") for stage in (1, 2, 3)),
        *((name, 3) for name in ("per matrix", "accumulating")),
        *(
            pytest.param(name, s, marks=pytest.mark.nightly)
            for name in ("per matrix", "accumulating")
            for s in (1, 2)
        ),
    ],
)
def test_equals_the_plain_run_over_several_dims(name, stage):
    tx = OPTIMIZERS[name]()
    state, _, _ = run_both(create_several(tx), create_several(tx), stage, 8, batch(8, (5, 5)))
    plan = jzero.plan_of(state)
    layouts = {x.shape: x for x in plan.layouts}
    assert {s: (x.state_shape, piece(plan, x.state, x.state_shape)) for s, x in layouts.items()} == SHARDS
    moments = [x for x in jax.tree.leaves(state.opt_state) if tuple(x.shape) == (3, 3, 6, 4)]
    assert moments or name == "factored"
    assert {x.addressable_shards[0].data.shape for x in moments} <= {(3, 3, 3, 1)}
    for x in jax.tree.leaves(state.params):
        held = SHARDS[x.shape][1] if stage == 3 else x.shape
        if stage == 3 and SHARDS[x.shape][0] != x.shape:
            held = {(519, 6): (519, 3)}.get(x.shape, x.shape)  # what is even of the split
        assert x.addressable_shards[0].data.shape == held


def piece(plan, spec, shape):
    return plan.sharding(spec).shard_shape(shape)


def run_both(mine, plain, stage, n, data, mesh=None, **fields):
    """Four steps, sharded and plain: (state, plain state, gradients of the last step)."""
    state = jzero.shard(mine, stage=stage, mesh=mesh or mesh_of(n), min_shard_bytes=0, **fields)
    plan = jzero.plan_of(state)
    placed = plan.place_batch(data)
    assert_batch_is_split(placed, n)
    ours, theirs = jax.jit(step, donate_argnums=0), jax.jit(step)
    programs = []
    for _ in range(4):
        state, (loss, grads) = ours(state, placed)
        plain, (expected, _) = theirs(plain, data)
        programs.append(ours._cache_size())
    assert len(set(programs)) == 1  # nothing drifts, nothing recompiles
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    assert max_error(state.params, plain.params) < 3e-5
    # Muon's orthogonalisation magnifies rounding (see test_parity); its moments are summed before it
    assert max_error(logical(state), plain.opt_state) < 1e-4
    assert specs(state.opt_state) == [plan.sharding(s).spec for s in plan.state_specs(state.opt_state)]
    assert specs(state.params) == [plan.sharding(x.stored).spec for x in plan.layouts]
    return state, plain, grads


HYBRIDS = {
    "params within the node": {"axis": ("node", "gpu"), "param_axis": "gpu"},
    "replicas": {"axis": "gpu", "batch_axis": ("node", "gpu")},
    "two axes": {"axis": ("node", "gpu")},
}


@pytest.mark.nightly
@pytest.mark.parametrize("kind", HYBRIDS)
def test_hybrids_over_several_dims(kind):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("node", "gpu"))
    tx, data = optax.adamw(1e-2), batch(8, (5, 5))
    state, _, _ = run_both(create_several(tx), create_several(tx), 3, 8, data, mesh, **HYBRIDS[kind])
    plan = jzero.plan_of(state)
    x = next(x for x in plan.layouts if x.shape == (3, 3, 6, 4))
    held = {"params within the node": (4, 8), "replicas": (4, 4), "two axes": (8, 8)}[kind]
    assert (shard_factor(x.stored, mesh), shard_factor(x.state, mesh)) == held
    for param, moment in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(state.opt_state[0].mu), strict=True
    ):
        if param.shape == moment.shape:  # what a device updates is a part of what it stores
            outer, inner = (a.sharding.devices_indices_map(a.shape) for a in (param, moment))
            assert all(within(inner[d], outer[d], param.shape) for d in outer)


def within(inner, outer, shape):
    spans = [(a.indices(n)[:2], b.indices(n)[:2]) for a, b, n in zip(inner, outer, shape, strict=True)]
    return all(b[0] <= a[0] and a[1] <= b[1] for a, b in spans)


@pytest.mark.nightly
@pytest.mark.parametrize("reduce", ["step", "microbatch"])
def test_micro_batches_over_several_dims(reduce):
    mine = create_several(optax.sgd(0.1))
    state = jzero.shard(mine, stage=2, mesh=mesh_of(8), min_shard_bytes=0)
    plan, data = jzero.plan_of(state), batch(16, (5, 5))

    def loss(params, batch):
        return loss_of(state.apply_fn, params, batch)

    both = jzero.value_and_grad(loss, plan, accumulate=2, reduce=reduce)
    value, grads = jax.jit(both)(state.params, plan.place_batch(data))
    expected, whole = jax.value_and_grad(lambda p: loss_of(mine.apply_fn, p, data))(mine.params)
    assert float(value) == pytest.approx(float(expected), rel=1e-5)
    assert max_error(grads, whole) < 1e-5
    kernel = next(g for g in jax.tree.leaves(grads) if g.shape == (3, 3, 6, 4))
    assert kernel.addressable_shards[0].data.shape == (3, 3, 3, 1)


def test_what_is_stored_and_what_is_seen():
    state = jzero.shard(create(optax.adam(1e-2)), stage=3, mesh=mesh_of(8), min_shard_bytes=0)
    plan = jzero.plan_of(state)
    embed = plan.layouts[[x.name for x in plan.layouts].index("['Embed_0']['embedding']")]
    assert (embed.shape, embed.state_shape, embed.state) == ((517, 33), (520, 33), P("data"))
    assert (embed.stored, embed.reason) == (
        P(),
        "no dim divisible by 8: param whole, state padded to [520, 33]",
    )
    assert state.opt_state[0].mu["Embed_0"]["embedding"].shape == (520, 33)
    whole = logical(state)[0].mu["Embed_0"]["embedding"]
    assert (whole.shape, whole.sharding.spec) == ((517, 33), P())
    conv = plan.layouts[[x.name for x in plan.layouts].index("['Conv_0']['kernel']")]
    assert conv.state_shape == (3, 56, 7)  # 51 -> 56 costs less than 3 -> 8 or 7 -> 8 does
    assert "state padded to [520, 33]" in plan.describe()
    assert jzero.estimate(plan, tx=state.tx).opt_state == sum(
        x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state.opt_state)
    )


@pytest.mark.nightly
def test_a_live_change_of_the_number_of_devices_keeps_every_bit():
    state = jzero.shard(create(optax.adam(1e-2)), stage=2, mesh=mesh_of(8), min_shard_bytes=0)
    state, _ = jax.jit(step)(state, jzero.plan_of(state).place_batch(batch(8)))
    want = jax.device_get(logical(state))
    for n, stage, fields in ((5, 3, {}), (3, 1, {}), (4, 2, {"uneven": "replicate"}), (8, 2, {})):
        state = jzero.shard(state, stage=stage, mesh=mesh_of(n), min_shard_bytes=0, **fields)
        assert max_error(logical(state), want) == 0


@pytest.mark.nightly
def test_born_sharded_and_eager():
    tx = optax.adam(1e-2)
    born = jzero.shard(lambda: create(tx), stage=2, mesh=mesh_of(8), min_shard_bytes=0)
    assert born.opt_state[0].mu["Embed_0"]["embedding"].shape == (520, 33)
    plain, data = create(tx), batch(8)
    born, _ = step(born, jzero.plan_of(born).place_batch(data))  # not jitted
    plain, _ = step(plain, data)
    assert max_error(born.params, plain.params) < 1e-5


@pytest.mark.nightly
def test_16_bit_masters_are_padded_too():
    state = create(optax.adam(1e-2))
    half = state.replace(params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), state.params))
    half = half.replace(opt_state=half.tx.init(half.params))
    both = [
        jzero.shard(half, stage=2, mesh=mesh_of(8), min_shard_bytes=0, uneven=how)
        for how in ("pad", "replicate")
    ]
    assert both[0].opt_state.master["Embed_0"]["embedding"].shape == (520, 33)
    grads = jax.tree.map(lambda x: jax.random.normal(jax.random.key(1), x.shape, x.dtype), half.params)
    for _ in range(3):  # the same gradients: XLA may sum them in another order, and 16 bits would show it
        both = [jax.jit(lambda s, g: s.apply_gradients(grads=g))(s, grads) for s in both]
    # two programs: whether a product and a sum are fused into one rounding is the machine's choice
    assert max_error(logical(both[0]), logical(both[1])) < 1e-6
    for state in both:
        cast = jax.tree.map(lambda x: x.astype(jnp.bfloat16), logical(state).master)
        assert max_error(state.params, cast) == 0
    assert max_error(both[0].params, half.params) > 0.01


@pytest.mark.nightly
def test_a_live_change_over_several_dims_keeps_every_bit():
    state = jzero.shard(create_several(optax.adam(1e-2)), stage=3, mesh=mesh_of(8), min_shard_bytes=0)
    state, _ = jax.jit(step)(state, jzero.plan_of(state).place_batch(batch(8, (5, 5))))
    want, params = jax.device_get(logical(state)), jax.device_get(state.params)
    for n, stage, fields in ((5, 2, {}), (8, 1, {}), (6, 3, {}), (4, 2, {"uneven": "replicate"}), (8, 3, {})):
        state = jzero.shard(state, stage=stage, mesh=mesh_of(n), min_shard_bytes=0, **fields)
        assert max_error(logical(state), want) == 0
        assert max_error(state.params, params) == 0
    finer = jax.tree.leaves(state.params)[0].sharding.mesh
    for again in (jzero.shard(state, stage=2), jzero.shard(state, stage=2, mesh=finer)):
        assert jzero.plan_of(again).mesh == mesh_of(8)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_init_of_zeros_alone_keeps_its_layout(dtype):
    """Of a jit without arguments that are read, JAX would name the layouts after any mesh."""
    params = {"a": jnp.ones((16, 3), dtype), "b": jnp.ones((6, 20, 4), dtype)}
    plan = jzero.make_plan(params, stage=1, mesh=mesh_of(8), min_shard_bytes=0)
    tx = jzero.zero(optax.adam(1e-2), plan)
    for init in (tx.init, jax.jit(tx.init)):
        state = init(plan.place(params))
        assert specs(state) == [plan.sharding(s).spec for s in plan.state_specs(state)]
        assert [x.addressable_shards[0].data.shape for x in jax.tree.leaves(state)].count((3, 5, 4)) >= 2


@pytest.mark.nightly
def test_a_loop_of_steps_and_an_average_over_several_dims():
    state = jzero.shard(create_several(optax.adam(1e-2)), stage=3, mesh=mesh_of(8), min_shard_bytes=0)
    placed = jzero.plan_of(state).place_batch(batch(8, (5, 5)))

    @jax.jit
    def steps(state, ema, placed):
        def one(carry, _):
            state, ema = carry
            state, _ = step(state, placed)
            return (state, optax.incremental_update(state.params, ema, 0.1)), None

        return jax.lax.scan(one, (state, ema), length=3)[0]

    looped, ema = steps(state, state.params, placed)
    slow = state.params
    for _ in range(3):
        state, _ = jax.jit(step)(state, placed)
        slow = optax.incremental_update(state.params, slow, 0.1)
    assert specs(looped.params) == specs(state.params)
    assert specs(looped.opt_state) == specs(state.opt_state)
    assert max_error(looped.params, state.params) < 1e-5
    assert max_error(ema, slow) < 1e-5


def test_what_a_step_returns_besides_its_state():
    """Nobody constrains it, so that XLA lays it out and JAX names its layout: gradients, an average, activations."""
    state = jzero.shard(create_several(optax.adam(1e-2)), stage=3, mesh=mesh_of(8), min_shard_bytes=0)
    plan, plain = jzero.plan_of(state), create_several(optax.adam(1e-2))
    own = jax.device_put(batch(8, (5, 5)), NamedSharding(mesh_of(8), P("data")))  # on the user's mesh
    average = jax.device_put(jax.device_get(state.params), NamedSharding(mesh_of(8), P()))

    @jax.jit
    def more(state, batch, average):
        new, (_, grads) = step(state, batch)
        average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, average, new.params)
        return (
            new,
            grads,
            average,
            jax.tree.map(jnp.square, new.params),
            state.apply_fn({"params": new.params}, batch["x"]),
        )

    want = more(plain, batch(8, (5, 5)), plain.params)
    got = more(state, own, average)
    for mine, reference in zip(got[1:], want[1:], strict=True):
        assert max_error(mine, reference) < 1e-4
    with jax.set_mesh(plan.array_mesh):
        assert max_error(more(state, own, average)[1], want[1]) < 1e-4


def test_orbax_saves_and_restores_several_dims(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint").v1
    state = jzero.shard(create_several(optax.adam(1e-2)), stage=3, mesh=mesh_of(8), min_shard_bytes=0)
    saved = {"params": state.params, "opt_state": state.opt_state}
    ocp.save_pytree(tmp_path / "saved", saved)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), saved)
    back = ocp.load_pytree(tmp_path / "saved", like)
    assert specs(back) == specs(saved)
    assert max_error(back, saved) == 0


def test_unshard_wants_a_wrapped_transformation():
    with pytest.raises(TypeError, match=r"tx must be a transformation from jzero\.zero, such as state\.tx"):
        jzero.unshard({}, tx=optax.adam(1e-2))
