"""`estimate`: bytes per device and on the wire in closed form, from a plan alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jzero.describe import leaf_bytes
from jzero.errors import human_bytes, table
from jzero.layout import Layout, axis_size, shard_factor, spec_axes
from jzero.optim import init_state, unwrap, zero
from jzero.sharding import Plan


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Bytes per device of the model states of a run, and what one step sends.

    Attributes:
      params: stored params.
      grads: reduced gradients.
      opt_state: optimizer state and masters in device memory.
      host: bytes of optimizer state in host memory.
      wire: bytes that one device sends in a step, rings assumed; both directions of a link count once.
      psi: bytes of all params, whole.
      n: devices that share the optimizer state.
      assumed: what was taken for the optimizer.
    """

    params: int
    grads: int
    opt_state: int
    host: int
    wire: int
    psi: int
    n: int
    assumed: str

    @property
    def total(self) -> int:
        """Device bytes of params, gradients and optimizer state together; activations come on top."""
        return self.params + self.grads + self.opt_state

    @property
    def wire_psi(self) -> float:
        """`wire` in units of Psi: (N-1)/N x the bytes of all params."""
        unit = self.psi * (self.n - 1) / self.n
        return self.wire / unit if unit else 0.0

    def __str__(self) -> str:
        rows = [(k, human_bytes(getattr(self, k))) for k in ("params", "grads", "opt_state", "total", "host")]
        rows.append(("wire / step", f"{human_bytes(self.wire)} ({self.wire_psi:.2f} Psi)"))
        return table(["bytes per device", self.assumed], rows)


def estimate(plan: Plan, *, tx: Any = None) -> Estimate:
    """Model-state bytes and wire bytes per device, in closed form.

    Args:
      plan: from `make_plan`, or `plan_of(state)`.
      tx: the optimizer, wrapped or plain; its state is counted leaf by leaf from its own shapes. None: two
        moments in the master dtype for every param, as Adam keeps.

    Returns:
      An `Estimate`; printing it gives a table. Activations, the gathered weights of stage 3 in flight and
      communication buffers are not in it.

    Cost:
      Wire, per leaf of B bytes: reduce-scatter and all-gather (n-1)/n B each, all-reduce 2 (n-1)/n B. Stages
      1 and 2: one reduce-scatter, one all-gather. Stage 3: two all-gathers, one reduce-scatter.

    Example:
      >>> import jax, jzero
      >>> plan = jzero.make_plan({"w": jax.ShapeDtypeStruct((1024, 1024), "bfloat16")}, stage=2)
      >>> jzero.estimate(plan).params
      2097152

    References:
      Rajbhandari et al., ZeRO (arXiv:1910.02054), sections 5 and 7.
    """
    params = sum(x.nbytes // shard_factor(x.stored, plan.mesh) for x in plan.layouts)
    grads = sum(x.nbytes // shard_factor(x.grad, plan.mesh) for x in plan.layouts)
    wire = sum(_wire(x, plan) for x in plan.layouts)
    state, assumed = _adam_bytes(plan) if tx is None else _state_bytes(plan, tx)
    return Estimate(params, grads, state, 0, round(wire), plan.param_bytes, plan.n, assumed)


def _state_bytes(plan: Plan, tx: Any) -> tuple[int, str]:
    tx = zero(unwrap(tx), plan)
    state = jax.eval_shape(lambda p: init_state(tx, p), plan.shapes)
    rows = zip(jax.tree.leaves(state), plan.state_specs(state), strict=True)
    return sum(leaf_bytes(x) // shard_factor(s, plan.mesh) for x, s in rows), "its own optimizer state"


def _adam_bytes(plan: Plan) -> tuple[int, str]:
    total = 0
    for x in plan.layouts:
        master = plan.config.master_for(x.dtype)
        per_value = 3 * master.itemsize if master is not None else 2 * x.dtype.itemsize
        total += x.size * per_value // shard_factor(x.state, plan.mesh)
    return total, "two moments per param assumed"


def _wire(x: Layout, plan: Plan) -> float:
    """Bytes that one device sends for one param in a step."""
    mesh, used = plan.mesh, x.nbytes / shard_factor(x.used, plan.mesh)
    split = [a for a in spec_axes(x.state) if a not in spec_axes(x.used)]
    whole = [a for a in plan.batch_axes if a not in split and a not in spec_axes(x.used)]
    n, r = axis_size(mesh, split), axis_size(mesh, whole)
    reduced = _ring(n) * used + 2 * _ring(r) * used / n
    stored = x.nbytes / shard_factor(x.stored, mesh)
    updated = _ring(shard_factor(x.state, mesh) / shard_factor(x.stored, mesh)) * stored
    dtype = plan.config.compute_dtype
    cast = 1.0 if dtype is None else dtype.itemsize / x.dtype.itemsize
    uses = 2 * _ring(shard_factor(x.stored, mesh) / shard_factor(x.used, mesh)) * used * cast
    return reduced * cast + updated + uses


def _ring(n: float) -> float:
    return (n - 1) / n
