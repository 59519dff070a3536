"""jzero: ZeRO for JAX, proven from the compiled program. Start at `jzero.shard`."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from jzero.core.cuda_plugin import hide as _hide_plugin

_hide_plugin()  # before jax is imported for the first time: on jax 0.10 that loads the plugin's libraries

# ruff: noqa: E402
from jzero.activations.remat import remat
from jzero.activations.tiled import tiled
from jzero.config import Offload, ZeroConfig
from jzero.core.deadline import deadline
from jzero.core.errors import ProofError
from jzero.flax.jit import jit
from jzero.flax.shard import abstract, plan_of, shard, unshard
from jzero.gather.tiled_loss import tiled_loss
from jzero.gather.transform import gather_on_use
from jzero.gradients.loss_scale import LossScale
from jzero.gradients.value_and_grad import value_and_grad
from jzero.layout.mesh import mesh
from jzero.offload import select
from jzero.optim import ZeroState, zero
from jzero.proof.check import CheckError, Finding, check, findings
from jzero.proof.fitting.fit import fit
from jzero.proof.memory import Estimate, estimate
from jzero.proof.page import write_html
from jzero.proof.pod import Pod, pod
from jzero.proof.report import explain
from jzero.proof.uses import param_uses
from jzero.sharding import Plan, make_plan

if _TYPE_CHECKING:
    from jzero import checkpoint, deepspeed


_RENAMED = {
    "Transformer": "Pass the sizes to jzero.estimate(plan, model={'layers': 32, 'width': 4096, ...}).",
    "describe_mesh": "Print jzero.estimate(plan).network().",
    "unwrap": "jzero.zero takes a transformation that is wrapped already; jzero.unshard(state) has the plain one.",
    "uses_of": "It is called jzero.param_uses.",
}


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


def __getattr__(name: str) -> _Any:
    """`jzero.checkpoint` is loaded when it is asked for, so that `import jzero` loads no orbax; so is `deepspeed`."""
    if name == "__version__":
        from importlib.metadata import version

        return version("jzero")
    if name in ("checkpoint", "deepspeed"):
        return _import_module(f"jzero.{name}")
    if name in _RENAMED:
        raise AttributeError(f"jzero.{name} is gone. {_RENAMED[name]}")
    raise AttributeError(f"module 'jzero' has no attribute {name!r}")


__all__ = [
    "CheckError",
    "Estimate",
    "Finding",
    "LossScale",
    "Offload",
    "Plan",
    "Pod",
    "ProofError",
    "ZeroConfig",
    "ZeroState",
    "abstract",
    "check",
    "checkpoint",
    "deadline",
    "deepspeed",
    "estimate",
    "explain",
    "findings",
    "fit",
    "gather_on_use",
    "jit",
    "make_plan",
    "mesh",
    "param_uses",
    "plan_of",
    "pod",
    "remat",
    "select",
    "shard",
    "tiled",
    "tiled_loss",
    "unshard",
    "value_and_grad",
    "write_html",
    "zero",
]
