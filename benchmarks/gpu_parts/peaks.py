"""Peak memory of a step: what the compiler states, and what the device's allocator measured."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
from hand import train_step

import jzero
from gpu_parts import model
from gpu_parts.machine import used_peak, zeros_like
from jzero.proof.pod import gpus

TITLE = "Peak memory: measured against compiled"
ASKED = """Each case in a process of its own: the step is compiled, the state is made of zeros, two steps run,
and the most bytes that a device had in use are compared with arguments + outputs - aliased + temp of the
compiled program. Asked: within 3 %. "before" is the peak before the first step: if it does not rise during
the step, nothing is measured. "pod" is the same sum of the program that `jzero.pod` compiles for one such GPU, as
on a machine without any; "pod off" is its difference from what was measured. bf16 params with fp32 masters."""
WEIGHT = 3.0
FRESH = True
SIDE_BY_SIDE = True
XLA = ""
WITHIN = 0.03
TIERS = {
    "device": None,
    "host": jzero.Offload(),
    "host, prefetch": jzero.Offload(prefetch=True),
    "inputs of blocks on the host": None,
}
INPUTS = "inputs of blocks on the host"
SHORT = ("scan / 2 / device", "unrolled / 3 / host", f"scan / 2 / {INPUTS}")


def cases(config: dict[str, Any]) -> list[str]:
    """All stages in a scan, then the other tiers, then unrolled layers: `form / stage / tier`.

    On one device the stages are one program, and the third stands for all.
    """
    if config["machine"]["count"] == 1:
        tiers = ("host", "device", INPUTS, "host, prefetch")
        return [f"{form} / 3 / {tier}" for tier in tiers for form in ("scan", "unrolled")]
    found = [f"scan / {s} / device" for s in (2, 3, 1, 0)] + [f"scan / {s} / host" for s in (2, 3, 1)]
    found += [f"scan / 2 / {tier}" for tier in TIERS if tier not in ("device", "host")]
    found += [f"unrolled / {s} / {tier}" for tier in ("device", "host") for s in (3, 2, 1)]
    return [*found, f"unrolled / 2 / {INPUTS}"]


def run(case: str, config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One cell."""
    form, stage, tier = case.split(" / ")
    c = model.sizes(config, model.SMALL, scan=form == "scan")
    mesh = model.mesh_of(config["machine"]["count"])
    state = abstract_state(c, int(stage), tier, mesh)
    plan, batch = jzero.plan_of(state), model.batch_of(c, mesh)
    compiled = model.compiled(state, batch, train_step)
    held = jzero.explain(compiled, plan).memory
    leaves = zeros_like(jax.tree.leaves(state))
    before = used_peak()
    for _ in range(2):
        leaves, loss = compiled(leaves, batch)
        jax.block_until_ready((leaves, loss))
    after = used_peak()
    try:
        pod: Any = pod_peak(c, int(stage), tier, config)
    except Exception as error:  # what was measured is kept
        pod = None
        yield {"cannot": f"the pod's peak of {case}: {type(error).__name__}: {str(error)[:200]}"}
    columns = compared(held.total, before, after)
    measured = columns["measured, GB"]
    yield {
        "layers": form, "stage": int(stage), "tier": tier,
        "states by formula, GB": jzero.estimate(plan, tx=state.tx).states / 1e9,
        "arguments, GB": held.arguments / 1e9, "temp, GB": held.temp / 1e9, **columns,
        "pod, GB": pod and pod / 1e9, "pod off, %": pod and measured and 100 * (pod / 1e9 / measured - 1),
        "on the host, GB": held.host_total / 1e9,
    }  # fmt: skip
    if after is None:
        yield {"cannot": "measured peaks: a CPU device has no `memory_stats`; the columns are empty"}
    elif before == after:
        yield {"cannot": f"the peak of {case}: the peak of the process did not rise during the step"}


def abstract_state(c: model.Sizes, stage: int, tier: str, mesh: Any) -> Any:
    """The state of a case, on a mesh of any devices."""
    region = model.remat(c.scan)
    if tier == INPUTS:
        plan = jzero.make_plan(jax.eval_shape(model.creator(c)).params, stage=stage, mesh=mesh)
        region = functools.partial(jzero.remat, plan=plan, offload="host", prevent_cse=not c.scan)
    return jzero.abstract(model.creator(c, region), stage=stage, mesh=mesh, offload=TIERS[tier])


def pod_peak(c: model.Sizes, stage: int, tier: str, config: dict[str, Any]) -> int | None:
    """Device bytes of the same step compiled for a pod of this machine's GPUs; None for a GPU that no pod has."""
    kind, count = config["machine"]["kind"].lower(), config["machine"]["count"]
    gpu = next((name for name in gpus() if name.split("-")[0] in kind), None)
    if gpu is None:
        return None
    pod = jzero.pod(gpu, hosts=1, gpus_per_host=count)
    state = abstract_state(c, stage, tier, pod.mesh({"data": count}))
    tokens = jax.ShapeDtypeStruct((c.rows * count, c.seq + 1), "int32")
    program = pod.compile(train_step, state, {"tokens": tokens}, donate_argnums=0)
    return jzero.explain(program, jzero.plan_of(state)).memory.total


def compared(compiled: int, before: int | None, after: int | None) -> dict[str, Any]:
    """The columns of compiled and measured bytes."""
    raised = before is not None and after is not None and after > before
    off = after / compiled - 1 if raised and after else None
    return {
        "compiled, GB": compiled / 1e9,
        "before, GB": None if before is None else before / 1e9,
        "measured, GB": after / 1e9 if raised and after else None,
        "off, %": None if off is None else 100 * off,
        "ok": None if off is None else abs(off) <= WITHIN,
    }


def findings(rows: list[dict[str, Any]]) -> list[str]:
    """The largest difference, in a line."""
    off = [(abs(r["off, %"]), r) for r in rows if r.get("off, %") is not None]
    if not off:
        return []
    worst, row = max(off, key=lambda pair: pair[0])
    where = f"{row['layers']}, stage {row['stage']}, {row['tier']}"
    met = sum(r["ok"] for _, r in off)
    return [f"Within 3 % in {met} of {len(off)} cases; the largest difference is {worst:.1f} % ({where})."]
