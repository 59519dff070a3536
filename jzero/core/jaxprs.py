"""All that touches JAX's jaxpr API, which moves between versions: open one, bind one equation, read its parts.

Tested on the oldest and the newest supported jax. From 0.11 on an open and a closed jaxpr are one class, and
`scan` carries trees of counts instead of `num_consts` and `num_carry`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import source_info_util
from jax._src.core import Tracer, trace_ctx
from jax.extend.core import Literal, Primitive
from jax.interpreters import ad, batching, mlir

INLINE = ("jit", "pjit", "closed_call", "core_call")
REMAT = ("remat2", "remat", "checkpoint")


def trace(fn: Callable, *args) -> tuple[Any, list[Any]]:
    """The closed jaxpr of a function of flat arrays to a flat list of arrays, and its consts."""
    closed = jax.make_jaxpr(fn)(*args)
    return closed.jaxpr, list(closed.consts)


def opened(closed) -> tuple[Any, list[Any]]:
    """A jaxpr in an equation's params, open or closed, as (jaxpr, consts)."""
    return getattr(closed, "jaxpr", closed), list(getattr(closed, "consts", ()))


def is_tracer(value) -> bool:
    """True for an abstract value inside of a trace."""
    return isinstance(value, Tracer)


def in_differentiated_loop() -> bool:
    """True while the body of a loop is traced, unless gradients are taken inside of that body.

    What the body keeps for its backward pass is then stacked over the rounds.
    """
    trace: Any = trace_ctx.trace
    while trace is not None and type(trace).__name__ not in ("JVPTrace", "LinearizeTrace"):
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
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager:
        yield


def place_of(eqn) -> str:
    """`model.py:31 (loss)`: the user's line that an equation comes from."""
    return source_info_util.summarize(eqn.source_info)


def bind(eqn, args: Sequence[Any]) -> list[Any]:
    """The equation's primitive on other arguments; always a list of results."""
    out = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


def scan_counts(params) -> tuple[int, int]:
    """Number of loop constants and of carries among a scan's arguments."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def row_lookup(eqn) -> bool:
    """True for `jnp.take(table, index, axis=0)` of a matrix: whole rows, in the order of the index."""
    if eqn.primitive.name != "gather":
        return False
    dims, table, out = eqn.params["dimension_numbers"], eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    rows = len(table) == 2 and tuple(eqn.params["slice_sizes"]) == (1, table[1])
    plain = (
        dims.collapsed_slice_dims == (0,) and dims.start_index_map == (0,) and not dims.operand_batching_dims
    )
    return rows and plain and dims.offset_dims == (len(out) - 1,)


def lookup_gradient(eqn, index, cotangent, rows: int) -> Any:
    """The gradient of the table of a `row_lookup`; of some columns, for some columns of the cotangent."""
    params = {**eqn.params, "slice_sizes": (1, cotangent.shape[-1])}

    def lookup(table):
        return eqn.primitive.bind(table, index, **eqn.primitive.get_bind_params(params))

    return jax.linear_transpose(lookup, jax.ShapeDtypeStruct((rows, cotangent.shape[-1]), cotangent.dtype))(
        cotangent
    )[0]


def dot_gradient(eqn, at: int, other, cotangent, part: tuple[int, int, int] | None, dtype=None) -> Any:
    """The gradient of operand `at` of a `dot_general`, whole or a part of one of its dims.

    Args:
      eqn: the `dot_general`.
      at: 0 or 1, the operand whose gradient it is.
      other: the other operand.
      cotangent: of the result.
      part: (dim of the operand, start, size): what of `other` and of the cotangent goes with it is cut alike.
      dtype: of the result, in which products are summed; None: that of the operand.
    """
    contract, batch = eqn.params["dimension_numbers"]
    operands = [a.aval for a in eqn.invars]
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    names: list[dict[int, str]] = [{}, {}]
    for pairs in (batch, contract):
        for left, right in zip(*pairs, strict=True):
            names[0][left] = names[1][right] = next(letters)
    free = [[d for d in range(x.ndim) if d not in own] for x, own in zip(operands, names, strict=True)]
    for own, dims in zip(names, free, strict=True):
        own.update((d, next(letters)) for d in dims)
    mine, its = ("".join(own[d] for d in range(x.ndim)) for own, x in zip(names, operands, strict=True))
    out = "".join(
        [names[0][d] for d in batch[0]]
        + [own[d] for own, dims in zip(names, free, strict=True) for d in dims]
    )
    mine, its = (mine, its) if at == 0 else (its, mine)
    shape = list(operands[at].shape)
    if part is not None:
        dim, start, size = part
        shape[dim] = size
        other, cotangent = (
            x
            if mine[dim] not in text
            else jax.lax.slice_in_dim(x, start, start + size, axis=text.index(mine[dim]))
            for x, text in ((other, its), (cotangent, out))
        )
    if dtype is not None:
        return jnp.einsum(f"{its},{out}->{mine}", other, cotangent, preferred_element_type=dtype)
    return product_gradient(eqn, at, other, cotangent, shape)


LINEAR = "jzero_linear"
_linear_p = Primitive(LINEAR)
_linear_p.multiple_results = True


@dataclasses.dataclass(frozen=True, eq=False)
class Product:
    """A matmul or a convolution as a function of the operand that is no weight, and of the weight at `at`."""

    eqn: Any
    at: int

    def __call__(self, other, weight):
        """Its results."""
        return bind(self.eqn, [weight, other] if self.at == 0 else [other, weight])


def example_dims(eqn, at: int) -> tuple[int, int] | None:
    """Of a product with weight `at`: the dim that examples lie along in the other operand, and in the result.

    Of a matmul the first dim of the other operand that is not summed over. None: it has no such dim, or the two share
    one (experts with their own tokens), so that the first need not be that of the examples; or it is no product.
    """
    numbers = eqn.params.get("dimension_numbers")
    if eqn.primitive.name == "conv_general_dilated":
        grouped = at != 1 or eqn.params["batch_group_count"] > 1
        return None if grouped else (numbers.lhs_spec[0], numbers.out_spec[0])
    if eqn.primitive.name != "dot_general" or any(numbers[1]):
        return None
    free = [[d for d in range(a.aval.ndim) if d not in numbers[0][i]] for i, a in enumerate(eqn.invars)]
    return (free[1 - at][0], 0 if at == 1 else len(free[0])) if free[1 - at] else None


def product_gradient(eqn, at: int, other, cotangent, shape: Sequence[int] | None = None) -> Any:
    """The gradient of the weight at `at` of a product, for some examples; `shape`: of a part of it."""
    weight = eqn.invars[at].aval
    part = jax.ShapeDtypeStruct(weight.shape if shape is None else tuple(shape), weight.dtype)
    return jax.linear_transpose(lambda w: Product(eqn, at)(other, w)[0], part)(cotangent)[0]


def linear(fn: Callable, back: Callable, fixed: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """`fn(*fixed, *args)` with a transpose of our own; unlike a `custom_vjp` it has a forward derivative too.

    Args:
      fn: linear in `args`, differentiable in `fixed`; returns a list.
      back: `back(*fixed, *cotangents)` returns a list with one cotangent per arg.
      fixed: arrays whose derivative is that of `fn`.
      args: arrays whose transpose is `back`.

    Under `vmap` it is plain `fn`, with the transpose that JAX finds for it.
    """
    return _linear_p.bind(*fixed, *args, fn=fn, back=back, count=len(fixed))


def _linear_jvp(primals, tangents, *, fn, back, count):
    outs = _linear_p.bind(*primals, fn=fn, back=back, count=count)
    moves = [i for i, t in enumerate(tangents[:count]) if type(t) is not ad.Zero]
    found = []
    if any(type(t) is not ad.Zero for t in tangents[count:]):
        moved = [ad.instantiate_zeros(t) for t in tangents[count:]]
        found.append(_linear_p.bind(*primals[:count], *moved, fn=fn, back=back, count=count))
    if moves:

        def of_fixed(*some):
            new = dict(zip(moves, some, strict=True))
            return fn(*(new.get(i, x) for i, x in enumerate(primals)))

        found.append(jax.jvp(of_fixed, [primals[i] for i in moves], [tangents[i] for i in moves])[1])
    return outs, [sum(ts[1:], ts[0]) for ts in zip(*found, strict=True)]


def _linear_transpose(cotangents, *args, fn, back, count):
    found = back(*args[:count], *(ad.instantiate_zeros(c) for c in cotangents))
    wanted = [ad.is_undefined_primal(a) for a in args[count:]]
    return [None] * count + [c if w else None for c, w in zip(found, wanted, strict=True)]


def _linear_batch(args, dims, *, fn, back, count):
    outs = jax.vmap(fn, in_axes=tuple(dims))(*args)
    return outs, [0] * len(outs)


def _linear_lowering(ctx, *args, fn, back, count):
    return mlir.lower_fun(fn, multiple_results=True)(ctx, *args)


_linear_p.def_impl(lambda *args, fn, back, count: fn(*args))
_linear_p.def_abstract_eval(lambda *args, fn, back, count: jax.make_jaxpr(fn)(*args).out_avals)
ad.primitive_jvps[_linear_p] = _linear_jvp
ad.primitive_transposes[_linear_p] = _linear_transpose
batching.primitive_batchers[_linear_p] = _linear_batch
mlir.register_lowering(_linear_p, _linear_lowering)


def constant_zero_outputs(fn: Callable, *trees) -> list[bool]:
    """For each output of `fn`, whether it is zero whatever the inputs are; read from the jaxpr, nothing runs.

    Args:
      fn: a function of trees to a flat list.
      *trees: arrays or ShapeDtypeStructs.
    """
    leaves, tree = jax.tree.flatten(trees)
    jaxpr, _ = trace(lambda *flat: fn(*jax.tree.unflatten(tree, flat)), *leaves)
    return _zeros(jaxpr, [False] * len(jaxpr.invars))


_KEEPS_ZERO = ("broadcast_in_dim", "convert_element_type", "reshape", "neg", "copy", "squeeze", "transpose")


def _zeros(jaxpr, known: Sequence[bool]) -> list[bool]:
    env = dict(zip(jaxpr.invars, known, strict=True))

    def is_zero(atom) -> bool:
        if is_literal(atom):
            return not np.any(np.asarray(atom.val)) if not _is_key(atom.val) else False
        return env.get(atom, False)

    for eqn in jaxpr.eqns:
        inputs = [is_zero(a) for a in eqn.invars]
        name = eqn.primitive.name
        if name in INLINE:
            outs = _zeros(opened(eqn.params["jaxpr"])[0], inputs)
        elif name in _KEEPS_ZERO:
            outs = [inputs[0]]
        elif name in ("add", "sub", "select_n"):
            outs = [all(inputs[1:] if name == "select_n" else inputs)]
        else:
            outs = [False] * len(eqn.outvars)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [is_zero(a) for a in jaxpr.outvars]


def independent_outputs(fn: Callable, *trees) -> list[bool]:
    """For each output of `fn`, whether no input has any part in it; read from the jaxpr, nothing runs.

    Args:
      fn: a function of trees to a flat list.
      *trees: arrays or ShapeDtypeStructs.
    """
    leaves, tree = jax.tree.flatten(trees)
    jaxpr, _ = trace(lambda *flat: fn(*jax.tree.unflatten(tree, flat)), *leaves)
    return [not d for d in _depend(jaxpr, [True] * len(jaxpr.invars))]


def _depend(jaxpr, known: Sequence[bool]) -> list[bool]:
    env = dict(zip(jaxpr.invars, known, strict=True))

    def depends(atom) -> bool:
        return not is_literal(atom) and env.get(atom, False)

    for eqn in jaxpr.eqns:
        inputs = [depends(a) for a in eqn.invars]
        if eqn.primitive.name in INLINE:
            outs = _depend(opened(eqn.params["jaxpr"])[0], inputs)
        else:
            outs = [any(inputs)] * len(eqn.outvars)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [depends(a) for a in jaxpr.outvars]


def _is_key(value) -> bool:
    return hasattr(value, "dtype") and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)


def wide_sources(
    fn: Callable[[], Sequence[Any]], count: int, dtype_of: Callable[[int], Any]
) -> Callable[[], tuple[list[Any], list[Any]]]:
    """A function like `fn` that returns, besides its outputs, the wider values that its first `count` were cast from.

    A creation function that makes fp32 weights and casts them ends in `convert_element_type`; what goes into
    that cast is the better master. Output i of the extra list is the value in `dtype_of(i)`, or None where
    the output was made in its own dtype.
    """
    jaxpr, consts = trace(lambda: list(fn()))

    def both():
        outs, wide = _eval_with_sources(jaxpr, consts, [])
        picked = [w if w is not None and dtype_of(i) == w.dtype else None for i, w in enumerate(wide[:count])]
        return outs, picked

    return both


def _eval_with_sources(jaxpr, consts, args) -> tuple[list[Any], list[Any]]:
    """Evaluate a jaxpr; beside each output, the operand of the cast that made it, or None."""
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    source: dict[Any, Any] = {}

    def read(atom):
        return atom.val if is_literal(atom) else env[atom]

    for eqn in jaxpr.eqns:
        values, name = [read(a) for a in eqn.invars], eqn.primitive.name
        with scope_of(eqn):
            if name in INLINE:
                outs, wide = _eval_with_sources(*opened(eqn.params["jaxpr"]), values)
                passed = {
                    id(v): source.get(a) for v, a in zip(values, eqn.invars, strict=True) if not is_literal(a)
                }
                wide = [passed.get(id(o)) if w is None else w for o, w in zip(outs, wide, strict=True)]
            else:
                outs, wide = bind(eqn, values), [None] * len(eqn.outvars)
                if name == "convert_element_type" and values[0].dtype.itemsize > outs[0].dtype.itemsize:
                    wide = [values[0]] if jnp.issubdtype(values[0].dtype, jnp.floating) else [None]
        env.update(zip(eqn.outvars, outs, strict=True))
        source.update((v, w) for v, w in zip(eqn.outvars, wide, strict=True) if w is not None)
    return [read(a) for a in jaxpr.outvars], [None if is_literal(a) else source.get(a) for a in jaxpr.outvars]
