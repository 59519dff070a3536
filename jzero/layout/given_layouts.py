"""The layout that a param brings along: from `param_specs=`, from Flax metadata, or from the array itself."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath

from jzero.config import ZeroConfig
from jzero.core.errors import listing, shown, typed_shape
from jzero.core.nnx_modules import has_variable, is_state, is_variable
from jzero.core.types import PyTree
from jzero.layout.leaf_rule import as_abstract, path_keys
from jzero.layout.specs import (
    P,
    axis_size,
    check_axes,
    entry_axes,
    is_sub_axis,
    make_spec,
    named_axes,
    spec_axes,
    spec_entries,
    whole_mesh,
)


@dataclasses.dataclass(frozen=True)
class Given:
    """The layouts that a param brings along, without the ZeRO axes unless the user named them.

    Attributes:
      spec: of the param; None if nothing says it.
      state: of its optimizer state, if metadata names one: `optimizer_sharding` of an NNX Variable.
    """

    spec: PartitionSpec | None
    state: PartitionSpec | None = None

    def map(self, change: Callable[[PartitionSpec], PartitionSpec]) -> Given:
        """Both layouts, changed if they are known."""
        return Given(*(None if s is None else change(s) for s in (self.spec, self.state)))


def base_layouts(
    params: PyTree, flat: Sequence[tuple[KeyPath, Any]], param_specs: PyTree, mesh: Mesh, config: ZeroConfig
) -> list[tuple[PartitionSpec, PartitionSpec | None]]:
    """The layout that each param brings along, and that of its state or None.

    It comes from `param_specs`, else from Flax metadata, else from the param's NamedSharding; else the param is whole.
    """
    rules = config.logical_axis_rules
    if param_specs is not None:
        given = _given_specs(param_specs, params)
    else:
        boxed = jax.tree.leaves(params, is_leaf=lambda x: metadata_layout(x) is not None)
        given = [s for box in boxed for s in [metadata_layout(box)] for _ in jax.tree.leaves(box)]
    given = [s or Given(None) for s in given]
    names = [a for s in given for spec in (s.spec, s.state) if spec is not None for a in named_axes(spec)]
    targets = {a: [a] for a in names} | {name: [] for name, _ in rules}
    for name, axes in rules:
        targets[name].extend(entry_axes(axes))
    lacking = [a for a in dict.fromkeys(names) if any(x not in mesh.shape for x in targets[a])]
    each = ", ".join([*(f"({json.dumps(a)}, None)" for a in lacking), *(["*rules"] if rules else [])])
    remedy = (
        "For logical names, as in Flax metadata, pass param_specs=jax.P(), which ignores them, or "
        f"logical_axis_rules=[{each}] with the mesh axis of each{', before your rules' if rules else ''}."
    )
    given = [s.map(lambda spec: _with_rules(spec, rules)) for s in given]
    out = []
    for (k, x), s in zip(flat, given, strict=True):
        spec = _array_spec(x, mesh, config.axes) if s.spec is None else s.spec
        out.append(Given(spec, s.state).map(lambda spec, k=k, x=x: _checked_base(k, x, spec, mesh, remedy)))
    return [(s.spec, s.state) for s in out]


def state_dim(
    path: KeyPath, spec: PartitionSpec, state: PartitionSpec | None, scan_dim: int | None, config: ZeroConfig
) -> int | None:
    """The dim over which metadata splits the optimizer state of a param; None if it leaves that to jzero.

    Args:
      path: of the param.
      spec, state: its layout and that of its state, or None.
      scan_dim: the dim of a stack of layers.
      config: its axes are what the state may be split over.

    Raises:
      ValueError: the layout is not that of the param with all ZeRO axes on one dim that is not a stack.
    """
    if state is None or state == spec or not config.row.state:
        return None
    ndim = max(len(spec), len(state))
    rows = zip(spec_entries(spec, ndim), spec_entries(state, ndim), strict=True)
    changed = [(dim, sorted(old), sorted(new)) for dim, (old, new) in enumerate(rows) if sorted(old) != sorted(new)]
    if len(changed) == 1 and changed[0][0] != scan_dim and changed[0][2] == sorted([*changed[0][1], *config.axes]):
        return changed[0][0]
    raise ValueError(
        f"jzero.make_plan: {jax.tree_util.keystr(path)} with {spec} has optimizer_sharding={state}. jzero lays the "
        f"optimizer state out as the param, with {', '.join(map(repr, config.axes))} added to one dim"
        + (f", which is not {scan_dim}, a stack of layers" if scan_dim is not None else "")
        + ". Leave optimizer_sharding out, and jzero chooses that dim."
    )


def _with_rules(spec: PartitionSpec, rules: Sequence[tuple[str, Any]]) -> PartitionSpec:
    """Mesh axes in place of logical names, as `flax.linen.logical_to_mesh_axes` does it."""
    logical = {name for name, _ in rules}
    todo = {i: e for i, e in enumerate(spec) if e in logical}
    out = [None if i in todo else e for i, e in enumerate(spec)]
    for name, axes in rules:
        for i in [i for i, e in todo.items() if e == name]:
            if not set(entry_axes(axes)) & set(named_axes(P(*out))):
                out[i] = axes
                del todo[i]
    return P(*out)


def _given_specs(param_specs: PyTree, params: PyTree) -> list[Given | None]:
    """The layout of every param in `param_specs=`."""

    def is_spec(x: object) -> bool:
        return isinstance(x, (PartitionSpec, NamedSharding, Given)) or x is None

    where = "jzero.make_plan"
    given = _metadata_tree(param_specs, params) if has_variable(param_specs) else param_specs
    odd = [x for x in jax.tree.leaves(given, is_leaf=is_spec) if not is_spec(x)]
    if odd:
        raise TypeError(
            f"{where}: param_specs must be a tree of PartitionSpec or NamedSharding, not {shown(odd[0])}."
        )
    try:
        given = jax.tree.map(lambda spec, sub: jax.tree.map(lambda _: spec, sub), given, params, is_leaf=is_spec)
    except (ValueError, TypeError) as error:
        remedy = " Of an NNX model take nnx.get_partition_spec(nnx.state(model))." if is_state(params) else ""
        raise ValueError(
            f"{where}: param_specs is not a tree like the params, nor the top of one: {error}{remedy}"
        ) from None
    return [x if isinstance(x, Given) else Given(_as_spec(x)) for x in jax.tree.leaves(given, is_leaf=is_spec)]


def _metadata_tree(specs: PyTree, params: PyTree) -> PyTree:
    """A tree like `params` with the layouts in the Variables of another tree, which are found by their paths.

    Args:
      specs: an `nnx.State` or a module with layouts in its Variables, of the whole model, or of the pair of it and its
        optimizer. Only layouts of params are read.
      params: the params, in Variables or not.

    Raises:
      ValueError: it has no layout for some params.
    """
    found = {path_keys(k): v for k, v in jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_variable)}
    flat, tree = jax.tree_util.tree_flatten_with_path(params)
    below: tuple[str, ...] = () if any(path_keys(k) in found for k, _ in flat) else ("0",)
    missing = [(jax.tree_util.keystr(k),) for k, _ in flat if (*below, *path_keys(k)) not in found]
    if missing:
        raise ValueError(
            f"jzero.make_plan: param_specs, a tree of NNX Variables, has no layout for {len(missing)} of {len(flat)} "
            f"params:\n{listing(missing)}\nPass that of the whole model, nnx.get_partition_spec(nnx.state(model))."
        )
    rows = [found[(*below, *path_keys(k))] for k, _ in flat]
    return tree.unflatten([_held(v) if is_variable(v) else v for v in rows])


def _held(variable: Any) -> Any:
    """The layout that a Variable holds as its value, with that of the optimizer state in its metadata."""
    value = variable.get_value()
    return _named(value, variable.get_metadata()) if isinstance(value, (PartitionSpec, NamedSharding)) else value


def metadata_layout(box: Any) -> Given | None:
    """The layout in Flax metadata: of a linen box (`get_partition_spec`) or an NNX Variable (`out_sharding`)."""
    if hasattr(box, "get_partition_spec"):
        return Given(box.get_partition_spec())
    if hasattr(box, "get_metadata"):
        metadata = box.get_metadata()
        names = map(metadata.get, ("out_sharding", "sharding", "sharding_names"))
        found = _named(next(filter(None, names), None), metadata)
        return None if found == Given(None) else found
    return None


def _named(spec: Any, metadata: Mapping[str, Any]) -> Given:
    """A layout and that of the optimizer state in the metadata of a Variable, by its own `sharding_rules`."""
    rules = metadata.get("sharding_rules") or ()
    given = Given(_as_spec(spec), _as_spec(metadata.get("optimizer_sharding")))
    return given.map(lambda found: _with_rules(found, rules))


def _as_spec(given: Any) -> PartitionSpec | None:
    """A layout, in any form that JAX or Flax has for it, as a PartitionSpec."""
    if isinstance(given, NamedSharding):
        return given.spec
    return given if given is None or isinstance(given, PartitionSpec) else P(*given)


def _array_spec(leaf: Any, mesh: Mesh, axes: Sequence[str]) -> PartitionSpec:
    """The layout of an array without the ZeRO axes: a split over those comes from an earlier run, not the model."""
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding) and set(spec_axes(sharding.spec)) <= set(mesh.axis_names):
        return make_spec(
            [tuple(a for a in entry_axes(e) if a not in axes and not is_sub_axis(a)) for e in sharding.spec]
        )
    return P()


def mesh_of(tree: PyTree) -> Mesh | None:
    """The mesh on which arrays or NamedShardings of a tree are split; None if none of them is."""
    for leaf in jax.tree.leaves(tree):
        found = leaf if isinstance(leaf, NamedSharding) else getattr(leaf, "sharding", None)
        if isinstance(found, NamedSharding) and spec_axes(found.spec) and isinstance(found.mesh, Mesh):
            return whole_mesh(found.mesh)
    return None


def _checked_base(path: KeyPath, leaf: Any, spec: PartitionSpec, mesh: Mesh, remedy: str) -> PartitionSpec:
    """The spec in canonical form; refuses names that are not mesh axes, and dims that do not divide."""
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
