"""The layout of every leaf of an optimizer state, and of copies of params such as an average of them.

[Note: few values are whole]
A leaf of a few values that is not a copy of a param lies on every device. Its shards would be single numbers, and of
unequal size if nothing divides it: XLA of jaxlib 0.10 then writes `x.at[i].set(v)` (L-BFGS's weights) into the wrong
places.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
from jax.sharding import PartitionSpec

from jzero.core.random_keys import is_key
from jzero.core.types import PyTree, Shaped
from jzero.layout.blocks import blocks_of
from jzero.layout.leaf_rule import Layout, cut_leaf, keyed_shapes
from jzero.layout.specs import P, make_spec, spec_entries

Keys = tuple[str, ...]
K = TypeVar("K")
T = TypeVar("T")
SCALES = "moment_scales"  # the field of `ZeroState`
FEW = 16  # values of a state leaf that is not a copy of a param: it is whole, and stays in device memory


def named_by(keys: tuple[K, ...], params: Mapping[tuple[K, ...], T]) -> Iterator[T]:
    """What is known of the params whose path this one ends with, the longest first. That of a bare array is empty."""
    return (params[keys[i:]] for i in range(len(keys) + 1) if keys[i:] in params)


def state_form(keys: Keys, leaf: Any, plan: Any) -> tuple[PartitionSpec, tuple[int, ...]]:
    """The layout of a leaf of the optimizer state, which may be padded already, and the shape in which it is stored.

    A leaf of the shape of a param, at a path that ends as the param's does, is laid out as that param's moments;
    extra leading dims (a history of params) stay whole.
    """
    shape = tuple(np.shape(leaf))
    if SCALES in keys:
        found = ((x, blocks_of(x, plan)) for x in named_by(keys, plan.by_keys))
        specs = (b.spec(x.state, plan.mesh) for x, b in found if b is not None and b.scales_shape == shape)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None:  # else a param has this name
            return spec, shape
    for x in named_by(keys, plan.by_keys):
        extra = len(shape) - len(x.shape) if x.shape else 0
        if extra >= 0 and shape[extra:] in (x.shape, x.state_shape):
            spec = make_spec([()] * extra + spec_entries(x.state, len(x.shape))) if extra else x.state
            return spec, (*shape[:extra], *x.state_shape)
    return _own_form(leaf, plan)


def _own_form(leaf: Shaped, plan: Any) -> tuple[PartitionSpec, tuple[int, ...]]:
    """The layout and the stored shape of a state leaf that is not a copy of a param, from its shape alone."""
    shape = tuple(np.shape(leaf))
    if math.prod(shape) <= FEW or not plan.config.row.state or is_key(leaf):
        return P(), shape
    rules = (plan.config.axes, plan.config, plan.mesh, max(plan.min_shard_bytes, 1))
    split, *_ = cut_leaf(shape, leaf.dtype, P(), *rules, several=plan.array_mesh is not plan.mesh)
    # one dim padded: the stored shape then gives the same answer as the logical one
    if split.shape != shape:
        split, *_ = cut_leaf(shape, leaf.dtype, P(), *rules, several=False)
    return split.spec, split.shape


def copies(tree: PyTree, params: Mapping[Keys, Layout]) -> list[Layout | None]:
    """For each leaf of a tree the param whose shape it has and whose path its own ends with, else None."""
    return [next((x for x in named_by(k, params) if x.shape == s), None) for k, s in keyed_shapes(tree)]


def stored_copies(leaves: Iterable[tuple[Keys, tuple[int, ...]]], params: Mapping[Keys, Layout]) -> list[Layout | None]:
    """The same for leaves of an optimizer state, by path and shape: they may be padded."""
    return [next((x for x in named_by(k, params) if s in (x.shape, x.state_shape)), None) for k, s in leaves]
