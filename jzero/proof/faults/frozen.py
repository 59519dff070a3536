"""Fault of frozen params at stage 3: weights below an adapter, or of a teacher, that every device holds whole.

[Note: what may be a weight]
A matrix of floats, or of integers of at most 8 bits (codes); in the train state any integers. One with as many rows as
the batch, in an argument without split arrays, is a weight or a part of the batch: `not_checked`. A weight that the
step closes over is a constant of the program. So are masks and tables of positions: below `LARGE_CONSTANTS` in all
they are not reported.
"""

from __future__ import annotations

import re

import jax
import numpy as np

from jzero.core.errors import counted, human_bytes
from jzero.proof.evidence import Argument, Evidence
from jzero.proof.faults.wording import MOST_NAMES, Faults, more_text, names_text
from jzero.proof.hlo import Shape, parse_instruction
from jzero.proof.models import other_trained_params

SHARE_WHOLE = 0.05
LARGE_CONSTANTS = 64 * 2**20  # bytes: a causal mask of 4096 x 4096 in fp32
_CLONE = re.compile(r"[._]clone(?![a-z])")
REMEDY = (
    "frozen weights among the params, which are split and gathered on use, with a filter that names the trained "
    "ones: state = jzero.shard(state, ..., trainable=lambda path, leaf: 'lora' in path). NNX: each of them an "
    "nnx.Param, and wrt=nnx.LoRAParam or whatever is trained. They have no gradient, no master and no moments."
)


def frozen_whole(e: Evidence) -> Faults:
    """Arrays beside the params that a training step reads whole, where the stage splits params."""
    if not _looked_for(e):
        return
    found = sorted((x for x in e.leaves if _is_frozen(e, x) and not _is_rows(e, x)), key=lambda x: -x.held)
    size = sum(x.held for x in found)
    if size > SHARE_WHOLE * e.plan.param_bytes:
        yield (
            f"{counted(len(found), 'array that is', 'arrays that are')} not trained, {human_bytes(size)}, "
            f"{'lies' if len(found) == 1 else 'lie'} whole on every device, beside {human_bytes(e.plan.param_bytes)} "
            f"of params that are split: {names_text(found)}",
            size,
            REMEDY,
        )
    closed = constants(e)
    size = sum(x.nbytes for x in closed)
    if size > max(SHARE_WHOLE * e.plan.param_bytes, LARGE_CONSTANTS):
        shown = ", ".join(f"{x.dtype}[{','.join(map(str, x.dims))}]" for x in closed[:MOST_NAMES])
        yield (
            f"{counted(len(closed), 'array')} that the step closes over, {human_bytes(size)}, "
            f"{'is a constant' if len(closed) == 1 else 'are constants'} of the program and whole on every device: "
            f"{shown}{more_text(closed)}.",
            size,
            f"an argument of the step for each; {REMEDY} A mask or a table is made in the step, from jnp.arange.",
        )


def rows_or_weights(e: Evidence) -> list[Argument]:
    """The whole arrays with as many rows as the batch that are more than negligible if they are frozen weights."""
    beside = {x.argument for x in _split(e)}
    found = [x for x in e.leaves if _is_frozen(e, x) and _is_rows(e, x)] if _looked_for(e) else []
    found = [x for x in found if x.argument not in beside]
    return found if sum(x.held for x in found) > SHARE_WHOLE * e.plan.param_bytes else []


def _looked_for(e: Evidence) -> bool:
    splits = e.plan.config.row.params and e.plan.n > 1
    return splits and e.trains and e.module.has_backward and not _other_trains(e)


def _is_frozen(e: Evidence, x: Argument) -> bool:
    """True for a whole matrix that may be a weight, in no optimizer state; see [Note: what may be a weight]."""
    matrix, whole = sum(d > 1 for d in x.shape) > 1, x.local == x.shape and not x.on_host
    if not (matrix and whole and x.held >= max(e.plan.min_shard_bytes, 1)):
        return False
    if x.in_opt_state or x.layout is not None:  # copies of params have rules of their own
        return False
    codes = jax.dtypes.issubdtype(x.dtype, np.integer) and (_in_state(e, x) or x.dtype.itemsize == 1)
    return (jax.dtypes.issubdtype(x.dtype, np.floating) or codes) and (_in_state(e, x) or bool(_split(e)))


def _is_rows(e: Evidence, x: Argument) -> bool:
    """True for an array beside the state with as many rows as some array of the batch that is split."""
    return not _in_state(e, x) and any(b.shape[0] == x.shape[0] for b in _split(e))


def _in_state(e: Evidence, x: Argument) -> bool:
    return any(x.argument == p.argument for p in e.leaves if p.is_param or p.in_opt_state)


def _split(e: Evidence) -> list[Argument]:
    """The arrays of the batch that are split along their rows."""
    return [b for b in e.batch if b.local[0] < b.shape[0]]


def constants(e: Evidence) -> list[Shape]:
    """The matrices of numbers that are constants of the program, largest first; XLA may have made clones of them."""
    rows = (parse_instruction(line) for line in e.module.lines(" constant({"))
    shapes = {_CLONE.split(i.name)[0]: i.shapes[0] for i in rows if i is not None}
    found = [x for x in shapes.values() if x.dtype != "pred" and sum(d > 1 for d in x.dims) > 1]
    return sorted(found, key=lambda x: -x.nbytes)


def _other_trains(e: Evidence) -> bool:
    """True for a step of two models, the other one's plan not known."""
    if e.record is not None and e.record.updates:
        return bool(e.record.others(e.plan))
    return bool(other_trained_params(e.given, e.compiled, e.plan))
