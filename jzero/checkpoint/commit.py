"""Writing a checkpoint: one directory that appears whole or not at all.

[Note: commit]
Orbax writes into a directory beside the final one and commits it there. Then each process hashes its share of the files
(`checksums.py`) and flushes it to the disk; after a barrier process 0 flushes the folders and renames the directory
(`core/durable.py`). So a directory with the final name is whole, has its checksums and survives a power failure; plain
orbax reads it without jzero. Until then its name has orbax's suffix for temporary folders.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from orbax.checkpoint import v1 as ocp

from jzero.checkpoint import checksums, pending
from jzero.checkpoint.store import NAME, STAGING, TEMPORARY, clean
from jzero.core import durable
from jzero.core.types import PyTree
from jzero.layout.placement import HOST, memory_kind

MARK: dict[str, Any] = {NAME: checksums.VERSION}  # in orbax's metadata: it was saved with checksums
METRICS = "metrics"  # a folder, and a file in it, where plain orbax looks for numbers by name
CHUNK_BYTES = 32 * 2**20  # of a leaf that are stored together: the least that another layout has to read
_barriers = itertools.count()


def save_async(
    path: Path,
    tree: PyTree,
    *,
    custom: Any,
    metrics: Mapping[str, float] | None = None,
    trained: Sequence[str] | None = None,
    before: Callable[[], None] = lambda: None,
    after: Callable[[], None] = lambda: None,
) -> Future:
    """Copies the arrays of a tree that are on a device, and writes all in the background.

    Args:
      path: where nothing exists yet.
      tree: of arrays; those in host memory are read until the future is done: see `host_copies`.
      custom: JSON, stored under the checksums.
      metrics: numbers by name, stored under the checksums, and also where plain orbax looks for them.
      trained: names of params, stored under the checksums.
      before: called on process 0 before the directory gets its name; if it raises, the save fails.
      after: called on process 0 when the directory has its name.

    Returns:
      A future; `pending.result` waits for it.

    Raises:
      OSError: the disk is full, or refuses; nothing is left of the save.
    """
    clean(path)
    context = ocp.Context()
    context.array.saving.storage_options.chunk_byte_size = CHUNK_BYTES
    staging = path.with_name(f"{path.name}{TEMPORARY}{STAGING}")
    barrier = f"jzero.checkpoint.{next(_barriers)}"

    def work() -> None:
        try:
            with disk_errors(path):
                response.result()
                checksums.write(
                    staging,
                    process=jax.process_index(),
                    processes=jax.process_count(),
                    notes={"custom": custom, "metrics": metrics, "trained": trained},
                )
                _meet(f"{barrier}.hashed")
                if jax.process_index() == 0:
                    before()
                    if metrics:  # for plain orbax; jzero reads those under the checksums
                        (staging / METRICS).mkdir()
                        durable.write(staging / METRICS / METRICS, json.dumps(dict(metrics)).encode())
                    durable.flush_folders(staging)
                    durable.rename(staging, path)
        except BaseException:
            clean(path, failed=True)
            raise
        _meet(f"{barrier}.renamed")
        if jax.process_index() == 0:
            after()

    try:
        with disk_errors(path), context:
            response = ocp.save_async(str(staging), tree, custom_metadata=MARK)
    except BaseException:
        clean(path, failed=True)
        raise
    return pending.start(path, work)


def host_copies(tree: PyTree) -> PyTree:
    """The tree with its arrays in host memory copied: the next step may donate them while a save still reads them."""
    leaves, form = jax.tree.flatten(tree)
    held = [i for i, x in enumerate(leaves) if memory_kind(x) == HOST]
    copies = _copier(tuple(leaves[i].sharding for i in held))([leaves[i] for i in held]) if held else []
    for i, copy in zip(held, copies, strict=True):
        leaves[i] = copy
    return form.unflatten(leaves)


def own_views(tree: PyTree) -> PyTree:
    """The tree, its arrays in host memory as new `jax.Array`s over the same memory.

    `np.asarray` of such an array is a view that the array keeps, and a GPU refuses to donate memory of which there is a
    view. The views of these arrays are gone with them.
    """
    return jax.tree.map(lambda x: _over_same_memory(x) if memory_kind(x) == HOST else x, tree)


def _over_same_memory(x: jax.Array) -> jax.Array:
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, [s.data for s in x.addressable_shards])


@functools.lru_cache(maxsize=16)
def _copier(shardings: tuple[Any, ...]) -> Callable[[list[Any]], list[Any]]:
    return jax.jit(lambda xs: [jnp.copy(x) for x in xs], out_shardings=list(shardings))


def _meet(name: str) -> None:
    """Returns when all processes have come here; for threads that have no event loop."""
    if jax.process_count() > 1:
        loop = asyncio.new_event_loop()
        try:
            loop.run_until_complete(ocp.multihost.sync_global_processes(name, operation_id=name))
        finally:
            loop.close()


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Raises errors of the disk as OSError with the path; tensorstore reports a full disk as a ValueError.

    Raises:
      OSError: with its number, and the path that was not saved.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        found = re.search(r"os_error_code='(\d+)'", str(error))
        number = int(found[1]) if found else getattr(error, "errno", None)
        if number is None:
            raise
        text = f"{os.strerror(number)}: {path} is not saved. What was there before is untouched."
        raise OSError(number, text) from error
