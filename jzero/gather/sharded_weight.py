"""A stored weight inside of a walk: its shard, its layouts, and what can be done to it without a gather.

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
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jzero.comm import Comm
from jzero.core import jaxprs
from jzero.core.carriers import carried, value_of
from jzero.core.dims import dims_in_order
from jzero.core.linear import linear
from jzero.layout.specs import P


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
        return all(eqn.primitive.name in ("convert_element_type", "copy") for eqn in self.steps)

    def after_steps(self, shard: Any) -> Any:
        """What was put off, done."""
        for eqn in self.steps:
            (shard,) = jaxprs.bind(eqn, [shard])
        return shard


@dataclasses.dataclass(frozen=True)
class Weight:
    """A stored weight on its way to a use: the shard, its two layouts, and that of its reduced gradient.

    Attributes:
      shard: the array; the whole one of a weight that is kept.
      stored, used, grad: its layout now, that of the arithmetic, and that of its gradient.
      at_rest: of a weight that is kept, the array as it is stored.
      narrow: the dtype that it was cast from, where that holds its values too; it travels in that one.
      host: of a weight whose shard lies in host memory.
    """

    shard: Any
    stored: PartitionSpec
    used: PartitionSpec
    grad: PartitionSpec
    at_rest: Any = None
    narrow: np.dtype | None = None
    host: OnHost | None = None

    @property
    def aval(self) -> Any:
        """Its shape and dtype, whole."""
        aval = jax.ShapeDtypeStruct(np.shape(self.shard), self.shard.dtype)
        return aval if self.host is None else jax.eval_shape(self.host.after_steps, aval)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole weight."""
        return self.aval.shape

    @property
    def dtype(self) -> np.dtype:
        """The dtype that the model computes with."""
        return self.aval.dtype

    @property
    def leaving(self) -> Any:
        """What a function returns for it: the stored array."""
        if self.host is not None:
            return self.handed()
        return self.shard if self.at_rest is None else self.at_rest

    @property
    def moves(self) -> bool:
        """It has to be fetched or gathered before it is used."""
        return self.split or self.host is not None

    @property
    def split(self) -> bool:
        """It has to be gathered before it is used."""
        return self.stored != self.used

    @property
    def nbytes(self) -> int:
        """Bytes of the whole weight in the dtype that the model computes with: those of its gradient, too."""
        return math.prod(self.shape) * self.dtype.itemsize

    def message_bytes(self, comm: Comm) -> int:
        """Bytes of the whole weight as it travels: when it is gathered, else when its gradient is reduced."""
        if not self.split:
            return self.nbytes
        return comm.weights.wire_bytes(self.shape, self.narrow or self.dtype)

    @property
    def is_reduced(self) -> bool:
        """Its gradient goes to its shard."""
        return self.grad != self.used

    def as_whole(self, whole: Any) -> Weight:
        """The same weight once it is gathered: whole, with a gradient that still goes to its shard."""
        return dataclasses.replace(self, shard=whole, stored=self.used, at_rest=self.shard)

    def map(self, shard: Any, change: Callable[[PartitionSpec], PartitionSpec]) -> Weight:
        """Another array in its place, with each layout changed alike."""
        specs = change(self.stored), change(self.used), change(self.grad)
        return Weight(shard, *specs, narrow=self.narrow, host=self.host)

    def sliced(self, layer: Any) -> Weight:
        """One layer of a stack, which has lost its leading dim."""

        def rest(spec: PartitionSpec) -> PartitionSpec:
            return P(*spec[1:])

        host = self.host and dataclasses.replace(
            self.host, stored=rest(self.host.stored), grad=rest(self.host.grad)
        )
        return dataclasses.replace(self.map(layer, rest), host=host)

    def through(self, eqn) -> tuple[Any, OnHost | None]:
        """The shard after an equation, or what is put off; see [Note: a weight in host memory]."""
        if self.host is None:
            return jaxprs.bind(eqn, [self.shard])[0], None
        return self.shard, dataclasses.replace(self.host, steps=(*self.host.steps, eqn))

    def entered(self, comm: Comm, *, used: bool, regions: int) -> Weight:
        """The same weight at the entry of a function or a region: see [Note: a weight in host memory].

        Args:
          comm: the collectives.
          used: an equation uses it here.
          regions: how many regions and scans take it from here, each once.
        """
        assert self.host is not None
        entry = Entry(self.shard, self.host, comm, used, regions + used)
        if used and jaxprs.in_differentiated_loop():
            entry.ready()  # a tie, whose barrier hides the stack from XLA, would make it else
        host = dataclasses.replace(self.host, entry=entry)
        return dataclasses.replace(self, shard=value_of(self.shard), host=host)

    def handed(self) -> Any:
        """For a region: the array in host memory, with its gradient."""
        host = self.host
        assert host is not None and host.entry is not None
        return carried(self.shard, host.entry.take())

    def fetched(self, comm: Comm) -> Weight:
        """The same weight with its shard in device memory."""
        if self.host is None:
            return self
        if self.host.entry is None:
            return self.entered(comm, used=True, regions=0).fetched(comm)
        host, variable = self.host, self.host.of_use()
        (shard,) = linear(
            lambda value, x: [comm.host.fetch(jax.lax.stop_gradient(value), host.stored)],
            lambda value, g: [comm.plan.constrain(g, host.grad)], [self.shard], [variable],
            tangent=lambda value, dot: [dot],
        )  # fmt: skip
        return dataclasses.replace(self, shard=host.after_steps(shard), host=None)


@dataclasses.dataclass(frozen=True)
class Carrier:
    """What of a weight goes through a tie: the array that its gradient comes back to.

    Attributes:
      array: goes in.
      forward: what comes out of the tie for it; `tangent` for a tangent of it.
      back: the cotangent that goes back for that of what came out.
      put: the weight with what came out.
    """

    array: Any
    put: Callable[[Weight, Any], Weight]
    forward: Callable[[Any], Any] = lambda x: x
    tangent: Callable[[Any], Any] = lambda x: x
    back: Callable[[Any], Any] = lambda g: g


def carriers(weights: Mapping[int, tuple[Weight, bool]]) -> list[tuple[int, Carrier]]:
    """The carriers of weights, by their keys; each with whether its gradient is reduced in the tie.

    None for a weight in host memory whose gradient does not come to the tie, and one for several of one entry. What an
    equation uses becomes a variable here, so that its gradient is written in the tie on the way back.
    """
    found: list[tuple[int, Carrier]] = []
    entries: list[Entry] = []
    for key, (weight, is_reduced) in weights.items():
        if weight.host is None:
            found.append((key, Carrier(weight.shard, lambda w, x: dataclasses.replace(w, shard=x))))
            continue
        entry = weight.host.entry
        if entry is None or any(entry is e for e in entries):
            continue
        carrier = _carrier_of(entry, is_reduced)
        if carrier is not None:
            entries.append(entry)
            found.append((key, carrier))
    return found


def _carrier_of(entry: Entry, is_reduced: bool) -> Carrier | None:
    def put(weight: Weight, variable: Any) -> Weight:
        entry.variable = variable
        return weight

    def put_back(weight: Weight, array: Any) -> Weight:
        entry.array = array
        return weight

    if entry.variable is not None:
        return Carrier(entry.variable, put)
    if not is_reduced or jaxprs.in_differentiated_loop() or not entry.left:
        return None
    if entry.used:
        return Carrier(entry.take(), put, lambda _: entry.zeros(), entry.fetch, entry.write)
    return Carrier(entry.array, put_back, back=entry.write)


def unwrap(values: Sequence[Any]):
    """Arrays for values, and a function that makes weights of them again. Of a weight in host memory that is used here
    a pair: its value, and what stands for its gradient.

    `rewrap(flat, sliced_from=i)`: from position i on, the arrays have lost their leading (scanned) dim.
    """

    def rewrap(flat, sliced_from: int | None = None):
        out = []
        for i, (new, old) in enumerate(zip(flat, values, strict=True)):
            if isinstance(old, Weight):
                is_slice = sliced_from is not None and i >= sliced_from
                if isinstance(new, tuple):
                    host = dataclasses.replace(old.host, variable=new[1])
                    new = dataclasses.replace(old, shard=new[0], host=host)
                else:
                    new = old.sliced(new) if is_slice else dataclasses.replace(old, shard=new, at_rest=None)
            out.append(new)
        return out

    def flat(value):
        if not isinstance(value, Weight):
            return value
        in_use = value.host is not None and value.host.entry is not None
        return (value.shard, value.host.of_use()) if in_use else value.shard

    return [flat(v) for v in values], rewrap


def for_region(values: Sequence[Any]) -> list[Any]:
    """Values for a region or a scan, which enters weights in host memory itself."""

    def handed(value):
        if not isinstance(value, Weight) or value.host is None:
            return value
        host = dataclasses.replace(value.host, entry=None, variable=None)
        return dataclasses.replace(value, shard=value.handed(), host=host)

    return [handed(v) for v in values]


def merged(outs: Sequence[Any], handed: Sequence[int | None], values: Sequence[Any]) -> list[Any]:
    """The results of regions, with the weights that they handed through among them."""
    rest = iter(outs)
    return [next(rest) if i is None else values[i] for i in handed]


def _cast(eqn, weight: Weight):
    shard, host = weight.through(eqn)
    changed = dataclasses.replace(weight, shard=shard, host=host)
    narrow, dtype = np.dtype(weight.narrow or weight.dtype), changed.dtype
    widened = jnp.promote_types(narrow, dtype) == dtype != narrow
    floating = jnp.issubdtype(narrow, jnp.floating) and jnp.issubdtype(dtype, jnp.floating)
    return dataclasses.replace(changed, narrow=narrow if widened and floating else None)


def _moved(eqn, weight: Weight):
    """A transpose, or a squeeze."""
    order, ndim = dims_in_order(eqn), len(weight.shape)
    shard, host = weight.through(eqn)
    moved = weight.map(shard, lambda spec: P(*(_padded(spec, ndim)[i] for i in order)))
    return dataclasses.replace(moved, host=host)


def _padded(spec: PartitionSpec, ndim: int) -> list[Any]:
    return [spec[i] if i < len(spec) else None for i in range(ndim)]


ON_SHARD: dict[str, Callable[[Any, Weight], Weight]] = {
    "convert_element_type": _cast,
    "copy": _cast,
    "transpose": _moved,
    "squeeze": _moved,
}
