"""Batch, clipping, optimizer, schedule and activation checkpointing of a DeepSpeed config."""

from __future__ import annotations

from typing import Any

from jzero.deepspeed.keys import MAPPED, NOT_NEEDED, NOT_SUPPORTED, SOURCE
from jzero.deepspeed.optimizers import Lines, optimizer_lines, schedule_lines
from jzero.deepspeed.source import AUTO
from jzero.deepspeed.translation import Draft


def map_batch(draft: Draft) -> None:
    """The three numbers of the batch, by DeepSpeed's rules; clipping.

    Raises:
      ValueError: train_batch_size is not micro-batch x accumulation x devices.
    """
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    total, micro, steps = (draft.get(name) for name in names)
    for name in names:
        if draft.get(name) is not None and draft.get(name) < 1:
            raise draft.refuse(name, "it must be at least 1.")
    if total is not None:
        world = draft.world()
        if micro is None:
            steps = steps or 1
            micro = total // (world * steps)
        elif steps is None:
            steps = total // micro // world
        if total != micro * steps * world or not micro:
            raise ValueError(
                f"jzero.deepspeed: {draft.where}: train_batch_size {total} is not {micro} (micro-batch) x {steps} "
                f"(accumulation) x {world} (devices) = {micro * steps * world}. Correct one of them, or pass world= "
                "where the run has another number of devices that share the batch."
            )
    draft.accumulate = steps or 1
    draft.micro_batch_size = micro
    if total is None and micro is not None and draft._world is not None:
        total = micro * draft.accumulate * draft._world
    draft.train_batch_size = total
    batch = f"{micro} x {draft.accumulate} x {draft._world or 'devices'}" if micro else ""
    draft.say(names[0], f"examples that plan.place_batch gets: {batch}")
    draft.say(names[1], f"the batch is {batch}{f' = {total}' if total else ''} examples")
    draft.say(names[2], f"jzero.value_and_grad(accumulate={draft.accumulate})")
    clip = 1.0 if draft.values.get("gradient_clipping") == AUTO else draft.get("gradient_clipping")
    if clip:
        draft.clip = float(clip)
        draft.lines["clip"] = [f"tx = optax.chain(optax.clip_by_global_norm({draft.clip}), tx)"]
        draft.say("gradient_clipping", f"optax.clip_by_global_norm({draft.clip})")
    elif "gradient_clipping" not in draft.values:
        draft.notes.append(
            f"gradient_clipping is not in the file: {SOURCE} clips at 1.0 then, older versions did not. "
            "Here nothing clips."
        )


def map_rest(draft: Draft) -> None:
    """Optimizer, schedule, activation checkpointing, and keys whose text depends on others."""
    rate = None
    kind, schedule = draft.get("optimizer.type"), draft.get("scheduler.type")
    if kind is not None:
        scheduled = schedule is not None
        lines, rate = optimizer_lines(
            draft.where, kind, _inner(draft, "optimizer.params."), scheduled=scheduled
        )
        _take(draft, "optimizer", "tx", lines)
    if schedule is not None:
        lines = schedule_lines(draft.where, schedule, _inner(draft, "scheduler.params."), rate)
        _take(draft, "scheduler", "schedule", lines)
    part, host = (f"activation_checkpointing.{n}" for n in ("partition_activations", "cpu_checkpointing"))
    if draft.get(part, False):
        draft.remat["partition"] = "model"
        draft.mesh_axes = {**(draft.mesh_axes or {"data": -1}), "model": 1}
        draft.say(
            part, 'jzero.remat(partition="model"): give the mesh axis "model" the size of tensor parallelism'
        )
    if draft.get(host, False):
        draft.remat["offload"] = "host"
        draft.say(host, 'jzero.remat(offload="host")')
    tensor = draft.get("tensor_parallel", {})
    if draft.values.get("tensor_parallel") and tensor.get("autotp_size", 0) in (0, 1):
        draft.say("tensor_parallel", "asks for nothing: autotp_size is not above 1", NOT_NEEDED)


def _inner(draft: Draft, section: str) -> dict[str, Any]:
    return {k.removeprefix(section): v for k, v in draft.values.items() if k.startswith(section)}


def _take(draft: Draft, section: str, part: str, lines: Lines) -> None:
    draft.lines[part] = lines.code
    if "type" in lines.refused:
        draft.say(f"{section}.type", lines.refused["type"], NOT_SUPPORTED)
    else:
        draft.say(f"{section}.type", lines.code[-1])
    for name, text in lines.used.items():
        draft.rows[f"{section}.params.{name}"] = (MAPPED, text)
    for name, text in lines.refused.items():
        if name != "type":
            draft.rows[f"{section}.params.{name}"] = (NOT_SUPPORTED, text)
