"""From a process by itself to one of a group that JAX knows: the roll call, the watch, then JAX."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from train.processes.group import Group
from train.processes.rollcall import meet, named
from train.processes.watch import Watch


def join(
    group: Group,
    facts: Mapping[str, Any],
    *,
    timeout: float,
    heartbeat: int,
    remedy: Callable[[], str],
    error: str | None = None,
) -> Watch:
    """Brings the processes of a group together; before JAX is first used.

    Args:
      group: of this process.
      facts: what must be the same in all processes, as JSON: settings, versions, data.
      timeout: seconds to wait for the others.
      heartbeat: seconds without a sign of a process after which the others end. Of one that is killed they know at
        once.
      remedy: called when the group ends early; what to do next, as a sentence.
      error: why this process cannot run. The others are told, and end too.

    Returns:
      The watch. As a context, it ends the group together, in order or with the error of one.

    Raises:
      Refused: processes are missing, or differ.
    """
    links, where = meet(group, facts, timeout=timeout, heartbeat=heartbeat, error=error)
    watch = Watch(group, links, where, heartbeat=heartbeat, remedy=remedy)
    watch.start()
    jax.distributed.initialize(
        group.coordinator,
        group.processes,
        group.me,
        local_device_ids=group.local_devices,
        cluster_detection_method="deactivate",  # `find` has looked; JAX would ask the API of Kubernetes
        initialization_timeout=int(timeout) + 1,
        heartbeat_timeout_seconds=heartbeat,
        shutdown_timeout_seconds=heartbeat,
    )
    return watch


def check_devices(devices: Sequence[Any]) -> None:
    """Refuses processes with unlike devices.

    Args:
      devices: of all processes, as `jax.devices()`.

    Raises:
      ValueError: which process has how many of which kind.
    """
    mine: dict[int, list[str]] = {}
    for device in devices:
        mine.setdefault(device.process_index, []).append(device.device_kind)
    groups: dict[str, list[int]] = {}
    for process, kinds in mine.items():
        text = " and ".join(f"{count} x {kind}" for kind, count in sorted(Counter(kinds).items()))
        groups.setdefault(text, []).append(process)
    if len(groups) > 1:
        each = ", ".join(f"{text} in {named(who)}" for text, who in groups.items())
        raise ValueError(f"the processes differ in their devices: {each}. Each must have the same.")
