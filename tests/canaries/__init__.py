"""The checks of tests/canary.py, by subject.

A check is a function under `@check(files)`. Its docstring is the assumption; `files` are the files of jzero that rely
on it. It returns an empty text, or what it found instead. It imports jax and jzero itself, so an import that fails
fails one check. A program that several checks read is compiled once (`once`).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

SKIPPED = "not looked at"

CHECKS: dict[str, Check] = {}


class NotLookedAt(Exception):
    """The check cannot be made here; the text says why."""


@dataclasses.dataclass(frozen=True)
class Check:
    """One assumption.

    Attributes:
      files: of jzero that rely on it.
      look: returns an empty text, or what is there instead.
      gpu: it compiles for GPUs.
    """

    files: str
    look: Callable[[], str | None]
    gpu: bool

    @property
    def name(self) -> str:
        return self.look.__name__

    @property
    def assumes(self) -> str:
        return " ".join((self.look.__doc__ or "").split())

    def result(self) -> str:
        """`ok`, `not looked at: why`, or what was found."""
        try:
            return self.look() or "ok"
        except NotLookedAt as why:
            return f"{SKIPPED}: {why}"
        except Exception as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            lines = str(error).strip().splitlines() or [""]
            return f"{type(error).__name__}: {lines[0][:200]} ({Path(at.filename).name}:{at.lineno})"


def check(files: str, *, gpu: bool = False):
    def register(look):
        CHECKS[look.__name__] = Check(files, look, gpu)
        return look

    return register


def once(make):
    """Called once; an error is kept, too."""

    @functools.cache
    def outcome():
        try:
            return make(), None
        except Exception as error:
            return None, error

    @functools.wraps(make)
    def call():
        value, error = outcome()
        if error is not None:
            raise error
        return value

    return call


def differences(rows: Iterable[tuple[str, Any, Any]]) -> str:
    """What is not as expected, of (what, found, expected)."""
    return "; ".join(f"{what}: {found!r}, not {wanted!r}" for what, found, wanted in rows if found != wanted)


def lacking(what: str, names: Iterable[str], held: Iterable[str]) -> str:
    """The names that are not among those held."""
    missing = sorted(set(names) - set(held))
    return f"{what} without {', '.join(missing)}" if missing else ""


def constant(module: str, name: str, otherwise: Any) -> Any:
    """A constant of jzero; `otherwise` where jzero cannot be imported, so that jax can be looked at all the same."""
    try:
        found = importlib.import_module(f"jzero.{module}")
    except Exception:
        return otherwise
    return getattr(found, name)
