"""A stored weight inside of a walk: its shard, its layouts, and what can be done to it without a gather."""

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
from jzero.core.carriers import carried, value_of
from jzero.core.dims import dims_in_order
from jzero.core.linear import linear
from jzero.gather.host_weight import Entry, OnHost
from jzero.layout.specs import P, split_dims


@dataclasses.dataclass(frozen=True)
class Weight:
    """A stored weight on its way to a use: the shard, its two layouts, and that of its reduced gradient.

    Attributes:
      shard: the array; the whole one of a weight that is kept.
      stored, used, grad: its layout now, that of the arithmetic, and that of its gradient.
      at_rest: of a weight that is kept, the array as it is stored.
      narrow: the dtype that it was cast from, where that holds its values too; it travels in that one.
      host: of a weight whose shard lies in host memory.
      trained: False for a frozen weight: nothing waits for its gradient, which XLA drops if the step does not read it.
    """

    shard: Any
    stored: PartitionSpec
    used: PartitionSpec
    grad: PartitionSpec
    at_rest: Any = None
    narrow: np.dtype | None = None
    host: OnHost | None = None
    trained: bool = True

    @property
    def aval(self) -> Any:
        """Its shape and dtype, whole."""
        aval = jax.ShapeDtypeStruct(np.shape(self.shard), self.shard.dtype)
        return jax.eval_shape(self.host.after_steps, aval) if self.host and self.host.steps else aval

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
    def split_dims(self) -> frozenset[int] | None:
        """The dims that a layout of it splits; None for one in host memory, which is fetched before it is cut."""
        return None if self.host else split_dims(self.stored, self.used, self.grad)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole weight in the dtype that the model computes with: those of its gradient, too."""
        return math.prod(self.shape) * self.dtype.itemsize

    def held_bytes(self, comm: Comm) -> int:
        """Bytes of the whole weight once it is gathered; of one that is not gathered, those of its gradient."""
        if not self.split:
            return self.nbytes
        return comm.weights.form(self.shape, self.narrow or self.dtype, self.stored, self.used).held_bytes

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
        return Weight(shard, *specs, narrow=self.narrow, host=self.host, trained=self.trained)

    def sliced(self, layer: Any) -> Weight:
        """One layer of a stack, which has lost its leading dim."""

        def rest(spec: PartitionSpec) -> PartitionSpec:
            return P(*spec[1:])

        host = self.host
        if host is not None:
            host = dataclasses.replace(host, stored=rest(host.stored), grad=rest(host.grad))
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
        assert host is not None
        assert host.entry is not None
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


def unwrap(values: Sequence[Any]):
    """Arrays for values, and a function that makes weights of them again.

    For a weight in host memory that is used here it is a pair: its value, and what stands for its gradient.

    `rewrap(flat, sliced_from=i)`: from position i on, the arrays have lost their leading (scanned) dim.
    """

    def rewrap(flat, sliced_from: int | None = None):
        out = []
        for i, (new, old) in enumerate(zip(flat, values, strict=True)):
            if isinstance(old, Weight):
                is_slice = sliced_from is not None and i >= sliced_from
                if isinstance(new, tuple):
                    assert old.host is not None
                    host = dataclasses.replace(old.host, variable=new[1])
                    new = dataclasses.replace(old, shard=new[0], host=host)
                else:
                    new = old.sliced(new) if is_slice else dataclasses.replace(old, shard=new, at_rest=None)
            out.append(new)
        return out

    def flat(value):
        if not isinstance(value, Weight):
            return value
        if value.host is None or value.host.entry is None:
            return value.shard
        return value.shard, value.host.of_use()

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


def _stopped(eqn, weight: Weight):
    """Frozen from here on."""
    return dataclasses.replace(_cast(eqn, weight), trained=False, grad=weight.used)


def _moved(eqn, weight: Weight):
    """A transpose, or a squeeze."""
    shard, host = weight.through(eqn)
    return dataclasses.replace(weight.map(shard, _layout_after(eqn, weight)), host=host)


def pieces(eqn, weight: Weight) -> list[Weight]:
    """Parts of a weight that an equation of `PIECES` cuts out of its shard."""
    return [weight.map(shard, _layout_after(eqn, weight)) for shard in jaxprs.bind(eqn, [weight.shard])]


def is_cut_on_shard(eqn, split: frozenset[int] | None) -> bool:
    """True for an equation that cuts a weight along dims that no layout of it splits: the parts are weights."""
    name = eqn.primitive.name
    if split is None or name not in PIECES:
        return False
    if name != "slice":
        return eqn.params["axis"] not in split
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    return all(before[i] == after[i] for i in split)


def _layout_after(eqn, weight: Weight) -> Callable[[PartitionSpec], PartitionSpec]:
    """What an equation makes of a layout of the weight: its dims in their new order."""
    order, ndim = dims_in_order(eqn), len(weight.shape)
    return lambda spec: P(*(_padded(spec, ndim)[i] for i in order))


def _padded(spec: PartitionSpec, ndim: int) -> list[Any]:
    return [spec[i] if i < len(spec) else None for i in range(ndim)]


ON_SHARD: dict[str, Callable[[Any, Weight], Weight]] = {
    "convert_element_type": _cast,
    "copy": _cast,
    "stop_gradient": _stopped,
    "transpose": _moved,
    "squeeze": _moved,
}

PIECES = ("slice", "split", "unstack")
"""Equations that cut a weight, as `w[0]` does: on its shard where `is_cut_on_shard`, else a use of all of it."""
