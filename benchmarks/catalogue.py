"""Thirteen published models, from their configs, for benchmarks that ask about real sizes.

Their params are those of `tests/shapes.py` (`test_catalogue_models.py` compares the counts). The decoders that are
presets of `jzero plan` come from there, the others from `catalogue_models.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from benchmarks.catalogue_models import T5, Decoder, ResNet, UNet, ViT, Whisper
from jzero.cli import presets
from jzero.cli.fit import creator_of
from jzero.flax.shard import plan_of
from jzero.gradients.value_and_grad import value_and_grad

Batch = Mapping[str, jax.Array]
Shapes = Callable[[int], dict[str, jax.ShapeDtypeStruct]]


@dataclasses.dataclass(frozen=True)
class Entry:
    """A model of the catalogue.

    Attributes:
      create: makes its TrainState: bf16 params, AdamW; with keywords that a fit may vary.
      step: (state, batch), with `accumulate`.
      batch: from a number of examples the batch, as shapes.
      sizes: for `jzero.estimate(model=)`; None if it is not a plain transformer.
    """

    create: Callable[..., Any]
    step: Callable[..., Any]
    batch: Shapes
    sizes: Mapping[str, Any] | None = None


def train_step(state: TrainState, batch: Batch, *, accumulate: int = 1) -> tuple[TrainState, jax.Array]:
    """One update of a model that returns its loss."""

    def loss_of(params, batch):
        return state.apply_fn({"params": params}, batch)

    if accumulate == 1:
        loss, grads = jax.value_and_grad(loss_of)(state.params, batch)
    else:
        loss, grads = value_and_grad(loss_of, plan_of(state), accumulate=accumulate)(state.params, batch)
    return state.apply_gradients(grads=grads), loss


def preset_entry(name: str) -> Entry:
    """A preset of `jzero plan`."""
    preset = presets.PRESETS[name]
    sizes = dataclasses.asdict(preset.transformer(seq=preset.seq, batch=1))
    batch = _shapes(tokens=((preset.seq + 1,), "int32"))
    return Entry(creator_of(preset, preset.seq), presets.train_step, batch, sizes)


def count(name: str) -> int:
    """How many params a model has."""
    params = jax.eval_shape(ENTRIES[name].create).params
    return sum(math.prod(x.shape) for x in jax.tree.leaves(params))


def _shapes(**given: tuple[tuple[int, ...], str]) -> Shapes:
    return lambda n: {name: jax.ShapeDtypeStruct((n, *shape), dtype) for name, (shape, dtype) in given.items()}


def _entry(model: Callable[..., nn.Module], sizes: Mapping[str, Any] | None = None, **batch: Any) -> Entry:
    shapes, tx = _shapes(**batch), optax.adamw(3e-4)

    def create(**offered):
        module = model(**offered)
        inputs = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes(1))
        return TrainState.create(apply_fn=module.apply, params=module.init(jax.random.key(0), inputs)["params"], tx=tx)

    create.__signature__ = inspect.signature(model)  # says which variants it has
    return Entry(create, train_step, shapes, sizes)


_IMAGES = {"images": ((224, 224, 3), "bfloat16"), "labels": ((), "int32")}
_LATENTS = (128, 128, 4)
_GEMMA_BLOCK = {"heads": 16, "features": 256, "kv_heads": 8, "hidden": 14336, "experts": False}
_MIXTRAL_BLOCK = {"heads": 32, "features": 128, "kv_heads": 8, "hidden": 14336, "experts": True}
_GEMMA = {"layers": 42, "width": 3584, "heads": 16, "seq": 4096, "vocab": 256000, "ffn": 21504, "flash": True}
ENTRIES: Mapping[str, Entry] = {
    **{name: preset_entry(name) for name in ("gpt2-small", "gpt2-medium", "gpt2-large", "gpt2-xl")},
    **{name: preset_entry(name) for name in ("llama3-8b", "llama3-70b")},
    "gemma2-9b": _entry(functools.partial(Decoder, 256000, 3584, 42, _GEMMA_BLOCK), _GEMMA, tokens=((4097,), "int32")),
    "mixtral-8x7b": _entry(functools.partial(Decoder, 32000, 4096, 32, _MIXTRAL_BLOCK), tokens=((4097,), "int32")),
    "t5-11b": _entry(T5, source=((512,), "int32"), tokens=((513,), "int32")),
    "whisper-large": _entry(Whisper, sound=((3000, 80), "bfloat16"), tokens=((449,), "int32")),
    "vit-h14": _entry(
        ViT, {"layers": 32, "width": 1280, "heads": 16, "seq": 257, "vocab": 0, "flash": True}, **_IMAGES
    ),
    "resnet50": _entry(ResNet, **_IMAGES),
    "sdxl-unet": _entry(
        UNet, latents=(_LATENTS, "bfloat16"), noise=(_LATENTS, "bfloat16"), time=((), "float32"),
        text=((77, 2048), "bfloat16"), added=((2816,), "bfloat16"),
    ),
}  # fmt: skip
"""By name."""
