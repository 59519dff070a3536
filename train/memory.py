"""A run on simulated devices takes the memory of one machine: refused before it starts where that is not enough."""

from __future__ import annotations

import os
from pathlib import Path

import jax

from jzero.core.errors import human_bytes
from train.config import Config
from train.data import VOCAB

LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # of a container


LOGITS_SHARE = 1 / 20


def machine_bytes() -> int:
    """The memory of this machine, or what its container may use of it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in map(Path, LIMITS):
        limit = path.read_text().strip() if path.is_file() else ""
        total = min(total, int(limit)) if limit.isdecimal() else total
    return total


def device_bytes() -> int:
    """The memory of a device; of one that is simulated, its part of the machine's."""
    known = jax.local_devices()[0].memory_stats() or {}
    return known.get("bytes_limit") or machine_bytes() // jax.local_device_count()


def in_tiles(config: Config) -> bool:
    """Whether the loss is computed in tiles: as asked, or where fp32 logits and their gradient are a `LOGITS_SHARE`."""
    model = config.model
    if model.tiled_loss is not None:
        return model.tiled_loss
    return 2 * 4 * config.batch * model.seq * VOCAB // jax.device_count() > LOGITS_SHARE * device_bytes()


def check_fits(held: int, temp: int, *, batch: int) -> None:
    """On CPU: refuses a step that needs more memory than the machine has.

    Args:
      held: bytes of params and optimizer state on one device.
      temp: bytes that the step takes on top, about in proportion to the batch; 0 where they are not known yet.
      batch: windows in a step, over all devices.

    Raises:
      MemoryError: what it needs, what there is, and the flag that mends it.
    """
    count, there = jax.local_device_count(), machine_bytes()
    if jax.devices()[0].platform != "cpu" or count * (held + temp) <= there:
        return
    devices = jax.device_count()
    smaller = int(batch * (there / count - held) / temp) // devices * devices if temp else 0
    remedy = f"--batch {smaller} (now {batch}), " if smaller > 0 else ""
    raise MemoryError(
        f"this run needs {human_bytes(count * (held + temp))} of memory, {human_bytes(held + temp)} for each of "
        f"{count} simulated devices, and this machine has {human_bytes(there)}. Pass {remedy}--preset default or "
        "tiny, or run it on GPUs, for which gpt2-small and gpt2-xl are sized."
    )
