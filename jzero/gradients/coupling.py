"""How each value of a traced loss depends on the examples of the batch: its kind, as `kinds.py` defines them.

[Note: statistics that a module keeps]
BatchNorm stores the mean and the variance by which it normalizes. Such statistics are those of each micro-batch, on
purpose, so they count as constants: `Statistic` is a function of them alone, and rows normalized by them stay rows.
A sum (or a maximum) over examples is kept if the new state is computed from it without going back to the examples. A
contrastive loss beside a counter is Mixed all the same, because its similarities are no such sums, and so is a softmax
over the batch whose loss is stored: the loss is kept, not the sum that the softmax divides by. (Two calls of one jitted
function share their equations, so that a sum in both of them is kept if one is.)
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from jzero.core.block_input import BEGIN, END
from jzero.core.dims import dim_in_result
from jzero.core.primitives import CALLS, CONTROL_FLOW, REDUCING
from jzero.core.regions import kept_carries, scan_parts, through_bodies, while_parts
from jzero.core.traversal import traverse
from jzero.gradients.kinds import (
    CONST,
    NONE,
    SUMS,
    Const,
    Kind,
    Mixed,
    Rows,
    Statistic,
    Unknown,
    by_rule,
    where_of,
)


def kinds_of_results(jaxpr, kinds: Sequence[Kind], kept: frozenset[int] | None = NONE) -> list[Kind]:
    """The kinds of a jaxpr's results, from those of its arguments; `kept` is of sums that are constants (None: all)."""
    consts, rule = [CONST] * len(jaxpr.constvars), functools.partial(_apply, kept=kept)
    return traverse(jaxpr, consts, kinds, rule, literal=lambda value: CONST, calls=CALLS)


def kinds_with_statistics(jaxpr, kinds: Sequence[Kind], state: Sequence[int]) -> list[Kind]:
    """The same for a loss whose module keeps statistics; `state` are the results that hold its new state."""
    new = kinds_of_results(jaxpr, kinds, None)
    return kinds_of_results(jaxpr, kinds, _sums([new[i] for i in state]))


def _apply(eqn, ins: list[Kind], kept: frozenset[int] | None) -> list[Kind]:
    """The kinds of an equation's results, from those of its operands."""
    if all(isinstance(k, Const) for k in ins):
        return [CONST] * len(eqn.outvars)
    name = eqn.primitive.name
    if name in _STRUCTURED:
        return _STRUCTURED[name](eqn, ins, kept)
    found = next((k for kind in (Mixed, Unknown) for k in ins if isinstance(k, kind)), None)
    if found is not None and kept is not None and id(eqn) in kept:
        found = Statistic(frozenset((id(eqn),)))
    found = found or (_of_rows if any(isinstance(k, Rows) for k in ins) else _of_no_rows)(eqn, ins, kept)
    return [found or Unknown(where_of(eqn))] * len(eqn.outvars)


def _of_rows(eqn, ins: list[Kind], kept: frozenset[int] | None) -> Kind | None:
    found = by_rule(eqn, [CONST if isinstance(k, SUMS) and _are_kept(k.sums, kept) else _without_sums(k) for k in ins])
    own, first = frozenset((id(eqn),)), ins[0]
    if isinstance(found, SUMS):
        return dataclasses.replace(found, sums=own)
    if not isinstance(found, Mixed) or not isinstance(first, Rows) or eqn.primitive.name not in REDUCING:
        return found
    is_statistic = dim_in_result(eqn, 0, first.dim) is None and _are_kept(own, kept)  # a maximum
    return Statistic(own) if is_statistic else found


def _of_no_rows(eqn, ins: list[Kind], kept: frozenset[int] | None) -> Kind | None:
    sums = _sums(ins)
    if any(isinstance(k, Statistic) for k in ins):
        return Statistic(sums) if _are_kept(sums, kept) else Mixed(where_of(eqn))
    found = by_rule(eqn, list(map(_without_sums, ins)))
    if isinstance(found, SUMS):
        return dataclasses.replace(found, sums=sums)
    return Statistic(sums) if _are_kept(sums, kept) else found


def _sums(kinds: Sequence[Kind]) -> frozenset[int]:
    return NONE.union(*(k.sums for k in kinds if isinstance(k, SUMS)))


def _are_kept(sums: frozenset[int], kept: frozenset[int] | None) -> bool:
    return bool(sums) and (kept is None or sums <= kept)


def _without_sums(kind: Kind) -> Kind:
    return dataclasses.replace(kind, sums=NONE) if isinstance(kind, SUMS) else kind


# --- control flow -----------------------------------------------------------------------------------------------


def _join(a: Kind, b: Kind, where: str) -> Kind:
    """The kind of a value that may be of either kind."""
    if a == b or isinstance(b, Const):
        return a
    if isinstance(a, Const):
        return b
    if isinstance(a, SUMS) and isinstance(b, SUMS) and _without_sums(a) == _without_sums(b):
        return dataclasses.replace(a, sums=a.sums | b.sums)
    return next((k for k in (a, b) if isinstance(k, (Mixed, Unknown))), Mixed(where))


def _in_bodies(eqn, ins: list[Kind], kept: frozenset[int] | None) -> list[Kind]:
    """The kinds of the results of a loop, or of branches."""

    def sliced(kind: Kind) -> Kind:
        if not isinstance(kind, Rows):
            return kind
        return Rows(-1, kind.scaled) if kind.dim == 0 else Rows(kind.dim - 1, kind.scaled)

    where = where_of(eqn)
    outs = through_bodies(
        eqn, ins, lambda body, kinds: kinds_of_results(body[0], kinds, kept), functools.partial(_join, where=where),
        sliced=sliced, stacked=lambda k: Rows(k.dim + 1, k.scaled) if isinstance(k, Rows) else k,
    )  # fmt: skip
    assert outs is not None
    if eqn.primitive.name == "scan" and any(isinstance(k, Rows) and k.dim == 0 for k in ins) and _hands_on(eqn, outs):
        return [Unknown(where) if isinstance(k, Rows) else k for k in outs]
    if eqn.primitive.name == "cond" and not isinstance(ins[0], Const):
        return [Mixed(where)] * len(outs)
    if eqn.primitive.name == "while":
        stops, own = while_parts(eqn)[0]
        (stop,) = kinds_of_results(stops, [*ins[:own], *outs], kept)
        return outs if isinstance(stop, Const) else [Unknown(where)] * len(outs)
    return outs


def _hands_on(eqn, outs: list[Kind]) -> bool:
    """True for a scan over examples that hands something of them on to the next."""
    rows = zip(kept_carries(*scan_parts(eqn)), outs, strict=False)  # the carries come first
    return any(isinstance(kind, Rows) and kind.dim < 0 for kept, kind in rows if not kept)


_STRUCTURED = {
    **dict.fromkeys(CONTROL_FLOW, _in_bodies), "optimization_barrier": lambda eqn, ins, kept: ins,
    BEGIN: lambda eqn, ins, kept: [ins[0]] * 3, END: lambda eqn, ins, kept: [ins[0]],
}  # fmt: skip
