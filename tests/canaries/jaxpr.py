"""Small traces to look at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def equation(fn, *args, named: Sequence[str] = ()) -> Any:
    """The first equation of a function, or the first with one of these names, calls entered."""
    import jax

    def search(jaxpr):
        for eqn in jaxpr.eqns:
            if not named or eqn.primitive.name in named:
                return eqn
            inner = (eqn.params.get(k) for k in ("jaxpr", "call_jaxpr"))
            for body in (x for x in inner if x is not None):
                found = search(getattr(body, "jaxpr", body))
                if found is not None:
                    return found
        return None

    jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    found = search(jaxpr)
    if found is None:
        names = ", ".join(dict.fromkeys(e.primitive.name for e in jaxpr.eqns))
        raise AssertionError(f"no equation named {' or '.join(named)}, but {names}")
    return found


def matrix(*shape, dtype="float32"):
    import jax.numpy as jnp

    return jnp.ones(shape or (4, 4), dtype)


def names(fn, *args) -> list[str]:
    """Names of a function's primitives, in order, calls by `jit` entered."""
    import jax

    def inside(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in ("jit", "pjit"):
                body = eqn.params["jaxpr"]
                yield from inside(getattr(body, "jaxpr", body))
            else:
                yield eqn.primitive.name

    return list(inside(jax.make_jaxpr(fn)(*args).jaxpr))
