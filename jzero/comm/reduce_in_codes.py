"""A sum over devices of which each value travels in 8 bits, and is summed in fp32.

[Note: never a sum of codes]
A collective cannot add codes of different scales. So each device encodes its gradient, a row for every device that
keeps a piece, with one scale per block of a row; an all-to-all brings the rows to where they belong, and each device
decodes and adds what it receives. Scales travel in the message of their codes. A gradient sends as many bytes as a
reduce-scatter of 8 bits would. (Dettmers et al., arXiv 2110.02861, for the blocks; ZeRO++, arXiv 2306.10209, section
3.3, for the all-to-all.)

[Note: the fast links first]
An all-to-all over h hosts of d devices sends d (h - 1) / h rows between hosts where a ring sends one. So it runs axis
by axis, the innermost first, and along an axis that spans hosts first among the devices of a host: of what is left, a
d-th crosses. Each value is then encoded twice. The sum in between is kept in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jzero.comm.transport import SCALE, InCodes
from jzero.layout.blocks import Blocks
from jzero.layout.specs import P
from jzero.layout.topology import hosts_along
from jzero.sharding import Plan

CODES = (np.dtype(np.int8),)
"""The values of `reduce_dtype` that are codes."""
Hop = tuple[str, int, list[list[int]] | None]
"""A mesh axis, how many of its devices exchange, and which do; None: all of them."""


def scatter_in_codes(value: jax.Array, dim: int, axes: Sequence[str], codes: np.dtype, plan: Plan) -> jax.Array:
    """Inside of a `shard_map` over `axes`: this device's piece along `dim` of the sum of all devices' values, in fp32.

    Args:
      value: divisible along `dim`.
      dim: the dim to cut.
      axes: cut it, the major one first.
      codes: the dtype in which values travel.
      plan: gives the mesh, and how many values share a scale.
    """
    found = [hop for axis in axes for hop in hops(plan.array_mesh, axis)]
    parts = [n for _, n, _ in found]
    shape = (*value.shape[:dim], *parts, value.shape[dim] // math.prod(parts), *value.shape[dim + 1 :])
    value = jnp.reshape(value, shape)
    for at in reversed(range(len(found))):
        value = _exchanged(jnp.moveaxis(value, dim + at, 0), found[at], codes, plan)
    return value


def _exchanged(rows: jax.Array, hop: Hop, codes: np.dtype, plan: Plan) -> jax.Array:
    """Row j goes to device j; the sum of the rows that come."""
    axis, devices, groups = hop
    flat = jnp.reshape(rows, (devices, -1))
    transport = InCodes(Blocks(flat.shape, 1, plan.config.quantize_block), codes, P(), P(), plan.mesh)
    message = jnp.concatenate([_as_bytes(x) for x in transport.encode(flat)], axis=1)
    length = message.shape[1]
    # flattened: see `MatrixExchange`
    came = jax.lax.all_to_all(jnp.ravel(message), axis, 0, 0, axis_index_groups=groups, tiled=True)
    came = jnp.reshape(came, (devices, length))
    some, scales = jnp.split(came, [flat.shape[1]], axis=1)
    scales = jax.lax.bitcast_convert_type(jnp.reshape(scales, (devices, -1, SCALE.itemsize)), SCALE)
    return jnp.reshape(transport.decode((some, scales), SCALE).sum(0), rows.shape[1:])


def message_bytes(values: float, plan: Plan) -> float:
    """Bytes of so many values in codes, with their scales."""
    return values * (1 + SCALE.itemsize / plan.config.quantize_block)


def _as_bytes(x: jax.Array) -> jax.Array:
    return jnp.reshape(jax.lax.bitcast_convert_type(x, jnp.int8), (x.shape[0], -1))


def hops(mesh: Mesh, axis: str) -> list[Hop]:
    """The exchanges along an axis, the one between hosts first: see [Note: the fast links first]."""
    size, hosts = mesh.shape[axis], hosts_along(mesh, axis)
    if hosts in (None, 1, size):
        return [(axis, size, None)]
    each = size // hosts
    within = [[h * each + i for i in range(each)] for h in range(hosts)]
    between = [[h * each + i for h in range(hosts)] for i in range(each)]
    return [(axis, hosts, between), (axis, each, within)]
