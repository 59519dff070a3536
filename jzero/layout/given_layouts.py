"""The layout that a param brings along: from `param_specs=`, from Flax metadata, or from the array itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jzero.config import ZeroConfig
from jzero.core.errors import shown, typed_shape
from jzero.layout.leaf_rule import as_abstract
from jzero.layout.specs import (
    P,
    axis_size,
    check_axes,
    entry_axes,
    is_sub_axis,
    make_spec,
    named_axes,
    spec_axes,
    whole_mesh,
)


def base_specs(params, flat, param_specs, mesh: Mesh, config: ZeroConfig) -> list[PartitionSpec]:
    """The layout that each param brings: `param_specs`, else Flax metadata, else its NamedSharding, else whole."""
    rules = config.logical_axis_rules
    if param_specs is not None:
        specs = _given_specs(param_specs, params)
    else:
        boxed = jax.tree.leaves(params, is_leaf=lambda x: metadata_spec(x) is not None)
        specs = [s for box in boxed for s in [metadata_spec(box)] for _ in jax.tree.leaves(box)]
    specs = [None if s is None else _with_rules(s, rules) for s in specs]
    unknown = dict.fromkeys(a for s in specs if s is not None for a in named_axes(s) if a not in mesh.shape)
    each = ", ".join(f"({json.dumps(a)}, None)" for a in unknown)
    remedy = (
        "For logical names, as in Flax metadata, pass param_specs=jax.P(), which ignores them, or "
        f"logical_axis_rules=[{each}] with the mesh axis of each."
    )
    out = [_array_spec(x, mesh, config.axes) if s is None else s for (_, x), s in zip(flat, specs, strict=True)]
    return [_checked_base(k, x, s, mesh, remedy) for (k, x), s in zip(flat, out, strict=True)]


def _with_rules(spec: PartitionSpec, rules: Sequence[tuple[str, Any]]) -> PartitionSpec:
    """Mesh axes in place of logical names, in the way of `flax.linen.logical_to_mesh_axes`."""
    logical = {name for name, _ in rules}
    todo = {i: e for i, e in enumerate(spec) if e in logical}
    out = [None if i in todo else e for i, e in enumerate(spec)]
    for name, axes in rules:
        for i in [i for i, e in todo.items() if e == name]:
            if not set(entry_axes(axes)) & set(named_axes(P(*out))):
                out[i] = axes
                del todo[i]
    return P(*out)


def _given_specs(param_specs: Any, params: Any) -> list[PartitionSpec | None]:
    """What `param_specs=` says for every param."""

    def is_spec(x):
        return isinstance(x, PartitionSpec) or x is None

    where = "jzero.make_plan"
    odd = [x for x in jax.tree.leaves(param_specs, is_leaf=is_spec) if not is_spec(x)]
    if odd:
        raise TypeError(f"{where}: param_specs must be a tree of PartitionSpec, not {shown(odd[0])}.")
    try:
        given = jax.tree.map(
            lambda spec, sub: jax.tree.map(lambda _: spec, sub), param_specs, params, is_leaf=is_spec
        )
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{where}: param_specs is not a tree like the params, nor the top of one: {error}"
        ) from None
    return jax.tree.leaves(given, is_leaf=is_spec)


def metadata_spec(box) -> PartitionSpec | None:
    """What Flax partitioning metadata says: a linen box (`get_partition_spec`) or an NNX Variable (`sharding`)."""
    if hasattr(box, "get_partition_spec"):
        return box.get_partition_spec()
    if hasattr(box, "get_metadata"):
        names = [box.get_metadata().get(k) for k in ("out_sharding", "sharding", "sharding_names")]
        names = [n for n in names if n]
        return None if not names else names[0] if isinstance(names[0], PartitionSpec) else P(*names[0])
    return None


def _array_spec(leaf, mesh: Mesh, axes: Sequence[str]) -> PartitionSpec:
    """The layout of an array without the ZeRO axes: a split over those is an earlier run's, not the model's."""
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding) and set(spec_axes(sharding.spec)) <= set(mesh.axis_names):
        kept = [[a for a in entry_axes(e) if a not in axes and not is_sub_axis(a)] for e in sharding.spec]
        return make_spec([tuple(e) for e in kept])
    return P()


def mesh_of(tree: Any) -> Mesh | None:
    """The mesh that the arrays of a tree are laid out on, if any of them is split."""
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None)
        if (
            isinstance(sharding, NamedSharding)
            and spec_axes(sharding.spec)
            and isinstance(sharding.mesh, Mesh)
        ):
            return whole_mesh(sharding.mesh)
    return None


def _checked_base(path, leaf, spec: PartitionSpec, mesh: Mesh, remedy: str) -> PartitionSpec:
    """The spec in canonical form; names that are not mesh axes and dims that do not divide are refused."""
    where = f"jzero.make_plan: {jax.tree_util.keystr(path)} {typed_shape(as_abstract(leaf))} with {spec}"
    check_axes(named_axes(spec), mesh, where=where, remedy=remedy)
    if len(spec) > len(np.shape(leaf)):
        raise ValueError(f"{where}: the layout has more dims than the array.")
    for size, entry in zip(np.shape(leaf), spec, strict=False):
        if size % axis_size(mesh, entry_axes(entry)):
            raise ValueError(
                f"{where}: {size} is not divisible by {axis_size(mesh, entry_axes(entry))} ({entry!r})."
            )
    return make_spec([entry_axes(e) for e in spec])
