"""What is written without jzero: a plain Flax step, ZeRO by NamedSharding alone, and offload by moving the
whole state.

The benchmarks compare with these. `benchmarks/step.py` says in its note what each stage written by hand is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal
from unittest import mock

import jax
import optax
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from optax.contrib import _muon as muon_module

P = PartitionSpec
MIN_SHARD_BYTES = 16 * 1024
HOST = "pinned_host"


def train_step(
    state: TrainState,
    batch: dict[str, jax.Array],
    constrain: Callable = lambda name, x: x,
    remat: Callable = lambda f: f,
):
    """One update in plain Flax; `constrain` is where hand-written ZeRO says a layout, `remat` what is kept."""

    @remat
    def loss_of(params):
        logits = state.apply_fn({"params": constrain("used", params)}, batch["tokens"][:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean()

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=constrain("grads", grads)), loss


def split_spec(path: Any, leaf: Any, n: int) -> PartitionSpec:
    """The first dim that n divides, but for that of the scan over layers; small leaves stay whole."""
    stacked = any(getattr(k, "key", None) == "layers" for k in path)
    if math.prod(leaf.shape) * leaf.dtype.itemsize >= MIN_SHARD_BYTES:
        for dim in range(stacked, len(leaf.shape)):
            if leaf.shape[dim] % n == 0:
                return P(*[None] * dim, "data")
    return P()


def by_hand(stage: int, create: Callable, mesh: Mesh, *, gathered: Literal["first", "twice"] | None = None):
    """State and jitted step with NamedSharding alone; see the note at the top of `benchmarks/step.py`."""
    shapes = jax.eval_shape(create)
    whole = jax.tree.map(lambda _: NamedSharding(mesh, P()), shapes)
    split = jax.tree_util.tree_map_with_path(
        lambda path, x: NamedSharding(mesh, split_spec(path, x, mesh.size)), shapes
    )
    layout = whole.replace(
        params=(split if stage == 3 else whole).params, opt_state=(split if stage else whole).opt_state
    )
    said = {"grads": (split if stage >= 2 else whole).params} if stage else {}
    said |= {"used": whole.params} if gathered else {}

    def constrain(name, tree):
        return jax.lax.with_sharding_constraint(tree, said[name]) if name in said else tree

    more = {}
    if gathered == "twice":
        keep = lambda primitive, *_, **__: primitive.name != "sharding_constraint"  # noqa: E731
        more["remat"] = functools.partial(jax.checkpoint, policy=keep)
    batch = NamedSharding(mesh, P("data"))
    step = functools.partial(train_step, constrain=constrain, **more)
    shardings = {"in_shardings": (layout, batch), "out_shardings": (layout, NamedSharding(mesh, P()))}
    return jax.jit(create, out_shardings=layout)(), step, shardings


def gathering_matrices(step: Callable, mesh: Mesh) -> Callable:
    """A step with `optax.contrib.muon` whose matrices are gathered once each, before Newton-Schulz.

    Every device then orthogonalizes all of them. Left alone, XLA gathers the shards for every matmul of the loop.
    """
    original = muon_module.orthogonalize_via_newton_schulz

    def whole(x, *args, **kwargs):
        return original(jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P())), *args, **kwargs)

    def run(*args):
        with mock.patch.object(muon_module, "orthogonalize_via_newton_schulz", whole):
            return step(*args)

    return run


def to_host(state):
    """The optimizer state of a train state, or its abstract values, in host memory: the naive way."""

    def move(x):
        if x.size <= 1:
            return x
        sharding = x.sharding.with_memory_kind(HOST)
        if isinstance(x, jax.ShapeDtypeStruct):
            return x.update(sharding=sharding)
        return jax.device_put(x, sharding)

    return state.replace(opt_state=jax.tree.map(move, state.opt_state))


def naive(step: Callable) -> Callable:
    """A train step over such a state: fetch all, update, write all."""

    def naive_step(state, batch):
        spaces = {True: jax.memory.Space.Host, False: jax.memory.Space.Device}
        hosted = jax.tree.map(lambda x: x.size > 1, state.opt_state)
        state = state.replace(opt_state=jax.device_put(state.opt_state, jax.memory.Space.Device))
        state, loss = step(state, batch)
        put = jax.tree.map(lambda x, host: jax.device_put(x, spaces[host]), state.opt_state, hosted)
        return state.replace(opt_state=put), loss

    return naive_step
