"""The layouts of all params of a tree, and the notes of the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from jzero.config import ZeroConfig
from jzero.core.types import PyTree
from jzero.layout.given_layouts import base_layouts, mesh_of, state_dim
from jzero.layout.layer_stacks import stack_dims
from jzero.layout.leaf_rule import Frozen, Layout, make_layout, path_keys, whole_below
from jzero.layout.mesh import resolve_mesh
from jzero.layout.param_checks import check_params, check_uneven
from jzero.layout.placement import check_host
from jzero.layout.specs import axis_size, shard_factor


def tree_layouts(
    params: PyTree,
    config: ZeroConfig,
    *,
    mesh: Mesh | None,
    param_specs: PyTree,
    scan_axes: Mapping[str, int | None] | None,
    stacks: Mapping[tuple[str, ...], int | None],
    frozen: Sequence[Frozen | None] | None = None,
) -> tuple[tuple[Layout, ...], Mesh, int, tuple[str, ...]]:
    """The layout of every param, the mesh with Auto axes, `min_shard_bytes` as a number, and notes.

    Args:
      params, config, mesh, param_specs, scan_axes: as `make_plan` takes them.
      stacks: what else is known of stacks of layers; see [Note: what is known of stacks] in `layer_stacks.py`.
      frozen: for each param why it is not trained; None: all are.

    Raises:
      TypeError, ValueError: as `make_plan`.
    """
    mesh, notes = resolve_mesh(mesh_of((param_specs, params)) if mesh is None else mesh, config)
    flat = jax.tree_util.tree_leaves_with_path(params)
    frozen = [None] * len(flat) if frozen is None else frozen
    check_params(params, [f is None for f in frozen])
    given = base_layouts(params, flat, param_specs, mesh, config)
    keys = [path_keys(k) for k, _ in flat]
    shapes = [(k, tuple(np.shape(x))) for k, (_, x) in zip(keys, flat, strict=True)]
    dims, guessed = stack_dims(shapes, scan_axes, stacks)
    rows = list(zip(flat, keys, given, frozen, strict=True))
    least = whole_below(config, [(x, shard_factor(b, mesh), f is None) for (_, x), _, (b, _), f in rows], mesh)
    layouts = [
        make_layout(
            k, x, b, config, mesh, dims.get(name), least, guessed=name in guessed, frozen=f,
            state_dim=state_dim(k, b, state, dims.get(name), config),
        )
        for (k, x), name, (b, state), f in rows
    ]  # fmt: skip
    check_uneven(layouts, config, mesh)
    if config.offload_options is not None and (config.streams or config.params_on_host):
        check_host(mesh, f"ZeroConfig(offload={config.offload_options.tier!r})")
    if axis_size(mesh, config.axes) == 1:
        notes.append(
            f"mesh axis {config.axis!r} has one device: nothing is shared, every stage holds the whole state."
        )
    apart = [x.name for x, (b, state) in zip(layouts, given, strict=True) if state not in (None, b)]
    if apart and not config.row.state:
        notes.append(
            f"optimizer_sharding of {len(apart)} params has no effect: stage {config.stage} splits no optimizer state "
            f"({apart[0]}, ...)."
        )
    several = [x for x in layouts if x.several_dims]
    if several:
        notes.append(
            f"{len(several)} leaves are cut along several dims, so that arrays lie on a mesh over the same devices on "
            f"which {' and '.join(map(repr, config.axes))} is given by its prime factors ({several[0].name}, ...). "
            "Under jax.set_mesh, set plan.array_mesh."
        )
    return tuple(layouts), mesh, least, (*notes, *config.without_effect())
