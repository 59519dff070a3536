"""Optimizer state as it is stored, padded and pinned, and as the wrapped transformation knows it."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import numpy as np

from jzero.core.errors import counted
from jzero.layout.leaf_rule import path_name
from jzero.layout.padding import padded, unpadded
from jzero.layout.placement import on_device
from jzero.sharding import Plan


def pin_state(state, plan: Plan):
    """Every leaf of an optimizer state in its stored shape and layout, scalars included."""
    leaves, tree = jax.tree.flatten(state)
    rows = zip(leaves, plan.state_forms(state), strict=True)
    return jax.tree.unflatten(tree, [pad(x, shape, spec, plan) for x, (spec, shape) in rows])


def cut_state(state, logical, plan: Plan):
    """The reverse of `pin_state`: every leaf in the shape that the wrapped transformation knows, on its shards."""
    leaves, tree = jax.tree.flatten(state)
    shapes = [tuple(x.shape) for x in jax.tree.leaves(logical)]
    rows = zip(leaves, shapes, plan.state_specs(state), strict=True)
    return jax.tree.unflatten(tree, [cut(x, shape, spec, plan) for x, shape, spec in rows])


def check_dtypes(before, after, kept: Iterable[bool]) -> None:
    """Raises TypeError for a leaf that is kept outside of device memory, and that an update gives another dtype."""
    rows = zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), kept, strict=False)
    for (path, old), new, k in rows:
        if k and old.dtype != new.dtype:
            raise TypeError(
                f"jzero: the update gives {path_name(path)} of the optimizer state the dtype {new.dtype}, and tx.init "
                f"made it in {old.dtype}. State outside of device memory keeps its dtype: cast it in init, or in the "
                "update."
            )


def check_state(state, logical, *, where: str) -> None:
    """Raises ValueError unless a state has as many leaves, of as many dims, as `logical`, from its transformation."""
    got, want = ([np.ndim(x) for x in jax.tree.leaves(tree)] for tree in (state, logical))
    if got != want:
        other = "" if len(got) != len(want) else " with other numbers of dims"
        raise ValueError(
            f"{where}: this is not a state of the optimizer: it has {counted(len(got), 'leaf', 'leaves')}, and "
            f"tx.init(params) makes {len(want)}{other}. Pass what tx.init(params) or the last update returned."
        )


def pad(x, shape, spec, plan: Plan):
    """An array in its stored shape and layout: zeros at the end of a dim that the mesh axes do not divide."""
    if tuple(np.shape(x)) != tuple(shape):
        x = padded(plan.constrain(x, spec), shape)
    return plan.constrain(x, spec)


def cut(x, shape, spec, plan: Plan):
    """The reverse of `pad`. Inside a trace the result stays on shards, which may have unequal sizes."""
    if tuple(np.shape(x)) == tuple(shape):
        return x
    return plan.constrain(unpadded(on_device(x), shape), spec)


def align(updates, params, *, where: str) -> list:
    """The leaves of `updates` in the order of `params`; None where a leaf is missing.

    Raises:
      ValueError: the updates are not a tree like the params.
    """
    tree = jax.tree.structure(params)
    try:
        return tree.flatten_up_to(updates)
    except ValueError as error:
        raise ValueError(f"{where}: the updates are not a tree like the params: {error}") from None
