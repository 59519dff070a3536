"""fp16, bf16, dtypes and loss scale of a DeepSpeed config."""

from __future__ import annotations

from typing import Any

from jzero.core.errors import nearest
from jzero.deepspeed.keys import NOT_NEEDED, SOURCE, ZERO
from jzero.deepspeed.translation import Draft
from jzero.gradients.loss_scale import LossScale

DTYPES = {
    "fp16": "float16", "float16": "float16", "half": "float16", "torch.float16": "float16",
    "bf16": "bfloat16", "bfloat16": "bfloat16", "torch.bfloat16": "bfloat16",
    "fp32": "float32", "float32": "float32", "float": "float32", "torch.float32": "float32",
}  # fmt: skip


def map_precision(draft: Draft) -> None:
    """fp16, bf16, data_types, torch_autocast, communication_data_type.

    Raises:
      ValueError: fp16 and bf16 at once; an unknown dtype.
    """
    fp16, bf16 = draft.get("fp16.enabled", False), draft.get("bf16.enabled", False)
    if fp16 and bf16:
        raise ValueError(f"jzero.deepspeed: {draft.where}: fp16 and bf16 are both enabled. Keep one.")
    draft.param_dtype = "float16" if fp16 else "bfloat16" if bf16 else None
    given = _dtype(draft, "data_types.param_dtype")
    if given is not None:
        draft.param_dtype = given
        draft.say("data_types.param_dtype", f"params are cast to {given}")
    for name, on in (("fp16.enabled", fp16), ("bf16.enabled", bf16)):
        if on:
            draft.say(name, f"params are cast to {draft.param_dtype}; 16-bit params get fp32 masters")
    if draft.param_dtype is not None:
        draft.lines["params"] = [
            f"params = jax.tree.map(lambda p: p.astype(jnp.{draft.param_dtype}), params)"
        ]
    if fp16:
        _fp16(draft)
    if bf16:
        _bf16(draft)
    reduce = _dtype(draft, "communication_data_type")
    if reduce is not None:
        draft.fields["reduce_dtype"] = reduce
        draft.say("communication_data_type", f'reduce_dtype="{reduce}"')
    _autocast(draft)


def _autocast(draft: Draft) -> None:
    if not draft.get("torch_autocast.enabled", False):
        return
    compute = _dtype(draft, "torch_autocast.dtype") or "bfloat16"
    if draft.get(ZERO + "stage", 0) == 3:
        draft.fields["compute_dtype"] = compute
        text = f'compute_dtype="{compute}": cast on the shard, before the gather'
    else:
        text = f"name it in the model: nn.Dense(n, dtype=jnp.{compute}); `compute_dtype` is of stage 3"
    draft.say("torch_autocast.enabled", text)
    draft.say("torch_autocast.dtype", text)


def _fp16(draft: Draft) -> None:
    static = draft.get("fp16.loss_scale", 0)
    draft.lines["skip"] = ["tx = optax.apply_if_finite(tx, 10**6)  # skips a step that overflows"]
    if draft.get("fp16.fp16_master_weights_and_grads", False):
        draft.fields |= {"master_dtype": None, "moment_dtype": "float32"}
        draft.say(
            "fp16.fp16_master_weights_and_grads",
            'master_dtype=None, moment_dtype="float32": fp16 holds no squares',
        )
    dynamic = ("initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")
    if static:
        draft.loss_scale = float(static)
        draft.say("fp16.loss_scale", f"jzero.value_and_grad(scale={float(static)})")
        for name in dynamic:
            draft.say(f"fp16.{name}", "of a dynamic scale; loss_scale names a static one", NOT_NEEDED)
        return
    power = draft.get("fp16.initial_scale_power", 16)
    if power > 126:
        raise draft.refuse("fp16.initial_scale_power", "fp32 holds scales up to 2**127; 16 is usual.")
    numbers: dict[str, Any] = {"initial": 2.0**power}
    for name, field in (("loss_scale_window", "growth_interval"), ("hysteresis", "hysteresis")):
        numbers[field] = draft.get(f"fp16.{name}", {"growth_interval": 1000, "hysteresis": 2}[field])
        if numbers[field] < 1:
            raise draft.refuse(f"fp16.{name}", "it must be at least 1.")
    numbers["minimum"] = float(draft.get("fp16.min_loss_scale", 1))
    if not 0 < numbers["minimum"] <= numbers["initial"]:
        text = f"it must be above 0 and at most the first scale, 2**{power} = {2**power}."
        raise draft.refuse("fp16.min_loss_scale", text)
    if numbers["initial"] > 2.0**24:
        numbers["maximum"] = numbers["initial"]
    draft.loss_scale = LossScale(**numbers)
    written = "jzero.LossScale(" + ", ".join(f"{k}={v}" for k, v in numbers.items()) + ")"
    draft.say("fp16.loss_scale", f"0: dynamic, {written}")
    for name, field in zip(dynamic, ("initial", "growth_interval", "hysteresis", "minimum"), strict=True):
        draft.say(f"fp16.{name}", f"jzero.LossScale({field}={numbers[field]})")
    draft.lines["state"] = [
        "class State(TrainState):", "    scale: jzero.LossScale", "",
        f"state = State.create(apply_fn=model.apply, params=params, tx=tx, scale={written})",
    ]  # fmt: skip
    draft.lines["after"] = [
        "state = state.apply_gradients(grads=grads)",
        "state = state.replace(scale=state.scale.update(state.opt_state))",
    ]
    top = 2.0 ** max(24, power)
    draft.notes.append(
        f"The loss scale stops at {top:g} (DeepSpeed's grows on) and stays at its minimum (DeepSpeed ends "
        "the run there)."
    )
    if numbers["hysteresis"] > 1:
        draft.notes.append(
            f"hysteresis {numbers['hysteresis']}: jzero waits for as many overflows before every cut of the scale, "
            "DeepSpeed before the first since the scale last grew."
        )


def _bf16(draft: Draft) -> None:
    check = draft.get("bf16.check_grad_overflow")
    if check:
        draft.lines["skip"] = ["tx = optax.apply_if_finite(tx, 10**6)  # skips a step with inf or nan"]
        draft.say("bf16.check_grad_overflow", "optax.apply_if_finite round the chain")
    elif check is None:
        draft.notes.append(
            f"bf16.check_grad_overflow is not in the file: {SOURCE} skips steps with inf or nan then. Here nothing is "
            "skipped unless you wrap tx: optax.apply_if_finite(tx, 10**6)."
        )
    moments = draft.get("bf16.bf16_optimizer_states", False)
    if not draft.get("bf16.bf16_master_weights_and_grads", False):
        if moments:
            text = "DeepSpeed takes it only with bf16_master_weights_and_grads: set that too, or neither."
            raise draft.refuse("bf16.bf16_optimizer_states", text)
        return
    draft.fields |= {"master_dtype": None, "moment_dtype": "bfloat16" if moments else "float32"}
    text = f'moment_dtype="{draft.fields["moment_dtype"]}"'
    draft.say("bf16.bf16_master_weights_and_grads", f"master_dtype=None, {text}")
    if moments:
        draft.say("bf16.bf16_optimizer_states", f"{text}, rounded so that the mean is right")


def _dtype(draft: Draft, name: str) -> str | None:
    value = draft.get(name)
    if value is None:
        return None
    if value.lower() not in DTYPES:
        raise draft.refuse(name, f"it must be fp16, bf16 or fp32.{nearest(value, ('fp16', 'bf16', 'fp32'))}")
    return DTYPES[value.lower()]
