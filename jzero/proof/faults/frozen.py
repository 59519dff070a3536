"""Fault of frozen params at stage 3: weights below an adapter, or of a teacher, that every device holds whole."""

from __future__ import annotations

import jax
import numpy as np

from jzero.core.errors import counted, human_bytes
from jzero.proof.evidence import Argument, Evidence
from jzero.proof.faults.wording import Faults, names_text
from jzero.proof.models import other_trained_params

SHARE_WHOLE = 0.05


def frozen_whole(e: Evidence) -> Faults:
    """Arrays beside the params that a training step reads whole, where the stage splits params."""
    if not (
        e.plan.config.row.params and e.plan.n > 1 and e.trains and e.module.has_backward
    ) or _other_trains(e):
        return
    found = sorted((x for x in e.leaves if _is_frozen(e, x)), key=lambda x: -x.held)
    size = sum(x.held for x in found)
    if size <= SHARE_WHOLE * e.plan.param_bytes:
        return
    yield (
        f"{counted(len(found), 'array that is', 'arrays that are')} not trained, {human_bytes(size)}, "
        f"{'lies' if len(found) == 1 else 'lie'} whole on every device, beside {human_bytes(e.plan.param_bytes)} of "
        f"params that are split: {names_text(found)}",
        size,
        "frozen weights among the params, which are split and gathered on use, with a filter that names the trained "
        "ones: state = jzero.shard(state, ..., trainable=lambda path, leaf: 'lora' in path). NNX: each of them an "
        "nnx.Param, and wrt=nnx.LoRAParam or whatever is trained. They have no gradient, no master and no moments.",
    )


def _is_frozen(e: Evidence, x: Argument) -> bool:
    """True for a matrix of floats that is whole, not in the optimizer state, and no part of a batch."""
    matrix = sum(d > 1 for d in x.shape) > 1 and jax.dtypes.issubdtype(x.dtype, np.floating)
    whole = x.local == x.shape and not x.on_host and x.held >= max(e.plan.min_shard_bytes, 1)
    if (
        not (matrix and whole) or x.in_opt_state or x.layout is not None
    ):  # copies of params have rules of their own
        return False
    rows = {b.shape[0] for b in e.batch if b.local[0] < b.shape[0]}
    in_state = any(x.argument == p.argument for p in e.leaves if p.is_param or p.in_opt_state)
    return in_state or (bool(rows) and x.shape[0] not in rows)


def _other_trains(e: Evidence) -> bool:
    """True for a step of two models, the other one's plan not known."""
    if e.record is not None and e.record.updates:
        return bool(e.record.others(e.plan))
    return bool(other_trained_params(e.given, e.compiled, e.plan))
