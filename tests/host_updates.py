"""States and optimizers whose update runs outside of the program."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimizer_chains as streamed
from jax.sharding import Mesh
from models import batch, loss_of
from optax import contrib

import jzero

HOST = jzero.Offload(update="host")


LATE = jzero.Offload(update="host", delay=1)


def arrays(params):
    return jax.tree.map(lambda p: p.ndim > 0, params)


def numbers():
    """Momentum scaled by numbers that no chunk has a part of: products of arrays, an index, a product of all values."""

    def scaled(m, g, p):
        first = jnp.argmax(m) / m.size + jnp.vdot(m, p) / m.size + jnp.prod(1 + 1e-3 * g * m)
        return -0.1 * (first + jnp.max(jnp.abs(m))) * m

    def update(grads, state, params):
        state = jax.tree.map(lambda g, m: 0.9 * m + g, grads, state)
        return jax.tree.map(scaled, state, grads, params), state

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


def columns():
    """A few sums over the rows of each matrix, which the user's state keeps, beside moments that it does not."""

    def few(x):
        return jnp.sum(x, 0) if x.ndim == 2 and x.shape[1] <= 16 else jnp.zeros(4)

    def update(grads, state, params=None):
        trace = jax.tree.map(lambda g, m: 0.9 * m + g, grads, state[0])
        few_now = [0.5 * old + few(m) for old, m in zip(state[1], jax.tree.leaves(trace), strict=True)]
        return jax.tree.map(lambda m: -0.1 * m / (1 + jnp.max(few_now[1])), trace), (trace, few_now)

    def init(params):
        return jax.tree.map(jnp.zeros_like, params), [few(p) for p in jax.tree.leaves(params)]

    return optax.GradientTransformation(init, update)


CHAINS = {
    **streamed.CHAINS,
    "sm3": lambda: optax.partition({True: optax.sm3(1e-2), False: optax.sgd(1e-2)}, arrays),
    "dog": lambda: contrib.dog(),
    "dowg": lambda: contrib.dowg(),
    "prodigy": lambda: contrib.prodigy(),
    "mechanize": lambda: contrib.mechanize(optax.adam(1e-2)),
    "numbers": numbers,
    "columns": columns,
    "lbfgs": lambda: optax.lbfgs(1e-2, memory_size=3, linesearch=None),
    "muon": lambda: contrib.muon(1e-2),
    "momentum and noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(1e-2, 0.9)),
    "frozen": lambda: optax.multi_transform(
        {"fast": optax.adam(1e-2), "slow": optax.set_to_zero()}, streamed.labels
    ),
}


def make_gradients():
    """The jitted function of a step: what it returns is all that leaves the program."""

    def gradients(state, batch):
        return jax.value_and_grad(lambda p: loss_of(state.apply_fn, p, batch))(state.params)

    return jax.jit(gradients)


@functools.cache
def gradients_of(plan):
    return make_gradients()


def steps(state, count, grads_fn=None):
    """Some steps of training with the update outside."""
    plan = jzero.plan_of(state)
    for i in range(count):
        _, grads = (grads_fn or gradients_of(plan))(state, plan.place_batch(batch(i)))
        state = state.apply_gradients(grads=grads)
    return state


def run_chain(name, params, devices, grads, stage=2, **fields):
    """A chain's params after some updates by given gradients."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
    plan = jzero.make_plan(params, stage=stage, mesh=mesh, min_shard_bytes=0, **fields)
    tx = jzero.zero(CHAINS[name](), plan)
    params, update = plan.place(params), tx.update if plan.config.updates_outside else jax.jit(tx.update)
    state = tx.init(params)
    for g in grads:
        updates, state = update(g, state, params)
        params = optax.apply_updates(params, updates)
    return params, state, plan
