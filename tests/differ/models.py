"""A case's model in its flavour: as linen module, NNX module or function of a pytree, with the plain loss of each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jzero
from differ.blocks import (
    BLOCKS,
    DEPTH,
    OUT,
    TILED,
    TIME,
    VOCABULARY,
    cross_entropy,
    lookup,
    mean_of,
    normal,
    params_of,
    squared_error,
)

RATE = 0.2
EPSILON = 1e-3


class Form(NamedTuple):
    """What a model is made of: hashable, so that linen modules are equal where their forms are."""

    kinds: tuple[str, ...]
    width: int
    head: str
    dtype: Any
    compute: Any
    names: tuple[str, ...]
    tiles: tuple[tuple[str, Any], ...] = ()  # arguments of `tiled_loss`: the model then returns its loss
    tiled: bool = False  # layers run in tiles
    plainly: bool = False  # the loss is computed from whole logits, and layers run whole


def form_of(case: dict) -> Form:
    """The form of a case's model."""
    dtype = jnp.dtype(case["dtype"])
    compute = jnp.dtype(case.get("compute") or dtype)
    tiles = tuple(sorted(case.get("tiles", {}).items()))
    names, tiled = tuple(case.get("names", ())), case.get("tiled", False)
    return Form(tuple(case["blocks"]), case["width"], case["head"], dtype, compute, names, tiles, tiled)


def batch_of(case: dict, step: int) -> dict[str, np.ndarray]:
    """The batch of one step, whole: `x [B, T, D]`, `tokens`, `labels [B, T]`, `y [B, T, OUT]`, in some a `mask [B]`."""
    rng, rows = np.random.default_rng([case["data"], step]), case["rows"]
    batch = arrays_of(case, rng, rows)
    if case.get("weighed"):  # micro-batches of other weights, some of them empty
        batch["mask"] = (rng.random(rows) < rng.choice((0.3, 0.8))).astype(np.float32)
        batch["mask"][rng.integers(rows)] = 1
    return batch


def arrays_of(case: dict, rng, rows: int) -> dict[str, np.ndarray]:
    """The arrays of `batch_of` that every case has."""
    if case["head"] == "bare":
        x = rng.standard_normal((rows, case["width"]), np.float32)
        return {"x": x, "y": rng.standard_normal((rows, OUT), np.float32)}
    return {
        "x": rng.standard_normal((rows, TIME, case["width"]), np.float32),
        "y": rng.standard_normal((rows, TIME, OUT), np.float32),
        "tokens": rng.integers(0, VOCABULARY, (rows, TIME)).astype(np.int32),
        "labels": rng.integers(0, VOCABULARY, (rows, TIME)).astype(np.int32),
    }


def loss_of(form: Form, out, batch):
    """The loss of a model's output."""
    if form.tiles:
        return out
    return (squared_error if form.head in ("mse", "bare") else cross_entropy)(out, batch)


def run_block(form: Form, kind: str, p, h, tokens):
    """A block of `BLOCKS`, in tiles if the form says so."""
    if kind not in TILED or not form.tiled or form.plainly:
        return BLOCKS[kind].run(p, h, tokens)
    return jzero.tiled(lambda h, p: BLOCKS[kind].run(p, h, None), tiles=TIME)(h, p)


def layer_of(form: Form, layer):
    """A class of Flax, in tiles if the form says so."""
    return jzero.tiled(layer, tiles=TIME) if form.tiled and not form.plainly else layer


def end_of(form: Form, h, head, batch):
    """What a model returns, from its hidden states and its head [features, classes]: logits, or the loss."""
    if not form.tiles:
        return h @ head
    given: dict[str, Any] = dict(form.tiles)
    if not form.plainly:
        where = batch["mask"][:, None] if "mask" in batch else None
        out = jzero.tiled_loss(h, head, batch["labels"], where=where, **given)
        if out.ndim == 0:
            return out
        return out.mean() if where is None else out.sum() / jnp.broadcast_to(where, out.shape).sum()
    logits = jnp.matmul(h, head, preferred_element_type=jnp.float32)
    if given["soft_cap"]:
        logits = given["soft_cap"] * jnp.tanh(logits / given["soft_cap"])
    target = optax.smooth_labels(jax.nn.one_hot(batch["labels"], VOCABULARY), given["label_smoothing"])
    losses = optax.softmax_cross_entropy(logits, target) + given["z_loss"] * jax.nn.logsumexp(logits, -1) ** 2
    return mean_of(losses, batch)


# --- pytrees --------------------------------------------------------------------------------------------------


def plain_params(form: Form):
    """The params of the plain flavour."""
    key, d, dtype = jax.random.key(1), form.width, form.dtype
    if form.head == "bare":
        return normal(key, (d, OUT), dtype)
    blocks = [params_of(k, d, jax.random.fold_in(key, i), dtype) for i, k in enumerate(form.kinds)]
    head = {"embed": normal(key, (VOCABULARY, d), dtype)}
    if form.head != "tied":
        outputs = OUT if form.head == "mse" else VOCABULARY
        head["out"] = normal(jax.random.fold_in(key, 99), (d, outputs), dtype)
    named = dict(zip(form.names, blocks, strict=True)) if form.names else {"blocks": blocks}
    return named | {"head": head}


def plain_forward(form: Form, params, batch):
    """Its output."""
    params = jax.tree.map(lambda p: p.astype(form.compute), params)
    h = batch["x"].astype(form.compute)
    if form.head == "bare":
        return jnp.tanh(h) @ params
    h = h + lookup(params["head"]["embed"], batch["tokens"])
    blocks = [params[n] for n in form.names] if form.names else params["blocks"]
    for kind, p in zip(form.kinds, blocks, strict=True):
        h = h + 0.5 * run_block(form, kind, p, h, batch["tokens"])
    head = params["head"]["embed"].T if form.head == "tied" else params["head"]["out"]
    return end_of(form, h, head, batch)


# --- linen ----------------------------------------------------------------------------------------------------


class LinenRaw(nn.Module):
    """A block of `BLOCKS`."""

    kind: str
    form: Form

    @nn.compact
    def __call__(self, h, tokens):
        names = BLOCKS[self.kind].shapes(self.form.width)
        inits, dtype = BLOCKS[self.kind].init, self.form.dtype
        p = {n: self.param(n, inits.get(n, normal), shape, dtype) for n, shape in names.items()}
        return run_block(self.form, self.kind, {k: v.astype(self.form.compute) for k, v in p.items()}, h, tokens)


class LinenLayer(nn.Module):
    """What `nn.scan` and `nn.remat` run."""

    form: Form

    @nn.compact
    def __call__(self, h, _=None):
        f = self.form
        return h + 0.3 * jnp.tanh(nn.Dense(f.width, dtype=f.compute, param_dtype=f.dtype)(h)), None


def linen_layer(kind: str, form: Form, name: str, h):
    """One of Flax's own layers applied to `h`."""
    types: dict[str, Any] = {"dtype": form.compute, "param_dtype": form.dtype, "name": name}
    d = form.width
    if kind == "Dense":
        return jnp.tanh(layer_of(form, nn.Dense)(d, **types)(h))
    if kind == "Conv":
        return jnp.tanh(nn.Conv(d, (2,), **types)(h))
    if kind == "Attention":
        return nn.MultiHeadDotProductAttention(2, qkv_features=8, use_bias=False, **types)(h)
    if kind == "LayerNorm":
        return layer_of(form, nn.LayerNorm)(epsilon=EPSILON, **types)(h)
    if kind == "BatchNorm":
        return nn.BatchNorm(use_running_average=False, momentum=0.9, epsilon=EPSILON, **types)(h)
    if kind == "Dropout":
        return nn.Dropout(RATE, deterministic=False, name=name)(h)
    if kind == "Scan":
        scanned = nn.scan(LinenLayer, variable_axes={"params": 0}, split_rngs={"params": True}, length=DEPTH)
        return scanned(form, name=name)(h, None)[0]
    if kind == "Remat":
        return nn.remat(LinenLayer)(form, name=name)(h)[0]
    if kind == "Einsum":
        return jnp.tanh(nn.DenseGeneral((2, 3), **types)(h)).mean((-1, -2))[..., None] * h
    if kind == "GRU":
        return nn.RNN(nn.GRUCell(d, dtype=form.compute), name=name)(h)  # its orthogonal init knows no 16 bits
    raise ValueError(kind)


class LinenHead(nn.Module):
    """The kernel of a dense layer."""

    form: Form

    @nn.compact
    def __call__(self):
        shape = (self.form.width, VOCABULARY)
        return self.param("kernel", nn.initializers.lecun_normal(), shape, self.form.dtype)


class Linen(nn.Module):
    """The linen flavour."""

    form: Form

    @nn.compact
    def __call__(self, batch):
        f = self.form
        types: dict[str, Any] = {"dtype": f.compute, "param_dtype": f.dtype}
        embed = nn.Embed(VOCABULARY, f.width, name="embed", **types)
        h = batch["x"].astype(f.compute) + embed(batch["tokens"])
        for i, kind in enumerate(f.kinds):
            raw, name = kind in BLOCKS, f.names[i] if f.names else f"b{i}"
            out = LinenRaw(kind, f, name=name)(h, batch["tokens"]) if raw else linen_layer(kind, f, name, h)
            h = h + 0.5 * out.astype(h.dtype)
        if f.tiles:
            head = embed.embedding.T if f.head == "tied" else LinenHead(f, name="out")()
            return end_of(f, h, head.astype(f.compute), batch)
        if f.head == "tied":
            return embed.attend(h)
        return nn.Dense(OUT if f.head == "mse" else VOCABULARY, use_bias=False, name="out", **types)(h)


# --- NNX ------------------------------------------------------------------------------------------------------


class NnxRaw(nnx.Module):
    """A block of `BLOCKS`."""

    def __init__(self, kind: str, form: Form, rngs):
        self.kind, self.form = kind, form
        self.names = tuple(BLOCKS[kind].shapes(form.width))
        for name, value in params_of(kind, form.width, rngs.params(), form.dtype).items():
            setattr(self, f"p_{name}", nnx.Param(value))

    def __call__(self, h, tokens):
        p = {n: getattr(self, f"p_{n}")[...].astype(self.form.compute) for n in self.names}
        return run_block(self.form, self.kind, p, h, tokens)


class NnxLayer(nnx.Module):
    """What `nnx.scan` and `nnx.remat` run."""

    def __init__(self, form: Form, rngs):
        self.dense = nnx.Linear(form.width, form.width, dtype=form.compute, param_dtype=form.dtype, rngs=rngs)

    def __call__(self, h):
        return h + 0.3 * jnp.tanh(self.dense(h))


class NnxFlax(nnx.Module):
    """One of Flax's own layers."""

    def __init__(self, kind: str, form: Form, rngs):
        self.kind, d = kind, form.width
        types: dict[str, Any] = {"dtype": form.compute, "param_dtype": form.dtype, "rngs": rngs}
        make = {
            "Dense": lambda: layer_of(form, nnx.Linear)(d, d, **types),
            "Conv": lambda: nnx.Conv(d, d, (2,), **types),
            "Attention": lambda: nnx.MultiHeadAttention(2, d, qkv_features=8, use_bias=False, decode=False, **types),
            "LayerNorm": lambda: layer_of(form, nnx.LayerNorm)(d, epsilon=EPSILON, **types),
            "BatchNorm": lambda: nnx.BatchNorm(d, momentum=0.9, epsilon=EPSILON, **types),
            "Dropout": lambda: nnx.Dropout(RATE, rngs=rngs),
            "Scan": lambda: self.stack(form, rngs),
            "Remat": lambda: NnxLayer(form, rngs),
            "Einsum": lambda: nnx.LinearGeneral(d, (2, 3), **types),
            "GRU": lambda: nnx.RNN(nnx.GRUCell(d, d, **types | {"param_dtype": jnp.float32}), rngs=rngs),
        }
        self.layer = make[kind]()

    @staticmethod
    def stack(form: Form, rngs):
        """A stack of layers, as NNX makes it."""

        @nnx.split_rngs(splits=DEPTH)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs):
            return NnxLayer(form, rngs)

        return make(rngs)

    def __call__(self, h, tokens):
        if self.kind == "Scan":
            run = nnx.scan(lambda h, layer: layer(h), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            return run(h, self.layer)
        if self.kind == "Remat":
            return nnx.remat(lambda layer, h: layer(h))(self.layer, h)
        out = self.layer(h)
        if self.kind == "Einsum":
            return jnp.tanh(out).mean((-1, -2))[..., None] * h
        return jnp.tanh(out) if self.kind in ("Dense", "Conv") else out


class Nnx(nnx.Module):
    """The NNX flavour."""

    def __init__(self, form: Form, rngs):
        self.form = form
        types: dict[str, Any] = {"dtype": form.compute, "param_dtype": form.dtype, "rngs": rngs}
        self.embed = nnx.Embed(VOCABULARY, form.width, **types)
        blocks = [(NnxRaw if k in BLOCKS else NnxFlax)(k, form, rngs) for k in form.kinds]
        for name, block in zip(form.names, blocks, strict=False):
            setattr(self, name, block)
        if not form.names:
            self.blocks = nnx.List(blocks)
        if form.head != "tied":
            outputs = OUT if form.head == "mse" else VOCABULARY
            self.out = nnx.Linear(form.width, outputs, use_bias=False, **types)

    def __call__(self, batch):
        f = self.form
        h = batch["x"].astype(f.compute) + lookup(self.embed.embedding[...].astype(f.compute), batch["tokens"])
        for block in [getattr(self, n) for n in f.names] if f.names else self.blocks:
            h = h + 0.5 * block(h, batch["tokens"]).astype(h.dtype)
        if f.tiles:
            head = self.embed.embedding[...].T if f.head == "tied" else self.out.kernel[...]
            return end_of(f, h, head.astype(f.compute), batch)
        return self.embed.attend(h) if f.head == "tied" else self.out(h)


# --- the plain loss of each -----------------------------------------------------------------------------------


class Model(NamedTuple):
    """A model without jzero.

    Attributes:
      init: makes (params, rest), both trees of arrays; params are dicts (or one bare array).
      loss: of (params, rest, batch, key), with the new rest.
      module: linen's module, or the function that makes NNX's; None for pytrees.
    """

    init: Callable[[], tuple[Any, Any]]
    loss: Callable[..., tuple[Any, Any]]
    module: Any


@functools.cache
def model_of(flavour: str, form: Form) -> Model:
    """The model of a form; equal forms have one and the same."""
    return {"plain": _plain, "linen": _linen, "nnx": _nnx}[flavour](form)


def _plain(form: Form) -> Model:
    def loss(params, rest, batch, key):
        return loss_of(form, plain_forward(form, params, batch), batch), rest

    return Model(lambda: (plain_params(form), {}), loss, None)


def _linen(form: Form) -> Model:
    module = Linen(form)
    tokens = np.zeros((1, TIME), np.int32)
    example = {"x": np.ones((1, TIME, form.width), np.float32), "tokens": tokens, "labels": tokens}

    def init():
        variables = dict(module.init({"params": jax.random.key(1), "dropout": jax.random.key(2)}, example))
        return variables.pop("params"), variables

    def loss(params, rest, batch, key):
        out, new = module.apply({"params": params, **rest}, batch, rngs={"dropout": key}, mutable=list(rest))
        return loss_of(form, out, batch), dict(new)

    return Model(init, loss, module)


def _nnx(form: Form) -> Model:
    def make():
        return Nnx(form, nnx.Rngs(1))

    graph, abstract, _ = nnx.split(nnx.eval_shape(make), nnx.Param, ...)

    def init():
        _, params, rest = nnx.split(make(), nnx.Param, ...)
        return nnx.to_pure_dict(params), rest

    def loss(params, rest, batch, key):
        state = jax.tree.map(lambda x: x, abstract)
        nnx.replace_by_pure_dict(state, params)
        model = nnx.merge(graph, state, jax.tree.map(lambda x: x, rest))  # variables of this trace
        value = loss_of(form, model(batch), batch)
        return value, nnx.split(model, nnx.Param, ...)[2]

    return Model(init, loss, make)
