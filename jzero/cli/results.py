"""What a job answers about a subject at one stage: estimated and compiled bytes, findings, what fits."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import optax

from jzero.cli.inputs import InputError
from jzero.cli.job import Json
from jzero.cli.program import Subject
from jzero.cli.search import largest_that_fits
from jzero.core.errors import counted
from jzero.core.types import PyTree
from jzero.flax.adapters import is_pair
from jzero.flax.shard import plan_of
from jzero.proof.check import findings
from jzero.proof.memory import Estimate, estimate
from jzero.proof.page import program_of
from jzero.proof.pod import pod
from jzero.proof.report import Report, explain, memory_of
from jzero.sharding import Plan

Say = Callable[[str], None]


def result(subject: Subject, stage: int, say: Say) -> Json:
    """Everything about one stage, as plain data in bytes; `say(doing)` reports progress."""
    began = time.perf_counter()
    say("laying out the state")
    state, plan = subject.state(stage)
    accumulate = subject.job.accumulate if subject.job.accumulate > 1 else None  # `uses` knows those of a --step
    known = {"model": subject.model, "uses": subject.uses(state, plan), "accumulate": accumulate}
    planned = estimate(plan, tx=_tx(state), **known)
    say(f"compiling for {len(subject.pod.devices)} {subject.pod.gpu}")
    compiled = subject.compile(state, plan, subject.micro_batch, buffers=subject.job.page)
    report = explain(compiled, plan)
    found = findings(compiled, plan)
    assert report.memory is not None
    total, limit = report.memory.total, subject.job.fraction * subject.pod.memory_bytes
    answer: Json = {
        "stage": stage,
        "values": sum(x.size for x in plan.layouts),
        "micro_batch": subject.micro_batch,
        "tokens_per_step": subject.tokens(known["uses"]),
        "estimate": estimate_json(planned),
        "compiled": report_json(report, planned.devices_per_process),
        "fits": total <= limit,
        "findings": [dataclasses.asdict(f) for f in found],
    }
    rates = {name: value * 1e9 for name, value in subject.job.bandwidths.items()}
    within, between = rates.pop("within_host"), rates.pop("between_hosts")
    answer["wire_seconds"] = planned.wire_seconds(within_host=within, between_hosts=between)
    answer["gb_per_second"] = subject.job.bandwidths
    if plan.config.updates_outside:
        answer["update"] = {"seconds": planned.update_seconds(**rates)}
    if subject.job.detail:
        answer["report"] = str(report)
    if subject.job.page:
        answer["page"] = program_of(compiled, plan, report, found)
    if subject.job.search and subject.micro_batch:
        cuts = known["uses"].micro_batches if subject.model is None else 1
        answer["largest"] = search(subject, state, plan, total, limit, say, cuts)
    return answer | {"seconds": round(time.perf_counter() - began, 1)}


def search(subject: Subject, state: PyTree, plan: Plan, total: int, limit: float, say: Say, cuts: int = 1) -> Json:
    """The largest number of examples per device that fits, a multiple of the `cuts` that the step makes.

    Another size may be one that the step refuses, since it cuts its batch in a way that is not known: the search ends.
    """
    unit = cuts if subject.micro_batch % cuts == 0 else 1
    found = {subject.micro_batch // unit: total}

    def measure(units: int) -> int:
        say(f"compiling with {counted(units * unit, 'example')} per device, to see what fits")
        memory = memory_of(subject.compile(state, plan, units * unit))
        assert memory is not None
        found[units] = memory.total
        return memory.total

    try:
        size, exact = largest_that_fits(measure, dict(found), limit)
    except InputError:
        size, exact = max((n for n, held in found.items() if held <= limit), default=0), False
    return {"micro_batch": size * unit, "exact": exact}


def totals_over(subject: Subject, counts: list[int], stage: int) -> dict[int, int]:
    """Estimated bytes per device at a stage by number of devices; of several mesh axes the first one grows."""
    job, totals = subject.job, {}
    (first, size), *rest = subject.mesh.shape.items()
    inner, accumulate = subject.mesh.devices.size // size, job.accumulate
    if subject.model is None:  # a --step has micro-batches of its own
        here = subject.abstract(stage, subject.mesh)
        accumulate = subject.uses(here, plan_of(here)).micro_batches
    for n in (n for n in counts if n % inner == 0):
        hosts = max(1, n // job.gpus_per_host)
        if n % hosts:
            continue
        mesh = pod(job.gpu, hosts=hosts, gpus_per_host=n // hosts).mesh({first: n // inner, **dict(rest)})
        state = subject.abstract(stage, mesh)
        totals[n] = estimate(plan_of(state), tx=_tx(state), model=subject.model, accumulate=accumulate).total
    return totals


def estimate_json(e: Estimate) -> Json:
    """An estimate as plain data, in bytes."""
    names = (
        "params", "grads", "opt_state", "host", "activations", "working", "states", "total", "wire",
        "activations_host", "recomputed", "in_flight", "host_params", "host_grads", "host_per_process",
        "host_per_node", "to_device", "to_host", "updated", "disk", "disk_per_node",
    )  # fmt: skip
    wire = {"wire_psi": e.wire_psi, "wire_by_axes": dict(e.wire_by_axes), "wire_reasons": dict(e.reasons)}
    return {k: getattr(e, k) for k in names} | wire


def report_json(report: Report, devices_per_node: int = 1) -> Json:
    """Memory, wire and host traffic of a compiled program as plain data, in bytes."""
    assert report.memory is not None
    names = ("params", "opt_state", "rest", "arguments", "outputs", "aliased", "temp", "total", "peak")
    memory = {k: getattr(report.memory, k) for k in (*names, "host_arguments", "host_total")}
    wire = {"wire": report.wire.total, "wire_psi": report.wire.psi}
    memory["host_per_node"] = devices_per_node * report.memory.host_total
    wire |= report.pcie
    if report.activations is not None:
        wire["activations"] = dataclasses.asdict(report.activations)
    return memory | wire | {"wire_by_axes": dict(report.wire.by_axis), "wire_by_op": dict(report.wire.by_op)}


def _tx(state: PyTree) -> optax.GradientTransformation:
    return state[1].tx if is_pair(state) else state.tx
