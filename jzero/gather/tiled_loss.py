"""`tiled_loss`: cross-entropy whose logits never exist whole, and what a walk does where it meets one."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jzero.comm.token_loss import OnPlan
from jzero.comm.token_loss_pieces import InPieces
from jzero.core.errors import check_choice, check_flag, check_int, check_number, shown, typed_shape
from jzero.core.nnx_modules import is_variable
from jzero.core.token_loss import TokenLoss
from jzero.core.token_loss_rules import GRADIENTS, OneDevice, recorded_loss, token_loss
from jzero.core.traces import is_as_written, planned
from jzero.gather.large_weights import classes_in_pieces
from jzero.gather.sharded_weight import Weight
from jzero.gather.walk import Walk, gathered, on_shards
from jzero.layout.leaf_rule import Layout
from jzero.layout.mesh import in_shard_map
from jzero.sharding import Plan, check_plan

WHERE = "jzero.tiled_loss"
REDUCTIONS = ("mean", "sum", "none")
OUTSIDE = (
    f"{WHERE}: its gradient is taken outside of jzero.gather_on_use and of a wrapped apply_fn, where jzero does not "
    "know how the head is sharded: every tile would gather the head and reduce its gradient. Wrap the whole loss "
    "(jzero.value_and_grad(loss, plan), or jzero.gather_on_use(loss, plan)), or pass plan=plan."
)
MISSED = (
    f"{WHERE}: it is called in a function that jzero cannot look into (a jax.custom_vjp, or a kernel). Call it outside "
    "of that function."
)


def tiled_loss(
    hidden: Any,
    head: Any,
    labels: Any,
    *,
    where: Any = None,
    bias: Any = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    reduction: str = "mean",
    tiles: int | None = None,
    recompute: bool | None = None,
    plan: Plan | None = None,
) -> jax.Array:
    """Cross-entropy of `softmax(hidden @ head)`, tile by tile of tokens: the logits never exist whole.

    Each device cuts its own tokens into tiles. The head is gathered once for all of them; its gradient is summed over
    the tiles in fp32 on each device, and reduced once. The gradients are made in the forward pass, while a tile's
    logits are there, so the matmuls are those of the plain loss. Values are those of the plain loss with fp32 logits.

    It runs inside of `gather_on_use`, `value_and_grad` or a wrapped `apply_fn`, in linen, NNX and plain functions, at
    all stages; elsewhere with `plan`.

    Args:
      hidden: [..., features], floating; the examples lie along the first dim.
      head: [features, classes], floating. For a tied table [classes, features] pass `table.T`.
      labels: [...], integers in [0, classes). A label outside of that whose token counts makes the loss nan.
      where: [...], or a shape that broadcasts to it: bools, or weights of the tokens. None: all count alike.
      bias: [classes], added to the logits.
      label_smoothing: this part of the target is spread over all classes, as in `optax.smooth_labels`.
      z_loss: times `logsumexp(logits) ** 2` of each token, added to its loss.
      soft_cap: logits x become `soft_cap * tanh(x / soft_cap)`.
      reduction: "mean": sum of the weighted losses divided by the sum of the weights (nan if that is 0); "sum"; "none":
        one loss per token, times its weight, [...].
      tiles: into how many tiles each device cuts its tokens. None: as many as it takes for the fp32 logits of one to
        have at most 128 MiB.
      recompute: True: the backward pass makes each tile's logits again, 4/3 of the matmuls. None: only for
        reduction="none" and for fp16, where the gradients cannot be made before the cotangent is known. False raises
        there.
      plan: for a call outside of a wrapped function. The head's gradient is reduce-scattered as that of a param of its
        shape. If no param has that shape, or if several with different layouts do, it is all-reduced.

    Returns:
      The loss in fp32: a number, or [...] for "none".

    Raises:
      TypeError: an argument is of the wrong kind.
      ValueError: shapes that do not fit, numbers out of range, `recompute=False` where it cannot be. When
        differentiated: a call outside of a wrapped function without `plan`, or in a function that jzero cannot read.
      NotImplementedError: a second derivative inside of a wrapped function; that of a wrapped one works.

    Cost:
      Per device: 6 bytes per logit of a tile for bf16 (fp32 logits and their gradient), the gathered head, and its
      fp32 gradient (4 bytes per value), until the loss is done; then the gradient's shard, and the gradient of `hidden`
      in its own dtype. Wire at stage 3: 1 Psi of the head for the gather (2 with `recompute`) and 1 for the gradient. A
      tied table's two gradients are reduced one by one: 1 Psi of the table more.
      A head of stage 3 that holds more than 1 GiB (8 buckets, if these are more) is never whole: it is gathered in
      pieces of the classes, once for the loss and once for the gradients. That is the wire and the matmuls of
      `recompute`, which is implied, and the gradient of `hidden` is in fp32 until the loss is done.

    References:
      Hsu et al., Liger Kernel (arXiv:2410.10989), section 3.2; Bekman et al., Arctic Long Sequence Training
      (arXiv:2506.13996), section 3.1; Rajbhandari et al., ZeRO-Infinity (arXiv:2104.07857), section 5.1.3.

    Example:
      >>> import jax.numpy as jnp, jzero
      >>> params = {"embed": jnp.ones((64, 16)), "head": jnp.ones((16, 64))}
      >>> plan = jzero.make_plan(params, stage=3)
      >>> def loss(params, tokens):
      ...     return jzero.tiled_loss(params["embed"][tokens], params["head"], tokens, tiles=4)
      >>> tokens = plan.place_batch(jnp.zeros((16, 32), int))
      >>> value, grads = jzero.value_and_grad(loss, plan)(params, tokens)
      >>> round(float(value), 3)
      4.159
    """
    hidden, head, labels = (_array(x, name) for x, name in ((hidden, "hidden"), (head, "head"), (labels, "labels")))
    bias = None if bias is None else _array(bias, "bias")
    _check_shapes(hidden, head, labels, bias)
    check_number(label_smoothing, "label_smoothing", "a number from 0 up to but not including 1", _is_part, where=WHERE)
    check_number(z_loss, "z_loss", "a number of at least 0", lambda x: x >= 0, where=WHERE)
    if soft_cap is not None:
        check_number(soft_cap, "soft_cap", "a number above 0", lambda x: x > 0, where=WHERE)
    check_choice(reduction, "reduction", REDUCTIONS, where=WHERE)
    if tiles is not None:
        check_int(tiles, "tiles", low=1, where=WHERE)
    if recompute is not None:
        check_flag(recompute, "recompute", where=WHERE)
    if plan is not None:
        check_plan(plan, where=WHERE)
    again = reduction == "none" or any(x.dtype == jnp.float16 for x in (hidden, head))
    if again and recompute is False:
        raise ValueError(
            f"{WHERE}: recompute=False, but with reduction='none' and for fp16 the backward pass must make the logits "
            "again: the gradients need the cotangents. Leave recompute out."
        )
    loss = TokenLoss(
        float(label_smoothing), float(z_loss), None if soft_cap is None else float(soft_cap), tiles,
        per_token=reduction == "none", again=bool(again if recompute is None else recompute),
    )  # fmt: skip
    labels = labels.astype(jnp.promote_types(labels.dtype, jnp.int32))  # that of class numbers: uint8 has no 256
    weights = _weights(where, labels)
    out = _on_devices(loss, [hidden, head, *([] if bias is None else [bias]), labels, weights], plan)
    return out / weights.sum() if reduction == "mean" else out


def _on_devices(loss: TokenLoss, operands: list[Any], plan: Plan | None) -> Any:
    """The loss, where it is called."""
    plan = planned.value if plan is None else plan
    if is_as_written():
        return recorded_loss(loss, operands, not_run=MISSED)
    if in_shard_map():
        return token_loss(loss, OneDevice(), operands)
    if plan is None:
        return recorded_loss(dataclasses.replace(loss, strided=True), operands, not_differentiated=OUTSIDE)
    params = operands[1:-2]
    return token_loss(loss, OnPlan(plan, tuple(_param_like(plan, x) for x in params)), operands)


def _param_like(plan: Plan, x: jax.Array) -> Layout | None:
    """Layouts of the params of this shape, with the gradient on the shards of the state; None if they differ."""
    found = [y for y in plan.layouts if y.shape == x.shape and y.frozen is None]
    same = len({(y.used, y.state, y.dtype) for y in found}) == 1 and not plan.config.updates_outside
    return dataclasses.replace(found[0], grad=found[0].state) if same and plan.config.row.state else None


def _array(x: Any, name: str) -> jax.Array:
    x = x[...] if is_variable(x) else x
    if not isinstance(x, (jax.Array, np.ndarray)):
        raise TypeError(f"{WHERE}: {name} must be an array, got {shown(x)}.")
    if not jnp.issubdtype(x.dtype, jnp.integer if name == "labels" else jnp.floating):
        what = "integers" if name == "labels" else "floating-point numbers"
        raise TypeError(f"{WHERE}: {name} must be an array of {what}, got {typed_shape(x)}.")
    return jnp.asarray(x)


def _check_shapes(hidden, head, labels, bias) -> None:
    """Raises ValueError where shapes do not fit."""
    features = hidden.shape[-1] if hidden.ndim else 0
    if hidden.ndim < 2 or labels.shape != hidden.shape[:-1] or 0 in hidden.shape:
        raise ValueError(
            f"{WHERE}: labels must have the shape of hidden without its last dim, and hidden at least 2 dims and one "
            f"token; got hidden {typed_shape(hidden)} and labels {typed_shape(labels)}."
        )
    if head.ndim != 2 or head.shape[0] != features or 0 in head.shape:
        turned = head.ndim == 2 and head.shape[1] == features
        remedy = " Pass head.T." if turned else ""
        raise ValueError(
            f"{WHERE}: head must be [features, classes] = [{features}, classes] for hidden {typed_shape(hidden)}, got "
            f"{typed_shape(head)}.{remedy}"
        )
    if bias is not None and bias.shape != head.shape[1:]:
        raise ValueError(f"{WHERE}: bias must be [classes] = [{head.shape[1]}], got {typed_shape(bias)}.")


def _weights(where: Any, labels: jax.Array) -> jax.Array:
    """Of each token, fp32."""
    if where is None:
        return jnp.ones(labels.shape, jnp.float32)
    given = where[...] if is_variable(where) else where
    if not isinstance(given, (jax.Array, np.ndarray, bool, int, float)):
        raise TypeError(f"{WHERE}: where must be an array of bools or of weights, got {shown(where)}.")
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        check_number(given, "where", "an array, or a number that fits into float32", lambda x: True, where=WHERE)
        given = float(given)
    given = jnp.asarray(given)
    if not any(jnp.issubdtype(given.dtype, kind) for kind in (jnp.bool_, jnp.integer, jnp.floating)):
        raise TypeError(f"{WHERE}: where must be an array of bools or of weights, got {typed_shape(given)}.")
    ends = labels.shape[labels.ndim - given.ndim :]
    if given.ndim > labels.ndim or any(own not in (1, n) for own, n in zip(given.shape, ends, strict=True)):
        raise ValueError(
            f"{WHERE}: where must broadcast to the shape of labels {typed_shape(labels)}, got {typed_shape(given)}."
        )
    return jnp.broadcast_to(given.astype(jnp.float32), labels.shape)


def _is_part(x: float) -> bool:
    return 0 <= x < 1


def loss_on_devices(eqn, values: list[Any], walk: Walk) -> list[Any]:
    """A recorded loss, or its gradients, on the devices of the plan; its weights are gathered once for all tiles."""
    loss = eqn.params["loss"]
    hidden, *params, labels, weights = values
    hidden, labels, weights = (gathered(x, walk) for x in (hidden, labels, weights))
    if eqn.primitive.name == GRADIENTS:  # in a function that takes a gradient itself, and may use it for anything
        whole = [gathered(x, walk) for x in params]
        return OnPlan(walk.plan).run(loss, GRADIENTS, [hidden, *whole, labels, weights])
    params = [x.fetched(walk.comm) if isinstance(x, Weight) else x for x in on_shards(params, walk)]
    known = [dataclasses.replace(x, shard=x.aval, at_rest=None) if isinstance(x, Weight) else None for x in params]

    def gather(weight: Any, shard: jax.Array) -> jax.Array:
        layouts = (weight.stored, weight.used)
        return walk.comm.weights(shard, *layouts, weight.narrow, weight.order) if weight.split else shard

    head, pieces = params[0], classes_in_pieces(params[0], walk)

    def of_piece(shape: tuple[int, ...]) -> Weight:
        return dataclasses.replace(head, shard=jax.ShapeDtypeStruct(shape, head.dtype), at_rest=None)

    devices = OnPlan(walk.plan, tuple(known), gather)
    shards = [x.shard if isinstance(x, Weight) else x for x in params]
    operands = [hidden, *shards, labels, weights]
    if pieces is None:
        return [token_loss(loss, devices, operands)]
    return [token_loss(dataclasses.replace(loss, again=True), InPieces(devices, pieces, of_piece), operands)]
