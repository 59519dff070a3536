"""jzero: ZeRO for JAX, proven from the compiled program. Start at `jzero.shard`."""

from jzero.config import Offload, ZeroConfig
from jzero.gather import gather_on_use
from jzero.gradients import value_and_grad
from jzero.offload import select
from jzero.optim import ZeroState, unwrap, zero
from jzero.proof.check import CheckError, Finding, check, findings
from jzero.proof.memory import Estimate, estimate
from jzero.proof.pod import Pod, pod
from jzero.proof.report import explain
from jzero.proof.transformer import Transformer
from jzero.sharding import Plan, make_plan
from jzero.state import abstract, plan_of, shard, unshard

__all__ = [
    "CheckError",
    "Estimate",
    "Finding",
    "Offload",
    "Plan",
    "Pod",
    "Transformer",
    "ZeroConfig",
    "ZeroState",
    "abstract",
    "check",
    "estimate",
    "explain",
    "findings",
    "gather_on_use",
    "make_plan",
    "plan_of",
    "pod",
    "select",
    "shard",
    "unshard",
    "unwrap",
    "value_and_grad",
    "zero",
]
