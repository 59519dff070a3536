"""jzero: ZeRO for JAX, proven from the compiled program. Start at `jzero.shard`."""

from jzero.config import ZeroConfig
from jzero.gather import gather_on_use
from jzero.optim import ZeroState, unwrap, zero
from jzero.proof.memory import Estimate, estimate
from jzero.proof.pod import Pod, pod
from jzero.proof.report import explain
from jzero.sharding import Plan, make_plan
from jzero.state import abstract, plan_of, shard, unshard

__all__ = [
    "Estimate",
    "Plan",
    "Pod",
    "ZeroConfig",
    "ZeroState",
    "abstract",
    "estimate",
    "explain",
    "gather_on_use",
    "make_plan",
    "plan_of",
    "pod",
    "shard",
    "unshard",
    "unwrap",
    "zero",
]
