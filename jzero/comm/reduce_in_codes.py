"""A sum over devices of which each value travels in 8 bits, or 4 between hosts, and is summed in fp32.

[Note: never a sum of codes]
A collective cannot add codes of different scales. So each device encodes its gradient, a row for every device that
keeps a piece, with one scale per block of a row; an all-to-all brings the rows to where they belong, and each device
decodes and adds what it receives. Scales travel in the message of their codes. A gradient sends as many bytes as a
reduce-scatter of 8 bits would. (Dettmers et al., arXiv 2110.02861, for the blocks; ZeRO++, arXiv 2306.10209, section
3.3, for the all-to-all.)

[Note: the fast links first]
An all-to-all over h hosts of d devices sends d (h - 1) / h rows between hosts where a ring sends one. So it runs axis
by axis, first those within a host, and along an axis that spans hosts first among the devices of a host: of what is
left, a d-th crosses. Each value is then encoded twice. The sum in between is kept in fp32. In which order the axes cut
an array does not matter: with hpZ those within a host are the major ones.

[Note: four bits between hosts]
`reduce_dtype="int4"` is int8 where an exchange stays within a host, and 4 bits where it leaves it: integers from -7 to
7 times a scale. XLA sends an int4 array as one byte per value, so two of them are packed into a byte here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jzero.comm.transport import SCALE, InCodes
from jzero.config import GRADIENT_CODES
from jzero.layout.blocks import Blocks
from jzero.layout.specs import P
from jzero.layout.topology import hosts_along
from jzero.sharding import Plan

INT8, INT4 = GRADIENT_CODES


class Exchange(NamedTuple):
    """One exchange.

    Attributes:
      axis: a mesh axis.
      devices: how many of its devices exchange.
      groups: which do, by their places along the axis; None: all of them.
      between_hosts: they are on several hosts.
    """

    axis: str
    devices: int
    groups: list[list[int]] | None
    between_hosts: bool

    def codes(self, asked: np.dtype) -> np.dtype:
        """The dtype in which values travel: see [Note: four bits between hosts]."""
        return asked if self.between_hosts else INT8

    def message_bytes(self, values: float, plan: Plan) -> float:
        """Bytes of so many values in the codes of the plan, with their scales."""
        width = 0.5 if self.codes(plan.config.reduce_dtype) == INT4 else 1
        return values * (width + SCALE.itemsize / plan.config.quantize_block)


def scatter_in_codes(value: jax.Array, dim: int, axes: Sequence[str], codes: np.dtype, plan: Plan) -> jax.Array:
    """Inside of a `shard_map` over `axes`: this device's piece along `dim` of the sum of all devices' values, in fp32.

    Args:
      value: divisible along `dim`.
      dim: the dim to cut.
      axes: cut it, the major one first.
      codes: the dtype in which values travel.
      plan: gives the mesh, and how many values share a scale.
    """
    found = exchanges(axes, plan)
    parts = [exchange.devices for _, exchange in sorted(found)]
    shape = (*value.shape[:dim], *parts, value.shape[dim] // math.prod(parts), *value.shape[dim + 1 :])
    value, left = jnp.reshape(value, shape), sorted(at for at, _ in found)
    for at, exchange in found:
        value = _exchanged(jnp.moveaxis(value, dim + left.index(at), 0), exchange, exchange.codes(codes), plan)
        left.remove(at)
    return value


def _exchanged(rows: jax.Array, exchange: Exchange, codes: np.dtype, plan: Plan) -> jax.Array:
    """Row j goes to device j; the sum of the rows that come."""
    flat = jnp.reshape(rows, (exchange.devices, -1))
    transport = InCodes(Blocks(flat.shape, 1, plan.config.quantize_block), codes, P(), P(), plan.mesh)
    some, scales = transport.encode(flat)
    some = _packed(some) if codes == INT4 else some
    message = jnp.concatenate([some, _as_bytes(scales)], axis=1)
    # flattened: see `MatrixExchange`
    came = jax.lax.all_to_all(jnp.ravel(message), exchange.axis, 0, 0, axis_index_groups=exchange.groups, tiled=True)
    came = jnp.reshape(came, message.shape)
    some, scales = jnp.split(came, [some.shape[1]], axis=1)
    some = _unpacked(some)[:, : flat.shape[1]] if codes == INT4 else some
    scales = jax.lax.bitcast_convert_type(jnp.reshape(scales, (exchange.devices, -1, SCALE.itemsize)), SCALE)
    return jnp.reshape(transport.decode((some, scales), SCALE).sum(0), rows.shape[1:])


def _packed(codes: jax.Array) -> jax.Array:
    """Codes of 4 bits, `[rows, values]` in int8, as `[rows, half as many]`: the first half of a row in the low bits."""
    codes = jnp.pad(codes, ((0, 0), (0, codes.shape[1] % 2)))
    low, high = jnp.split(codes, 2, axis=1)
    return (high << 4) | (low & 15)


def _unpacked(packed: jax.Array) -> jax.Array:
    """The codes of `_packed`, with the value that fills an odd row."""
    return jnp.concatenate([(packed << 4) >> 4, packed >> 4], axis=1)


def _as_bytes(x: jax.Array) -> jax.Array:
    return jnp.reshape(jax.lax.bitcast_convert_type(x, jnp.int8), (x.shape[0], -1))


def exchanges(axes: Sequence[str], plan: Plan) -> list[tuple[int, Exchange]]:
    """The exchanges along some axes in the order in which they run, each with its place among the pieces of the dim.

    Args:
      axes: cut the dim, the major one first.
      plan: gives the mesh. See [Note: the fast links first].
    """
    found = list(enumerate(exchange for axis in axes for exchange in exchanges_along(plan.array_mesh, axis)))
    return sorted(found, key=lambda row: (row[1].between_hosts, -row[0]))


def within_hosts_first(steps: Sequence[tuple[int, tuple[str, ...]]], plan: Plan) -> list[tuple[int, tuple[str, ...]]]:
    """Dims to scatter, each with its axes, in the order in which their values are exchanged."""
    return sorted(steps, key=lambda step: any(exchange.between_hosts for _, exchange in exchanges(step[1], plan)))


def exchanges_along(mesh: Mesh, axis: str) -> list[Exchange]:
    """The exchanges along an axis, the one between hosts first: see [Note: the fast links first]."""
    size, hosts = mesh.shape[axis], hosts_along(mesh, axis)
    if hosts in (None, 1, size):
        return [Exchange(axis, size, None, between_hosts=hosts != 1)]
    each = size // hosts
    within = [[h * each + i for i in range(each)] for h in range(hosts)]
    between = [[h * each + i for h in range(hosts)] for i in range(each)]
    return [Exchange(axis, hosts, between, between_hosts=True), Exchange(axis, each, within, between_hosts=False)]
