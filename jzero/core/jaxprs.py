"""Reads and evaluates jaxprs: everything that touches JAX's API for them, which changes between versions.

Tested on the oldest and the newest supported jax. From 0.11 on an open and a closed jaxpr are one class, and
`scan` carries trees of counts instead of `num_consts` and `num_carry`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax
from jax._src import source_info_util
from jax._src.core import EvalTrace, Tracer, trace_ctx
from jax.extend.core import Literal

from jzero.core.errors import is_array
from jzero.core.types import Jaxpr, JaxprEqn, PyTree

T = TypeVar("T")


def trace(fn: Callable[..., Sequence[Any]], *args: Any) -> tuple[Jaxpr, list[Any]]:
    """The jaxpr of a function of flat arrays to a flat list of arrays, and its constants."""
    closed: Any = jax.make_jaxpr(fn)(*args)
    return closed.jaxpr, list(closed.consts)


def of_any_leaves(make: Callable[[], T]) -> T:
    """`make()`, in which JAX builds trees whose leaves are not arrays: `args_info`, `out_info`, `lower`.

    Some states check the types of their fields when they are made (openpi's), except where a frame of JAX's `tree_util`
    is on the stack. JAX's `stages` have none.
    """
    return jax.tree.map(lambda _: make(), 0)


def split_arrays(tree: PyTree) -> tuple[list[Any], Callable[[Iterable[Any]], PyTree]]:
    """The leaves of a tree that are arrays, and a function that puts others in their place."""
    leaves, structure = jax.tree.flatten(tree)

    def merged(arrays: Iterable[Any]) -> PyTree:
        arrays = iter(arrays)
        return structure.unflatten([next(arrays) if is_array(x) else x for x in leaves])

    return [x for x in leaves if is_array(x)], merged


def opened(closed: Any) -> tuple[Jaxpr, list[Any]]:
    """A jaxpr in an equation's params, open or closed, as (jaxpr, consts)."""
    return getattr(closed, "jaxpr", closed), list(getattr(closed, "consts", ()))


def every_equation(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """The equations of an open jaxpr, including those of bodies."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for part in value if isinstance(value, (tuple, list)) else (value,):
                body = opened(part)[0]
                if hasattr(body, "eqns"):
                    yield from every_equation(body)


def is_tracer(value: object) -> bool:
    """True for an abstract value inside of a trace."""
    return isinstance(value, Tracer)


def in_trace() -> bool:
    """True inside of a trace: of `jax.jit`, `jax.grad`, `jax.eval_shape`."""
    return not isinstance(trace_ctx.trace, EvalTrace)


def in_differentiated_loop() -> bool:
    """True while the body of a loop is traced, unless gradients are taken inside of that body.

    What the body keeps for its backward pass is then stacked over the rounds.
    """
    return _in_loop(until=("JVPTrace", "LinearizeTrace"))


def in_loop() -> bool:
    """True while the body of a loop is traced, also where gradients are taken in it."""
    return _in_loop(until=())


def _in_loop(until: Sequence[str]) -> bool:
    trace: Any = trace_ctx.trace  # of private classes
    while trace is not None and type(trace).__name__ not in until:
        info = getattr(getattr(trace, "frame", None), "debug_info", None)
        if info is not None and info.traced_for in ("scan", "fori_loop", "while_body"):
            return True
        trace = getattr(trace, "parent_trace", None)
    return False


def is_literal(atom: Any) -> bool:
    """True for a constant written into the jaxpr."""
    return isinstance(atom, Literal)


@contextlib.contextmanager
def scope_of(eqn: JaxprEqn) -> Iterator[None]:
    """The name stack and context of an equation, so that what is bound again keeps its names in a profile."""
    with names_of(eqn), eqn.ctx.manager:
        yield


@contextlib.contextmanager
def names_of(eqn: JaxprEqn) -> Iterator[None]:
    """Its name stack alone, for equations that are bound again in another context, such as inside a `jax.shard_map`."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=stack):
        yield


def place_of(eqn: JaxprEqn) -> str:
    """`model.py:31 (loss)`: the user's line that an equation comes from."""
    return source_info_util.summarize(eqn.source_info)


def bind(eqn: JaxprEqn, args: Sequence[Any], *, anywhere: bool = False) -> list[Any]:
    """The equation's primitive on other arguments; always a list of results.

    `anywhere`: in any context, such as inside of a `jax.shard_map`. An equation may name a layout on Auto axes, as
    jnp.where does of what it broadcasts. Such a layout has no effect and belongs to the mesh of the trace,
    so it is left out.
    """
    params = eqn.params
    if anywhere:
        params = {k: None if k in _TYPES and _is_auto(v) else v for k, v in params.items()}
    out = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(params))
    return list(out) if eqn.primitive.multiple_results else [out]


_TYPES = ("sharding", "out_sharding")


def _is_auto(sharding: Any) -> bool:
    mesh = getattr(sharding, "mesh", None)
    return isinstance(mesh, jax.sharding.AbstractMesh) and mesh.are_all_axes_auto
