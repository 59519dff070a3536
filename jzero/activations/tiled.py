"""`tiled`: a position-wise layer computed on one part of the sequence after the other."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jzero.core.batched import Classes
from jzero.core.errors import check_int, check_ints, shown, typed_shape
from jzero.core.graph import Graph, Node
from jzero.core.jaxprs import every_equation, is_literal, opened, place_of, trace
from jzero.core.nnx_modules import has_node, is_module_class
from jzero.core.primitives import CALLS, DRAWS
from jzero.core.random_keys import is_key
from jzero.core.regions import bodies
from jzero.core.token_loss import TILE_BYTES
from jzero.core.traces import planned
from jzero.core.types import Jaxpr, PyTree

WHERE = "jzero.tiled"
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
        cut, arrays = self._cut(args, kwargs, first), [i for i, x in enumerate(leaves) if _is_array(x)]
        values = [leaves[i] for i in arrays]
        rows = [i for i, x in enumerate(values) if any(x is c for c in cut)]
        dim, trees = self.axis % values[rows[0]].ndim, list[Any]()

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
        check = _Check(self.name, *traced, rows, keys, dim, trees[2])
        if any(eqn.primitive.name == CUSTOM_VJP for eqn in every_equation(traced[0])):
            self._check_backward(flat, values, rows, dim, trees[2])
        size = values[rows[0]].shape[dim]
        n = check.tiles(self.tiles, size)
        if n == 1:
            return results(flat(*values))
        some = [_part(x, dim, size // n) if i in rows else x for i, x in enumerate(values)]
        check.equals(trace(flat, *some)[0])

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
        own = [i for i, x in enumerate(jax.eval_shape(flat, *values)[:count]) if jnp.issubdtype(x.dtype, jnp.inexact)]

        def back(*given):
            some, cotangents = given[: len(values)], given[len(values) :]

            def outs(*parts):
                new = dict(zip(moving, parts, strict=True))
                found = flat(*(new.get(i, x) for i, x in enumerate(some)))
                return [found[i] for i in own]

            return list(jax.vjp(outs, *(some[i] for i in moving))[1](list(cotangents)))

        shapes = jax.eval_shape(flat, *values)
        traced = trace(back, *values, *(shapes[i] for i in own))
        cut = [*rows, *range(len(values), len(values) + len(own))]
        _Check(f"the backward pass of {self.name}", *traced, cut, range(len(values)), dim, len(moving))

    def _cut(self, args: Sequence[Any], kwargs: dict[str, Any], first: int) -> list[Any]:
        """The arrays that are cut."""
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
        if self.argnums is not None:
            return found
        begin = found[0].shape[: self.axis % found[0].ndim + 1]
        return [x for x in (*args, *kwargs.values()) if _is_array(x) and x.shape[: len(begin)] == begin]


class _Check:
    """A traced layer that is to be cut along a dim: see `Classes` for what keeps positions apart.

    Attributes:
      name: of the layer.
      graph: the trace.
      rows: which of its arguments are cut, along `dim`.
      keys: which of its arguments are random keys with one value for each tile.
      outs: how many of its results are joined; the others are state.
    """

    def __init__(self, name: str, jaxpr, consts, rows: Sequence[int], keys: Sequence[int], dim: int, outs: int):
        self.name, self.jaxpr, self.dim, self.outs = name, jaxpr, dim, outs
        self.graph = graph = Graph(jaxpr, consts)
        self.nodes = _read(graph)
        classes = Classes(graph, self.nodes, graph.ins, graph.outs, free=DRAWS)
        cells = {i: [classes.class_of(c) for c in classes.cells[i]] for i in classes.cells}
        cut = [graph.ins[i] for i in rows]
        self.along = {cells[i][dim] for i in cut}
        self.cells = cells
        whole = [i for i in graph.ins if i not in cut]
        apart = all(dim in classes.independent(i) for i in cut) and not any(self._touches(i) for i in whole)
        made = [i for i in graph.outs[:outs] if not (graph.avals[i].ndim > dim and cells[i][dim] in self.along)]
        if not apart or made or any(dim not in classes.independent(i) for i in graph.outs[:outs]):
            self._refuse(f"its result is not computed position by position{self._where()}")
        if any(map(self._touches, graph.outs[outs:])):
            self._refuse("it changes its state by what it is given")
        self._check_draws(keys)

    def _touches(self, value: int) -> bool:
        """Some dim of the value numbers positions."""
        return not self.along.isdisjoint(self.cells[value])

    def _refuse(self, why: str) -> None:
        raise ValueError(
            f"{WHERE}: {self.name} cannot be computed in tiles along dim {self.dim}: {why}. Tile a part of it that "
            "treats each position alike (an MLP, a norm, a projection), and pass what depends on positions as an "
            "argument that is cut (argnums=)."
        )

    def _where(self) -> str:
        """The first equation that reads positions and whose results have none, or that adds numbers of its own."""
        for node in self.nodes:
            if any(map(self._touches, node.ins)) and not any(map(self._touches, node.outs)):
                return f" ({node.name} at {place_of(node.eqn)})"
        return ""

    def _check_draws(self, keys: Sequence[int]) -> None:
        """Raises for random numbers along the dim that would be the same in every tile."""
        own = {self.graph.ins[i] for i in keys}
        for node in self.nodes:
            if any(i in own for i in node.ins):
                own.update(node.outs)
                continue
            inner = [eqn.primitive.name for body, _ in bodies(node.eqn)[0] for eqn in every_equation(body)]
            if {node.name, *inner} & set(DRAWS):
                self._refuse(
                    f"it draws random numbers ({place_of(node.eqn)}) from a key that is the same for all tiles; pass a "
                    "jax.random.key(...) as an argument of its own"
                )

    def tiles(self, asked: int | None, size: int) -> int:
        """How many: as asked, or by the bytes of all values along the dim on one device."""
        if asked is not None:
            if size % asked:
                near = [n for n in range(1, size + 1) if size % n == 0]
                best = min(near, key=lambda n: (abs(n - asked), n))
                raise ValueError(
                    f"{WHERE}(tiles={asked}): dim {self.dim} of the input of {self.name} has {size} positions, which "
                    f"{asked} does not divide. Pass tiles={best}, or pad the input."
                )
            return asked
        values = {i for node in self.nodes for i in node.outs if self._touches(i)}
        avals = [self.graph.avals[i] for i in values]
        total = sum(math.prod(x.shape) * x.dtype.itemsize for x in avals if hasattr(x.dtype, "itemsize"))
        parts = planned.value.batch_parts if planned.value is not None and self.dim > 0 else 1
        wanted = min(-(-total // (parts * TILE_BYTES)), size)
        found = next(n for n in range(max(wanted, 1), size + 1) if size % n == 0)
        if found > 4 * max(wanted, 1):
            raise ValueError(
                f"{WHERE}: {self.name} needs {wanted} tiles, and no number near that divides the {size} positions of "
                f"its input. Pad the input, or pass tiles=."
            )
        return found

    def equals(self, tile: Jaxpr) -> None:
        """Raises if the layer computes something else for a tile: it knows how many positions there are."""
        if not _alike(self.jaxpr, tile):
            self._refuse("for fewer positions it has other equations or other numbers: it reads how many there are")


def _read(graph: Graph) -> list[Node]:
    """The nodes that results are computed from: a sum that is only sown for a collection nobody asked for is not."""
    wanted, found = set(graph.outs), list[Node]()
    for node in reversed(graph.nodes):
        if not wanted.isdisjoint(node.outs) or node.eqn.effects:
            wanted.update(node.ins)
            found.append(node)
    return found[::-1]


def _alike(a: Any, b: Any) -> bool:
    """The same equations with the same numbers, for arguments of other sizes."""
    if len(a.eqns) != len(b.eqns):
        return False
    for x, y in zip(a.eqns, b.eqns, strict=True):
        if x.primitive.name != y.primitive.name or len(x.invars) != len(y.invars):
            return False
        folds = x.primitive.name == "random_fold_in"  # linen counts the keys that it makes, in each trace
        for v, w in zip(x.invars, y.invars, strict=True):
            if is_literal(v) and not folds and not (is_literal(w) and _equal(v.val, w.val)):
                return False
        held = CALLS.get(x.primitive.name, "")
        inner = [opened(e.params[held])[0] for e in (x, y)] if held in x.params else []
        pairs = [inner] if inner else zip(*([body for body, _ in bodies(e)[0]] for e in (x, y)), strict=True)
        if not all(_alike(*pair) for pair in pairs):
            return False
    return True


def _equal(a: Any, b: Any) -> bool:
    return np.shape(a) == np.shape(b) and bool(np.all((a == b) | ((a != a) & (b != b))))


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
