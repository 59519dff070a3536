"""Eight simulated CPU devices for every test; without them the suite fails, it does not skip."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# XLA:CPU takes its number of threads from here. With fewer threads than simulated devices a collective can wait
# for a device that no thread is left to run, and after 40 s XLA aborts the process (seen on two cores).
os.environ.setdefault("NPROC", "32")
# The tests compile far more than they compute: LLVM without its expensive passes takes two thirds of the time.
# The program stays the same: its text (collectives, memory) is equal to the byte, on the CPU and for GPUs.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# Many tests compile the same program; what one has compiled the others read, also those of the next run. (For the
# CPU alone: JAX does not keep programs for GPUs that are not there.) JAX writes an entry in place and without locks:
# one that is read half written is compiled again (pyproject.toml). Processes that the tests start have a folder of
# their own, since some of them are killed in the middle.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(__file__).resolve().parents[1] / ".cache/jax/started")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from together import pytest_xdist_make_scheduler  # noqa: F401  (a hook)

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).resolve().parents[1] / ".cache/jax/tests"))
# steps in flight together can starve each other of threads on two cores, and XLA then aborts the process
jax.config.update("jax_cpu_enable_async_dispatch", False)


def pytest_sessionstart(session):
    if len(jax.devices()) != 8:
        pytest.exit(f"the tests need 8 simulated CPU devices, jax has {len(jax.devices())}", returncode=3)


@pytest.fixture
def mesh():
    return Mesh(np.array(jax.devices()), ("data",))


@pytest.fixture
def mesh_2x4():
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("model", "data"))
