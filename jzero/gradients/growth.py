"""How a loss grows with its batch: a mean stays the same, a sum grows in proportion, anything else is refused.

[Note: two traces]
One trace cannot tell a sum from a mean: over four rows `3 * mean` and `0.75 * sum` have the same coefficients. So the
loss is traced at two batch sizes, and the traces are read side by side. Each value gets its growth: the factor by which
it becomes larger when every example appears twice. A number written into both traces grows by the ratio of the two. A
sum along a dim that is longer in the second trace grows by the ratio of the lengths, times the growth of its operand.
The growth of a product is the product of the growths. A sum of values that grow differently (a sum over examples plus
an L2 term) is mixed. The growth of the result of an operation without a rule is unknown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jzero.core.dims import dot_dims
from jzero.core.jaxprs import is_literal, is_tracer, opened
from jzero.core.primitives import CALLS, ELEMENTWISE, LINEAR_ELEMENTWISE
from jzero.core.random_keys import is_key
from jzero.core.regions import bodies, kept_carries, rounds, scan_parts, while_parts

ZERO = "zero"
"""The growth of a zero or a nan, which grows like whatever it is added to."""
NUMBERS = "numbers of the examples"
"""The growth of `arange(batch)` and of indices computed from it, which may only be used in a lookup."""
MIXED = "mixed"
"""Sums of values that grow differently, and values made from them."""
Growth = float | str | None
Traced = tuple[Any, Sequence[Any]]


def growths(small: Traced, large: Traced) -> list[Growth]:
    """For each result of a function the factor by which it grows with the batch; `MIXED`, or None if it is not known.

    Args:
      small, large: the function traced (jaxpr and consts) with two batch sizes.
    """
    (a, consts_a), (b, consts_b) = small, large
    consts = [_of_numbers(x, y) for x, y in zip(consts_a, consts_b, strict=False)]
    out = _read(a, b, consts, [1.0] * len(a.invars)) if len(consts_a) == len(consts_b) else None
    if out is None:
        return [None] * len(a.outvars)
    return [1.0 if g == ZERO else None if g == NUMBERS else g for g in out]


def _of_numbers(x: Any, y: Any) -> Growth:
    """The growth of a number, or an array, that is known in both traces."""
    if np.shape(x) != np.shape(y):
        return None
    number = hasattr(x, "dtype") and not is_tracer(x) and not is_key(x)
    if not number or (x is y and np.size(x) > 1):
        return 1.0
    x, y = np.asarray(x), np.asarray(y)
    if (x != x).all() and (y != y).all():
        return ZERO  # `jnp.var` returns nan where it has nothing to divide by
    if (x == y).all():
        return 1.0 if x.any() else ZERO
    known = x.size == 1 and x.item() != 0 and y.item() != 0
    return float(y.item()) / float(x.item()) if known else None


def _read(a: Any, b: Any, consts: Sequence[Growth], args: Sequence[Growth]) -> list[Growth] | None:
    """The growths of a jaxpr's results, read beside the same jaxpr of a larger batch; None where they are not alike."""
    if len(a.eqns) != len(b.eqns) or len(a.outvars) != len(b.outvars):
        return None
    env: dict[Any, Growth] = {**dict(zip(a.constvars, consts, strict=True)), **dict(zip(a.invars, args, strict=True))}

    def value(x, y) -> Growth:
        if not is_literal(x):
            return env[x]
        return _of_numbers(x.val, y.val) if is_literal(y) else None

    for one, other in zip(a.eqns, b.eqns, strict=True):
        if one.primitive.name != other.primitive.name or len(one.invars) != len(other.invars):
            return None
        ins = [value(x, y) for x, y in zip(one.invars, other.invars, strict=True)]
        outs = _equation(one, other, ins)
        env.update(zip(one.outvars, outs if isinstance(outs, list) else [outs] * len(one.outvars), strict=True))
    return [value(x, y) for x, y in zip(a.outvars, b.outvars, strict=True)]


def _equation(one, other, ins: list[Growth]) -> Growth | list[Growth]:
    name = one.primitive.name
    if name in CALLS and CALLS[name] in one.params:
        return _bodies(one, [one.params[CALLS[name]]], [other.params[CALLS[name]]], ins)
    if name == "shard_map":
        return _bodies(one, [one.params["jaxpr"]], [other.params["jaxpr"]], ins)
    if name == "cond":
        return _bodies(one, one.params["branches"], other.params["branches"], ins[1:]) if ins[0] == 1.0 else None
    if name in ("scan", "while"):
        return _loop(one, other, ins)
    if name == "iota":
        return 1.0 if one.outvars[0].aval.shape == other.outvars[0].aval.shape else NUMBERS
    if MIXED in ins:
        return MIXED
    if NUMBERS in ins:
        return _of_indices(one, name, ins)
    if None in ins:
        return None
    rule = _RULES.get(name)
    if rule is not None:
        return rule(one, other, ins)
    if name in LINEAR_ELEMENTWISE or name in _MOVES:
        return _alike(ins)
    return 1.0 if all(g in (1.0, ZERO) for g in ins) else None


def _of_indices(eqn, name: str, ins: list[Growth]) -> Growth:
    """The growth of what is computed from the examples' indices: rows that they look up, or other indices."""
    if name in ("gather", "dynamic_slice"):
        return None if ins[0] == NUMBERS else ins[0]
    whole = all(np.dtype(v.aval.dtype).kind in "iub" for v in (*eqn.invars, *eqn.outvars))
    return NUMBERS if whole and (name in ELEMENTWISE or name in _MOVES) and None not in ins else None


def _alike(ins: Sequence[Growth]) -> Growth:
    """The common growth of all values that are not zero; `MIXED` if they have several."""
    found = {g for g in ins if g != ZERO}
    return ZERO if not found else found.pop() if len(found) == 1 else MIXED


# --- equations with bodies ------------------------------------------------------------------------------------


def _bodies(eqn, some: Sequence[Any], others: Sequence[Any], ins: list[Growth]) -> list[Growth]:
    """Of a call, or of branches that agree."""
    found = []
    for x, y in zip(some, others, strict=True):
        (a, consts_a), (b, consts_b) = opened(x), opened(y)
        consts = [_of_numbers(*pair) for pair in zip(consts_a, consts_b, strict=False)]
        found.append(_read(a, b, consts, ins) if len(consts_a) == len(consts_b) else None)
    if any(outs is None for outs in found):
        return [None] * len(eqn.outvars)
    return [_alike(outs) if None not in outs else None for outs in zip(*found, strict=True)]


def _loop(one, other, ins: list[Growth]) -> list[Growth]:
    """A loop whose carry grows alike in every round; or one over the examples, which adds something in each."""
    scan = one.primitive.name == "scan"
    if scan:
        first, carried = scan_parts(one)[1:]
        times = rounds(other) / rounds(one)
        pair = [one.params["jaxpr"]], [other.params["jaxpr"]]
        own, rest = ins[:first], ins[first + carried :]
    else:
        (_, skipped), (_, consts) = while_parts(one)
        first, carried, times = skipped + consts, len(ins) - skipped - consts, 1.0
        pair = [one.params["body_jaxpr"]], [other.params["body_jaxpr"]]
        own, rest = ins[skipped:first], []
    if NUMBERS in ins:
        return [None] * len(one.outvars)
    start = carry = ins[first : first + carried]
    for _ in range(4):
        outs = _bodies(one, *pair, [*own, *carry, *rest])
        new = [_alike([a, b]) if None not in (a, b) else None for a, b in zip(carry, outs, strict=False)]
        if new == carry:
            break
        carry = new
    else:
        return [None] * len(one.outvars)
    if times == 1.0:
        return [*carry, *outs[carried:]]
    sums = _sums_up(bodies(one)[0][0][0], first, carried)
    kept = kept_carries(bodies(one)[0][0][0], first, carried)
    totals = [
        g * times if isinstance(g, float) and s and z == ZERO else g if k else None
        for g, s, z, k in zip(carry, sums, start, kept, strict=True)
    ]
    return [*totals, *outs[carried:]]


def _sums_up(body, first: int, carried: int) -> list[bool]:
    """For each carry of a scan: does a round only add something to it that does not depend on any carry?"""
    made = {v: e for e in body.eqns for v in e.outvars}
    carries = body.invars[first : first + carried]

    def reads(v, seen) -> bool:
        if is_literal(v) or v in seen:
            return False
        seen.add(v)
        return v in carries or (v in made and any(reads(x, seen) for x in made[v].invars))

    def adds(v, carry) -> bool:
        eqn = None if is_literal(v) else made.get(v)
        if eqn is None or eqn.primitive.name not in ("add", "add_any"):
            return False
        rest = [x for x in eqn.invars if is_literal(x) or x is not carry]
        return len(rest) == 1 and not reads(rest[0], set())

    return [adds(v, c) for v, c in zip(body.outvars[:carried], carries, strict=True)]


# --- equations ------------------------------------------------------------------------------------------------


def _longer(one, other, at: int, dims: Sequence[int]) -> float:
    """The factor by which these dims of an operand are longer in the larger batch."""
    a, b = one.invars[at].aval.shape, other.invars[at].aval.shape
    return math.prod(b[d] / a[d] for d in dims)


def _product(_, __, ins):
    return ZERO if ZERO in ins else ins[0] * ins[1]


def _quotient(_, __, ins):
    return ZERO if ins[0] == ZERO else None if ins[1] == ZERO else ins[0] / ins[1]


def _power(exponent: Callable[[Any], float]):
    return lambda one, _, ins: ZERO if ins[0] == ZERO else ins[0] ** exponent(one)


def _bounded(_, __, ins):
    """`max(count, 1)`: grows as the count does."""
    grows = {g for g in ins if g not in (1.0, ZERO)}
    return _alike(ins) if not grows else grows.pop() if len(grows) == 1 else None


def _selected(_, __, ins):
    return _alike(ins[1:]) if ins[0] in (1.0, ZERO) else None


def _sum(one, other, ins):
    return ZERO if ins[0] == ZERO else ins[0] * _longer(one, other, 0, one.params["axes"])


def _dot(one, other, ins):
    (left, _), _ = dot_dims(one)
    return ZERO if ZERO in ins else ins[0] * ins[1] * _longer(one, other, 0, left)


def _along(one, other, ins):
    """A running sum along a dim; unknown if that is the dim of the examples."""
    return ins[0] if _longer(one, other, 0, [one.params["axis"]]) == 1 else None


def _scattered(one, other, ins):
    """Unknown if more updates go to the same number of places: how many are summed in one place is not known."""
    same = one.outvars[0].aval.shape == other.outvars[0].aval.shape
    more = one.invars[2].aval.shape != other.invars[2].aval.shape
    return None if same and more else _alike([ins[0], ins[2]])


_RULES: dict[str, Callable[[Any, Any, list[Any]], Growth]] = {
    "mul": _product,
    "div": _quotient,
    "integer_pow": _power(lambda eqn: eqn.params["y"]),
    "square": _power(lambda _: 2),
    "sqrt": _power(lambda _: 0.5),
    "rsqrt": _power(lambda _: -0.5),
    "dot_general": _dot,
    "conv_general_dilated": _product,
    "reduce_sum": _sum,
    "reduce_prod": lambda one, other, ins: 1.0
    if ins[0] == 1.0 and _longer(one, other, 0, one.params["axes"]) == 1
    else None,
    "select_n": _selected,
    **dict.fromkeys(("max", "min", "clamp"), _bounded),
    **dict.fromkeys(("add", "sub", "add_any", "abs", "reduce_max", "reduce_min"), lambda _, __, ins: _alike(ins)),
    **dict.fromkeys(("gt", "ge", "lt", "le", "eq", "ne", "sign", "is_finite", "argmax", "argmin"),
                    lambda _, __, ins: 1.0),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _along),
    **dict.fromkeys(("gather", "dynamic_slice"), lambda _, __, ins: ins[0]),
    **dict.fromkeys(("scatter-add", "scatter", "scatter_add"), _scattered),
}  # fmt: skip

_MOVES = frozenset(
    """
    broadcast_in_dim reshape transpose squeeze expand_dims slice concatenate pad rev sort dynamic_update_slice
    optimization_barrier sharding_constraint reduce_precision split
    """.split()  # noqa: SIM905 - one name per line would fill a page
)
"""Pass on the values of their operands."""
