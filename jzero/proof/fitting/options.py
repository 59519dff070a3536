"""What can be chosen for a step on a pod, simplest first."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jzero.config import Offload, ZeroConfig
from jzero.core.errors import human_bytes

OFFERED = ("remat", "tiled_loss")
"""Keywords by which a creation function offers variants of its model."""
TIERS: tuple[Offload | None, ...] = (None, Offload(tier="host"), Offload(tier="host", params="host"))
LOWER = (None, "bfloat16", "int8")
"""Dtypes of moments, where a lower precision is allowed."""


@dataclasses.dataclass(frozen=True, eq=False)
class Option:
    """One choice.

    Attributes:
      config: of the state.
      axes: sizes of the mesh, by name.
      accumulate: micro-batches in a step.
      offered: what the creation function is called with.
    """

    config: ZeroConfig
    axes: Mapping[str, int]
    accumulate: int
    offered: Mapping[str, bool]

    @property
    def given(self) -> tuple[tuple[str, bool], ...]:
        """`offered`, in a form that can be a key."""
        return tuple(self.offered.items())

    @property
    def complexity(self) -> tuple[Any, ...]:
        """Of two options that take equally long the one with less of this is better."""
        c = self.config
        lower = LOWER.index(None if c.moment_dtype is None else str(c.moment_dtype))
        return (
            TIERS.index(c.offload), lower, c.master_dtype == "remainder", len(self.axes), self.accumulate,
            sum(self.offered.values()), c.stage, not c.reshard_after_forward, c.kept_gathered_bytes > 0,
        )  # fmt: skip

    @property
    def base(self) -> ZeroConfig:
        """The config without lower precision: by its bytes time is counted, so that only memory asks for less."""
        return dataclasses.replace(self.config, master_dtype="auto", moment_dtype=None)

    @property
    def resident(self) -> ZeroConfig:
        """The config with the state in device memory and without lower precision."""
        return dataclasses.replace(self.base, offload=None)

    @property
    def held(self) -> tuple[int, bool, int]:
        """What decides which weights and gradients are whole during a step."""
        return self.config.stage, self.config.reshard_after_forward, self.config.kept_gathered_bytes

    def fields(self) -> dict[str, Any]:
        """The fields of the config that are not the default ones."""
        given = ((f.name, f.default, getattr(self.config, f.name)) for f in dataclasses.fields(ZeroConfig))
        found = {name: value for name, default, value in given if value != default or name == "stage"}
        return {name: str(x) if isinstance(x, np.dtype) else x for name, x in found.items()}

    def __str__(self) -> str:
        """In one line, for a table."""
        c = self.config
        hybrid = ", hpZ" if c.param_axis is not None else ", HSDP" if c.batch_axis is not None else ""
        stay = f", {human_bytes(c.kept_gathered_bytes)} of weights kept" if c.kept_gathered_bytes else ""
        stay = stay if c.reshard_after_forward else ", weights kept"
        parts = [
            f"stage {c.stage}{stay}{hybrid}",
            *(["state on the host"] if c.offload else []),
            *(["params on the host"] if c.params_on_host else []),
            *([f"{self.accumulate} micro-batches"] if self.accumulate > 1 else []),
            *(name for name, on in self.offered.items() if on),
            *(["master remainder"] if c.master_dtype == "remainder" else []),
            *([f"moments {c.moment_dtype}"] if c.moment_dtype is not None else []),
        ]
        return ", ".join(parts)


def layouts(
    hosts: int, gpus_per_host: int, kept: Sequence[int] = ()
) -> Iterator[tuple[dict[str, Any], dict[str, int]]]:
    """Fields of a config, and the mesh that they need; `kept`: bytes of gathered weights that may stay."""
    flat = {"data": hosts * gpus_per_host}
    for stage in range(4):
        yield {"stage": stage}, flat
    for size in kept:
        yield {"stage": 3, "kept_gathered_bytes": size}, flat
    yield {"stage": 3, "reshard_after_forward": False}, flat
    if hosts > 1 and gpus_per_host > 1:
        by_host, both = {"replica": hosts, "data": gpus_per_host}, ("replica", "data")
        yield {"stage": 3, "axis": both, "param_axis": "data"}, by_host  # hpZ
        yield {"stage": 2, "batch_axis": both}, by_host  # HSDP
        yield {"stage": 3, "batch_axis": both}, by_host


def options(
    hosts: int, gpus_per_host: int, accumulates: Sequence[int], offers: Sequence[str], kept: Sequence[int] = ()
) -> Iterator[Option]:
    """All options with the state in device memory, in the optimizer's own precision.

    Args:
      hosts, gpus_per_host: of the pod.
      accumulates: numbers of micro-batches.
      offers: those of `OFFERED` that the creation function takes.
      kept: bytes of gathered weights that may stay for the backward pass.
    """
    variants = [dict(zip(offers, on, strict=True)) for on in itertools.product((False, True), repeat=len(offers))]
    for (fields, axes), k, offered in itertools.product(layouts(hosts, gpus_per_host, kept), accumulates, variants):
        yield Option(ZeroConfig(**fields), axes, k, offered)


def smaller(option: Option, *, lower_precision: bool) -> Iterator[Option]:
    """The same with fewer bytes on the device: none of them is faster.

    Args:
      option: one of `options`.
      lower_precision: moments may be stored in fewer bits.
    """
    masters, moments = ("auto", "remainder"), LOWER if lower_precision else LOWER[:1]
    for tier, master, moment in itertools.islice(itertools.product(TIERS, masters, moments), 1, None):
        with contextlib.suppress(ValueError, NotImplementedError):  # this stage or tier does not take that
            config = dataclasses.replace(option.config, offload=tier, master_dtype=master, moment_dtype=moment)
            yield dataclasses.replace(option, config=config)
