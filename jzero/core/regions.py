"""Equations with bodies (remat regions, loops, branches): their bodies, and the same equation with other bodies.

A body is (jaxpr, consts). Other bodies are called with the arguments that the equation's own bodies would get.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jzero.core.jaxprs import is_literal, opened
from jzero.core.primitives import LOOPS, REMAT
from jzero.core.types import Jaxpr, JaxprEqn

Body = tuple[Jaxpr, Sequence[Any]]


def bodies(eqn: JaxprEqn) -> tuple[list[Body], int]:
    """The bodies, if any, and how many leading operands they do not get. A while loop's condition is not among them."""
    params, name = eqn.params, eqn.primitive.name
    if name == "while":
        return [opened(params["body_jaxpr"])], params["cond_nconsts"]
    if name == "cond":
        return [opened(branch) for branch in params["branches"]], 1
    return ([opened(params["jaxpr"])], 0) if name == "scan" or name in REMAT else ([], 0)


def scan_parts(eqn: JaxprEqn) -> tuple[Jaxpr, int, int]:
    """The body of a scan, and how many of its arguments are loop constants and how many are carries."""
    p = eqn.params
    if "num_consts" in p:
        consts, carry = p["num_consts"], p["num_carry"]
    else:
        first, second, _ = p["ft_in"].unpack()
        consts, carry = len(first), len(second)
    return opened(p["jaxpr"])[0], consts, carry


def kept_carries(body: Jaxpr, first: int, carried: int) -> list[bool]:
    """For each carry of a scan: does a round return it unchanged? The first is argument `first` of the body."""
    return [v is c for v, c in zip(body.outvars[:carried], body.invars[first : first + carried], strict=True)]


def while_parts(eqn: JaxprEqn) -> tuple[tuple[Jaxpr, int], tuple[Jaxpr, int]]:
    """The condition and the body of a while loop, each with the number of its own constants."""
    cond, body = (opened(eqn.params[f"{name}_jaxpr"])[0] for name in ("cond", "body"))
    return (cond, eqn.params["cond_nconsts"]), (body, eqn.params["body_nconsts"])


def through_bodies(
    eqn: JaxprEqn,
    values: Sequence[Any],
    run: Callable[[Body, list[Any]], list[Any]],
    join: Callable[[Any, Any], Any],
    *,
    sliced: Callable[[Any], Any] = lambda value: value,
    stacked: Callable[[Any], Any] = lambda value: value,
) -> list[Any] | None:
    """The values of an equation's results, from those of its operands, by way of its bodies.

    The condition of a while loop and the index of a `cond` are ignored.

    Args:
      eqn: the equation.
      values: one per operand.
      run: `run(body, values)` gives the values of the results of a body.
      join: merges two values: those of a result in two branches, or of a carry before and after a round. A loop is run
        until no carry changes.
      sliced, stacked: for a scan: from the value of a stack that it reads to that of a slice, and back for the stacks
        that it returns.

    Returns:
      None for an equation without bodies.
    """
    some, skipped = bodies(eqn)
    values, name = list(values[skipped:]), eqn.primitive.name
    if name not in LOOPS:
        outs = [run(body, values) for body in some]
        return [functools.reduce(join, row) for row in zip(*outs, strict=True)] if some else None
    first = loop_consts(eqn) - skipped
    last = first + scan_parts(eqn)[2] if name == "scan" else len(values)
    consts, carry, slices = values[:first], values[first:last], list(map(sliced, values[last:]))
    while True:
        outs = run(some[0], [*consts, *carry, *slices])
        joined = [join(a, b) for a, b in zip(carry, outs, strict=False)]
        if joined == carry:
            return [*carry, *map(stacked, outs[len(carry) :])]
        carry = joined


def loop_consts(eqn: JaxprEqn) -> int:
    """Number of leading operands of a loop that are the same in every round."""
    if eqn.primitive.name == "while":
        return sum(own for _, own in while_parts(eqn))
    return scan_parts(eqn)[1]


def handed_through(eqn: JaxprEqn, marked: Sequence[bool]) -> list[int | None]:
    """For each result of a remat region or of branches: which marked operand all bodies return unchanged, or None.

    NNX returns a module's whole state from each of its transforms.

    Args:
      eqn: the equation.
      marked: of the operands that the bodies get.
    """
    found = []
    for jaxpr, _ in bodies(eqn)[0]:
        index = {v: i for i, v in enumerate(jaxpr.invars) if marked[i]}
        found.append([None if is_literal(v) else index.get(v) for v in jaxpr.outvars])
    return [i[0] if len(set(i)) == 1 else None for i in zip(*found, strict=True)]


def remat_with(
    eqn: JaxprEqn, body: Callable[..., list[Any]], operands: Sequence[Any], policy: Callable[[Any], Any]
) -> list[Any]:
    """A remat region with another body; `policy` maps its checkpoint policy (or None) to the new one."""
    region = jax.checkpoint(body, prevent_cse=eqn.params["prevent_cse"], policy=policy(eqn.params["policy"]))
    return region(*operands)


def switch_with(
    eqn: JaxprEqn, branches: Sequence[Callable[..., list[Any]]], index: jax.Array, operands: Sequence[Any]
) -> list[Any]:
    """A `cond` or `switch` with other branches."""
    index = index.astype(np.int32) if np.dtype(index.dtype) == bool else index
    return jax.lax.switch(index, list(branches), *operands)


def scan_with(eqn: JaxprEqn, body: Callable[[Sequence[Any]], list[Any]], operands: Sequence[Any]) -> list[Any]:
    """A scan with another body. It gets one list: the constants, the carry and one slice of each stack."""
    p = eqn.params
    _, consts, carry = scan_parts(eqn)

    def one_round(state, slices):
        outs = body([*operands[:consts], *state, *slices])
        return outs[:carry], outs[carry:]

    state, stacks = jax.lax.scan(
        one_round, list(operands[consts : consts + carry]), list(operands[consts + carry :]),
        length=p["length"], reverse=p["reverse"], unroll=p["unroll"],
    )  # fmt: skip
    return [*state, *stacks]


def while_with(
    eqn: JaxprEqn, evaluate: Callable[[Jaxpr, list[Any], list[Any]], list[Any]], operands: Sequence[Any]
) -> list[Any]:
    """A while loop whose condition and body are run by `evaluate(jaxpr, consts, arguments)`."""
    a, b = while_parts(eqn)[0][1], loop_consts(eqn)

    def part(name: str, own: Sequence[Any]) -> Callable[[Any], list[Any]]:
        jaxpr, consts = opened(eqn.params[f"{name}_jaxpr"])
        return lambda state: evaluate(jaxpr, consts, [*own, *state])

    condition, body = part("cond", operands[:a]), part("body", operands[a:b])
    return jax.lax.while_loop(lambda state: condition(state)[0], body, list(operands[b:]))


def rounds(eqn: JaxprEqn) -> int:
    """How many rounds a scan has."""
    return eqn.params["length"]
