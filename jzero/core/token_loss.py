"""Cross-entropy of tokens whose logits never exist whole: the arithmetic of a tile, and the loop over tiles."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jzero.core.ordering import tied

TILE_BYTES = 2**27
"""Bytes of the fp32 logits of a tile: 256 tokens of a vocabulary of 128256."""


@dataclasses.dataclass(frozen=True)
class TokenLoss:
    """What is computed.

    Attributes:
      label_smoothing: this part of the target is spread over all classes.
      z_loss: times the square of the logarithm of the softmax's denominator, added to the loss.
      soft_cap: logits x become `soft_cap * tanh(x / soft_cap)`; None: they stay.
      tiles: how many tiles a device cuts its tokens into; None: as many as `TILE_BYTES` asks for.
      per_token: the result is one loss for each token; else their weighted sum.
      again: the backward pass makes the logits a second time; see [Note: gradients in the forward pass].
      strided: a tile takes every n-th token, so that tokens which are split over devices stay so.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    soft_cap: float | None = None
    tiles: int | None = None
    per_token: bool = False
    again: bool = False
    strided: bool = False

    def value(self, hidden, head, *rest) -> list[Any]:
        """The loss: one number, or one for each token.

        Args:
          hidden: [..., features].
          head: [features, classes].
          *rest: the bias [classes], if there is one; labels [...], of an integer dtype; weights [...], fp32.
        """
        *bias, labels, weights = rest
        classes = head.shape[-1]

        def tile(total, rows):
            h, y, w = rows
            losses = weighted(self._losses(self.logits(h, head, bias), Labels.of_tile(y, classes)), w)
            return total + losses.sum(), losses

        zero = varying_like(weights, jnp.zeros((), wide_dtype(hidden, head)))
        total, losses = self.over_tiles(tile, zero, (hidden, labels, weights), labels.shape, classes)
        return [losses.reshape(labels.shape) if self.per_token else total]

    def gradients(self, hidden, head, *rest) -> list[Any]:
        """[weighted sum, loss of each token, gradients of the sum in hidden, head and bias].

        The gradient of hidden is in its dtype, those of head and bias in fp32.
        """
        *bias, labels, weights = rest
        wide, classes = wide_dtype(hidden, head), head.shape[-1]
        narrow = jnp.promote_types(hidden.dtype, head.dtype)

        def tile(carry, rows):
            total, of_head, *of_bias = carry
            h, y, w = rows
            logits = self.logits(h, head, bias)
            y = Labels.of_tile(y, classes)
            losses = self._losses(logits, y)
            d = self.of_logits(logits, y, w, jax.nn.logsumexp(logits, axis=-1))
            of_bias = [b + d.sum(0) for b in of_bias]
            d = d.astype(narrow)
            of_hidden = jnp.einsum("tv,dv->td", d, head, preferred_element_type=wide).astype(h.dtype)
            of_head = of_head + jnp.einsum("td,tv->dv", h, d, preferred_element_type=wide)
            return (total + weighted(losses, w).sum(), of_head, *of_bias), (losses, of_hidden)

        shapes = ((), head.shape, *(b.shape for b in bias))
        zeros = tuple(varying_like(weights, jnp.zeros(shape, wide)) for shape in shapes)
        rows = hidden, labels, weights
        (total, *of_weights), (losses, of_hidden) = self.over_tiles(tile, zeros, rows, labels.shape, classes)
        return [total, losses.reshape(labels.shape), of_hidden.reshape(hidden.shape), *of_weights]

    def plain(self, hidden, head, *rest) -> list[Any]:
        """The loss in one piece: for what reads it, see [Note: what analyses see]."""
        *bias, labels, weights = rest
        classes = head.shape[-1]
        labels = Labels(labels, jnp.arange(classes, dtype=labels.dtype), jnp.zeros(()), classes)
        losses = weighted(self._losses(self.logits(hidden, head, bias), labels), weights)
        return [losses if self.per_token else losses.sum()]

    def logits(self, hidden, head, bias: Sequence[Any]):
        """[..., classes], in fp32 or wider, with the cap."""
        logits = jnp.matmul(hidden, head, preferred_element_type=wide_dtype(hidden, head))
        logits = logits + bias[0] if bias else logits
        return logits if self.soft_cap is None else self.soft_cap * jnp.tanh(logits / self.soft_cap)

    def _losses(self, logits, labels: Labels):
        """The loss of each token."""
        at_label, mean = labels.logit(logits), logits.mean(-1) if self.label_smoothing else None
        return self.of_sums(jax.nn.logsumexp(logits, axis=-1), at_label, mean, labels.known)

    def of_sums(self, lse, at_label, mean, known):
        """The loss of each token; nan where its label is not a class.

        Args:
          lse: logsumexp of its logits.
          at_label: the logit of its label.
          mean: of its logits; read for `label_smoothing` alone.
          known: its label is a class.
        """
        losses = lse - (1 - self.label_smoothing) * at_label
        if self.label_smoothing:
            losses = losses - self.label_smoothing * mean
        if self.z_loss:
            losses = losses + self.z_loss * lse**2
        return jnp.where(known, losses, jnp.nan)

    def of_logits(self, logits, labels: Labels, weights, lse):
        """The gradient of the weighted sum in what was the logits before the cap; `lse` of all logits of a token."""
        lse = lse[..., None]
        d = jnp.exp(logits - lse)
        if self.z_loss:
            d = d * (1 + 2 * self.z_loss * lse)
        d = d - (1 - self.label_smoothing) * labels.hit - self.label_smoothing / labels.classes
        if self.soft_cap is not None:
            d = d * (1 - (logits / self.soft_cap) ** 2)
        return d * jnp.where(labels.known | (weights == 0), weights, jnp.nan)[..., None]

    def over_tiles(
        self, tile: Callable[..., Any], carry: Any, given: Sequence[Any], shape: Sequence[int], classes: int,
        into: Any = None,
    ) -> tuple[Any, Any]:  # fmt: skip
        """`tile(carry, rows)` for each tile: the last carry, and the results for all tokens, [tokens, ...].

        Args:
          tile: from a carry and a tile of `given`, [tokens of a tile, ...], to the next carry and results.
          carry: the first one.
          given: arrays, [*shape, ...]; a token that is added has only zeros.
          shape: of the tokens.
          classes: how many logits a token has.
          into: [*shape, ...]; results are added to it in place, which a loop's own results have no buffer for.
        """
        tokens = math.prod(shape)
        rows = [x.reshape(tokens, *x.shape[len(shape) :]) for x in given]
        count = tiles_of(tokens, classes, self.tiles)
        if count == 1:
            carry, out = tile(carry, tuple(rows))
            return carry, out if into is None else into.reshape(out.shape) + out

        def cut(x):
            x = x.reshape(tokens, *x.shape[len(shape) :])
            x = jnp.pad(x, [(0, -tokens % count)] + [(0, 0)] * (x.ndim - 1))  # of weight 0
            if self.strided:
                return jnp.moveaxis(x.reshape(-1, count, *x.shape[1:]), 1, 0)
            return x.reshape(count, -1, *x.shape[1:])

        def joined(x):
            x = jnp.moveaxis(x, 0, 1) if self.strided else x
            return x.reshape(-1, *x.shape[2:])[:tokens]

        def adding(carries, row):
            (carry, into), (number, *rows) = carries, row
            carry, out = tile(carry, tuple(rows))
            return (carry, into.at[number].add(out)), None

        rows = tuple(cut(x) for x in given)
        if into is None:
            carry, outs = jax.lax.scan(tile, carry, rows)
        else:
            (carry, outs), _ = jax.lax.scan(adding, (carry, cut(into)), (jnp.arange(count), *rows))
        return carry, jax.tree.map(joined, outs)


def tiles_of(tokens: int, classes: int, asked: int | None) -> int:
    """How many tiles tokens are cut into: no more than there are tokens, and equal ones if twice as many will do."""
    wanted = asked or -(-tokens * classes * 4 // TILE_BYTES)
    wanted = max(1, min(wanted, tokens))
    return wanted if asked else next((n for n in range(wanted, 2 * wanted) if tokens % n == 0), wanted)


def varying_like(x, value):
    """A value that varies over the axes of a `jax.shard_map` over which `x` does."""
    axes = tuple(sorted(jax.typeof(x).manual_axis_type.varying))
    return jax.lax.pcast(value, axes, to="varying") if axes else value


def wide_dtype(hidden, head) -> np.dtype:
    """That of the logits, of losses and of sums."""
    return jnp.promote_types(jnp.promote_types(hidden.dtype, head.dtype), jnp.float32)


@dataclasses.dataclass(frozen=True)
class Labels:
    """The labels of tokens, and the classes whose logits are there.

    XLA takes what is the same in all tiles out of the loop: whole arrays of class numbers and zeros, each as large as
    the logits of a tile. So in a tile these are tied to its labels.

    Attributes:
      labels: [...], of an integer dtype.
      numbers: of these classes.
      zero: a zero.
      classes: how many classes there are in all.
    """

    labels: Any
    numbers: Any
    zero: Any
    classes: int

    @classmethod
    def of_tile(cls, labels, classes: int, numbers: Any = None) -> Labels:
        """Those of a tile; `numbers`: None for those of all classes."""
        numbers = jnp.arange(classes, dtype=labels.dtype) if numbers is None else numbers
        labels, numbers, zero = tied(labels, numbers, jnp.zeros(()))
        return cls(labels, numbers, zero, classes)

    @property
    def hit(self):
        """[..., numbers]: this class is the label."""
        return self.labels[..., None] == self.numbers

    @property
    def known(self):
        """[...]: the label is one of all classes."""
        return (self.labels >= 0) & (self.labels < self.classes)

    def logit(self, logits):
        """[...]: of the label; zero if it is not among these classes."""
        return jnp.where(self.hit, logits, self.zero.astype(logits.dtype)).sum(-1)


def weighted(losses, weights):
    """Times the weights; zero where these are, whatever the loss is, with the loss as its derivative in the weight."""
    known = jnp.where(jnp.isfinite(losses), jax.lax.stop_gradient(losses), 0)
    return jnp.where(weights == 0, weights * known, losses * weights)
