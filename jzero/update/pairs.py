"""Masters that are stored as what their params lack: the param and what is stored beside it, its *rest*, are a pair.

[Note: no master to compare with]
jzero cannot tell a param that the user replaced from one that the update made: its master is the param and the old
rest, at most half a unit in the last place away for a remainder, and for a difference what codes have lost.

[Note: the difference of what was sent]
With `update_dtype="int8"` a param is the sum of what all devices have decoded, and no rounding of its master. Its
difference to the master is fp32 (exact, as both are close) and taken against the param as it was sent. The next update
sends what is missing again, so that nothing that codes lose is lost for good. Each device adds up its param by itself:
decoded values are exact (`transport.py`), the sum is rounded to fp32 and then to the param's dtype by
`reduce_precision`, which XLA does not drop. So the device that keeps the difference has the same param as all others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jzero.comm.transport import InCodes
from jzero.comm.updates import plus, rounded
from jzero.config import ZeroConfig
from jzero.update import remainder

FP32 = np.dtype(np.float32)


@dataclasses.dataclass(frozen=True)
class Pair:
    """How a master is stored beside its param.

    Attributes:
      name: what the rest is called in a checkpoint.
      dtype: of the rest.
      split: the param, in a given dtype, and the rest of an fp32 master.
      join: the fp32 master of a param and a rest.
    """

    name: str
    dtype: np.dtype
    split: Callable[[jax.Array, DTypeLike], tuple[jax.Array, jax.Array]]
    join: Callable[[jax.Array, jax.Array], jax.Array]


def _split(master: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    value = rounded(master, dtype)
    return value.astype(dtype), master - value


REMAINDER = Pair("master_remainder", np.dtype(np.int16), lambda master, _: remainder.split(master), remainder.join)
DIFFERENCE = Pair("master_difference", FP32, _split, lambda param, rest: param.astype(FP32) + rest)

PAIRS = {pair.name: pair for pair in (REMAINDER, DIFFERENCE)}
"""By their names in a checkpoint."""


def pair_of(config: ZeroConfig, dtype: DTypeLike) -> Pair | None:
    """How the masters of params of this dtype are stored, if not as they are."""
    if config.paired_by is None or dtype != jnp.bfloat16:
        return None
    return {"master_dtype": REMAINDER, "update_dtype": DIFFERENCE}[config.paired_by]


def sent_in_codes(master: jax.Array, param: jax.Array, way: InCodes) -> tuple[jax.Array, jax.Array]:
    """What an update adds to a param, exactly as codes bring it, and the rest; all on the shard, in fp32."""
    master = remainder.computed_once(master)  # both results are of one master
    added = way.decode(way.encode(master - param.astype(FP32)), FP32)
    return added, master - plus(param, added).astype(FP32)
