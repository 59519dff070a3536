"""How a token loss is differentiated, and how it stands in a trace.

[Note: gradients in the forward pass]
A loss that ends in one number has a gradient that is known up to the cotangent of that number. So one loop over tiles
makes the loss and the gradients of the hidden states and of the head, while a tile's logits are there, and the backward
pass only multiplies them: three matmuls per tile, as many as without tiles, and the head is gathered once. It keeps the
gradient of the hidden states, which the backward pass begins with anyway, and that of the head, on its shards. (Liger
Kernel does so on one device: arXiv 2410.10989, section 3.2.) With `again` the backward pass makes each tile's logits a
second time, four matmuls in place of three: for a loss per token, whose cotangents only the backward pass knows, and
for fp16, whose gradients need the loss scale before they are rounded.

[Note: what analyses see]
In a trace that is only read, a loss is one equation. It carries the jaxpr of the plain loss, as a call carries its
body, so whatever reads the trace (which examples depend on each other, how the loss grows with the batch) reads the
plain loss.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad

from jzero.core.custom_primitive import custom_primitive
from jzero.core.jaxprs import every_equation
from jzero.core.linear import linear
from jzero.core.primitives import LOSS
from jzero.core.token_loss import TokenLoss
from jzero.core.types import Jaxpr

GRADIENTS = "jzero_token_loss_gradients"
Arrays = Sequence[Any]
Made = Callable[..., list[Any]]


class Devices(Protocol):
    """Where the operands of a loss lie, and how its results come about."""

    def run(self, loss: TokenLoss, make: str, operands: Arrays, saved: Arrays = ()) -> list[Any]:
        """The results of `loss.value` or of `loss.gradients`, as `make` says: `LOSS` or `GRADIENTS`.

        Those of `loss.value` may be followed by arrays that the backward pass is given as `saved`. Only a loss whose
        logits are made `again` has a backward pass that runs.
        """
        ...


@dataclasses.dataclass(frozen=True)
class OneDevice:
    """All operands are whole on this device: it is the only one, or one of those in a `jax.shard_map`."""

    def run(self, loss: TokenLoss, make: str, operands: Arrays, saved: Arrays = ()) -> list[Any]:
        """As it is."""
        return loss.value(*operands) if make == LOSS else loss.gradients(*operands)


def token_loss(loss: TokenLoss, devices: Devices, operands: Arrays) -> Any:
    """The loss, differentiable in hidden states, head, bias and weights.

    Args:
      loss: what is computed.
      devices: where; it holds no traced array.
      operands: those of `TokenLoss.value`; as `devices` expects them.
    """
    operands = _varying_alike(operands)

    @jax.custom_jvp
    def call(*operands):
        return devices.run(loss, LOSS, operands)

    def gradients(*operands, saved: Arrays = ()):
        return devices.run(_summed(loss), GRADIENTS, operands, saved)

    def jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
        return _derivative(loss, call, gradients, primals, tangents)

    call.defjvp(jvp, symbolic_zeros=True)
    return call(*operands)[0]


def _varying_alike(operands: Arrays) -> Arrays:
    """Operands that vary over the same axes of a `jax.shard_map` that checks this: what is one for all devices is cast.

    The gradient of what is cast is the sum over the devices.
    """
    own = [jax.typeof(x).manual_axis_type.varying for x in operands]
    axes = frozenset().union(*own)
    return [
        jax.lax.pcast(x, tuple(sorted(axes - some)), to="varying") if axes - some else x
        for x, some in zip(operands, own, strict=True)
    ]


def recorded_loss(loss: TokenLoss, operands: Arrays, *, not_run: str = "", not_differentiated: str = "") -> Any:
    """The same as one equation, for a trace that is read or walked.

    Args:
      loss, operands: see `token_loss`.
      not_run: message of the ValueError where it runs; empty: it may.
      not_differentiated: message of the ValueError where it is differentiated; empty: it may be.
    """
    jaxpr: Any = jax.make_jaxpr(loss.plain)(*(jax.ShapeDtypeStruct(np.shape(x), x.dtype) for x in operands))
    return _loss_p.bind(*operands, loss=loss, refused=(not_run, not_differentiated), jaxpr=jaxpr)[0]


def has_loss(jaxpr: Jaxpr) -> bool:
    """Whether a jaxpr, or a body in it, has a tiled loss."""
    return any(eqn.primitive.name in (LOSS, GRADIENTS) for eqn in every_equation(jaxpr))


def _summed(loss: TokenLoss) -> TokenLoss:
    return dataclasses.replace(loss, per_token=False)


def _derivative(
    loss: TokenLoss, value: Made, gradients: Made, primals: Arrays, tangents: Any
) -> tuple[list[Any], list[Any]]:
    """Results and tangents: see [Note: gradients in the forward pass]."""
    zeros = (ad.Zero, SymbolicZero)
    moves = [i for i, t in enumerate(tangents) if not isinstance(t, zeros) and t.dtype != jax.dtypes.float0]
    if not moves:
        outs = value(*primals)
        return outs, [np.zeros(x.shape, x.dtype) for x in outs]
    dtypes, given = [primals[i].dtype for i in moves], [tangents[i] for i in moves]

    def scaled(cotangent, grads):
        return [(cotangent * g).astype(d) for g, d in zip(grads, dtypes, strict=True)]

    if not (loss.per_token or loss.again):
        total, losses, *grads = gradients(*primals)
        grads = [[*grads, None, losses][i] for i in moves]  # labels have none

        def move(*flat):
            pairs = zip(flat[: len(moves)], flat[len(moves) :], strict=True)
            return [sum((jnp.vdot(g, t.astype(g.dtype)).astype(total.dtype) for g, t in pairs), jnp.zeros_like(total))]

        return [total], linear(move, lambda *flat: scaled(flat[-1], flat[:-1]), grads, given)

    def derivative(*flat):
        def plain(*some):
            new = dict(zip(moves, some, strict=True))
            return loss.plain(*(new.get(i, x) for i, x in enumerate(flat[: len(primals)])))

        return jax.jvp(plain, [flat[i] for i in moves], list(flat[-len(moves) :]))[1]

    outs = value(*primals)

    def back(*flat):
        *first, weights = flat[: len(primals)]
        by = flat[-1] * jnp.ones_like(weights)  # of each token
        saved = {"saved": flat[len(primals) : -1]} if len(outs) > 1 else {}
        _, losses, *grads = gradients(*first, by * weights, **saved)
        return [[*grads, None, by * losses][i].astype(d) for i, d in zip(moves, dtypes, strict=True)]

    moved = linear(derivative, back, [*primals, *outs[1:]], given)
    return outs, [*moved, *(np.zeros(x.shape, x.dtype) for x in outs[1:])]


def _loss_jvp(primals, tangents, *, loss: TokenLoss, refused: tuple[str, str], jaxpr):
    not_run, not_differentiated = refused
    if not_differentiated and any(type(t) is not ad.Zero for t in tangents):
        raise ValueError(not_differentiated)
    value = functools.partial(_loss_p.bind, loss=loss, refused=refused, jaxpr=jaxpr)
    gradients = functools.partial(_bind_gradients, loss=_summed(loss), refused=(not_run, ""))
    return _derivative(loss, value, gradients, primals, tangents)


def _bind_gradients(*operands, **params) -> list[Any]:
    return _gradients_p.bind(*operands, **params)


def _run(make: str) -> Callable[..., list[Any]]:
    def run(*operands, loss: TokenLoss, refused: tuple[str, str], **_):
        if refused[0]:
            raise ValueError(refused[0])
        return OneDevice().run(loss, make, operands)

    return run


def _no_second_derivative(primals, tangents, **params):
    raise NotImplementedError(
        "jzero.tiled_loss: it has no second derivative inside of a wrapped function. Wrap the loss and differentiate "
        "that, or compute it from its logits."
    )


def _one_by_one(args, dims, *, of, **params):
    """Under `vmap` one call after the other, each with its tiles."""
    moved = [jnp.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True) if d is not None]

    def one(some):
        rest = iter(some)
        return of().bind(*(x if d is None else next(rest) for x, d in zip(args, dims, strict=True)), **params)

    outs = jax.lax.map(one, moved)
    return outs, [0] * len(outs)


_loss_p = custom_primitive(
    LOSS, _run(LOSS), jvp=_loss_jvp, batch=functools.partial(_one_by_one, of=lambda: _loss_p),
    out_avals=lambda *avals, loss, **_: jax.make_jaxpr(loss.plain)(*avals).out_avals,
)  # fmt: skip
_gradients_p = custom_primitive(
    GRADIENTS, _run(GRADIENTS), jvp=_no_second_derivative,
    batch=functools.partial(_one_by_one, of=lambda: _gradients_p),
    out_avals=lambda *avals, loss, **_: jax.make_jaxpr(loss.gradients)(*avals).out_avals,
)  # fmt: skip
