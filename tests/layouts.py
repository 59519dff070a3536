"""A state of odd shapes, the layouts that checkpoints are moved between, and comparing to the bit."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import Mesh
from models import is_key

import jzero
from jzero.optim import unwrap

P = jax.P
SHAPES = {
    "embed": (517, 33),  # padded wherever it is split
    "conv": (3, 3, 6, 4),  # on 8 devices split over two dims
    "kernel": (24, 40),
    "heads": (20, 4, 11),
    "bias": (11,),
    "scale": (),
}


def mesh_of(n, **axes):
    devices = np.array(jax.devices()[:n])
    return Mesh(devices.reshape(tuple(axes.values())) if axes else devices, tuple(axes) or ("data",))


LAYOUTS = {
    "stage 0": lambda: {"stage": 0, "mesh": mesh_of(8)},
    "stage 1": lambda: {"stage": 1, "mesh": mesh_of(8)},
    "stage 2": lambda: {"stage": 2, "mesh": mesh_of(8)},
    "stage 3": lambda: {"stage": 3, "mesh": mesh_of(8)},
    "5 devices": lambda: {"stage": 3, "mesh": mesh_of(5)},
    "4 devices": lambda: {"stage": 2, "mesh": mesh_of(4)},
    "1 device": lambda: {"stage": 1, "mesh": mesh_of(1)},
    "replicas": lambda: {
        "stage": 3, "mesh": mesh_of(8, replica=2, data=4), "axis": "data", "batch_axis": ("replica", "data")
    },
    "params within the node": lambda: {
        "stage": 3, "mesh": mesh_of(8, replica=2, data=4), "axis": ("replica", "data"), "param_axis": "data"
    },
    "model axis": lambda: {
        "stage": 2, "mesh": mesh_of(8, model=2, data=4), "param_specs": model_specs()
    },
    "host": lambda: {"stage": 2, "mesh": mesh_of(8), "offload": "host"},
    "host of 5 devices": lambda: {"stage": 3, "mesh": mesh_of(5), "offload": "host"},
    "uneven leaves whole": lambda: {"stage": 2, "mesh": mesh_of(8), "uneven": "replicate"},
}  # fmt: skip


def model_specs():
    split = {"kernel": P(None, "model"), "conv": P(None, None, "model")}
    return {k: split.get(k, P()) for k in SHAPES}


ADAMW = optax.adamw(1e-2)


def create(tx=None, dtype=jnp.float32):
    """A TrainState of SHAPES; no model, so that nothing but the updates is compiled."""
    params = {k: jnp.full(s, 0.5, dtype) for k, s in SHAPES.items()}
    return TrainState.create(apply_fn=None, params=params, tx=ADAMW if tx is None else tx)


def shard(state, layout, **fields):
    return jzero.shard(state, min_shard_bytes=0, **LAYOUTS[layout](), **fields)


def abstract(layout, tx=None, dtype=jnp.float32):
    return jzero.abstract(functools.partial(create, tx, dtype), min_shard_bytes=0, **LAYOUTS[layout]())


def logical_shapes(state):
    """The shapes of the optimizer state as optax makes them, masters after them."""
    inner = jax.eval_shape(unwrap(state.tx).init, state.params)
    masters = state.opt_state.master if hasattr(state.opt_state, "master") else {}
    return [x.shape for x in jax.tree.leaves(inner)] + [
        state.params[k].shape for k in sorted(masters) if masters[k] is not None
    ]


def scrambled(state, seed=0):
    """Every leaf of params, optimizer state and step random, by its place in the tree; the padding is zero."""
    leaves, tree = jax.tree.flatten((state.params, state.step, state.opt_state))
    shapes = [x.shape for x in jax.tree.leaves(state.params)] + [()] + logical_shapes(state)
    made = [_random(x, shape, [seed, i]) for i, (x, shape) in enumerate(zip(leaves, shapes, strict=True))]
    params, step, opt_state = tree.unflatten(made)
    return state.replace(params=params, step=step, opt_state=opt_state)


def _random(x, shape, seed):
    rng = np.random.default_rng(seed)
    if jnp.issubdtype(x.dtype, jnp.floating):
        value = np.asarray(rng.standard_normal(shape).astype(np.float32), x.dtype)
    else:
        value = np.asarray(
            rng.integers(0, 2, shape) if x.dtype == bool else rng.integers(1, 99, shape), x.dtype
        )
    padded = np.zeros(x.shape, x.dtype)
    padded[tuple(map(slice, shape))] = value
    return jax.device_put(padded, x.sharding)


def logical_values(state):
    """Params, step, optimizer state and masters as numpy arrays without padding."""
    leaves = jax.tree.leaves((state.params, state.step, state.opt_state))
    shapes = [x.shape for x in jax.tree.leaves(state.params)] + [()] + logical_shapes(state)
    return [np.asarray(x)[tuple(map(slice, s))] for x, s in zip(leaves, shapes, strict=True)]


def bits(x):
    x = np.asarray(jax.random.key_data(x) if is_key(x) else x)
    return x.dtype, x.shape, x.tobytes()


def assert_same(a, b):
    """Two trees (or lists) of arrays are equal to the bit, dtype and shape included."""
    a, b = jax.tree.leaves(a), jax.tree.leaves(b)
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert bits(x) == bits(y)


def assert_laid_out_like(state, like):
    """Every leaf lies where the target says, memory kind included."""
    a, b = jax.tree.leaves(state), jax.tree.leaves(like)
    assert jax.tree.structure(state) == jax.tree.structure(like)
    for x, y in zip(a, b, strict=True):
        assert (x.shape, x.dtype, x.sharding) == (y.shape, y.dtype, y.sharding)
