"""Resuming a run from its folder of `Offload(tier="disk")`: it holds the optimizer state; masters give the params."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jzero.core.errors import listing
from jzero.flax.adapters import Parts
from jzero.layout.leaf_rule import path_name
from jzero.layout.placement import put
from jzero.layout.specs import P
from jzero.optim import is_wrapped, reopened_state


def is_folder(path: Path) -> bool:
    """True for a folder that `Offload(tier="disk", path=...)` has filled."""
    return path.is_dir() and any(path.glob("process-*-of-*"))


def reopened_parts(path: Path, parts: Parts, where: str) -> Parts:
    """The parts of a state whose optimizer state stays in its files, at the last generation that is whole.

    Args:
      path: the folder.
      parts: of a state with a plan whose path it is; nothing but its rest (batch statistics, an EMA) is used.
      where: the caller, for errors.

    Raises:
      ValueError: another plan; a rest without values.
    """
    tier = parts.tx.init.plan.config.tier if is_wrapped(parts.tx) else None
    if tier is None or tier.tier != "disk" or Path(tier.path).absolute() != path:
        raise ValueError(
            f'{where}: {path} holds the masters and moments of a run with Offload(tier="disk"), and a run goes on with '
            f"them where they are: like = jzero.abstract(create, ..., offload=jzero.Offload(tier='disk', "
            f"path={str(path)!r})). From there jzero.shard(state, ...) lays it out in any other way."
        )
    named = jax.tree_util.tree_leaves_with_path(parts.rest)
    missing = [(path_name(k),) for k, x in named if isinstance(x, jax.ShapeDtypeStruct)]
    if missing:
        raise ValueError(
            f"{where}: {path} has the optimizer's state, and masters for the params; these fields of the state are not "
            f"in it:\n{listing(missing)}\nGive them values in `like`, from a checkpoint of jzero.checkpoint.save."
        )
    opt_state, news = reopened_state(parts.tx)
    olds, tree = jax.tree.flatten(parts.params)
    frozen = [x.name for n, o, x in zip(news, olds, parts.tx.init.plan.layouts, strict=True)
              if n is None and isinstance(o, jax.ShapeDtypeStruct)]  # fmt: skip
    if frozen:
        raise ValueError(
            f"{where}: {path} has no values of {len(frozen)} params that the optimizer never changes:\n"
            f"{listing([(name,) for name in frozen])}\nGive them values in `like`, from a checkpoint."
        )
    params = tree.unflatten([o if n is None else n for n, o in zip(news, olds, strict=True)])
    step = parts.step
    if step is not None:
        count = jnp.asarray(int(opt_state.master.generation), step.dtype)
        step = put(count, parts.tx.init.plan.sharding(P()))
    return parts.replace(params=params, opt_state=opt_state, step=step)
