"""A mesh in a form that can be pickled: the numbers of its devices, since JAX's devices cannot be."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh


def to_numbers(mesh: Mesh, *, where: str) -> dict[str, Any]:
    """The axes of a mesh, the ids of its devices and their platform.

    Raises:
      TypeError: this process does not run on the devices: they are of a pod that is only compiled for.
    """
    platform = mesh.devices.flat[0].platform
    try:
        here = set(jax.devices(platform))
    except RuntimeError:
        here = set()
    if not set(mesh.devices.flat) <= here:
        raise TypeError(
            f"{where}: its mesh is of {mesh.devices.flat[0].device_kind} devices that are only compiled for, and these "
            "cannot be pickled. Pickle plan.config and the shapes of the params, and make the plan again."
        )
    ids = np.array([d.id for d in mesh.devices.flat]).reshape(mesh.devices.shape)
    return {"platform": platform, "ids": ids, "names": mesh.axis_names, "types": mesh.axis_types}


def to_mesh(numbers: dict[str, Any]) -> Mesh:
    """The mesh of the devices with these ids.

    Raises:
      ValueError: this process does not have such a device.
    """
    known = {d.id: d for d in jax.devices(numbers["platform"])}
    missing = sorted({int(i) for i in numbers["ids"].flat} - set(known))
    if missing:
        raise ValueError(
            f"jzero.Plan: it was pickled for {numbers['ids'].size} {numbers['platform']} devices, and this process has "
            f"no device {missing[0]}. Make a plan for those that are here: jzero.make_plan(params, config, mesh=mesh)."
        )
    devices = np.vectorize(known.__getitem__, otypes=[object])(numbers["ids"])
    return Mesh(devices, numbers["names"], axis_types=numbers["types"])
