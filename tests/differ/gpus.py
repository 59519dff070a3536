"""The step of a case compiled for GPUs, and what is wrong with what jzero says of it.

The bytes that `explain` counts are those of a second reader (`wire_reader.py`), and are within 5 % of the closed form,
or `check` has a finding, or notes that less is sent.
"""

from __future__ import annotations

from pathlib import Path

import jax
from programs import QUICK
from wire_reader import sent

import jzero
from differ.grammar import OUTSIDE
from differ.models import batch_of
from differ.runs import LinenRun, NnxRun

WIDER = 16  # than a case for the CPU: or a model has no more bytes than its loss
SHARE = 0.05
FLAVOURS = {"linen": LinenRun, "nnx": NnxRun}


def suits(case: dict) -> bool:
    """True for a case whose step is one program of several GPUs."""
    here = case["flavour"] in FLAVOURS and case["step"] != "eager"
    mesh = case["mesh"]["kind"] != "explicit" and case["mesh"]["n"] > 1
    return here and mesh and case["config"]["tier"] not in OUTSIDE and case["config"]["stage"] > 0


def wrong(case: dict, folder: Path) -> str:
    """What is wrong, empty for nothing."""
    config = {k: v for k, v in case["config"].items() if k != "in_flight_bytes"}  # so few for a small model alone
    case = {k: v for k, v in case.items() if k != "reference"}  # a model of its own beside it, with gathers of its own
    case |= {"config": config, "width": case["width"] * WIDER, "born": True, "fed": False, "donate": True}
    target = jzero.pod("h200", gpus_per_host=case["mesh"]["n"])
    run = FLAVOURS[case["flavour"]](case, folder, abstract=True, devices=target.devices)
    plan = run.plan
    batch = {k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in batch_of(case, 0).items()}
    key = jax.eval_shape(lambda: jax.random.key(0))
    args = (run.state, batch, key) if case["flavour"] == "linen" else (*run.state, batch)
    compiled = target.compile(run.run, *args, plan=plan, compiler_options=QUICK)
    report, found = jzero.explain(compiled, plan), jzero.findings(compiled, plan)
    other = sent(compiled.as_text())
    if report.wire.total != other:
        return f"explain says {report.wire.total} bytes, the second reader {other}"
    closed = jzero.estimate(plan, tx=run.wrapped(), uses=jzero.param_uses(run.run, *args, plan=plan)).wire
    if abs(report.wire.total - closed) > SHARE * max(closed, report.wire.psi_bytes) and not (found or found.notes):
        return f"{report.wire.total} bytes are sent, the estimate says {closed}, and check says nothing"
    return ""
