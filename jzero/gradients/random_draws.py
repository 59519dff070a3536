"""Random numbers for each example of a batch, drawn from a key that all parts of the batch would share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from jzero.core.jaxprs import is_literal, opened, place_of
from jzero.core.primitives import CALLS, DRAWS
from jzero.core.regions import bodies, through_bodies

Sources = frozenset[int]
NONE: Sources = frozenset()


class Unmatched(Exception):
    """The two traces have different equations, first where the text says."""


def shared_draws(a: Any, b: Any, split: Callable[[Sources], bool]) -> list[tuple[str, Sources]]:
    """Where the traces of a function draw numbers for each example from a key that is the same in all parts.

    A draw whose shape does not depend on the batch (a random projection) is the same for all examples anyway.

    Args:
      a, b: the jaxpr for a batch, and for a larger one.
      split: whether what is computed from these arguments differs from part to part.

    Returns:
      For each such draw its line, and the numbers of the arguments that its key comes from: none where the function
      closes over it.

    Raises:
      Unmatched: the function has another equation for a larger batch.
    """
    found: dict[str, Sources] = {}
    lines: list[str] = []  # of the calls that enclose an equation: JAX's own functions have none

    def walk(a, b, args: Sequence[Sources]) -> list[Sources]:
        env: dict[Any, Sources] = {**dict.fromkeys(a.constvars, NONE), **dict(zip(a.invars, args, strict=True))}

        def read(v) -> Sources:
            return NONE if is_literal(v) else env[v]

        for one, other in zip(a.eqns, b.eqns, strict=False):
            if one.primitive is not other.primitive:
                raise Unmatched(place_of(one) or one.primitive.name)
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
        others = itertools.cycle(body for body, _ in bodies(other)[0])  # several rounds of the one body of a loop
        outs = through_bodies(one, ins, lambda body, args: walk(body[0], next(others), args), frozenset.union)
        if outs is not None:
            return outs
        sources = NONE.union(*ins)
        shapes = [[v.aval.shape for v in (*e.invars, *e.outvars)] for e in (one, other)]
        if name in DRAWS and shapes[0] != shapes[1] and not split(sources):
            found[lines[-1] or name] = sources
        return [sources] * len(one.outvars)

    def inside(one, other, name: str, ins: list[Sources]) -> list[Sources]:
        return walk(opened(one.params[name])[0], opened(other.params[name])[0], ins)

    walk(a, b, [frozenset((i,)) for i in range(len(a.invars))])
    return list(found.items())
