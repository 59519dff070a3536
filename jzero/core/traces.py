"""The traces that compiled programs were made from: kept for those that jzero has lowered itself."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import jax

from jzero.core.nnx_modules import abstract
from jzero.core.types import Jaxpr

Stage = TypeVar("Stage")

# Set while a function is traced for the walk: a wrapped `apply_fn` in a wrapped loss leaves the walk to the loss.
# JAX's own kind of context, since it is part of the keys under which `jax.jit` keeps what it has traced.
_as_written = jax.make_user_context(False)


# The plan of the wrapped function that is running; None outside of one.
planned = jax.make_user_context(None)


@contextlib.contextmanager
def as_written() -> Iterator[None]:
    """Wrapped functions only call what they wrap: for a trace that is read, or walked from outside."""
    with _as_written(True):
        yield


def is_as_written() -> bool:
    """True within `as_written`."""
    return _as_written.value


@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
    """How a program was traced.

    Attributes:
      jaxpr: closed; its arguments are the flat arguments of the program, including those that it does not use.
      again: traces the same function once more, as `jax.jit(fn).trace` does.
    """

    jaxpr: Jaxpr
    again: Callable[[], Any]


_traces: WeakKeyDictionary[jax.stages.Compiled, Trace] = WeakKeyDictionary()


def trace_of(compiled: jax.stages.Compiled) -> Trace | None:
    """The trace of a program of `pod.compile` or of `jzero.jit(...).lower(...).compile()`; None for any other."""
    return _traces.get(compiled)


def keep_trace(compiled: jax.stages.Compiled, trace: Trace) -> None:
    """Makes `trace_of` know the program."""
    _traces[compiled] = trace


def traced(jitted: Any, *args: Any, **kwargs: Any) -> tuple[Any, Trace]:
    """What `jitted.trace` returns for these arguments, and the trace to keep, which holds none of their arrays."""
    stage: Any = jitted.trace(*args, **kwargs)
    shapes, named = abstract((args, kwargs))
    return stage, Trace(innermost(stage, jax.stages.Traced).jaxpr, functools.partial(jitted.trace, *shapes, **named))


def innermost(stage: Any, kind: type[Stage]) -> Stage:
    """The `jax.stages` object of a kind that others wrap (flax.nnx and equinox have stages of their own)."""
    name = kind.__name__.lower()
    while not isinstance(stage, kind) and hasattr(stage, name):
        stage = getattr(stage, name)
    return stage


def keeping(lowered: Any, trace: Trace, options: Mapping[str, Any] | None = None) -> Any:
    """The same lowered program; `trace_of` will know what is compiled from it, with these options of XLA."""
    inner = innermost(lowered, jax.stages.Lowered)
    compile_lowered = inner.compile

    def compiled(compiler_options=None, **kwargs):
        program = compile_lowered({**(options or {}), **(compiler_options or {})} or None, **kwargs)
        keep_trace(program, trace)
        return program

    inner.compile = compiled
    return lowered
