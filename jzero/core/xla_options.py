"""What depends on the version of jaxlib: XLA options for one `jax.jit`, and what an old XLA:GPU gets wrong.

[Note: options]
Ties put every collective in its place; the scheduler chooses whether it runs beside compute. By default XLA:GPU has one
collective in flight at a time, so only the last weight of a bucket of stage 3 is gathered beside a matmul. It joins
collectives by the bytes of a *shard* (reduce-scatter, 30 MiB: 2 GB of whole gradients on 64 GPUs) or of a *result*
(all-gather). The options here allow more than one in flight and set both limits to `bucket_bytes`. They change neither
numbers nor bytes on the wire. `benchmarks/buckets.py` prints what they do.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import jax
import jaxlib

from jzero.core.errors import warn

GPUS = ("gpu", "cuda", "rocm")
TESTED = ((0, 10), (0, 12))  # oldest and newest jaxlib that these names were compiled with
IN_FLIGHT = 4
PIPELINED = "xla_gpu_enable_pipelined_host_offloading"
FROM_O1 = ("O1", "O2", "O3", "19", "29", "39")
"""Levels at which some versions of XLA pipeline copies to and from the host, by JAX's names and by XLA's numbers."""
HOST_LOOPS = (0, 11, 2)  # the first jaxlib whose backward loops read the right slice of a host array


def compiler_options(*, platform: str, bucket_bytes: int, n: int, gathers: bool) -> dict[str, int]:
    """The options for programs of a plan.

    Args:
      platform: of the devices; only XLA:GPU has these options.
      bucket_bytes: of whole weights.
      n: devices that share a gradient.
      gathers: weights are gathered where they are used (stage 3).

    Returns:
      Names and values for `jax.jit(..., compiler_options=)`. Empty on other platforms, and, with a warning, for a
      jaxlib newer than was tested: an unknown name is an error to XLA.
    """
    if platform not in GPUS:
        return {}
    version = _version()[:2]
    if not TESTED[0] <= version <= TESTED[1]:
        warn(
            f"jzero: no XLA options for jaxlib {jaxlib.__version__}: tested are {_text(TESTED[0])} to "
            f"{_text(TESTED[1])}. Programs are right without them; collectives may overlap less.",
        )
        return {}
    found = {"xla_gpu_reduce_scatter_combine_threshold_bytes": max(bucket_bytes // n, 1)}
    if gathers:
        found["xla_gpu_all_gather_combine_threshold_bytes"] = bucket_bytes
        found["xla_gpu_experimental_parallel_collective_overlap_limit"] = IN_FLIGHT
    return found


def host_loop_limit(platform: str, where: str) -> str:
    """Why this jaxlib cannot keep arrays on the host from a forward to a backward loop; empty if it can.

    Args:
      platform: of the devices.
      where: the caller, for the text.
    """
    why = _old_host_loops(platform, f"{where} inside of a loop (scan)")
    return why and (
        f"{why}, or unrolled layers in place of the scan (longer to compile), or leave offload out (inputs then stay "
        "in device memory)."
    )


def params_on_host_limit(platform: str, where: str) -> str:
    """Why params cannot live on the host with this jaxlib, as loops over layers read them; empty if they can."""
    why = _old_host_loops(platform, where)
    return why and f'{why}, or Offload(params="device") (the default: optimizer state alone is in host memory).'


def warn_of_pipelined_offload(platform: str, what: str, options: Mapping[str, Any] | None = None) -> None:
    """Warns where copies to and from host memory meet XLA's pipelining of them, of which wrong training is reported.

    Args:
      platform: of the devices.
      what: is in host memory.
      options: of the compilation, besides `XLA_FLAGS` and JAX's config.
    """
    given = options or {}
    level = str(given.get("optimization_level") or getattr(jax.config, "jax_optimization_level", ""))
    flags = os.environ.get("XLA_FLAGS", "").lower()
    flag = str(given.get(PIPELINED, "")).lower() == "true" or f"{PIPELINED}=true" in flags
    if platform in GPUS and (flag or level in FROM_O1):
        asked = PIPELINED if flag else f"optimization_level={level}"
        warn(
            f"jzero: {what} is in host memory, and {asked} lets XLA move its copies into other iterations of a loop. A "
            "training run has failed to converge with this combination (openxla/xla pull requests 37979 and 45393); "
            "jzero has not tried it on a GPU. Compile with optimization_level O0, or compare the losses of a few "
            "hundred steps with those of a run without offload."
        )


def _old_host_loops(platform: str, what: str) -> str:
    if platform not in GPUS or _version() >= HOST_LOOPS:
        return ""
    return (
        f"{what} is refused on GPUs with jaxlib {jaxlib.__version__}: XLA would fetch the layers of a backward loop in "
        "the order of the forward one, and gradients would be wrong (openxla/xla pull request 46231). Use jaxlib >= "
        f"{_text(HOST_LOOPS)} (Python 3.12)"
    )


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", jaxlib.__version__)[:3])


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
