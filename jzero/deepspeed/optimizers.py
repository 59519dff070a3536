"""DeepSpeed's optimizers and schedules as lines of optax."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jzero.deepspeed.source import AUTO
from jzero.errors import nearest

# What Hugging Face's TrainingArguments put in the place of "auto" unless they are told otherwise.
AUTO_VALUES = {"lr": 5e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "warmup_min_lr": 0.0}

COMPRESSED = ("onebitadam", "zerooneadam", "onebitlamb")
SCHEDULES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")


@dataclasses.dataclass
class Lines:
    """Lines to write, and by argument what became of it: `used`, or `refused` with the reason."""

    code: list[str] = dataclasses.field(default_factory=list)
    used: dict[str, str] = dataclasses.field(default_factory=dict)
    refused: dict[str, str] = dataclasses.field(default_factory=dict)


class _Arguments:
    """The arguments of a section, taken one by one; what nobody takes is refused."""

    def __init__(self, where: str, section: str, given: Mapping[str, Any]):
        self.where, self.section, self.given, self.lines = where, section, given, Lines()
        self.known: list[str] = []

    def value(self, name: str, default: Any, kind: str = "a finite number") -> Any:
        """The argument's value, checked; "auto" is the trainer's default."""
        self.known.append(name)
        found = self.given.get(name)
        if found is None:
            return default
        if found == AUTO:
            taken = AUTO_VALUES.get(name, default)
            self.lines.used[name] = f'{taken}: "auto" is the default of Hugging Face\'s Trainer'
            return taken
        if not _is(kind, found):
            raise TypeError(
                f"jzero.deepspeed: {self.where}: {self.section}.{name} is {found!r}; it must be {kind}."
            )
        self.lines.used[name] = "in the line below"
        return int(found) if kind == "a whole number" else found

    def only(self, name: str, value: Any, reason: str) -> None:
        """An argument that optax has not: `value` asks for nothing, any other is refused."""
        found = self.value(name, value, "true or false" if isinstance(value, bool) else "a finite number")
        if name in self.given:
            self.lines.used[name] = "asks for nothing"
            if found != value:
                del self.lines.used[name]
                self.lines.refused[name] = reason

    def unneeded(self, *names: str) -> None:
        """Arguments of the implementation."""
        self.known += names
        self.lines.used.update(
            {n: "of the implementation: XLA fuses the update" for n in names if n in self.given}
        )

    def rest(self) -> Lines:
        """The lines, with every argument that was not taken refused."""
        for name in self.given:
            if name not in self.known:
                self.lines.refused[name] = f"no argument of it that is known here.{nearest(name, self.known)}"
        return self.lines


def optimizer_lines(
    where: str, name: str, given: Mapping[str, Any], *, scheduled: bool
) -> tuple[Lines, float | None]:
    """`tx = optax...`, and the learning rate it names; no line where optax has no such optimizer.

    Raises:
      TypeError: an argument of the wrong kind.
      ValueError: `max_grad_norm`, which DeepSpeed refuses too.
    """
    if "max_grad_norm" in given:
        raise ValueError(
            f"jzero.deepspeed: {where}: optimizer.params.max_grad_norm is refused by DeepSpeed too: say "
            '"gradient_clipping" at the top level.'
        )
    args, kind = _Arguments(where, "optimizer.params", given), name.lower()
    if kind not in ("adam", "adamw", "lion", "lamb", "adagrad", "sgd"):
        why = "1-bit gradients are not there" if kind in COMPRESSED else "write the optax chain yourself"
        if kind == "muon":
            why = "see optax.contrib.muon, and say which params are its own"
        return Lines(refused={"type": why, **dict.fromkeys(given, why)}), None
    lr = args.value("lr", {"adagrad": 1e-2}.get(kind, 1e-3))
    rate, decay_first = "schedule" if scheduled else repr(lr), ""
    if kind in ("adam", "adamw"):
        b1, b2 = args.value("betas", (0.9, 0.999), "a list of two numbers")
        eps = args.value("eps", 1e-8)
        decoupled = args.value("adam_w_mode", True, "true or false") or kind == "adamw"
        torch_adam = args.value("torch_adam", False, "true or false")
        decay = args.value("weight_decay", 0.01 if torch_adam and decoupled else 0.0)
        args.only("amsgrad", False, "optax.amsgrad, without decoupled weight decay")
        args.only("bias_correction", True, "optax's Adam always corrects")
        args.unneeded("set_grad_none", "fp32_optimizer_states", "fused", "foreach")
        line = f"{rate}, b1={b1}, b2={b2}, eps={eps}"
        if decoupled:
            line = f"optax.adamw({line}, weight_decay={decay})"
        else:
            line, decay_first = f"optax.adam({line})", decay
    elif kind == "lion":
        b1, b2 = args.value("betas", (0.9, 0.999), "a list of two numbers")
        args.unneeded("set_grad_none")
        line = f"optax.lion({rate}, b1={b1}, b2={b2}, weight_decay={args.value('weight_decay', 0.0)})"
    elif kind == "lamb":
        b1, b2 = args.value("betas", (0.9, 0.999), "a list of two numbers")
        for bound, usual in (("max_coeff", 10.0), ("min_coeff", 0.01)):
            args.only(bound, usual, "optax does not clamp LAMB's trust ratio")
        args.only("bias_correction", True, "optax's LAMB always corrects")
        decay = args.value("weight_decay", 0.0)
        line = f"optax.lamb({rate}, b1={b1}, b2={b2}, eps={args.value('eps', 1e-8)}, weight_decay={decay})"
    elif kind == "adagrad":
        start, decay_first = args.value("initial_accumulator_value", 0.0), args.value("weight_decay", 0.0)
        args.only("lr_decay", 0.0, "pass a schedule as the learning rate")
        line = f"optax.adagrad({rate}, initial_accumulator_value={start}, eps={args.value('eps', 1e-10)})"
    else:
        momentum, decay_first = args.value("momentum", 0.0), args.value("weight_decay", 0.0)
        args.only("dampening", 0.0, "optax.sgd has none")
        nesterov = args.value("nesterov", False, "true or false")
        line = f"optax.sgd({rate}, momentum={momentum or None}, nesterov={nesterov})"
    if decay_first:
        line = f"optax.chain(optax.add_decayed_weights({decay_first}), {line})"
    lines = args.rest()
    lines.code.append(f"tx = {line}")
    return lines, lr


def schedule_lines(where: str, name: str, given: Mapping[str, Any], lr: float | None) -> Lines:
    """`schedule = optax...`; no line for a schedule that optax has not.

    DeepSpeed's runs one update behind: it is called after each, and its first two updates have the first rate.

    Raises:
      TypeError: an argument of the wrong kind.
      ValueError: a number of steps below 1, or no learning rate to rise to.
    """
    args = _Arguments(where, "scheduler.params", given)
    if name not in SCHEDULES:
        why = f"write it with optax.schedules; {', '.join(SCHEDULES)} are known here"
        return Lines(refused={"type": why, **dict.fromkeys(given, why)})
    steps = {"warmup_num_steps": 1000} | ({} if name == "WarmupLR" else {"total_num_steps": None})
    counts: dict[str, str] = {}
    for step, default in steps.items():
        if given.get(step) == AUTO:
            args.known.append(step)
            free = step.replace("_num", "")
            args.lines.used[step] = f'"auto": the Trainer counts it; say it in {free}'
            args.lines.code.append(f"{free} = ...  # how many: the Trainer filled it in")
            counts[step] = free
            continue
        count = args.value(step, default, "a whole number")
        if count is None or count < 1:
            raise ValueError(
                f"jzero.deepspeed: {where}: scheduler.params.{step} is {count}; it must be at least 1."
            )
        counts[step] = str(max(2, count) if step == "warmup_num_steps" else count)
    warmup = counts["warmup_num_steps"]
    left = f"{counts.get('total_num_steps')} - {warmup}"
    if name == "WarmupCosineLR":
        high = lr
        low = args.value("warmup_min_ratio", 0.0) * (lr or 0.0)
        tail = f"optax.cosine_decay_schedule({high!r}, {left}, alpha={args.value('cos_min_ratio', 0.0001)})"
    else:
        usual = lr if name == "WarmupLR" or given.get("warmup_max_lr") == AUTO else 0.001
        high = usual if given.get("warmup_max_lr") == AUTO else args.value("warmup_max_lr", usual)
        if given.get("warmup_max_lr") == AUTO:
            args.known.append("warmup_max_lr")
            args.lines.used["warmup_max_lr"] = f'{high}: "auto" is the optimizer\'s learning rate'
        low = args.value("warmup_min_lr", 0.0)
        tail = f"optax.constant_schedule({high!r})"
        if name == "WarmupDecayLR":
            tail = f"optax.linear_schedule({high!r}, 0.0, {left})"
    if high is None:
        raise ValueError(
            f"jzero.deepspeed: {where}: {name} rises to the optimizer's lr, and no optimizer is there."
        )
    rise = f"optax.linear_schedule({low!r}, {high!r}, {warmup})"
    if args.value("warmup_type", "log", "a string") != "linear":
        start, by = (f"{low!r} + ", high - low) if low else ("", high)
        rise = f"lambda step: {start}{by!r} * jnp.log1p(step) / jnp.log({warmup})"
    args.only("last_batch_iteration", -1, "a restored checkpoint has the optimizer's count")
    args.lines.code.append(f"schedule = optax.join_schedules([{rise}, {tail}], [{warmup}])")
    return args.rest()


def _is(kind: str, value: Any) -> bool:
    if kind == "true or false":
        return isinstance(value, bool)
    if kind == "a string":
        return isinstance(value, str)
    if kind == "a list of two numbers":
        return isinstance(value, (list, tuple)) and len(value) == 2 and all(map(_number, value))
    return _number(value) and (kind != "a whole number" or float(value).is_integer())


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
