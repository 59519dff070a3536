"""Tests that share programs which take seconds to compile: run by one worker of pytest-xdist, compiled once.

By a test's name: pytest 9.2 has no place any more where xdist 3.8 would write the group of a marker, and says nothing.
"""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest

TOGETHER = {
    "test_benchmarks", "test_buckets", "test_check", "test_check_nnx", "test_check_offload", "test_checkpoint_exit",
    "test_gather_nnx", "test_gpu_accumulate", "test_gpu_host_params", "test_gpu_offload", "test_gpu_precision",
    "test_gpu_program", "test_gpu_remat", "test_gpu_scale", "test_hybrids", "test_offload_proof", "test_processes",
    "test_remat", "test_scaling", "test_train", "test_train_checkpoints",
}  # fmt: skip


def group_of(nodeid: str) -> str:
    """A file, of test_parity an optimizer, else the test by itself."""
    file, _, test = nodeid.partition("::")
    stem = PurePosixPath(file).stem
    if stem == "test_parity" and test.endswith("]"):
        return f"parity-{test[:-1].rpartition('-')[2]}"
    return stem if stem in TOGETHER else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """The scheduler of `--dist=loadgroup`, with these groups."""
    from xdist.scheduler import LoadGroupScheduling

    class Together(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return Together(config, log) if config.getvalue("dist") == "loadgroup" else None
