"""A weight whose shard lies in host memory: how it lies there, what is put off, and where its gradient goes.

[Note: a weight in host memory]
Nothing is computed in host memory. What the program does to such a weight before its use (a cast, a transpose) is put
off until the shard is in device memory, which is where it is gathered: at the use, inside of what the backward pass
runs again. JAX wants the cotangent of an array in host memory there too; two such cotangents would be added by a kernel
that reads host memory, and XLA writes the layers of a scan into a stack in host memory only where nothing, no barrier
either, stands between the copy of a layer and its place. So where a weight enters a function or a region its value and
its gradient part: the value has none, and a `variable` that is never computed stands for its gradient in device memory.
Uses are added and tied there; what leaves is written to host memory at the entry. A region or a scan enters a weight
of its own; with several of them, each has a copy (the same array), whose gradients are added in device memory.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jzero.comm import Comm
from jzero.core import jaxprs
from jzero.core.linear import linear


@dataclasses.dataclass
class Entry:
    """A weight in host memory where it enters a function or a region; see [Note: a weight in host memory].

    Attributes:
      array: with its gradient; the last one to take it takes itself, others a copy.
      lies: its layouts.
      comm: the collectives.
      used: an equation uses it here.
      left: how often it is to be taken: once for all uses here, once for each region.
      variable: what stands for its gradient in device memory, once it is asked for.
    """

    array: Any
    lies: OnHost
    comm: Comm
    used: bool
    left: int
    variable: Any = None

    def take(self) -> Any:
        """The array with its gradient, or a copy."""
        self.left -= 1
        if self.left <= 0:
            return self.array
        comm, spec = self.comm, self.lies.grad
        taken, self.array = linear(
            lambda x: [x, x], lambda *grads: [comm.host.added(grads, spec)], [], [self.array]
        )
        return taken

    def zeros(self) -> Any:
        """The value of the variable, which nothing reads."""
        return jnp.zeros(self.array.shape, self.array.dtype)

    def fetch(self, array: Any) -> Any:
        """It, or a tangent of it, in device memory."""
        return self.comm.host.fetch(array, self.lies.stored)

    def write(self, grad: Any) -> Any:
        """Its gradient, in host memory."""
        return self.comm.host.write(grad, self.lies.grad)

    def ready(self) -> Any:
        """The variable."""
        if self.variable is None:
            (self.variable,) = linear(
                lambda x: [self.zeros()], lambda g: [self.write(g)], [], [self.take()],
                tangent=lambda x: [self.fetch(x)],
            )  # fmt: skip
        return self.variable


@dataclasses.dataclass(frozen=True)
class OnHost:
    """How a weight lies in host memory, and what was put off: see [Note: a weight in host memory].

    Attributes:
      stored, grad: the layouts of the shard and of its gradient there.
      entry: where it entered; None before it did.
      variable: what stands for its gradient, in a part of the program that is given it; else the entry has it.
      steps: equations of one operand.
    """

    stored: PartitionSpec
    grad: PartitionSpec
    entry: Entry | None = None
    variable: Any = None
    steps: tuple[Any, ...] = ()

    def of_use(self) -> Any:
        """What stands for its gradient where an equation uses it."""
        assert self.entry is not None
        return self.entry.ready() if self.variable is None else self.variable

    @property
    def only_casts(self) -> bool:
        """What was put off can be done to a slice as well."""
        return all(eqn.primitive.name in ("convert_element_type", "copy", "stop_gradient") for eqn in self.steps)

    def after_steps(self, shard: Any) -> Any:
        """What was put off, done."""
        for eqn in self.steps:
            (shard,) = jaxprs.bind(eqn, [shard])
        return shard
