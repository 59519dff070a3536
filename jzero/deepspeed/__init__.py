"""From DeepSpeed: `read("ds_config.json")` says what every key of it becomes. Nothing of DeepSpeed is imported.

Vocabulary
  table        what becomes of every key, and what is said of it: `keys.toml`, a row per key (`keys.py` loads it)
  fate         mapped, not needed, or not supported
  source       the file as it is read, and its values as they are checked (`source.py`)
  translation  a config in the making: what the table says of each key that has an effect (`translation.py`)
  derived      what follows from several keys together: mesh, loss scale, batch, optimizer (`derived.py`)
  fact         what a sentence or a line of the table names in braces: `{batch}`
  result       what `read` returns: the config, lines of code for the rest, and the rows (`result.py`)

What always holds
  No key is ignored silently, and none is guessed: a value without a counterpart in jzero is reported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from jzero.core.errors import check_int, check_kind
from jzero.deepspeed.derived import derive_batch, derive_loss_scale, derive_mesh, derive_optimizer
from jzero.deepspeed.keys import KEYS, SOURCE, Key
from jzero.deepspeed.result import FromDeepSpeed, Row
from jzero.deepspeed.source import load
from jzero.deepspeed.translation import Draft

__all__ = ["KEYS", "SOURCE", "FromDeepSpeed", "Key", "Row", "read"]


def read(
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    world: int | None = None,
    auto: Mapping[str, Any] | None = None,
) -> FromDeepSpeed:
    """A DeepSpeed config in jzero's terms: a `jzero.ZeroConfig`, the other numbers, and what became of every key.

    Call it after `jax.distributed.initialize`. Sections that are not needed or not supported as a whole (monitors,
    profilers, autotuning, ...) count as one key: their content is not read.

    Args:
      source: path of a ds_config.json, or its content as a dict.
      world: devices that share the batch: all, over the size of other parallelism. None: `jax.device_count()`, looked
        up only where the file needs it (train_batch_size, hpZ, MiCS).
      auto: values for keys whose value is "auto", by dotted key: `{"bf16.enabled": True, "optimizer.params.lr": 1e-4}`.
        Otherwise they get the defaults of Hugging Face's Trainer, or jzero's if it has none; the rows say so.

    Returns:
      A `FromDeepSpeed`; `print` it.

    Raises:
      FileNotFoundError: there is no such file.
      TypeError: a value is of the wrong kind.
      ValueError: the file is not JSON; a key that DeepSpeed 0.19 does not know; a number out of its range; a batch size
        that is not micro-batch x accumulation x devices; an NVMe tier; "auto" for stage, tier, hpZ or MiCS.

    Example:
      >>> import jzero.deepspeed
      >>> found = jzero.deepspeed.read(
      ...     {"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e7}, "bf16": {"enabled": True}}
      ... )
      >>> found.config.stage, found.config.bucket_bytes, found.param_dtype
      (2, 100000000, 'bfloat16')
    """
    if world is not None:
        check_int(world, "world", where="jzero.deepspeed.read", low=1)
    check_kind(auto, "auto", Mapping, "a mapping of values by key", where="jzero.deepspeed.read", optional=True)
    where, config = load(source)
    try:
        draft = Draft(config, auto or {}, world)
        draft.settle()
        for derive in (derive_mesh, derive_loss_scale, derive_batch, derive_optimizer):
            derive(draft)
        return draft.finish()
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"jzero.deepspeed: {where}: {error}") from error
