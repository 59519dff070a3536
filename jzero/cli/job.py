"""A job for the compiling process, and what it answers: plain data that travels as JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from jzero.config import Offload, ZeroConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What to compile.

    Attributes:
      create, step, batch: as the command line gives them; None with a preset.
      preset, seq, batch_per_gpu: a known model, its window, sequences per device.
      gpu, hosts, gpus_per_host: the pod.
      mesh: sizes by axis name; None: all devices on the first of the axes.
      fields: other fields of `ZeroConfig`, as JSON holds them; see `config`.
      stages: to compile, in this order.
      search: look for the largest micro-batch that fits.
      fraction: of the GPU's memory that a program may take.
      accumulate: micro-batches in a step of a preset.
      detail: answer with the whole report.
      bandwidths: GB per second of `pcie`, `memory` and `disk`, for an update outside of the program.
      sizes: stages to estimate for other numbers of GPUs as well.
    """

    create: str | None
    step: str | None
    batch: str | None
    preset: str | None
    seq: int | None
    batch_per_gpu: int
    gpu: str
    hosts: int
    gpus_per_host: int
    mesh: dict[str, int] | None
    fields: dict[str, Any]
    stages: list[int]
    search: bool
    fraction: float
    accumulate: int = 1
    detail: bool = False
    bandwidths: dict[str, float] = dataclasses.field(default_factory=dict)
    sizes: list[int] = dataclasses.field(default_factory=list)

    def config(self, **more: Any) -> ZeroConfig:
        """The config that `fields` and `more` mean; an `offload` that is a dict holds the fields of `jzero.Offload`.

        Without a stage that of the last one.
        """
        fields: dict[str, Any] = {"stage": max(self.stages), **self.fields, **more}
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
