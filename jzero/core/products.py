"""Matmuls, convolutions and lookups as equations: which weight they read, and how its gradient is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from string import ascii_lowercase
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import issubdtype

from jzero.core.dims import dim_in_result, dot_dims
from jzero.core.jaxprs import bind
from jzero.core.types import JaxprEqn

PRODUCTS = ("dot_general", "conv_general_dilated")


@dataclasses.dataclass(frozen=True, eq=False)
class Product:
    """A matmul or a convolution as a function of the operand that is not a weight, and of the weight at `at`."""

    eqn: JaxprEqn
    at: int

    def __call__(self, other: jax.Array, weight: jax.Array) -> list[jax.Array]:
        """Its results."""
        return bind(self.eqn, [weight, other] if self.at == 0 else [other, weight])


def example_dims(eqn: JaxprEqn, at: int) -> tuple[int, int] | None:
    """Of a product with weight `at`: the dim that examples lie along in the other operand, and in the result.

    Of a matmul the first dim of the other operand that is not summed over. None: it has no such dim, or the two share
    one (experts with their own tokens), so that the first need not be that of the examples; or it is not a product.
    """
    numbers: Any = eqn.params.get("dimension_numbers")
    if eqn.primitive.name == "conv_general_dilated":
        grouped = at != 1 or eqn.params["batch_group_count"] > 1
        return None if grouped else (numbers.lhs_spec[0], numbers.out_spec[0])
    if eqn.primitive.name != "dot_general" or any(numbers[1]):
        return None
    free = [[d for d in range(a.aval.ndim) if d not in numbers[0][i]] for i, a in enumerate(eqn.invars)]
    return (free[1 - at][0], 0 if at == 1 else len(free[0])) if free[1 - at] else None


def product_gradient(
    eqn: JaxprEqn, at: int, other: jax.Array, cotangent: jax.Array, shape: Sequence[int] | None = None
) -> jax.Array:
    """The gradient of the weight at `at` of a product, for some examples; `shape`: of a part of it."""
    weight = eqn.invars[at].aval
    part = jax.ShapeDtypeStruct(weight.shape if shape is None else tuple(shape), weight.dtype)
    return jax.linear_transpose(lambda w: Product(eqn, at)(other, w)[0], part)(cotangent)[0]


def row_lookup(eqn: JaxprEqn) -> bool:
    """True for `jnp.take(table, index, axis=0)` of a matrix: whole rows, in the order of the index."""
    if eqn.primitive.name != "gather":
        return False
    dims, table, out = eqn.params["dimension_numbers"], eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    rows = len(table) == 2 and tuple(eqn.params["slice_sizes"]) == (1, table[1])
    by_row = dims.collapsed_slice_dims == (0,) == dims.start_index_map and not dims.operand_batching_dims
    return rows and by_row and dims.offset_dims == (len(out) - 1,)


def lookup_gradient(eqn: JaxprEqn, index: jax.Array, cotangent: jax.Array, rows: int) -> jax.Array:
    """The gradient of the table of a `row_lookup`; given some columns of the cotangent, that of the same columns."""
    params = {**eqn.params, "slice_sizes": (1, cotangent.shape[-1])}

    def lookup(table):
        return eqn.primitive.bind(table, index, **eqn.primitive.get_bind_params(params))

    table = jax.ShapeDtypeStruct((rows, cotangent.shape[-1]), cotangent.dtype)
    return jax.linear_transpose(lookup, table)(cotangent)[0]


def gradient_dtype(eqn: JaxprEqn | None, own: np.dtype) -> np.dtype:
    """The dtype in which an equation makes the gradient of an operand of dtype `own`.

    A matmul with wider results (`preferred_element_type`, or the other operand is wider) makes it in their dtype, any
    other equation in `own`.
    """
    made = eqn.outvars[0].aval.dtype if eqn is not None and eqn.primitive.name == "dot_general" else own
    return made if issubdtype(made, np.floating) and made.itemsize > own.itemsize else own


def dot_gradient(
    eqn: JaxprEqn,
    at: int,
    other: jax.Array,
    cotangent: jax.Array,
    part: tuple[int, int, int] | None,
    dtype: np.dtype | None = None,
) -> jax.Array:
    """The gradient of operand `at` of a `dot_general`, whole or a part of one of its dims.

    Args:
      eqn: the `dot_general`.
      at: 0 or 1, the operand whose gradient it is.
      other: the other operand.
      cotangent: of the result.
      part: (dim of the operand, start, size): what of `other` and of the cotangent goes with it is cut alike.
      dtype: of the result, in which products are summed; None: that of the operand.
    """
    dims, shape = dot_dims(eqn), list(eqn.invars[at].aval.shape)
    pairs = [row for some in (dims.batch, dims.contract) for row in zip(some[at], some[1 - at], strict=True)]
    if part is not None:
        dim, start, size = part
        shape[dim] = size
        beside, out = dict(pairs).get(dim), dim_in_result(eqn, at, dim)
        other = other if beside is None else jax.lax.slice_in_dim(other, start, start + size, axis=beside)
        cotangent = cotangent if out is None else jax.lax.slice_in_dim(cotangent, start, start + size, axis=out)
    if dtype is None:
        return product_gradient(eqn, at, other, cotangent, shape)
    mine = ascii_lowercase[: len(shape)]
    shared = {d: mine[own] for own, d in pairs}
    its = "".join(shared.get(d, ascii_lowercase[len(shape) + d]) for d in range(other.ndim))
    found = {dim_in_result(eqn, k, d): name for k, text in ((at, mine), (1 - at, its)) for d, name in enumerate(text)}
    out = "".join(found[d] for d in range(cotangent.ndim))
    return jnp.einsum(f"{its},{out}->{mine}", other, cotangent, preferred_element_type=dtype)
