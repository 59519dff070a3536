"""Leaves that no dim divides: their state is padded, the optimizer sees the logical shape, the numbers stay."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from models import assert_batch_is_split, logical, loss_of, max_error, specs
from optax import contrib

import jzero

VOCAB, DIM, HIDDEN, OUT = 517, 33, 51, 11  # nothing that 8 or 5 divides


class Odd(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(HIDDEN)(nn.Embed(VOCAB, DIM)(x))
        return nn.Dense(OUT)(nn.Conv(7, (3,))(nn.gelu(x)))


def create(tx):
    params = Odd().init(jax.random.key(0), jnp.zeros((1, 6), jnp.int32))["params"]
    return TrainState.create(apply_fn=Odd().apply, params=params, tx=tx)


def batch(n):
    rng = np.random.default_rng(0)
    shape = (2 * n, 6)
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


@pytest.mark.parametrize(("n", "stage"), [(8, 1), (8, 2), (5, 3)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_the_plain_run(name, n, stage):
    tx = OPTIMIZERS[name]()
    plain, data = create(tx), batch(n)
    state = jzero.shard(create(tx), stage=stage, mesh=mesh_of(n), min_shard_bytes=0)
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
    assert set(specs(grads)) == {P()}  # results of the step that are no state stay whole
    assert specs(state.opt_state) == plan.state_specs(state.opt_state)
    if name == "adamw":  # every moment is split, whatever its shape
        assert P() not in specs([x for x in jax.tree.leaves(state.opt_state) if x.ndim])
        held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state.opt_state))
        total = sum(x.nbytes for x in jax.tree.leaves(plain.opt_state))
        assert held <= 1.02 * total / n + 8


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


def test_a_live_change_of_the_number_of_devices_keeps_every_bit():
    state = jzero.shard(create(optax.adam(1e-2)), stage=2, mesh=mesh_of(8), min_shard_bytes=0)
    state, _ = jax.jit(step)(state, jzero.plan_of(state).place_batch(batch(8)))
    want = jax.device_get(logical(state))
    for n, stage, fields in ((5, 3, {}), (3, 1, {}), (4, 2, {"uneven": "replicate"}), (8, 2, {})):
        state = jzero.shard(state, stage=stage, mesh=mesh_of(n), min_shard_bytes=0, **fields)
        assert max_error(logical(state), want) == 0


def test_born_sharded_and_eager():
    tx = optax.adam(1e-2)
    born = jzero.shard(lambda: create(tx), stage=2, mesh=mesh_of(8), min_shard_bytes=0)
    assert born.opt_state[0].mu["Embed_0"]["embedding"].shape == (520, 33)
    plain, data = create(tx), batch(8)
    born, _ = step(born, jzero.plan_of(born).place_batch(data))  # not jitted
    plain, _ = step(plain, data)
    assert max_error(born.params, plain.params) < 1e-5


def test_16_bit_masters_are_padded_too():
    state = create(optax.adam(1e-2))
    half = state.replace(params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), state.params))
    half = half.replace(opt_state=half.tx.init(half.params))
    both = [
        jzero.shard(half, stage=2, mesh=mesh_of(8), min_shard_bytes=0, uneven=how)
        for how in ("pad", "replicate")
    ]
    assert both[0].opt_state.master["Embed_0"]["embedding"].shape == (520, 33)
    placed = jzero.plan_of(both[0]).place_batch(batch(8))
    for _ in range(3):
        both = [jax.jit(step)(s, placed)[0] for s in both]
    # elementwise the same arithmetic; XLA may sum a gradient in another order
    assert max_error(logical(both[0]).master, logical(both[1]).master) < 1e-3


def test_unshard_wants_a_wrapped_transformation():
    with pytest.raises(TypeError, match=r"tx must be a transformation from jzero\.zero, such as state\.tx"):
        jzero.unshard({}, tx=optax.adam(1e-2))
