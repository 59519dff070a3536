"""Compiles for GPUs that are not there. All that relies on unstable parts of JAX is in this file.

[Note: pod devices]
The compile-only devices of a PJRT topology have no memories: a `NamedSharding` on them loses its `memory_kind`, and
offloaded state would be compiled as device state. A mesh may hold any Python object that acts like a device, so jzero
wraps each of them in a thin `PodDevice`. It names the memories of a GPU (`device`, `pinned_host`) and forwards every
other attribute. Tracing and lowering then work with a concrete mesh of any size, whatever number of CPU devices the
process has; only the last step, XLA's compile of the StableHLO, gets the real devices (`compile_lowered`). XLA gets the
annotations that it would get on a real GPU, with and without host memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np
from jax._src import compiler, stages
from jax._src.interpreters import pxla
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]
from jax._src.named_sharding import UnspecifiedValue
from jax._src.sharding_impls import GSPMDSharding
from jax.experimental import topologies

from jzero.core import cuda_plugin
from jzero.core.traces import innermost

INSTALL = 'pip install "jzero[pod]"'
_REFUSED = (
    "jzero.pod: the CUDA plugin of jax {} does not start.\nSet JAX_PLATFORMS=cpu (or "
    + cuda_plugin.SKIP_CHECK
    + "=1) before "
    "Python starts, and check that jax-cuda12-plugin has the version of jax; " + INSTALL + " installs it."
)


@dataclasses.dataclass(frozen=True)
class MemoryStats:
    """XLA's account of a program's memory, in bytes per device, in the names of `memory_analysis()`."""

    argument_size_in_bytes: int = 0
    output_size_in_bytes: int = 0
    alias_size_in_bytes: int = 0
    temp_size_in_bytes: int = 0
    generated_code_size_in_bytes: int = 0
    host_argument_size_in_bytes: int = 0
    host_output_size_in_bytes: int = 0
    host_alias_size_in_bytes: int = 0
    host_temp_size_in_bytes: int = 0
    host_generated_code_size_in_bytes: int = 0
    peak_memory_in_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Program:
    """What jzero reads of a compiled program.

    Attributes:
      text: its optimized HLO.
      memory: bytes per device.
      in_shardings: XLA's sharding of each parameter, as a serialized `OpSharding`; empty if XLA names none.
      out_shardings: the same for each result.
      buffers: what XLA writes of its buffers, their live ranges and then their places; empty if it was not asked to.
    """

    text: str
    memory: MemoryStats
    in_shardings: tuple[bytes, ...]
    out_shardings: tuple[bytes, ...]
    buffers: str = ""


class MemoryKind(str):
    """A memory of a device. jax reads its `.kind`, or compares it with a plain string."""

    __slots__ = ()

    @property
    def kind(self) -> str:
        """The kind as a plain string."""
        return str(self)


class PodDevice:
    """One compile-only GPU that also knows its memories; every other attribute is the real device's."""

    def __init__(self, target, pod: str):
        self.target = target
        self.pod = pod
        self._memories = (MemoryKind("device"), MemoryKind("pinned_host"))

    def addressable_memories(self) -> tuple[MemoryKind, ...]:
        """The memories a GPU program can name."""
        return self._memories

    def default_memory(self) -> MemoryKind:
        """Where an array is unless its sharding says otherwise."""
        return self._memories[0]

    def memory(self, kind: str) -> MemoryKind:
        """The memory of that kind."""
        return next(m for m in self._memories if m == kind)

    def __getattr__(self, name: str):
        if name in ("target", "pod"):  # only while a copy is being built: no real device to ask yet
            raise AttributeError(name)
        return getattr(self.target, name)

    def __repr__(self) -> str:
        return f"PodDevice({self.target!r})"


def pod_devices(config: str, hosts: int, gpus_per_host: int) -> tuple[PodDevice, ...]:
    """Compile-only devices, host by host, for a target config in text-proto form.

    Raises:
      ImportError: no CUDA plugin for this jax is installed.
      RuntimeError: the plugin is there and refused the topology.
    """
    wanted = {"target_config": config, "topology": f"1x{hosts}x{gpus_per_host}"}
    with cuda_plugin.without_cuda_libraries():
        try:
            topology = topologies.get_topology_desc(platform="cuda", **wanted)
        except NotImplementedError:
            _start_plugin()
            topology = topologies.get_topology_desc(platform="cuda", **wanted)
        except Exception as error:
            raise RuntimeError(_REFUSED.format(jax.__version__)) from error
    return tuple(PodDevice(d, repr(wanted)) for d in topology.devices)


def compile_lowered(
    lowered: Any,
    compiler_options: Mapping[str, Any] | None,
    cached: Callable[[tuple[Any, ...], Callable[[], Program]], Program],
    *,
    buffers: bool = False,
) -> jax.stages.Compiled:
    """XLA's compile of a program lowered on pod devices: a `jax.stages.Compiled` that can be read, not run.

    Args:
      lowered: the program.
      compiler_options: for XLA.
      cached: `cached(parts, make)` looks up a program by the parts of its key (the first is its text), or makes it.
      buffers: keep what XLA writes of its buffers, for `buffers_of`.

    Raises:
      ValueError: nothing in the program says on which pod it runs; or `buffers` and options that make XLA write files.
      ImportError: XLA found no `ptxas`.
    """
    lowered = innermost(lowered, jax.stages.Lowered)
    lowering: Any = lowered._lowering
    with _missing_ptxas_named():
        options = dict(lowering._compiler_options_kvs) | dict(compiler_options or {})
        program = _xla_compile(lowering, options, cached, buffers)
    stand_in: Any = _Swapped(lowered, _Executable(lowering, program))
    return jax.stages.Lowered.compile(stand_in)


def buffers_of(compiled: jax.stages.Compiled) -> str:
    """What XLA wrote of the buffers of a program that was compiled with `buffers`; else empty."""
    return getattr(getattr(compiled, "_executable", None), "buffers", "")


def _xla_compile(lowering, options: dict[str, Any], cached, buffers: bool) -> Program:
    """The private calls: what `jax.stages.Lowered.compile` does from StableHLO on, with the real devices."""
    args, devices = lowering.compile_args, list(lowering._device_list or ())
    if not devices or not all(isinstance(d, PodDevice) for d in devices):
        raise ValueError(
            "pod.compile: no argument and no output is laid out on this pod's mesh: nothing to compile for.\n"
            "Give the arguments shardings: with mesh = pod.mesh(...), jax.ShapeDtypeStruct(shape, dtype, "
            "sharding=NamedSharding(mesh, spec)),\na state from jzero.abstract(create_state, mesh=mesh), or "
            "plan= for a batch."
        )
    real = np.array([d.target for d in devices], dtype=object)
    effects = len(args["ordered_effects"])
    propagate = pxla.get_prop_to_input_output(args["in_shardings"], args["out_shardings"], effects)
    module, client = lowering.stablehlo(), real[0].client

    def options_with(more: dict[str, Any]):
        return pxla.create_compile_options(module, args["tuple_args"], *propagate, client, real, options | more)

    def compile_program(more: dict[str, Any] | None = None) -> Program:
        callbacks = list(args["host_callbacks"])
        device_list = xla_client.DeviceList(tuple(real))
        built = options_with(more or {})
        return _read(compiler.backend_compile_and_load(client, module, device_list, built, callbacks))

    def compile_with_buffers() -> Program:
        with tempfile.TemporaryDirectory() as folder:
            program = compile_program({"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
            return dataclasses.replace(program, buffers=_written(Path(folder)))

    flags = os.environ.get("XLA_FLAGS", "")
    if "--xla_dump_" in flags or any(name.startswith("xla_dump_") for name in options):
        if buffers:
            raise ValueError(
                "pod.compile(buffers=True) reads files that XLA writes, and XLA_FLAGS or compiler_options send them "
                "elsewhere: leave out xla_dump_to and other options that begin with xla_dump_."
            )
        return compile_program()  # the user wants the files that XLA writes, and the cache has none
    text = module.operation.get_asm(enable_debug_info=True)
    key = (
        text,
        devices[0].pod,
        [d.id for d in devices],
        hashlib.sha256(options_with({}).SerializeAsString()).hexdigest(),
        flags,
        jaxlib.__version__,
        client.platform_version,
    )
    if buffers:  # and with the lines of code that are shown beside them
        return cached((*key, hashlib.sha256(text.encode()).hexdigest()), compile_with_buffers)
    return cached(key, compile_program)


def _written(folder: Path) -> str:
    """The live ranges and the places of buffers, of the files that XLA has written."""
    ends = ("_after_optimizations-live-range.txt", "_after_optimizations-buffer-assignment.txt")
    found = [path for end in ends for path in sorted(folder.glob(f"*{end}"))]
    return "\n".join(path.read_text() for path in found)


def _read(loaded) -> Program:
    """All that `jax.stages.Compiled` is asked about a program that cannot run."""
    stats = loaded.get_compiled_memory_stats()
    memory = {f.name: getattr(stats, f.name, 0) for f in dataclasses.fields(MemoryStats)}
    given, returned = (
        tuple(op.SerializeToString() for op in ops) for ops in pxla.get_op_sharding_from_executable(loaded)
    )
    return Program("\n\n".join(m.to_string() for m in loaded.hlo_modules()), MemoryStats(**memory), given, returned)


class _Swapped:
    """A `jax.stages.Lowered` whose compile step is already done; jax builds its `Compiled` from it."""

    def __init__(self, lowered, executable):
        self._lowered, self._executable = lowered, executable

    def __getattr__(self, name: str):
        return self if name == "_lowering" else getattr(self._lowered, name)

    @property
    def const_args(self):
        return self._lowered._lowering.const_args

    def compile(self, **_):
        return self._executable


class _Executable(stages.Executable):
    """All that a `jax.stages.Compiled` needs of its executable, except running it."""

    def __init__(self, lowering, program: Program):
        args = lowering.compile_args
        self._program, self.buffers = program, program.buffers
        self._kept_var_idx, self._all_args_info = args["kept_var_idx"], args["all_args_info"]
        self.in_avals, self.out_avals = args["global_in_avals"], args["global_out_avals"]
        devices = lowering._device_list
        self._in_shardings = _resolve(args["in_shardings"], program.in_shardings, self.in_avals, devices)
        self._out_shardings = _resolve(args["out_shardings"], program.out_shardings, self.out_avals, devices)

    def as_text(self) -> str:
        return self._program.text

    def memory_analysis(self) -> MemoryStats:
        return self._program.memory

    def input_shardings(self):
        return self._in_shardings

    def output_shardings(self):
        return self._out_shardings

    def call(self, *args_flat):
        raise NotImplementedError("compiled for a pod that is not attached: read this program, do not run it")


def _resolve(shardings, ops: tuple[bytes, ...], avals, devices) -> list:
    """The shardings of a program; XLA's choice where the user left it open."""

    def choice(i):
        on_host = getattr(avals[i], "memory_space", None) == jax.memory.Space.Host
        op = xla_client.OpSharding()
        op.ParseFromString(ops[i])
        return GSPMDSharding(devices, op, memory_kind="pinned_host" if on_host else "device")

    left_open = [isinstance(s, UnspecifiedValue) and len(ops) == len(shardings) for s in shardings]
    return [choice(i) if left_open[i] else s for i, s in enumerate(shardings)]


def _start_plugin() -> None:
    """Registers the CUDA plugin, after jax tried to and found no CUDA libraries.

    Raises:
      ImportError: no plugin is installed.
    """
    if cuda_plugin.start():
        return
    raise ImportError(
        f"jzero.pod: jax {jax.__version__} has no CUDA plugin here, without which XLA knows no GPU.\n"
        f"{INSTALL} installs what it needs (no driver, no GPU). The plugin must have the version of jax:\n"
        f'  pip install "jax-cuda12-plugin=={jax.__version__}" "jax-cuda12-pjrt=={jax.__version__}"'
    )


@contextlib.contextmanager
def _missing_ptxas_named() -> Iterator[None]:
    """Names the wheel in the error: XLA looks for `ptxas` on PATH, in /usr/local/cuda, and in wheels."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "PTX compilation provider" not in str(error) and "ptxas" not in str(error):
            raise
        raise ImportError(
            "pod.compile: XLA found no ptxas (NVIDIA's assembler) on PATH, in /usr/local/cuda or a wheel.\n"
            f"{INSTALL} installs it (nvidia-cuda-nvcc-cu12 and nvidia-nvjitlink-cu12; no driver, no GPU)."
        ) from error
