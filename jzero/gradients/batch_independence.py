"""Does a loss keep its examples apart? Checked on its jaxpr, so that micro-batches do not silently change the loss."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jzero.core import jaxprs
from jzero.gradients.coupling import CONST, Kind, Mixed, Ratio, Rows, Total, Unknown, kinds_of_results


def check_examples_apart(
    fn: Callable[..., Any],
    params: Any,
    args: Sequence[Any],
    *,
    batch: Sequence[int],
    weighted: bool,
) -> None:
    """Refuses a loss that micro-batches would change.

    Args:
      fn: `fn(params, args) -> (loss, aux)`.
      params, args: arrays or ShapeDtypeStructs, batch leaves with the rows of a micro-batch.
      batch: positions in `args` whose leaves have examples along dim 0.
      weighted: micro-batches are weighted by what their mean divides by.

    Raises:
      ValueError: the loss couples examples, is a ratio of sums and not weighted, or aux has one value per example.
    """
    arrays, merged = jaxprs.split_arrays((params, tuple(args)))
    kinds: list[Kind] = [CONST] * len(jaxprs.split_arrays(params)[0])
    for i, arg in enumerate(args):
        kinds += [Rows(0) if i in batch else CONST for _ in jaxprs.split_arrays(arg)[0]]
    examples = next(x.shape[0] for i in batch for x in jaxprs.split_arrays(args[i])[0])

    def flat(*arrays):
        loss, aux = fn(*merged(arrays))
        _refuse_rows_in_aux(aux, examples)
        return [loss]

    jaxpr, _ = jaxprs.trace(flat, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays))
    if examples > 1:  # one example looks like a dim of size 1, and cannot be coupled with itself
        _refuse(kinds_of_results(jaxpr, kinds)[0], weighted)


def _refuse_rows_in_aux(aux: Any, examples: int) -> None:
    shapes = [(k, np.shape(x)) for k, x in jax.tree_util.tree_leaves_with_path(aux)]
    per_example = [f"{jax.tree_util.keystr(k)} {s}" for k, s in shapes if s and s[0] == examples]
    if per_example:
        raise ValueError(
            f"jzero.value_and_grad: aux {', '.join(per_example[:8])} has one value per example of a micro-batch "
            f"({examples}); aux is averaged over micro-batches. Return its mean or sum."
        )


def _refuse(kind: Kind, weighted: bool) -> None:
    subject = "jzero.value_and_grad: the loss"
    if isinstance(kind, Mixed) or (isinstance(kind, Total) and kind.clipped) or isinstance(kind, Rows):
        where = getattr(kind, "where", "at its end")
        raise ValueError(
            f"{subject} couples examples ({where}): on micro-batches, or on one device's part of them, it is another "
            "loss than on the whole batch. BatchNorm and contrastive losses do so. Use accumulate=1, or "
            'coupled="allow" to take the loss of each micro-batch as it is.'
        )
    if isinstance(kind, Ratio) and not weighted:
        raise ValueError(
            f"{subject} is a sum over examples divided by another (a mean over tokens that are not padding): the mean "
            "of such means is not the mean of all. Pass weight=lambda batch: batch['mask'].sum(), what it divides by."
        )
    if isinstance(kind, Unknown):
        warnings.warn(
            f"{subject} could not be checked for examples that depend on each other ({kind.where}); micro-batches are "
            "right where they do not.",
            stacklevel=6,
        )
