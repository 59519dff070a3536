"""An NNX module with scanned and plain layers, sharded, its loss, and its values."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jzero

ROWS = 16


class Layer(nnx.Module):
    def __init__(self, dim, rngs, dropout, **kw):
        self.norm = nnx.LayerNorm(dim, rngs=rngs, **kw)
        self.up, self.down = (
            nnx.Linear(dim, 4 * dim, rngs=rngs, **kw),
            nnx.Linear(4 * dim, dim, rngs=rngs, **kw),
        )
        self.drop = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x):
        return x + self.drop(self.down(nnx.gelu(self.up(self.norm(x)))))


class Net(nnx.Module):
    """Layers in a list or stacked, with BatchNorm (statistics) and dropout (counts of keys)."""

    def __init__(self, kind, dim, rngs, layers=3, dropout=0.3, **kw):
        self.kind = kind
        self.first = nnx.Linear(dim, dim, rngs=rngs, use_bias=False, **kw)
        self.norm = nnx.BatchNorm(dim, rngs=rngs, **kw)
        make = functools.partial(Layer, dim, dropout=dropout, **kw)
        stacked = nnx.split_rngs(splits=layers)(nnx.vmap(make, in_axes=0, out_axes=0))
        self.layers = stacked(rngs) if "scan" in kind else nnx.List([make(rngs) for _ in range(layers)])
        self.last = nnx.Linear(dim, dim, rngs=rngs, **kw)
        if "tied" in kind:
            self.last.kernel = self.first.kernel

    def __call__(self, x):
        x = nnx.gelu(self.norm(self.first(x)))
        for _ in range(1 + ("cond" in self.kind)):  # the second time through weights that `cond` has returned
            x = self.run(x)
        return self.last(x)

    def run(self, x):
        def one(layer, x):
            return layer(x)

        if "remat" in self.kind:
            one = nnx.remat(one, prevent_cse="scan" not in self.kind)
        if "cond" in self.kind:
            run, one = one, lambda layer, x: nnx.cond(x.sum() < 1e6, run, lambda layer, x: x, layer, x)
        if isinstance(self.layers, Layer):
            scan = nnx.scan(lambda x, layer: one(layer, x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            return scan(x, self.layers)
        for layer in self.layers:
            x = one(layer, x)
        return x


def create(kind, dim=32, **kw):
    model = Net(kind, dim, nnx.Rngs(0, dropout=1), **kw)
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def data(seed=0, dim=32):
    return np.random.default_rng(seed).standard_normal((ROWS, dim), dtype=np.float32)


def loss_of(model, x):
    return (model(x).astype(jnp.float32) ** 2).mean()


def values(tree):
    """An NNX state, or the state of a module, as a plain tree."""
    return nnx.as_pure(nnx.state(tree) if isinstance(tree, nnx.Module) else tree)


def sharded(kind, mesh, **fields):
    pair = jzero.shard(create(kind), stage=3, mesh=mesh, min_shard_bytes=0, **fields)
    return (*pair, jzero.plan_of(pair))
