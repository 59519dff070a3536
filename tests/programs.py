"""The models and the compiled programs that tests share: a GPT, a convolutional net, a mixture of experts.

A program is lowered once per process and compiled once per run: the workers of pytest-xdist share what is compiled
(tests/conftest.py). Tests that need another program give `program` other arguments rather than write another model.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import jaxlib.version
import optax
from flax.training.train_state import TrainState
from jax.ad_checkpoint import checkpoint_name

import jzero

JAXLIB = tuple(map(int, jaxlib.version.__version__.split(".")[:3]))
SEQ = 16  # tokens: activations stay small beside the model states
# Collectives, layouts and aliasing are read from programs compiled with these: the code of the matmuls, which is not
# read, is a third of the compile time.
QUICK = {
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_disable_gpuasm_optimizations": True,
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}


def cached(fn):
    """`functools.cache` by what a call means: to that one, an argument left out and its default are two calls."""
    signature, inner = inspect.signature(fn), functools.cache(fn)

    @functools.wraps(fn)
    def call(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return inner(*bound.args, **bound.kwargs)

    return call


class Block(nn.Module):
    """Attention and MLP, with relu for softmax and gelu: what they are does not change what is sent."""

    dim: int
    heads: int
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, x, _=None):
        kw = {"dtype": self.dtype, "param_dtype": self.dtype}
        dense = functools.partial(nn.Dense, use_bias=False, **kw)
        y = nn.RMSNorm(**kw)(x)
        q, k, v = (t.reshape(*t.shape[:2], self.heads, -1) for t in jnp.split(dense(3 * self.dim)(y), 3, -1))
        weights = nn.relu(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 8)
        x = x + dense(self.dim)(jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape))
        return x + dense(self.dim)(nn.relu(dense(4 * self.dim)(nn.RMSNorm(**kw)(x)))), None


class Gpt(nn.Module):
    """A tied embedding around blocks, in a scan (`name="layers"`) or unrolled (`block_0`, ...)."""

    scan: bool
    layers: int
    dim: int = 1024
    heads: int = 16
    vocab: int = 512
    remat: bool = True
    dtype: Any = jnp.bfloat16
    block: Callable[..., nn.Module] = Block
    tied: bool = True

    @nn.compact
    def __call__(self, tokens):
        kw = {"dtype": self.dtype, "param_dtype": self.dtype}
        embed = nn.Embed(self.vocab, self.dim, **kw)
        x = embed(tokens)
        block: Any = nn.remat(self.block, prevent_cse=not self.scan) if self.remat else self.block
        size = (self.dim, self.heads, self.dtype)
        if self.scan:
            split = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            x, _ = nn.scan(block, length=self.layers, **split)(*size, name="layers")(x, None)
        else:
            for i in range(self.layers):
                x, _ = block(*size, name=f"block_{i}")(x)
        head = embed.attend if self.tied else nn.Dense(self.vocab, use_bias=False, name="head", **kw)
        return head(nn.RMSNorm(**kw)(x)).astype(jnp.float32)


class ConvNet(nn.Module):
    """Convolutions of odd widths and a head: kernels with four dims, and leaves that 8 does not divide."""

    widths: tuple[int, ...] = (48, 96, 54)

    @nn.compact
    def __call__(self, images):
        x = images
        for width in self.widths:
            x = nn.relu(nn.Conv(width, (3, 3), strides=2)(x))
        return nn.Dense(10)(x.mean((1, 2)))


class Experts(nn.Module):
    """A mixture of experts behind a dense layer: kernels `[experts, dim, hidden]`, every expert on every token."""

    experts: int = 4
    dim: int = 64
    hidden: int = 96

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(self.dim)(x)
        init = nn.initializers.lecun_normal()
        up = self.param("up", init, (self.experts, self.dim, self.hidden))
        down = self.param("down", init, (self.experts, self.hidden, self.dim))
        share = jax.nn.softmax(nn.Dense(self.experts, name="router")(x))
        hidden = nn.relu(jnp.einsum("bd,edh->beh", x, up))
        return nn.Dense(10)(x + jnp.einsum("beh,ehd,be->bd", hidden, down, share))


class MlpBlock(nn.Module):
    """x + down(gelu(up(norm(x)))), `wider` times as wide inside, where a policy finds it by the name `hidden`."""

    dim: int
    dtype: Any = jnp.float32
    wider: int = 4
    bias: bool = True

    @nn.compact
    def __call__(self, x, _=None):
        kw = {"dtype": self.dtype, "param_dtype": self.dtype, "use_bias": self.bias}
        y = nn.LayerNorm(name="norm", **kw)(x)
        y = checkpoint_name(nn.gelu(nn.Dense(self.wider * self.dim, name="up", **kw)(y)), "hidden")
        return x + nn.Dense(self.dim, name="down", **kw)(y), None


class Stack(nn.Module):
    """Layers made by `block()`, each a function of (x, None): in a scan (`blocks`) or unrolled (`block_0`, ...)."""

    block: Callable[..., nn.Module]
    layers: int
    scan: bool = False

    @nn.compact
    def __call__(self, x):
        if self.scan:
            split = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            return nn.scan(self.block, length=self.layers, **split)(name="blocks")(x, None)[0]
        for i in range(self.layers):
            x, _ = self.block(name=f"block_{i}")(x)
        return x


def gpt_state(scan=False, layers=None, tx=None, **size) -> TrainState:
    """A TrainState of the GPT; twelve layers in a scan, two unrolled, where each costs the compiler time."""
    model = Gpt(scan, layers or (12 if scan else 2), **size)
    params = model.init(jax.random.key(0), jnp.zeros((1, SEQ), jnp.int32))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(3e-4) if tx is None else tx)


def small_gpt(scan, remat=True, layers=3) -> TrainState:
    """The GPT at a width of 128: `layers` in a scan, two unrolled."""
    return gpt_state(scan, layers if scan else 2, dim=128, heads=4, remat=remat)


def small_state(stage, *, scan, remat=True, layers=3, mesh=None, **fields):
    """The small GPT on 8 H200 without arrays, every leaf split, and its plan."""
    mesh = jzero.pod("h200").mesh({"data": 8}) if mesh is None else mesh
    fields = {"min_shard_bytes": 0, **fields}
    state = jzero.abstract(lambda: small_gpt(scan, remat, layers), stage=stage, mesh=mesh, **fields)
    return state, jzero.plan_of(state)


def gpt_loss(state, params, batch):
    logits = state.apply_fn({"params": params}, batch["tokens"])
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], batch["tokens"][:, 1:]).mean()


def gpt_step(state, batch):
    """The user's step: nothing of jzero in it."""
    loss, grads = jax.value_and_grad(lambda p: gpt_loss(state, p, batch))(state.params)
    return state.apply_gradients(grads=grads), loss


def tokens(rows=8, sharding=None, seq=SEQ):
    return {"tokens": jax.ShapeDtypeStruct((rows, seq), jnp.int32, sharding=sharding)}


def classifier_state(model, shape) -> TrainState:
    params = model.init(jax.random.key(0), jnp.zeros((1, *shape)))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(3e-4))


def classifier_step(state, batch):
    def loss_of(params):
        logits = state.apply_fn({"params": params}, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=grads), loss


def classified(rows, shape):
    return {
        "x": jax.ShapeDtypeStruct((rows, *shape), jnp.float32),
        "y": jax.ShapeDtypeStruct((rows,), jnp.int32),
    }


class Compiled(NamedTuple):
    """A program compiled for a pod, and what is known of it without compiling."""

    plan: jzero.Plan
    state: Any
    program: Any

    @property
    def report(self):
        return _report(self.program, self.plan)

    @property
    def estimate(self):
        return jzero.estimate(self.plan, tx=self.state.tx)

    @property
    def found(self):
        return {f.kind: f for f in jzero.findings(self.program, self.plan)}


@functools.lru_cache(maxsize=64)
def _report(program, plan):
    return jzero.explain(program, plan)


MODELS: Mapping[str, tuple[Callable[..., TrainState], Callable, Callable[[int], Any]]] = {
    "gpt": (gpt_state, gpt_step, tokens),
    "conv": (
        lambda **size: classifier_state(ConvNet(**size), (32, 32, 3)),
        classifier_step,
        lambda rows: classified(rows, (32, 32, 3)),
    ),
    "experts": (
        lambda **size: classifier_state(Experts(**size), (24,)),
        classifier_step,
        lambda rows: classified(rows, (24,)),
    ),
}


@cached
def program(
    model="gpt", stage=2, n=8, size=(), quick=True, axes=None, rows=1, seq=SEQ, buffers=False, **fields
) -> Compiled:
    """The train step of a model, compiled for `n` H200.

    Args:
      model: a key of MODELS.
      stage: of ZeRO.
      n: GPUs, in hosts of eight.
      size: what the model's state is created with, as ((name, value), ...).
      quick: without the compiler's work on matmuls.
      axes: the mesh as ((name, size), ...); None: `data` alone.
      rows: of the batch, per device.
      seq: tokens of a row, for the GPT.
      buffers: as of `pod.compile`.
      **fields: of ZeroConfig; small leaves are split unless `min_shard_bytes` says otherwise.
    """
    create, step, batch = MODELS[model]
    pod = jzero.pod("h200", hosts=n // 8)
    mesh = pod.mesh(dict(axes) if axes else {"data": n})
    state = jzero.abstract(
        lambda: create(**dict(size)), stage=stage, mesh=mesh, **{"min_shard_bytes": 0, **fields}
    )
    plan = jzero.plan_of(state)
    given = tokens(rows * plan.batch_parts, seq=seq) if model == "gpt" else batch(rows * plan.batch_parts)
    options = QUICK if quick else None
    compiled = pod.compile(
        step, state, given, donate_argnums=0, plan=plan, compiler_options=options, buffers=buffers
    )
    return Compiled(plan, state, compiled)


def workspace(program) -> int:
    """Bytes that the matmuls of a program share as scratch memory: 4 MiB on jaxlib 0.10, 32 MiB on 0.12."""
    return max((int(size) for size in re.findall(r"\bs8\[(\d+)\]", program.as_text())), default=0)


def sent(report, *ops, least=0):
    """Bytes of the full tensors that a step sends by these ops, in collectives of at least `least` bytes."""
    return sum(c.bytes * c.count * c.trips for c in report.collectives if c.op in ops and c.bytes >= least)
