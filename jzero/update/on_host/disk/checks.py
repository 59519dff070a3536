"""What `DiskStore` refuses before it touches a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jzero.core.errors import check_int, check_kind, counted, listing, shown
from jzero.update.on_host.disk import record as records
from jzero.update.on_host.disk.record import Record
from jzero.update.on_host.disk.units import FileUnit


def units_of(units: Sequence[FileUnit], *, where: str) -> tuple[FileUnit, ...]:
    """The units as a tuple, checked.

    Raises:
      TypeError: one of them is not a `FileUnit`.
      ValueError: two of them have the same name.
    """
    for unit in units:
        check_kind(unit, "units", FileUnit, "a sequence of jzero.update.on_host.disk.FileUnit", where=where)
    names = [u.name for u in units]
    twice = sorted({n for n in names if names.count(n) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise ValueError(
            f"{where}: {counted(len(twice), 'unit name')} used twice:\n{listing([(n,) for n in twice])}"
        )
    return tuple(units)


def numbers(buffer_bytes: int, requests: int, *, where: str) -> None:
    """Raises as `check_int` where these are not positive integers."""
    check_int(buffer_bytes, "buffer_bytes", where=where, low=1)
    check_int(requests, "requests", where=where, low=1)


def same(
    record: Record,
    units: Sequence[FileUnit] | None,
    identity: Mapping[str, Any] | None,
    folder: Path,
    *,
    where: str,
) -> None:
    """Raises ValueError where units or identity, if given, are not those of the record; lists what differs."""
    if identity is not None:
        wanted, here = records.plain(identity, where=where), record.identity
        for key in {**wanted, **here}:  # the first that differs: what follows it may differ because of it
            rows = _differences(key, here.get(key), wanted.get(key))
            if rows:
                raise ValueError(
                    f"{where}: {folder} is of another run:\n{listing(rows)}\nOpen it with what it was made for, save "
                    "the state with jzero.checkpoint.save, and restore that here; or begin in another folder."
                )
    if units is not None:
        given = units_of(units, where=where)
        if len(given) != len(record.units):
            raise ValueError(
                f"{where}: {folder} has {len(record.units)} units, and {len(given)} were passed."
            )
        other = [(i, a, b) for i, (a, b) in enumerate(zip(record.units, given, strict=True)) if a != b]
        if other:
            rows = [(f"unit {i}", f"stored {_short(a)}", f"passed {_short(b)}") for i, a, b in other]
            raise ValueError(
                f"{where}: {len(other)} of {len(given)} units of {folder} differ:\n{listing(rows)}"
            )


def _differences(key: str, stored: Any, passed: Any) -> list[tuple[str, str, str]]:
    """Rows of a listing: a whole entry, or the items of a list that differ."""
    if isinstance(stored, list) and isinstance(passed, list) and len(stored) == len(passed):
        items = enumerate(zip(stored, passed, strict=True))
        return [(f"{key}[{i}]", f"stored {shown(a)}", f"passed {shown(b)}") for i, (a, b) in items if a != b]
    there = [f"{verb} {'nothing' if x is None else shown(x)}" for verb, x in (("stored", stored), ("passed", passed))]
    return [] if stored == passed else [(key, there[0], there[1])]


def _short(unit: FileUnit) -> str:
    text = unit.described
    return text if len(text) <= 80 else text[:77] + "..."


def nothing_there(folder: Path, *, where: str) -> None:
    """Raises ValueError where a folder holds a store; says which."""
    found = records.load(folder)
    if found is not None:
        raise ValueError(
            f"{where}: {folder} holds a store of generation {found.generation} with "
            f"{counted(len(found.units), 'unit')}, and nothing is overwritten. Go on from it with "
            "jzero.checkpoint.restore(path, like), like = jzero.abstract(create, ...) with the same Offload; pass "
            "another folder; or remove this one."
        )
