"""The traces that compiled programs were made from: kept for those that jzero has lowered itself."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import jax

from jzero.core.nnx_modules import abstract


@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
    """How a program was traced.

    Attributes:
      jaxpr: closed; its arguments are the flat arguments of the program, those that it does not use included.
      again: traces the same function once more, as `jax.jit(fn).trace` does.
    """

    jaxpr: Any
    again: Callable[[], Any]


_kept: WeakKeyDictionary[jax.stages.Compiled, Trace] = WeakKeyDictionary()


def trace_of(compiled: jax.stages.Compiled) -> Trace | None:
    """The trace of a program of `pod.compile` or of `jzero.jit(...).lower(...).compile()`; None for any other."""
    return _kept.get(compiled)


def keep_trace(compiled: jax.stages.Compiled, trace: Trace) -> None:
    """Makes `trace_of` know the program."""
    _kept[compiled] = trace


def traced(jitted: Any, *args, **kwargs) -> tuple[Any, Trace]:
    """What `jitted.trace` returns for these arguments, and the trace to keep; the arrays among them are not kept."""
    stage = jitted.trace(*args, **kwargs)
    again = functools.partial(_again, jitted, abstract((args, kwargs)))
    return stage, Trace(innermost(stage, jax.stages.Traced).jaxpr, again)


def _again(jitted, given) -> Any:
    args, kwargs = given
    return jitted.trace(*args, **kwargs)


def innermost(stage: Any, kind: type) -> Any:
    """The `jax.stages` object of a kind that others wrap (flax.nnx and equinox have stages of their own)."""
    name = kind.__name__.lower()
    while not isinstance(stage, kind) and hasattr(stage, name):
        stage = getattr(stage, name)
    return stage


def keeping(lowered: Any, trace: Trace) -> Any:
    """The same lowered program; what it is compiled to keeps the trace."""
    inner = innermost(lowered, jax.stages.Lowered)
    compile_lowered = inner.compile

    def compiled(*args, **kwargs):
        program = compile_lowered(*args, **kwargs)
        keep_trace(program, trace)
        return program

    inner.compile = compiled
    return lowered
