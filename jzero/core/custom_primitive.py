"""A primitive of our own, with its rules in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def custom_primitive(
    name: str,
    run: Callable[..., Any],
    *,
    jvp: Callable[..., Any],
    batch: Callable[..., Any],
    out_avals: Callable[..., Any] | None = None,
    several: bool = True,
) -> Primitive:
    """A primitive that runs, and is compiled, as a function.

    Args:
      name: its name in jaxprs.
      run: `run(*arrays, **params)`; it is not differentiated through.
      jvp: `jvp(primals, tangents, **params)`.
      batch: `batch(values, dims, **params)`.
      out_avals: `out_avals(*avals, **params)`; None: `run` takes abstract values too.
      several: `run` returns a list.
    """
    p = Primitive(name)
    p.multiple_results = several
    p.def_impl(run)
    p.def_abstract_eval(out_avals or run)
    ad.primitive_jvps[p] = jvp
    batching.primitive_batchers[p] = batch
    mlir.register_lowering(p, mlir.lower_fun(run, multiple_results=several))
    return p
