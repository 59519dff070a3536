"""Explicit meshes: jzero's part of a program runs on Auto axes, and its results get the types of the context.

[Note: Explicit axes]
Under `jax.set_mesh` of a mesh with Explicit axes, which `jax.make_mesh` makes by default, a layout is part of the type
of an array. jzero's layouts are constraints, for which axes must be Auto, so a plan keeps an Auto mesh over the same
devices. Arrays cross over in two ways:

    in a trace       `in_auto_mode`: a region of `jax.sharding.auto_axes`; what comes out gets its type from a spec
    outside of one   `on_auto_mesh` and `on_context_mesh`: the same buffers under another type, nothing is copied

Inside of a region all Explicit axes of the context are Auto, also those of tensor parallelism: models that lay out
their params by metadata need that. A model that names such axes in its own types (`jax.sharding.reshard`,
`out_sharding=`) is traced again with only the ZeRO and batch axes Auto.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath

from jzero.core.closures import lift
from jzero.core.jaxprs import is_tracer
from jzero.core.random_keys import by_data, is_key
from jzero.core.types import PyTree
from jzero.layout.leaf_rule import path_keys
from jzero.layout.specs import P, axis_size, entry_axes, is_sub_axis, make_spec, spec_entries

# what JAX says of arrays of another context, and of types that name an axis of a region
_FOREIGN = ("should match the aval mesh", "Mesh for all inputs should be equal")
_NAMED = "cannot contain axis names that are of type Auto"


def explicit_axes() -> tuple[str, ...]:
    """The Explicit axes of the context's mesh; none without `jax.set_mesh`, and none inside of a region."""
    context = jax.sharding.get_abstract_mesh()
    types = zip(context.axis_names, context.axis_types, strict=True)
    return tuple(name for name, kind in types if kind == AxisType.Explicit)


def context_mesh() -> Mesh | None:
    """The mesh of `jax.set_mesh`; None without one, and inside of a trace, where JAX only tells its shape."""
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:
        return None
    return None if mesh.empty else mesh


def typed_mesh(mesh: Mesh) -> Mesh:
    """The mesh on which arrays lie in this context: its axes get the types of the context's, if that has Explicit ones.

    Raises:
      ValueError: the context's mesh has other axes.
      NotImplementedError: a mesh with sub-axes.
    """
    if not explicit_axes():
        return mesh
    if any(map(is_sub_axis, mesh.axis_names)):
        raise refusal("cutting a leaf along several dims")
    context = jax.sharding.get_abstract_mesh()
    if dict(context.shape) != dict(mesh.shape):
        raise ValueError(
            f"jzero: the context mesh (jax.set_mesh) has the Explicit axes {dict(context.shape)}, the plan's arrays "
            f"lie on {dict(mesh.shape)}. Under an Explicit mesh both must be one: pass it as mesh=, or make it with "
            "Auto axes, jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))."
        )
    types = dict(zip(context.axis_names, context.axis_types, strict=True))
    return _with_types(mesh, tuple(types[name] for name in mesh.axis_names))


def refusal(what: str) -> NotImplementedError:
    """What jzero cannot do here, and the remedy."""
    return NotImplementedError(
        f"jzero: {what} does not work under an Explicit mesh (jax.set_mesh). Make the mesh with Auto axes: "
        "jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))."
    )


@functools.lru_cache(maxsize=256)
def _with_types(mesh: Mesh, types: tuple[AxisType, ...]) -> Mesh:
    return Mesh(mesh.devices, mesh.axis_names, axis_types=types)


def auto_mesh(mesh: Mesh) -> Mesh:
    """The same mesh with Auto axes."""
    return _with_types(mesh, (AxisType.Auto,) * len(mesh.axis_names))


@contextlib.contextmanager
def auto_context() -> Iterator[None]:
    """Outside of a trace: makes the axes of the context's mesh Auto.

    Raises:
      ValueError: code in it uses arrays of the context; see `in_auto_mode`.
    """
    axes, mesh = explicit_axes(), context_mesh()
    if not axes or mesh is None:
        yield
        return
    with _explaining(axes), jax.set_mesh(auto_mesh(mesh)):
        yield


def on_auto_mesh(tree: PyTree) -> PyTree:
    """A tree with its arrays, also abstract ones, in the types of `auto_context`: the same buffers."""
    return jax.tree.map(lambda x: _retyped(x, auto_mesh), tree) if explicit_axes() else tree


def with_arrays_on_auto_mesh(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function for `auto_context`: the arrays that it closes over are in its types."""
    if not explicit_axes():
        return fn
    arrays, made = lift(fn, _has_mesh)
    return made(on_auto_mesh(arrays))


def _has_mesh(x: jax.Array) -> bool:
    """True for an array whose type names a mesh: others fit into every context."""
    return not jax.typeof(x).sharding.mesh.empty


def on_context_mesh(tree: PyTree) -> PyTree:
    """A tree with its arrays, also abstract ones, in the types of the context; those on another mesh are left alone."""
    shape = dict(jax.sharding.get_abstract_mesh().shape)

    def typed(mesh: Mesh) -> Mesh:
        return typed_mesh(mesh) if dict(mesh.shape) == shape else mesh

    return jax.tree.map(lambda x: _retyped(x, typed), tree) if explicit_axes() else tree


def _retyped(x: Any, change: Callable[[Mesh], Mesh]) -> Any:
    sharding = getattr(x, "sharding", None)
    if is_tracer(x) or not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return x
    mesh = change(sharding.mesh)
    if mesh == sharding.mesh:
        return x
    # as a step returns it, every dim named: else the second step is compiled again
    spec = P(*sharding.spec, *[None] * (np.ndim(x) - len(sharding.spec)))
    new = NamedSharding(mesh, spec, memory_kind=sharding.memory_kind)
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=new, weak_type=x.weak_type)
    if is_key(x):
        return by_data(lambda data: _retyped(data, change), x)
    return jax.make_array_from_single_device_arrays(x.shape, new, [s.data for s in x.addressable_shards])


def constrained(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """An array in this layout: by a constraint over Auto axes, by a change of its type if all axes are Explicit."""
    explicit, names = explicit_axes(), sharding.mesh.axis_names
    if explicit and set(explicit) == set(names):
        return jax.sharding.reshard(x, sharding)
    spec = make_spec([tuple(a for a in entry_axes(e) if a not in explicit) for e in sharding.spec])
    return jax.lax.with_sharding_constraint(x, NamedSharding(sharding.mesh, spec) if explicit else sharding)


def in_auto_mode(
    fn: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    out_specs: Callable[[Any], Sequence[PartitionSpec]],
    own: Sequence[str] = (),
    user: Callable[..., Any] | None = None,
) -> Any:
    """`fn(*args)`, in a region in which the Explicit axes of the context are Auto.

    Args:
      fn: a function of trees. Arrays that it closes over belong to another context and are refused.
      args: trees of arrays and other leaves.
      out_specs: maps the result to the layout of each of its arrays outside of the region. Axes that do not divide a
        dim are left out.
      own: axes that must be Auto. A function that names others in its own types is traced again with only these Auto;
        without any it is refused.
      user: a function that `fn` takes before `args`. Arrays that it closes over become arguments (`core/closures.py`).

    Raises:
      ValueError: `fn` closes over arrays, or names axes in its own types that are Auto.
    """
    axes = explicit_axes()
    if not axes:
        return fn(*args) if user is None else fn(user, *args)
    if user is not None:
        arrays, made = lift(user, _has_mesh)
        return in_auto_mode(lambda arrays, *args: fn(made(arrays), *args), (arrays, *args), out_specs, own)
    least = tuple(a for a in axes if a in own)
    with _explaining(axes):
        try:
            return _region(fn, args, out_specs, axes)
        except Exception as error:  # the type of such an error differs by version
            if _NAMED not in str(error) or least in ((), axes):
                raise
    with _explaining(least):
        return _region(fn, args, out_specs, least)


@contextlib.contextmanager
def _explaining(axes: tuple[str, ...]) -> Iterator[None]:
    """Rewords JAX's errors about these axes."""
    try:
        yield
    except Exception as error:  # the type of such an error differs by version
        if explained := _explained(error, axes):
            raise explained from error
        raise


def _region(
    fn: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    out_specs: Callable[[Any], Sequence[PartitionSpec]],
    axes: tuple[str, ...],
) -> PyTree:
    """`fn(*args)` with these axes Auto."""
    mesh = jax.sharding.get_abstract_mesh()
    leaves, tree = jax.tree.flatten(args)
    moves = [isinstance(x, jax.Array) for x in leaves]
    specs: list[PartitionSpec] = []
    rest: list[Any] = []  # the structure of the result, and its leaves that are not arrays

    def region(*arrays):
        inside = iter(arrays)
        out = fn(*tree.unflatten([next(inside) if m else x for x, m in zip(leaves, moves, strict=True)]))
        outs, outs_tree = jax.tree.flatten(out)
        rest[:] = [outs_tree, [None if isinstance(x, jax.Array) else x for x in outs]]
        rows = [(x, s) for x, s in zip(outs, out_specs(out), strict=True) if isinstance(x, jax.Array)]
        specs[:] = [_even(_with_own(s, x), np.shape(x), mesh) for x, s in rows]
        return [x for x, _ in rows]

    typed: Any = jax.sharding.auto_axes(region, axes=axes, out_sharding=specs)  # which the region fills in
    found = iter(typed(*[x for x, m in zip(leaves, moves, strict=True) if m]))
    return rest[0].unflatten([next(found) if x is None else x for x in rest[1]])


def _with_own(spec: PartitionSpec, x: jax.Array) -> PartitionSpec:
    """A spec with the axes that are in the type of the array already, on the dims where the type has them."""
    own = [entry_axes(e) for e in jax.typeof(x).sharding.spec]
    named = {a for e in own for a in e}
    rows = zip(spec_entries(spec, len(own)), own, strict=True)
    return make_spec([(*(a for a in e if a not in named or a in o), *(a for a in o if a not in e)) for e, o in rows])


def _explained(error: Exception, axes: tuple[str, ...]) -> ValueError | None:
    """What JAX's error means, if it is about a function that does not fit into a region."""
    if any(text in str(error) for text in _FOREIGN):
        return ValueError(
            f"jzero: under an Explicit mesh {list(axes)} this function uses arrays that are not among its arguments "
            "(attributes of an object, say). Pass them as arguments: "
            "loss_fn(params, batch), functools.partial(create, key)."
        )
    if _NAMED in str(error):
        return ValueError(
            f"jzero: the model names Explicit axes of {list(axes)} in its own types (jax.sharding.reshard, "
            "out_sharding=), but they are Auto where jzero lays out the weights. Use constraints "
            "(jax.lax.with_sharding_constraint) or the layout of the params, or make the mesh with Auto axes."
        )
    return None


def _even(spec: PartitionSpec, shape: Sequence[int], mesh: Any) -> PartitionSpec:
    """A spec without the axes that do not divide their dim: a type needs equal pieces."""
    rows = zip(shape, map(entry_axes, spec), strict=False)
    return make_spec([axes if size % axis_size(mesh, axes) == 0 else () for size, axes in rows])


def result_specs(args: PyTree, out: PyTree, plan: Any) -> list[PartitionSpec]:
    """The layout of every result of a function of params and a batch, from the types of its arguments.

    A variable that it returns (batch statistics, the state of a module) keeps its type; it is known by path and shape.
    A result that has the rows of the batch is split as the batch is, also if more dims are merged into them. The rest
    is whole.

    Args:
      args: its arguments, from outside of the region.
      out: its result.
      plan: gives the batch axes.
    """
    leaves = zip(jax.tree_util.tree_leaves_with_path(args), plan.copies(args), strict=True)
    flat = [(_name(k), x, param) for (k, x), param in leaves if isinstance(x, jax.Array)]
    types = {(name, x.shape): jax.typeof(x).sharding.spec for name, x, _ in flat if name}
    rows = dict(row for _, x, param in flat if param is None for row in _batch_dim(x, plan))

    def spec(path: KeyPath, x: Any) -> PartitionSpec:
        shape = np.shape(x)
        if (_name(path), shape) in types:
            return types[_name(path), shape]
        for (dim, size), entry in rows.items():
            n = shape[dim] if len(shape) > dim else 0
            if n and n % size == 0 and (dim == 0 or n == size):
                return make_spec([()] * dim + [entry])
        return P()

    return [spec(k, x) for k, x in jax.tree_util.tree_leaves_with_path(out)]


def _batch_dim(x: jax.Array, plan: Any) -> list[tuple[tuple[int, int], tuple[str, ...]]]:
    """The number and the size of the first dim that is split over batch axes, and these axes."""
    entries = enumerate(map(entry_axes, jax.typeof(x).sharding.spec))
    return [((dim, x.shape[dim]), e) for dim, e in entries if e and set(e) <= set(plan.batch_axes)][:1]


def _name(path: KeyPath) -> tuple[str, ...]:
    """A path from its first name on, without the positions in tuples before it."""
    keys = path_keys(path)
    return keys[next((i for i, k in enumerate(keys) if not k.isdigit()), len(keys)) :]
