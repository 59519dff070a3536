"""How jzero words its errors: where, what with a count, every leaf with its arithmetic, the rule, the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

import numpy as np

MOST_LEAVES = 8

SHORT_DTYPES = {
    "bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64", "bool": "bool",
    "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64",
    "uint8": "u8", "uint16": "u16", "uint32": "u32", "uint64": "u64",
}  # fmt: skip


def short_dtype(dtype) -> str:
    """The HLO-like name of a dtype: `bf16`, `f32`, `key<fry>`."""
    name = dtype.name if hasattr(dtype, "name") else str(np.dtype(dtype))
    return SHORT_DTYPES.get(name, name)


def typed_shape(leaf) -> str:
    """`bf16[50257,768]` for anything with a shape and a dtype."""
    return f"{short_dtype(leaf.dtype)}[{','.join(map(str, leaf.shape))}]"


def human_bytes(count: float) -> str:
    """Bytes in decimal units, as GPU vendors and the ZeRO paper count them (1 GB = 1e9 bytes)."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


def listing(rows: Iterable[Sequence[str]], *, most: int = MOST_LEAVES) -> str:
    """Rows as an indented table, capped at `most` with a count of what was left out."""
    rows = [tuple(row) for row in rows]
    shown = rows[:most]
    widths = [max(len(row[i]) for row in shown) for i in range(len(shown[0]))] if shown else []
    lines = [
        "  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in shown
    ]
    if len(rows) > most:
        lines.append(f"  ... and {len(rows) - most} more")
    return "\n".join(lines)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """An aligned plain-text table with a header line."""
    body = [tuple(map(str, row)) for row in rows]
    widths = [max(len(r[i]) for r in [tuple(header), *body]) for i in range(len(header))]
    lines = [
        "  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in [tuple(header), *body]
    ]
    return "\n".join([lines[0], "-" * len(max(lines, key=len)), *lines[1:]])


def check_int(value, name: str, *, where: str, low: int, high: int | None = None, remedy: str = "") -> None:
    """Raises TypeError for what is no integer (a bool is none), ValueError for one out of its range."""
    span = f"an integer from {low} to {high}" if high is not None else f"an integer of at least {low}"
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(
            f"{where}({name}={value!r}): {name} must be {span}, not {type(value).__name__}. {remedy}".rstrip()
        )
    if value < low or (high is not None and value > high):
        raise ValueError(f"{where}({name}={value!r}): {name} must be {span}. {remedy}".rstrip())


def division(size: int, parts: int) -> str:
    """`30 = 3 x 8 + 6`: why a dim cannot be split."""
    return f"{size} = {size // parts} x {parts} + {size % parts}"


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.5) -> str:
    """` Did you mean 'data'?` when a known name is close, whatever its case, else an empty string.

    `cutoff`: how close, from 0 to 1, as for `difflib.get_close_matches`.
    """
    names = {str(k).lower(): str(k) for k in known}
    close = difflib.get_close_matches(str(name).lower(), names, n=1, cutoff=cutoff)
    return f" Did you mean {names[close[0]]!r}?" if close else ""


def counted(n: int, noun: str, nouns: str = "") -> str:
    """`1 leaf`, `2 leaves`: the plural is that with an s, unless it is given."""
    return f"{n} {noun if n == 1 else nouns or noun + 's'}"
