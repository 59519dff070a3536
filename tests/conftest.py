"""Eight simulated CPU devices for every test; without them the suite fails, it does not skip.

Tests marked `pod` compile for GPUs and need the extra `pod`; where it is missing they are left out, and the last lines
of the run say so.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# XLA:CPU takes its number of threads from here. With fewer threads than simulated devices a collective can wait
# for a device that no thread is left to run, and after 40 s XLA aborts the process (seen on two cores).
os.environ.setdefault("NPROC", "32")
# The tests compile far more than they compute: LLVM without its expensive passes takes two thirds of the time.
# The program stays the same: its text (collectives, memory) is equal to the byte, on the CPU and for GPUs.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# Half of the rest is spent in XLA:CPU's fusion emitters, which the older emitters do without, and some of it in
# splitting each program into modules that are compiled in parallel. Collectives and memory stay equal; a few ops are
# fused otherwise. jaxlib 0.12 has no older emitters any more and aborts a process that asks for them.
XLA_FLAGS = [os.environ.get("XLA_FLAGS", ""), "--xla_cpu_parallel_codegen_split_count=1"]
# Some machines round each operation to fp16 (AVX512-FP16), others compute it in fp32: equal numbers on all of them.
XLA_FLAGS.append("--xla_cpu_max_isa=AVX2")
if importlib.metadata.version("jaxlib").startswith("0.10."):
    XLA_FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join(XLA_FLAGS).strip()
# Many tests compile the same program; what one has compiled the others read, also those of the next run. (For the
# CPU alone: JAX does not keep programs for GPUs that are not there.) JAX writes an entry in place and without locks:
# one that is read half written is compiled again (pyproject.toml). Processes that the tests start have a folder of
# their own, since some of them are killed in the middle.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(__file__).resolve().parents[1] / ".cache/jax/started")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# The workers of one run share what one of them has compiled for a pod. With the cache off (JZERO_POD_CACHE=off, as in
# CI) it is in a folder of this run, which the process that starts the workers makes and removes.
RUN_FOLDER = None
if os.environ.get("JZERO_POD_CACHE", "").lower() == "off":
    RUN_FOLDER = tempfile.TemporaryDirectory(prefix="jzero-pods-")
    os.environ["JZERO_POD_CACHE"] = RUN_FOLDER.name

import jzero  # noqa: F401, I001  (before jax, whose import is noisy where the compile-only plugin is installed)
import jax
import mutations
import numpy as np
import progress
import pytest
from jax.sharding import Mesh
from together import pytest_xdist_make_scheduler  # noqa: F401  (a hook)

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).resolve().parents[1] / ".cache/jax/tests"))
# steps in flight together can starve each other of threads on two cores, and XLA then aborts the process
jax.config.update("jax_cpu_enable_async_dispatch", False)

if "JZERO_MUTATION" in os.environ:  # before any test module is imported
    mutations.apply(os.environ["JZERO_MUTATION"])


HAS_PLUGIN = any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13))


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marker
def pytest_collection_modifyitems(config, items):
    """Cases that `default_cases` does not name are nightly. Without the plugin the tests that need it are left out."""
    unknown = {}
    for item in items:
        marker = item.get_closest_marker("default_cases")
        if marker is None:
            continue
        case = item.callspec.id
        unknown.setdefault((item.parent.nodeid, item.originalname), set(marker.args)).discard(case)
        if case not in marker.args:
            item.add_marker(pytest.mark.nightly)
    if any(unknown.values()) and not any("::" in arg for arg in config.args):
        named = "\n".join(f"  {where[0]}::{where[1]}: {sorted(ids)}" for where, ids in unknown.items() if ids)
        raise pytest.UsageError(f"default_cases names cases that do not exist:\n{named}")
    if not HAS_PLUGIN:
        left = [item for item in items if item.get_closest_marker("pod")]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if not item.get_closest_marker("pod")]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """A test marked `remedy` finds it, and in the program that it checks last no fault of that kind."""
    marks, found = [marker.args for marker in item.iter_markers("remedy")], []
    with pytest.MonkeyPatch.context() as patch:
        if marks:
            module = sys.modules["jzero.proof.check"]
            kept = module.Findings
            patch.setattr(module, "Findings", lambda *args: found.append(kept(*args)) or found[-1])
        result = yield
    for _, words in marks:
        kinds = {f.kind for some in found for f in some if words in f.remedy}
        assert kinds, f"no finding has the remedy {words!r}"
        left = [f for f in found[-1] if f.kind in kinds]
        assert not left, f"the remedy {words!r} was applied, and there is still {left}"
    return result


def pytest_terminal_summary(terminalreporter):
    if not HAS_PLUGIN:
        terminalreporter.write_line(
            "Left out: all tests that compile for GPUs (marker `pod`), since jax has no CUDA plugin here. "
            'pip install -e ".[pod]" brings it; no GPU is needed.',
            yellow=True,
        )


def pytest_sessionstart(session):
    progress.install(session.config)
    if len(jax.devices()) != 8:
        pytest.exit(f"the tests need 8 simulated CPU devices, jax has {len(jax.devices())}", returncode=3)


@pytest.fixture
def mesh():
    return Mesh(np.array(jax.devices()), ("data",))


@pytest.fixture
def mesh_2x4():
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("model", "data"))
