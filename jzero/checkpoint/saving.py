"""Saving a state: its logical leaves, in one directory that appears whole or not at all."""

from __future__ import annotations

import json
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import optax

from jzero.checkpoint import commit, pending, store
from jzero.checkpoint.logical import apart, refuse_collisions, to_store, trained_of, tree_of
from jzero.checkpoint.match import text
from jzero.core.errors import listing
from jzero.core.jaxprs import is_tracer
from jzero.core.types import PyTree
from jzero.layout.explicit import auto_context, on_auto_mesh

_NUMBERS = (bool, int, float, complex)


class Saving:
    """A save under way. `result()` waits until the checkpoint is there, and raises what went wrong."""

    def __init__(self, path: Path, future: Future):
        self._path, self._future = path, future

    def result(self, timeout: float | None = None) -> Path:
        """The path of the finished checkpoint.

        Raises:
          TimeoutError: it is not finished after `timeout` seconds.
          OSError: the disk is full, or refuses.
        """
        pending.result(self._future, timeout)
        return self._path


def save(
    path: store.PathLike, state: PyTree, *, tx: optax.GradientTransformation | None = None, custom: Any = None
) -> Path:
    """Writes a state to a directory, which appears when all of it is there.

    Args:
      path: a directory that does not exist. Across processes, on a file system that all of them see.
      state: a TrainState, a pair `(nnx.Module, nnx.Optimizer)`, a mapping with `params` and `opt_state`, or any tree of
        arrays; in any layout, sharded by jzero or not.
      tx: for a mapping, the transformation from `jzero.zero` that `opt_state` belongs to.
      custom: JSON to store with it, e.g. the position in the data; `jzero.checkpoint.custom(path)` returns it.

    Returns:
      The absolute path.

    Raises:
      FileExistsError: there is something at `path` already.
      ValueError: two leaves would be stored under one name (`{"a": {"b": x}, "a.b": y}`), or `path` is empty or has
        the name of a temporary folder of orbax.
      NotImplementedError: a `path` that is the address of a bucket.
      TypeError: `custom` is not JSON, a leaf is abstract, traced or not an array, or `tx` does not go with the state.
      OSError: the disk is full or cannot be written; what was there before is untouched.

    Layout:
      What is stored depends on the values alone: leaves in logical shapes, masters beside the params.

    Cost:
      Each process writes its shards once. A leaf that is padded is laid out again, its shard once more on the device.

    Example:
      >>> import jax.numpy as jnp, jzero, tempfile
      >>> path = jzero.checkpoint.save(tempfile.mkdtemp() + "/step", {"w": jnp.ones(3)})
      >>> jzero.checkpoint.restore(path, {"w": jnp.zeros(3)})["w"].tolist()
      [1.0, 1.0, 1.0]
    """
    return _save(path, state, tx, custom, in_background=False).result()


def save_async(
    path: store.PathLike, state: PyTree, *, tx: optax.GradientTransformation | None = None, custom: Any = None
) -> Saving:
    """As `save`, but returns when the arrays are copied: the next step may donate the state.

    Args:
      path, state, tx, custom: as for `save`.

    Returns:
      A `Saving`; its `result()` tells whether the checkpoint is there. A process that ends before that, also by an
      exception, finishes the save first, and says so; after 300 s it is abandoned, and the process ends with 1.

    Raises:
      FileExistsError, ValueError, NotImplementedError, TypeError, OSError: as for `save`.

    Cost:
      Host memory for a copy of all shards of this process until they are written, also of those that are in host
      memory.
    """
    return _save(path, state, tx, custom, in_background=True)


def _save(
    path: store.PathLike, state: PyTree, tx: optax.GradientTransformation | None, custom: Any, *, in_background: bool
) -> Saving:
    """Begins a save; the state may be donated before its end if it goes on in the background."""
    where = "jzero.checkpoint.save"
    path = store.absolute(path, where)
    tree, trained = to_write(state, tx, custom, where=where)
    store.check_free(path, where)
    tree = commit.host_copies(tree) if in_background else commit.own_views(tree)
    return Saving(path, commit.save_async(path, tree, custom=custom, trained=trained))


def to_write(
    state: PyTree, tx: optax.GradientTransformation | None, custom: Any, *, where: str
) -> tuple[PyTree, list[str] | None]:
    """The tree of arrays that a save writes, and the names of the params that are trained if not all are.

    Raises:
      ValueError: two leaves have one name.
      TypeError: leaves are abstract, traced, or neither arrays nor numbers, or `custom` is not JSON.
    """
    try:
        json.dumps(custom)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{where}: custom must be JSON (numbers, strings, lists, dicts): {error}") from None
    parts = on_auto_mesh(apart(state, tx, where))
    tree = tree_of(parts)
    leaves = jax.tree.leaves(tree)
    abstract = sum(isinstance(leaf.value, jax.ShapeDtypeStruct) or is_tracer(leaf.value) for leaf in leaves)
    if abstract:
        raise TypeError(
            f"{where}: {abstract} of {len(leaves)} leaves are abstract or traced, with no values to save. Save "
            "outside of jit, a state of jzero.shard."
        )
    other = [x for x in leaves if not (hasattr(x.value, "dtype") or isinstance(x.value, _NUMBERS))]
    if other:
        named = listing([(text(leaf.name), type(leaf.value).__name__) for leaf in other])
        raise TypeError(
            f"{where}: {len(other)} of {len(leaves)} leaves are neither arrays nor numbers:\n{named}\nLeave them out "
            "of the tree; what is JSON can go into custom=."
        )
    refuse_collisions(leaves, where)
    if all(leaf.empty for leaf in leaves):
        raise TypeError(f"{where}: there are no arrays in this {type(state).__name__}.")
    with auto_context():
        return jax.tree.map(to_store, tree), trained_of(parts)
