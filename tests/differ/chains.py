"""Random optax chains: every optimizer of optax and optax.contrib that takes gradients alone, and its wrappers."""

from __future__ import annotations

import functools
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

RATE = 0.02

OPTIMIZERS: dict[str, Any] = {
    "acprop": lambda: contrib.acprop(RATE, eps=1e-2),
    "adabelief": lambda: optax.adabelief(RATE),
    "adadelta": lambda: optax.adadelta(1.0),
    "adafactor": lambda: optax.adafactor(RATE, min_dim_size_to_factor=8),
    "adagrad": lambda: optax.adagrad(RATE),
    "adam": lambda: optax.adam(RATE),
    "adamax": lambda: optax.adamax(RATE),
    "adamaxw": lambda: optax.adamaxw(RATE),
    "adamw": lambda: optax.adamw(RATE),
    "adan": lambda: optax.adan(RATE),
    "ademamix": lambda: contrib.ademamix(RATE),
    "adopt": lambda: contrib.adopt(RATE),
    "amsgrad": lambda: optax.amsgrad(RATE),
    "cocob": lambda: contrib.cocob(),
    "dadapt_adamw": lambda: contrib.dadapt_adamw(0.1),
    "dog": lambda: contrib.dog(1.0, ("heuristic", 1e-3)),  # from 1e-6 on its first steps are rounding
    "dowg": lambda: contrib.dowg(1.0),
    "fromage": lambda: optax.fromage(RATE),
    "galore": lambda: contrib.galore(RATE, rank=1, update_proj_gap=3),  # of a gradient of rank 1 a second is rounding
    "lamb": lambda: optax.lamb(RATE),
    "lars": lambda: optax.lars(RATE),
    "lion": lambda: optax.lion(RATE),
    "madgrad": lambda: contrib.madgrad(RATE),
    # its first step is `s_init` long: a millionth is a rounding of the params, and is divided by a millionth again
    "mechanize": lambda: contrib.mechanize(optax.adam(RATE), s_init=0.5),
    "momentum": lambda: optax.sgd(RATE, momentum=0.9),
    "muon": lambda: contrib.muon(RATE),
    "nadam": lambda: optax.nadam(RATE),
    "nadamw": lambda: optax.nadamw(RATE),
    "nesterov": lambda: optax.sgd(RATE, momentum=0.9, nesterov=True),
    "noisy_sgd": lambda: optax.noisy_sgd(RATE),
    "normalized": lambda: optax.chain(contrib.normalize(), optax.sgd(RATE)),
    "novograd": lambda: optax.novograd(RATE),
    "optimistic_adam": lambda: optax.optimistic_adam_v2(RATE),
    "optimistic_sgd": lambda: optax.optimistic_gradient_descent(RATE),
    "prodigy": lambda: contrib.prodigy(0.5),
    "radam": lambda: optax.radam(RATE, b2=0.9),  # at 0.999 optax itself, jitted and not, is 0.6 % apart: a cancellation
    "rmsprop": lambda: optax.rmsprop(RATE),
    "rmsprop_centered": lambda: optax.rmsprop(RATE, centered=True, momentum=0.9),
    "rprop": lambda: optax.rprop(RATE),
    "schedule_free_adamw": lambda: contrib.schedule_free_adamw(RATE),
    "schedule_free_sgd": lambda: contrib.schedule_free_sgd(RATE),
    "sgd": lambda: optax.sgd(RATE),
    "sign_sgd": lambda: optax.sign_sgd(RATE),
    "signum": lambda: optax.signum(RATE),
    "simplified_ademamix": lambda: contrib.simplified_ademamix(RATE * 0.05),
    "sm3": lambda: optax.sm3(RATE),
    "yogi": lambda: optax.yogi(RATE),
}

SMOOTH = ("sgd", "momentum", "nesterov", "optimistic_sgd", "fromage", "lars", "normalized")
"""Updates without a division by a small number or a sign: free runs stay beside each other."""

SIGNS = ("lion", "signum", "sign_sgd", "rprop", "cocob")
"""Updates that are a sign, COCOB's first too: rounding of what the sign is taken of may turn it."""

AMPLIFY = ("muon", "galore", "adabelief", "acprop", "rmsprop_centered")
"""Iterations, decompositions, differences of nearly equal numbers: each case measures how much rounding grows."""


def clip_to_median(factor: float = 3.0) -> optax.GradientTransformation:
    """Values are clipped to a multiple of their leaf's median: a sort inside of the update."""

    def update(updates, state, params=None):
        def clipped(g):
            bound = (factor * jnp.median(jnp.abs(g.astype(jnp.float32))) + 1e-6).astype(g.dtype)
            return jnp.clip(g, -bound, bound)

        return jax.tree.map(clipped, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def matrices(params):
    """A mask: leaves of two dims or more."""
    return jax.tree.map(lambda p: np.ndim(p) > 1, params)


def labels(params):
    """Two groups by the number of dims."""
    return jax.tree.map(lambda p: "wide" if np.ndim(p) > 1 else "flat", params)


def frozen_labels(params):
    """Bases of LoRA and every first leaf of several are frozen."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    names = ["frozen" if "base" in jax.tree_util.keystr(k) or (i == 0 and len(leaves) > 1) else "trained"
             for i, (k, _) in enumerate(leaves)]  # fmt: skip
    return jax.tree.unflatten(jax.tree.structure(params), names)


def is_trained(path, leaf=None) -> bool:
    """What the filter of a case names: about two thirds of the params, and no base of a LoRA. Of each layer the same.

    Embeddings are trained: a case has always one.
    """
    name = "/".join(str(key) for key in path)
    return "embed" in name or not ("base" in name or zlib.crc32(name.encode()) % 3 == 0)


def trained_flags(params) -> list[bool]:
    """For each param whether `is_trained` names it."""
    keys = [[getattr(k, "key", getattr(k, "idx", k)) for k in path] for path, _ in
            jax.tree_util.tree_leaves_with_path(params)]  # fmt: skip
    return [is_trained(path) for path in keys]


def trained_part(params, flags):
    """The trained leaves of a tree, with None in place of the others."""
    leaves, tree = jax.tree.flatten(params)
    return tree.unflatten([x if t else None for x, t in zip(leaves, flags, strict=True)])


def schedule(count):
    """A rate that changes at each step."""
    return RATE / (1 + 0.3 * count)


WRAPS: dict[str, Any] = {
    "clip_by_global_norm": lambda tx: optax.chain(optax.clip_by_global_norm(0.5), tx),
    "clip": lambda tx: optax.chain(optax.clip(0.05), tx),
    "adaptive_clip": lambda tx: optax.chain(optax.adaptive_grad_clip(0.1), tx),
    "block_rms": lambda tx: optax.chain(optax.clip_by_block_rms(0.1), tx),
    "median": lambda tx: optax.chain(clip_to_median(), tx),
    "decay": lambda tx: optax.chain(optax.add_decayed_weights(0.05, matrices), tx),
    "schedule": lambda tx: optax.chain(tx, optax.scale_by_schedule(lambda count: 1 / (1 + 0.3 * count))),
    "multi_steps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 5),
    "multi_transform": lambda tx: optax.multi_transform({"wide": tx, "flat": optax.adam(RATE)}, labels),
    "masked": lambda tx: optax.chain(optax.masked(tx, matrices), optax.masked(optax.scale(-0.1), _not(matrices))),
    "frozen": lambda tx: optax.multi_transform({"trained": tx, "frozen": optax.set_to_zero()}, frozen_labels),
    "centralize": lambda tx: optax.chain(optax.centralize(), tx),
    "ema": lambda tx: optax.chain(tx, optax.ema(0.5)),
    "trace": lambda tx: optax.chain(tx, optax.trace(0.5)),
    "zero_nans": lambda tx: optax.chain(optax.zero_nans(), tx),
    "trust_ratio": lambda tx: optax.chain(tx, optax.scale_by_trust_ratio(), optax.scale(0.1)),  # not a scalar to 0
    "noise": lambda tx: optax.chain(optax.add_noise(1e-3, 0.5, 3), tx),
    "apply_every": lambda tx: optax.chain(tx, optax.apply_every(2)),
    "norm_of_update": lambda tx: optax.chain(tx, optax.clip_by_global_norm(0.3)),
}

def by_last_gradient(tx):
    """Steps grow with the inner product with the last gradient, which is overwritten without being read by leaf."""

    def update(updates, last, params=None):
        factor = 1 + 0.2 * jnp.tanh(optax.tree.vdot(updates, last).astype(jnp.float32))
        return jax.tree.map(lambda g: (factor * g.astype(jnp.float32)).astype(g.dtype), updates), updates

    keeps = optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)
    return optax.chain(keeps, tx)


def of_moment(factor, first=jnp.zeros_like, more=None):
    """A wrapper: updates grow by up to a tenth, by `factor(average, kept)` of a moving average.

    Args:
      factor: of one leaf, in fp32.
      first: the initial average, from a param.
      more: a few values that are stored beside an average, made of it; they are `kept` at the next update.
    """

    def few(moments):  # in a list: no path ends as that of a param
        return [] if more is None else list(map(more, jax.tree.leaves(moments)))

    def init(params):
        moments = jax.tree.map(first, params)
        return moments, few(moments)

    def update(updates, state, params=None):
        moments = jax.tree.map(lambda m, g: (0.5 * m + 0.5 * g).astype(m.dtype), state[0], updates)
        grads, tree = jax.tree.flatten(updates)
        rows = zip(grads, jax.tree.leaves(moments), state[1] or grads, strict=True)
        grown = [
            ((1 + 0.1 * jnp.tanh(factor(m.astype(jnp.float32), k))) * g.astype(jnp.float32)).astype(g.dtype)
            for g, m, k in rows
        ]
        return tree.unflatten(grown), (moments, few(moments))

    return lambda tx: optax.chain(optax.GradientTransformation(init, update), tx)


def in_two_stages(m, _):
    """The largest of sums along the last dim."""
    return jnp.max(jnp.sum(jnp.abs(m), axis=-1)) if m.ndim else jnp.abs(m)


def in_a_loop(m, _):
    """Elementwise, by a loop whose first result is its counter."""
    return jax.lax.fori_loop(0, 2, lambda i, x: x - 0.1 * jnp.tanh(x), m)


def by_rows(p):
    """A param whose rows have length one, or less."""
    wide = p.astype(jnp.float32)
    return (wide / (0.1 + jnp.linalg.norm(wide, axis=-1, keepdims=True)) if p.ndim else wide).astype(p.dtype)


def from_a_table(tx):
    """Updates are scaled, value by value, by a vector that is stored once, and that no gradient changes."""

    def update(updates, table, params=None):
        def scaled(g):
            share = jnp.take(table, jnp.arange(g.size) % table.size).reshape(g.shape)
            return (share * g.astype(jnp.float32)).astype(g.dtype)

        return jax.tree.map(scaled, updates), 0.99 * table

    return optax.chain(optax.GradientTransformation(lambda params: jnp.linspace(0.5, 1.5, 24), update), tx)


RARE = {
    "last_gradient": by_last_gradient,
    "in_two_stages": of_moment(in_two_stages),
    "in_a_loop": of_moment(in_a_loop),
    "by_rows": of_moment(lambda m, _: m, first=by_rows),
    "few_values": of_moment(lambda m, k: jnp.mean(k.astype(jnp.float32)), more=lambda m: m[(slice(2),) * m.ndim]),
    "from_a_table": from_a_table,
}
"""Wrappers that only some cases draw, by their config: state as no optimizer of optax makes it."""

HYPERPARAMS = {
    "adam": optax.adam, "adamw": optax.adamw, "momentum": functools.partial(optax.sgd, momentum=0.9),
    "lion": optax.lion, "rmsprop": optax.rmsprop, "adagrad": optax.adagrad,
}  # fmt: skip


def _not(mask):
    return lambda params: jax.tree.map(lambda m: not m, mask(params))


@functools.cache
def _chain(base: str, inject: bool, wraps: tuple[str, ...]) -> optax.GradientTransformation:
    if inject:
        tx = optax.inject_hyperparams(HYPERPARAMS[base])(learning_rate=schedule)
    else:
        tx = OPTIMIZERS[base]()
    for name in wraps:
        tx = (WRAPS | RARE)[name](tx)
    return tx


def chain_of(case: dict) -> optax.GradientTransformation:
    """The chain of a case; one and the same for equal ones, as users keep one `tx`."""
    return _chain(case["optimizer"], case.get("inject", False), tuple(case["wraps"]))
