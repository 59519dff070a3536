"""A loss that advances a random number generator of its own, as EasyLM's do, is as good as without jzero."""

from __future__ import annotations

import collections

import jax
import jax.numpy as jnp
import pytest

import jzero

DIM = 24
PARAMS = {"up": jnp.full((DIM, 40), 0.1), "down": jnp.full((40, DIM), 0.05)}
X = jnp.linspace(-1, 1, 16 * DIM).reshape(16, DIM)


class JaxRNG:
    """EasyLM's: a key is split off, the rest is kept."""

    def __init__(self, rng):
        self.rng = rng

    def __call__(self):
        self.rng, key = jax.random.split(self.rng)
        return key


def from_object(rng):
    draw = JaxRNG(rng)
    return draw, lambda: draw.rng


def from_variable(rng):
    def draw():
        nonlocal rng
        rng, key = jax.random.split(rng)
        return key

    return draw, lambda: rng


def from_tuple_in_a_mapping(rng):
    held = {"state": (0, rng)}

    def draw():
        count, key = held["state"]
        held["state"] = count + 1, jax.random.split(key)[0]
        return jax.random.fold_in(key, count)

    return draw, lambda: held["state"][1]


class Sequence:
    """Haiku's: keys are made ahead, in a queue, by an object without a `__dict__`."""

    __slots__ = ("ahead", "key")

    def __init__(self, rng):
        self.key, self.ahead = rng, collections.deque()

    def __next__(self):
        if not self.ahead:
            self.key, *some = jax.random.split(self.key, 4)
            self.ahead.extend(some)
        return self.ahead.popleft()


def from_slots(rng):
    held = Sequence(rng)
    return (lambda: next(held)), lambda: jnp.stack([held.key, *held.ahead])


def step(params, rng, x, make, plan=None, **how):
    draw, rest = make(rng)

    def loss(params, x):
        h = jnp.tanh(x @ params["up"])
        h = h * jax.random.bernoulli(draw(), 0.5, h.shape) * jax.random.uniform(draw())
        return jnp.mean((h @ params["down"] - x) ** 2)

    if how:
        return jzero.value_and_grad(loss, plan, **how)(params, x)
    out = jax.value_and_grad(loss if plan is None else jzero.gather_on_use(loss, plan))(params, x)
    return out, jax.random.key_data(rest())


CASES = [(3, from_object), (1, from_object), (3, from_variable), (3, from_tuple_in_a_mapping), (3, from_slots)]


@pytest.mark.parametrize(("stage", "make"), CASES)
def test_the_generator_advances_as_without_jzero(stage, make, mesh):
    plan = jzero.make_plan(PARAMS, stage=stage, mesh=mesh, min_shard_bytes=0)
    jitted = jax.jit(step, static_argnums=(3, 4))
    (loss, grads), rest = jitted(plan.place(PARAMS), jax.random.key(7), plan.place_batch(X), make, plan)
    (wanted, wanted_grads), wanted_rest = jitted(PARAMS, jax.random.key(7), X, make)
    assert rest.tolist() == wanted_rest.tolist()
    assert float(loss) == pytest.approx(float(wanted), rel=1e-6)
    for g, w in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted_grads), strict=True):
        assert jnp.allclose(g, w, atol=1e-7)


@pytest.mark.parametrize("rng", [jax.random.key, jax.random.PRNGKey])
def test_micro_batches_say_what_to_draw_where(rng, mesh):
    plan = jzero.make_plan(PARAMS, stage=2, mesh=mesh, min_shard_bytes=0)
    sentence = r"draws from JaxRNG.rng and changes it.*Draw one key before the loss.*rng_argnums=2"
    with pytest.raises(ValueError, match=sentence):
        step(plan.place(PARAMS), rng(7), plan.place_batch(X), from_object, plan, accumulate=2)
