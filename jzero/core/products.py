"""Matmuls, convolutions and lookups as equations: which weight they read, and how its gradient is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import issubdtype

from jzero.core.jaxprs import bind


@dataclasses.dataclass(frozen=True, eq=False)
class Product:
    """A matmul or a convolution as a function of the operand that is not a weight, and of the weight at `at`."""

    eqn: Any
    at: int

    def __call__(self, other, weight):
        """Its results."""
        return bind(self.eqn, [weight, other] if self.at == 0 else [other, weight])


def example_dims(eqn, at: int) -> tuple[int, int] | None:
    """Of a product with weight `at`: the dim that examples lie along in the other operand, and in the result.

    Of a matmul the first dim of the other operand that is not summed over. None: it has no such dim, or the two share
    one (experts with their own tokens), so that the first need not be that of the examples; or it is not a product.
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


def gradient_dtype(eqn, own: np.dtype) -> np.dtype:
    """The dtype in which an equation makes the gradient of an operand of dtype `own`.

    Of a matmul with wider results (`preferred_element_type`, or another operand that is wider) it is theirs. None for
    `eqn`, and any other equation: `own`.
    """
    made = eqn.outvars[0].aval.dtype if eqn is not None and eqn.primitive.name == "dot_general" else own
    return made if issubdtype(made, np.floating) and made.itemsize > own.itemsize else own


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
