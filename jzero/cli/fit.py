"""What `jzero plan --fit` calls `jzero.fit` with, and its answer as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jzero.cli import presets
from jzero.cli.inputs import load_function
from jzero.cli.job import Job, Json
from jzero.cli.program import batch_of
from jzero.core.types import PyTree
from jzero.proof.fitting.candidates import Candidate
from jzero.proof.fitting.fit import Fit, fit
from jzero.proof.pod import pod

SIZES = ("layers", "width", "heads", "seq", "vocab", "ffn", "flash")


def fitted(job: Job, say: Callable[[str], None]) -> Json:
    """The answer to a job: `text` to print, and `found`."""
    assert job.fit is not None
    machine = pod(job.gpu, hosts=job.hosts, gpus_per_host=job.gpus_per_host)
    given: dict[str, Any] = {k: v for k, v in job.fit.items() if k != "examples"}
    if job.preset is not None:
        preset = presets.PRESETS[job.preset]
        seq = job.seq or preset.seq
        create, step = creator_of(preset, seq), presets.train_step
        batch: PyTree = {"tokens": jax.ShapeDtypeStruct((job.fit["examples"], seq + 1), "int32")}
        sizes = preset.transformer(seq=seq, batch=1)
        given["model"] = {name: getattr(sizes, name) for name in SIZES}
    else:
        assert job.create is not None
        assert job.step is not None
        assert job.batch is not None
        create, step = load_function(job.create, "--create"), load_function(job.step, "--step")
        batch = tuple(batch_of(job.batch))
        given["trainable"] = None if job.trainable is None else load_function(job.trainable, "--trainable")
    found = fit(create, step, batch, pod=machine, say=say, **given)
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
