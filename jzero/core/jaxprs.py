"""All that touches JAX's jaxpr API, which moves between versions: open one, bind one equation, read its parts.

Tested on the oldest and the newest supported jax. From 0.11 on an open and a closed jaxpr are one class, and
`scan` carries trees of counts instead of `num_consts` and `num_carry`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax._src import source_info_util
from jax._src.core import EvalTrace, Tracer, trace_ctx
from jax.extend.core import Literal

from jzero.core.errors import is_array


def trace(fn: Callable, *args) -> tuple[Any, list[Any]]:
    """The closed jaxpr of a function of flat arrays to a flat list of arrays, and its consts."""
    closed = jax.make_jaxpr(fn)(*args)
    return closed.jaxpr, list(closed.consts)


def split_arrays(tree: Any) -> tuple[list[Any], Callable[[Iterable[Any]], Any]]:
    """The leaves of a tree that are arrays, and a function that puts others in their place."""
    leaves, structure = jax.tree.flatten(tree)

    def merged(arrays: Iterable[Any]) -> Any:
        arrays = iter(arrays)
        return structure.unflatten([next(arrays) if is_array(x) else x for x in leaves])

    return [x for x in leaves if is_array(x)], merged


def opened(closed) -> tuple[Any, list[Any]]:
    """A jaxpr in an equation's params, open or closed, as (jaxpr, consts)."""
    return getattr(closed, "jaxpr", closed), list(getattr(closed, "consts", ()))


def every_equation(jaxpr: Any) -> Iterator[Any]:
    """The equations of an open jaxpr, those of bodies included."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for part in value if isinstance(value, (tuple, list)) else (value,):
                body = opened(part)[0]
                if hasattr(body, "eqns"):
                    yield from every_equation(body)


def is_tracer(value) -> bool:
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
    trace: Any = trace_ctx.trace
    while trace is not None and type(trace).__name__ not in until:
        info = getattr(getattr(trace, "frame", None), "debug_info", None)
        if info is not None and info.traced_for in ("scan", "fori_loop", "while_body"):
            return True
        trace = getattr(trace, "parent_trace", None)
    return False


def is_literal(atom) -> bool:
    """True for a constant written into the jaxpr."""
    return isinstance(atom, Literal)


@contextlib.contextmanager
def scope_of(eqn) -> Iterator[None]:
    """The name stack and context of an equation, so that what is bound again keeps its names in a profile."""
    with names_of(eqn), eqn.ctx.manager:
        yield


@contextlib.contextmanager
def names_of(eqn) -> Iterator[None]:
    """Its name stack alone, for equations that are bound again in another context, such as inside a `jax.shard_map`."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=stack):
        yield


def place_of(eqn) -> str:
    """`model.py:31 (loss)`: the user's line that an equation comes from."""
    return source_info_util.summarize(eqn.source_info)


def bind(eqn, args: Sequence[Any], *, anywhere: bool = False) -> list[Any]:
    """The equation's primitive on other arguments; always a list of results.

    `anywhere`: in any context, as inside of a `jax.shard_map`. A layout on Auto axes that the equation names (jnp.where
    does so of what it broadcasts) says nothing, and is of the mesh that it was traced under: it is left out.
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
