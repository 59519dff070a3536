"""A stored weight inside of a walk: its shard, its layouts, and what can be done to it without a gather.

[Note: a weight in host memory]
Nothing is computed in host memory. What the program does to such a weight before its use (a cast, a transpose) is put
off until the shard is in device memory, which is where it is gathered: at the use, inside of what the backward pass
runs again. The cotangent of an array in host memory lies there too, so that the shard of a gradient leaves the device
when it is made. The sum of two such cotangents would be taken by a kernel that reads host memory. So each reader of
such a weight but the last has a copy of its own (`shared`; the same array), whose gradients are added in device memory.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jzero.comm import Comm
from jzero.core import jaxprs
from jzero.core.dims import dims_in_order
from jzero.core.linear import linear
from jzero.layout.specs import P


@dataclasses.dataclass(frozen=True)
class OnHost:
    """How a weight lies in host memory, and what was put off: see [Note: a weight in host memory].

    Attributes:
      stored, grad: the layouts of the shard and of its gradient there.
      steps: equations of one operand.
    """

    stored: PartitionSpec
    grad: PartitionSpec
    steps: tuple[Any, ...] = ()

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

    def fetched(self, comm: Comm) -> Weight:
        """The same weight with its shard in device memory."""
        host = self.host
        if host is None:
            return self
        (shard,) = linear(
            lambda x: [comm.host.fetch(x, host.stored)], lambda g: [comm.host.write(g, host.grad)], [],
            [self.shard],
        )  # fmt: skip
        return dataclasses.replace(self, shard=host.after_steps(shard), host=None)

    def shared(self, comm: Comm) -> tuple[Weight, Weight]:
        """A weight in host memory for two readers, whose gradients are added in device memory."""
        host = self.host
        assert host is not None
        pair = linear(
            lambda x: [x, x], lambda *grads: [comm.host.added(grads, host.grad)], [], [self.shard]
        )
        first, second = (dataclasses.replace(self, shard=x) for x in pair)
        return first, second


def unwrap(values: Sequence[Any]):
    """Arrays for values, and a function that makes weights of them again.

    `rewrap(flat, sliced_from=i)`: from position i on, the arrays have lost their leading (scanned) dim.
    """

    def rewrap(flat, sliced_from: int | None = None):
        out = []
        for i, (new, old) in enumerate(zip(flat, values, strict=True)):
            if isinstance(old, Weight):
                is_slice = sliced_from is not None and i >= sliced_from
                new = old.sliced(new) if is_slice else dataclasses.replace(old, shard=new, at_rest=None)
            out.append(new)
        return out

    return [v.shard if isinstance(v, Weight) else v for v in values], rewrap


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
