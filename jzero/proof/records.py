"""The parts of a report: collectives, memory and bytes on the wire, as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jzero.proof.places import Move


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective(Move):
    """Equal collectives at one place of the program.

    Attributes:
      op: `all-gather`, `reduce-scatter`, `all-reduce`, `all-to-all`, `collective-permute`, ...
      count: how many of them there are.
      dtype: of what is sent, as XLA names it; `bf16+f32` when combined tensors differ.
      bytes: the full tensor of one execution of one of them.
      wire_bytes: what one device sends in one execution of one of them (ring).
      axes: mesh axes along which the devices of a group differ; empty without a mesh.
      group_size: devices in a group; smaller than the axes' product when only part of an axis joins.
      trips: executions per step of each.
      asynchronous: True when they are started and awaited apart, whether or not anything stands between; None where the
        program does not say whether it waits.
      compute_ops, compute_bytes: summed over all of them.
      sliced: True for an all-reduce of which each device uses its own slice alone: an unfused reduce-scatter.
      parts: tensors that XLA combined into each.
      computation: HLO computation in which they stand; `entry` for the one that runs once.
      names: of the instructions.
      in_branch: True in a branch of a conditional: they are counted, whichever branch a step takes.
      hidden: the part of their time on the wire that runs beside arithmetic, by the model of `timeline.py`; None where
        the rates of the devices are not known.
    """

    op: str
    count: int
    dtype: str
    wire_bytes: int
    axes: tuple[str, ...]
    group_size: int
    sliced: bool
    parts: int
    names: tuple[str, ...]
    in_branch: bool = False
    hidden: float | None = None

    @property
    def overlapped(self) -> bool:
        """True when compute stands between the start and the done of every one of them."""
        return bool(self.asynchronous) and self.compute_ops > 0

    @property
    def total_wire_bytes(self) -> int:
        """Bytes that one device sends in a step for all of them: `wire_bytes` x `count` x `trips`."""
        return self.wire_bytes * self.count * self.trips


@dataclasses.dataclass(frozen=True)
class Overlap:
    """What hides behind arithmetic, by the model of `timeline.py`, which no GPU has timed.

    Attributes:
      hidden: the part of the bytes on the wire that travels while the program does not wait for them.
      waits: seconds in which a step waits for collectives.
      rates: the machine that is modelled, in words.
    """

    hidden: float
    waits: float
    rates: str


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes per device, from the compiler's buffer assignment; `host_` in pinned host memory.

    Attributes:
      arguments, outputs, aliased, temp: in device memory; `aliased`: outputs that reuse a donated argument.
      peak: the compiler's own figure, host bytes included in it; None where it gives none, and on the CPU, where
        its figure omits temp.
      params, opt_state, rest: the device bytes of the arguments, None without a plan.
    """

    arguments: int
    outputs: int
    aliased: int
    temp: int
    peak: int | None
    host_arguments: int
    host_outputs: int
    host_aliased: int
    host_temp: int
    params: int | None = None
    opt_state: int | None = None
    rest: int | None = None

    @property
    def total(self) -> int:
        """Device bytes while the step runs: arguments + outputs - aliased + temp."""
        return self.arguments + self.outputs - self.aliased + self.temp

    @property
    def host_total(self) -> int:
        """The same in pinned host memory."""
        return self.host_arguments + self.host_outputs - self.host_aliased + self.host_temp


@dataclasses.dataclass(frozen=True)
class Wire:
    """Bytes that one device sends in a step.

    Attributes:
      by_op, by_axis, by_phase: the total split by kind of collective, by mesh axes (`data+model` when several
        join, `?` without a mesh) and by phase (`?` where the metadata does not say).
      psi_bytes: 1 Psi, (N-1)/N x the bytes of all params that the step trains; None without a plan.
    """

    by_op: Mapping[str, int]
    by_axis: Mapping[str, int]
    by_phase: Mapping[str, int]
    psi_bytes: int | None

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.by_op.values())

    @property
    def psi(self) -> float | None:
        """The total in multiples of Psi, None without a plan."""
        return self.total / self.psi_bytes if self.psi_bytes else None
