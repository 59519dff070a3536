"""Where the shard of a weight lies, and what a walk has to do before it can gather it. In device memory: nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import PartitionSpec

from jzero.comm import Comm
from jzero.core import jaxprs
from jzero.core.types import JaxprEqn, Shaped

if TYPE_CHECKING:
    from jzero.gather.sharded_weight import Weight


@dataclasses.dataclass(frozen=True)
class Carrier:
    """The part of a weight that goes through a tie (`ties.py`): the array that its gradient comes back to.

    Attributes:
      array: goes in.
      put: the weight with what came out.
      forward: what comes out of the tie for it; `tangent` for a tangent of it.
      back: from the cotangent of what came out, and the function that reduces it, the cotangent of what went in.
    """

    array: jax.Array
    put: Callable[[Weight, Any], Weight]
    forward: Callable[[Any], Any] = lambda x: x
    tangent: Callable[[Any], Any] = lambda x: x
    back: Callable[[Any, Callable[[Any], Any]], Any] = lambda grad, reduce: reduce(grad)


@dataclasses.dataclass(frozen=True)
class ShardSource:
    """A shard in device memory. A subclass is one that lies elsewhere: `HostSource` (`host_source.py`)."""

    @property
    def direct(self) -> bool:
        """The shard is read where it lies. Else it is fetched first, and what is done to it before that is put off."""
        return True

    @property
    def sliceable(self) -> bool:
        """A scan can take the layers of a stack from it."""
        return True

    @property
    def origin(self) -> Any:
        """Weights with the same one share a gradient, which goes through a tie once; None: it shares with none."""
        return None

    def after_steps(self, shard: Shaped) -> Shaped:
        """The shard, or its shape and dtype, after what was put off."""
        return shard

    def through(self, eqn: JaxprEqn, shard: jax.Array) -> tuple[Any, ShardSource]:
        """The shard after an equation of one operand."""
        return jaxprs.bind(eqn, [shard])[0], self

    def map(self, change: Callable[[PartitionSpec], PartitionSpec]) -> ShardSource:
        """The source of a slice, whose layouts are changed so."""
        return self

    def entered(self, shard: jax.Array, comm: Comm, *, used: bool, regions: int) -> tuple[Any, ShardSource]:
        """The shard at the entry of a function or a region.

        Args:
          shard: the array.
          comm: the collectives.
          used: an equation uses it here.
          regions: how many regions and scans take it from here, each once.
        """
        return shard, self

    def handed(self, shard: jax.Array) -> tuple[Any, ShardSource]:
        """The array with its gradient: for a region or a scan, where it enters again, or as a function's result."""
        return shard, self

    def fetched(self, shard: jax.Array, comm: Comm) -> tuple[Any, ShardSource]:
        """The shard in device memory."""
        return shard, self

    def flat(self, shard: jax.Array) -> Any:
        """What is handed to a part of the program that uses it: the array, or a tuple."""
        return shard

    def given(self, flat: Any) -> tuple[Any, ShardSource]:
        """The shard in that part, from what `flat` made of it."""
        return flat, self

    def carrier(self, shard: jax.Array, is_reduced: bool) -> Carrier | None:
        """What goes through a tie; None where the gradient does not come there."""
        return Carrier(shard, lambda w, x: dataclasses.replace(w, shard=x))


DEVICE = ShardSource()
