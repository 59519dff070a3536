"""A stored weight inside of a walk: its shard, its layouts, and what can be done to it without a gather."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jzero.comm import Comm
from jzero.core import jaxprs
from jzero.core.dims import dims_in_order
from jzero.layout.specs import P


@dataclasses.dataclass(frozen=True)
class Weight:
    """A stored weight on its way to a use: the shard, its two layouts, and that of its reduced gradient.

    Attributes:
      shard: the array; the whole one of a weight that is kept.
      stored, used, grad: its layout now, that of the arithmetic, and that of its gradient.
      at_rest: of a weight that is kept, the array as it is stored.
      narrow: the dtype that it was cast from, where that holds its values too; it travels in that one.
    """

    shard: Any
    stored: PartitionSpec
    used: PartitionSpec
    grad: PartitionSpec
    at_rest: Any = None
    narrow: np.dtype | None = None

    @property
    def leaving(self) -> Any:
        """What a function returns for it: the stored array."""
        return self.shard if self.at_rest is None else self.at_rest

    @property
    def split(self) -> bool:
        """It has to be gathered before it is used."""
        return self.stored != self.used

    @property
    def nbytes(self) -> int:
        """Bytes of the whole weight in the dtype that the model computes with: those of its gradient, too."""
        return self.shard.size * self.shard.dtype.itemsize

    def message_bytes(self, comm: Comm) -> int:
        """Bytes of the whole weight as it travels: when it is gathered, else when its gradient is reduced."""
        if not self.split:
            return self.nbytes
        return comm.weights.wire_bytes(self.shard.shape, self.narrow or self.shard.dtype)

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
        return Weight(shard, *specs, narrow=self.narrow)


def unwrap(values: Sequence[Any]):
    """Arrays for values, and a function that makes weights of them again.

    `rewrap(flat, sliced_from=i)`: from position i on, the arrays have lost their leading (scanned) dim.
    """

    def rewrap(flat, sliced_from: int | None = None):
        out = []
        for i, (new, old) in enumerate(zip(flat, values, strict=True)):
            if isinstance(old, Weight):
                cut = int(sliced_from is not None and i >= sliced_from)
                new = old.map(new, lambda spec, cut=cut: P(*spec[cut:]))
            out.append(new)
        return out

    return [v.shard if isinstance(v, Weight) else v for v in values], rewrap


def _cast(eqn, weight: Weight):
    shard = jaxprs.bind(eqn, [weight.shard])[0]
    narrow = np.dtype(weight.narrow or weight.shard.dtype)
    widened = jnp.promote_types(narrow, shard.dtype) == shard.dtype != narrow
    floating = jnp.issubdtype(narrow, jnp.floating) and jnp.issubdtype(shard.dtype, jnp.floating)
    return dataclasses.replace(weight, shard=shard, narrow=narrow if widened and floating else None)


def _moved(eqn, weight: Weight):
    """A transpose, or a squeeze."""
    order = dims_in_order(eqn)
    shard = jaxprs.bind(eqn, [weight.shard])[0]
    ndim = np.ndim(weight.shard)
    return weight.map(shard, lambda spec: P(*(_padded(spec, ndim)[i] for i in order)))


def _padded(spec: PartitionSpec, ndim: int) -> list[Any]:
    return [spec[i] if i < len(spec) else None for i in range(ndim)]


ON_SHARD: dict[str, Callable[[Any, Weight], Weight]] = {
    "convert_element_type": _cast,
    "copy": _cast,
    "transpose": _moved,
    "squeeze": _moved,
}
