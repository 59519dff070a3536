"""What follows from several keys together: the mesh, the loss scale, the batch, the optimizer and its schedule."""

from __future__ import annotations

import json
from typing import Any

import jax

from jzero.core.errors import counted, division
from jzero.deepspeed.keys import TABLE, TYPES
from jzero.deepspeed.result import call
from jzero.deepspeed.source import AUTO, is_number
from jzero.deepspeed.translation import Draft
from jzero.gradients.loss_scale import LossScale

HYBRIDS = ("zero_optimization.zero_hpz_partition_size", "zero_optimization.mics_shard_size")
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def derive_mesh(draft: Draft) -> None:
    """The mesh axes of hpZ or MiCS, and that of tensor parallelism, over which activations are split.

    Raises:
      ValueError: a size does not divide the devices.
    """
    axes: dict[str, int] = {}
    for name in filter(draft.active, HYBRIDS):
        size, draft.world = draft.get(name), draft.world or jax.device_count()
        if draft.world % size:
            rest, here = division(draft.world, size).partition(" = ")[2], counted(jax.device_count(), "device")
            raise ValueError(
                f"{name} is {size}: {counted(draft.world, 'device')} = {rest}: it must divide the devices of the run, "
                f"and JAX has {here} here. Pass world= where the run has another number of devices."
            )
        axes = {"replica": draft.world // size, "data": size}
    if "remat.partition" in draft.made:
        axes = {**(axes or {"data": -1}), "model": 1}
    if axes:
        draft.made |= {"result.mesh_axes": axes, "axes": json.dumps(axes), "mesh": ", mesh=mesh"}


def derive_loss_scale(draft: Draft) -> None:
    """The scale of fp16: a number, or a `jzero.LossScale` that the train state holds.

    Raises:
      ValueError: the least scale is above the first one.
    """
    static, numbers = draft.active("fp16.loss_scale"), draft.part("scale")
    draft.made["step"] = f", scale={static}" if static else ""
    if not numbers:
        return
    power = numbers["initial"]
    numbers["initial"] = initial = 2.0**power
    if not 0 < numbers["minimum"] <= initial:
        rule = f"it must be above 0 and at most the first scale, 2**{power} = {2**power}"
        raise ValueError(f"fp16.min_loss_scale is {numbers['minimum']}: {rule}.")
    if initial > LossScale.maximum:
        numbers["maximum"] = initial
    draft.made["result.loss_scale"] = LossScale(**numbers)
    draft.made |= {"scaled": f", scale={call('LossScale', numbers)}", "state": "State", "step": ", scale=state.scale"}


def derive_batch(draft: Draft) -> None:
    """The three numbers of the batch, by DeepSpeed's rules.

    Raises:
      ValueError: train_batch_size is not micro-batch x accumulation x devices.
    """
    total, micro, steps = map(draft.get, BATCH)
    if total is not None:
        draft.world = devices = draft.world or jax.device_count()
        steps = steps or (total // micro // devices if micro else 1)
        micro = micro or total // (devices * steps)
        if total != micro * steps * devices or not micro:
            raise ValueError(
                f"train_batch_size {total} is not {micro} (micro-batch) x {steps} (accumulation) x {devices} (devices) "
                f"= {micro * steps * devices}. Correct one of them, or pass world= where the run has another number of "
                "devices that share the batch."
            )
    steps = steps or 1
    if micro and draft.world:
        total = micro * steps * draft.world
    draft.made |= {"result.train_batch_size": total, "result.micro_batch_size": micro, "result.accumulate": steps}
    draft.made["batch"] = f"{micro} x {steps} x {draft.world or 'devices'}" if micro else ""
    draft.made["in_all"] = f" = {total}" if total else ""
    if steps > 1:
        draft.made["step"] = f", accumulate={steps}{draft.made['step']}"


def derive_optimizer(draft: Draft) -> None:
    """The optimizer and its schedule as expressions of optax.

    Raises:
      ValueError: a schedule has no number of steps, or no learning rate to rise to.
    """
    name, schedule = draft.get("optimizer.type"), draft.get("scheduler.type")
    expression, given = _expression(draft, "optimizer")
    rate, decay = given.get("lr"), given.get("weight_decay")
    facts = {
        "type": name, "rate": "schedule" if schedule else rate, "with_schedule": ", with schedule" if schedule else "",
        "decay": f"optax.chain(optax.add_decayed_weights({decay}), " if decay else "", "end": ")" if decay else "",
    }  # fmt: skip
    if name:
        draft.made["tx"] = expression.format(**given | facts)
    if schedule:
        draft.made["schedule"] = _schedule(draft, schedule, rate if name and is_number(rate) else None)


def _expression(draft: Draft, section: str) -> tuple[str, dict[str, Any]]:
    """The expression for the type that the file names, and its arguments: those of the file, else the defaults."""
    kind, prefix = TYPES[section].get(str(draft.get(f"{section}.type")).lower(), "*"), f"{section}.params."
    found = ((name.removeprefix(prefix), draft.get(name)) for name in draft.keys if name.startswith(prefix))
    given = {name: value for name, value in found if value is not None}
    rows = (row for kinds, *row in TABLE["expressions"][section] if kind in kinds.split())
    return next((text, defaults | given) for needs, text, defaults in rows if needs.items() <= given.items())


def _schedule(draft: Draft, name: str, rate: float | None) -> str:
    """The schedule; DeepSpeed's runs one update behind.

    It is called after each update, and its first two updates have the first rate.
    """
    expression, given = _expression(draft, "scheduler")
    if name.lower() not in TYPES["scheduler"]:
        return expression.format(type=name)
    warmup: Any = given["warmup_num_steps"]
    total: Any = given.get("total_num_steps")
    if total is None and "left" in expression:
        raise ValueError("scheduler.params.total_num_steps is None; it must be at least 1.")
    draft.made |= {str(steps): True for steps in (warmup, total)}  # names, if the file says "auto"
    warmup = 2 if warmup in (0, 1) else warmup
    done = is_number(total) and is_number(warmup) and total <= warmup
    left = "1" if done else f"{total} - {warmup}"  # DeepSpeed divides by at least 1 too
    high = rate if draft.values.get("scheduler.params.warmup_max_lr") == AUTO else given.get("warmup_max_lr", rate)
    if high is None:
        raise ValueError(f"{name} rises to the optimizer's lr, which the file does not set.")
    low = given.get("warmup_min_lr", given.get("warmup_min_ratio", 0.0) * (rate or 0.0))
    rise = f"optax.linear_schedule({low}, {high}, {warmup})"
    if given.get("warmup_type") != "linear":
        start, by = (f"{low} + ", high - low) if low else ("", high)
        rise = f"lambda step: {start}{by} * jnp.log1p(step) / jnp.log({warmup})"
    return f"optax.join_schedules([{rise}, {expression.format(high=high, left=left, **given)}], [{warmup}])"
