"""Reads a DeepSpeed config: JSON or a dict becomes values by dotted key, every one known and of the right kind."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jzero.core.errors import counted, human_bytes, nearest
from jzero.deepspeed.keys import ALIASES, KEYS, NEVER_AUTO, SECTIONS, Key, key_of

AUTO = "auto"
LARGEST = 2**20  # bytes of a file
DEEPEST = 32  # objects and lists in one another
_NAME = re.compile(r"[A-Za-z_][\w.-]{0,63}", re.ASCII)  # of an optimizer or a schedule


def load(source: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """What the file, or the dict, holds, and how to call it in messages.

    Raises:
      TypeError: neither a path nor a dict, or no object in the file.
      FileNotFoundError: no such file.
      ValueError: no JSON, a key that is there twice, or more than a config can hold (1 MiB, 32 levels).
    """
    if isinstance(source, Mapping):
        _check_depth("the dict", source)
        return "the dict", dict(source)
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(
            f"jzero.deepspeed: pass the path of a ds_config.json or a dict, not {type(source).__name__}."
        )
    path = Path(source)
    if not path.is_file():
        raise FileNotFoundError(
            f"jzero.deepspeed: there is no file {str(path)!r} (from {str(Path.cwd())!r})."
        )
    if path.stat().st_size > LARGEST:
        raise ValueError(
            f"jzero.deepspeed: {path.name} has {human_bytes(path.stat().st_size)}, and a config at most "
            f"{human_bytes(LARGEST)}. Is it the right file?"
        )
    try:
        found = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"jzero.deepspeed: {path.name}, line {error.lineno}, column {error.colno}: {error.msg}. It must be JSON: "
            "no comments, no comma behind the last entry (DeepSpeed reads Hjson, which has both)."
        ) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"jzero.deepspeed: {path.name} is not UTF-8 text: {error.reason}.") from None
    except ValueError as error:
        raise ValueError(f"jzero.deepspeed: {path.name}: {error}") from None
    except RecursionError:
        raise _too_deep(path.name) from None
    if not isinstance(found, dict):
        raise TypeError(
            f"jzero.deepspeed: {path.name} holds a {type(found).__name__}; a config is an object, {{...}}."
        )
    _check_depth(path.name, found)
    return path.name, found


def _check_depth(where: str, found: Any) -> None:
    """Raises ValueError for values that are nested deeper than any config."""
    level: list[Any] = [found]
    for _ in range(DEEPEST):
        inner = [
            v.values() if isinstance(v, Mapping) else v
            for v in level
            if isinstance(v, (Mapping, list, tuple))
        ]
        level = [v for values in inner for v in values]
        if not level:
            return
    raise _too_deep(where)


def _too_deep(where: str) -> ValueError:
    return ValueError(f"jzero.deepspeed: {where} is nested deeper than {DEEPEST} levels: that is not a config.")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [k for k, _ in pairs]
    twice = sorted({k for k in names if names.count(k) > 1})
    if twice:
        raise ValueError(f"{', '.join(map(repr, twice))} is there twice in one object. Keep one.")
    return dict(pairs)


def values_of(where: str, config: Mapping[str, Any], auto: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted key, checked, in the order of the config; "auto" where `auto` has no value for it.

    Args:
      where: the file's name, for messages.
      config: what it holds.
      auto: values by dotted key, in the place of "auto".

    Raises:
      TypeError: a value of the wrong kind.
      ValueError: unknown keys, a number out of range, one key under two names, an "auto" that cannot be.
    """
    flat: dict[str, Any] = {}
    unknown: list[str] = []
    _walk(where, config, "", flat, unknown)
    if unknown:
        raise unknown_keys(where, {name: nearest_key(name) for name in unknown})
    for name in auto:
        if name not in flat:
            raise ValueError(
                f"jzero.deepspeed: auto={{{name!r}: ...}}: {where} has no such key.{nearest(name, flat)}"
            )
        if flat[name] != AUTO:
            raise ValueError(
                f'jzero.deepspeed: auto={{{name!r}: ...}}: {where} says {flat[name]!r} there, not "auto".'
            )
    flat = {**flat, **auto}
    refused = [n for n in NEVER_AUTO if flat.get(n) == AUTO]
    if refused:
        raise ValueError(
            f'jzero.deepspeed: {where}: {", ".join(refused)} is "auto". Nothing fills it in here, and DeepSpeed itself '
            f"would take its default: pass auto={{{refused[0]!r}: ...}}."
        )
    return {name: _checked(where, key_of(name), value) for name, value in flat.items()}


def unknown_keys(where: str, hints: Mapping[str, str]) -> ValueError:
    """The error for keys that DeepSpeed does not know, each with what is said behind it."""
    lines = "\n".join(f"  {name}{hint}" for name, hint in hints.items())
    return ValueError(
        f"jzero.deepspeed: {where} has {counted(len(hints), 'unknown key')}:\n{lines}\n"
        "A key that is not understood could be one that matters. Correct it, or take it out."
    )


def nearest_key(name: str) -> str:
    """` Did you mean ...?`: the same name in another section, or the name that is most alike."""
    known = [*SECTIONS, *ALIASES, *KEYS]
    tails = {k.rsplit(".", 1)[-1]: k for k in reversed(known)}
    tail = name.rsplit(".", 1)[-1]
    return nearest(tails[tail], known) if tail in tails else nearest(name, known)


def _walk(
    where: str, section: Mapping[str, Any], prefix: str, flat: dict[str, Any], unknown: list[str]
) -> None:
    for given, value in section.items():
        if not isinstance(given, str):
            raise TypeError(
                f"jzero.deepspeed: {where}: the key {given!r} in {prefix or 'the config'} is not a string."
            )
        _check_key(where, given)
        name = ALIASES.get(prefix + given, prefix + given)
        if name == "zero_optimization" and isinstance(value, bool):
            value = {"stage": int(value)}  # the form of DeepSpeed before 0.3
        if name in SECTIONS:
            if value is None:
                continue
            if not isinstance(value, Mapping):
                raise TypeError(
                    f"jzero.deepspeed: {where}: {name} is {value!r}; it must be an object, "
                    f'{{"{_first(name)}": ...}}.'
                )
            _walk(where, value, name + ".", flat, unknown)
        elif name in ("optimizer.params", "scheduler.params") and isinstance(value, Mapping):
            for k in value:
                _check_key(where, k)
            flat.update({f"{name}.{k}": v for k, v in value.items()})
        elif name not in KEYS:
            unknown.append(prefix + given)
        elif name in flat:
            raise ValueError(
                f"jzero.deepspeed: {where}: {prefix + given} and {name} are one key. Keep {name}."
            )
        else:
            flat[name] = value


def _check_key(where: str, key: Any) -> None:
    """Raises ValueError for a key that would print as several lines, or as something else than it is."""
    if isinstance(key, str) and not key.isprintable():
        raise ValueError(
            f"jzero.deepspeed: {where}: the key {key[:40]!r} has characters that do not print. No key has any."
        )


def _first(section: str) -> str:
    return next(k for k in KEYS if k.startswith(section + ".")).removeprefix(section + ".")


def _checked(where: str, key: Key, value: Any) -> Any:
    """The value as its kind; null and "auto" as they are."""
    if value is None or value == AUTO or key.kind == "any":
        return value
    right = {
        "bool": isinstance(value, bool),
        "int": is_number(value) and float(value).is_integer(),
        "number": is_number(value),
        "str": isinstance(value, str),
        "dict": isinstance(value, Mapping),
        "list": isinstance(value, (list, tuple)),
    }[key.kind]
    if not right:
        kinds = {
            "bool": "true or false", "int": "a whole number", "number": "a finite number", "str": "a string",
            "dict": "an object", "list": "a list",
        }  # fmt: skip
        raise TypeError(f"jzero.deepspeed: {where}: {key.name} is {value!r}; it must be {kinds[key.kind]}.")
    if key.name in ("optimizer.type", "scheduler.type") and not _NAME.fullmatch(value):
        raise ValueError(
            f"jzero.deepspeed: {where}: {key.name} is {value[:80]!r}; a name has letters, digits and _ . - alone, at "
            "most 64 of them."
        )
    if key.low is not None and value < key.low:
        raise ValueError(
            f"jzero.deepspeed: {where}: {key.name} is {value!r}; it must be at least {key.low:g}."
        )
    return int(value) if key.kind == "int" else value


def is_number(value: Any) -> bool:
    """True for a finite number; not for a bool, nor for an integer beyond what a float holds."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and abs(value) <= sys.float_info.max
