"""The parts of a compiled program that jzero cannot read: such a program may send or hold more than was counted.

[Note: nothing counts as zero]
Every instruction that names devices (replica groups, pairs, a channel) is a collective that was read, or is named
here. So are unknown memory spaces and dtypes, and custom calls with an unknown target: XLA's own stay on one device,
but a kernel of the user may communicate without a trace in the text. A loop whose trip count XLA does not know is
counted once; where it holds a collective, what is counted is a lower bound.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Collection, Iterable, Iterator

from jzero.core.errors import counted
from jzero.proof.collectives import Site, kind, read_collectives
from jzero.proof.hlo import NAMES_DEVICES, Module, parse_instruction
from jzero.proof.places import walk

MEMORY_SPACES = ("5",)
"""The known ones: pinned host memory. Device memory has no number in the text."""
LOCAL_CALLS = frozenset((
    "AllocateBuffer", "CreateBuffer", "Pin", "Unpin", "MoveToHost", "MoveToDevice", "annotate_device_placement",
    "Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "PadToStatic", "SliceToDynamic", "TopK", "ApproxTopK",
    "PartialReduce", "LayoutConstraint", "ResizeBilinear", "ResizeBilinearGrad", "triton_kernel_call",
    "triton_kernel_call_ffi", "__custom_fusion", "__onednn_fusion", "__ynn_fusion", "cu_threefry2x32",
    "cu_threefry2x32_ffi", "cu_lu_pivots_to_permutation", "cu_cholesky_update_ffi", "cu_tridiagonal_solve_perturbed",
    "cublas_geqrf_batched_ffi", "cublas_getrf_batched_ffi", "cudnn_rnn", "cudnn_rnn_bwd", "cudnn_rnn_ffi",
    "cudnn_rnn_bwd_ffi", "ducc_fft", "dynamic_ducc_fft",
))  # fmt: skip
"""The targets that compute on one device: those of XLA, of the libraries that it calls, of jax."""
LOCAL_PREFIXES = (
    "__cublas$", "__cudnn$", "__cusolver$", "__cusparse$", "__cub$", "__gpu$", "__onednn$", "__ynn$", "cusolver_",
    "cusparse_", "lapack_", "blas_", "xla_ffi_python_", "xla_python_",
)  # fmt: skip
"""What the names of others begin with. Each ends in a separator; a kernel of the user may begin with a word of XLA."""
_TARGET = re.compile(r'custom_call_target="((?:[^"\\]|\\.)*)"')
_SPACE = re.compile(r"\bS\((\d+)\)")


def read(module: Module) -> tuple[tuple[Site, ...], list[str]]:
    """The collectives of a program; and one sentence for each part that cannot be read."""
    sites, failed = read_collectives(module)
    return sites, [*failed.values(), *_devices(module, sites, failed), *_spaces(module), *_dtypes(module)]


def unknown_calls(module: Module) -> dict[str, int]:
    """Targets of custom calls that are not known to stay on one device, and how often each is called."""
    found: dict[str, int] = {}
    for line in module.lines("custom_call_target="):
        for target in _TARGET.findall(line):
            if target not in LOCAL_CALLS and not target.startswith(LOCAL_PREFIXES):
                found[target] = found.get(target, 0) + 1
    return found


def endless(sites: Iterable[Site]) -> list[Site]:
    """Collectives in a loop whose trip count is not known: counted once."""
    return [s for s in sites if 0 in s.loops]


def _devices(module: Module, sites: Iterable[Site], failed: Collection[tuple[str, str]]) -> Iterator[str]:
    """Instructions that name devices and are not a collective that was looked at."""
    seen = {(s.computation, s.name) for s in sites}.union(failed)
    for home in module.computations.values():
        for line in home.lines if home.communicates else ():
            if any(word in line for word in NAMES_DEVICES):
                i = parse_instruction(line)
                if i is None or (home.name, i.name) not in seen:
                    what = "an instruction" if i is None else f"%{i.name} ({i.opcode})"
                    yield f"{what} in %{home.name} names devices and is not a known collective: {line.strip()[:160]}"


def _spaces(module: Module) -> Iterator[str]:
    found: dict[str, int] = {}
    for line in module.lines("S("):
        for space in _SPACE.findall(line.partition(" metadata=")[0]):
            if space not in MEMORY_SPACES:
                found[space] = found.get(space, 0) + 1
    for space, count in found.items():
        yield f"memory space S({space}), in {counted(count, 'array')}: not known as device or host memory"


def _dtypes(module: Module) -> Iterator[str]:
    """Dtypes of unknown size outside of fusions and collectives, which have a sentence of their own."""
    homes = {place.computation.name: place.computation for place in walk(module)}
    rows = (i for home in homes.values() for i in home.schedule if not kind(i))
    found = collections.Counter(x.dtype for i in rows for x in i.shapes if x.has_unknown_dtype)
    for dtype, count in found.items():
        yield f"dtype {dtype}, in {counted(count, 'array')}: its bytes are not known"
