"""Where the dims of an equation's operands are in its result."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jzero.core.primitives import ELEMENTWISE, LAYOUT, MATRIX_OPS, REDUCING
from jzero.core.types import JaxprEqn

DimRule = Callable[[JaxprEqn, int], int | None]


def _reshaped(eqn: JaxprEqn, dim: int) -> int | None:
    """A dim stays the major part of one dim of the result if the dims before it keep their product."""
    old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    before, after = math.prod(old[:dim]), math.prod(old[dim + 1 :])
    for j, size in enumerate(new):
        if math.prod(new[:j]) == before and size > 1:
            inside = math.prod(new[j + 1 :])
            return j if 0 < inside <= after and after % inside == 0 else None
    return None


def dims_in_order(eqn: JaxprEqn) -> list[int]:
    """The dims of the operand that an equation keeps, in the order of its result.

    A transpose reorders them, a squeeze and an unstack drop some, any other equation keeps all.
    """
    name, params = eqn.primitive.name, eqn.params
    if name == "transpose":
        return list(params["permutation"])
    dropped = params["dimensions"] if name == "squeeze" else [params["axis"]] if name == "unstack" else []
    return [dim for dim in range(len(eqn.invars[0].aval.shape)) if dim not in dropped]


def _reordered(eqn: JaxprEqn, dim: int) -> int | None:
    order = dims_in_order(eqn)
    return order.index(dim) if dim in order else None


def _if_whole(sizes: Callable[[JaxprEqn], Sequence[int]]) -> DimRule:
    """Keeps the dim if the operation takes all of it."""
    return lambda eqn, dim: dim if sizes(eqn)[dim] == eqn.invars[0].aval.shape[dim] else None


def _if_equal(key: str, value: Any) -> DimRule:
    """Keeps the dim if a parameter of the operation has this value for it."""
    return lambda eqn, dim: dim if eqn.params[key][dim] == value else None


def _if_not_in(key: str) -> DimRule:
    """Keeps the dim if the operation works along others."""

    def moved(eqn: JaxprEqn, dim: int) -> int | None:
        along = eqn.params[key]
        return None if dim in (along if isinstance(along, (tuple, list)) else (along,)) else dim

    return moved


_one_window = _if_equal("window_dimensions", 1)
MOVED_DIMS: dict[str, DimRule] = {
    **{f"cum{op}": _if_not_in("axis") for op in ("sum", "max", "min", "prod", "logsumexp")},
    **{f"reduce_window{op}": _one_window for op in ("", "_sum", "_max", "_min")},
    **dict.fromkeys(LAYOUT, lambda eqn, dim: dim),
    "broadcast_in_dim": lambda eqn, dim: eqn.params["broadcast_dimensions"][dim],
    "concatenate": _if_not_in("dimension"),
    "dynamic_slice": _if_whole(lambda eqn: eqn.params["slice_sizes"]),
    "pad": _if_equal("padding_config", (0, 0, 0)),
    "reshape": _reshaped,
    "rev": _if_not_in("dimensions"),
    "slice": _if_whole(lambda eqn: eqn.outvars[0].aval.shape),
    "sort": _if_not_in("dimension"),
    "split": _if_not_in("axis"),
    "squeeze": _reordered,
    "top_k": _if_not_in("axis"),
    "transpose": _reordered,
}  # fmt: skip
"""For an equation and a dim of its operands: the dim of the result along which the same values lie, index by index.

None if the operation combines values along the dim, or leaves some out.
"""


def reduced_dims(eqn: JaxprEqn) -> tuple[int, ...]:
    """The dims that a reduction sums, multiplies or compares over."""
    return tuple(eqn.params["axes"])


class DotDims(NamedTuple):
    """The pairs of dims of a matmul's two operands: those that are summed over, and batch dims."""

    contract: tuple[Sequence[int], Sequence[int]]
    batch: tuple[Sequence[int], Sequence[int]]


def dot_dims(eqn: JaxprEqn) -> DotDims:
    """The dims of a `dot_general`."""
    return DotDims(*eqn.params["dimension_numbers"])


class LookupDims(NamedTuple):
    """Where the dims of the result of a lookup (`gather`) come from.

    Attributes:
      of_index: by dim of the index, the dim of the result.
      paired: by batching dim of the operand, the dim of the index: every entry has indices of its own.
      whole: by dim of the operand that is taken whole, the dim of the result.
    """

    of_index: list[int]
    paired: dict[int, int]
    whole: dict[int, int]


def lookup_dims(eqn: JaxprEqn) -> LookupDims:
    """The dims of a `gather`."""
    numbers, shape = eqn.params["dimension_numbers"], eqn.invars[0].aval.shape
    of_index = [d for d in range(eqn.outvars[0].aval.ndim) if d not in numbers.offset_dims]
    paired = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    window = [d for d in range(len(shape)) if d not in numbers.collapsed_slice_dims and d not in paired]
    rows = zip(window, numbers.offset_dims, strict=True)
    return LookupDims(
        of_index, paired, {d: out for d, out in rows if eqn.params["slice_sizes"][d] == shape[d]}
    )


def dim_in_result(eqn: JaxprEqn, at: int, dim: int) -> int | None:
    """The dim of the result along which the same values lie, index by index, as along a dim of operand `at`.

    None if the operation combines values along the dim, leaves some out, or is not known. A matmul keeps the dims that
    it does not sum over; each entry is computed from all of the other operand.
    """
    name = eqn.primitive.name
    if name in ELEMENTWISE or name == "dynamic_update_slice":
        whole = name in ELEMENTWISE or eqn.invars[0].aval.shape[dim] == eqn.invars[1].aval.shape[dim]
        return dim if whole else None
    if name in REDUCING:
        dims = reduced_dims(eqn)
        return None if dim in dims else dim - sum(d < dim for d in dims)
    if name in MATRIX_OPS:
        return dim if dim < eqn.invars[at].aval.ndim - 2 else None
    if name == "dot_general":
        return _kept_by_dot(eqn, at, dim)
    return MOVED_DIMS[name](eqn, dim) if name in MOVED_DIMS else None


def _kept_by_dot(eqn: JaxprEqn, at: int, dim: int) -> int | None:
    dims = dot_dims(eqn)
    if dim in dims.batch[at]:
        return list(dims.batch[at]).index(dim)
    if dim in dims.contract[at]:
        return None
    free = [d for d in range(eqn.invars[at].aval.ndim) if d not in (*dims.batch[at], *dims.contract[at])]
    before = eqn.outvars[0].aval.ndim - len(free) if at == 1 else len(dims.batch[at])
    return before + free.index(dim)
