"""What the results of a function depend on, read from its jaxpr: nothing runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jzero.core.jaxprs import bind, is_tracer, opened, trace
from jzero.core.primitives import CALLS, KEEPS_ZERO
from jzero.core.regions import bodies, loop_consts, scan_parts
from jzero.core.traversal import Rule, traverse


def constant_zero_outputs(fn: Callable, *trees) -> list[bool]:
    """For each output of `fn`, whether it is zero whatever the inputs are.

    Args:
      fn: a function of trees to a flat list.
      *trees: arrays or ShapeDtypeStructs.
    """

    def is_zero(value) -> bool:
        key = hasattr(value, "dtype") and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
        return not key and not np.any(np.asarray(value))

    def rule(eqn, zeros: list[bool]) -> list[bool]:
        name = eqn.primitive.name
        if name in KEEPS_ZERO:
            return [zeros[0]]
        if name in ("add", "sub", "select_n"):
            return [all(zeros[1:] if name == "select_n" else zeros)]
        return [False] * len(eqn.outvars)

    return _analyzed(fn, trees, rule, start=False, literal=is_zero)


def independent_outputs(fn: Callable, *trees) -> list[bool]:
    """For each output of `fn`, whether no input has any part in it.

    Args:
      fn: a function of trees to a flat list.
      *trees: arrays or ShapeDtypeStructs.
    """

    def rule(eqn, depend: list[bool]) -> list[bool]:
        return [any(depend)] * len(eqn.outvars)

    return [not d for d in _analyzed(fn, trees, rule, start=True, literal=lambda value: False)]


def sources_of_outputs(fn: Callable, *trees) -> list[frozenset[int]]:
    """For each output of `fn` the numbers of the arrays of the first tree that have a part in it.

    Args:
      fn: a function of trees to a flat list.
      *trees: arrays or ShapeDtypeStructs.
    """
    nothing: frozenset[int] = frozenset()
    leaves, tree = jax.tree.flatten(trees)
    jaxpr, consts = trace(lambda *flat: fn(*jax.tree.unflatten(tree, flat)), *leaves)

    def rule(eqn, sources: list[frozenset[int]]) -> list[frozenset[int]]:
        return [nothing.union(*sources)] * len(eqn.outvars)

    count = len(jax.tree.leaves(trees[0]))
    start = [frozenset((i,)) if i < count else nothing for i in range(len(leaves))]
    return traverse(jaxpr, [nothing] * len(consts), start, rule, literal=lambda _: nothing, calls=CALLS)


class _Raised(NamedTuple):
    """An integer: an input (None: zero) with a constant added; or whether that input is below the end of its dtype."""

    of: int | None
    by: int
    is_below: bool = False


def raised_inputs(fn: Callable, *trees) -> list[int | None]:
    """For each output of `fn` the input that it is with a constant added, whatever the inputs are; else None.

    Integer scalars of at least 32 bits. A count that stays at the end of its dtype once it is there, as optax's do, is
    one; one that is raised in some cases only (a `cond`, a product) is not.

    Args:
      fn: a function of trees to a flat list.
      *trees: arrays or ShapeDtypeStructs.
    """

    def is_count(x) -> bool:
        return np.shape(x) == () and jnp.issubdtype(x.dtype, jnp.integer) and x.dtype.itemsize >= 4

    def constant(value) -> _Raised | None:
        return _Raised(None, int(value)) if not is_tracer(value) and is_count(np.asarray(value)) else None

    def end(x) -> _Raised:
        return _Raised(None, int(jnp.iinfo(x.dtype).max))

    def rule(eqn, values: list[Any]) -> list[Any]:
        return [None if None in values else result(eqn, values), *[None] * (len(eqn.outvars) - 1)]

    def result(eqn, values: list[_Raised]) -> _Raised | None:
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

    leaves, tree = jax.tree.flatten(trees)
    jaxpr, consts = trace(lambda *flat: fn(*jax.tree.unflatten(tree, flat)), *leaves)
    start = [_Raised(i, 0) if is_count(x) else None for i, x in enumerate(leaves)]
    found = traverse(jaxpr, [None] * len(consts), start, rule, literal=constant)
    return [None if x is None or x.by == 0 else x.of for x in found]


def _analyzed(fn: Callable, trees, rule: Rule, *, start: bool, literal: Callable[[Any], bool]) -> list[bool]:
    leaves, tree = jax.tree.flatten(trees)
    jaxpr, consts = trace(lambda *flat: fn(*jax.tree.unflatten(tree, flat)), *leaves)
    return traverse(jaxpr, [False] * len(consts), [start] * len(leaves), rule, literal=literal)


def data_sources(
    jaxpr: Any, consts: Sequence[Any], sources: Sequence[frozenset[Any]]
) -> list[frozenset[Any]]:
    """For each result of a jaxpr the sources of all arguments whose values may be in it.

    What only decides between values is not one of them: the predicate of a select or a `cond`, the condition of a loop.

    Args:
      jaxpr, consts: a traced function.
      sources: of each argument.
    """
    nothing: frozenset[Any] = frozenset()

    def inside(body, values):
        inner, own = body
        return traverse(inner, [nothing] * len(own), values, rule, literal=lambda _: nothing, calls=CALLS)

    def rule(eqn, values: list[frozenset[Any]]) -> list[frozenset[Any]]:
        name = eqn.primitive.name
        if name == "select_n":
            return [nothing.union(*values[1:])]
        if name == "cond":
            branches, skipped = bodies(eqn)
            outs = [inside(body, values[skipped:]) for body in branches]
            return [nothing.union(*some) for some in zip(*outs, strict=True)]
        if name in ("scan", "while"):
            (body,), skipped = bodies(eqn)
            first = loop_consts(eqn)
            carried = scan_parts(eqn)[2] if name == "scan" else len(values) - first
            while True:  # until a further round adds nothing
                outs = inside(body, values[skipped:])
                carry = [a | b for a, b in zip(values[first:], outs[:carried], strict=False)][:carried]
                if carry == values[first : first + carried]:
                    return [*carry, *outs[carried:]]
                values = [*values[:first], *carry, *values[first + carried :]]
        if name == "shard_map":
            return inside(opened(eqn.params["jaxpr"]), values)
        return [nothing.union(*values)] * len(eqn.outvars)

    return inside((jaxpr, consts), sources)


def passed_on(jaxpr: Any, consts: Sequence[Any]) -> list[int | None]:
    """For each result of a jaxpr the number of the argument that it is, unchanged; None where it is another value.

    NNX returns a module's whole state from each of its transforms, also what they only read.
    """

    def inside(body, values):
        inner, own = body
        return traverse(inner, [None] * len(own), values, rule, literal=lambda _: None, calls=CALLS)

    def rule(eqn, values: list[int | None]) -> list[int | None]:
        name = eqn.primitive.name
        if name == "optimization_barrier":
            return values
        if name == "shard_map":
            return [None] * len(eqn.outvars)
        if name == "cond":
            branches, skipped = bodies(eqn)
            outs = [inside(body, values[skipped:]) for body in branches]
            return [some[0] if len(set(some)) == 1 else None for some in zip(*outs, strict=True)]
        if name in ("scan", "while"):
            (body,), skipped = bodies(eqn)
            first = loop_consts(eqn) - skipped
            values = values[skipped:]
            carried = scan_parts(eqn)[2] if name == "scan" else len(values) - first
            outs = inside(body, list(range(len(values))))  # a carry that each round hands on, a stack that comes back
            kept = [o == first + i for i, o in enumerate(outs[:carried])]
            stacks = [o is not None and o >= first + carried for o in outs[carried:]]
            return [values[o] if k and o is not None else None for o, k in zip(outs, kept + stacks, strict=True)]
        return [None] * len(eqn.outvars)

    return inside((jaxpr, consts), list(range(len(jaxpr.invars))))


def wide_sources(
    fn: Callable[[], Sequence[Any]], count: int, dtype_of: Callable[[int], Any]
) -> Callable[[], tuple[list[Any], list[Any]]]:
    """A function like `fn` that returns, besides its outputs, the wider values that its first `count` were cast from.

    A creation function that makes fp32 weights and casts them ends in `convert_element_type`; what goes into
    that cast is the better master. Output i of the extra list is the value in `dtype_of(i)`, or None where
    the output was made in its own dtype.
    """
    jaxpr, consts = trace(lambda: list(fn()))

    def rule(eqn, pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Each value comes with the operand of the cast that made it, or None."""
        values = [value for value, _ in pairs]
        outs = bind(eqn, values)
        if eqn.primitive.name == "convert_element_type" and _narrows(values[0], outs[0]):
            return [(outs[0], values[0])]
        return [(out, None) for out in outs]

    def both():
        pairs = traverse(jaxpr, [(c, None) for c in consts], [], rule, literal=lambda value: (value, None))
        firsts = enumerate(wide for _, wide in pairs[:count])
        return [v for v, _ in pairs], [
            w if w is not None and dtype_of(i) == w.dtype else None for i, w in firsts
        ]

    return both


def _narrows(old, new) -> bool:
    return old.dtype.itemsize > new.dtype.itemsize and jnp.issubdtype(old.dtype, jnp.floating)
