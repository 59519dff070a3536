"""A pod of GPUs to compile for, without one: `pod`, `Pod.mesh`, `Pod.compile`."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jzero.core.errors import check_flag, check_int, check_kind, counted, nearest
from jzero.core.jaxprs import of_any_leaves
from jzero.core.traces import keep_trace, traced
from jzero.core.types import PyTree
from jzero.layout.mesh import mesh
from jzero.proof.arguments import fill_shardings, find_plan, jitted_fn
from jzero.sharding import Plan, check_plan

MOST_GPUS = 2**20  # of a pod, and of a host
JAX_TAKES = 0.75
"""The part of a GPU's memory that JAX takes, unless `XLA_CLIENT_MEM_FRACTION` says otherwise."""


@dataclasses.dataclass(frozen=True)
class Pod:
    """Compile-only GPUs of one kind; `pod` makes them.

    Attributes:
      gpu: its name, as `gpus()` lists it.
      hosts: number of hosts.
      gpus_per_host: GPUs in each.
      memory_bytes: memory of one GPU, in bytes.
      devices: all of them, host by host.
    """

    gpu: str
    hosts: int
    gpus_per_host: int
    memory_bytes: int
    devices: tuple[Any, ...] = dataclasses.field(repr=False)

    def mesh(self, axes: Mapping[str, int | str]) -> Mesh:
        """A mesh over all devices of the pod, with Auto axes; the last axis runs inside a host first.

        Args:
          axes: size by axis name, from the outermost axis to the innermost; a number, or a word as in `jzero.mesh`.

        Returns:
          A `jax.sharding.Mesh` of compile-only devices that keep memory kinds. Arrays cannot be put on it:
          give its shardings to `jax.ShapeDtypeStruct`, and the program to `compile`.

        Raises:
          TypeError: `axes` is not a mapping, or a size is not an int.
          ValueError: the sizes do not multiply to the number of devices; as `jzero.mesh` where one is a word.

        Example:
          >>> import jzero
          >>> jzero.pod("h200", hosts=2).mesh({"replica": 2, "data": 8}).shape  # doctest: +SKIP
          OrderedDict({'replica': 2, 'data': 8})
        """
        check_kind(axes, "axes", Mapping, 'a mapping of sizes by name, such as {"data": 8}', where="pod.mesh")
        if any(isinstance(size, str) for size in axes.values()):
            return mesh(axes, pod=self)
        counts = list[int]()
        for name, size in axes.items():
            if isinstance(size, bool) or not isinstance(size, int):
                raise TypeError(f"pod.mesh: the size of axis {name!r} must be an int, got {size!r}.")
            counts.append(size)
        if not axes or math.prod(counts) != len(self.devices):
            sizes = " x ".join(f"{size} ({name})" for name, size in axes.items()) or "no axes"
            raise ValueError(
                f"pod.mesh: {sizes} = {counted(math.prod(counts), 'device')}, but this pod has "
                f"{counted(self.hosts, 'host')} x {self.gpus_per_host} {self.gpu} = {len(self.devices)}.\n"
                f'The sizes must multiply to {len(self.devices)}, as in pod.mesh({{"data": {len(self.devices)}}}).'
            )
        devices = np.array(self.devices, dtype=object).reshape(tuple(counts))
        return Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))

    def compile(
        self,
        fn: Callable[..., Any],
        *args: PyTree,
        donate_argnums: int | tuple[int, ...] = (),
        compiler_options: Mapping[str, str | int | float | bool] | None = None,
        plan: Plan | None = None,
        buffers: bool = False,
        **kwargs: PyTree,
    ) -> jax.stages.Compiled:
        """The program XLA makes of `fn` for this pod: its text and memory as on the GPUs, without running it.

        Args:
          fn: a function, or one that is jitted already (`jax.jit`, `nnx.jit`) and keeps its own options. A plain
            function of NNX objects is jitted by `nnx.jit`, any other by `jax.jit`.
          *args: its arguments, as `jax.ShapeDtypeStruct` leaves with shardings on a mesh of this pod.
          donate_argnums: as in `jax.jit`, for a plain function.
          compiler_options: XLA options by name, as in `jax.jit`.
          plan: gives leaves without a sharding their layout: `plan.batch` where it divides them, scalars and
            random keys whole. None: the plan of the first sharded state among the arguments; where there is
            none either, XLA chooses their layout.
          buffers: keep what XLA writes of its buffers, which `jzero.write_html` draws.
          **kwargs: keyword arguments of `fn`.

        Returns:
          A `jax.stages.Compiled` with `as_text()`, `memory_analysis()`, `args_info`, `input_shardings` and
          `output_shardings`; calling it raises NotImplementedError.

        Raises:
          TypeError: `fn` is not a function, or another argument is of the wrong kind.
          ImportError: `ptxas` is not installed.
          NotImplementedError: the program needs cuDNN attention, which needs a real GPU.
          ValueError: leaves laid out elsewhere, a batch that the plan does not divide, no leaf on the pod's
            mesh, or options for a function that has its own; `buffers` and XLA options that write files.

        Cost:
          No device memory. A scanned 7.5B GPT for 64 GPUs: 6 to 10 s and 0.5 GB of host memory on two cores.
        """
        from jzero.core import compile_only  # private jax API: if a version of jax moves it, only this breaks
        from jzero.proof.pod_cache import get_or_compile, program_key

        check_plan(plan, where="pod.compile", optional=True)
        check_flag(buffers, "buffers", where="pod.compile")
        check_kind(
            compiler_options, "compiler_options", Mapping, "a mapping", where="pod.compile", optional=True
        )
        plan = find_plan((*args, *kwargs.values())) if plan is None else plan
        jitted, trace = jitted_fn(fn, donate_argnums, (args, kwargs)), None
        args, kwargs = fill_shardings((args, kwargs), plan, devices=self.devices)
        try:
            if hasattr(jitted, "trace"):
                stage, trace = traced(jitted, *args, **kwargs)
                lowered = of_any_leaves(lambda: stage.lower(lowering_platforms=("cuda",)))
            else:
                lowered = jitted.lower(*args, **kwargs)
        except RuntimeError as error:
            if "cudnn" not in str(error).lower():
                raise
            raise NotImplementedError(
                "pod.compile: this program asks for cuDNN (attention), which needs a real GPU.\n"
                'Use jax.nn.dot_product_attention(..., implementation="xla") for the proof: the collectives '
                "are the same; temp holds the attention scores, which cuDNN would not keep."
            ) from error
        compiled = compile_only.compile_lowered(
            lowered, compiler_options, lambda key, make: get_or_compile(program_key(*key), make), buffers=buffers
        )
        if trace is not None:
            keep_trace(compiled, trace)
        return compiled


def gpus() -> tuple[str, ...]:
    """Names of the GPUs that `pod` knows.

    Example:
      >>> gpus()
      ('a100-80gb', 'b200', 'h100', 'h200')
    """
    files = resources.files("jzero.proof").joinpath("pods").iterdir()
    return tuple(sorted(f.name.removesuffix(".txtpb") for f in files if f.name.endswith(".txtpb")))


def pod(gpu: str, *, hosts: int = 1, gpus_per_host: int = 8) -> Pod:
    """Compile-only devices of a GPU pod: what a step becomes there, before anyone rents it.

    The same arguments give the same pod, so that meshes made from it compare equal.

    Args:
      gpu: one of `gpus()`.
      hosts: number of hosts.
      gpus_per_host: GPUs in each.

    Returns:
      A frozen `Pod`.

    Raises:
      TypeError: `gpu` is not a string or a count is not an int.
      ValueError: unknown GPU, or a count below 1.
      ImportError: jax has no CUDA plugin here; `pip install "jzero[pod]"`.
      RuntimeError: the plugin does not start.

    Cost:
      0.5 s and no device memory.

    Example:
      >>> import jzero
      >>> jzero.pod("h200", hosts=8).memory_bytes  # doctest: +SKIP
      151397597184
    """
    check_pod(gpu, hosts, gpus_per_host)
    return _pod(gpu, hosts, gpus_per_host)


def check_pod(gpu: str, hosts: int, gpus_per_host: int) -> None:
    """Raises what `pod` raises for arguments that name no pod, without starting the plugin."""
    check_kind(gpu, "gpu", str, "a name such as 'h200'", where="jzero.pod")
    if gpu not in gpus():
        begins = next((known for known in gpus() if gpu and known.startswith(gpu.lower())), gpu.lower())
        raise ValueError(
            f"jzero.pod: unknown gpu {gpu!r}.{nearest(begins, gpus())} Known: {', '.join(gpus())}."
        )
    for name, count in (("hosts", hosts), ("gpus_per_host", gpus_per_host)):
        check_int(count, name, where="jzero.pod", low=1, high=MOST_GPUS)


@functools.cache
def _pod(gpu: str, hosts: int, gpus_per_host: int) -> Pod:
    from jzero.core import compile_only  # as above

    devices = compile_only.pod_devices(_target(gpu), hosts, gpus_per_host)
    return Pod(gpu, hosts, gpus_per_host, gpu_bytes(gpu), devices)


def gpu_bytes(gpu: str) -> int:
    """Memory of one GPU."""
    memory = re.search(r"device_memory_size: (\d+)", _target(gpu))
    assert memory, f"pods/{gpu}.txtpb names no device_memory_size"
    return int(memory[1])


def _target(gpu: str) -> str:
    return resources.files("jzero.proof").joinpath("pods", f"{gpu}.txtpb").read_text()
