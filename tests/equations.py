"""The equations of a jaxpr, in all of its bodies."""

from __future__ import annotations

import jax

from jzero.core.linear import LINEAR


def equations(closed):
    """Every equation of a jaxpr, those of inner jaxprs too."""
    for eqn in getattr(closed, "jaxpr", closed).eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else [value]:
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def is_gather(eqn) -> bool:
    """A constraint from the stored to the used layout, which here is whole."""
    if eqn.primitive.name != LINEAR:
        return False
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    inner = jax.make_jaxpr(eqn.params["fn"])(*shapes).eqns
    if not inner:  # an identity with a transpose of its own
        return False
    last = inner[-1]
    return last.primitive.name == "sharding_constraint" and not any(last.params["sharding"].spec)
