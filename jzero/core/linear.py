"""Linear functions with a transpose of our own: it says what runs in the backward pass, and where its collectives are.

[Note: not jax.custom_derivatives.linear_call]
The public function has no rule for `vmap`, and asserts that nothing but the linear arguments has a tangent (jax 0.10.2
to 0.12). A matmul with a weight needs both: per-example gradients, and the derivative in the activation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.interpreters import ad

from jzero.core.custom_primitive import custom_primitive

LINEAR = "jzero_linear"


def linear(
    fn: Callable[..., list[jax.Array]],
    back: Callable[..., list[jax.Array]],
    fixed: Sequence[jax.Array],
    args: Sequence[jax.Array],
    *,
    tangent: Callable[..., list[jax.Array]] | None = None,
    fixed_outs: int = 0,
    same_types: bool = False,
) -> list[jax.Array]:
    """`fn(*fixed, *args)` with a transpose of our own. Unlike a `custom_vjp` it has a forward derivative too.

    Args:
      fn: linear in `args` except for rounding, differentiable in `fixed`; returns a list.
      back: `back(*fixed, *cotangents)` returns a list with one cotangent per arg.
      fixed: arrays; the derivative in them is that of `fn`.
      args: arrays; the transpose in them is `back`.
      tangent: the derivative of `fn` in `args`, if that is not `fn` itself because it rounds values.
      fixed_outs: how many of its last results are the first of `fixed`, unchanged. Their derivative passes through, and
        `fn` has none in them. It needs a `tangent` that only returns the other results.
      same_types: there is nothing fixed, and the results have the types of `args`.

    Under `vmap` it is plain `fn`, with the transpose that JAX finds for it.
    """
    given: Any = {"fn": fn, "back": back, "count": len(fixed), "tangent": tangent or fn, "fixed_outs": fixed_outs}
    return _linear_p.bind(*fixed, *args, types=_Types(same_types), **given)


class _Types:
    """The types of the results of one function, by those of its arguments: its derivative has the same ones.

    Each bind of a primitive asks for them, and tracing the function each time would slow down the tracing of a step.
    """

    def __init__(self, same: bool = False) -> None:
        self._found: dict[tuple[Any, ...], list[Any]] = {}
        self._same = same

    def of(self, fn: Callable[..., Any], avals: tuple[Any, ...]) -> list[Any]:
        """The types of `fn(*avals)`."""
        if self._same:
            return list(avals)
        if avals in self._found:
            return self._found[avals]
        found = jax.make_jaxpr(fn)(*avals).out_avals
        if all(jax.dtypes.issubdtype(x.dtype, np.inexact) for x in found):
            self._found[avals] = found  # the tangent of an integer has another type
        return found


def _jvp(primals, tangents, **params):
    count, fixed_outs = params["count"], params["fixed_outs"]
    outs = _linear_p.bind(*primals, **params)
    moves = [i for i, t in enumerate(tangents[:count]) if type(t) is not ad.Zero and i >= fixed_outs]
    found = []
    if any(type(t) is not ad.Zero for t in tangents[count:]):
        moved = [ad.instantiate_zeros(t) for t in tangents[count:]]
        of_args = {**params, "fn": params["tangent"], "fixed_outs": 0}
        if fixed_outs:  # the tangent has fewer results
            of_args["types"] = _Types()
        found.append(_linear_p.bind(*primals[:count], *moved, **of_args))
    if moves:

        def of_fixed(*some):
            new = dict(zip(moves, some, strict=True))
            return params["fn"](*(new.get(i, x) for i, x in enumerate(primals)))

        found.append(jax.jvp(of_fixed, [primals[i] for i in moves], [tangents[i] for i in moves])[1])
    return outs, [sum(ts[1:], ts[0]) for ts in zip(*found, strict=True)] + list(tangents[:fixed_outs])


def _transpose(cotangents, *args, back, count, **_):
    found = back(*args[:count], *(ad.instantiate_zeros(c) for c in cotangents))
    wanted = [ad.is_undefined_primal(a) for a in args[count:]]
    return [None] * count + [c if w else None for c, w in zip(found, wanted, strict=True)]


def _batch(args, dims, *, fn, back, count, tangent, fixed_outs, types):
    def batched(fn):
        return lambda *values: jax.vmap(fn, in_axes=tuple(dims))(*values)

    if tangent is fn:
        outs = batched(fn)(*args)
        return outs, [0] * len(outs)
    shapes = [jax.ShapeDtypeStruct(np.shape(a), a.dtype) for a in args[count:]]

    def transposed(*values):
        fixed, cotangents = values[:count], list(values[count:])
        return list(jax.linear_transpose(lambda *some: batched(tangent)(*fixed, *some), *shapes)(cotangents))

    outs = linear(
        batched(fn), transposed, args[:count], args[count:], tangent=batched(tangent), fixed_outs=fixed_outs
    )
    return outs, [0] * len(outs)


_linear_p = custom_primitive(
    LINEAR, lambda *args, fn, **_: fn(*args), jvp=_jvp, batch=_batch,
    out_avals=lambda *args, fn, types, **_: types.of(fn, args),
)  # fmt: skip
ad.primitive_transposes[_linear_p] = _transpose
