"""`jzero plan`: stages side by side for a pod, estimated and compiled; `jzero explain`: one stage in full."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro

from jzero.cli.bandwidths import BANDWIDTHS, Bandwidths
from jzero.cli.inputs import (
    InputError,
    check_file,
    names_function,
    parse_axes,
    parse_batch,
    parse_bytes,
    parse_names,
    parse_stages,
)
from jzero.cli.job import Answers, Asked, Job, Json, as_json
from jzero.cli.presets import PRESETS
from jzero.cli.process import run_fit, run_job
from jzero.cli.show import OLDER, VARIABLE, findings_text, stage_table, title
from jzero.config import Offload, ZeroConfig
from jzero.core.errors import check_int, nearest
from jzero.proof.page import page_of
from jzero.proof.pod import JAX_TAKES, check_pod, gpu_bytes

FETCHES, OUTSIDE = 3, 2
"""The least stage whose params can live in host memory, and that of an update outside of the program."""
ALONE = f"which alone gathers weights: --stages {FETCHES}, or --stage {FETCHES} of jzero explain"
WHOLE_BELOW = "below it the model reads whole params on the device"
NO_FILES = "no files are written by a plan"
OF_FIT = {"global_batch", "memory", "host_memory", "lower_precision"}
"""The flags that belong to --fit."""
READ_BY_FIT = {*OF_FIT, "fit", "bandwidths", "memory_fraction", "json"}
"""The flags that --fit reads, besides those of the subject and the pod."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs(Asked):
    """What is compiled, and for which pod."""

    mesh: str | None = None
    """Mesh axes from the outermost to the innermost, "replica=8,data=8"; all devices on --axis if omitted."""
    axis: str = "data"
    """Mesh axis, or axes with commas, that share optimizer state and gradients."""
    batch_axis: str | None = None
    """Mesh axes that split the batch; --axis if omitted."""
    param_axis: str | None = None
    """Stage 3: mesh axes that share params; --axis if omitted."""
    kept_gathered_bytes: int = 0
    """Stage 3 alone: bytes of gathered weights of a device that stay for the backward pass, the smallest weights
    first."""
    min_shard_bytes: int | Literal["auto"] = "auto"
    """Leaves smaller than this stay whole; "auto" lets them add at most 1 % to a device's optimizer state."""
    master_dtype: Literal["remainder"] | None = None
    """remainder: the fp32 master of a bf16 param is stored as the 16 bits that the param lacks."""
    moment_dtype: Literal["int8", "bfloat16", "float32"] | None = None
    """Dtype of the stored moments; that of the params (or of their masters) if omitted."""
    gather_dtype: Literal["int8", "float8_e4m3fn"] | None = None
    """Stage 3 alone: the dtype in which weights travel; that of the params, or of the model's casts, if omitted."""
    reduce_dtype: Literal["int4", "int8", "bfloat16", "float32"] | None = None
    """Stages 2 and 3: the dtype in which gradients travel; that in which they are made if omitted."""
    update_dtype: Literal["int8"] | None = None
    """Stages 1 and 2, and 3 with --param-axis: the dtype in which what an update adds to bf16 params travels."""
    offload: Literal["host", "disk"] | None = None
    """Keep optimizer state and masters in host memory and stream them through the device, or in files on a disk."""
    update: Literal["device", "host"] = "device"
    """host: the CPU runs the optimizer on state that is offloaded, outside of the compiled program. The step returns
    gradients. Always so with --offload disk."""
    buffer_bytes: int | None = None
    """With --offload disk: bytes of host memory in each process through which state goes; 1 GiB if omitted."""
    bandwidths: Bandwidths = dataclasses.field(default_factory=lambda: Bandwidths())
    """For the time of the wire, and that of an update outside of the program."""
    offload_params: Literal["host"] | None = None
    """Keep params and their gradients in host memory too, and fetch each weight where it is used: stage 3 alone.
    Implies --offload host."""
    in_flight_bytes: int | None = None
    """With --offload: bytes of state of one device that may be on it at once; chosen from its size if omitted."""
    html: Path | None = None
    """Write what XLA made of each stage into this file, as one page: memory along the step with what is alive at the
    peak, collectives, findings, the plan."""
    memory_fraction: float | None = None
    """Part of a GPU's memory that a program may take; if omitted, what JAX allocates: XLA_CLIENT_MEM_FRACTION or 0.75.
    The rest is for CUDA, NCCL and fragments."""

    def job(self, *, stages: list[int], search: bool, detail: bool = False) -> Job:
        """The job for these flags, checked as far as possible without loading the model.

        Raises:
          InputError, ValueError, TypeError: flags that do not go together or are out of range.
        """
        check_pod(self.gpu, self.hosts, self.gpus_per_host)
        if self.html is not None:
            check_file(self.html, "--html", ".html")
        self._check_subject()
        fields: Json = {"axis": parse_names(self.axis), "min_shard_bytes": self.min_shard_bytes}
        for name in ("batch_axis", "param_axis"):
            if getattr(self, name) is not None:
                fields[name] = parse_names(getattr(self, name))
        if self.gather_dtype is not None and stages != [FETCHES]:
            raise InputError(f"--gather-dtype needs stage {FETCHES}, {ALONE}.")
        if self.kept_gathered_bytes != 0:
            if stages != [FETCHES]:
                raise InputError(f"--kept-gathered-bytes needs stage {FETCHES}, {ALONE}.")
            fields["kept_gathered_bytes"] = self.kept_gathered_bytes
        gather_new = {1, 2} if self.param_axis is None else {1, 2, FETCHES}
        if self.update_dtype is not None and not set(stages) <= gather_new:
            raise InputError(
                "--update-dtype needs stages that gather new params: --stages 1,2, or "
                f"--stages {FETCHES} with --param-axis."
            )
        for name in ("master_dtype", "moment_dtype", "gather_dtype", "reduce_dtype", "update_dtype"):
            if getattr(self, name) is not None:
                fields[name] = getattr(self, name)
        if self.offload_params is not None and stages != [FETCHES]:
            raise InputError(f"--offload-params host needs stage {FETCHES}: {WHOLE_BELOW}.")
        bandwidths = BANDWIDTHS | self.bandwidths.given()
        tier = self._tier()
        if tier:
            fields["offload"] = tier
        offload = Offload(**tier) if tier else None
        for stage in stages:
            ZeroConfig(**{**fields, "stage": stage, "offload": offload})
        fraction = _taken_by_jax() if self.memory_fraction is None else self.memory_fraction
        if not 0 < fraction <= 1:
            raise InputError(f"--memory-fraction {fraction}: must be above 0 and at most 1.")
        asked = {field.name: getattr(self, field.name) for field in dataclasses.fields(Asked)}
        return Job(
            **asked, mesh=parse_axes(self.mesh, "--mesh"), fields=fields, stages=stages, search=search,
            fraction=fraction, detail=detail, bandwidths=bandwidths, page=self.html is not None,
        )  # fmt: skip

    def write_page(self, job: Job, answers: Answers) -> None:
        """Writes the page of `--html`: the stages that were compiled."""
        if self.html is None:
            return
        if not answers["pages"]:
            print(f"{self.html} was not written: no stage was compiled.", file=sys.stderr)
            return
        head, subtitle = title(job, answers).splitlines()
        limit = job.fraction * answers["about"]["memory"]
        pages = [page for _, page in sorted(answers["pages"].items())]
        self.html.write_text(page_of(pages, title=head, subtitle=subtitle, limit=limit), encoding="utf-8")

    def _tier(self) -> Json:
        """The fields of `jzero.Offload` for these flags; empty if nothing is offloaded."""
        if self.buffer_bytes is not None and self.offload != "disk":
            raise InputError("--buffer-bytes belongs to --offload disk.")
        if self.offload is None and self.offload_params is None:
            wrong = "--in-flight-bytes" if self.in_flight_bytes is not None else "--update host"
            if self.in_flight_bytes is not None or self.update == "host":
                raise InputError(f"{wrong} belongs to --offload host.")
            return {}
        given = {
            "tier": self.offload or self.offload_params, "params": self.offload_params,
            "update": "host" if self.update == "host" else None,
            "in_flight_bytes": self.in_flight_bytes, "buffer_bytes": self.buffer_bytes,
            "path": NO_FILES if self.offload == "disk" else None,
        }  # fmt: skip
        return {name: value for name, value in given.items() if value is not None}

    def _check_subject(self) -> None:
        given = [name for name in ("create", "step", "batch", "trainable") if getattr(self, name) is not None]
        if self.preset is not None:
            if given:
                raise InputError(f"--preset brings its own model: leave out --{given[0]}.")
            if self.preset not in PRESETS:
                near = nearest(self.preset, PRESETS)
                raise InputError(f"--preset {self.preset}: unknown.{near} Known: {', '.join(PRESETS)}.")
            check_int(self.batch_per_gpu, "--batch-per-gpu", where="jzero", low=1)
            check_int(self.accumulate, "--accumulate", where="jzero", low=1)
            if self.seq is not None:
                check_int(self.seq, "--seq", where="jzero", low=2)
            return
        missing = [f"--{name}" for name in ("create", "step", "batch") if name not in given]
        if missing:
            raise InputError(
                f"{', '.join(missing)} not given. Pass --create, --step and --batch, or --preset gpt2-xl (known: "
                f"{', '.join(PRESETS)})."
            )
        if self.seq is not None:
            raise InputError("--seq belongs to --preset; --batch has the length of yours.")
        if self.tiled_loss:
            raise InputError("--tiled-loss belongs to --preset; --step has a loss of its own.")
        if self.accumulate != 1:
            raise InputError("--accumulate belongs to --preset; --step has micro-batches of its own.")
        assert self.batch is not None
        if not names_function(self.batch):
            parse_batch(self.batch)


def _taken_by_jax() -> float:
    """The part of a GPU's memory that JAX takes, by its variable or the one of older versions.

    Raises:
      InputError: the variable is not a number.
    """
    for name in (VARIABLE, OLDER):
        if text := os.environ.get(name):
            try:
                return float(text)
            except ValueError:
                raise InputError(f"{name}={text}: must be a number above 0 and at most 1.") from None
    return JAX_TAKES


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanCommand(Inputs):
    """Stages side by side: bytes per device and on the wire, estimated and as XLA compiled them, and what fits."""

    stages: str = "0,1,2,3"
    """Stages to compile, commas between them."""
    search: bool = False
    """Look for the largest micro-batch that still fits, by compiling others: three or four times as long."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print JSON, in bytes, in place of the table."""
    plot: Path | None = None
    """Draw memory per stage, and over the number of GPUs, into this file (png, svg, pdf)."""
    fit: bool = False
    """Choose stage, offload, micro-batches and remat instead: the fastest that fits, by a model of the time of a step.
    Reads the subject, the pod, --memory, --bandwidths and the flags below."""
    global_batch: int | None = None
    """With --fit and --preset: sequences in a step, over all devices; --batch-per-gpu x --accumulate for each GPU if
    omitted."""
    memory: str | None = None
    """With --fit: what a program may take of a GPU, "72GB", in place of --memory-fraction."""
    host_memory: str = "1000GB"
    """With --fit: how much memory each host has for offloaded state."""
    lower_precision: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """With --fit: moments may be stored in bfloat16 or int8."""

    def run(self) -> int:
        """Compiles, prints, draws; 1 if a stage could not be compiled, or with --fit if nothing fits."""
        if self.fit:
            return self._fit()
        for name in sorted(OF_FIT):
            if getattr(self, name) != getattr(PlanCommand, name):
                raise InputError(f"--{name.replace('_', '-')} belongs to --fit.")
        stages, left_out = parse_stages(self.stages), []
        if self.offload_params is not None and FETCHES in stages:
            stages, left_out = [FETCHES], [s for s in stages if s != FETCHES]
        elif max(stages) >= OUTSIDE and (self.update == "host" or self.offload == "disk"):
            stages, left_out = [s for s in stages if s >= OUTSIDE], [s for s in stages if s < OUTSIDE]
        job = self.job(stages=stages, search=self.search)
        if self.plot is not None:
            if importlib.util.find_spec("matplotlib") is None:
                raise InputError('--plot needs matplotlib: pip install "jzero[pod]".')
            check_file(self.plot, "--plot", ".png", ".svg", ".pdf")
            job = dataclasses.replace(job, sizes=stages)
        answers = run_job(job)
        results = list(answers["results"].values())
        if self.json:
            print(json.dumps(as_json(job, answers), indent=2))
        else:
            why = f"--offload-params host needs stage {FETCHES}, {WHOLE_BELOW}"
            why = why if self.offload_params else "an update outside of the program needs stage 2 or 3"
            note = [f"stage {' and '.join(map(str, left_out))} left out: {why}."] if left_out else []
            print("\n".join([title(job, answers), *note, *stage_table(results, job.fraction),
                             *findings_text(results)]))  # fmt: skip
        if self.plot is not None:
            from jzero.cli.plot import draw

            draw(self.plot, job, answers)
        self.write_page(job, answers)
        return int(any("crash" in r for r in results))

    def _fit(self) -> int:
        job = self.job(stages=[0, 1, 2, 3], search=False)
        read = ({f.name for f in dataclasses.fields(Asked)} | READ_BY_FIT) - {"tiled_loss"}
        for field in dataclasses.fields(self):
            if field.name not in read and getattr(self, field.name) != field.default:
                raise InputError(f"--fit does not go with --{field.name.replace('_', '-')}: it chooses by itself.")
        for name in ("memory", "disk"):
            if getattr(self.bandwidths, name) is not None:
                raise InputError(f"--fit does not go with --bandwidths.{name}: it tries no update on the CPU.")
        share = round(job.fraction * gpu_bytes(self.gpu))
        given: Json = {
            "memory_bytes": share if self.memory is None else parse_bytes(self.memory, "--memory"),
            "host_bytes": parse_bytes(self.host_memory, "--host-memory"), "lower_precision": self.lower_precision,
            "rates": {name: 1e9 * value for name, value in self.bandwidths.given().items()},
        }  # fmt: skip
        if self.preset is not None:
            each = self.batch_per_gpu * self.accumulate * self.hosts * self.gpus_per_host
            given["examples"] = each if self.global_batch is None else self.global_batch
            check_int(given["examples"], "--global-batch", where="jzero", low=1)
        elif self.global_batch is not None:
            raise InputError("--global-batch belongs to --preset; --batch is the global one of yours.")
        answer = run_fit(dataclasses.replace(job, fit=given))
        print(json.dumps(answer["found"], indent=2) if self.json else answer["text"])
        return int(answer["found"]["best"] is None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExplainCommand(Inputs):
    """One stage in full: every collective, the memory, and what did not engage."""

    stage: int = 2
    """ZeRO stage."""

    def run(self) -> int:
        """Compiles and prints; 1 if the stage could not be compiled or did not engage."""
        check_int(self.stage, "--stage", where="jzero explain", low=0, high=3)
        job = self.job(stages=[self.stage], search=False, detail=True)
        answers = run_job(job)
        (result,) = answers["results"].values()
        report = [result["report"]] if "report" in result else stage_table([result], job.fraction)
        print("\n".join([title(job, answers), "", *report, *findings_text([result])]))
        self.write_page(job, answers)
        return int("crash" in result or bool(result["findings"]))
