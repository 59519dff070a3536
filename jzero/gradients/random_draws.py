"""Random numbers for each example of a batch, drawn from a key that all parts of the batch would share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jzero.core.jaxprs import is_literal, opened, place_of
from jzero.core.primitives import CALLS
from jzero.core.regions import loop_consts, scan_parts, while_parts

DRAWS = ("random_bits", "random_gamma", "rng_bit_generator", "rng_uniform", "threefry2x32")
"""Primitives that make random numbers of a key."""
Sources = frozenset[int]
NONE: Sources = frozenset()


def shared_draws(a: Any, b: Any, split: Callable[[Sources], bool]) -> list[tuple[str, Sources]]:
    """Where the traces of a function draw numbers for each example from a key that is the same in all parts.

    A draw whose shape does not depend on the batch (a random projection) is the same for all examples anyway.

    Args:
      a, b: the jaxpr for a batch, and for a larger one.
      split: whether what is made of these arguments differs from part to part.

    Returns:
      For each such draw its line, and the numbers of the arguments that its key comes from: none where the function
      closes over it.
    """
    found: dict[str, Sources] = {}
    lines: list[str] = []  # of the calls that enclose an equation: JAX's own functions have none

    def walk(a, b, args: Sequence[Sources]) -> list[Sources]:
        env: dict[Any, Sources] = {**dict.fromkeys(a.constvars, NONE), **dict(zip(a.invars, args, strict=True))}

        def read(v) -> Sources:
            return NONE if is_literal(v) else env[v]

        for one, other in zip(a.eqns, b.eqns, strict=False):
            lines.append(place_of(one) or (lines[-1] if lines else ""))
            outs = equation(one, other, [read(v) for v in one.invars])
            lines.pop()
            env.update(zip(one.outvars, outs, strict=True))
        return [read(v) for v in a.outvars]

    def equation(one, other, ins: list[Sources]) -> list[Sources]:
        name = one.primitive.name
        if name in CALLS and CALLS[name] in one.params:
            return inside(one, other, CALLS[name], ins)
        if name == "shard_map":
            return inside(one, other, "jaxpr", ins)
        if name == "cond":
            pairs = zip(one.params["branches"], other.params["branches"], strict=True)
            outs = [walk(opened(x)[0], opened(y)[0], ins[1:]) for x, y in pairs]
            return [NONE.union(*some) for some in zip(*outs, strict=True)]
        if name in ("scan", "while"):
            return loop(one, other, ins)
        sources = NONE.union(*ins)
        shapes = [[v.aval.shape for v in (*e.invars, *e.outvars)] for e in (one, other)]
        if name in DRAWS and shapes[0] != shapes[1] and not split(sources):
            found[lines[-1] or name] = sources
        return [sources] * len(one.outvars)

    def inside(one, other, name: str, ins: list[Sources]) -> list[Sources]:
        return walk(opened(one.params[name])[0], opened(other.params[name])[0], ins)

    def loop(one, other, ins: list[Sources]) -> list[Sources]:
        if one.primitive.name == "scan":
            name, skipped, carried = "jaxpr", 0, scan_parts(one)[2]
        else:
            name, skipped = "body_jaxpr", while_parts(one)[0][1]
            carried = len(ins) - loop_consts(one)
        first, values = loop_consts(one), list(ins)
        while True:  # until a further round adds nothing
            outs = inside(one, other, name, values[skipped:])
            carry = [x | y for x, y in zip(values[first : first + carried], outs[:carried], strict=True)]
            if carry == values[first : first + carried]:
                return [*carry, *outs[carried:]]
            values[first : first + carried] = carry

    walk(a, b, [frozenset((i,)) for i in range(len(a.invars))])
    return list(found.items())
