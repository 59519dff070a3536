"""The arguments of a program: given shardings before a compile, read from the program after it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.tree_util import KeyPath

from jzero.core.errors import check_function, check_ints, listing, typed_shape
from jzero.core.jaxprs import of_any_leaves
from jzero.core.nnx_modules import jit_of
from jzero.core.random_keys import is_key
from jzero.core.types import PyTree
from jzero.flax.shard import plans_in
from jzero.layout.batches import abstract_batch
from jzero.layout.leaf_rule import path_keys
from jzero.layout.state_layouts import Keys
from jzero.sharding import HOST, Plan

Call = tuple[tuple[PyTree, ...], dict[str, PyTree]]  # positional and keyword arguments
Row = tuple[str, ...]  # of a listing


def find_plan(args: tuple[Any, ...]) -> Plan | None:
    """The plan of the first argument that jzero has sharded, or None."""
    return next(plans_in(args), None)


def jitted_fn(
    fn: Callable[..., Any], donate_argnums: int | Sequence[int] | None, args: PyTree, where: str = "pod.compile"
) -> Any:
    """`fn` as something with `.trace` or `.lower`; a function that is jitted already stays as it is.

    With NNX objects among `args` it is jitted by `nnx.jit`: `jax.jit` would drop what it changes in them.

    Raises:
      TypeError: `fn` is not a function, or `donate_argnums` not integers.
      ValueError: `donate_argnums` for a function that is jitted already.
    """
    check_function(fn, "fn", where=where)
    donate_argnums = check_ints(() if donate_argnums is None else donate_argnums, "donate_argnums", where=where)
    if not (hasattr(fn, "trace") or hasattr(fn, "lower")):
        return jit_of(args)(fn, donate_argnums=donate_argnums)
    if donate_argnums:
        raise ValueError("pod.compile: fn is jitted already; give donate_argnums to its own jit, not to compile.")
    return fn


def fill_shardings(args: Call, plan: Plan | None, *, devices: Sequence[Any]) -> Call:
    """Arguments whose array leaves all say where they are: the batch by the plan, the rest as it was.

    An argument in which nothing changes is passed on as the same object, so that objects whose identity
    matters (an nnx module) survive. Arrays without a NamedSharding become abstract: they sit on a device that
    is not of the pod. Without a plan such leaves stay open, and XLA chooses as it does under a plain `jit`.

    Args:
      args: positional arguments and keyword arguments, a pair of a tuple and a dict.
      plan: has `.batch`, a NamedSharding; or None.
      devices: those of the pod.

    Returns:
      The same pair.

    Raises:
      ValueError: leaves that lie on other devices, or that `plan.batch` does not divide.
    """
    elsewhere, uneven = list[Row](), list[Row]()
    split = "" if plan is None else f"{plan.batch.spec} over {dict(plan.batch.mesh.shape)}"

    def fill(name: str, arg: PyTree) -> PyTree:
        paths, tree = jax.tree_util.tree_flatten_with_path(arg)
        new = [_placed(leaf, plan) for _, leaf in paths]
        for (path, old), leaf in zip(paths, new, strict=True):
            where = name + jax.tree_util.keystr(path)
            if leaf is None:
                uneven.append((where, typed_shape(old), split))
            elif not _on(leaf, devices):
                elsewhere.append((where, typed_shape(old), f"on {leaf.sharding.mesh.devices.flat[0]!r}"))
        same = all(old is leaf for (_, old), leaf in zip(paths, new, strict=True))
        return arg if same else jax.tree_util.tree_unflatten(tree, new)

    positional = tuple(fill(f"args[{i}]", arg) for i, arg in enumerate(args[0]))
    named = {name: fill(name, arg) for name, arg in args[1].items()}
    _refuse(elsewhere, uneven, count=len(jax.tree.leaves(args)))
    return positional, named


def _placed(leaf: Any, plan: Plan | None) -> Any:
    """The leaf with a sharding; itself if it has one or is not an array; None where the plan cannot divide it."""
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")) or isinstance(leaf, np.generic):
        return leaf
    if isinstance(getattr(leaf, "sharding", None), NamedSharding):
        return leaf
    if plan is None:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=getattr(leaf, "weak_type", False))
    try:
        return abstract_batch(leaf, plan.batch)
    except ValueError:
        return None


def _on(leaf: Any, devices: Sequence[Any]) -> bool:
    """False for a leaf that a NamedSharding ties to devices outside the pod."""
    mesh = getattr(getattr(leaf, "sharding", None), "mesh", None)
    return not isinstance(mesh, Mesh) or set(devices).issuperset(mesh.devices.flat)


def _refuse(elsewhere: Sequence[Row], uneven: Sequence[Row], *, count: int) -> None:
    if elsewhere:
        raise ValueError(
            f"pod.compile: {len(elsewhere)} of {count} leaves are not laid out on this pod:\n"
            f"{listing(elsewhere)}\nLay them out on a mesh of the pod, as in jzero.abstract(create_state, "
            "mesh=pod.mesh(...))."
        )
    if uneven:
        raise ValueError(
            f"pod.compile: {len(uneven)} of {count} leaves have no sharding that plan.batch can give:\n"
            f"{listing(uneven)}\nThe size of a split dim must be a multiple of the devices along its axes. "
            "Change the batch size, or give a leaf that is not a batch a sharding of its own: "
            "jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GivenArgument:
    """What a program is given as one of its flat arguments.

    Attributes:
      path, keys: in the arguments, also as text; the first two keys say which argument it is in.
      shape, dtype: of the whole array.
      donated: True where its buffer is given away.
      sharding: None where the program does not use it, or is only traced.
      number: of its parameter in the program; None where the program does not use it.
    """

    path: KeyPath
    keys: Keys
    shape: tuple[int, ...]
    dtype: np.dtype
    donated: bool = False
    sharding: jax.sharding.Sharding | None = None
    number: int | None = None

    @property
    def argument(self) -> Keys:
        """Equal for leaves of the same argument."""
        return self.keys[:2]

    @property
    def size(self) -> int:
        """Elements of the whole array."""
        return math.prod(self.shape)

    @property
    def local(self) -> tuple[int, ...]:
        """Its shape on one device."""
        return self.shape if self.sharding is None else tuple(self.sharding.shard_shape(self.shape))

    @property
    def held(self) -> int:
        """Bytes on one device; 0 where the program does not use it."""
        return 0 if self.sharding is None else math.prod(self.local) * self.dtype.itemsize

    @property
    def on_host(self) -> bool:
        """True where it is in pinned host memory."""
        return self.sharding is not None and self.sharding.memory_kind == HOST

    @property
    def is_key(self) -> bool:
        """True for random keys."""
        return is_key(self)


def result_keys(compiled: jax.stages.Compiled) -> list[Keys]:
    """The path of every result."""
    return [path_keys(path) for path, _ in jax.tree_util.tree_leaves_with_path(compiled.output_shardings)]


def arguments_given(stage: jax.stages.Compiled | jax.stages.Traced, *, tokens: int = 0) -> list[GivenArgument]:
    """The flat arguments of a program; those of a traced program have no shardings. `tokens`: `Module.tokens`."""
    infos, tree = jax.tree_util.tree_flatten_with_path(of_any_leaves(lambda: stage.args_info))
    compiled = isinstance(stage, jax.stages.Compiled)
    # None is also what a state may hold in place of an array
    shardings = tree.flatten_up_to(stage.input_shardings) if compiled else [None] * len(infos)
    found, numbers = list[GivenArgument](), itertools.count(tokens)
    for (path, x), sharding in zip(infos, shardings, strict=True):
        found.append(GivenArgument(
            path=path, keys=path_keys(path), shape=tuple(x.shape), dtype=x.dtype, donated=x.donated,
            sharding=sharding, number=None if sharding is None else next(numbers),
        ))  # fmt: skip
    return found
