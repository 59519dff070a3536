"""Reads a DeepSpeed config: JSON or a dict becomes values by dotted key, and a value is checked against its row."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jzero.core.errors import human_bytes, nearest, shown
from jzero.deepspeed.keys import ALIASES, MAPPED, PARAMS, SECTIONS, TABLE, Key

AUTO = "auto"
LARGEST = 2**20  # bytes of a file
DEEPEST = 32  # objects and lists in one another
TOO_DEEP = f"is nested deeper than {DEEPEST} levels: that is not a config."


def load(source: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """What messages call the file or the dict, and what it holds.

    Raises:
      TypeError: it is neither a path nor a dict, or the file holds no object.
      FileNotFoundError: there is no such file.
      ValueError: it is not JSON, has a key twice, or is larger than a config can be (1 MiB, 32 levels).
    """
    if isinstance(source, Mapping):
        where, found = "the dict", source
    elif isinstance(source, (str, os.PathLike)):
        where, found = Path(source).name, _parsed(Path(source))
    else:
        raise TypeError(f"jzero.deepspeed: pass the path of a ds_config.json or a dict, not {type(source).__name__}.")
    if not isinstance(found, Mapping):
        raise TypeError(f"jzero.deepspeed: {where} holds a {type(found).__name__}; a config is an object, {{...}}.")
    level: list[Any] = [found]
    for _ in range(DEEPEST):
        inner = (v.values() if isinstance(v, Mapping) else v for v in level if isinstance(v, (Mapping, list, tuple)))
        level = [v for values in inner for v in values]
    if level:
        raise ValueError(f"jzero.deepspeed: {where} {TOO_DEEP}")
    return where, found


def _parsed(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"jzero.deepspeed: there is no file {str(path)!r} (from {str(Path.cwd())!r}).")
    size, most = human_bytes(path.stat().st_size), human_bytes(LARGEST)
    if path.stat().st_size > LARGEST:
        raise ValueError(f"jzero.deepspeed: {path.name} has {size}, and a config at most {most}. Is it the right file?")
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
    except RecursionError:
        text = f" {TOO_DEEP}"
    except json.JSONDecodeError as error:
        text = (
            f", line {error.lineno}, column {error.colno}: {error.msg}. It must be JSON: no comments, no comma behind "
            "the last entry (DeepSpeed reads Hjson, which has both)."
        )
    except ValueError as error:  # a key that is there twice, or not UTF-8
        text = f": {error}"
    raise ValueError(f"jzero.deepspeed: {path.name}{text}")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise ValueError(f"{max(names, key=names.count)!r} is there twice in one object. Keep one.")
    return dict(pairs)


def leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str, Any]]:
    """Every key as the file spells it, its dotted name, and its value.

    Raises:
      TypeError: a key is not a string, or a section is not an object.
      ValueError: a key would print as several lines, or as something other than it is.
    """
    for key, value in section.items():
        if not isinstance(key, str):
            raise TypeError(f"the key {key!r} in {prefix or 'the config'} is not a string.")
        if not key.isprintable():
            raise ValueError(f"the key {key[:40]!r} has characters that do not print. No key has any.")
        name = ALIASES.get(prefix + key, prefix + key)
        if name == "zero_optimization" and isinstance(value, bool):
            value = {"stage": int(value)}  # the form of DeepSpeed before 0.3
        if isinstance(value, Mapping) and name in SECTIONS | PARAMS:
            yield from leaves(value, f"{name}.")
        elif name not in SECTIONS:
            yield prefix + key, name, value
        elif value is not None:
            raise TypeError(f"{name} is {shown(value)}; it must be an object, {{...}}.")


def is_number(value: Any) -> bool:
    """True for a finite number; not for a bool, nor for an integer that is too large for a float."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and abs(value) <= sys.float_info.max


def _is(kind: str, value: Any) -> bool:
    several = isinstance(value, (list, tuple))
    return {
        "bool": isinstance(value, bool), "int": is_number(value) and float(value).is_integer(),
        "number": is_number(value), "str": isinstance(value, str), "dict": isinstance(value, Mapping), "list": several,
        "betas": several and len(value) == 2 and all(map(is_number, value)), "any": True,
    }[kind]  # fmt: skip


def checked(key: Key, value: Any) -> Any:
    """The value, converted to its kind; null and "auto" stay as they are.

    Raises:
      TypeError: the value is of the wrong kind.
      ValueError: the value is not allowed, or "auto" is not.
    """
    if value is None or (value == AUTO and key["auto"]):
        return value
    if value == AUTO:
        text = "Nothing fills it in here, and DeepSpeed itself would take its default"
        raise ValueError(f'{key.name} is "auto". {text}: pass auto={{{key.name!r}: ...}}.')
    if not _is(key.kind, value):
        raise TypeError(f"{key.name} is {shown(value)}; it must be {TABLE['kinds'][key.kind]}.")
    if key.fate == MAPPED and is_number(value) and value < key["low"]:
        raise ValueError(f"{key.name} is {value!r}; it must be at least {key['low']:g}.")
    if key.kind == "betas" and not all(0 <= beta < 1 for beta in value):
        raise ValueError(f"{key.name} is {value!r}; both must be at least 0 and below 1.")
    names = TABLE["translate"].get(key["translate"])
    if names and value.lower() not in names:
        raise ValueError(f"{key.name} is {shown(value)}; it must be one of {', '.join(names)}.{nearest(value, names)}")
    fits = re.fullmatch(key["pattern"], value, re.ASCII) if isinstance(value, str) else True
    if not fits or (is_number(value) and value > key["high"]):
        raise ValueError(f"{key.name} is {shown(value)}: {key['rule']}.")
    return int(value) if key.kind == "int" else value
