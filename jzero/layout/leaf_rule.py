"""Layouts of one param: the leaf rule. `split.py` says how an array is split, `given_layouts.py` what it brings along.

Everything here is a pure function of shapes, specs and a mesh.

[Note: small leaves]
A collective for a small leaf costs more than its bytes. `min_shard_bytes="auto"` leaves whole all leaves below the
largest threshold of at most 64 KiB that adds at most 1 % to the optimizer state of one device: with 8 devices that is
often all biases and norms, with 1024 nothing. Padding takes far less than 1 %, so the state stays within 1.02 of total
/ N (`tests/layout/test_catalogue.py`, for GPT-2 to Llama-3 70B, convolutions, 5 to 1024 devices).
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jax.tree_util import KeyPath

from jzero.config import ZeroConfig
from jzero.core.errors import human_bytes
from jzero.core.types import PyTree, Shaped
from jzero.layout.blocks import uncut
from jzero.layout.specs import (
    axis_size,
    entry_axes,
    is_sub_axis,
    make_spec,
    named_axes,
    shard_factor,
    spec_axes,
    without_dim,
)
from jzero.layout.split import PaddedSplit, add_axes, find_split

MAX_WHOLE_BYTES = 64 * 1024
SHARE_OF_SMALL = 0.01


class Whole(enum.Enum):
    """Why a leaf is not split into equal pieces over the ZeRO axis."""

    STAGE = "the stage splits nothing"
    ONE_DEVICE = "the axis has one device"
    TAKEN = "its own layout uses the axis"
    SMALL = "it has fewer bytes than min_shard_bytes"
    UNEVEN = "no dim divides by the devices"


class Frozen(enum.Enum):
    """Why a param is not trained."""

    APART = "the optimizer does not take it"
    KEPT = "the optimizer takes it, but does not read its gradient and never changes it"


@dataclasses.dataclass(frozen=True)
class Layout:
    """The layouts of one param and of what belongs to it.

    Attributes:
      name: its path in the param tree, as `jax.tree_util.keystr` prints it.
      keys: the same path as plain strings, to find its leaves in an optimizer state.
      shape, dtype: of the whole param.
      stored: PartitionSpec of the param between steps.
      used: PartitionSpec that the model's arithmetic sees.
      grad: PartitionSpec of its reduced gradient.
      state: PartitionSpec of its master, its moments and its update.
      state_shape: shape in which master and moments are stored: that of the param, or padded.
      scan_dim: the dim along which layers are stacked for a scan; None if it is not a stack.
      whole: why it is not split into equal pieces over the ZeRO axis; None if it is.
      reason: the same as text, with numbers; empty if it is split, also if only its state is padded.
      guessed: `scan_dim` is a guess from shapes; see [Note: what is known of stacks] in `layer_stacks.py`.
      frozen: why it is not trained. It then has no master and no moments, and a gradient only if the step reads it.
        None if it is trained.
    """

    name: str
    keys: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    stored: PartitionSpec
    used: PartitionSpec
    grad: PartitionSpec
    state: PartitionSpec
    state_shape: tuple[int, ...]
    scan_dim: int | None
    whole: Whole | None
    reason: str
    guessed: bool = dataclasses.field(default=False, compare=False)
    frozen: Frozen | None = None

    @property
    def size(self) -> int:
        """Number of elements of the whole param."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole param in its stored dtype."""
        return self.size * self.dtype.itemsize

    @property
    def padded(self) -> bool:
        """Its optimizer state is stored padded; see [Note: padding] in `split.py`."""
        return self.state_shape != self.shape

    @property
    def several_dims(self) -> bool:
        """Its state is split over several dims; see [Note: several dims] in `split.py`."""
        return any(map(is_sub_axis, named_axes(self.state)))

    @property
    def along_one_dim(self) -> bool:
        """Equal pieces along one dim: what XLA can make a reduce-scatter for."""
        return not self.padded and not self.several_dims

    @property
    def scanned(self) -> bool:
        """It is a stack of layers."""
        return self.scan_dim is not None

    @property
    def layers(self) -> int:
        """How many layers a stack has; 1 for a param that is not a stack."""
        return 1 if self.scan_dim is None else self.shape[self.scan_dim]

    @property
    def layer_shape(self) -> tuple[int, ...]:
        """The shape of one layer of a stack; its own for a param that is not a stack."""
        return tuple(n for dim, n in enumerate(self.shape) if dim != self.scan_dim)

    def of_layer(self, spec: PartitionSpec) -> PartitionSpec:
        """What a layout of a stack is for one of its layers; for a param that is not a stack, the layout."""
        return without_dim(spec, len(self.shape), self.scan_dim)

    @property
    def vector(self) -> bool:
        """A bias or a norm's scale, of one layer or of a stack of them."""
        return len(self.layer_shape) <= 1


def make_layout(
    path: KeyPath,
    leaf: Any,
    base: PartitionSpec,
    config: ZeroConfig,
    mesh: Mesh,
    scan_dim: int | None,
    min_shard_bytes: int = 0,
    *,
    guessed: bool = False,
    frozen: Frozen | None = None,
    state_dim: int | None = None,
) -> Layout:
    """The layouts of one param, its gradient and its state, from its shape and what it brings along.

    `state_dim`: the dim that the user has cut, however small the param is; None: the leaf rule chooses.
    """
    leaf = as_abstract(leaf)
    shape, row = tuple(leaf.shape), config.row
    skip = tuple(d for d in range(len(shape)) if d == scan_dim or state_dim not in (None, d))
    min_shard_bytes = min_shard_bytes if state_dim is None else 0
    # the axes that share params first: a shard of the state is then a part of the shard of the param
    rest = tuple(a for a in config.axes if a not in config.param_axes)
    axes = (*config.cut_axes, *rest)
    prefer = uncut(shape, path_keys(path), scan_dim, config, mesh)
    over, whole, reason = cut_leaf(
        shape, leaf.dtype, base, axes, config, mesh, min_shard_bytes, skip, prefer=prefer
    )
    if frozen is Frozen.APART and whole is Whole.UNEVEN and rest:  # it has no state that needs all axes
        within = cut_leaf(shape, leaf.dtype, base, config.cut_axes, config, mesh, min_shard_bytes, skip, prefer=prefer)
        if within[0].spec != base and within[0].shape == shape:
            over, whole, reason = within
            rest = ()
    if frozen is Frozen.APART and over.shape != shape:  # nor one to pad
        over, reason = PaddedSplit(over.even, shape, over.even), reason if over.even == base else ""
    params = over.even
    if rest and over.spec != base:
        if add_axes(shape, base, axes, mesh, skip=skip) is not None:
            # along one dim for all: along the same one for the params, or new params would have to cross it whole
            params = make_spec([tuple(a for a in entry_axes(e) if a not in rest) for e in over.spec])
        else:
            inner = find_split(shape, base, config.cut_axes, mesh, skip=skip)
            params = base if inner is None or inner.shape != shape else inner.spec
            if params != base:
                over = find_split(shape, params, rest, mesh, skip=skip) or over
    if over.shape != shape:
        if not row.params:
            reason = ""
        elif params == base:
            reason += f": param whole, state padded to {list(over.shape)}"
        else:
            reason += f": param in {shard_factor(params, mesh)} parts, state padded to {list(over.shape)}"
    return Layout(
        name=path_name(path), keys=path_keys(path), shape=shape, dtype=jnp.dtype(leaf.dtype),
        stored=params if row.params else base, used=base,
        grad=over.spec if row.grads else base, state=over.spec if row.state else base,
        state_shape=over.shape if row.state else shape,
        scan_dim=scan_dim, whole=whole if row.state else Whole.STAGE,
        reason=reason if row.state else f"stage {config.stage} splits nothing", guessed=guessed,
        frozen=frozen,
    )  # fmt: skip


def cut_leaf(
    shape: tuple[int, ...],
    dtype: np.dtype,
    base: PartitionSpec,
    axes: Sequence[str],
    config: ZeroConfig,
    mesh: Mesh,
    min_shard_bytes: int,
    skip: Sequence[int] = (),
    several: bool = True,
    prefer: Callable[[PartitionSpec], bool] | None = None,
) -> tuple[PaddedSplit, Whole | None, str]:
    """How a leaf is split over `axes` by the rules of a config, and why not into equal pieces.

    `prefer`: as for `add_axes`.
    """
    n, nbytes = axis_size(mesh, axes), math.prod(shape) * jnp.dtype(dtype).itemsize
    taken = [a for a in axes if a in spec_axes(base)]
    whole = PaddedSplit(base, shape, base)
    if n == 1:
        return whole, Whole.ONE_DEVICE, f"axis {'x'.join(axes)} has one device"
    if taken:
        return whole, Whole.TAKEN, f"already split over {', '.join(map(repr, taken))} by its own layout"
    if nbytes < min_shard_bytes:
        return whole, Whole.SMALL, f"{human_bytes(nbytes)} < min_shard_bytes {human_bytes(min_shard_bytes)}"
    found = find_split(shape, base, axes, mesh, skip=skip, several=several, prefer=prefer)
    if found is not None and found.shape == shape:
        return found, None, ""
    reason = f"no dim divisible by {n}"
    if found is None or config.uneven != "pad" or not jnp.issubdtype(dtype, jnp.floating):
        return whole, Whole.UNEVEN, reason
    return found, Whole.UNEVEN, reason


def whole_below(config: ZeroConfig, leaves: Sequence[tuple[Shaped, int, bool]], mesh: Mesh) -> int:
    """`min_shard_bytes` as a number of bytes: see [Note: small leaves].

    Args:
      config: its `min_shard_bytes` is a number, or "auto".
      leaves: every param, into how many parts its own layout cuts it, and whether it is trained. A frozen one has no
        state; where the stage splits params, it counts itself.
      mesh: of the plan.
    """
    if not isinstance(config.min_shard_bytes, str):
        return config.min_shard_bytes
    n = axis_size(mesh, config.axes)

    def state_bytes(x: Shaped, trained: bool) -> int:
        return config.adam_bytes(x.dtype) if trained else x.dtype.itemsize if config.row.params else 0

    sizes = sorted(
        (math.prod(x.shape) * x.dtype.itemsize, math.prod(x.shape) * state_bytes(x, trained) / parts)
        for x, parts, trained in leaves
    )
    left = SHARE_OF_SMALL * sum(state for _, state in sizes) / n
    for own, state in sizes:
        if own >= MAX_WHOLE_BYTES:
            break
        left -= state * (n - 1) / n
        if left < 0:
            return own
    return MAX_WHOLE_BYTES


def path_keys(path: KeyPath) -> tuple[str, ...]:
    """A key path as plain strings, without a box's own attribute (`.value`)."""
    keys = tuple(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)
    return keys[:-1] if keys[-1:] == ("value",) and isinstance(path[-1], jax.tree_util.GetAttrKey) else keys


def path_name(path: KeyPath) -> str:
    """A key path as text, without a box's own attribute."""
    name = jax.tree_util.keystr(path)
    return name.removesuffix(".value") if name != ".value" else name


def keyed_shapes(tree: PyTree) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
    """The path and the shape of every leaf."""
    return [(path_keys(k), tuple(np.shape(x))) for k, x in jax.tree_util.tree_leaves_with_path(tree)]


def as_abstract(leaf: Any) -> Any:
    """Something with `.shape` and `.dtype` for arrays, ShapeDtypeStructs and Python scalars."""
    return leaf if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else np.asarray(leaf)
