"""A token loss on the devices of a plan whose head is never whole: see [Note: pieces of the vocabulary]."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jzero.comm.reduce_scatter import batch_axes, sum_over_devices
from jzero.comm.routes import Reduced
from jzero.comm.token_loss import OnPlan, first_values
from jzero.core.ordering import tied
from jzero.core.token_loss import TokenLoss, weighted, wide_dtype
from jzero.core.token_loss_rules import LOSS, Arrays
from jzero.core.vocabulary_pieces import VocabularyPieces, first_sums, gradients_with, losses_of, sums_with
from jzero.layout.specs import P

WHOLE = P()


@dataclasses.dataclass(frozen=True, eq=False)
class InPieces:
    """The head is gathered piece by piece, the next piece while one is used.

    Attributes:
      devices: those of the plan.
      pieces: how the head is cut.
      weight: a piece of the head with its layouts, of that shape.
    """

    devices: OnPlan
    pieces: VocabularyPieces
    weight: Callable[[tuple[int, ...]], Reduced]

    def run(self, loss: TokenLoss, make: str, operands: Arrays, saved: Arrays = ()) -> list[Any]:
        """See `Devices.run`; losses and logsumexps of the tokens are saved."""
        if make == LOSS:
            return self._value(loss, operands)

        @jax.custom_jvp
        def gradients(operands: Arrays, saved: Arrays) -> list[Any]:
            return self._gradients(loss, operands, saved)

        @gradients.defjvp
        def of_gradients(primals: Any, tangents: Any) -> tuple[Any, Any]:  # what was saved depends on the operands
            def again(operands: Arrays) -> list[Any]:
                return self._gradients(loss, operands, self._value(loss, operands)[1:])

            return jax.jvp(again, primals[:1], tangents[:1])

        return [None, *gradients(list(operands), list(saved))]

    def _value(self, loss: TokenLoss, operands: Arrays) -> list[Any]:
        """What the loss returns, and of each token its loss and logsumexp."""
        (hidden, labels, weights), head, bias = self._given(operands)
        of_rows, classes = self._rows, head.shape[-1]
        sums = first_sums(labels, wide_dtype(hidden, head))

        def use(sums: Any, number: int, piece: jax.Array) -> tuple[Any, None]:
            add = functools.partial(sums_with, loss, classes=classes)
            specs = (of_rows, of_rows, of_rows, WHOLE, WHOLE, *(WHOLE for _ in bias))
            cut = [self.pieces.piece(b, number) for b in bias]
            run = self.devices.on_each(add, specs, of_rows)
            return run(sums, hidden, labels, self._numbers(labels, classes, number), piece, *cut), None

        sums, _ = self._each(head, sums, use)

        def end(sums: Any, labels: jax.Array, weights: jax.Array) -> list[Any]:
            losses, lse = losses_of(loss, sums, labels, classes)
            out = weighted(losses, weights)
            return [out if loss.per_token else sum_over_devices(out.sum(), self.devices.plan), losses, lse]

        outs = [of_rows if loss.per_token else WHOLE, of_rows, of_rows]
        out, *kept = self.devices.on_each(end, of_rows, outs)(sums, labels, weights)
        return [first_values(out, operands[-1].shape) if loss.per_token else out, *kept]

    def _given(self, operands: Arrays) -> tuple[Arrays, jax.Array, Arrays]:
        """Hidden states, labels and weights; the head; the bias, if there is one, whole."""
        hidden, head, *bias, labels, weights = operands
        whole = [self.devices.whole(w, b) for w, b in zip(self.devices.weights[1:], bias, strict=False)]
        return self.devices.rows([hidden, labels, weights], labels.ndim), head, whole

    def _gradients(self, loss: TokenLoss, operands: Arrays, saved: Arrays) -> list[Any]:
        """The losses of the tokens, and the gradients of the hidden states, of the head, and of the bias."""
        (hidden, labels, weights), head, bias = self._given(operands)
        losses, lse = saved
        of_bias, of_rows = self.devices.weights[1 : 1 + len(bias)], self._rows
        devices, classes = self.devices, head.shape[-1]

        def use(of_hidden: jax.Array, number: int, piece: jax.Array) -> tuple[jax.Array, list[Any]]:
            of_piece = self.weight(piece.shape)

            def own(of_hidden: jax.Array, *given: Any) -> list[Any]:
                of_hidden, grad, *rest = gradients_with(loss, of_hidden, *given, classes=classes)
                return [of_hidden, devices.reduced(of_piece, piece, grad), *(g[None] for g in rest)]

            specs = (*(of_rows for _ in range(5)), WHOLE, WHOLE, *(WHOLE for _ in bias))
            cut = [self.pieces.piece(b, number) for b in bias]
            run = devices.on_each(own, specs, [of_rows, devices.spec(of_piece), *(of_rows for _ in bias)])
            numbers = self._numbers(labels, classes, number)
            of_hidden, grad, *rest = run(of_hidden, hidden, labels, weights, lse, numbers, piece, *cut)
            return of_hidden, [devices.laid_out(grad, of_piece, piece.shape), *rest]

        zero = jnp.zeros(hidden.shape, wide_dtype(hidden, head))
        of_hidden, parts = self._each(head, zero, use)
        of_head, *rest = (self.pieces.joined(some) for some in zip(*parts, strict=True))
        of_head = devices.plan.constrain(of_head, self.weight(head.shape).grad)
        of_hidden = first_values(of_hidden.astype(hidden.dtype), operands[0].shape)
        first = first_values(losses, operands[-1].shape)
        return [first, of_hidden, of_head, *map(self._of_bias, of_bias, bias, rest)]

    def _of_bias(self, weight: Any, bias: jax.Array, grad: jax.Array) -> jax.Array:
        """Its gradient from those of all devices, [devices, classes]."""

        def own(grad: jax.Array) -> jax.Array:
            return self.devices.reduced(weight, bias, grad[0])

        run = self.devices.on_each(own, self._rows, self.devices.spec(weight))
        return self.devices.laid_out(run(grad), weight, bias.shape)

    def _each(self, shard: jax.Array, carry: Any, use: Callable[[Any, int, jax.Array], Any]) -> tuple[Any, list[Any]]:
        """The last carry, and the results, of `use(carry, number, piece)` for each piece.

        A piece is gathered when the last but one is used, and used when the result of the last but one is there.
        """
        count, done = self.pieces.count, list[Any]()
        ahead = self._piece(shard, 0)
        for number in range(count):
            piece = ahead
            if number + 1 < count:
                shard, carry = tied(shard, carry)
                ahead = self._piece(shard, number + 1)
            if len(done) > 1:
                carry, done[-2] = tied(carry, done[-2])
            carry, found = use(carry, number, piece)
            done.append(found)
        return carry, done

    def _piece(self, shard: jax.Array, number: int) -> jax.Array:
        piece = self.pieces.piece(shard, number)
        return self.devices.whole(self.weight(piece.shape), piece)

    def _numbers(self, labels: jax.Array, classes: int, number: int) -> jax.Array:
        return self.pieces.piece(jnp.arange(classes, dtype=labels.dtype), number)

    @property
    def _rows(self) -> jax.P:
        return P(batch_axes(self.devices.plan))
