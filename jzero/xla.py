"""XLA options for one `jax.jit`, by jaxlib version: what neither a layout nor a tie can say.

[Note: options]
Ties put every collective in its place; whether it runs beside compute is the scheduler's choice. By default XLA:GPU has
one collective in flight at a time, so that of the weights that a bucket of stage 3 needs only the last one is gathered
beside a matmul; and it joins collectives by the bytes of a *shard* (reduce-scatter, 30 MiB: 2 GB of whole gradients
on 64 GPUs) or of a *result* (all-gather). The options here allow more than one in flight and set both limits to
`bucket_bytes`. They change neither numbers nor bytes on the wire. `benchmarks/buckets.py` prints what they do.
"""

from __future__ import annotations

import warnings

import jaxlib

TESTED = ((0, 10), (0, 12))  # oldest and newest jaxlib that these names were compiled with
IN_FLIGHT = 4


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
    if platform not in ("gpu", "cuda", "rocm"):
        return {}
    version = tuple(int(part) for part in jaxlib.__version__.split(".")[:2])
    if not TESTED[0] <= version <= TESTED[1]:
        warnings.warn(
            f"jzero: no XLA options for jaxlib {jaxlib.__version__}: tested are {_text(TESTED[0])} to "
            f"{_text(TESTED[1])}. Programs are right without them; collectives may overlap less.",
            stacklevel=3,
        )
        return {}
    found = {"xla_gpu_reduce_scatter_combine_threshold_bytes": max(bucket_bytes // n, 1)}
    if gathers:
        found["xla_gpu_all_gather_combine_threshold_bytes"] = bucket_bytes
        found["xla_gpu_experimental_parallel_collective_overlap_limit"] = IN_FLIGHT
    return found


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
