"""`Draft`: a `FromDeepSpeed` in the making. It does what the table says of each key, and says what became of it.

[Note: units]
DeepSpeed counts buckets and thresholds in elements, jzero in bytes. A param has 2 bytes under fp16 and bf16 (and
`data_types.param_dtype`), else 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jzero.config import Offload, ZeroConfig
from jzero.core.errors import counted, nearest
from jzero.deepspeed.keys import FATES, MAPPED, NOT_NEEDED, NOT_SUPPORTED, TABLE, keys_of, nearest_key
from jzero.deepspeed.result import FromDeepSpeed, Row, call, literal
from jzero.deepspeed.source import AUTO, checked, is_number, leaves


class Draft:
    """A FromDeepSpeed in the making.

    Args:
      config: what the file holds.
      auto: values by dotted key, in place of "auto".
      world: devices that share the batch, or None if the caller does not say.

    Attributes:
      values: by dotted key, in the order of the config.
      keys: all that a config can have, with the arguments of the optimizer and the schedule.
      made: what is set: fields with their group (`config.stage`), and the facts that sentences and lines of the table
        name.

    Raises:
      TypeError: a value is of the wrong kind.
      ValueError: there are unknown keys, a value that is not allowed, one key under two names, or values that conflict.
    """

    def __init__(self, config: Mapping[str, Any], auto: Mapping[str, Any], world: int | None):
        values: dict[str, Any] = {}
        for given, name, value in leaves(config):
            if name in values:
                raise ValueError(f"{given} and {name} are one key. Keep {name}.")
            values[name] = value
        for name in auto:
            if name not in values:
                raise ValueError(f"auto={{{name!r}: ...}}, and there is no such key.{nearest(name, values)}")
            if values[name] != AUTO:
                raise ValueError(f'auto={{{name!r}: ...}}, and the file says {values[name]!r} there, not "auto".')
        values |= auto
        self.keys = keys_of(values)
        unknown = [f"  {name}{nearest_key(name, self.keys)}\n" for name in values if name not in self.keys]
        if unknown:
            raise ValueError(
                f"the config has {counted(len(unknown), 'unknown key')}:\n{''.join(unknown)}A key that is not "
                "understood could be one that matters. Correct it, or take it out."
            )
        self.values = {name: checked(self.keys[name], value) for name, value in values.items()}
        self.made: dict[str, Any] = dict(TABLE["script"]["facts"])
        self.notes: list[str] = []
        self.world = world

    def get(self, name: str) -> Any:
        """The value of a key in jzero's terms; its default, or None, if the file has none."""
        key = self.keys[name]
        value: Any = self.values.get(name)
        value = TABLE["trainer"].get(name) if value == AUTO else value
        value = key.columns.get("default") if value is None else value
        if isinstance(value, str) and key["translate"]:
            return TABLE["translate"][key["translate"]][value.lower()]
        return float(value) if is_number(value) and key.kind == "number" else value

    def idle(self, name: str) -> tuple[str, str] | None:
        """What becomes of a key that has no effect, and why; None if it has one."""
        key = self.keys[name]
        if key.is_off(self.get(name)):
            return NOT_NEEDED, key["when_off"]
        for other, values, fate, text in map(TABLE["conditions"].get, key["needs"]):
            if self.get(other) not in values:
                return fate, text
        return None

    def active(self, name: str) -> Any:
        """The value of a key that has an effect, else None."""
        return None if self.idle(name) else self.get(name)

    def part(self, group: str) -> dict[str, Any]:
        """What is set in a group, by field; the group "" has the facts."""
        return {k.rpartition(".")[2]: value for k, value in self.made.items() if k.rpartition(".")[0] == group}

    def settle(self) -> None:
        """Sets what the table says for each key that has an effect.

        Raises:
          ValueError: values conflict.
        """
        for wanted, text in TABLE["conflicts"]:
            found = [(self.active(name), value) for name, value in wanted.items()]
            if all(bool(x) is value if isinstance(value, bool) else x == value for x, value in found):
                raise ValueError(text)
        for name, key in self.keys.items():
            if key.fate != MAPPED or self.idle(name):
                continue
            value, field = self.get(name), key["field"]
            if key["note"] and not (key["only_absent"] and self.values.get(name) is not None):
                self.notes.append(key["note"])
            if value is None:
                continue
            self.made |= {k: None if v == "None" else v for k, v in key["sets"].items()}
            if field and not (field.endswith("_bytes") and self.made.get(field, value) < value):
                self.made[field] = value

    def finish(self) -> FromDeepSpeed:
        """The result: every key in exactly one list."""
        dtype = self.made.get("result.param_dtype", "float32")
        size = jnp.dtype(dtype).itemsize
        given = {k: v * size if k.endswith("_bytes") else v for k, v in self.part("config").items()}
        offload, remat = self.part("offload"), self.part("remat")
        config = ZeroConfig(**given, offload=Offload(**offload) if offload else None)
        facts = self.part("") | vars(config) | self.part("result") | {
            "size": size, "dtype": dtype, "remat": remat,
            "config": call("ZeroConfig", given | ({"offload": offload} if offload else {})),
            "keywords": "".join(f", {k}={literal(v)}" for k, v in remat.items()),
        }  # fmt: skip
        lists: dict[str, list[Row]] = {fate: [] for fate in FATES}
        for name, value in self.values.items():
            fate, text = self._said(name, value)
            lists[fate].append(Row(name, value, text.format(value=self.get(name), **facts)))
        lines = "\n".join(line.format(**facts) for fact, line in TABLE["script"]["lines"] if facts.get(fact))
        notes = tuple(note.format(**facts) for note in self.notes)
        return FromDeepSpeed(
            config=config, world=self.world, remat=remat, code=tuple(lines.split("\n")), notes=notes,
            mapped=tuple(lists[MAPPED]), not_needed=tuple(lists[NOT_NEEDED]),
            not_supported=tuple(lists[NOT_SUPPORTED]), **self.part("result"),
        )  # fmt: skip

    def _said(self, name: str, value: Any) -> tuple[str, str]:
        """What became of a key: its fate, and the sentence."""
        key, taken = self.keys[name], self.get(name)
        if value is None:
            return NOT_NEEDED, "null: as if it were not there"
        if value == AUTO:
            return MAPPED if key.fate == MAPPED else NOT_NEEDED, f'"auto": {key["auto"]}'
        if key.fate != NOT_NEEDED and (idle := self.idle(name)):
            return idle
        if key["field"].endswith("_bytes") and self.made[key["field"]] != taken:
            return NOT_NEEDED, "{value} elements: one bucket size for both, the smaller of the two"
        return key.fate, next((text for case, text in key["cases"] if case == taken), key["says"] or key.text)
