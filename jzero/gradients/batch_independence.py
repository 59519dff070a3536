"""Does a loss keep its examples apart? Told from its jaxpr, so that micro-batches are not silently another loss.

[Note: five kinds of value]
Every value of the traced loss is one of these, told operation by operation:

- `Const`: does not depend on the batch.
- `Rows(dim)`: along `dim` stands one example after the other, each computed from itself alone.
- `Total`: a sum over examples, or a linear function of such sums. A mean loss is one, and the mean of the means of
  equal micro-batches is the mean of all.
- `Ratio`: a sum over examples divided by another (a masked mean): right with the weights of the micro-batches.
- `Mixed`: examples were combined otherwise (a batch statistic put back on the examples, a product of two examples,
  a maximum or a root over the batch). A micro-batch then has another loss than its part of the whole batch.

What cannot be told (an unknown operation on a value of the batch) is `Unknown`: a warning, no refusal.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jzero.core import jaxprs
from jzero.core.block_input import BEGIN, END
from jzero.core.primitives import CALLS, ELEMENTWISE, LINEAR_ELEMENTWISE
from jzero.core.traversal import traverse


@dataclasses.dataclass(frozen=True)
class Const:
    """Does not depend on the batch."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """One example after the other along `dim`; `scaled`: by a sum over examples, so only linear steps may follow.

    `dim` is -1 for a value of one example alone, inside of a scan over examples.
    """

    dim: int
    scaled: bool = False


@dataclasses.dataclass(frozen=True)
class Total:
    """Linear in sums over examples; `clipped`: through a maximum with a constant, good as a divisor alone."""

    clipped: bool = False


@dataclasses.dataclass(frozen=True)
class Ratio:
    """A sum over examples divided by another."""


@dataclasses.dataclass(frozen=True)
class Mixed:
    """Examples were combined; `where` names the operation and the line."""

    where: str


@dataclasses.dataclass(frozen=True)
class Unknown:
    """An operation that this file does not know."""

    where: str


Kind = Const | Rows | Total | Ratio | Mixed | Unknown
CONST = Const()


def check_examples_apart(
    fn: Callable[..., Any],
    params: Any,
    args: Sequence[Any],
    *,
    batch: Sequence[int],
    examples: int,
    weighted: bool,
) -> None:
    """Refuses a loss that micro-batches would change.

    Args:
      fn: `fn(params, args) -> (loss, aux)`.
      params, args: arrays or ShapeDtypeStructs, batch leaves with `examples` rows.
      batch: positions in `args` whose leaves have examples along dim 0.
      examples: rows of a micro-batch.
      weighted: micro-batches are weighted by what their mean divides by.

    Raises:
      ValueError: the loss couples examples, is a ratio of sums and not weighted, or aux has one value per example.
    """
    leaves, tree = jax.tree.flatten((params, tuple(args)))
    is_array = [hasattr(x, "shape") and hasattr(x, "dtype") for x in leaves]
    count = len(jax.tree.leaves(params))
    owner = [None] * count + [i for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
    kinds = [Rows(0) if i in batch else CONST for i, a in zip(owner, is_array, strict=True) if a]
    aux_shapes: list[Any] = []

    def flat(*arrays):
        rest = iter(arrays)
        p, a = tree.unflatten([next(rest) if own else x for x, own in zip(leaves, is_array, strict=True)])
        loss, aux = fn(p, a)
        aux_shapes[:] = [(k, np.shape(x)) for k, x in jax.tree_util.tree_leaves_with_path(aux)]
        return [loss]

    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x, own in zip(leaves, is_array, strict=True) if own]
    jaxpr, _ = jaxprs.trace(flat, *shapes)
    _refuse_rows_in_aux(aux_shapes, examples)
    if examples > 1:  # one example cannot be told from a dim of size 1, nor coupled with itself
        _refuse(run(jaxpr, kinds)[0], weighted)


def _refuse_rows_in_aux(aux_shapes, examples: int) -> None:
    per_example = [f"{jax.tree_util.keystr(k)} {s}" for k, s in aux_shapes if s and s[0] == examples]
    if per_example:
        raise ValueError(
            f"jzero.value_and_grad: aux {', '.join(per_example[:8])} has one value per example of a micro-batch "
            f"({examples}); aux is averaged over micro-batches. Return its mean or sum."
        )


def _refuse(kind: Kind, weighted: bool) -> None:
    told = "jzero.value_and_grad: the loss"
    if isinstance(kind, Mixed) or (isinstance(kind, Total) and kind.clipped) or isinstance(kind, Rows):
        where = getattr(kind, "where", "at its end")
        raise ValueError(
            f"{told} couples examples ({where}): on micro-batches, or on one device's part of them, it is another "
            "loss than on the whole batch. BatchNorm and contrastive losses do so. Use accumulate=1, or "
            'coupled="allow" to take the loss of each micro-batch as it is.'
        )
    if isinstance(kind, Ratio) and not weighted:
        raise ValueError(
            f"{told} is a sum over examples divided by another (a mean over tokens that are not padding): the mean "
            "of such means is not the mean of all. Pass weight=lambda batch: batch['mask'].sum(), what it divides by."
        )
    if isinstance(kind, Unknown):
        warnings.warn(
            f"{told} could not be checked for examples that depend on each other ({kind.where}); micro-batches are "
            "right where they do not.",
            stacklevel=6,
        )


def run(jaxpr, kinds: Sequence[Kind]) -> list[Kind]:
    """The kinds of a jaxpr's outputs, from those of its inputs."""
    consts = [CONST] * len(jaxpr.constvars)
    return traverse(jaxpr, consts, kinds, _apply, literal=lambda value: CONST, calls=CALLS)


def _apply(eqn, ins: list[Kind]) -> list[Kind]:
    worst = next((k for k in ins if isinstance(k, Mixed)), None) or next(
        (k for k in ins if isinstance(k, Unknown)), None
    )
    if all(isinstance(k, Const) for k in ins):
        return [CONST] * len(eqn.outvars)
    name = eqn.primitive.name
    if name in _STRUCTURED:
        return _STRUCTURED[name](eqn, ins)
    if worst is not None:
        return [worst] * len(eqn.outvars)
    rule = _RULES.get(name)
    out = rule(eqn, ins) if rule else _elementwise(eqn, ins) if name in ELEMENTWISE else None
    return [Unknown(_where(eqn)) if out is None else out] * len(eqn.outvars)


def _where(eqn) -> str:
    return f"{eqn.primitive.name} {jaxprs.place_of(eqn)}".strip()


# --- elementwise ------------------------------------------------------------------------------------------------

def _elementwise(eqn, ins: list[Kind]) -> Kind:
    name = eqn.primitive.name
    rows = [k for k in ins if isinstance(k, Rows)]
    sums = [k for k in ins if isinstance(k, (Total, Ratio))]
    if len({k.dim for k in rows}) > 1:
        return Mixed(_where(eqn))
    if rows and sums:
        first = ins[0]
        scales = name in ("mul", "div") and len(rows) == 1 and (name == "mul" or isinstance(first, Rows))
        return (
            Rows(rows[0].dim, scaled=True)
            if scales and all(isinstance(k, Total) for k in sums)
            else Mixed(_where(eqn))
        )
    if rows:
        scaled = any(k.scaled for k in rows)
        sums_up = name in ("add", "sub", "add_any") and all(k.scaled for k in rows)
        factor = name == "mul" and sum(k.scaled for k in rows) == 1
        divided = (
            name == "div" and isinstance(ins[0], Rows) and not (isinstance(ins[1], Rows) and ins[1].scaled)
        )
        if scaled and not (name in LINEAR_ELEMENTWISE or sums_up or factor or divided):
            return Mixed(_where(eqn))
        return Rows(rows[0].dim, scaled)
    return _of_sums(eqn, name, ins)


def _of_sums(eqn, name: str, ins: list[Kind]) -> Kind:
    """An elementwise operation on sums over examples and constants."""
    ratio = any(isinstance(k, Ratio) for k in ins)
    clipped = any(isinstance(k, Total) and k.clipped for k in ins)
    sums = [k for k in ins if isinstance(k, (Total, Ratio))]
    if name == "div" and isinstance(ins[1], Total):
        return Mixed(_where(eqn)) if ratio else Ratio()
    if name in ("max", "clamp") and len(sums) == 1 and not ratio:
        return Total(clipped=True)
    if name == "select_n" and isinstance(ins[0], (Const, Total)) and not ratio and not clipped:
        return Total() if isinstance(ins[0], Const) else Total(clipped=True)
    linear = name in (*LINEAR_ELEMENTWISE, "add", "sub", "add_any") or (name in ("mul", "div") and len(sums) == 1)
    if name == "div" and not isinstance(ins[1], Const):
        linear = False
    if not linear:
        # a comparison of sums (is the mask empty?) that only selects stays harmless
        return Total(clipped=True) if name in ("gt", "lt", "ge", "le", "eq", "ne") else Mixed(_where(eqn))
    return Ratio() if ratio else Total(clipped)


# --- shapes, reductions, products -------------------------------------------------------------------------------


def _moved(to: Callable[[Any, int], int | None]):
    """A rule for an operation that moves the examples' dim, or keeps it; None from `to` says that it cannot be told."""

    def rule(eqn, ins: list[Kind]) -> Kind | None:
        kind = next(k for k in ins if not isinstance(k, Const))
        if any(not isinstance(k, Const) and k != kind for k in ins):
            return None
        if not isinstance(kind, Rows) or kind.dim < 0:
            return kind
        dim = to(eqn, kind.dim)
        return None if dim is None else dataclasses.replace(kind, dim=dim)

    return rule


def _reshape(eqn, dim: int) -> int | None:
    """Examples are the major part of a dim; they stay so where the dims in front keep their product."""
    old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    before, after = math.prod(old[:dim]), math.prod(old[dim + 1 :])
    for j, size in enumerate(new):
        if math.prod(new[:j]) == before and size > 1:
            inside = math.prod(new[j + 1 :])
            return j if inside <= after and after % inside == 0 else None
    return None


def _squeeze(eqn, dim: int) -> int | None:
    gone = eqn.params["dimensions"]
    return None if dim in gone else dim - sum(d < dim for d in gone)


def _whole(sizes: Callable[[Any], Sequence[int]]):
    """Keeps the dim where the operation takes all of it."""
    return lambda eqn, dim: dim if sizes(eqn)[dim] == eqn.invars[0].aval.shape[dim] else None


def _other_dim(key: str):
    """Keeps the dim where the operation works along others."""

    def to(eqn, dim: int) -> int | None:
        along = eqn.params[key]
        return None if dim in (along if isinstance(along, (tuple, list)) else (along,)) else dim

    return to


def _reduction(eqn, ins: list[Kind]) -> Kind | None:
    kind, axes, name = ins[0], eqn.params["axes"], eqn.primitive.name
    if isinstance(kind, Rows) and kind.dim < 0:
        return kind
    if not isinstance(kind, Rows):
        return kind if name == "reduce_sum" else Mixed(_where(eqn))
    if kind.dim not in axes:
        kept = Rows(kind.dim - sum(a < kind.dim for a in axes), kind.scaled)
        return kept if name == "reduce_sum" or not kind.scaled else Mixed(_where(eqn))
    if name != "reduce_sum":
        return Mixed(_where(eqn))
    return Ratio() if kind.scaled else Total()


def _dot(eqn, ins: list[Kind]) -> Kind | None:
    """A matmul: rows times constants stay rows, rows times their own rows sum up, anything else mixes them."""
    (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
    left, right = ins
    sums = [k for k in ins if isinstance(k, (Total, Ratio))]
    if sums:
        other = right if sums[0] is left else left
        return sums[0] if isinstance(other, Const) else Mixed(_where(eqn))
    if all(isinstance(k, Const) or (isinstance(k, Rows) and k.dim < 0) for k in ins):
        return Rows(-1)
    if isinstance(left, Rows) and isinstance(right, Rows):
        pairs = [*zip(lb, rb, strict=True), *zip(lc, rc, strict=True)]
        if (left.dim, right.dim) not in pairs or left.scaled or right.scaled:
            return Mixed(_where(eqn))
        return Rows(list(lb).index(left.dim)) if left.dim in lb else Total()
    kind, contract, batch = (left, lc, lb) if isinstance(left, Rows) else (right, rc, rb)
    assert isinstance(kind, Rows)
    if kind.dim in contract:
        return Ratio() if kind.scaled else Total()
    if kind.dim in batch:
        return Rows(list(batch).index(kind.dim), kind.scaled)
    left_free = eqn.invars[0].aval.ndim - len(lc) - len(lb)
    before = sum(d < kind.dim and d not in contract and d not in batch for d in range(kind.dim))
    return Rows(len(batch) + before + (0 if kind is left else left_free), kind.scaled)


def _convolution(eqn, ins: list[Kind]) -> Kind | None:
    numbers = eqn.params["dimension_numbers"]
    if (
        isinstance(ins[0], Rows)
        and ins[0].dim >= 0
        and isinstance(ins[1], Const)
        and ins[0].dim == numbers.lhs_spec[0]
    ):
        return Rows(numbers.out_spec[0], ins[0].scaled) if eqn.params["batch_group_count"] == 1 else None
    return None


def _concatenate(eqn, ins: list[Kind]) -> Kind | None:
    return _moved(_other_dim("dimension"))(eqn, ins)


def _gather(eqn, ins: list[Kind]) -> Kind | None:
    """Rows looked up in a constant table, or a value picked from each example's own row."""
    numbers, (operand, indices) = eqn.params["dimension_numbers"], ins
    out_dims = eqn.outvars[0].aval.ndim
    from_indices = [d for d in range(out_dims) if d not in numbers.offset_dims]
    if all(isinstance(k, Const) or (isinstance(k, Rows) and k.dim < 0) for k in ins):
        return Rows(-1)
    if isinstance(operand, Const) and isinstance(indices, Rows):
        return Rows(from_indices[indices.dim])
    if (
        not isinstance(operand, Rows)
        or operand.scaled
        or operand.dim < 0
        or not isinstance(indices, (Const, Rows))
    ):
        return None
    own = list(getattr(numbers, "operand_batching_dims", ()))
    if operand.dim in own:
        at = numbers.start_indices_batching_dims[own.index(operand.dim)]
        matches = isinstance(indices, Const) or indices.dim == at
        return Rows(from_indices[at]) if matches else Mixed(_where(eqn))
    whole = eqn.params["slice_sizes"][operand.dim] == eqn.invars[0].aval.shape[operand.dim]
    kept = [d for d in range(eqn.invars[0].aval.ndim) if d not in (*numbers.collapsed_slice_dims, *own)]
    if whole and isinstance(indices, Const) and operand.dim in kept:
        return Rows(numbers.offset_dims[kept.index(operand.dim)])
    return None


def _update_slice(eqn, ins: list[Kind]) -> Kind | None:
    rows = [k for k in ins[:2] if isinstance(k, Rows)]
    if not rows or len(set(rows)) > 1 or any(not isinstance(k, Const) for k in ins[2:]):
        return None
    if rows[0].dim < 0:
        return rows[0]
    (operand, update), dim = (v.aval.shape for v in eqn.invars[:2]), rows[0].dim
    return rows[0] if operand[dim] == update[dim] else None


_KEEP = _moved(lambda eqn, dim: dim)
_REDUCE = {f"reduce_{op}": _reduction for op in ("sum", "max", "min", "prod", "and", "or")}
_RULES: dict[str, Callable[[Any, list[Kind]], Kind | None]] = {
    **_REDUCE,
    **dict.fromkeys(("argmax", "argmin"), _reduction),
    **{f"cum{op}": _moved(_other_dim("axis")) for op in ("sum", "max", "min", "prod", "logsumexp")},
    **{f"reduce_window_{op}": _moved(lambda e, d: d if e.params["window_dimensions"][d] == 1 else None)
       for op in ("sum", "max", "min")},
    "reduce_window": _moved(lambda e, d: d if e.params["window_dimensions"][d] == 1 else None),
    "broadcast_in_dim": _moved(lambda e, d: e.params["broadcast_dimensions"][d]),
    "reshape": _moved(_reshape),
    "transpose": _moved(lambda e, d: list(e.params["permutation"]).index(d)),
    "squeeze": _moved(_squeeze),
    "rev": _moved(_other_dim("dimensions")),
    "slice": _moved(_whole(lambda e: e.outvars[0].aval.shape)),
    "dynamic_slice": _moved(_whole(lambda e: e.params["slice_sizes"])),
    "dynamic_update_slice": _update_slice,
    "pad": _moved(lambda e, d: d if e.params["padding_config"][d] == (0, 0, 0) else None),
    "concatenate": _concatenate,
    "split": _moved(_other_dim("axis")),
    "sort": _moved(_other_dim("dimension")),
    "top_k": _moved(lambda e, d: d if d != e.invars[0].aval.ndim - 1 else None),
    "gather": _gather,
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "sharding_constraint": _KEEP,
}  # fmt: skip


# --- control flow -----------------------------------------------------------------------------------------------


def _join(a: Kind, b: Kind, where: str) -> Kind:
    """What a value is that may be either."""
    if a == b or isinstance(b, Const):
        return a
    if isinstance(a, Const):
        return b
    return next((k for k in (a, b) if isinstance(k, (Mixed, Unknown))), Mixed(where))


def _fixed_point(body: Callable[[list[Kind]], list[Kind]], carry: list[Kind], where: str) -> list[Kind]:
    for _ in range(8):
        new = [_join(a, b, where) for a, b in zip(carry, body(carry), strict=True)]
        if new == carry:
            break
        carry = new
    return carry


def _scan(eqn, ins: list[Kind]) -> list[Kind]:
    jaxpr = jaxprs.opened(eqn.params["jaxpr"])[0]
    consts, carried = jaxprs.scan_counts(eqn.params)
    where = _where(eqn)

    def sliced(kind: Kind) -> Kind:
        if not isinstance(kind, Rows):
            return kind
        return Rows(-1, kind.scaled) if kind.dim == 0 else Rows(kind.dim - 1, kind.scaled)

    xs = [sliced(k) for k in ins[consts + carried :]]
    carry = _fixed_point(
        lambda c: run(jaxpr, [*ins[:consts], *c, *xs])[:carried], ins[consts : consts + carried], where
    )
    ys = run(jaxpr, [*ins[:consts], *carry, *xs])[carried:]
    return [*carry, *(Rows(k.dim + 1, k.scaled) if isinstance(k, Rows) else k for k in ys)]


def _while(eqn, ins: list[Kind]) -> list[Kind]:
    p = eqn.params
    a, b = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
    body, cond = jaxprs.opened(p["body_jaxpr"])[0], jaxprs.opened(p["cond_jaxpr"])[0]
    carry = _fixed_point(lambda c: run(body, [*ins[a:b], *c]), ins[b:], _where(eqn))
    (stop,) = run(cond, [*ins[:a], *carry])
    return carry if isinstance(stop, Const) else [Unknown(_where(eqn))] * len(carry)


def _cond(eqn, ins: list[Kind]) -> list[Kind]:
    outs = [run(jaxprs.opened(branch)[0], ins[1:]) for branch in eqn.params["branches"]]
    joined = outs[0]
    for other in outs[1:]:
        joined = [_join(a, b, _where(eqn)) for a, b in zip(joined, other, strict=True)]
    return joined if isinstance(ins[0], Const) else [Mixed(_where(eqn))] * len(joined)


_STRUCTURED = {
    "scan": _scan, "while": _while, "cond": _cond, "optimization_barrier": lambda eqn, ins: ins,
    BEGIN: lambda eqn, ins: [ins[0]] * 3, END: lambda eqn, ins: [ins[0]],
}  # fmt: skip
