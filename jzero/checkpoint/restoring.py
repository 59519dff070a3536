"""Restores a state into any layout, and checks what is stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, SingleDeviceSharding

from jzero.checkpoint import disk_state, moments, pairs, store
from jzero.checkpoint.checksums import Checksums, Damage
from jzero.checkpoint.converting import converted, loses, to_check
from jzero.checkpoint.logical import (
    COUNT,
    MASTER,
    Name,
    NamedLeaf,
    apart,
    filled,
    of_model,
    refuse_collisions,
    together,
    trained_of,
    tree_of,
    warn_if_absent,
)
from jzero.checkpoint.match import Described, Source, check_trained, describe, match, text
from jzero.core.errors import check_choice, check_flag, listing, warn
from jzero.core.nnx_modules import is_module
from jzero.core.types import PyTree
from jzero.flax import adapters
from jzero.layout.explicit import auto_context, on_auto_mesh, on_context_mesh
from jzero.update.pairs import PAIRS


class CheckpointDamaged(ValueError):
    """A checkpoint whose files are not those that were saved.

    Attributes:
      damage: what is wrong, by file.
      leaves: the names of leaves with damaged data, as orbax writes them.
      good: the last checkpoint in the same folder that is whole, or None.
    """

    def __init__(self, path: Path, damage: Sequence[Damage], good: Path | None, remedy: str = ""):
        leaves = sorted({leaf for d in damage for leaf in d.leaves})
        self.damage, self.leaves, self.good = list(damage), leaves, good
        named = ", ".join(leaves[:8]) + (f" and {len(leaves) - 8} more" if len(leaves) > 8 else "")
        lines = [f"{path} is damaged, and nothing of it is used:", listing([(str(d),) for d in damage])]
        lines += [f"Leaves with damaged data: {named}."] if leaves else []
        beside = f"The last good checkpoint beside it: {good}" if good else "No other checkpoint beside it is whole."
        super().__init__("\n".join([*lines, remedy or beside]))


def restore(
    path: store.PathLike,
    like: PyTree,
    *,
    tx: optax.GradientTransformation | None = None,
    cast: bool = False,
    only: str | None = None,
) -> PyTree:
    """Reads a state in the layout of another, every byte checked.

    Args:
      path: a checkpoint from `save`, or one that plain orbax (v1) wrote of a TrainState or any tree; or the folder of
        `Offload(tier="disk")` as a run left it: its last whole step is read, and `int(state.step)` is its number.
      like: a state in the wanted layout, or what `jzero.abstract` returns: any stage, mesh, number of devices or
        processes, tier; also an ordinary unsharded state. Its values are used only for fields that are not read.
      tx: for a mapping of `params` and `opt_state`, the transformation from `jzero.zero`.
      cast: convert dtypes. What is widened keeps its value, what is narrowed is rounded; a value that the new dtype
        cannot hold at all is refused. Masters start as the params where the checkpoint has none, and are left out
        where the target has none. (Also without `cast`, a `rounding_count` that the checkpoint lacks starts at 0, and
        one that only the checkpoint has is left out.)
      only: `"params"` reads what the model needs, and nothing else: params (and fp32 masters of them that `like` has),
        statistics, in NNX all variables of the model but random keys (those of an abstract model are read, too). For
        evaluation, fine-tuning, another optimizer. Optimizer state, step, averages and all other fields are those of
        `like`; where that is abstract, they stay abstract. Statistics that the checkpoint lacks are named in a warning.
        `like` may then be an `nnx.Module` alone, whose `nnx.Param` are the params.

    Returns:
      A state like `like`; an NNX pair is filled in place and returned.

    Raises:
      ValueError: leaves that are missing, left over, or of another shape or dtype, all of them listed; nothing is read.
        With `cast`, values that the new dtype cannot hold: NaN or 300 as int8, 1e6 as float16.
      TypeError: `cast` is not a bool, `like` is not a state or a tree of arrays, or has no params for `only`.
      CheckpointDamaged: a file is not as it was saved; names the leaves and the last good checkpoint.
      FileNotFoundError: there is nothing at `path`.
      ValueError: `only` or `cast` with a folder of `Offload(tier="disk")`.

    Layout:
      Every leaf as in `like`; each process reads its shards.

    Cost:
      On the host, about 256 MiB beside the target, or twice the stored chunks that the largest shard touches. Files are
      read twice, the second time from the file system's cache.
    """
    where = "jzero.checkpoint.restore"
    check_flag(cast, "cast", where=where)
    check_choice(only, "only", ("params",), where=where, optional=True)
    path = store.absolute(path, where)
    if only is not None and is_module(like):
        restore(path, adapters.with_optimizer(like), cast=cast, only=only)
        return like
    if disk_state.is_folder(path):
        if only is not None or cast:
            option = 'only="params"' if only is not None else "cast=True"
            raise ValueError(
                f"{where}: {path} is a folder of Offload(tier='disk'), from which a run goes on as it is: {option} is "
                "for checkpoints of jzero.checkpoint.save. Save the restored state there first."
            )
        parts = on_auto_mesh(apart(like, tx, where))
        return together(like, on_context_mesh(disk_state.reopened_parts(path, parts, where)))
    path = store.locate(path, where)
    parts = on_auto_mesh(apart(like, tx, where))
    every: list[NamedLeaf] = jax.tree.leaves(tree_of(parts))
    refuse_collisions(every, where)
    wanted = [leaf for leaf in every if only is None or leaf.name[0] in ("params", MASTER, *PAIRS)]
    if only is not None and not any(leaf.name[0] == "params" for leaf in wanted):
        raise TypeError(
            f'{where}: only="params" is for a state, or a mapping with "params"; this tree has none.'
        )
    checks = _opened(path, where)
    if checks is not None and only is None:
        check_trained(every, checks.trained, trained_of(parts), where)
    tree, stored = store.stored(path)
    wanted = [leaf if leaf.name in stored else pairs.as_master(leaf) for leaf in wanted]
    convert = cast or moments.same_policy(wanted, stored, parts.tx)
    wanted = moments.as_values(wanted, stored, convert=convert)
    have = pairs.with_masters(stored, kept={leaf.name for leaf in wanted})
    have = moments.with_values(have, wanted, convert=convert)
    if only is not None:
        needed = of_model(every, like)
        warn_if_absent([leaf for leaf in needed if leaf.name not in have], "the checkpoint", where)
        wanted += [leaf for leaf in needed if leaf.name in have]
    names = {leaf.name for leaf in wanted}
    fresh = [leaf for leaf in wanted if leaf.empty or (leaf.name == (COUNT,) and leaf.name not in have)]
    leaves = [leaf for leaf in wanted if not any(leaf is other for other in fresh)]
    sources = match(leaves, have, cast=cast, where=where, only=only)
    refuse(path, _large(checks))  # before anything is parsed, and on all processes alike
    values = {leaf.name: leaf.value for leaf in every if leaf.name not in names}
    with auto_context():
        joined = pairs.of_pairs(sources, stored.keys() - have.keys())
        values |= _read(path, tree, [s for s in sources if s not in joined], have, where)
        values |= _read_pairs(path, tree, joined, have, where)
        values |= {leaf.name: leaf.nothing() for leaf in fresh}
        values = moments.quantized_again(pairs.split_again(values, every), every)
    return together(like, on_context_mesh(filled(parts, values)))


def verify(path: store.PathLike) -> int:
    """Reads every file of a checkpoint against its checksums.

    Args:
      path: a checkpoint from `jzero.checkpoint.save`.

    Returns:
      The number of bytes under checksums. Across processes each reads a share, and all of them must call.

    Raises:
      CheckpointDamaged: a flipped byte, a truncated, missing or swapped file; names files and leaves.
      ValueError: a checkpoint without checksums, as plain orbax writes.
      FileNotFoundError: there is nothing at `path`.
    """
    path = store.locate(path, "jzero.checkpoint.verify")
    if not store.has_checksums(path):
        raise ValueError(
            f"jzero.checkpoint.verify: {path} has no checksums: plain orbax wrote it. Restore it and save it with "
            "jzero.checkpoint.save."
        )
    checks = Checksums(path)
    refuse(path, checks.damage or [*checks.small(), *_large(checks)])
    return checks.nbytes


def custom(path: store.PathLike) -> Any:
    """The JSON that was saved with a checkpoint, or None. Across processes all of them must call.

    Raises:
      CheckpointDamaged: its checksum is wrong.
      ValueError, FileNotFoundError: no checkpoint of `jzero.checkpoint.save` is there.
    """
    path = store.locate(path, "jzero.checkpoint.custom")
    if not store.has_checksums(path):
        raise ValueError(f"jzero.checkpoint.custom: {path} has no custom JSON: plain orbax wrote it.")
    checks = Checksums(path)
    refuse(path, checks.damage)
    return checks.custom


def checked(path: Path, where: str) -> None:
    """Raises CheckpointDamaged if any file is not as it was saved."""
    checks = _opened(path, where)
    refuse(path, _large(checks))


def _opened(path: Path, where: str) -> Checksums | None:
    """The checksums, with the small files checked against them; None if plain orbax wrote the checkpoint."""
    if not store.has_checksums(path):
        warn(
            f"{where}: {path} has no checksums (plain orbax wrote it): damage to it cannot be seen.",
        )
        return None
    checks = Checksums(path)
    unread = checks.unread()
    refuse(path, checks.damage or [d for d in checks.small() if d.file not in unread])
    return checks


def _large(checks: Checksums | None) -> list[Damage]:
    return checks.large(process=jax.process_index(), processes=jax.process_count()) if checks is not None else []


def refuse(path: Path, damage: Sequence[Damage], remedy: str = "") -> None:
    """Raises CheckpointDamaged on all processes if any of them has found damage.

    `remedy`: what to do, instead of naming the last good checkpoint beside it.
    """
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        found = multihost_utils.process_allgather(np.int32(len(damage)))
        if not damage and found.any():
            damage = [Damage("", f"process {int(found.argmax())} found damage in a file")]
    if damage:
        raise CheckpointDamaged(path, damage, None if remedy else last_good(path), remedy)


def last_good(damaged: Path) -> Path | None:
    """The newest checkpoint beside a damaged one that is whole."""
    for path in reversed(store.steps(damaged.parent)):
        if path == damaged or not store.has_checksums(path):
            continue
        checks = Checksums(path)
        if not (checks.damage or checks.small() or checks.large()):
            return path
    return None


def _read(
    path: Path, tree: PyTree, sources: Sequence[Source], have: Mapping[Name, Described], where: str
) -> dict[Name, Any]:
    """The values by the name of their leaf; a stored array that two leaves start from is read for each."""
    values, left = {}, list(sources)
    while left:
        now = list({s.name: s for s in reversed(left)}.values())
        careful = {s.name for s in now if to_check(have[s.name][1], describe(s.leaf)[1])}
        targets = {s.name: store.Numpy(*have[s.name]) if s.name in careful else _target(s.leaf) for s in now}
        read = moments.load(path, tree, targets)
        for s in now:
            value = read.pop(s.name)
            value = _placed(value, s.leaf, where) if s.name in careful else value
            if loses(have[s.name][1], describe(s.leaf)[1], value):
                whole = moments.load(path, tree, {s.name: store.Numpy(*have[s.name])})
                converted(whole[s.name], describe(s.leaf)[1], f"{where}: {text(s.leaf.name)}")
            values[s.leaf.name] = _as_given(value, s.leaf.value)
        left = [s for s in left if s not in now]
    return values


def _read_pairs(
    path: Path, tree: PyTree, sources: Sequence[Source], have: Mapping[Name, Described], where: str
) -> dict[Name, Any]:
    """The values of leaves that are read from pairs: masters, then params, whose layouts may differ."""
    values = {}
    for masters in (True, False):
        leaves = [s.leaf for s in sources if (s.leaf.name[0] == MASTER) == masters]
        targets = {leaf.name: _target(leaf) for leaf in leaves}
        read = pairs.read_pairs(path, tree, targets) if targets else {}
        for leaf in leaves:
            stored = have[pairs.named(MASTER, leaf.name)][1]
            if loses(stored, describe(leaf)[1], read[leaf.name]):
                whole = pairs.read_pairs(path, tree, {leaf.name: store.Numpy(leaf.shape, stored)})
                converted(whole[leaf.name], describe(leaf)[1], f"{where}: {text(leaf.name)}")
            values[leaf.name] = _as_given(read[leaf.name], leaf.value)
    return values


def _placed(value: np.ndarray, leaf: NamedLeaf, where: str) -> jax.Array | np.ndarray:
    """A whole array on the host in the dtype and layout of a leaf; beyond the logical shape, zeros."""
    made = converted(value, describe(leaf)[1], f"{where}: {text(leaf.name)}")
    target = _target(leaf)
    if isinstance(target, store.Numpy):
        return made
    padded = np.zeros(target.shape, made.dtype)
    padded[tuple(map(slice, made.shape))] = made
    return jax.make_array_from_callback(target.shape, target.sharding, lambda index: padded[index])


def _target(leaf: NamedLeaf) -> store.Target:
    value = leaf.value
    if not isinstance(value, (jax.Array, jax.ShapeDtypeStruct)):
        return store.Numpy(np.shape(value), np.asarray(value).dtype)  # jax would make 32 bits of its 64
    sharding = value.sharding
    if not isinstance(sharding, (NamedSharding, SingleDeviceSharding)):
        sharding = SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)


def _as_given(value: Any, like: Any) -> Any:
    """A restored array as what stood in its place: numpy arrays and Python numbers stay such."""
    if isinstance(like, (jax.Array, jax.ShapeDtypeStruct)):
        return value
    value = np.asarray(value, np.asarray(like).dtype)
    return value if isinstance(like, np.ndarray) else type(like)(value[()])
