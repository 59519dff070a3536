"""A job for the compiling process, as plain data that travels as JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, TypedDict

from jzero.config import Offload, ZeroConfig

Json = dict[str, Any]
"""An object of JSON; what it holds is checked where it is made."""


class Answers(TypedDict):
    """What a job answers: about the pod, its result for each stage, bytes by stage and number of GPUs, pages."""

    about: Json
    results: dict[int, Json]
    lines: dict[int, dict[int, int]]
    pages: dict[int, Json]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """The subject and the pod, as the command line has them: `Job` passes them on unchanged."""

    create: str | None = None
    """module:function (or path/to/file.py:function) without arguments that returns a TrainState or an NNX pair."""
    step: str | None = None
    """module:function of the train step: (state, batch) or (model, optimizer, batch); plain or jitted."""
    batch: str | None = None
    """The whole batch, over all devices: "tokens=int32[1024,1025]" (named leaves make a dict), "float32[64,8]
    int32[64]" (arguments one by one), or a module:function that returns it."""
    trainable: str | None = None
    """module:function of (path, leaf) -> bool: which params train; the others are frozen. Not needed if the
    optimizer says so (wrt= of an NNX optimizer)."""
    preset: str | None = None
    """A known model in place of --create, --step and --batch: gpt2-small, gpt2-medium, gpt2-large, gpt2-xl,
    gpt-7.5b, gpt-1t, llama3-8b, llama2-13b, llama3-70b."""
    seq: int | None = None
    """Tokens in a sequence of a preset; the model's own length if omitted."""
    batch_per_gpu: int = 1
    """Sequences per device of a preset, in each micro-batch."""
    accumulate: int = 1
    """Micro-batches in a step of a preset."""
    tiled_loss: bool = False
    """The loss of a preset in tiles of tokens, without whole logits (jzero.tiled_loss)."""
    gpu: str = "h200"
    """a100-80gb, h100, h200 or b200."""
    hosts: int = 1
    """Hosts of the pod."""
    gpus_per_host: int = 8
    """GPUs in each."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job(Asked):
    """What to compile.

    Attributes:
      mesh: sizes by axis name; None: all devices on the first of the axes.
      fields: other fields of `ZeroConfig`, as JSON holds them; see `config`.
      stages: which to compile, in this order.
      search: whether to look for the largest micro-batch that fits.
      fraction: how much of the GPU's memory a program may take.
      detail: whether to answer with the whole report.
      page: whether to answer with what a page of `--html` shows.
      bandwidths: GB per second, by the names of `Bandwidths`.
      sizes: stages to estimate for other numbers of GPUs, too.
      fit: what `jzero.fit` is called with; None: stages are compiled.
    """

    mesh: dict[str, int] | None
    fields: Json
    stages: list[int]
    search: bool
    fraction: float
    detail: bool = False
    page: bool = False
    bandwidths: dict[str, float] = dataclasses.field(default_factory=dict)
    sizes: list[int] = dataclasses.field(default_factory=list)
    fit: Json | None = None

    def config(self, **more: Any) -> ZeroConfig:
        """The config of `fields` and `more`; a dict for `offload` holds the fields of `jzero.Offload`.

        If neither names a stage, it is the highest one of the job.
        """
        fields: Json = {"stage": max(self.stages), **self.fields, **more}
        if isinstance(fields.get("offload"), dict):
            fields["offload"] = Offload(**fields["offload"])
        return ZeroConfig(**fields)

    def to_json(self) -> str:
        """The job as one line of JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """The reverse of `to_json`."""
        job = json.loads(text)
        fields = {k: tuple(v) if isinstance(v, list) else v for k, v in job["fields"].items()}
        return cls(**(job | {"fields": fields}))


def as_json(job: Job, answers: Answers) -> Json:
    """What `--json` prints."""
    asked = {k: v for k, v in dataclasses.asdict(job).items() if k not in ("detail", "sizes", "page")}
    out: Json = {
        "asked": asked,
        "pod": answers["about"],
        "stages": list(answers["results"].values()),
    }
    if answers["lines"]:
        out["total_by_gpus"] = answers["lines"]
    return out
