"""Checkpoints and `moment_dtype="int8"`: codes and scales are stored as they are, and read as values where needed.

A checkpoint has `moment_scales/...` beside the codes at `opt_state/...`: 1.02 bytes per value. Blocks follow from the
two shapes. A target with the same blocks gets both unchanged. A leaf that only one of two plans quantizes is decoded or
quantized; with `cast=True` this holds too for a target without 8-bit moments, for a checkpoint without them, and for
blocks of another size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jzero.checkpoint import pairs, store
from jzero.checkpoint.logical import SCALES, Name, NamedLeaf, even
from jzero.checkpoint.match import Described
from jzero.core.types import PyTree
from jzero.layout.blocks import Blocks
from jzero.layout.leaf_rule import path_keys
from jzero.layout.padding import padded
from jzero.layout.placement import on_device, put
from jzero.layout.specs import whole_mesh
from jzero.optim import is_wrapped
from jzero.update.int8_moments import BlockArray, quantize

FP32, INT8 = np.dtype(np.float32), np.dtype(np.int8)


def _scales(name: Name) -> Name:
    """The name of the scales of a moment."""
    return (SCALES, *name[1:])


def as_values(leaves: Sequence[NamedLeaf], stored: Mapping[Name, Described], *, convert: bool) -> list[NamedLeaf]:
    """The leaves to read: an 8-bit moment as values, without its scales, unless the checkpoint has the same blocks.

    Without `convert`, an 8-bit moment that is stored wide stays as it is, and does not match.
    """
    targets, found = {leaf.name: leaf for leaf in leaves}, []
    for leaf in leaves:
        kind, name = leaf.name[0], leaf.name
        moment = ("opt_state", *name[1:]) if kind == SCALES else name
        scales = targets.get(_scales(moment)) if kind in (SCALES, "opt_state") else None
        held = stored.get(_scales(moment))
        as_it_is = scales is None or (held is not None and held[0] == scales.shape)
        if as_it_is or (kind == "opt_state" and held is None and not convert):
            found.append(leaf)
        elif kind == "opt_state":
            dtype = stored[name][1] if held is None and name in stored else FP32
            value = jax.ShapeDtypeStruct(leaf.value.shape, dtype, sharding=leaf.value.sharding)
            found.append(dataclasses.replace(leaf, value=value))
    return found


def with_values(
    stored: Mapping[Name, Described], leaves: Sequence[NamedLeaf], *, convert: bool
) -> dict[Name, Described]:
    """What a checkpoint holds, with values in place of codes whose scales are not among the leaves to read.

    Without `convert`, codes keep their dtype, and match nothing else.
    """
    have, targets = {}, {leaf.name: leaf for leaf in leaves}
    for name, (shape, dtype) in stored.items():
        if name[0] == SCALES and name not in targets:
            continue
        if name[0] == "opt_state" and _scales(name) in stored and _scales(name) not in targets:
            values = targets[name].value.dtype if name in targets else FP32
            dtype = values if convert else dtype
        have[name] = (shape, np.dtype(dtype))
    return have


def same_policy(
    leaves: Sequence[NamedLeaf], stored: Mapping[Name, Described], tx: optax.GradientTransformation | None
) -> bool:
    """Both sides have moments in 8 bits and blocks of one size: only the plans say which leaves stay wide.

    Args:
      leaves: of the target.
      stored: what the checkpoint holds.
      tx: the transformation of the target.
    """
    if not is_wrapped(tx) or tx.init.plan.config.moment_dtype != INT8:
        return False
    size = tx.init.plan.config.quantize_block
    coded = [leaf for leaf in leaves if leaf.name[0] == "opt_state" and _scales(leaf.name) in stored]
    shapes = [(leaf.shape, stored[_scales(leaf.name)][0]) for leaf in coded]
    return bool(shapes) and all(Blocks(x, len(scales) - 1, size).scales_shape == scales for x, scales in shapes)


def load(path: Path, tree: PyTree, targets: Mapping[Name, store.Target]) -> dict[Name, Any]:
    """`pairs.load`, with the values of moments whose codes are stored, for targets of another dtype than int8."""
    stored = {path_keys(k): x for k, x in jax.tree_util.tree_leaves_with_path(tree)}
    coded = {
        name: t for name, t in targets.items()
        if name[0] == "opt_state" and _scales(name) in stored and np.dtype(t.dtype) != INT8
    }  # fmt: skip
    direct = {name: t for name, t in targets.items() if name not in coded}
    halves: dict[Name, store.Target] = {}
    blocks = {}
    for name, t in coded.items():
        shape = tuple(stored[name].shape)
        blocks[name] = Blocks.between(shape, tuple(stored[_scales(name)].shape))
        halves[name] = _in(t, shape, INT8)
        halves[_scales(name)] = _in(t, blocks[name].scales_shape, FP32, whole=True)
    read = pairs.load(path, tree, {**direct, **halves})
    for name, t in coded.items():
        codes, scales = read.pop(name), read.pop(_scales(name))
        if isinstance(t, store.Numpy):
            with jax.default_device(jax.local_devices(backend="cpu")[0]):
                read[name] = np.asarray(BlockArray(codes, scales, blocks[name]).wide(), t.dtype)
        else:
            wide = BlockArray(codes, scales, blocks[name]).wide().astype(t.dtype)
            read[name] = put(padded(wide, t.shape), t.sharding)
    return read


def quantized_again(values: Mapping[Name, Any], leaves: Iterable[NamedLeaf]) -> dict[Name, Any]:
    """Values read for the leaves of `as_values`, with the codes and scales of moments; `leaves`: of the state."""
    found, targets = dict(values), {leaf.name: leaf for leaf in leaves}
    for name, leaf in targets.items():
        moment = ("opt_state", *name[1:])
        if name[0] != SCALES or found[moment].dtype == INT8:
            continue
        codes, scales = quantize(on_device(found[moment]), Blocks.between(targets[moment].shape, leaf.shape))
        found[moment] = put(codes, targets[moment].value.sharding)
        found[name] = put(scales, leaf.value.sharding)
    return found


def _in(target: store.Target, shape: tuple[int, ...], dtype: np.dtype, whole: bool = False) -> store.Target:
    """A target for a part of what another target is made of."""
    if isinstance(target, store.Numpy):
        return store.Numpy(shape, dtype)
    sharding: Any = target.sharding
    if isinstance(sharding, NamedSharding):
        spec = PartitionSpec() if whole else sharding.spec
        sharding = NamedSharding(*even(shape, spec, whole_mesh(sharding.mesh)))
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)
