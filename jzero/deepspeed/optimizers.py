"""DeepSpeed's optimizers and schedules as lines of optax."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jzero.core.errors import nearest
from jzero.deepspeed.source import AUTO, is_number, unknown_keys

# What Hugging Face's TrainingArguments put in the place of "auto" unless they are told otherwise.
AUTO_VALUES = {"lr": 5e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "warmup_min_lr": 0.0}

COMPRESSED = ("onebitadam", "zerooneadam", "onebitlamb")
OPTIMIZERS = ("Adam", "AdamW", "Lion", "Lamb", "Adagrad", "SGD")
OTHERS = (  # DeepSpeed's own others, and those of torch.optim
    "muon", "muadam", "muadamw", "musgd", "adadelta", "adafactor", "adamax", "asgd", "lbfgs", "nadam", "radam",
    "rmsprop", "rprop", "sparseadam",
)  # fmt: skip
OF_TORCH = ("foreach", "capturable", "differentiable", "fused")  # arguments that say how, not what
SCHEDULES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
OTHER_SCHEDULES = ("OneCycle", "LRRangeTest")


@dataclasses.dataclass
class Lines:
    """Lines to write, and by argument what became of it: `used`, or `refused` with the reason."""

    code: list[str] = dataclasses.field(default_factory=list)
    used: dict[str, str] = dataclasses.field(default_factory=dict)
    refused: dict[str, str] = dataclasses.field(default_factory=dict)


class _Arguments:
    """The arguments of a section, taken one by one; what nobody takes is an error."""

    def __init__(self, where: str, section: str, given: Mapping[str, Any]):
        self.where, self.section, self.given, self.lines = where, section, given, Lines()
        self.known: list[str] = []

    def value(self, name: str, default: Any, kind: str = "a finite number", *, low: float | None = 0) -> Any:
        """The argument's value, checked, a number at least `low`; "auto" is the trainer's default."""
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
        if low is not None and is_number(found) and found < low:
            raise self.wrong(name, found, f"it must be at least {low:g}")
        if name == "betas" and not all(0 <= beta < 1 for beta in found):
            raise self.wrong(name, found, "both must be at least 0 and below 1")
        self.lines.used[name] = "in the line below"
        return int(found) if kind == "a whole number" else found

    def wrong(self, name: str, found: Any, rule: str) -> ValueError:
        """The error for a value out of its range."""
        return ValueError(f"jzero.deepspeed: {self.where}: {self.section}.{name} is {found!r}; {rule}.")

    def only(self, name: str, value: Any, reason: str) -> None:
        """An argument that optax does not have: `value` asks for nothing, any other is refused."""
        kind = "true or false" if isinstance(value, bool) else "a finite number"
        found = self.value(name, value, kind, low=None)
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
        """The lines.

        Raises:
          ValueError: arguments that were not taken.
        """
        unknown = [name for name in self.given if name not in self.known]
        if unknown:
            raise unknown_keys(self.where, {f"{self.section}.{n}": nearest(n, self.known) for n in unknown})
        return self.lines


def _adam(args: _Arguments, rate: str, kind: str) -> tuple[str, float]:
    """A line of optax, and the weight decay to add in front of it: not decoupled."""
    b1, b2 = args.value("betas", (0.9, 0.999), "a list of two numbers")
    eps = args.value("eps", 1e-8)
    decoupled = args.value("adam_w_mode", True, "true or false") or kind == "adamw"
    torch_adam = args.value("torch_adam", False, "true or false")
    decay = args.value("weight_decay", 0.01 if torch_adam and decoupled else 0.0)
    args.only("amsgrad", False, "optax.amsgrad, without decoupled weight decay")
    args.only("bias_correction", True, "optax's Adam always corrects")
    args.only("maximize", False, "negate the loss")
    args.unneeded("set_grad_none", "fp32_optimizer_states", *OF_TORCH)
    line = f"{rate}, b1={b1}, b2={b2}, eps={eps}"
    return (
        (f"optax.adamw({line}, weight_decay={decay})", 0.0) if decoupled else (f"optax.adam({line})", decay)
    )


def _lion(args: _Arguments, rate: str, kind: str) -> tuple[str, float]:
    """As `_adam`."""
    b1, b2 = args.value("betas", (0.9, 0.999), "a list of two numbers")
    args.unneeded("set_grad_none", "fp32_optimizer_states")
    return f"optax.lion({rate}, b1={b1}, b2={b2}, weight_decay={args.value('weight_decay', 0.0)})", 0.0


def _lamb(args: _Arguments, rate: str, kind: str) -> tuple[str, float]:
    """As `_adam`."""
    b1, b2 = args.value("betas", (0.9, 0.999), "a list of two numbers")
    for bound, usual in (("max_coeff", 10.0), ("min_coeff", 0.01)):
        args.only(bound, usual, "optax does not clamp LAMB's trust ratio")
    args.only("bias_correction", True, "optax's LAMB always corrects")
    args.only("eps_inside_sqrt", False, "optax adds eps outside of the root")
    args.only("amsgrad", False, "DeepSpeed's LAMB has none")
    decay = args.value("weight_decay", 0.0)
    return f"optax.lamb({rate}, b1={b1}, b2={b2}, eps={args.value('eps', 1e-8)}, weight_decay={decay})", 0.0


def _adagrad(args: _Arguments, rate: str, kind: str) -> tuple[str, float]:
    """As `_adam`."""
    start, decay = args.value("initial_accumulator_value", 0.0), args.value("weight_decay", 0.0)
    args.only("lr_decay", 0.0, "pass a schedule as the learning rate")
    args.only("amsgrad", False, "DeepSpeed's Adagrad has none")
    args.only("maximize", False, "negate the loss")
    args.unneeded("fp32_optimizer_states", *OF_TORCH)
    return f"optax.adagrad({rate}, initial_accumulator_value={start}, eps={args.value('eps', 1e-10)})", decay


def _sgd(args: _Arguments, rate: str, kind: str) -> tuple[str, float]:
    """As `_adam`."""
    momentum, decay = args.value("momentum", 0.0), args.value("weight_decay", 0.0)
    args.only("dampening", 0.0, "optax.sgd has none")
    args.only("maximize", False, "negate the loss")
    args.unneeded(*OF_TORCH)
    nesterov = args.value("nesterov", False, "true or false")
    return f"optax.sgd({rate}, momentum={momentum or None}, nesterov={nesterov})", decay


_CHAINS = {"adam": _adam, "adamw": _adam, "lion": _lion, "lamb": _lamb, "adagrad": _adagrad, "sgd": _sgd}


def optimizer_lines(
    where: str, name: str, given: Mapping[str, Any], *, scheduled: bool
) -> tuple[Lines, float | None]:
    """`tx = optax...`, and the learning rate it names; `tx = ...` where the chain is the reader's to write.

    Raises:
      TypeError: an argument of the wrong kind.
      ValueError: an argument that is not known or out of its range; `max_grad_norm`, which DeepSpeed refuses too.
    """
    if "max_grad_norm" in given:
        raise ValueError(
            f"jzero.deepspeed: {where}: optimizer.params.max_grad_norm is refused by DeepSpeed too: say "
            '"gradient_clipping" at the top level.'
        )
    args, kind = _Arguments(where, "optimizer.params", given), name.lower()
    if kind not in map(str.lower, OPTIMIZERS):
        why = "1-bit gradients are not there" if kind in COMPRESSED else "write the optax chain yourself"
        if kind == "muon":
            why = "see optax.contrib.muon, and say which params are its own"
        hint = "" if kind in (*COMPRESSED, *OTHERS) else nearest(name, (*OPTIMIZERS, *COMPRESSED, "Muon"))
        line = f"tx = ...  # your optax chain in place of {name}{', with schedule' if scheduled else ''}"
        lr = AUTO_VALUES["lr"] if given.get("lr") == AUTO else given.get("lr")
        lines = Lines([line], refused={"type": why + _ended(hint), **dict.fromkeys(given, why)})
        return lines, lr if is_number(lr) else None
    lr = args.value("lr", {"adagrad": 1e-2}.get(kind, 1e-3))
    line, decay_first = _CHAINS[kind](args, "schedule" if scheduled else repr(lr), kind)
    if decay_first:
        line = f"optax.chain(optax.add_decayed_weights({decay_first}), {line})"
    lines = args.rest()
    lines.code.append(f"tx = {line}")
    return lines, lr


def schedule_lines(where: str, name: str, given: Mapping[str, Any], lr: float | None) -> Lines:
    """`schedule = optax...`; `schedule = ...` where it is the reader's to write.

    DeepSpeed's runs one update behind: it is called after each, and its first two updates have the first rate.

    Raises:
      TypeError: an argument of the wrong kind.
      ValueError: an argument that is not known or out of its range, or no learning rate to rise to.
    """
    args = _Arguments(where, "scheduler.params", given)
    if name not in SCHEDULES:
        why = f"write it with optax.schedules; {', '.join(SCHEDULES)} are known here"
        hint = "" if name in OTHER_SCHEDULES else nearest(name, (*SCHEDULES, *OTHER_SCHEDULES))
        line = f"schedule = ...  # your schedule of optax in place of {name}"
        return Lines([line], refused={"type": why + _ended(hint), **dict.fromkeys(given, why)})
    steps = {"warmup_num_steps": 1000} | ({} if name == "WarmupLR" else {"total_num_steps": None})
    counts: dict[str, str] = {}
    for step, default in steps.items():
        if given.get(step) == AUTO:
            args.known.append(step)
            free = step.replace("_num", "")
            args.lines.used[step] = f'"auto": the Trainer counts it; say it in {free}'
            least = ", at least 2" if step == "warmup_num_steps" else ""
            args.lines.code.append(f"{free} = ...  # how many{least}: the Trainer filled it in")
            counts[step] = free
            continue
        low = 0 if step == "warmup_num_steps" else 1
        count = args.value(step, default, "a whole number", low=low)
        if count is None:
            raise args.wrong(step, None, f"it must be at least {low}")
        counts[step] = str(max(2, count) if step == "warmup_num_steps" else count)
        if step == "warmup_num_steps" and count < 2:
            args.lines.used[step] = "taken as 2, as in DeepSpeed" + (
                " before 0.19.6, which refuses 0" if not count else ""
            )
    warmup = counts["warmup_num_steps"]
    total = counts.get("total_num_steps")
    none_left = total is not None and total.isdigit() and warmup.isdigit() and int(total) <= int(warmup)
    left = "1" if none_left else f"{total} - {warmup}"  # DeepSpeed divides by at least 1 too
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
        raise ValueError(f"jzero.deepspeed: {where}: {name} rises to the optimizer's lr, and there is none.")
    rise = f"optax.linear_schedule({low!r}, {high!r}, {warmup})"
    if args.value("warmup_type", "log", "a string") != "linear":
        start, by = (f"{low!r} + ", high - low) if low else ("", high)
        rise = f"lambda step: {start}{by!r} * jnp.log1p(step) / jnp.log({warmup})"
    args.only("last_batch_iteration", -1, "a restored checkpoint has the optimizer's count")
    args.lines.code.append(f"schedule = optax.join_schedules([{rise}, {tail}], [{warmup}])")
    return args.rest()


def _ended(hint: str) -> str:
    """What stands behind a text without a full stop."""
    return f".{hint}" if hint else ""


def _is(kind: str, value: Any) -> bool:
    if kind == "true or false":
        return isinstance(value, bool)
    if kind == "a string":
        return isinstance(value, str)
    if kind == "a list of two numbers":
        return isinstance(value, (list, tuple)) and len(value) == 2 and all(map(is_number, value))
    return is_number(value) and (kind != "a whole number" or float(value).is_integer())
