"""What the results of a function depend on, read from its jaxpr: nothing runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jzero.core.jaxprs import bind, is_tracer, opened, trace
from jzero.core.primitives import CALLS, INLINE, KEEPS_ZERO
from jzero.core.random_keys import is_key
from jzero.core.regions import Body, through_bodies
from jzero.core.traversal import Rule, traverse
from jzero.core.types import Aval, Jaxpr, JaxprEqn, PyTree
from jzero.core.update_mark import FROZEN, UPDATE

Sources = frozenset[Any]
NOTHING: Sources = frozenset()
UNMIXED = ("optimization_barrier", "device_put", UPDATE, FROZEN)
"""Primitives with many operands, each of which is a result of its own."""


def constant_zero_outputs(fn: Callable[..., list[Any]], *trees: PyTree) -> list[bool]:
    """For each output of `fn`, whether it is zero whatever the inputs are.

    Args:
      fn: a function of trees to a flat list.
      *trees: arrays or ShapeDtypeStructs.
    """

    def is_zero(value: Any) -> bool:
        return not is_key(value) and not np.any(np.asarray(value))

    def rule(eqn: JaxprEqn, zeros: list[bool]) -> list[bool]:
        name = eqn.primitive.name
        if name in KEEPS_ZERO:
            return [zeros[0]]
        if name in ("add", "sub", "select_n"):
            return [all(zeros[1:] if name == "select_n" else zeros)]
        return [False] * len(eqn.outvars)

    return _analyzed(fn, trees, rule, lambda i, x: False, literal=is_zero, const=False)


def sources_of_outputs(fn: Callable[..., list[Any]], *trees: PyTree) -> list[frozenset[int]]:
    """For each output of `fn` the numbers of the arrays of the first tree that have a part in it.

    Args:
      fn: a function of trees to a flat list.
      *trees: arrays or ShapeDtypeStructs.
    """
    count = len(jax.tree.leaves(trees[0]))

    def rule(eqn: JaxprEqn, sources: list[Sources]) -> list[Sources]:
        return [NOTHING.union(*sources)] * len(eqn.outvars)

    def start(i: int, _: Any) -> Sources:
        return frozenset((i,)) if i < count else NOTHING

    return _analyzed(fn, trees, rule, start, literal=lambda _: NOTHING, const=NOTHING, calls=CALLS)


class _Raised(NamedTuple):
    """An integer: an input (None: zero) with a constant added; or whether that input is below the end of its dtype."""

    of: int | None
    by: int
    is_below: bool = False


def raised_inputs(fn: Callable[..., list[Any]], *trees: PyTree) -> list[int | None]:
    """For each output of `fn` the input that it equals plus a constant, whatever the inputs are; else None.

    Only integer scalars of at least 32 bits. A count that stops at the maximum of its dtype, as optax's do, is found;
    one that is raised only in some cases (a `cond`, a product) is not.

    Args:
      fn: a function of trees to a flat list.
      *trees: arrays or ShapeDtypeStructs.
    """

    def is_count(x: Any) -> bool:
        return np.shape(x) == () and jnp.issubdtype(x.dtype, jnp.integer) and x.dtype.itemsize >= 4

    def constant(value: Any) -> _Raised | None:
        return _Raised(None, int(value)) if not is_tracer(value) and is_count(np.asarray(value)) else None

    def end(x: Aval) -> _Raised:
        return _Raised(None, int(jnp.iinfo(x.dtype).max))

    def rule(eqn: JaxprEqn, values: list[Any]) -> list[_Raised | None]:
        return [None if None in values else result(eqn, values), *[None] * (len(eqn.outvars) - 1)]

    def result(eqn: JaxprEqn, values: list[_Raised]) -> _Raised | None:
        name, first, out = eqn.primitive.name, eqn.invars[0].aval, eqn.outvars[0].aval
        a, b = values[0], values[-1]
        if name in ("convert_element_type", "copy") and is_count(first) and is_count(out):
            return a
        if name == "add" and is_count(out) and None in (a.of, b.of):
            return _Raised(b.of if a.of is None else a.of, a.by + b.by)
        if name == "lt" and is_count(first) and a.of is not None and a.by == 0 and b == end(first):
            return _Raised(a.of, 0, is_below=True)
        if name == "select_n" and is_count(out) and values[1:] == [end(out), b]:
            return b if a == _Raised(b.of, 0, is_below=True) and b.by == 1 else None
        return None

    def start(i: int, x: Any) -> _Raised | None:
        return _Raised(i, 0) if is_count(x) else None

    found = _analyzed(fn, trees, rule, start, literal=constant, const=None)
    return [None if x is None or x.by == 0 else x.of for x in found]


def _analyzed(
    fn: Callable[..., list[Any]],
    trees: Sequence[PyTree],
    rule: Rule,
    start: Callable[[int, Any], Any],
    *,
    literal: Callable[[Any], Any],
    const: Any,
    calls: Collection[str] = INLINE,
) -> list[Any]:
    """An analysis by rule of a function of trees: the values of its outputs; `start(i, x)` is that of array i."""
    leaves, tree = jax.tree.flatten(trees)
    jaxpr, consts = trace(lambda *flat: fn(*jax.tree.unflatten(tree, flat)), *leaves)
    known = [start(i, x) for i, x in enumerate(leaves)]
    return traverse(jaxpr, [const] * len(consts), known, rule, literal=literal, calls=calls)


def data_sources(
    jaxpr: Jaxpr, consts: Sequence[Any], sources: Sequence[Sources], ends: Collection[str] = ()
) -> list[Sources]:
    """For each result of a jaxpr the sources of all arguments whose values may be in it.

    What only decides between values is not one of them: the predicate of a select or a `cond`, the condition of a loop.

    Args:
      jaxpr, consts: a traced function.
      sources: of each argument.
      ends: names of primitives whose results have no sources.
    """

    def rule(eqn: JaxprEqn, values: list[Sources], inside: Callable[..., list[Sources]]) -> list[Sources]:
        name = eqn.primitive.name
        if name in ends:
            return [NOTHING] * len(eqn.outvars)
        if name in UNMIXED:
            return values
        if name == "select_n":
            return [NOTHING.union(*values[1:])]
        if name == "shard_map":
            return inside(opened(eqn.params["jaxpr"]), values)
        found = through_bodies(eqn, values, inside, frozenset.union)
        return [NOTHING.union(*values)] * len(eqn.outvars) if found is None else found

    return _through((jaxpr, consts), sources, rule, NOTHING)


def passed_on(jaxpr: Jaxpr, consts: Sequence[Any]) -> list[int | None]:
    """For each result of a jaxpr the number of the argument that it is, unchanged; None where it is another value.

    NNX returns a module's whole state from each of its transforms, also what they only read.
    """

    def same(a: Any, b: Any) -> Any:
        return a if a == b else None

    def rule(eqn: JaxprEqn, values: list[Any], inside: Callable[..., list[Any]]) -> list[Any]:
        if eqn.primitive.name == "optimization_barrier":
            return values

        def stacked(x: Any) -> Any:
            return x[1] if isinstance(x, tuple) and x[0] == id(eqn) else None

        found = through_bodies(eqn, values, inside, same, sliced=lambda x: (id(eqn), x), stacked=stacked)
        return [None] * len(eqn.outvars) if found is None else found

    return _through((jaxpr, consts), range(len(jaxpr.invars)), rule, None)


def _through(body: Body, values: Sequence[Any], rule: Callable[..., list[Any]], const: Any) -> list[Any]:
    """The values of a body's results by `rule(eqn, values, inside)`; `inside(body, values)` is for its bodies."""

    def inside(body: Body, values: Sequence[Any]) -> list[Any]:
        jaxpr, consts = body
        known = [const] * len(consts)
        return traverse(jaxpr, known, values, lambda *row: rule(*row, inside), literal=lambda _: const, calls=CALLS)

    return inside(body, values)


def wide_sources(
    fn: Callable[[], Sequence[Any]], count: int, dtype_of: Callable[[int], np.dtype | None]
) -> Callable[[], tuple[list[Any], list[Any]]]:
    """A function like `fn` that returns, besides its outputs, the wider values that its first `count` were cast from.

    A creation function that makes fp32 weights and casts them ends in `convert_element_type`; what goes into
    that cast is the better master. Output i of the extra list is the value in `dtype_of(i)`, or None where
    the output was made in its own dtype.
    """
    jaxpr, consts = trace(lambda: list(fn()))

    def rule(eqn: JaxprEqn, pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Each value comes with the operand of the cast that made it, or None."""
        values = [value for value, _ in pairs]
        outs = bind(eqn, values)
        if eqn.primitive.name == "convert_element_type" and _narrows(values[0], outs[0]):
            return [(outs[0], values[0])]
        return [(out, None) for out in outs]

    def both():
        pairs = traverse(jaxpr, [(c, None) for c in consts], [], rule, literal=lambda value: (value, None))
        wide = [w if w is not None and dtype_of(i) == w.dtype else None for i, (_, w) in enumerate(pairs[:count])]
        return [v for v, _ in pairs], wide

    return both


def _narrows(old: jax.Array, new: jax.Array) -> bool:
    return old.dtype.itemsize > new.dtype.itemsize and jnp.issubdtype(old.dtype, jnp.floating)
