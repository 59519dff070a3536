"""The section zero_optimization: stage, buckets, thresholds, hybrids, offload.

[Note: units]
DeepSpeed counts buckets and thresholds in elements, jzero in bytes. A param has 2 bytes under fp16 and bf16 (and
`data_types.param_dtype`), else 4.
"""

from __future__ import annotations

import json
from typing import Any

from jzero.config import Offload
from jzero.core.errors import counted, nearest
from jzero.deepspeed.keys import NOT_NEEDED, OPTIMIZER, PARAM, ZERO
from jzero.deepspeed.translation import Draft


def map_zero(draft: Draft) -> None:
    """zero_optimization: stage, buckets, thresholds, hybrids, offload.

    Raises:
      ValueError: a stage above 3; what two keys ask for does not go together.
    """
    stage = draft.get(ZERO + "stage", 0)
    if stage > 3:
        raise draft.refuse(ZERO + "stage", "it must be 0, 1, 2 or 3.")
    draft.fields["stage"] = stage
    draft.say(ZERO + "stage", f"stage={stage}")
    if ZERO + "stage" not in draft.values:
        draft.notes.append("zero_optimization.stage is not in the file: stage 0, as in DeepSpeed.")
    size = 4 if draft.param_dtype in (None, "float32") else 2
    of = f"x {size} bytes ({draft.param_dtype or 'float32'})"
    reduce, prefetch = ZERO + "reduce_bucket_size", ZERO + "stage3_prefetch_bucket_size"
    least = ZERO + "stage3_param_persistence_threshold"
    buckets = {n: draft.get(n) for n in (reduce, prefetch) if draft.get(n)}
    if stage < 3:
        buckets.pop(prefetch, None)
    if stage >= 2 and buckets:
        chosen = min(buckets, key=lambda n: buckets[n])
        draft.fields["bucket_bytes"] = buckets[chosen] * size
        for name, value in buckets.items():
            if name == chosen:
                draft.say(name, f"bucket_bytes={value * size}: {value} elements {of}")
            else:
                draft.say(
                    name, f"{value} elements: one bucket size for both, the smaller of the two", NOT_NEEDED
                )
    if stage == 3 and draft.get(least) is not None:
        draft.fields["min_shard_bytes"] = draft.get(least) * size
        draft.say(
            least,
            f"min_shard_bytes={draft.get(least) * size}: {draft.get(least)} elements {of}; their state stays whole too",
        )
    for name, stages in ((reduce, "2 and 3"), (prefetch, "3"), (least, "3")):
        if name not in draft.rows:
            zero = draft.get(name) == 0
            draft.say(
                name,
                "0: jzero's own default" if zero else f"of stages {stages} here; this is stage {stage}",
                NOT_NEEDED,
            )
    _hybrid(draft, stage)
    _offload(draft, stage)


def _hybrid(draft: Draft, stage: int) -> None:
    hpz, mics = ZERO + "zero_hpz_partition_size", ZERO + "mics_shard_size"
    inner = {name: draft.get(name, 0) for name in (hpz, mics)}
    asked = [name for name in (hpz, mics) if inner[name] > (1 if name == hpz else 0)]
    for name in (hpz, mics):
        if name not in asked:
            draft.say(name, "switched off", NOT_NEEDED)
        elif stage != 3:
            draft.say(name, f"of stage 3; this is stage {stage}", NOT_NEEDED)
    if not asked or stage != 3:
        return
    if len(asked) == 2:
        raise draft.refuse(hpz, f"and mics_shard_size is {inner[mics]}: keep one of the two.")
    (name,) = asked
    size, world = inner[name], draft.world()
    if world % size:
        there = f"{counted(world, 'device')} = {world // size} x {size} + {world % size}: it must divide them"
        if not draft.told:
            there = f"it must divide the devices of the run, and JAX has {counted(world, 'device')} here"
        raise draft.refuse(name, f"{there}. Pass world= where the run has another number of devices.")
    draft.mesh_axes = {"replica": world // size, "data": size}
    both = ("replica", "data")
    draft.fields |= (
        {"axis": both, "param_axis": "data"} if name == hpz else {"axis": "data", "batch_axis": both}
    )
    fields = (
        'axis=("replica", "data"), param_axis="data"'
        if name == hpz
        else 'axis="data", batch_axis=("replica", "data")'
    )
    draft.say(name, f"{fields}; the mesh: jzero.mesh({json.dumps(draft.mesh_axes)})")


def _offload(draft: Draft, stage: int) -> None:
    device, param, old = OPTIMIZER + "device", PARAM + "device", ZERO + "cpu_offload"
    for name in (device, param):
        value = draft.get(name, "none")
        if value not in ("none", "cpu", "nvme"):
            raise draft.refuse(
                name, f"it must be none, cpu or nvme.{nearest(value, ('none', 'cpu', 'nvme'))}"
            )
    if draft.get(param) == "nvme":
        raise draft.refuse(
            param, 'params have no tier on a disk. Say "cpu": their shards and those of their gradients in host memory.'
        )
    if draft.get(old) and draft.get(device) is not None:
        raise draft.refuse(old, f"and {device} is {draft.get(device)!r}: keep {device}.")
    fields = {**_offloaded_state(draft, old if draft.get(old) else device, stage), **_offloaded_params(draft, stage)}
    if fields:
        draft.fields["offload"] = Offload(**fields)


def _offloaded_state(draft: Draft, name: str, stage: int) -> dict[str, Any]:
    kind = "cpu" if draft.get(ZERO + "cpu_offload") else draft.get(name, "none")
    if kind == "none":
        return {}
    if stage == 0:
        draft.say(name, "of stages 1 to 3; this is stage 0", NOT_NEEDED)
        return {}
    if kind == "cpu":
        draft.say(
            name,
            "offload=jzero.Offload(): state in host memory, updated on the device; DeepSpeed updates it on the CPU: "
            'update="host" does (apply_gradients outside of jit)',
        )
        return {"tier": "host"}
    path = draft.get(OPTIMIZER + "nvme_path")
    if not isinstance(path, str):
        raise draft.refuse(name, f"{OPTIMIZER}nvme_path must say in which folder.")
    if stage == 1:
        raise draft.refuse(name, "state on a disk needs stage 2 or 3: at stage 1 gradients leave the step whole.")
    draft.say(name, 'offload=jzero.Offload(tier="disk"): apply_gradients is called outside of jit')
    draft.say(OPTIMIZER + "nvme_path", f"path={path!r}: a folder of this run alone")
    return {"tier": "disk", "path": path}


def _offloaded_params(draft: Draft, stage: int) -> dict[str, Any]:
    name, old = PARAM + "device", ZERO + "cpu_offload_param"
    name = old if draft.get(old) else name
    if draft.get(name, "none") in ("none", False):
        return {}
    if stage != 3:
        draft.say(name, f"of stage 3; this is stage {stage}", NOT_NEEDED)
        return {}
    draft.say(name, 'jzero.Offload(params="host"): params, their gradients, and optimizer state in host memory')
    return {"params": "host"}
