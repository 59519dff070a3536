"""Resuming a run from its folder of `Offload(tier="disk")`: it holds the optimizer state; masters give the params."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jzero.checkpoint import store
from jzero.core.errors import counted, listing, warn
from jzero.core.types import PyTree
from jzero.flax.adapters import Parts, is_pair, take_apart
from jzero.layout.leaf_rule import path_name
from jzero.layout.placement import put
from jzero.layout.specs import P
from jzero.layout.trainable import numbers, trained_part
from jzero.optim import is_wrapped, reopened_state
from jzero.update.on_host.handles import Held, held_in
from jzero.update.on_host.running import Running


def is_folder(path: Path) -> bool:
    """True for a folder that `Offload(tier="disk", path=...)` has filled."""
    return path.is_dir() and any(path.glob("process-*-of-*"))


def held_in_files(state: Any) -> tuple[Held, Running] | tuple[None, None]:
    """The `Held` and `Running` of a state with `Offload(tier="disk")`; `(None, None)` for any other."""
    held = held_in(state[1].opt_state if is_pair(state) else getattr(state, "opt_state", None))
    if held is None or held.store is None or not held.store.chain.plan.config.in_files:
        return None, None
    return held, held.store


def snapshot(path: store.PathLike, state: PyTree) -> Path:
    """Copies the files of a state with `Offload(tier="disk")`, taking no space if the file system can share it.

    A reflink (XFS, Btrfs), else a hard link, else a copy of one slot (another disk). A hard link costs the bytes of a
    slot once the run writes there, since the run then has new files.

    Args:
      path: a folder that does not exist or is empty, best on the same file system; each process makes its own in it.
      state: a TrainState or an NNX pair.

    Returns:
      The absolute path. `jzero.checkpoint.restore(path, like)` continues from it in the folder that `like` names, on
      the same mesh with as many processes. It holds optimizer state, masters and the step; all else (batch statistics,
      an EMA) comes from `like`. `jzero.checkpoint.save` writes a state for any layout, through host memory.

    Warns:
      UserWarning: the state has other fields, or its step was set by hand.

    Raises:
      TypeError: the state has no files.
      ValueError: there is something at `path`, the state is not the latest one, or a param or a hyper-parameter was
        replaced since the last update. Params that came back from a jitted function are compared with their masters,
        which reads the files.
      RuntimeError: an update of the state was broken off.
      OSError: the disk is full or cannot be written.
    """
    where = "jzero.checkpoint.snapshot"
    path = store.absolute(path, where)
    held, running = held_in_files(state)
    if held is None or running is None:
        raise TypeError(
            f'{where}: {type(state).__name__} has no files: its plan has no Offload(tier="disk"). Save it with '
            "jzero.checkpoint.save(path, state)."
        )
    running.check(held)
    there = path.exists() and any(path.iterdir())
    if jax.process_count() > 1:  # before any of them makes its folder
        there = bool(multihost_utils.process_allgather(np.int32(there)).any())
    if there:
        raise ValueError(f"{where}: {path} exists and is not replaced. Pass another folder, one per step.")
    parts = take_apart(state, where=where, values=False)
    fields = jax.tree_util.tree_leaves_with_path(parts.rest)
    if fields:
        warn(
            f"{where}: a snapshot holds optimizer state, params and the step, and not these fields:\n"
            f"{listing([(path_name(k),) for k, _ in fields])}\nSave them beside it, with jzero.checkpoint.save.",
        )
    trained = trained_part(parts.params, parts.tx.init.plan, where=where)
    unwritten = running.not_in_files(trained, jax.tree.leaves(parts.opt_state.inner))
    if unwritten:
        rows = listing([(name,) for name in unwritten])
        raise ValueError(
            f"{where}: {counted(len(unwritten), 'array was', 'arrays were')} replaced since the last update, and the "
            f"files hold the values before:\n{rows}\nThe next update writes them: take the snapshot after it. Or save "
            "the state as it is: jzero.checkpoint.save(path, state)."
        )
    running.snapshot(path)
    step, reached = parts.step, running.store.train_step
    if step is not None and int(step) != reached:
        warn(
            f"{where}: the state is at step {int(step)}, and the files at step {reached}: the one that they began "
            f"at, and one for each update. What is restored from {path} is at step {reached}; set it then: "
            f"state.replace(step={int(step)}).",
        )
    return path


def reopened_parts(path: Path, parts: Parts, where: str) -> Parts:
    """The parts of a state whose optimizer state stays in its files, at the last whole generation.

    Args:
      path: the folder, or a snapshot of one.
      parts: of a state with a plan that names this path, or that has no files yet; only its rest (batch
        statistics, an EMA) and its frozen params are used.
      where: the caller, for errors.

    Raises:
      ValueError: the plan is another one, or the rest or the frozen params have no values.
    """
    tier = parts.tx.init.plan.config.offload_options if is_wrapped(parts.tx) else None
    if tier is None or tier.path is None:
        raise ValueError(
            f'{where}: {path} holds the masters and moments of a run with Offload(tier="disk"), and a run goes on with '
            f"them in such files: like = jzero.abstract(create, ..., offload=jzero.Offload(tier='disk', "
            f"path={str(path)!r})). From there jzero.shard(state, ...) lays it out in any other way."
        )
    named = jax.tree_util.tree_leaves_with_path(parts.rest)
    missing = [(path_name(k),) for k, x in named if isinstance(x, jax.ShapeDtypeStruct)]
    if missing:
        raise ValueError(
            f"{where}: {path} has the optimizer's state, and masters for the params; these fields of the state are not "
            f"in it:\n{listing(missing)}\nGive them values in `like`, from a checkpoint of jzero.checkpoint.save."
        )
    elsewhere = Path(tier.path).absolute() != path
    opt_state, news, at_step = reopened_state(parts.tx, path if elsewhere else None)
    olds, tree = jax.tree.flatten(parts.params)
    at = numbers(parts.params, parts.tx.init.plan, where=where)
    news = [None if i is None else news[i] for i in at]
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
        step = put(jnp.asarray(at_step, step.dtype), parts.tx.init.plan.sharding(P()))
    return parts.replace(params=params, opt_state=opt_state, step=step)
