"""How jzero words its errors: where, what with a count, every leaf with its arithmetic, the rule, the remedy."""

from __future__ import annotations

import contextlib
import difflib
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jzero.core.types import PyTree, Shaped

MOST_LEAVES = 8
LIBRARIES = ("jzero", "jax", "flax", "optax", "contextlib", "functools")
LARGEST = float(np.finfo(np.float32).max)

SHORT_DTYPES = {
    "bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64", "bool": "bool",
    "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64",
    "uint8": "u8", "uint16": "u16", "uint32": "u32", "uint64": "u64",
}  # fmt: skip


def warn(text: str) -> None:
    """Warns at the innermost line on the stack that is in none of `LIBRARIES`: the user's."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in LIBRARIES:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


def short_dtype(dtype) -> str:
    """The HLO-like name of a dtype: `bf16`, `f32`, `key<fry>`."""
    name = dtype.name if hasattr(dtype, "name") else str(np.dtype(dtype))
    return SHORT_DTYPES.get(name, name)


def typed_shape(leaf: Shaped) -> str:
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
    rows = list(rows)
    lines = [f"  {line}" for line in _aligned(rows[:most])]
    if len(rows) > most:
        lines.append(f"  ... and {len(rows) - most} more")
    return "\n".join(lines)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """An aligned plain-text table with a header line."""
    lines = _aligned([header, *(list(map(str, row)) for row in rows)])
    return "\n".join([lines[0], "-" * len(max(lines, key=len)), *lines[1:]])


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """One line per row, every column as wide as its longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def shown(value: Any) -> str:
    """A value in a message: its `repr`, an array by its type, at most 80 characters on one line."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{type(value).__name__} of shape {value.shape}"
    try:
        text = " ".join(repr(value).split())
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 80 else text[:77] + "..."


def _refuse(kind: type[Exception], value, name: str, rule: str, where: str, remedy: str) -> NoReturn:
    got = f", not {type(value).__name__}" if kind is TypeError else ""
    raise kind(f"{where}({name}={shown(value)}): {name} must be {rule}{got}. {remedy}".rstrip())


def check_int(value, name: str, *, where: str, low: int, high: int | None = None, remedy: str = "") -> None:
    """Raises TypeError unless the value is an integer (bools are rejected), ValueError if it is out of range."""
    span = f"an integer from {low} to {high}" if high is not None else f"an integer of at least {low}"
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        _refuse(TypeError, value, name, span, where, remedy)
    if value < low or (high is not None and value > high):
        _refuse(ValueError, value, name, span, where, remedy)


def check_ints(value, name: str, *, where: str, low: int | None = None, remedy: str = "") -> tuple[int, ...]:
    """An integer, or a tuple or list of them, as a tuple. Raises as `check_int`."""
    found = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    least = "" if low is None else f" of at least {low}"
    if any(isinstance(v, bool) or not isinstance(v, (int, np.integer)) for v in found):
        _refuse(TypeError, value, name, f"an int{least}, or a tuple of them", where, remedy)
    if low is not None and any(v < low for v in found):
        _refuse(ValueError, value, name, f"an int{least}, or a tuple of them", where, remedy)
    return found


def check_names(value, name: str, *, where: str) -> tuple[str, ...]:
    """Names as a tuple.

    Raises:
      TypeError: the value is not a sequence of strings, or is a single string.
    """
    if isinstance(value, str) or not all(isinstance(x, str) for x in (value if isinstance(value, Sequence) else [0])):
        raise TypeError(f"{where}: {name} must be a sequence of names, such as ('a_name',), got {value!r}.")
    return tuple(value)


def check_number(value, name: str, rule: str, good: Callable[[Any], bool], *, where: str) -> None:
    """Raises TypeError unless the value is a real number, ValueError if it exceeds float32 or is not `good`."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        _refuse(TypeError, value, name, rule, where, "")
    if not (abs(value) <= LARGEST and good(value)):
        _refuse(ValueError, value, name, rule, where, "")


def check_flag(value, name: str, *, where: str, remedy: str = "") -> None:
    """Raises TypeError unless the value is True or False."""
    check_kind(value, name, bool, "True or False", where=where, remedy=remedy)


def check_choice(value, name: str, choices: Sequence[str], *, where: str, optional: bool = False) -> None:
    """Raises TypeError unless the value is a string, ValueError unless it is among the choices."""
    if value is None and optional:
        return
    rule = f"one of {', '.join(map(repr, choices))}{' or None' if optional else ''}"
    if not isinstance(value, str):
        _refuse(TypeError, value, name, rule, where, "")
    if value not in choices:
        _refuse(ValueError, value, name, rule, where, nearest(value, choices).strip())


def check_kind(
    value, name: str, kinds: Any, rule: str, *, where: str, optional: bool = False, remedy: str = ""
) -> None:
    """Raises TypeError unless the value is an instance of one of the classes; `rule` says in words what it must be."""
    if not (isinstance(value, kinds) or (optional and value is None)):
        _refuse(TypeError, value, name, rule + (" or None" if optional else ""), where, remedy)


def check_dtype(
    value, name: str, *, where: str, rule: str = "a dtype", example: str = "jnp.bfloat16", floating: bool = True
) -> np.dtype:
    """The dtype that a value names; `example`: one that the argument may have.

    Raises:
      TypeError: it does not name a dtype. Arrays and None do not.
      ValueError: it is not a floating dtype, and `floating` asks for one.
    """
    names = isinstance(value, (str, type, np.dtype)) or (
        hasattr(value, "dtype") and not hasattr(value, "shape")
    )
    dtype = None
    with contextlib.suppress(TypeError, ValueError, SyntaxError):
        dtype = jnp.dtype(value) if names else None
    if dtype is None or dtype.kind == "O":
        raise TypeError(f"{where}({name}={shown(value)}): {name} must be {rule}, such as {example}.")
    if floating and not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"{where}({name}={shown(value)}): {name} must be a floating dtype.")
    return dtype


def check_function(value, name: str, *, where: str, optional: bool = False, remedy: str = "") -> None:
    """Raises TypeError unless the value can be called."""
    check_kind(value, name, Callable, "a function", where=where, optional=optional, remedy=remedy)


def check_transformation(tx: Any, *, where: str) -> None:
    """Raises TypeError unless `tx` is an optax transformation."""
    if isinstance(tx, type) or not (
        callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))
    ):
        raise TypeError(f"{where}: tx must be an optax transformation, not {type(tx).__name__}.")


def check_arrays(
    tree: PyTree, name: str, *, where: str, good: Callable[[Any], bool] | None = None, remedy: str = ""
) -> None:
    """Raises TypeError and lists the leaves that are not `good` (by default: arrays or `jax.ShapeDtypeStruct`)."""
    flat = jax.tree_util.tree_leaves_with_path(tree)
    odd = [(jax.tree_util.keystr(k) or name, shown(x)) for k, x in flat if not (good or is_array)(x)]
    if odd:
        count = f"{len(odd)} of {counted(len(flat), 'leaf', 'leaves')} of {name}"
        raise TypeError(f"{where}: {count} are not arrays:\n{listing(odd)}\n{remedy}".rstrip())


def is_array(x: object) -> bool:
    """True if `x` has a shape and a dtype of its own: an array, traced or not, or a `jax.ShapeDtypeStruct`."""
    return hasattr(x, "shape") and hasattr(x, "dtype") and not isinstance(x, type)


def is_numeric(x: object) -> bool:
    """True for an array with values and a dtype of JAX, and for a number that fits into one."""
    if isinstance(x, (np.ndarray, np.generic)):
        return x.dtype.kind not in "OSUMm"
    if isinstance(x, int):
        return abs(x) < 2**63
    return isinstance(x, (jax.Array, float, complex)) or hasattr(x, "__jax_array__")


def is_argument(x: object) -> bool:
    """True if a jitted function takes `x`: an array, abstract or real, or a number."""
    return is_numeric(x) or (is_array(x) and not isinstance(x, (np.ndarray, np.generic)))


def division(size: int, parts: int) -> str:
    """`30 = 3 x 8 + 6`: why a dim cannot be split."""
    return f"{size} = {size // parts} x {parts} + {size % parts}"


class ProofError(ValueError):
    """jzero cannot read parts of a compiled program, so what it would say might be wrong."""


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.5) -> str:
    """` Did you mean 'data'?` if a known name is close, whatever its case; else an empty string.

    `cutoff`: how close, from 0 to 1, as for `difflib.get_close_matches`.
    """
    names = {str(k).lower(): str(k) for k in known}
    close = difflib.get_close_matches(str(name).lower(), names, n=1, cutoff=cutoff)
    return f" Did you mean {names[close[0]]!r}?" if close else ""


def counted(n: int, noun: str, nouns: str = "") -> str:
    """`1 leaf`, `2 leaves`; `nouns`: the plural, unless it only adds an s."""
    return f"{n} {noun if n == 1 else nouns or noun + 's'}"
