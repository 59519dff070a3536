"""States that are no TrainState: what `explain` files as params, optimizer state and the rest, whatever holds them."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero

LOSS = {"x": jnp.ones((16, 32)), "y": jnp.ones((16, 8))}


class Svi(NamedTuple):
    """As NumPyro has it: the step counter, then params and state of the optimizer, without names."""

    optim_state: Any
    mutable_state: Any
    rng_key: Any


class Tuple(NamedTuple):
    """Names that say nothing to jzero."""

    moments: Any
    weights: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Data:
    """With an array of the shape of a param beside them."""

    net: Any
    optimizer: Any
    table: Any


@flax.struct.dataclass
class Struct:
    """No TrainState: it has no tx."""

    params: Any
    opt_state: Any
    average: Any


@dataclasses.dataclass(frozen=True)
class Form:
    """How a kind of state is made of params and optimizer state, and read."""

    make: Any
    read: Any
    write: Any = None


def svi_of(params, opt_state):
    return Svi((jnp.array(0), (params, opt_state)), {"mean": jnp.ones(64)}, jax.random.key(0))


FORMS = {
    "svi": Form(
        svi_of,
        lambda s: s.optim_state[1],
        lambda s, *new: s._replace(optim_state=(s.optim_state[0] + 1, new)),
    ),
    "dict": Form(lambda p, o: {"params": p, "opt": o}, lambda s: (s["params"], s["opt"])),
    "namedtuple": Form(lambda p, o: Tuple(o, p), lambda s: s[::-1]),
    "dataclass": Form(
        lambda p, o: Data(p, o, jnp.ones((32, 64))),
        lambda s: (s.net, s.optimizer),
        lambda s, *new: Data(*new, s.table),
    ),
    "struct": Form(
        lambda p, o: Struct(p, o, jax.tree.map(jnp.copy, p)),
        lambda s: (s.params, s.opt_state),
        lambda s, p, o: s.replace(params=p, opt_state=o, average=optax.incremental_update(p, s.average, 0.1)),
    ),
}


def params_of():
    keys = jax.random.split(jax.random.key(0))
    return {"up": {"w": jax.random.normal(keys[0], (32, 64)) / 6, "b": jnp.zeros(64)},
            "down": {"w": jax.random.normal(keys[1], (64, 8)) / 8, "b": jnp.zeros(8)}}  # fmt: skip


def loss_of(params, batch):
    h = jnp.tanh(batch["x"] @ params["up"]["w"] + params["up"]["b"])
    return jnp.mean((h @ params["down"]["w"] + params["down"]["b"] - batch["y"]) ** 2)


def step_of(form: Form, tx, loss_fn):
    def step(state, batch):
        params, opt_state = form.read(state)
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), opt_state
        return (form.write(state, *new) if form.write else form.make(*new)), loss

    return step


def held(tree) -> int:
    """Bytes on one device; a random key has none of a dtype."""
    arrays = [x for x in jax.tree.leaves(tree) if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)]
    return sum(x.addressable_shards[0].data.nbytes for x in arrays)


@pytest.mark.default_cases("svi-2", "dict-3", "dataclass-1")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", FORMS)
def test_a_state_of_another_kind_trains_and_its_memory_is_filed_right(name, stage, mesh):
    """By record to the byte. Without one the count of Adam, which has no name, may be of the rest."""
    form, params, tx = FORMS[name], params_of(), optax.adam(1e-2)
    plain, plain_step = form.make(params, tx.init(params)), jax.jit(step_of(form, tx, loss_of))
    plan = jzero.make_plan(params, stage=stage, mesh=mesh, min_shard_bytes=0)
    tx, params = jzero.zero(tx, plan), plan.place(params)
    state = form.make(params, jax.jit(tx.init)(params))
    step, batch = step_of(form, tx, jzero.gather_on_use(loss_of, plan)), plan.place_batch(LOSS)
    own, moments = map(held, form.read(state))
    for jitted, unnamed in ((jzero.jit(step, plan), ()), (jax.jit(step), (4,))):
        memory = jzero.explain(jitted.lower(state, batch).compile(), plan).memory
        assert memory.params == own
        assert moments - memory.opt_state in (0, *unnamed)
    for _ in range(2):
        state, loss = jzero.jit(step, plan)(state, batch)
        plain, plain_loss = plain_step(plain, LOSS)
        np.testing.assert_allclose(loss, plain_loss, rtol=1e-5)
