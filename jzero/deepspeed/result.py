"""What was found in a DeepSpeed config: `FromDeepSpeed`, and how it is printed."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from typing import Any

from jzero.config import Offload, ZeroConfig
from jzero.gradients.loss_scale import LossScale

IMPORTS = (
    "import jax, jax.numpy as jnp, jzero, optax",
    "from flax.training.train_state import TrainState",
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One key of the file: its name with its sections, its value there, and what became of it or why not."""

    key: str
    value: Any
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class FromDeepSpeed:
    """A DeepSpeed config in jzero's terms; `print` shows a table and the lines to write. From `jzero.deepspeed.read`.

    Attributes:
      config: the `jzero.ZeroConfig`: what `jzero.shard`, `abstract` and `make_plan` take as `config=`.
      world: devices that share the batch, or None where neither the file nor the caller needed it.
      mesh_axes: mesh axes and their sizes, `{"replica": 8, "data": 8}`, for hpZ and MiCS; with `"model": 1`, whose size
        is yours to say, where activations are split over it; None: one axis over all.
      train_batch_size: examples in a step over all devices and micro-batches, or None where the file leaves it open.
      micro_batch_size: of them in one micro-batch on one device, or None.
      accumulate: micro-batches in a step, for `jzero.value_and_grad(accumulate=)`.
      loss_scale: for fp16: a `jzero.LossScale`, or the number of a static scale; else None.
      clip: largest global norm of the gradients, or None.
      param_dtype: "float16" or "bfloat16", to which the params are cast before `jzero.shard`; None: as they are.
      remat: keywords of `jzero.remat`, besides the subject and the plan; empty where the file asks for none.
      code: the lines of a train script that do what is not in `config`, in their order. They use `params`, `batch`,
        `loss_fn`, `Block`, `shapes` and `model` of yours; `...` stands where you fill something in.
      mapped: keys that became a part of the above.
      not_needed: keys without a counterpart, each with the reason; also those that switch something off.
      not_supported: keys that ask for what is not there, each with what to do in its place.
      notes: where a default is another one than DeepSpeed's.
    """

    config: ZeroConfig
    world: int | None
    mesh_axes: dict[str, int] | None
    train_batch_size: int | None
    micro_batch_size: int | None
    accumulate: int
    loss_scale: LossScale | float | None
    clip: float | None
    param_dtype: str | None
    remat: dict[str, str]
    code: tuple[str, ...]
    mapped: tuple[Row, ...]
    not_needed: tuple[Row, ...]
    not_supported: tuple[Row, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        parts = []
        for title in ("mapped", "not_supported", "not_needed"):
            rows = getattr(self, title)
            if rows:
                parts.append(f"{title.replace('_', ' ')} ({len(rows)})\n{_listing(rows)}")
        if self.notes:
            parts.append("notes\n" + "\n".join(_wrapped(f"- {note}", "  ", "    ") for note in self.notes))
        parts.append("write\n" + textwrap.indent("\n".join([*IMPORTS, "", *self.code]), "  "))
        return "\n\n".join(parts)


def config_line(config: ZeroConfig) -> str:
    """`jzero.ZeroConfig(stage=3, ...)`, with the fields that are not the default."""
    given = [
        f"{field.name}={_literal(getattr(config, field.name))}"
        for field in dataclasses.fields(config)
        if field.name == "stage" or getattr(config, field.name) != field.default
    ]
    return f"jzero.ZeroConfig({', '.join(given)})"


def _literal(value: Any) -> str:
    if value == Offload():
        return '"host"'
    if isinstance(value, tuple):
        return f"({', '.join(map(_literal, value))})"
    if hasattr(value, "itemsize"):
        value = value.name
    return json.dumps(value) if isinstance(value, str) else repr(value)


def shown(value: Any) -> str:
    """A value as the file has it, on one short line."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 28 else text[:25] + "..."


def _listing(rows: tuple[Row, ...]) -> str:
    """Rows as lines: a key stands below its section, which is named once."""
    split = [row.key.rsplit(".", 1) for row in rows]
    names = [("  " if len(parts) > 1 else "") + parts[-1] for parts in split]
    first, second = max(map(len, names)), max(len(shown(row.value)) for row in rows)
    lines, section = [], ""
    order = {parts[0]: i for i, parts in reversed(list(enumerate(split))) if len(parts) > 1}  # of sections
    table = zip(split, names, rows, strict=True)
    for parts, name, row in sorted(table, key=lambda x: order[x[0][0]] if len(x[0]) > 1 else -1):
        if len(parts) > 1 and parts[0] != section:
            section = parts[0]
            lines.append(f"  {section}")
        head = f"  {name.ljust(first)}  {shown(row.value).ljust(second)}  "
        lines.append(_wrapped(row.text, head, " " * len(head)))
    return "\n".join(lines)


def _wrapped(text: str, first: str, rest: str) -> str:
    return textwrap.fill(
        text,
        118,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
