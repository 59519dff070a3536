"""Pretrained weights from safetensors files into a sharded state, each process reading its shards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import jax
import jax.numpy as jnp
import numpy as np

from jzero.checkpoint import pairs, store
from jzero.checkpoint.converting import converted, convertible
from jzero.checkpoint.disk_state import held_in_files
from jzero.checkpoint.logical import (
    MASTER,
    Name,
    NamedLeaf,
    filled,
    of_model,
    refuse_collisions,
    tree_of,
    warn_if_absent,
)
from jzero.checkpoint.match import text
from jzero.checkpoint.tensor_files import Tensor, ignored, tensors_of
from jzero.checkpoint.tensors import check_names, check_texts, renamed
from jzero.core.errors import check_flag, listing, nearest
from jzero.core.types import PyTree
from jzero.flax import adapters
from jzero.layout.explicit import auto_context, on_auto_mesh, on_context_mesh

Order = tuple[int, ...]
Where = str | tuple[str, Order]
Names = Callable[[str], Where] | Mapping[str, Where] | None


def load_safetensors(
    files: store.PathLike,
    state: PyTree,
    *,
    names: Names = None,
    ignore: Sequence[str] = (),
    cast: bool = False,
) -> PyTree:
    """A state whose params, and what else its model needs, are read from safetensors files.

    Args:
      files: a `.safetensors` file, an index (`model.safetensors.index.json`), or a folder that holds them. With an
        index, each tensor is read from the file that the index names. Files with checksums beside them, as `export`
        writes them, are checked first; safetensors itself has none, so a flipped bit in other files is not seen.
      state: from `jzero.shard` (or a plain state): its layouts are kept; moments and step are as they were.
      names: from the param's name (`Dense_0.kernel`) to the tensor's, as a function or a mapping; None: the same. A
        pair `(name, (1, 0))` transposes: dims of the tensor in the order of the param's, as a torch Linear needs.
        Statistics are named as `export` names them; those without a tensor stay as they are, and a warning lists them.
      ignore: patterns (`["*.attn.bias"]`) of tensors that the model has no use for.
      cast: convert dtypes to those of the params.

    Returns:
      A state like `state`; an NNX pair is changed in place. Masters take the value of the file, unrounded.

    Raises:
      ValueError: params without a tensor, tensors without a param, other shapes, other dtypes without `cast`; all are
        listed, and nothing is changed. Also for a tensor that is in two files, an index that disagrees with its files
        or names some outside of its folder, and a path that is not a regular file; with `cast`, for values that the
        dtype cannot hold.
      CheckpointDamaged: a file is not what its checksum says.
      FileNotFoundError: a file is missing.
      TypeError: the state is abstract, of an unknown kind or on disk (load before it goes there), `ignore` is a single
        string, or `names` is or gives the wrong kind.

    Cost:
      Each shard is read by itself; no leaf is whole on a host or device unless its layout says so.
    """
    where = "jzero.checkpoint.load_safetensors"
    check_names(names, where)
    check_flag(cast, "cast", where=where)
    ignore = check_texts(ignore, "ignore", where)
    path = store.absolute(files, where)
    if held_in_files(state)[0] is not None:
        raise TypeError(
            f'{where}: this state is in the files of Offload(tier="disk"), which only its updates change. Load into '
            "one that is not: state = load_safetensors(files, jzero.shard(create, ...)); then "
            "jzero.shard(state, offload=...) writes the files."
        )
    parts = adapters.take_apart(state, where=where)
    every: list[NamedLeaf] = jax.tree.leaves(tree_of(parts))
    leaves = [pairs.as_master(leaf) for leaf in every]
    refuse_collisions([leaf for leaf in leaves if leaf.name[0] == "params"], where)
    if any(isinstance(leaf.value, jax.ShapeDtypeStruct) for leaf in every):
        raise TypeError(f"{where}: this state is abstract. Make it with jzero.shard(create, ...).")
    wanted = {
        leaf.name: _where(".".join(leaf.name[1:]), names, where)
        for leaf in leaves
        if leaf.name[0] == "params"
    }
    values = {leaf.name: leaf.value for leaf in every}
    needed = {leaf.name: _where(".".join(leaf.name), names, where) for leaf in of_model(leaves, state)}
    with ExitStack() as opened:
        tensors = tensors_of(path, ignore, opened, where)
        absent = [leaf for leaf in leaves if leaf.name in needed and needed[leaf.name][0] not in tensors]
        wanted |= {name: to for name, to in needed.items() if to[0] in tensors}
        _check(leaves, wanted, tensors, ignore, cast, where)
        warn_if_absent(absent, "the file", where)
        for leaf in leaves:
            name = ("params", *leaf.name[1:]) if leaf.name[0] == MASTER else leaf.name
            if name in wanted:
                tensor, order = wanted[name]
                values[leaf.name] = _read(leaf, tensors[tensor], order, f"{where}: {tensor}")
    values = {name: on_auto_mesh(x) for name, x in values.items()}
    every = [dataclasses.replace(x, value=on_auto_mesh(x.value)) for x in every]
    with auto_context():
        values = pairs.split_again(values, every)
    return adapters.put_together(state, filled(parts, {name: on_context_mesh(x) for name, x in values.items()}))


def _where(name: str, names: Names, where: str) -> tuple[str, Order | None]:
    given = renamed(name, names)
    if isinstance(given, str):
        return given, None
    try:
        tensor, order = given
        order = tuple(int(d) for d in order)
    except (TypeError, ValueError):
        tensor = order = None
    if not isinstance(tensor, str) or order is None:
        raise TypeError(
            f"{where}: names= gives {given!r} for {name}: a name, or a pair of name and dims, (name, (1, 0))."
        )
    return tensor, order


def _check(
    leaves: Sequence[NamedLeaf],
    wanted: Mapping[Name, tuple[str, Order | None]],
    tensors: Mapping[str, Tensor],
    ignore: Sequence[str],
    cast: bool,
    where: str,
) -> None:
    rows, only_dtypes = [], True
    for leaf in leaves:
        if leaf.name not in wanted:
            continue
        name, order = wanted[leaf.name]
        t = tensors.get(name)
        shown = name if t is None else f"{name} {t.dtype}{list(t.shape)}"
        why = f"no such tensor.{nearest(name, tensors)}" if t is None else _misfit(leaf, t, order)
        only_dtypes = only_dtypes and not why
        if t is not None and not (why or cast) and t.dtype != leaf.value.dtype.name:
            why = "another dtype: cast=True converts"
        if why:
            rows.append((text(leaf.name), f"{leaf.value.dtype}{list(leaf.shape)}", shown, why))
    used = {name for name, _ in wanted.values()}
    for name in sorted(set(tensors) - used):
        if not ignored(name, ignore):
            rows.append(
                ("", "", f"{name} {list(tensors[name].shape)}", "no param takes it: ignore= leaves it out")
            )
            only_dtypes = False
    if rows:
        table = listing([("param", "", "tensor", ""), *rows], most=40)
        raise ValueError(
            f"{where}: {len(rows)} params and tensors do not fit, and nothing was read:\n{table}\n"
            + ("Pass cast=True." if only_dtypes else "Name the tensors with names=.")
        )


def _misfit(leaf: NamedLeaf, tensor: Tensor, order: Order | None) -> str:
    """Why a leaf cannot be read from a tensor, even with `cast`; empty if it can."""
    shape = tensor.shape
    if order is not None and sorted(order) != list(range(len(shape))):
        return f"{order} is not an order of its dims"
    if (shape if order is None else tuple(shape[d] for d in order)) != leaf.shape:
        return "another shape"
    if tensor.dtype is None or not convertible(jnp.dtype(tensor.dtype), jnp.dtype(leaf.value.dtype)):
        return "no conversion keeps its values"
    return ""


def _read(leaf: NamedLeaf, tensor: Tensor, order: Order | None, where: str) -> jax.Array:
    """A param or a master in its layout; beyond the logical shape, zeros."""
    like = leaf.value
    shape, dtype = tuple(np.shape(like)), jnp.dtype(like.dtype)

    def shard(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        spans = [range(*i.indices(n)) for i, n in zip(index, shape, strict=True)]
        inside = [slice(s.start, min(s.stop, n)) for s, n in zip(spans, leaf.shape, strict=True)]
        out = np.zeros([len(s) for s in spans], dtype)
        if all(s.start < s.stop for s in inside):
            here = inside if order is None else [inside[order.index(d)] for d in range(len(order))]
            value = tensor.read(tuple(here))
            value = value if order is None else value.transpose(order)
            out[tuple(slice(0, n) for n in value.shape)] = converted(value, dtype, where)
        return out

    if not isinstance(like, (jax.Array, jax.ShapeDtypeStruct)):
        return jnp.asarray(shard(tuple(slice(0, n) for n in shape)))
    return jax.make_array_from_callback(shape, like.sharding, shard)
