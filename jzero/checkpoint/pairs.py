"""Checkpoints of masters that are stored as what their params lack (`update/pairs.py`): as they are, or joined.

A checkpoint has `master_remainder/...` or `master_difference/...` beside `params/...`. A target with fp32 masters, or
with a param in fp32, gets the two joined; a target with the other kind of pairs, or one with pairs that reads fp32
masters, has them split. Params are rounded again in all these cases: see `converted` in `flax/conversion.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jzero.checkpoint import store
from jzero.checkpoint.logical import MASTER, Name, NamedLeaf
from jzero.checkpoint.match import Described, Source
from jzero.core.types import PyTree
from jzero.layout.leaf_rule import path_keys
from jzero.layout.padding import padded, unpadded
from jzero.layout.placement import on_device, put
from jzero.update import remainder
from jzero.update.pairs import DIFFERENCE, PAIRS, REMAINDER
from jzero.update.sharded_update import taken_over

FP32 = np.dtype(np.float32)


def named(kind: str, name: Name) -> Name:
    """The name of the same leaf among the arrays of another kind."""
    return (kind, *name[1:])


def with_masters(stored: Mapping[Name, Described], kept: Collection[Name] = ()) -> dict[Name, Described]:
    """What a checkpoint holds, with a master in place of every rest of a pair but those `kept`."""
    have = {}
    for name, (shape, dtype) in stored.items():
        joins = name[0] in PAIRS and name not in kept
        have[named(MASTER, name) if joins else name] = (shape, FP32 if joins else dtype)
    return have


def as_master(leaf: NamedLeaf) -> NamedLeaf:
    """The fp32 master of a leaf that is the rest of a pair, abstract; any other leaf unchanged."""
    if leaf.name[0] not in PAIRS:
        return leaf
    value = jax.ShapeDtypeStruct(leaf.value.shape, FP32, sharding=leaf.value.sharding)
    return dataclasses.replace(leaf, name=named(MASTER, leaf.name), value=value)


def split_again(values: Mapping[Name, Any], leaves: Iterable[NamedLeaf]) -> dict[Name, Any]:
    """Values read for the leaves of `as_master`, split into pairs; `leaves`: those of the state."""
    found, targets = dict(values), {leaf.name: leaf for leaf in leaves}
    for leaf in targets.values():
        master = found.pop(named(MASTER, leaf.name), None) if leaf.name[0] in PAIRS else None
        if master is not None:
            param = targets[named("params", leaf.name)]
            new, found[leaf.name] = _split(on_device(found[param.name]), on_device(master), leaf.name[0])
            found[param.name] = put(padded(unpadded(new, leaf.shape), param.value.shape), param.value.sharding)
            found[leaf.name] = put(found[leaf.name], leaf.value.sharding)
    return found


@functools.partial(jax.jit, static_argnames="kind")
def _split(param: jax.Array, master: jax.Array, kind: str) -> tuple[jax.Array, jax.Array]:
    """A pair of a master, with what the user has changed in its param before it was saved."""
    return PAIRS[kind].split(taken_over(padded(param, master.shape), master), param.dtype)


def of_pairs(sources: Sequence[Source], joins: Collection[Name]) -> list[Source]:
    """The sources to read from a param and what is stored beside it.

    These are masters stored in pairs, and masters that params are read from: what the user has changed in a param
    since the last update is not in its master. To the masters of both kinds belong the params beside them.

    Args:
      sources: of all leaves.
      joins: the names of what is stored and not read as such.
    """
    pairs = {named(MASTER, name) for name in joins if name[0] in PAIRS}
    pairs |= {s.name for s in sources if s.name[0] == MASTER and s.leaf.name[0] == "params"}
    masters = {s.leaf.name for s in sources if s.name in pairs and s.leaf.name[0] == MASTER}
    return [
        s for s in sources
        if s.name in pairs or (s.leaf.name[0] == "params" and named(MASTER, s.leaf.name) in masters)
    ]  # fmt: skip


def read_pairs(path: Path, tree: PyTree, targets: Mapping[Name, store.Target]) -> dict[Name, Any]:
    """Masters with what is new in their params, by the names of the targets, in their dtypes and layouts."""
    stored = {path_keys(k): x for k, x in jax.tree_util.tree_leaves_with_path(tree)}
    halves: dict[Name, store.Target] = {}
    kinds = (*PAIRS, MASTER)
    rest = {name: next(named(kind, name) for kind in kinds if named(kind, name) in stored) for name in targets}
    for name, target in targets.items():
        for half in (named("params", name), rest[name]):
            halves[half] = _in(target, np.dtype(stored[half].dtype))
    read = store.load(path, tree, halves)
    found = {}
    for name, target in targets.items():
        param, beside = read.pop(named("params", name)), read.pop(rest[name])
        if isinstance(target, store.Numpy):
            found[name] = ON_HOST[rest[name][0]](param, beside).astype(target.dtype)
        else:
            join = _joined(rest[name][0], np.dtype(target.dtype))
            found[name] = put(join(on_device(param), on_device(beside)), target.sharding)
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
    return jax.ShapeDtypeStruct(target.shape, dtype, sharding=target.sharding)


@functools.cache
def _joined(kind: str, dtype: np.dtype):
    join = PAIRS[kind].join if kind in PAIRS else taken_over
    return jax.jit(lambda param, beside: join(param, beside).astype(dtype))


def taken_over_on_host(param: np.ndarray, master: np.ndarray) -> np.ndarray:
    """`taken_over` without a device."""
    return np.where(master.astype(param.dtype) == param, master, param.astype(master.dtype))


def _joined_on_host(param: np.ndarray, rest: np.ndarray) -> np.ndarray:
    """`remainder.join` without a device."""
    upper, more = param.view(np.uint16).astype(np.uint32), rest.astype(np.int32)
    size = upper & 0x7FFF
    more = np.where(((size == 0) & (more < 0)) | ((size == remainder.INFINITY) & (more > 0)), 0, more)
    return ((upper << 16) + more.view(np.uint32)).view(np.float32)


ON_HOST: dict[str, Callable[..., Any]] = {
    MASTER: taken_over_on_host, REMAINDER.name: _joined_on_host, DIFFERENCE.name: DIFFERENCE.join,
}  # fmt: skip
"""By the name of what is stored beside a param: the master of both, without a device."""
