"""A stored weight inside of a walk: its shard, its layouts, and what can be done to it without a gather."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jzero.comm import Comm
from jzero.comm.weights import STACK, in_order_of_param
from jzero.core import jaxprs
from jzero.core.dims import dims_in_order
from jzero.core.types import Shaped
from jzero.gather.source import DEVICE, ShardSource
from jzero.layout.blocks import Blocks
from jzero.layout.specs import P, split_dims


@dataclasses.dataclass(frozen=True)
class Weight:
    """A stored weight on its way to a use: the shard, its two layouts, and that of its reduced gradient.

    Attributes:
      shard: the array; the whole one of a weight that is kept.
      stored, used, grad: its layout now, that of the arithmetic, and that of its gradient.
      at_rest: of a weight that is kept, the array as it is stored.
      narrow: the dtype that it was cast from, where that holds its values too; it travels in that one.
      source: where the shard lies.
      trained: False for a frozen weight: nothing waits for its gradient, which XLA drops if the step does not read it.
      order: of a weight that travels in codes: which dim of the param each of its dims is, `STACK` for that of a stack.
        None: it travels as it is.
      keeps: once it is gathered, it stays until the backward pass has used it.
    """

    shard: jax.Array
    stored: PartitionSpec
    used: PartitionSpec
    grad: PartitionSpec
    at_rest: Any = None
    narrow: np.dtype | None = None
    source: ShardSource = DEVICE
    trained: bool = True
    order: tuple[int, ...] | None = None
    keeps: bool = False

    @property
    def aval(self) -> Shaped:
        """Its shape and dtype, whole."""
        return self.source.after_steps(jax.ShapeDtypeStruct(np.shape(self.shard), self.shard.dtype))

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
        return self.handed().shard if self.at_rest is None else self.at_rest

    @property
    def moves(self) -> bool:
        """It has to be fetched or gathered before it is used."""
        return self.split or not self.source.direct

    @property
    def split(self) -> bool:
        """It has to be gathered before it is used."""
        return self.stored != self.used

    @property
    def split_dims(self) -> frozenset[int] | None:
        """The dims that a layout of it splits; None for one that is fetched before it is cut."""
        return split_dims(self.stored, self.used, self.grad) if self.source.direct else None

    @property
    def nbytes(self) -> int:
        """Bytes of the whole weight in the dtype that the model computes with: those of its gradient, too."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def held_bytes(self) -> int:
        """Bytes of the whole weight once it is gathered; of one that is not gathered, those of its gradient."""
        dtype = self.narrow or self.dtype
        return math.prod(self.shape) * dtype.itemsize if self.split else self.nbytes

    @property
    def is_reduced(self) -> bool:
        """Its gradient goes to its shard."""
        return self.grad != self.used

    def as_whole(self, whole: jax.Array) -> Weight:
        """The same weight once it is gathered: whole, with a gradient that still goes to its shard."""
        return dataclasses.replace(self, shard=whole, stored=self.used, at_rest=self.shard)

    def map(self, shard: jax.Array, dims: Sequence[int]) -> Weight:
        """Another array in its place, with these dims of the weight, in this order."""
        specs = (_with_dims(spec, dims) for spec in (self.stored, self.used, self.grad))
        order = None if self.order is None else tuple(self.order[i] for i in dims)
        stored, used, grad = specs
        return dataclasses.replace(
            self, shard=shard, stored=stored, used=used, grad=grad, at_rest=None, order=order
        )

    def sliced(self, layer: jax.Array, size: int) -> Weight:
        """One layer of a stack, which has lost its leading dim; `size`: of the blocks of the stack, if it has any."""

        def rest(spec: PartitionSpec) -> PartitionSpec:
            return P(*spec[1:])

        return dataclasses.replace(
            self, shard=layer, stored=rest(self.stored), used=rest(self.used), grad=rest(self.grad), at_rest=None,
            source=self.source.map(rest), order=_order_of_layers(self, size),
        )  # fmt: skip

    def through(self, eqn) -> Weight:
        """The weight after an equation that only changes its shard, which may be put off."""
        return self._lying(self.source.through(eqn, self.shard))

    def entered(self, comm: Comm, *, used: bool, regions: int) -> Weight:
        """The same weight at the entry of a function or a region: see `ShardSource.entered`."""
        return self._lying(self.source.entered(self.shard, comm, used=used, regions=regions))

    def handed(self) -> Weight:
        """The same weight with its gradient, for a region or a scan, where it enters again."""
        return self._lying(self.source.handed(self.shard))

    def fetched(self, comm: Comm) -> Weight:
        """The same weight with its shard in device memory."""
        return self._lying(self.source.fetched(self.shard, comm))

    def _lying(self, place: tuple[Any, ShardSource]) -> Weight:
        shard, source = place
        return dataclasses.replace(self, shard=shard, source=source)


@dataclasses.dataclass(frozen=True)
class LoopConstant:
    """A weight inside of a loop, gathered before it: an array like others, but not an activation to tie weights to.

    A tie would make another array of it in every round, kept for the backward loop, and reduce its gradient there.
    """

    array: jax.Array


def as_arrays(values: Sequence[Any]) -> list[Any]:
    """The values, with an array for each `LoopConstant`."""
    return [v.array if isinstance(v, LoopConstant) else v for v in values]


def unwrap(values: Sequence[Any]):
    """Arrays for values (or tuples, see `ShardSource.flat`), and a function that makes weights of them again.

    `rewrap(flat, sliced_from=i, size=n)`: from position i on, the arrays have lost their leading (scanned) dim; n is
    the number of values of a block.
    """

    def rewrap(flat, sliced_from: int | None = None, size: int = 0):
        def one(i: int, new: Any, old: Any) -> Any:
            if isinstance(old, LoopConstant):
                return LoopConstant(new)
            if not isinstance(old, Weight):
                return new
            shard, source = old.source.given(new)
            weight = dataclasses.replace(old, source=source)
            if sliced_from is not None and i >= sliced_from:
                return weight.sliced(shard, size)
            return dataclasses.replace(weight, shard=shard, at_rest=None)

        return [one(i, new, old) for i, (new, old) in enumerate(zip(flat, values, strict=True))]

    return [v.source.flat(v.shard) if isinstance(v, Weight) else v for v in as_arrays(values)], rewrap


def for_region(values: Sequence[Any]) -> list[Any]:
    """The values for a region or a scan, where weights enter again: see `Weight.handed`."""
    return [v.handed() if isinstance(v, Weight) else v for v in values]


def merged(outs: Sequence[Any], handed: Sequence[int | None], values: Sequence[Any]) -> list[Any]:
    """The results of regions, with the weights that they handed through among them."""
    rest = iter(outs)
    return [next(rest) if i is None else values[i] for i in handed]


def _cast(eqn, weight: Weight):
    changed = weight.through(eqn)
    narrow, dtype = np.dtype(weight.narrow or weight.dtype), changed.dtype
    widened = jnp.promote_types(narrow, dtype) == dtype != narrow
    floating = jnp.issubdtype(narrow, jnp.floating) and jnp.issubdtype(dtype, jnp.floating)
    return dataclasses.replace(changed, narrow=narrow if widened and floating else None)


def _stopped(eqn, weight: Weight):
    """Frozen from here on."""
    return dataclasses.replace(_cast(eqn, weight), trained=False, grad=weight.used)


def _moved(eqn, weight: Weight):
    """A transpose, or a squeeze."""
    changed = weight.through(eqn)
    return changed.map(changed.shard, dims_in_order(eqn))


def pieces(eqn, weight: Weight, size: int) -> list[Weight]:
    """Parts of a weight that an equation of `PIECES` cuts out of its shard; `size`: of its blocks, if it has any."""
    found = [weight.map(shard, dims_in_order(eqn)) for shard in jaxprs.bind(eqn, [weight.shard])]
    return found if _keeps_blocks(eqn, weight, size) else [dataclasses.replace(w, order=None) for w in found]


def _keeps_blocks(eqn, weight: Weight, size: int) -> bool:
    """Whether the parts have the blocks of the whole weight: with others they would have other values in codes."""
    if weight.order is None:
        return True
    whole, dims = _blocks(weight, weight.order, size)
    shape = whole.shape
    first, inner = dims[whole.lead], math.prod(shape[whole.lead + 1 :])
    cuts = {i: at for i in dims if (at := _cuts(eqn, i)) is not None}
    if cuts.keys() & set(dims[whole.lead + 1 :]):
        return False
    return all(at == weight.shape[first] or at * inner % size == 0 for at in cuts.get(first, ()))


def _order_of_layers(weight: Weight, size: int) -> tuple[int, ...] | None:
    """`order` of the layers that a loop takes off a weight; None where their blocks are not those of the whole weight.

    The plan need not know that it is a stack.
    """
    if not weight.order:
        return None
    whole, dims = _blocks(weight, weight.order, size)
    return weight.order[1:] if weight.order[0] == STACK or dims.index(0) < whole.lead else None


def _blocks(weight: Weight, order: Sequence[int], size: int) -> tuple[Blocks, list[int]]:
    """The blocks of a weight, and its dims in the order of the param."""
    dims = in_order_of_param(order)
    return Blocks.of([weight.shape[i] for i in dims], 0 if STACK in order else None, size), dims


def _cuts(eqn, dim: int) -> list[int] | None:
    """Where an equation of `PIECES` cuts a dim; None if it does not."""
    params, n = eqn.params, eqn.invars[0].aval.shape[dim]
    if eqn.primitive.name == "slice":
        found = [params["start_indices"][dim], params["limit_indices"][dim]]
        step = 1 if params["strides"] is None else params["strides"][dim]
        return None if (*found, step) == (0, n, 1) else found if step == 1 else list(range(n))
    if dim != params["axis"]:
        return None
    return list(range(n)) if eqn.primitive.name == "unstack" else list(itertools.accumulate(params["sizes"]))


def is_cut_on_shard(eqn, split: frozenset[int] | None) -> bool:
    """True for an equation that cuts a weight along dims that no layout of it splits: the parts are weights."""
    name = eqn.primitive.name
    if split is None or name not in PIECES:
        return False
    if name != "slice":
        return eqn.params["axis"] not in split
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    return all(before[i] == after[i] for i in split)


def _with_dims(spec: PartitionSpec, dims: Sequence[int]) -> PartitionSpec:
    return P(*(spec[i] if i < len(spec) else None for i in dims))


ON_SHARD: dict[str, Callable[[Any, Weight], Weight]] = {
    "convert_element_type": _cast,
    "copy": _cast,
    "stop_gradient": _stopped,
    "transpose": _moved,
    "squeeze": _moved,
}

PIECES = ("slice", "split", "unstack")
"""Equations that cut a weight, as `w[0]` does: on its shard where `is_cut_on_shard`, else a use of all of it."""
