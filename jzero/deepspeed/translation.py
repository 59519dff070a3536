"""`Draft`: a `FromDeepSpeed` in the making. What is said about a key, and the lines of the train script."""

from __future__ import annotations

import json
from typing import Any

import jax

from jzero.config import ZeroConfig
from jzero.deepspeed.keys import FATES, KEYS, MAPPED, NOT_NEEDED, NOT_SUPPORTED, ZERO, key_of
from jzero.deepspeed.result import FromDeepSpeed, Row, config_line
from jzero.deepspeed.source import AUTO
from jzero.gradients.loss_scale import LossScale

AUTO_TEXT = {
    "train_batch_size": "the batch is what `plan.place_batch` gets",
    "train_micro_batch_size_per_gpu": "the batch is what `plan.place_batch` gets",
    "gradient_accumulation_steps": "taken as 1, the Trainer's default",
    "gradient_clipping": "taken as 1.0, the Trainer's max_grad_norm",
    "fp16.enabled": "taken as false: params keep their dtype",
    "bf16.enabled": "taken as false: params keep their dtype",
    ZERO + "reduce_bucket_size": "jzero's own default: a sixteenth of the params, within bounds",
    ZERO + "stage3_prefetch_bucket_size": "jzero's own default: a sixteenth of the params, within bounds",
    ZERO
    + "stage3_param_persistence_threshold": "jzero's own default: small leaves add at most 1 % to the state",
}


class Draft:
    """A FromDeepSpeed in the making."""

    def __init__(self, where: str, values: dict[str, Any], world: int | None):
        self.where, self.values, self._world = where, values, world
        self.told = world is not None
        self.fields: dict[str, Any] = {}
        self.rows: dict[str, tuple[str, str]] = {}  # what is said about a key: its fate and a text
        self.notes: list[str] = []
        self.lines: dict[str, list[str]] = {}
        self.mesh_axes: dict[str, int] | None = None
        self.train_batch_size: int | None = None
        self.micro_batch_size: int | None = None
        self.accumulate = 1
        self.loss_scale: LossScale | float | None = None
        self.clip: float | None = None
        self.param_dtype: str | None = None
        self.remat: dict[str, str] = {}

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a key; the default where it is not there, null or "auto"."""
        assert name in KEYS, name
        value = self.values.get(name)
        return default if value is None or value == AUTO else value

    def say(self, name: str, text: str, fate: str = MAPPED) -> None:
        """What became of a key, if the file has it with a value."""
        if self.values.get(name) not in (None, AUTO):
            self.rows[name] = (fate, text)

    def world(self) -> int:
        """Devices that share the batch: as told, else all that JAX has."""
        if self._world is None:
            self._world = jax.device_count()
        return self._world

    def refuse(self, name: str, text: str) -> ValueError:
        """The error for a key's value."""
        shown = json.dumps(self.values.get(name), default=str)
        return ValueError(f"jzero.deepspeed: {self.where}: {name} is {shown}: {text}")

    def finish(self) -> FromDeepSpeed:
        """The result: every key in exactly one list."""
        told: dict[str, list[Row]] = {fate: [] for fate in FATES}
        for name, value in self.values.items():
            fate, text = self._fate(name, value)
            told[fate].append(Row(name, value, text))
        config = ZeroConfig(**self.fields)
        code = self._code(config)
        return FromDeepSpeed(
            config=config, world=self._world, mesh_axes=self.mesh_axes, train_batch_size=self.train_batch_size,
            micro_batch_size=self.micro_batch_size, accumulate=self.accumulate, loss_scale=self.loss_scale,
            clip=self.clip, param_dtype=self.param_dtype, remat=self.remat, code=tuple(code),
            mapped=tuple(told[MAPPED]), not_needed=tuple(told[NOT_NEEDED]),
            not_supported=tuple(told[NOT_SUPPORTED]), notes=tuple(self.notes),
        )  # fmt: skip

    def _fate(self, name: str, value: Any) -> tuple[str, str]:
        if name in self.rows:
            return self.rows[name]
        key = key_of(name)
        if value is None:
            return NOT_NEEDED, "null: as if it were not there"
        if value == AUTO:
            fate = MAPPED if key.fate == MAPPED else NOT_NEEDED
            return fate, f'"auto": {AUTO_TEXT.get(name, "the default of DeepSpeed")}'
        if key.fate == MAPPED:
            return NOT_NEEDED, "switched off" if value is False else "of what is switched off"
        if key.fate != NOT_NEEDED and _off(value, key.off):
            return NOT_NEEDED, key.text if value is True else "asks for nothing"
        return key.fate, key.text

    def _code(self, config: ZeroConfig) -> list[str]:
        """The lines of a train script, in their order."""
        lines, mesh = [], ""
        if self.mesh_axes:
            model = "  # model: devices of your tensor parallelism" if "model" in self.mesh_axes else ""
            lines.append(f"mesh = jzero.mesh({json.dumps(self.mesh_axes)}){model}")
            mesh = ", mesh=mesh"
        lines.append(f"config = {config_line(config)}")
        if self.remat:
            keywords = "".join(f', {k}="{v}"' for k, v in self.remat.items())
            lines += [
                "# where the model is built; shapes: jax.eval_shape of its init",
                f"Block = jzero.remat(Block, jzero.make_plan(shapes, config{mesh}){keywords})",
            ]
        default = {"tx": ["tx = ...  # your optax chain: the file has no optimizer"]}
        for part in ("params", "schedule", "tx", "clip", "skip"):
            lines += self.lines.get(part, default.get(part, []))
        create = "state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)"
        lines += [*self.lines.get("state", [create]), f"state = jzero.shard(state, config=config{mesh})"]
        lines.append("plan = jzero.plan_of(state)")
        keywords = f", accumulate={self.accumulate}" if self.accumulate > 1 else ""
        if self.loss_scale is not None:
            number = isinstance(self.loss_scale, float)
            keywords += f", scale={self.loss_scale}" if number else ", scale=state.scale"
        if keywords:
            step = f"loss, grads = jzero.value_and_grad(loss_fn, plan{keywords})(state.params, batch)"
            lines += ["# in the train step:", step, *self.lines.get("after", [])]
        return lines


def _off(value: Any, off: tuple) -> bool:
    if isinstance(value, dict):
        return not value or value.get("enabled") is False
    return any(value == o and isinstance(value, bool) == isinstance(o, bool) for o in off)
