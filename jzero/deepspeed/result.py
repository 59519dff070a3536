"""What was found in a DeepSpeed config: `FromDeepSpeed`, and how it is printed."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Mapping
from typing import Any

from jzero.config import ZeroConfig
from jzero.deepspeed.keys import TABLE
from jzero.gradients.loss_scale import LossScale


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
      world: devices that share the batch, or None if neither the file nor the caller needed it.
      mesh_axes: mesh axes and their sizes, `{"replica": 8, "data": 8}`, for hpZ and MiCS; with `"model": 1`,
        whose size you choose, if activations are split over it; None: one axis over all.
      train_batch_size: examples in a step over all devices and micro-batches, or None where the file leaves it open.
      micro_batch_size: of them in one micro-batch on one device, or None.
      accumulate: micro-batches in a step, for `jzero.value_and_grad(accumulate=)`.
      loss_scale: for fp16: a `jzero.LossScale`, or the number of a static scale; else None.
      clip: largest global norm of the gradients, or None.
      param_dtype: "float16" or "bfloat16", to which the params are cast before `jzero.shard`; None: as they are.
      remat: keywords of `jzero.remat`, besides the subject and the plan; empty where the file asks for none.
      code: the lines of a train script that do what is not in `config`, in their order. They use `params`, `batch`,
        `loss_fn`, `Block`, `shapes` and `model` of yours; `...` stands for what you fill in.
      mapped: keys that became a part of the above.
      not_needed: keys without a counterpart, each with the reason; also those that switch something off.
      not_supported: keys for features that jzero lacks, each with what to do instead.
      notes: defaults that differ from DeepSpeed's.
    """

    config: ZeroConfig
    world: int | None = None
    mesh_axes: dict[str, int] | None = None
    train_batch_size: int | None = None
    micro_batch_size: int | None = None
    accumulate: int = 1
    loss_scale: LossScale | float | None = None
    clip: float | None = None
    param_dtype: str | None = None
    remat: dict[str, str] = dataclasses.field(default_factory=dict)
    code: tuple[str, ...] = ()
    mapped: tuple[Row, ...] = ()
    not_needed: tuple[Row, ...] = ()
    not_supported: tuple[Row, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lists = {"mapped": self.mapped, "not supported": self.not_supported, "not needed": self.not_needed}
        parts = [f"{fate} ({len(rows)})\n{_listing(rows)}" for fate, rows in lists.items() if rows]
        if self.notes:
            notes = (textwrap.fill(f"- {x}", 118, initial_indent="  ", subsequent_indent="    ") for x in self.notes)
            parts.append("\n".join(["notes", *notes]))
        lines = "\n".join([*TABLE["script"]["imports"], "", *self.code])
        return "\n\n".join([*parts, "write\n" + textwrap.indent(lines, "  ")])


def call(name: str, keywords: Mapping[str, Any]) -> str:
    """The call of `jzero.name` as code."""
    return f"jzero.{name}({', '.join(f'{keyword}={literal(value)}' for keyword, value in keywords.items())})"


def literal(value: Any) -> str:
    """A value as code; a dict has the keywords of a `jzero.Offload`."""
    if isinstance(value, dict):
        return call("Offload", value)
    if isinstance(value, list):
        return f"({', '.join(map(literal, value))})"
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _shown(value: Any) -> str:
    """A value as the file has it, on one short line."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 28 else text[:25] + "..."


def _listing(rows: tuple[Row, ...]) -> str:
    """Rows as lines: a key stands below its section, which is named once."""
    named = [(*row.key.rpartition("."), row) for row in rows]
    first = max(len(name) + 2 * bool(section) for section, _, name, _ in named)
    second = max(len(_shown(row.value)) for row in rows)
    order, lines, last = ["", *(section for section, *_ in named)], [], ""
    for section, _, name, row in sorted(named, key=lambda x: order.index(x[0])):
        lines += [f"  {section}"] if section != last else []
        last = section
        head = f"  {('  ' * bool(section) + name).ljust(first)}  {_shown(row.value).ljust(second)}  "
        lines.append(textwrap.fill(row.text, 118, initial_indent=head, subsequent_indent=" " * len(head)))
    return "\n".join(lines)
