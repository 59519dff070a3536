"""Which params are stacks of layers, and along which dim: known from `scan_axes` or the creation function, or guessed.

A scan takes one layer after the other from a stack. If that dim were split, the whole stack would be gathered before
the loop, so it is left whole.

[Note: what is known of stacks]
`scan_axes=` says it for every param. Without it, jzero reads the jaxpr of a function that creates the state: what a
scan stacks up (`nn.scan`, `jax.lax.map`) is a stack. Params that were made in another way (`vmap`, one array for all
layers, a state that exists already) give no sign of it, nor does Flax's metadata: the name that `nn.scan` or
`nnx.vmap` puts there for the new dim may stand for layers or for experts. For these jzero guesses from shapes, and the
plan says so.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence

import numpy as np

from jzero.core.dims import MOVED_DIMS
from jzero.core.errors import check_int, listing, nearest
from jzero.core.primitives import ELEMENTWISE
from jzero.core.regions import scan_parts
from jzero.core.traversal import traverse
from jzero.core.types import Jaxpr, JaxprEqn

Keys = tuple[str, ...]
Leaves = Sequence[tuple[Keys, tuple[int, ...]]]
KEEPS_DIMS = ELEMENTWISE | {"sharding_constraint", "optimization_barrier", "device_put"}


def stack_dims(
    leaves: Leaves, scan_axes: Mapping[str, int | None] | None, known: Mapping[Keys, int | None]
) -> tuple[dict[Keys, int], set[Keys]]:
    """For each param that is a stack the dim along which layers are stacked, and which of these are guesses.

    Args:
      leaves: path and shape of every param.
      scan_axes: as `make_plan` takes it.
      known: dims that are known from elsewhere, None for a param that is not a stack.

    Raises:
      TypeError, ValueError: `scan_axes` does not fit the params.
    """
    if scan_axes is not None:
        return _given_dims(leaves, scan_axes), set()
    guessed = scanned_paths([(keys, shape) for keys, shape in leaves if keys not in known])
    found = {keys: dim for keys, dim in known.items() if dim is not None}
    return found | dict.fromkeys(guessed, 0), guessed


def _given_dims(leaves: Leaves, scan_axes: Mapping[str, int | None]) -> dict[Keys, int]:
    """The dims in `scan_axes=`: the first pattern that matches a path, or the beginning of one, decides.

    Raises:
      TypeError: it does not map paths to dims.
      ValueError: no param has such a path, or a param does not have such a dim.
    """
    where = "jzero.make_plan"
    if not isinstance(scan_axes, Mapping) or not all(isinstance(k, str) for k in scan_axes):
        raise TypeError(
            f"{where}: scan_axes={scan_axes!r}: it must map paths of params to the dim along which layers are "
            'stacked: scan_axes={"layers": 0}, or {} where there is no stack.'
        )
    for pattern, dim in scan_axes.items():
        if dim is not None:
            check_int(dim, f"scan_axes[{pattern!r}]", where=where, low=0)
    found, used = {}, set()
    for keys, shape in leaves:
        pattern = next((p for p in scan_axes if _matches(p, keys)), None)
        used |= {p for p in scan_axes if _matches(p, keys)}
        dim = None if pattern is None else scan_axes[pattern]
        if dim is not None and dim >= len(shape):
            raise ValueError(
                f"{where}: scan_axes={{{pattern!r}: {dim}}}: {'/'.join(keys)} has {len(shape)} dims, and no dim {dim}. "
                f"Put a pattern for it in front, with None: {{{'/'.join(keys)!r}: None, ...}}."
            )
        if dim is not None:
            found[keys] = int(dim)
    if missing := [p for p in scan_axes if p not in used]:
        paths = ["/".join(keys) for keys, _ in leaves]
        raise ValueError(
            f"{where}: scan_axes names {missing[0]!r}, but no param has that path.{nearest(missing[0], paths)} "
            f"The paths are:\n{listing([(p,) for p in paths])}\nGive one, the beginning of one, or a pattern with *."
        )
    return found


def _matches(pattern: str, keys: Keys) -> bool:
    pattern = pattern.strip("/")
    return any(fnmatch.fnmatchcase("/".join(keys[:n]), pattern) for n in range(min(1, len(keys)), len(keys) + 1))


def stacked_by_scan(jaxpr: Jaxpr, count: int) -> list[int | None]:
    """For each of the first outputs of a creation function, the dim along which a scan has stacked it up."""
    unknown = [None] * len(jaxpr.constvars), [None] * len(jaxpr.invars)
    return traverse(jaxpr, *unknown, _stacked_dims, literal=lambda value: None)[:count]


def _stacked_dims(eqn: JaxprEqn, inputs: list[int | None]) -> list[int | None]:
    """The stacked dim of each result of an equation, from those of its operands."""
    name = eqn.primitive.name
    if name == "scan":
        carry = scan_parts(eqn)[2]
        return [None if i < carry else 0 for i in range(len(eqn.outvars))]
    if name == "transpose" and inputs[0] is not None:
        return [MOVED_DIMS[name](eqn, inputs[0])]
    if name in KEEPS_DIMS:
        shapes = [(d, np.shape(a.aval)) for a, d in zip(eqn.invars, inputs, strict=True) if d is not None]
        return [next((d for d, s in shapes if s == np.shape(v.aval)), None) for v in eqn.outvars]
    return [None for _ in eqn.outvars]


def scanned_paths(leaves: Leaves) -> set[Keys]:
    """A guess from shapes: the paths of params that look like stacks of layers along their leading dim.

    A node of the tree is taken for a stack if it has at least two leaves, all of two or more dims and one of three or
    more, which share their leading dim, and if that is not the largest dim of all (plain `[d, d]` projections share it
    too). Two stacks of experts look the same.
    """
    groups: dict[Keys, list[tuple[Keys, tuple[int, ...]]]] = {}
    for keys, shape in leaves:
        for depth in range(1, len(keys)):
            groups.setdefault(keys[:depth], []).append((keys, shape))
    found: set[Keys] = set()
    for members in groups.values():
        shapes = [s for _, s in members]
        if len(shapes) < 2 or any(len(s) < 2 for s in shapes) or max(map(len, shapes)) < 3:
            continue
        if len({s[0] for s in shapes}) == 1 and shapes[0][0] < max(d for s in shapes for d in s[1:]):
            found |= {keys for keys, _ in members}
    return found
