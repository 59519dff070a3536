"""The kinds of value in a traced loss, by how a value depends on the examples of the batch, and a rule per operation.

[Note: kinds of value]
Every value is one of these, found equation by equation:

- `Const`: does not depend on the batch.
- `Rows(dim)`: one entry per example along `dim`, each computed from its own example only.
- `Total`: a sum over examples, or a linear function of such sums. A mean loss is one, and the mean of the means of
  equal micro-batches is the mean of all.
- `Ratio`: a sum over examples divided by another (a masked mean): right with the weights of the micro-batches.
- `Mixed`: examples were combined in another way (a batch statistic applied to the examples, a product of two examples,
  a maximum or a root over the batch). The loss of a micro-batch then differs from its share of the whole batch's loss.

The result of an operation without a rule here is `Unknown`, which leads to a warning and not to an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jzero.core import jaxprs
from jzero.core.dims import MOVED_DIMS, dim_in_result, dot_dims, lookup_dims
from jzero.core.primitives import ELEMENTWISE, LINEAR_ELEMENTWISE, REDUCING
from jzero.core.products import example_dims


@dataclasses.dataclass(frozen=True)
class Const:
    """Does not depend on the batch."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """One entry per example along `dim`. `scaled` by a sum over examples: then only linear steps may follow.

    `dim` is -1 for a value of one example alone, inside of a scan over examples.
    """

    dim: int
    scaled: bool = False


@dataclasses.dataclass(frozen=True)
class Total:
    """Linear in sums over examples. `clipped` by a maximum with a constant: then it is valid only as a divisor.

    `sums` are the ids of the equations that summed, here and in `Ratio` and `Statistic`.
    """

    clipped: bool = False
    sums: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True)
class Ratio:
    """A sum over examples divided by another."""

    sums: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True)
class Statistic:
    """Another function of sums that the module keeps: see [Note: statistics that a module keeps]."""

    sums: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True)
class Mixed:
    """Examples were combined; `where` names the operation and the line."""

    where: str


@dataclasses.dataclass(frozen=True)
class Unknown:
    """An operation without a rule; `where` names it and the line."""

    where: str


Kind = Const | Rows | Total | Ratio | Statistic | Mixed | Unknown
SUMS = (Total, Ratio, Statistic)
CONST = Const()
NONE = frozenset[int]()


def couples(kind: Kind) -> bool:
    """True if examples were combined in a way that a mean over parts of the batch does not give."""
    return isinstance(kind, (Mixed, Statistic)) or (isinstance(kind, Total) and kind.clipped)


def by_rule(eqn, ins: list[Kind]) -> Kind | None:
    """The kind of an equation's results, from those of its operands; None for an operation without a rule."""
    name = eqn.primitive.name
    rule = _elementwise if name in ELEMENTWISE else _moved if name in MOVED_DIMS else _RULES.get(name)
    return None if rule is None else rule(eqn, ins)


def where_of(eqn) -> str:
    """An equation's operation and line."""
    return f"{eqn.primitive.name} {jaxprs.place_of(eqn)}".strip()


# --- elementwise ------------------------------------------------------------------------------------------------


def _elementwise(eqn, ins: list[Kind]) -> Kind:
    name = eqn.primitive.name
    rows = [k for k in ins if isinstance(k, Rows)]
    sums = [k for k in ins if isinstance(k, (Total, Ratio))]
    if len({k.dim for k in rows}) > 1:
        return Mixed(where_of(eqn))
    if rows and sums:
        scales = name == "mul" or (name == "div" and isinstance(ins[0], Rows))
        if scales and len(rows) == 1 and all(isinstance(k, Total) for k in sums):
            return Rows(rows[0].dim, scaled=True)
        return Mixed(where_of(eqn))
    if rows:
        scaled = any(k.scaled for k in rows)
        sums_up = name in ("add", "sub", "add_any") and all(k.scaled for k in rows)
        factor = name == "mul" and sum(k.scaled for k in rows) == 1
        divided = (
            name == "div" and isinstance(ins[0], Rows) and not (isinstance(ins[1], Rows) and ins[1].scaled)
        )
        if scaled and not (name in LINEAR_ELEMENTWISE or sums_up or factor or divided):
            return Mixed(where_of(eqn))
        return Rows(rows[0].dim, scaled)
    return _of_sums(eqn, name, ins)


def _of_sums(eqn, name: str, ins: list[Kind]) -> Kind:
    """An elementwise operation on sums over examples and constants."""
    ratio = any(isinstance(k, Ratio) for k in ins)
    clipped = any(isinstance(k, Total) and k.clipped for k in ins)
    sums = [k for k in ins if isinstance(k, (Total, Ratio))]
    if name == "div" and isinstance(ins[1], Total):
        return Mixed(where_of(eqn)) if ratio else Ratio()
    if name in ("max", "clamp") and len(sums) == 1 and not ratio:
        return Total(clipped=True)
    if name == "select_n" and isinstance(ins[0], (Const, Total)) and not ratio and not clipped:
        return Total() if isinstance(ins[0], Const) else Total(clipped=True)
    linear = name in (*LINEAR_ELEMENTWISE, "add", "sub", "add_any") or (
        name in ("mul", "div") and len(sums) == 1
    )
    if name == "div" and not isinstance(ins[1], Const):
        linear = False
    if not linear:
        # a comparison of sums (is the mask empty?) is harmless if it only selects
        return Total(clipped=True) if name in ("gt", "lt", "ge", "le", "eq", "ne") else Mixed(where_of(eqn))
    return Ratio() if ratio else Total(clipped)


# --- shapes, reductions, products -------------------------------------------------------------------------------


COMPARES = frozenset(
    """
    sort top_k cummax cummin cumprod cumlogsumexp reduce_window reduce_window_max reduce_window_min
    """.split()  # noqa: SIM905 - as in `core/primitives.py`
)
"""Of operations that move or keep a dim, those that are not linear: of sums over examples they are not sums."""


def _moved(eqn, ins: list[Kind]) -> Kind | None:
    """An operation that moves the examples' dim, or keeps it."""
    kind = next(k for k in ins if not isinstance(k, Const))
    if any(not isinstance(k, Const) and k != kind for k in ins):
        return None
    if isinstance(kind, (Total, Ratio)) and eqn.primitive.name in COMPARES:
        return Mixed(where_of(eqn))
    if not isinstance(kind, Rows) or kind.dim < 0:
        return kind
    dim = MOVED_DIMS[eqn.primitive.name](eqn, kind.dim)
    return None if dim is None else Rows(dim, kind.scaled)


def _reduction(eqn, ins: list[Kind]) -> Kind | None:
    kind, sums_up = ins[0], eqn.primitive.name == "reduce_sum"
    if not isinstance(kind, Rows):
        return kind if sums_up else Mixed(where_of(eqn))
    if kind.dim < 0:
        return kind
    dim = dim_in_result(eqn, 0, kind.dim)
    if dim is not None and (sums_up or not kind.scaled):
        return Rows(dim, kind.scaled)
    return _summed(kind) if sums_up else Mixed(where_of(eqn))


def _summed(rows: Rows) -> Kind:
    """The sum over all examples."""
    return Ratio() if rows.scaled else Total()


def _dot(eqn, ins: list[Kind]) -> Kind | None:
    """A matmul: rows times constants stay rows, rows times their own rows sum up, anything else mixes them."""
    (left_contract, right_contract), (left_batch, right_batch) = dot_dims(eqn)
    left, right = ins
    sums = [k for k in ins if isinstance(k, (Total, Ratio))]
    if sums:
        other = right if sums[0] is left else left
        return sums[0] if isinstance(other, Const) else Mixed(where_of(eqn))
    if _of_one_example(ins):
        return Rows(-1)
    if isinstance(left, Rows) and isinstance(right, Rows):
        pairs = [*zip(left_batch, right_batch, strict=True), *zip(left_contract, right_contract, strict=True)]
        if (left.dim, right.dim) not in pairs or left.scaled or right.scaled:
            return Mixed(where_of(eqn))
        return Rows(list(left_batch).index(left.dim)) if left.dim in left_batch else Total()
    at = 0 if isinstance(left, Rows) else 1
    rows = ins[at]
    assert isinstance(rows, Rows)
    dim = dim_in_result(eqn, at, rows.dim)
    return _summed(rows) if dim is None else Rows(dim, rows.scaled)


def _of_one_example(ins: list[Kind]) -> bool:
    return all(isinstance(k, Const) or (isinstance(k, Rows) and k.dim < 0) for k in ins)


def _convolution(eqn, ins: list[Kind]) -> Kind | None:
    rows, dims = ins[0], example_dims(eqn, 1)
    if dims is None or not isinstance(rows, Rows) or rows.dim != dims[0] or not isinstance(ins[1], Const):
        return None
    return Rows(dims[1], rows.scaled)


def _lookup(eqn, ins: list[Kind]) -> Kind | None:
    """Rows looked up in a constant table, or a value picked from each example's own row."""
    (operand, index), dims = ins, lookup_dims(eqn)
    if _of_one_example(ins):
        return Rows(-1)
    if isinstance(operand, Const) and isinstance(index, Rows):
        return Rows(dims.of_index[index.dim])
    if not isinstance(operand, Rows) or operand.scaled or operand.dim < 0:
        return None
    if operand.dim in dims.paired and isinstance(index, (Const, Rows)):
        at = dims.paired[operand.dim]
        return Rows(dims.of_index[at]) if isinstance(index, Const) or index.dim == at else Mixed(where_of(eqn))
    if operand.dim in dims.whole and isinstance(index, Const):
        return Rows(dims.whole[operand.dim])
    return None


def _update_slice(eqn, ins: list[Kind]) -> Kind | None:
    rows = [k for k in ins[:2] if isinstance(k, Rows)]
    if not rows or len(set(rows)) > 1 or any(not isinstance(k, Const) for k in ins[2:]):
        return None
    operand, update = (v.aval.shape for v in eqn.invars[:2])
    return rows[0] if rows[0].dim < 0 or operand[rows[0].dim] == update[rows[0].dim] else None


_RULES: dict[str, Callable[[Any, list[Kind]], Kind | None]] = {
    **dict.fromkeys(REDUCING, _reduction),
    "dynamic_update_slice": _update_slice,
    "gather": _lookup,
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
}
