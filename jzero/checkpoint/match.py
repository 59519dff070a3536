"""Which stored array each leaf of a target is read from; what does not fit is listed, and nothing is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jzero.checkpoint.converting import convertible
from jzero.checkpoint.logical import COUNT, MASTER, Name, NamedLeaf
from jzero.core.errors import counted, listing, typed_shape
from jzero.core.random_keys import is_key
from jzero.layout.state_layouts import named_by

Described = tuple[tuple[int, ...], np.dtype]


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a leaf comes from: the name of a stored array, whose dtype may differ where casts are allowed."""

    leaf: NamedLeaf
    name: Name


def match(
    leaves: Sequence[NamedLeaf],
    have: Mapping[Name, Described],
    *,
    cast: bool,
    where: str,
    only: str | None = None,
) -> list[Source]:
    """A source for every leaf; with `only`, stored arrays that are not params are ignored.

    With `cast`, dtypes may differ, masters that the checkpoint lacks start as its params, and masters that the target
    lacks are left out; a param with a larger dtype than the stored one is then read from its master.

    Raises:
      ValueError: every leaf that is missing, left over, or of another shape or dtype.
    """
    wanted = {leaf.name for leaf in leaves}
    sources, rows, castable = [], [], True
    for leaf in leaves:
        name, want = _source(leaf, have, wanted), describe(leaf)
        if name is None:
            rows.append((text(leaf.name), "absent", _typed(*want), "missing"))
            castable = False
            continue
        found, why = have[name], ""
        if found[0] != want[0]:
            why = "another shape"
        elif not convertible(found[1], want[1]):
            why = "complex"
        castable = castable and not why
        number = found[0] == () and _of_python(found[1], want[1], leaf.value)
        if not (why or cast) and (name != leaf.name or (found[1] != want[1] and not number)):
            found = have.get(leaf.name, found)
            why = _why(leaf, found[1]) if leaf.name in have else "starts as the param"
        if why:
            rows.append((text(leaf.name), _typed(*found), _typed(*want), why))
        sources.append(Source(leaf, name))
    used = {source.name for source in sources} | wanted
    for name, (shape, dtype) in have.items():
        if name in used or name == (COUNT,) or (only is not None and name[0] != "params"):
            continue
        if name[0] != MASTER:
            castable = False
        elif cast:
            continue
        rows.append((text(name), _typed(shape, dtype), "absent", "not asked for"))
    if rows:
        if only is None and any(leaf.name not in have and ("params", *leaf.name) in have for leaf in leaves):
            remedy = 'The checkpoint is of a whole state. To read its model alone, pass only="params".'
        else:
            remedy = _remedy(castable, only is None and _params_fit(wanted, rows))
        raise ValueError(_message(rows, remedy, where))
    return sources


def check_trained(
    leaves: Sequence[NamedLeaf], stored: Sequence[str] | None, wanted: Sequence[str] | None, where: str
) -> None:
    """Raises ValueError for a state that lists leaves by position where other params were trained.

    Args:
      leaves: what is to be read.
      stored, wanted: the names of the trained params of checkpoint and target; None if it is all, or not known.
      where: the caller, for the error.
    """
    if stored is None or wanted is None or set(stored) == set(wanted):
        return
    params = {leaf.name[1:]: leaf for leaf in leaves if leaf.name[0] == "params"}
    by_position = [
        leaf for leaf in leaves if leaf.name[0] == "opt_state" and leaf.shape and not any(named_by(leaf.name, params))
    ]
    if by_position:
        rows = [(text(leaf.name), _typed(*describe(leaf))) for leaf in by_position]
        raise ValueError(
            f"{where}: the checkpoint was saved with other trained params than those of the target, and "
            f"{counted(len(rows), 'leaf', 'leaves')} of the optimizer state do not tell which param they belong to:\n"
            f"{listing(rows)}\nIt trained {', '.join(stored)}; the target trains {', '.join(wanted)}. Restore into a "
            'state with the same trainable=, or pass only="params": optimizer state and step stay as they are in the '
            "target."
        )


def _source(leaf: NamedLeaf, have: Mapping[Name, Described], wanted: set[Name]) -> Name | None:
    """The stored array that a leaf is read from."""
    master, kind = (MASTER, *leaf.name[1:]), leaf.name[0]
    if kind == "params" and master in have and leaf.name in have:
        dtype, stored = describe(leaf)[1], have[leaf.name][1]
        larger = dtype.itemsize > stored.itemsize
        # a master that is read too must round to the param, or the update takes the param for a new one
        return master if dtype != stored and (larger or master in wanted) else leaf.name
    if leaf.name in have:
        return leaf.name
    param = ("params", *leaf.name[1:])
    return param if kind == MASTER and param in have else None


def describe(leaf: NamedLeaf) -> Described:
    """Shape and dtype as they are stored: a typed key is the array of its numbers."""
    dtype = _dtype_of(leaf.value)
    if is_key(leaf.value):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, dtype))
        return tuple(data.shape), np.dtype(data.dtype)
    if isinstance(leaf.value, (jax.Array, jax.ShapeDtypeStruct)):
        dtype = jax.dtypes.canonicalize_dtype(dtype)  # without jax_enable_x64, 64 bits become 32
    return leaf.shape, np.dtype(dtype)


def _why(leaf: NamedLeaf, stored: np.dtype) -> str:
    canonical = stored == np.dtype(_dtype_of(leaf.value))
    return "64 bits need jax_enable_x64" if canonical else "another dtype"


def _dtype_of(x: Any) -> Any:
    return x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype


def _of_python(stored: np.dtype, wanted: np.dtype, value: Any) -> bool:
    """True if one of two scalars is a Python number (such as a step), which has no dtype; a bool does not count."""
    if stored.kind in "iu" and wanted.kind in "iu":
        return np.int64 in (stored, wanted)
    return isinstance(value, float) and jnp.issubdtype(stored, jnp.floating)


def text(name: Name) -> str:
    """`params/Dense_0/kernel`."""
    return "/".join(name)


def _typed(shape: tuple[int, ...], dtype: np.dtype) -> str:
    return typed_shape(jax.ShapeDtypeStruct(shape, dtype))


def _params_fit(wanted: set[Name], rows: Sequence[tuple[str, ...]]) -> bool:
    """There are params, and what does not fit is something else."""
    return any(name[0] == "params" for name in wanted) and not any(
        row[0].startswith("params/") for row in rows
    )


def _remedy(castable: bool, params_fit: bool) -> str:
    remedy = (
        "Pass cast=True to convert the dtypes: what is widened keeps its value, what is narrowed is rounded, masters "
        "start as the params where the checkpoint has none."
        if castable
        else "Restore into a state of the same model and optimizer; jzero.abstract(create, ...) makes one."
    )
    if params_fit:
        remedy += (
            ' Or pass only="params": the params fit, and optimizer state, step and all else stay as they are in the '
            "target."
        )
    return remedy


def _message(rows: Sequence[tuple[str, ...]], remedy: str, where: str) -> str:
    lines = listing([("leaf", "checkpoint", "target", ""), *rows], most=40)
    found = counted(
        len(rows),
        "leaf of the checkpoint and the target differs",
        "leaves of the checkpoint and the target differ",
    )
    found += ", and nothing was read"
    return f"{where}: {found}:\n{lines}\n{remedy}"
