"""Fault of the wire as a whole: more is sent than the closed form says.

[Note: what is compared]
The closed form is `estimate`'s: from the plan and from what the step does with each param (`param_uses`), not from the
compiled program. Collectives outside of it are left out of the sum: the optimizer's own arithmetic
(`optimizer_moves`) and its exchange of matrices, the user's collectives in a `jax.shard_map`, and axes over which ZeRO
does not split. Micro-batches are counted in the program; a loop that is taken for one makes the closed form larger.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from jzero.comm import comm_of
from jzero.comm.exchange import MatrixExchange
from jzero.comm.uses import DEFAULT, Use
from jzero.core.errors import human_bytes
from jzero.layout.leaf_rule import Frozen, Layout
from jzero.layout.specs import axis_of
from jzero.proof.collectives import Site
from jzero.proof.evidence import REDUCES, Evidence
from jzero.proof.faults.wording import (
    ACROSS,
    MOST_NAMES,
    Faults,
    axes_text,
    equation,
    is_tied,
    more_text,
    names_text,
)
from jzero.proof.places import primitive_of
from jzero.sharding import Plan

REMEDY = (
    "at the equation that is named: what sorts, searches or constrains a whole param, gradient or moment goes into a "
    "function of its own, called when it is wanted; activations are held by the batch, "
    "jax.lax.with_sharding_constraint(x, plan.batch); and the loss calls the apply_fn of the state, or is "
    "jzero.gather_on_use(loss_fn, plan)."
)
SHARE_MORE = 0.05
SHARE_ROW = 0.01
BY_HAND = frozenset(
    """
    psum psum2 psum_invariant pmax pmin ppermute all_to_all ragged_all_to_all all_gather all_gather_invariant
    psum_scatter reduce_scatter pbroadcast
    """.split()  # noqa: SIM905 - as in `core/primitives.py`
)
"""Primitives of collectives that someone has written, in a `jax.shard_map`."""
ROWS = frozenset(("gather", "scatter", "scatter-add"))
"""Primitives that read and write rows."""
Sent = tuple[Site, int, float]
"""A tensor of a collective: its elements, and the bytes that one device sends in an update."""
Planned = tuple[Layout, bool, float]
"""A param, whether its gradient is reduced or it is gathered, and the bytes that one device sends for it."""


def more_than_closed_form(e: Evidence) -> Faults:
    """Over the ZeRO axes, 5 % above the closed form of all micro-batches; what other rules find is in it too."""
    if (bytes_ := _compared(e)) is None:
        return
    rows, planned, sent, closed, psi = bytes_
    extra = _of_untouched(e, e.micro_batches)
    if sent - closed - extra <= SHARE_MORE * max(closed, psi):  # below one Psi even 5 % is little
        return
    found = [row for row in _excess(e, rows, planned) if row.bytes > SHARE_ROW * psi]
    rows_moved = any(primitive_of(row.where) in ROWS for row in found)
    tied = [x for row in found[:1] if row.op in REDUCES for x in row.params if is_tied(e, x)]
    if tied and not e.plan.config.row.params:
        remedy = (
            "loss_fn = jzero.gather_on_use(loss_fn, plan), or the apply_fn of the state that jzero.shard returned: at "
            f"every stage it adds the gradients of a lookup and of a matmul of {names_text(tied)[:-1]}, and reduces "
            "the sum once."
        )
    else:
        remedy = REMEDY + (f" {ACROSS}" if rows_moved else "")
    listed = "; ".join(f"{row.what} in {row.op}: {human_bytes(row.bytes)} ({row.where})" for row in found[:MOST_NAMES])
    yield (
        f"{sent / psi:.2f} Psi are sent over {axes_text(e.plan.config.axes)} in a step, and the closed form says "
        f"{closed / psi:.2f}. Not in it: {listed or 'nothing large by itself'}{more_text(found)}.",
        round(sent - closed),
        remedy,
    )


def less_than_closed_form(e: Evidence) -> Iterator[str]:
    """A note where 5 % less is sent than the closed form says: it may say more than this step needs, or be wrong."""
    if (bytes_ := _compared(e)) is not None:
        *_, sent, closed, psi = bytes_
        if closed - sent > SHARE_MORE * max(closed, psi):
            yield (
                f"{sent / psi:.2f} Psi are sent over {axes_text(e.plan.config.axes)} in a step, less than the "
                f"{closed / psi:.2f} of the closed form: estimate(uses=) is wrong for this step by that much."
            )


def incomparable(e: Evidence) -> str:
    """Why what is sent cannot be compared with the closed form, although uses are known; empty if it can be."""
    if not (e.trains and e.module.has_backward):
        return "in a step that does not train"
    if e.others and not e.beside:
        return "beside the params of another model"
    if e.frozen:
        return "beside a copy of the params, which is gathered too"
    return "where a stack is split along its layers" if e.split_stacks else ""


def _compared(e: Evidence) -> tuple[list[Sent], list[Planned], float, float, float] | None:
    """What is sent and what is planned, row by row and in bytes, and the bytes of one Psi; None if not known."""
    if e.on_cpu or e.uses is None or incomparable(e):
        return None
    rows, times = list(_sent(e)), max([e.micro_batches, *(_micro_batches(e, s) for s, _ in e.sites)])
    planned = list(_planned(e, times))
    sent, closed = (sum(row[-1] for row in some) for some in (rows, planned))
    psi = sum(plan.param_bytes for plan, _ in _models(e)) * (e.plan.batch_parts - 1) / e.plan.batch_parts
    return rows, planned, sent, closed, psi


def _models(e: Evidence) -> list[tuple[Plan, Mapping[str, Sequence[Use]]]]:
    """The plan and the uses of each model that the step trains."""
    return [(e.plan, e.uses or {}), *e.beside]


def _sent(e: Evidence) -> Iterator[Sent]:
    for s in e.over_zero_axes(
        *REDUCES, "all-gather", "all-to-all", "ragged-all-to-all", "collective-permute"
    ):
        by_hand = not s.scope and s.primitive in BY_HAND
        if by_hand or e.is_optimizers(s) or f"jzero.{s.scope}" == MatrixExchange.SCOPE:
            continue
        wire = s.wire_bytes * e.trips(s)
        yield from ((s, n, wire * n / max(sum(s.sizes), 1)) for n in s.sizes)


def _planned(e: Evidence, times: int) -> Iterator[Planned]:
    zero = set(e.plan.config.axes)
    by_part = any(s.scope == "microbatch" for s in e.over_zero_axes(*REDUCES))
    for plan, uses, x in [(owner, of, x) for owner, of in _models(e) for x in owner.layouts]:
        # at stages 0 and 1 gradients are reduced once, unless `reduce="microbatch"` was asked for
        comm, asked = comm_of(plan), by_part and not plan.config.row.grads
        of = x, times, uses.get(x.name, DEFAULT)
        gathers = itertools.chain(comm.updates.wire(x), comm.weights.wire(*of))
        for reduces, sent in ((True, comm.gradients.wire(*of)), (False, gathers)):
            size = sum(size for axes, size in sent if zero & set(map(axis_of, axes)))
            yield x, reduces, size * (times if reduces and asked else 1)


def _of_untouched(e: Evidence, times: int) -> float:
    """Gradients of params that the optimizer leaves unchanged: XLA drops them, unless the step reads them."""
    rows = [(plan, uses, x) for plan, uses in _models(e) for x in plan.layouts if x.frozen is Frozen.KEPT]
    sent = (
        comm_of(plan).gradients.wire(dataclasses.replace(x, frozen=None), times, uses.get(x.name, DEFAULT))
        for plan, uses, x in rows
    )
    return sum(size for some in sent for _, size in some)


class _More(NamedTuple):
    """What is sent and not planned: of which params (those of one size, tied tables first), in words, how and where."""

    params: list[Layout]
    what: str
    op: str
    where: str
    bytes: float


def _excess(e: Evidence, rows: Iterable[Sent], planned: Iterable[Planned]) -> list[_More]:
    """What is sent and not planned, by param (those of one size together) or array; the largest first."""
    groups = _by_size(e)
    total: dict[tuple[int, bool], float] = collections.defaultdict(float)
    largest: dict[tuple[int, bool], tuple[float, Site]] = {}
    for x, reduces, size in planned:
        total[min(groups[e.local(x)][1]), reduces] -= size
    for s, n, size in rows:
        key = min(groups[n][1]) if n in groups else n, s.op in REDUCES
        total[key] += size
        largest[key] = max(largest.get(key, (0.0, s)), (size, s), key=lambda pair: pair[0])
    found = []
    for key in sorted(largest, key=lambda key: -total[key]):
        s = largest[key][1]
        array = f"{s.dtype}[{','.join(map(str, max(s.dims, key=len)))}]"
        some = sorted(groups[key[0]][0], key=lambda x: not is_tied(e, x)) if key[0] in groups else []
        what = names_text(some).removesuffix(".") if some else array
        found.append(_More(some, what, s.op, equation(s), total[key]))
    return found


def _by_size(e: Evidence) -> dict[int, tuple[list[Layout], set[int]]]:
    """By elements of a param, or of a layer of it: the params that cannot be told apart, and all their sizes."""
    groups: dict[int, tuple[list[Layout], set[int]]] = {}
    for x in (x for plan, _ in _models(e) for x in plan.layouts):
        layouts, sizes = [x], {e.local(x), e.local(x, sliced=True)}
        sizes |= {n * math.prod(x.state_shape) // x.size for n in sizes}  # padded, as it is reduced
        for others, more in {id(g): g for n in sizes if (g := groups.get(n))}.values():
            layouts, sizes = others + layouts, sizes | more
        groups.update(dict.fromkeys(sizes, (layouts, sizes)))
    return groups


def _micro_batches(e: Evidence, s: Site) -> int:
    """How often a loop takes gradients, from a collective in it."""
    return round(e.trips(s) / e.loss_iterations(s)) if s.phase in ("forward", "backward") else 1
