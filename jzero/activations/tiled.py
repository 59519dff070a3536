"""`tiled`: a position-wise layer computed on one part of the sequence after the other."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jzero.activations.position_wise import WHERE, PositionWise
from jzero.core.errors import check_int, check_ints, shown, typed_shape
from jzero.core.jaxprs import every_equation, trace
from jzero.core.nnx_modules import has_node, is_module_class
from jzero.core.random_keys import is_key
from jzero.core.types import PyTree

MOST_DIMS = 64  # of a numpy array
CUSTOM_VJP = "custom_vjp_call"


def tiled(
    fn: Any, *, axis: int = 1, tiles: int | None = None, argnums: int | Sequence[int] | None = None
) -> Any:
    """A position-wise layer whose activations exist for one tile of the sequence at a time.

    The input is cut along `axis`, and a loop runs the layer on one tile after the other, each under remat: the backward
    pass computes a tile again, so that of what lies between input and output no more than a tile is ever there. At
    stage 3 the layer's weights are gathered once for all tiles and once more for the backward pass, and their gradients
    are reduced once.

    Each output must be computed position by position: jzero traces the layer and refuses what mixes positions
    (attention, a convolution, a softmax or a mean over them), or knows their numbers (`jnp.arange`, a table of
    positions that is not cut): pass such arrays as arguments.

    Args:
      fn: a linen Module class, an NNX Module class (its `__call__` is tiled), or a function of arrays.
      axis: the dim of the input that is cut: 1, the sequence in [batch, sequence, features]. It must not be split over
        devices.
      tiles: how many; it must divide the dim. None: as many as it takes for what the layer computes of a tile on one
        device to have at most 128 MiB, rounded up to a divisor.
      argnums: which positional arguments are cut; `self` or the module counts as 0. None: the first that is an array of
        floating-point numbers, and all array arguments with the same dims up to and including `axis` (positions, a
        mask). Other arguments are whole in every tile.

    Returns:
      A Module class or a function that is called like `fn`. In `init` a linen module runs whole.

    Raises:
      TypeError: `fn` is neither a Module class nor a function, or an argument is of the wrong kind. When called: no
        argument is a floating-point array.
      ValueError: when called: an output is not computed position by position, `tiles` does not divide the dim, the
        layer changes variables other than counts of random numbers, or draws from a key that is not an argument.

    Cost:
      Per device: with A the bytes of all that the layer computes, A / tiles in place of A; the layer's forward pass
      once more. Gradients of weights are summed over tiles in the dtype of the weights. Random keys among the arguments
      are folded with the number of a tile, so dropout has other masks than without tiles.

    References:
      Bekman et al., Arctic Long Sequence Training (arXiv:2506.13996), section 3.1 (TiledMLP).

    Example:
      >>> import jax.numpy as jnp, jzero
      >>> mlp = jzero.tiled(lambda x, w: jnp.tanh(x @ w) @ w.T, tiles=4)
      >>> mlp(jnp.ones((2, 32, 8)), jnp.ones((8, 64))).shape
      (2, 32, 8)
    """
    check_int(axis, "axis", low=-MOST_DIMS, high=MOST_DIMS, where=WHERE)
    if tiles is not None:
        check_int(tiles, "tiles", low=1, where=WHERE)
    if argnums is not None:
        argnums = check_ints(argnums, "argnums", low=0, where=WHERE)
    layer = _Layer(axis, tiles, argnums, getattr(fn, "__name__", type(fn).__name__))
    if is_module_class(fn, "flax.linen"):
        return _linen(fn, layer)
    if is_module_class(fn):
        return _nnx(fn, layer)
    if is_module_class(type(fn), "flax.linen"):
        name = type(fn).__name__
        raise TypeError(f"{WHERE}: {shown(fn)} is a linen module. Tile its class: jzero.tiled({name})(...).")
    if isinstance(fn, type) or not callable(fn):
        raise TypeError(f"{WHERE}: {shown(fn)} is neither a Module class nor a function.")

    @functools.wraps(fn)
    def run(*args, **kwargs):
        if has_node((args, kwargs)):
            raise TypeError(
                f"{WHERE}: {layer.name} takes an NNX object, whose state would not advance. Tile the class of the "
                "layer: jzero.tiled(Mlp)(rngs=...)."
            )
        return layer.run(lambda state, rngs, args, kwargs: (fn(*args, **kwargs), ()), (), (), args, kwargs)[0]

    return run


@dataclasses.dataclass(frozen=True)
class _Layer:
    """The checked arguments of `tiled`; `name` is that of the layer."""

    axis: int
    tiles: int | None
    argnums: tuple[int, ...] | None
    name: str

    def run(
        self, pure: Callable[..., tuple[PyTree, PyTree]], state: PyTree, rngs: PyTree, args: tuple, kwargs: dict,
        *, first: int = 0,
    ) -> tuple[PyTree, PyTree]:  # fmt: skip
        """(results, new state) of `pure(state, rngs, args, kwargs)`, tile by tile.

        Args:
          pure: returns its results, which are joined, and the new state, which is that of the last tile.
          state: arrays that are whole in every tile.
          rngs: random keys, also of the older kind. Like typed keys among the others they are folded with the tile's
            number.
          args, kwargs: those of the call.
          first: how many positional arguments stand before `args`.
        """
        leaves, tree = jax.tree.flatten((state, rngs, args, kwargs))
        dim, cut = self._cut(args, kwargs, first)
        arrays = [i for i, x in enumerate(leaves) if _is_array(x)]
        values = [leaves[i] for i in arrays]
        rows = [i for i, x in enumerate(values) if any(x is c for c in cut)]
        trees = list[Any]()

        def flat(*values):
            filled = dict(enumerate(leaves)) | dict(zip(arrays, values, strict=True))
            outs, new = map(jax.tree.flatten, pure(*tree.unflatten(filled.values())))
            trees[:] = [outs[1], new[1], len(outs[0])]
            return [*outs[0], *new[0]]

        def results(outs):
            return trees[0].unflatten(outs[: trees[2]]), trees[1].unflatten(outs[trees[2] :])

        own = {id(x) for x in jax.tree.leaves(rngs)}
        keys = [i for i, x in enumerate(values) if x.ndim == (not is_key(x)) and (is_key(x) or id(x) in own)]
        traced = trace(flat, *values)
        check = PositionWise(self.name, *traced, rows, keys, dim, trees[2])
        if any(eqn.primitive.name == CUSTOM_VJP for eqn in every_equation(traced[0])):
            self._check_backward(flat, values, rows, dim, trees[2])
        size = values[rows[0]].shape[dim]
        n = check.tiles(self.tiles, size)
        if n == 1:
            return results(flat(*values))
        some = [_part(x, dim, size // n) if i in rows else x for i, x in enumerate(values)]
        check.equals(n, *trace(flat, *some))

        @jax.checkpoint
        def tile(number, parts):
            given = list(values)
            for i in keys:
                given[i] = jax.random.fold_in(given[i], number)
            for i, part in zip(rows, parts, strict=True):
                given[i] = part
            return flat(*given)

        def body(_, row):
            return None, tile(*row)

        _, outs = jax.lax.scan(body, None, (jnp.arange(n), [_split(values[i], dim, n) for i in rows]))
        return results([_joined(x, dim) if i < trees[2] else x[-1] for i, x in enumerate(outs)])

    def _check_backward(self, flat: Callable[..., list[Any]], values: list[Any], rows: list[int], dim: int, count: int):
        """Raises where a backward pass of its own mixes positions in the gradient of the input."""
        moving = [i for i in rows if jnp.issubdtype(values[i].dtype, jnp.inexact)]
        shapes = jax.eval_shape(flat, *values)
        own = [i for i, x in enumerate(shapes[:count]) if jnp.issubdtype(x.dtype, jnp.inexact)]

        def back(*given):
            some, cotangents = given[: len(values)], given[len(values) :]

            def outs(*parts):
                new = dict(zip(moving, parts, strict=True))
                found = flat(*(new.get(i, x) for i, x in enumerate(some)))
                return [found[i] for i in own]

            return list(jax.vjp(outs, *(some[i] for i in moving))[1](list(cotangents)))

        traced = trace(back, *values, *(shapes[i] for i in own))
        cut = [*rows, *range(len(values), len(values) + len(own))]
        PositionWise(f"the backward pass of {self.name}", *traced, cut, range(len(values)), dim, len(moving))

    def _cut(self, args: Sequence[Any], kwargs: dict[str, Any], first: int) -> tuple[int, list[Any]]:
        """The dim, and the arrays that are cut along it."""
        if self.argnums is not None:
            chosen = [args[i - first] for i in self.argnums if 0 <= i - first < len(args)]
            found = [x for x in jax.tree.leaves(chosen) if _is_array(x)]
        else:
            found = [x for x in args if _is_array(x) and jnp.issubdtype(x.dtype, jnp.floating)][:1]
        if not found:
            raise TypeError(
                f"{WHERE}: what is cut of {self.name}? argnums={self.argnums}, and of its {len(args)} positional "
                "arguments none there is an array of floating-point numbers. Pass their positions as argnums=; `self` "
                "counts as 0."
            )
        for x in found:
            if not -x.ndim <= self.axis < x.ndim:
                raise ValueError(f"{WHERE}: {self.name} is cut along dim {self.axis}, which {typed_shape(x)} lacks.")
        dim = self.axis % found[0].ndim
        if len({x.shape[self.axis] for x in found}) > 1:
            raise ValueError(
                f"{WHERE}: {self.name} is cut along dim {self.axis}, and its arguments have other sizes there: "
                f"{', '.join(map(typed_shape, found))}. Leave those that are whole in every tile out of argnums=."
            )
        if self.argnums is None:
            begin, given = found[0].shape[: dim + 1], (*args, *kwargs.values())
            found = [x for x in given if _is_array(x) and x.shape[: dim + 1] == begin]
        return dim, found


def _is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray))


def _part(x: Any, dim: int, size: int) -> Any:
    return jax.ShapeDtypeStruct((*x.shape[:dim], size, *x.shape[dim + 1 :]), x.dtype)


def _split(x: Any, dim: int, n: int) -> jax.Array:
    """[..., size, ...] as [n, ..., size / n, ...]."""
    return jnp.moveaxis(x.reshape(*x.shape[:dim], n, -1, *x.shape[dim + 1 :]), dim, 0)


def _joined(x: jax.Array, dim: int) -> jax.Array:
    """The reverse."""
    x = jnp.moveaxis(x, 0, dim)
    return x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])


def _linen(subject: type, layer: _Layer) -> Any:
    """A linen class whose `__call__` is tiled, as `nn.remat` makes one."""
    from flax.core import lift
    from flax.linen.transforms import lift_transform

    def lifted(fn):
        def inner(scope_fn, repack, variables, rngs, *args, **kwargs):
            def pure(variables, rngs, args, kwargs):
                scope = scope_fn(variables, rngs)
                out = fn(scope, *args, **kwargs)
                new = repack(scope)
                if jax.tree.leaves(new):
                    raise ValueError(
                        f"{WHERE}: {layer.name} sets variables ({', '.join(_collections(new))}), which would be those "
                        "of one tile. Tile a part of it that sets none, or leave their collection out of mutable=."
                    )
                return out, ()

            return layer.run(pure, variables, rngs, args, kwargs, first=1)[0], repack(scope_fn(variables, rngs))

        packed = lift.pack(inner, (True,), (True,), (True,), name="tiled", enable_kwargs=True)

        @functools.wraps(fn)
        def call(scope, *args, **kwargs):
            first = jax.tree.leaves(scope, is_leaf=lambda x: hasattr(x, "is_mutable_collection"))[0]
            return (fn if first.is_mutable_collection("params") else packed)(scope, *args, **kwargs)

        return call

    return lift_transform(lifted, subject)


def _collections(groups: Any) -> list[str]:
    """The names in packed variables: the first key on the way to each."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(groups)]
    return sorted({str(next(key.key for key in path if hasattr(key, "key"))) for path in paths})


def _nnx(subject: type, layer: _Layer) -> type:
    """A subclass of an NNX class whose `__call__` is tiled."""
    names = {name: getattr(subject, name) for name in ("__doc__", "__qualname__", "__module__")}

    def call(self, *args, **kwargs):
        from flax import nnx

        graph, state = nnx.split(self)

        def pure(state, rngs, args, kwargs):
            old = jax.tree.leaves(nnx.filter_state(state, nnx.Not(nnx.RngCount)))
            module = nnx.merge(graph, state)
            out = subject.__call__(module, *args, **kwargs)
            after, new, rest = nnx.split(module, nnx.RngCount, ...)
            changed = any(a is not b for a, b in zip(jax.tree.leaves(rest), old, strict=False))
            if after != graph or changed or len(old) != len(jax.tree.leaves(rest)):
                raise ValueError(
                    f"{WHERE}: {layer.name} changes its Variables when it is called, and these would be those of one "
                    "tile. Tile a part of it that does not."
                )
            return out, new

        out, new = layer.run(pure, state, (), args, kwargs, first=1)
        nnx.update(self, new)
        return out

    return type(subject)(subject.__name__, (subject,), {**names, "__call__": call})
