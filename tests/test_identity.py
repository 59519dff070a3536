"""When two functions are the same: a wrong "same" reuses the program of another optimizer, silently."""

from __future__ import annotations

import dataclasses
import functools

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax

from jzero.identity import same_key

RATE = 1e-3
SCALE = 1.0


def make(rate, decay=0.9):
    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(rate, 10), b1=decay)
    )


def test_transformations_made_by_the_same_code():
    assert same_key(make(1e-3)) == same_key(make(1e-3))
    assert hash(same_key(make(1e-3))) == hash(same_key(make(1e-3)))
    assert same_key(make(1e-3)) != same_key(make(2e-3))
    assert same_key(make(1e-3)) != same_key(make(1e-3, 0.8))
    assert same_key(make(1)) != same_key(make(1.0))
    assert same_key(functools.partial(make, 1.0)) != same_key(functools.partial(make, 2.0))


def test_globals_that_a_function_reads_are_part_of_it(monkeypatch):
    def schedule(count):
        return RATE * helper(count)

    before = same_key(optax.sgd(schedule))
    assert before == same_key(optax.sgd(schedule))
    monkeypatch.setattr("test_identity.RATE", 1e-1)
    assert before != same_key(optax.sgd(schedule))


def helper(count):
    return 1 + 0 * count * SCALE


def test_globals_of_a_function_that_it_calls(monkeypatch):
    before = same_key(helper), same_key(lambda c: helper(c))
    monkeypatch.setattr("test_identity.SCALE", 2.0)
    assert before[0] != same_key(helper)


class Model(nn.Module):
    width: int = 8

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.width)(x) * SCALE


def test_linen_modules_by_class_fields_and_what_their_methods_read(monkeypatch):
    before = same_key(Model().apply)
    assert before == same_key(Model().apply)
    assert before != same_key(Model(16).apply)
    monkeypatch.setattr("test_identity.SCALE", 2.0)
    assert before != same_key(Model().apply)


@dataclasses.dataclass(frozen=True)
class Hidden:
    rate: float = dataclasses.field(compare=False)

    def __call__(self, count):
        return self.rate


def test_frozen_dataclasses_by_every_field_whatever_their_eq_says():
    assert Hidden(1.0) == Hidden(2.0)
    assert same_key(Hidden(1.0)) != same_key(Hidden(2.0))
    assert same_key(Hidden(1.0)) == same_key(Hidden(1.0))


def test_mutable_and_large_values_by_identity():
    held = {"rate": 1.0}
    assert same_key(lambda c: held["rate"]) != same_key(lambda c: {"rate": 1.0}["rate"])

    def read(table):
        return lambda c: table

    assert same_key(read([1])) != same_key(read([1]))
    assert same_key(read(held)) == same_key(read(held))
    small, large = np.ones(3), np.ones(4096)
    assert same_key(read(small)) == same_key(read(np.ones(3)))
    assert same_key(read(large)) != same_key(read(np.ones(4096)))
    assert same_key(read(jnp.ones(3))) == same_key(read(jnp.ones(3)))
