"""A token loss over pieces of the vocabulary: no piece knows the others' logits.

[Note: pieces of the vocabulary]
A head that is too large to be whole is used piece by piece: the outer loop is over pieces of the classes, the inner one
over tiles of tokens. A gradient needs the softmax over all classes, so there are two passes, and the head is gathered
in each. The forward pass adds up what the loss needs of each token's logits, with the running maximum of a streaming
softmax (Milakov and Gimelshein, arXiv 1805.02867). The backward pass makes each piece's logits again and from these the
gradients: four matmuls per tile in place of three. The gradient of the hidden states is added up in fp32, since it has
a part from each piece.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jzero.core.ordering import tied
from jzero.core.token_loss import Labels, TokenLoss, varying_like, wide_dtype


@dataclasses.dataclass(frozen=True)
class VocabularyPieces:
    """How the classes are cut, the last dim of an array.

    Where devices split the classes into `parts`, a piece takes as many from each part, so that it lies on all devices.

    Attributes:
      parts: how many equal parts devices hold.
      size: classes that a piece takes from each part; the last piece may take fewer.
      count: pieces.
    """

    parts: int
    size: int
    count: int

    @classmethod
    def of(cls, classes: int, parts: int, wanted: int) -> VocabularyPieces:
        """At most `wanted` pieces."""
        part = classes // parts
        size = -(-part // wanted)
        return cls(parts, size, -(-part // size))

    def piece(self, x, number: int):
        """[..., classes] to [..., classes of a piece]."""
        x = x.reshape(*x.shape[:-1], self.parts, -1)
        first = number * self.size
        x = jax.lax.slice_in_dim(x, first, min(first + self.size, x.shape[-1]), axis=-1)
        return x.reshape(*x.shape[:-2], -1)

    def joined(self, pieces: Sequence[Any]):
        """The array whose pieces these are."""
        x = jnp.concatenate([x.reshape(*x.shape[:-1], self.parts, -1) for x in pieces], axis=-1)
        return x.reshape(*x.shape[:-2], -1)


def first_sums(labels, dtype) -> tuple[Any, ...]:
    """Of each token, before the first piece: maximum, sum of exponentials, logit of the label, sum of the logits."""
    zero = varying_like(labels, jnp.zeros(labels.shape, dtype))
    return zero + jnp.finfo(dtype).min, zero, zero, zero


def sums_with(
    loss: TokenLoss, sums: Sequence[Any], hidden, labels, numbers, head, *bias, classes: int
) -> tuple[Any, ...]:
    """The sums with those of one piece, [...] each.

    Args:
      loss: what is computed.
      sums: see `first_sums`.
      hidden, labels: [..., features], [...].
      numbers: of the classes of the piece.
      head, *bias: [features, classes of the piece], [classes of the piece].
      classes: how many there are in all.
    """

    def tile(carry, rows):
        h, y, most, exps, at_label, total = rows
        logits = loss.logits(h, head, bias)
        y = Labels.of_tile(y, classes, numbers)
        above = jnp.maximum(most, logits.max(-1))
        exps = exps * jnp.exp(most - above) + jnp.exp(logits - above[..., None]).sum(-1)
        return carry, (above, exps, at_label + y.logit(logits), total + logits.sum(-1))

    _, found = loss.over_tiles(tile, None, (hidden, labels, *sums), labels.shape, len(numbers))
    return tuple(x.reshape(labels.shape) for x in found)


def losses_of(loss: TokenLoss, sums: Sequence[Any], labels, classes: int) -> tuple[Any, Any]:
    """From the sums over all pieces: the loss of each token, and the logsumexp of its logits."""
    most, exps, at_label, total = sums
    lse = most + jnp.log(exps)
    return loss.of_sums(lse, at_label, total / classes, (labels >= 0) & (labels < classes)), lse


def gradients_with(
    loss: TokenLoss, of_hidden, hidden, labels, weights, lse, numbers, head, *bias, classes: int
) -> tuple[Any, ...]:
    """The gradient of the hidden states with that of one piece, and the gradients of the piece, and of its bias.

    Args:
      loss: what is computed.
      of_hidden: the sum over the pieces before, [..., features], in fp32.
      hidden, labels, weights, lse: [..., features], and [...] each.
      numbers, head, *bias, classes: see `sums_with`.
    """
    wide, narrow = wide_dtype(hidden, head), jnp.promote_types(hidden.dtype, head.dtype)

    def tile(carry, rows):
        of_head, *of_bias = carry
        h, y, w, log = rows
        d = loss.of_logits(loss.logits(h, head, bias), Labels.of_tile(y, classes, numbers), w, log)
        of_bias = [b + d.sum(0) for b in of_bias]
        d = d.astype(narrow)
        of_h = jnp.einsum("tv,dv->td", d, head, preferred_element_type=wide)
        return (of_head + jnp.einsum("td,tv->dv", h, d, preferred_element_type=wide), *of_bias), of_h

    numbers, zero = tied(numbers, jnp.zeros((), wide))  # else all pieces start from copies of the same zeros
    zeros = tuple(varying_like(labels, jnp.broadcast_to(zero, x.shape)) for x in (head, *bias))
    rows = hidden, labels, weights, lse
    grads, of_hidden = loss.over_tiles(tile, zeros, rows, labels.shape, len(numbers), of_hidden)
    return of_hidden.reshape(hidden.shape), *grads
