"""The table `keys.toml`: every key of a DeepSpeed config and what becomes of it. The docs' table is printed from it."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from jzero.core.errors import nearest

MAPPED, NOT_NEEDED, NOT_SUPPORTED = FATES = ("mapped", "not needed", "not supported")
TABLE = tomllib.loads(resources.files("jzero.deepspeed").joinpath("keys.toml").read_text(encoding="utf-8"))
SOURCE: str = TABLE["source"]


@dataclasses.dataclass(frozen=True)
class Key:
    """One key: a row of `keys.toml`. `key["low"]` is one of its further columns, which are described there.

    Args:
      name: with its sections, `zero_optimization.stage`.
      kind: of its value: bool, int (also 5e8, as JSON writes it), number, str, dict, list, betas or any.
      fate: "mapped", "not needed" or "not supported".
      text: where it goes, why it is not needed, or what to do in its place.
      columns: the further columns that are not the default.
    """

    name: str
    kind: str
    fate: str
    text: str
    columns: Mapping[str, Any]

    def __getitem__(self, column: str) -> Any:
        return self.columns.get(column, TABLE["columns"][column])

    def is_off(self, value: Any) -> bool:
        """True for a value that asks for nothing."""
        if isinstance(value, Mapping):
            return not value or self.is_off(value.get(self["switch"], self["unset"]))
        return any(value == off and isinstance(value, bool) == isinstance(off, bool) for off in self["off"])


def _key(name: str, row: Sequence[Any]) -> Key:
    kind, fate, text, *columns = row
    return Key(name, kind, fate, text, {column: v for part in columns for column, v in part.items()})


KEYS = {of + last: _key(of + last, row) for of, rows in TABLE["keys"].items() for last, row in rows.items()}
SECTIONS = {section.rstrip(".") for section in TABLE["keys"] if section}
PARAMS = {f"{section}.params" for section in TABLE["arguments"]}
TYPES: dict[str, dict[str, str]] = TABLE["types"]

# Another name of the same key: aliases of DeepSpeed's fields, and names it has given up.
ALIASES: dict[str, str] = TABLE["aliases"]


def keys_of(values: Mapping[str, Any]) -> dict[str, Key]:
    """`KEYS`, and the arguments of the optimizer and the schedule that the file names."""
    keys = dict(KEYS)
    for section, rows in TABLE["arguments"].items():
        key, prefix = KEYS[f"{section}.type"], f"{section}.params."
        name = values.get(key.name)
        if kind := TYPES[section].get(str(name).lower()):
            keys |= {prefix + row[1]: _key(prefix + row[1], row[2:]) for row in rows if kind in row[0].split()}
            continue
        hint = nearest(str(name), TYPES[section].values())
        why = TABLE["others"][section].get(str(name).lower(), key["other"] + (f".{hint}" if hint else ""))
        fate, text = (NOT_SUPPORTED, why) if name is not None else (NOT_NEEDED, key["when_off"])
        keys |= {n: Key(n, "any", fate, text, {"off": []}) for n in values if n.startswith(prefix)}
        keys[key.name] = dataclasses.replace(key, fate=fate, columns={**key.columns, "says": text})
    return keys


def nearest_key(name: str, keys: Mapping[str, Key]) -> str:
    """` Did you mean ...?`: the same name in another section, or the name that is most alike."""
    section, _, tail = name.rpartition(".")
    if section in PARAMS:
        return nearest(tail, [k.rpartition(".")[2] for k in keys if k.startswith(f"{section}.")])
    known = [*SECTIONS, *ALIASES, *KEYS]
    return nearest({k.rpartition(".")[2]: k for k in reversed(known)}.get(tail, name), known)
