"""jzero: ZeRO for JAX, proven from the compiled program. Start at `jzero.shard`."""

from jzero.config import ZeroConfig
from jzero.gather import gather_on_use
from jzero.optim import ZeroState, unwrap, zero
from jzero.sharding import Plan, make_plan
from jzero.state import abstract, plan_of, shard, unshard

__all__ = [
    "Plan",
    "ZeroConfig",
    "ZeroState",
    "abstract",
    "gather_on_use",
    "make_plan",
    "plan_of",
    "shard",
    "unshard",
    "unwrap",
    "zero",
]
