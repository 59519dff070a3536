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
    """The units; raises TypeError for what is none, ValueError for two of one name."""
    for unit in units:
        check_kind(unit, "units", FileUnit, "a sequence of jzero.update.on_host.disk.FileUnit", where=where)
    names = [u.name for u in units]
    twice = sorted({n for n in names if names.count(n) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise ValueError(
            f"{where}: {counted(len(twice), 'name')} of units twice:\n{listing([(n,) for n in twice])}"
        )
    return tuple(units)


def numbers(buffer_bytes: int, requests: int, *, where: str) -> None:
    """Raises as `check_int` where these are no positive integers."""
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
    if units is not None:
        given = units_of(units, where=where)
        if len(given) != len(record.units):
            raise ValueError(
                f"{where}: {folder} has {len(record.units)} units, and {len(given)} were passed."
            )
        other = [(i, a, b) for i, (a, b) in enumerate(zip(record.units, given, strict=True)) if a != b]
        if other:
            rows = [(f"unit {i}", f"stored {a.described}", f"passed {b.described}") for i, a, b in other]
            raise ValueError(
                f"{where}: {len(other)} of {len(given)} units of {folder} differ:\n{listing(rows)}"
            )
    if identity is not None:
        wanted = records.plain(identity, where=where)
        if wanted != record.identity:
            here = record.identity
            keys = sorted(
                k for k in {*wanted, *here} if (k in wanted, wanted.get(k)) != (k in here, here.get(k))
            )
            rows = [(k, f"stored {_of(here, k)}", f"passed {_of(wanted, k)}") for k in keys]
            raise ValueError(f"{where}: the identity of {folder} differs:\n{listing(rows)}")


def _of(identity: dict[str, Any], key: str) -> str:
    return shown(identity[key]) if key in identity else "nothing"


def nothing_there(folder: Path, *, where: str) -> None:
    """Raises ValueError where a folder holds a store; says which."""
    found = records.load(folder)
    if found is not None:
        raise ValueError(
            f"{where}: {folder} holds a store of generation {found.generation} with "
            f"{counted(len(found.units), 'unit')} and identity {found.identity}, and nothing is overwritten. "
            "Open it with DiskStore.open, pass another folder, or remove it."
        )
