"""What the parts of a batch return (micro-batches, on each device its rows), and how it is put together.

[Note: aux]
A sum over examples is summed, without weights. A mean over all examples is the mean of those of the parts, which have
equal sizes, also where `weight=` is given for a loss that divides by something else. A ratio is averaged by these
weights. An integer that no example changes is kept; one that is neither that nor a sum has no value for the whole
batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jzero.core.errors import warn
from jzero.core.types import PyTree
from jzero.gradients.growth import Growth
from jzero.gradients.kinds import Const, Kind, Ratio, Total, couples

SUM, MEAN, WEIGHTED = "sum", "mean", "weighted mean"
"""What parts add up to; weights are those of `value_and_grad(weight=)`."""
Leaf = tuple[str, Any]
"""The name and the type of a leaf of aux."""


@dataclasses.dataclass(frozen=True)
class Means:
    """How what the parts return is put together.

    Attributes:
      ways: of the loss and each leaf of aux.
      parts: how many there are.
    """

    ways: Sequence[str]
    parts: int

    def weighted(self, aux: PyTree, w: jax.Array) -> PyTree:
        """Aux of one part as it is to be added."""
        leaves, tree = jax.tree.flatten(jax.tree.map(jnp.asarray, aux))
        rows = zip(leaves, self.ways[1:], strict=True)
        return tree.unflatten([times(w, x, x.dtype) if way == WEIGHTED else x for x, way in rows])

    def of_loss(self, x: jax.Array, total: jax.Array) -> jax.Array:
        """The loss, or a gradient of it, from their sum and that of the weights."""
        return x if self.ways[0] == SUM else x / total.astype(x.dtype)

    def of_aux(self, aux: PyTree, total: jax.Array) -> PyTree:
        """Aux, from the sums of its leaves and that of the weights."""
        leaves, tree = jax.tree.flatten(aux)

        def of(x: jax.Array, way: str) -> jax.Array:
            if way == WEIGHTED:
                return x / total.astype(x.dtype)
            return x if way == SUM else x / self.parts if _is_real(x) else x // self.parts

        return tree.unflatten([of(*row) for row in zip(leaves, self.ways[1:], strict=True)])


def times(w: jax.Array, value: jax.Array, dtype: Any) -> jax.Array:
    """A value times its weight; 0 where the weight is 0, since the loss of such a micro-batch may be 0/0."""
    return jnp.where(w > 0, w * value.astype(dtype), jnp.zeros((), dtype))


def way_of_aux(leaf: Leaf, kind: Kind, grown: Growth, *, weighted: bool) -> str:
    """What the parts of a leaf of aux add up to: see [Note: aux].

    Raises:
      ValueError: an integer that is not a sum over examples.
    """
    name, x = leaf
    if grown == 2.0:
        return SUM
    if _is_real(x):
        return MEAN if weighted and isinstance(kind, (Const, Total)) and not couples(kind) else WEIGHTED
    if isinstance(kind, Const):
        return MEAN
    if grown is not None:
        raise ValueError(
            f"jzero.value_and_grad: aux {name} is an integer that is not a sum over examples, and micro-batches "
            "have one each. Return a count (a sum over examples), or a float: floats are averaged."
        )
    return SUM


def warn_of_aux(rows: Sequence[tuple[Leaf, Kind, Growth]], *, weighted: bool) -> None:
    """Warns of aux that put together may not be what the whole batch gives."""

    def differs(x: Any, kind: Kind, grown: Growth) -> bool:
        if not _is_real(x):
            return grown is None and not isinstance(kind, (Const, Total))
        if isinstance(kind, Ratio):
            return not weighted
        return couples(kind) or grown not in (1.0, 2.0, None)

    names = [name for (name, x), kind, grown in rows if differs(x, kind, grown)]
    if names:
        warn(
            f"jzero.value_and_grad: aux {', '.join(names[:8])} is neither a mean nor a sum over examples (a maximum, a "
            "root, a ratio). What is returned is the average over the parts of the batch, not the value of the whole "
            "batch. Return the means or sums from which it is computed.",
        )


def refuse_aux(types: Sequence[Leaf], longer: Sequence[Leaf] | None, examples: int) -> None:
    """Raises ValueError for aux whose shape depends on the number of examples, and for bools.

    Args:
      types: of the leaves of aux, for a micro-batch of `examples`.
      longer: the same for a larger one; None if it could not be traced.
    """
    if longer is None:
        each = [bool(x.shape) and x.shape[0] == examples for _, x in types]
    else:
        each = [x.shape != y.shape for (_, x), (_, y) in zip(types, longer, strict=True)]
    per_example = [f"{name} {x.shape}" for (name, x), e in zip(types, each, strict=True) if e]
    if per_example:
        raise ValueError(
            f"jzero.value_and_grad: aux {', '.join(per_example[:8])} has one value per example of a micro-batch "
            f"({examples}); aux is averaged over micro-batches. Return its mean or sum."
        )
    bools = [name for name, x in types if x.dtype == bool]
    if bools:
        raise ValueError(
            f"jzero.value_and_grad: aux {', '.join(bools[:8])} is a bool, and micro-batches have one each. Return a "
            "number: an int is summed, a float averaged."
        )


def _is_real(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)
