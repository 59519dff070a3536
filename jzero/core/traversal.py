"""One pass over a jaxpr: for each equation a rule computes the values of its results from those of its operands.

The values may be arrays (an evaluation) or what is known of arrays (an analysis): the rule decides.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from jzero.core.jaxprs import is_literal, opened, scope_of
from jzero.core.primitives import CALLS, INLINE
from jzero.core.types import Jaxpr, JaxprEqn, Var

Rule = Callable[[JaxprEqn, list[Any]], list[Any]]


def traverse(
    jaxpr: Jaxpr,
    consts: Sequence[Any],
    args: Sequence[Any],
    rule: Rule,
    *,
    literal: Callable[[Any], Any],
    calls: Collection[str] = INLINE,
) -> list[Any]:
    """The values of a jaxpr's results.

    Args:
      jaxpr: open.
      consts, args: the values of its constants and arguments.
      rule: `rule(eqn, values)` gives the values of an equation's results.
      literal: gives the value of a constant that is written into the jaxpr.
      calls: names of the calls whose body is entered; the rule sees its equations. Other calls are left to the rule.
    """
    env: dict[Var, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return literal(atom.val) if is_literal(atom) else env[atom]

    for eqn in jaxpr.eqns:
        values, name = [read(a) for a in eqn.invars], eqn.primitive.name
        with scope_of(eqn):
            if name in calls and CALLS[name] in eqn.params:
                body, inner = opened(eqn.params[CALLS[name]])
                outs = traverse(body, [literal(c) for c in inner], values, rule, literal=literal, calls=calls)
            else:
                outs = rule(eqn, values)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(a) for a in jaxpr.outvars]
