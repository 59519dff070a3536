"""A weight whose shard lies in host memory: how it lies there, what is put off, and where its gradient goes.

[Note: a weight in host memory]
Nothing is computed in host memory. What the program does to such a weight before its use (a cast, a transpose) is put
off until the shard is in device memory, which is where it is gathered: at the use, inside of what the backward pass
runs again. JAX wants the cotangent of an array in host memory there too. A kernel that reads host memory would add two
such cotangents, and XLA writes the layers of a scan into a stack in host memory only where nothing, not even a barrier,
stands between the copy of a layer and its place. So where a weight enters a function or a region, its value and
its gradient are separated: the value has no gradient, and a `variable` that is never computed stands for the gradient
in device memory. The gradients of the uses are added and tied there, and the sum is written to host memory at the
entry. Each region or scan takes the array from the entry; if there are several, each takes a copy (the same array), and
the gradients of the copies are added in device memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jzero.comm import Comm
from jzero.core import jaxprs
from jzero.core.carriers import carried, value_of
from jzero.core.linear import linear
from jzero.core.types import JaxprEqn, Shaped
from jzero.gather.source import DEVICE, Carrier, ShardSource
from jzero.layout.leaf_rule import Layout
from jzero.layout.placement import HOST, memory_kind

if TYPE_CHECKING:
    from jzero.gather.sharded_weight import Weight


@dataclasses.dataclass
class Entry:
    """A weight in host memory where it enters a function or a region; see [Note: a weight in host memory].

    Attributes:
      array: the array with its gradient; the last taker gets it, earlier ones get a copy.
      lies: its layouts.
      comm: the collectives.
      used: an equation uses it here.
      left: how often it is to be taken: once for all uses here, once for each region.
      variable: what stands for its gradient in device memory, once it is asked for.
    """

    array: jax.Array
    lies: HostSource
    comm: Comm
    used: bool
    left: int
    variable: jax.Array | None = None

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

    def fetch(self, array: jax.Array) -> Any:
        """It, or a tangent of it, in device memory."""
        return self.comm.host.fetch(array, self.lies.stored)

    def write(self, grad: jax.Array) -> Any:
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
class HostSource(ShardSource):
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
    variable: jax.Array | None = None
    steps: tuple[Any, ...] = ()

    @property
    def direct(self) -> bool:
        """False: it is fetched."""
        return False

    @property
    def sliceable(self) -> bool:
        """True where what was put off can be done to a slice as well."""
        return all(eqn.primitive.name in ("convert_element_type", "copy", "stop_gradient") for eqn in self.steps)

    @property
    def origin(self) -> Entry | None:
        """Where it entered."""
        return self.entry

    def after_steps(self, shard: Shaped) -> Shaped:
        """What was put off, done."""
        if isinstance(shard, jax.ShapeDtypeStruct):
            return jax.eval_shape(self.after_steps, shard) if self.steps else shard
        for eqn in self.steps:
            (shard,) = jaxprs.bind(eqn, [shard])
        return shard

    def through(self, eqn: JaxprEqn, shard: jax.Array) -> tuple[Any, ShardSource]:
        """The equation is put off."""
        return shard, dataclasses.replace(self, steps=(*self.steps, eqn))

    def map(self, change: Callable[[PartitionSpec], PartitionSpec]) -> ShardSource:
        """That of a slice."""
        return dataclasses.replace(self, stored=change(self.stored), grad=change(self.grad))

    def entered(self, shard: jax.Array, comm: Comm, *, used: bool, regions: int) -> tuple[Any, HostSource]:
        """Value and gradient part here."""
        entry = Entry(shard, self, comm, used, regions + used)
        if used and jaxprs.in_differentiated_loop():
            entry.ready()  # a tie, whose barrier hides the stack from XLA, would make it else
        return value_of(shard), dataclasses.replace(self, entry=entry)

    def handed(self, shard: jax.Array) -> tuple[Any, ShardSource]:
        """Value and gradient together again."""
        assert self.entry is not None
        return carried(shard, self.entry.take()), dataclasses.replace(self, entry=None, variable=None)

    def fetched(self, shard: jax.Array, comm: Comm) -> tuple[Any, ShardSource]:
        """Copied to the device, then what was put off."""
        if self.entry is None:
            shard, entered = self.entered(shard, comm, used=True, regions=0)
            return entered.fetched(shard, comm)
        (shard,) = linear(
            lambda value, x: [comm.host.fetch(jax.lax.stop_gradient(value), self.stored)],
            lambda value, g: [comm.plan.constrain(g, self.grad)], [shard], [self._of_use()],
            tangent=lambda value, dot: [dot],
        )  # fmt: skip
        return self.after_steps(shard), DEVICE

    def flat(self, shard: jax.Array) -> Any:
        """The value, and what stands for its gradient."""
        return shard if self.entry is None else (shard, self._of_use())

    def given(self, flat: Any) -> tuple[Any, ShardSource]:
        """The opposite of `flat`."""
        return (flat[0], dataclasses.replace(self, variable=flat[1])) if isinstance(flat, tuple) else (flat, self)

    def carrier(self, shard: jax.Array, is_reduced: bool) -> Carrier | None:
        """That of the entry. What an equation uses becomes a variable, so that its gradient is written in the tie."""
        entry = self.entry
        if entry is None:
            return None

        def put(weight: Weight, variable: jax.Array) -> Weight:
            entry.variable = variable
            return weight

        def put_back(weight: Weight, array: jax.Array) -> Weight:
            entry.array = array
            return weight

        def written(grad: jax.Array, reduce: Callable[[Any], Any]) -> Any:
            return entry.write(grad if memory_kind(grad) == HOST else reduce(grad))

        if entry.variable is not None:
            return Carrier(entry.variable, put)
        if not is_reduced or jaxprs.in_differentiated_loop() or not entry.left:
            return None
        if entry.used:
            return Carrier(entry.take(), put, lambda _: entry.zeros(), entry.fetch, written)
        return Carrier(entry.array, put_back, back=written)

    def _of_use(self) -> Any:
        """What stands for its gradient where an equation uses it."""
        assert self.entry is not None
        return self.entry.ready() if self.variable is None else self.variable


def source_of(x: jax.Array, layout: Layout) -> ShardSource:
    """Where a param lies."""
    return HostSource(layout.stored, layout.grad) if memory_kind(x) == HOST else DEVICE


def in_device_memory(x: jax.Array) -> jax.Array:
    """For a function that runs as it is written: a traced param in host memory is copied to the device."""
    return jax.device_put(x, jax.memory.Space.Device) if jaxprs.is_tracer(x) and memory_kind(x) == HOST else x
