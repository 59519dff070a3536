"""Cross-entropy of tokens whose logits never exist whole: the arithmetic of a tile, and the loop over tiles."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
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
            losses = _weighted(self._losses(_logits(h, head, bias, self.soft_cap), _Labels.of_tile(y, classes)), w)
            return total + losses.sum(), losses

        zero = _like(weights, jnp.zeros((), _wide(hidden, head)))
        total, losses = self._over_tiles(tile, zero, hidden, labels, weights, classes=classes)
        return [losses.reshape(labels.shape) if self.per_token else total]

    def gradients(self, hidden, head, *rest) -> list[Any]:
        """[weighted sum, loss of each token, gradients of the sum in hidden, head and bias].

        The gradient of hidden is in its dtype, those of head and bias in fp32.
        """
        *bias, labels, weights = rest
        wide, classes = _wide(hidden, head), head.shape[-1]
        narrow = jnp.promote_types(hidden.dtype, head.dtype)

        def tile(carry, rows):
            total, of_head, *of_bias = carry
            h, y, w = rows
            logits = _logits(h, head, bias, self.soft_cap)
            y = _Labels.of_tile(y, classes)
            losses = self._losses(logits, y)
            d = self._of_logits(logits, y, w)
            of_bias = [b + d.sum(0) for b in of_bias]
            d = d.astype(narrow)
            of_hidden = jnp.einsum("tv,dv->td", d, head, preferred_element_type=wide).astype(h.dtype)
            of_head = of_head + jnp.einsum("td,tv->dv", h, d, preferred_element_type=wide)
            return (total + _weighted(losses, w).sum(), of_head, *of_bias), (losses, of_hidden)

        zeros = tuple(_like(weights, jnp.zeros(shape, wide)) for shape in ((), head.shape, *(b.shape for b in bias)))
        (total, *of_weights), (losses, of_hidden) = self._over_tiles(
            tile, zeros, hidden, labels, weights, classes=classes
        )
        return [total, losses.reshape(labels.shape), of_hidden.reshape(hidden.shape), *of_weights]

    def plain(self, hidden, head, *rest) -> list[Any]:
        """The loss in one piece: for what reads it, see [Note: what analyses see]."""
        *bias, labels, weights = rest
        labels = _Labels(labels, jnp.arange(head.shape[-1], dtype=labels.dtype), jnp.zeros(()))
        losses = _weighted(self._losses(_logits(hidden, head, bias, self.soft_cap), labels), weights)
        return [losses if self.per_token else losses.sum()]

    def _losses(self, logits, labels: _Labels):
        """The loss of each token; nan where its label is not a class."""
        lse = jax.nn.logsumexp(logits, axis=-1)
        at_label = jnp.where(labels.hit, logits, labels.zero.astype(logits.dtype)).sum(-1)
        losses = lse - (1 - self.label_smoothing) * at_label
        if self.label_smoothing:
            losses = losses - self.label_smoothing * logits.mean(-1)
        if self.z_loss:
            losses = losses + self.z_loss * lse**2
        return jnp.where(labels.known, losses, jnp.nan)

    def _of_logits(self, logits, labels: _Labels, weights):
        """The gradient of the weighted sum in what was the logits before the cap."""
        lse, classes = jax.nn.logsumexp(logits, axis=-1, keepdims=True), logits.shape[-1]
        d = jnp.exp(logits - lse)
        if self.z_loss:
            d = d * (1 + 2 * self.z_loss * lse)
        d = d - (1 - self.label_smoothing) * labels.hit - self.label_smoothing / classes
        if self.soft_cap is not None:
            d = d * (1 - (logits / self.soft_cap) ** 2)
        return d * jnp.where(labels.known | (weights == 0), weights, jnp.nan)[..., None]

    def _over_tiles(self, tile: Callable[..., Any], carry, hidden, labels, weights, *, classes: int):
        """`tile(carry, (hidden, labels, weights))` for each tile: the last carry, and the results for all tokens."""
        tokens = math.prod(labels.shape)
        rows = [hidden.reshape(tokens, hidden.shape[-1]), labels.reshape(tokens), weights.reshape(tokens)]
        count = tiles_of(tokens, classes, self.tiles)
        if count == 1:
            return tile(carry, tuple(rows))
        rows = [jnp.pad(x, [(0, -tokens % count)] + [(0, 0)] * (x.ndim - 1)) for x in rows]  # of weight 0
        if self.strided:
            cut = [jnp.moveaxis(x.reshape(-1, count, *x.shape[1:]), 1, 0) for x in rows]
        else:
            cut = [x.reshape(count, -1, *x.shape[1:]) for x in rows]
        carry, outs = jax.lax.scan(tile, carry, tuple(cut))

        def joined(x):
            x = jnp.moveaxis(x, 0, 1) if self.strided else x
            return x.reshape(-1, *x.shape[2:])[:tokens]

        return carry, jax.tree.map(joined, outs)


def tiles_of(tokens: int, classes: int, asked: int | None) -> int:
    """How many tiles tokens are cut into: no more than there are tokens, and equal ones if twice as many will do."""
    wanted = asked or -(-tokens * classes * 4 // TILE_BYTES)
    wanted = max(1, min(wanted, tokens))
    return wanted if asked else next((n for n in range(wanted, 2 * wanted) if tokens % n == 0), wanted)


def _like(x, value):
    """A value that varies over the axes of a `jax.shard_map` over which `x` does."""
    axes = tuple(sorted(jax.typeof(x).manual_axis_type.varying))
    return jax.lax.pcast(value, axes, to="varying") if axes else value


def _wide(hidden, head) -> np.dtype:
    return jnp.promote_types(jnp.promote_types(hidden.dtype, head.dtype), jnp.float32)


def _logits(hidden, head, bias, soft_cap: float | None):
    logits = jnp.matmul(hidden, head, preferred_element_type=_wide(hidden, head))
    logits = logits + bias[0] if bias else logits
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)


@dataclasses.dataclass(frozen=True)
class _Labels:
    """Labels, the numbers of the classes, and a zero.

    XLA takes what is the same in all tiles out of the loop: whole arrays of class numbers and zeros, each as large as
    the logits of a tile. So in a tile these are tied to its labels.
    """

    labels: Any
    numbers: Any
    zero: Any

    @classmethod
    def of_tile(cls, labels, classes: int) -> _Labels:
        return cls(*tied(labels, jnp.arange(classes, dtype=labels.dtype), jnp.zeros(())))

    @property
    def hit(self):
        """[..., classes]: this class is the label."""
        return self.labels[..., None] == self.numbers

    @property
    def known(self):
        """[...]: the label is one of the classes."""
        return (self.labels >= 0) & (self.labels < self.numbers.shape[0])


def _weighted(losses, weights):
    """Times the weights; zero where these are, whatever the loss is."""
    return jnp.where(weights == 0, 0, losses * weights)
