"""What `jzero plan --fit` calls `jzero.fit` with, and its answer as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax

from jzero.cli import presets
from jzero.cli.job import Job, Json
from jzero.cli.program import Subject
from jzero.core.types import PyTree
from jzero.proof.fitting.candidates import Candidate
from jzero.proof.fitting.fit import Fit, fit


def fitted(job: Job, say: Callable[[str], None]) -> Json:
    """The answer to a job: `text` to print, and `found`."""
    assert job.fit is not None
    subject, given = Subject.of(job), {k: v for k, v in job.fit.items() if k != "examples"}
    create, step, batch = subject.create, subject.step, subject.batch
    if subject.model is not None:
        assert job.preset is not None
        seq = subject.model.seq
        create, step = creator_of(presets.PRESETS[job.preset], seq), presets.train_step
        batch = ({"tokens": jax.ShapeDtypeStruct((job.fit["examples"], seq + 1), "int32")},)
        given["model"] = dataclasses.asdict(subject.model)
    found = fit(create, step, batch, pod=subject.pod, trainable=subject.trainable, say=say, **given)
    return {"text": str(found), "found": fit_json(found)}


def creator_of(preset: presets.Preset, seq: int) -> Callable[..., PyTree]:
    """The creation function of a preset, with its variants."""

    def create_state(*, remat: bool = True, tiled_loss: bool = False) -> PyTree:
        return presets.creator(dataclasses.replace(preset, remat=remat, tiled_loss=tiled_loss), seq=seq)()

    return create_state


def fit_json(found: Fit) -> Json:
    """What was found, in bytes and seconds."""
    rows = {"best": found.best, "runner_up": found.runner_up}
    answer: Json = {name: None if c is None else _candidate(found, c) for name, c in rows.items()}
    answer["refused"] = [_candidate(found, c) for c in found.refused]
    return answer | {"limit": found.limit, "needed": found.needed, "notes": list(found.notes)}


def _candidate(found: Fit, c: Candidate) -> Json:
    option, fields = c.option, c.option.fields()
    if option.config.offload is not None:
        fields["offload"] = dataclasses.asdict(fields["offload"])
    return {
        "option": str(option), "config": fields, "mesh": dict(option.axes), "accumulate": option.accumulate,
        "offered": dict(option.offered), "examples": c.examples, "seconds": c.seconds.total,
        **{f"{name}_seconds": getattr(c.seconds, name) for name in ("math", "wire", "update", "pcie")},
        "estimated": c.estimate.total, "compiled": found.compiled.get(c), "predicted": round(found.predicted(c)),
        "host_per_node": c.estimate.host_per_node,
    }  # fmt: skip
