"""Checkpoints and `master_dtype="remainder"`: pairs are stored as they are, and read as fp32 masters where needed.

A checkpoint has `master_remainder/...` beside `params/...`: 4 bytes per value; a param and its fp32 master take 6.
Who asks for a master, or for a param in fp32, gets both joined; a state with remainders reads fp32 masters and splits
them. Params are rounded anew in both cases: see `by_rule` in `flax/conversion.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jzero.checkpoint import store
from jzero.checkpoint.logical import MASTER, REMAINDER, Name, NamedLeaf
from jzero.checkpoint.match import Described, Source
from jzero.core.types import PyTree
from jzero.layout.leaf_rule import path_keys
from jzero.layout.padding import padded, unpadded
from jzero.layout.placement import on_device, put
from jzero.update import remainder

FP32 = np.dtype(np.float32)


def named(kind: str, name: Name) -> Name:
    """The name of the same leaf among the arrays of another kind."""
    return (kind, *name[1:])


def with_masters(have: Mapping[Name, Described]) -> dict[Name, Described]:
    """What a checkpoint holds, with a master in place of every remainder."""
    return {
        named(MASTER, k) if k[0] == REMAINDER else k: (shape, FP32 if k[0] == REMAINDER else dtype)
        for k, (shape, dtype) in have.items()
    }


def as_master(leaf: NamedLeaf) -> NamedLeaf:
    """The fp32 master of a leaf that is a remainder, abstract; any other leaf unchanged."""
    if leaf.name[0] != REMAINDER:
        return leaf
    value = jax.ShapeDtypeStruct(leaf.value.shape, FP32, sharding=leaf.value.sharding)
    return dataclasses.replace(leaf, name=named(MASTER, leaf.name), value=value)


def split_again(values: Mapping[Name, Any], leaves: Iterable[NamedLeaf]) -> dict[Name, Any]:
    """Values that were read for `as_master` as params and remainders; `leaves`: of the state."""
    found, targets = dict(values), {leaf.name: leaf for leaf in leaves}
    for leaf in targets.values():
        master = found.pop(named(MASTER, leaf.name), None) if leaf.name[0] == REMAINDER else None
        if master is not None:
            param = targets[named("params", leaf.name)]
            new, found[leaf.name] = _split(on_device(master))
            found[param.name] = put(padded(unpadded(new, leaf.shape), param.value.shape), param.value.sharding)
            found[leaf.name] = put(found[leaf.name], leaf.value.sharding)
    return found


_split = jax.jit(remainder.split)


def of_pairs(sources: Sequence[Source], have: Mapping[Name, Described]) -> list[Source]:
    """What has to be read from pairs: masters, params that are read as their masters, and the params of masters."""
    pairs = {named(MASTER, name) for name in have if name[0] == REMAINDER}
    masters = {s.leaf.name for s in sources if s.name in pairs and s.leaf.name[0] == MASTER}
    return [
        s for s in sources
        if s.name in pairs or (s.leaf.name[0] == "params" and named(MASTER, s.leaf.name) in masters)
    ]  # fmt: skip


def read_pairs(path: Path, tree: PyTree, targets: Mapping[Name, store.Target]) -> dict[Name, Any]:
    """Masters that are stored as pairs, by the names of the targets, in their dtypes and layouts."""
    halves: dict[Name, store.Target] = {}
    for name, target in targets.items():
        halves[named("params", name)] = _in(target, jnp.dtype(jnp.bfloat16))
        halves[named(REMAINDER, name)] = _in(target, np.dtype(np.int16))
    read = store.load(path, tree, halves)
    found = {}
    for name, target in targets.items():
        pair = read.pop(named("params", name)), read.pop(named(REMAINDER, name))
        found[name] = _joined(np.dtype(target.dtype))(*pair)
        if isinstance(target, store.Numpy):
            found[name] = np.asarray(found[name])
        else:
            found[name] = put(found[name], target.sharding)
    return found


def load(path: Path, tree: PyTree, targets: Mapping[Name, store.Target]) -> dict[Name, Any]:
    """`store.load`, for masters that are stored as pairs too."""
    stored = {path_keys(k) for k, _ in jax.tree_util.tree_leaves_with_path(tree)}
    direct = {name: t for name, t in targets.items() if name in stored}
    pairs = {name: t for name, t in targets.items() if name not in stored}
    found = store.load(path, tree, direct) if direct else {}
    return found | (read_pairs(path, tree, pairs) if pairs else {})


def _in(target: store.Target, dtype: np.dtype) -> store.Target:
    if isinstance(target, store.Numpy):
        return store.Numpy(target.shape, dtype)
    return jax.ShapeDtypeStruct(target.shape, dtype, sharding=target.sharding.with_memory_kind("device"))


@functools.cache
def _joined(dtype: np.dtype):
    return jax.jit(lambda param, rest: remainder.join(param, rest).astype(dtype))
