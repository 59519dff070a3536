"""The mesh of a plan: its axes are Auto, and the names that a config uses are among them."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jzero.config import ZeroConfig
from jzero.errors import nearest
from jzero.specs import whole_mesh


def resolve_mesh(mesh: Mesh | None, config: ZeroConfig) -> tuple[Mesh, list[str]]:
    """The mesh with Auto axes that the config's axes are names of, and what to tell about it.

    Raises:
      TypeError: not a `jax.sharding.Mesh`.
      ValueError: an axis the mesh has not; or a mesh with Explicit axes that is also the context's mesh.
    """
    if mesh is None:
        mesh = Mesh(np.array(jax.devices()).reshape([-1] + [1] * (len(config.axes) - 1)), config.axes)
    if not isinstance(mesh, Mesh):
        raise TypeError(f"jzero: mesh must be a jax.sharding.Mesh, not {type(mesh).__name__}.")
    mesh = whole_mesh(mesh)  # that of arrays which an earlier plan laid out
    for name in dict.fromkeys(config.axes + config.batch_axes + config.param_axes):
        if name not in mesh.axis_names:
            shown = ", ".join(f"{k!r}: {v}" for k, v in mesh.shape.items())
            raise ValueError(
                f"jzero: axis {name!r} is not in the mesh {{{shown}}}.{nearest(name, mesh.axis_names)} "
                "Pass axis= one of its names, or another mesh."
            )
    if all(t == AxisType.Auto for t in mesh.axis_types):
        return mesh, []
    check_context_mesh()
    note = "the mesh has Explicit axes; arrays are laid out on a mesh with Auto axes over the same devices."
    return Mesh(mesh.devices, mesh.axis_names), [note]


def check_context_mesh() -> None:
    """Raises ValueError where `jax.set_mesh` has made axes Explicit: constraints would be types there."""
    context = jax.sharding.get_abstract_mesh()
    explicit = [
        n for n, t in zip(context.axis_names, context.axis_types, strict=True) if t == AxisType.Explicit
    ]
    if explicit:
        raise ValueError(
            f"jzero: the context mesh (jax.set_mesh) has Explicit axes {explicit}; jzero needs Auto axes, where "
            "layouts are constraints and the model stays as it is. Make it with jax.make_mesh(shape, names, "
            "axis_types=(jax.sharding.AxisType.Auto,) * len(names)), or leave jax.set_mesh out."
        )


def in_shard_map() -> bool:
    """True inside of a `jax.shard_map`, where layouts along its axes are no wish any more."""
    return jax.sharding.AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types
