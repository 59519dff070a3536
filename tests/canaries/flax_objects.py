"""NNX and linen: what jzero does with models, optimizers and train states."""

from __future__ import annotations

import dataclasses
import re

from canaries import check, differences
from canaries.jaxpr import equation, matrix, names


def small_model():
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(4, 4, rngs=rngs)
            self.norm = nnx.BatchNorm(4, rngs=rngs)
            self.tied = self.first.kernel

        def __call__(self, x):
            return self.norm(self.first(x)) @ self.tied[...]

    return Model(nnx.Rngs(0))


@check("core/nnx_modules.py, gather/transform.py")
def nnx_trees():
    """nnx.to_tree, from_tree and update_context take modules through a function of arrays: what it changes is changed
    in the same objects, a shared Variable is one array, and its path in the tree is ..., 'states', index, name."""
    import jax
    from flax import nnx

    model, tag, paths = small_model(), "canary", []

    def pure(*trees):
        (inner, x) = nnx.from_tree(trees, ctxtag=tag, is_inner=True)
        out = inner(x)
        return nnx.to_tree(((inner, None), out), ctxtag=tag)

    before = model.norm.mean[...].copy()
    with nnx.update_context(tag):
        trees = nnx.to_tree((model, matrix(3, 4) * 2), ctxtag=tag)
        paths += [jax.tree_util.keystr(k) for k, _ in jax.tree_util.tree_leaves_with_path(trees)]
        out = nnx.from_tree(jax.jit(pure)(*trees), ctxtag=tag, is_inner=False)[1]
    keys = [re.findall(r"[\w]+", p) for p in paths]
    inside = [k[k.index("states") + 2 :] for k in keys if "states" in k]
    rows = [
        ("statistics changed in place", bool((model.norm.mean[...] != before).any()), True),
        ("result", out.shape, (3, 4)), ("arrays of the shared kernel", sum("kernel" in k for k in keys), 1),
        ("a path inside of the module", [k[:2] for k in inside if "kernel" in k], [["first", "kernel"]]),
        ("graph nodes", nnx.graphlib.is_graph_node(model), True),
    ]  # fmt: skip
    return differences(rows)


@check("core/nnx_modules.py")
def nnx_jit_arguments():
    """The arguments of a program of nnx.jit hold the graph of each object and its leaves as a list; from_tree with
    merge_fn makes the objects of them, in the order of the leaves."""
    import jax
    from flax import nnx

    from jzero.core.nnx_modules import variable_paths

    program = nnx.jit(lambda model, x: model(x)).lower(small_model(), matrix(3, 4)).compile().compiled
    shapes = [x.shape for x in jax.tree.leaves(program.args_info)]
    found = {jax.tree_util.keystr(path): shapes[i] for i, path in variable_paths(program.args_info).items()}
    rows = [("kernel", found.get("['first']['kernel'].value"), (4, 4)),
            ("statistics", found.get("['norm']['mean'].value"), (4,)), ("Variables", len(found), 6)]  # fmt: skip
    return differences(rows)


@check("flax/adapters.py")
def nnx_states():
    """nnx.state, as_pure, split, merge and update take a model and its optimizer apart and put them together; the
    optimizer has tx, wrt, opt_state and step, its moments are OptArray; step.set_value sets it."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx
    from flax.nnx.training.optimizer import OptArray

    model = small_model()
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    boxed, rest = nnx.state(model, optimizer.wrt, ...)
    params, opt_state = nnx.as_pure(boxed), nnx.as_pure(optimizer.opt_state)
    graph, leaves = nnx.split((model, optimizer))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), nnx.as_pure(leaves))
    other, _ = nnx.merge(graph, shapes)
    nnx.update(other, jax.tree.map(jnp.zeros_like, params))
    optimizer.opt_state = nnx.data(
        jax.tree.map(lambda v, x: v.replace(x), optimizer.opt_state, opt_state,
                     is_leaf=lambda v: isinstance(v, nnx.Variable))
    )  # fmt: skip
    optimizer.step.set_value(jnp.asarray(7))
    boxes = jax.tree.leaves(optimizer.opt_state, is_leaf=lambda v: isinstance(v, nnx.Variable))
    optimizer.update(model, jax.tree.map(jnp.ones_like, boxed))
    rows = [
        ("params are arrays", all(isinstance(x, jax.Array) for x in jax.tree.leaves(params)), True),
        ("params", len(jax.tree.leaves(params)), 4), ("the rest", len(jax.tree.leaves(nnx.as_pure(rest))), 2),
        ("moments", len(jax.tree.leaves(opt_state)), 9), ("update", float(jnp.sum(other.first.kernel[...])), 0.0),
        ("step", int(optimizer.step[...]), 8), ("boxes", all(isinstance(b, nnx.Variable) for b in boxes), True),
        ("an OptArray", OptArray(jnp.ones(2))[...].shape, (2,)),
    ]  # fmt: skip
    return differences(rows)


@check("layout/given_layouts.py")
def partition_metadata():
    """Layouts in Flax metadata: nn.Partitioned has get_partition_spec; an nnx Variable has get_metadata() with one of
    out_sharding, sharding and sharding_names, and optimizer_sharding, which get_partition_spec of a state keeps."""
    import jax
    from flax import linen as nn
    from flax import nnx

    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    boxed = nn.Partitioned(matrix(), names=("data", None))
    with jax.set_mesh(mesh):
        init = nnx.with_partitioning(nnx.initializers.ones, ("data", None), optimizer_sharding=(None, "data"))
        layer = nnx.Linear(8, 8, kernel_init=init, rngs=nnx.Rngs(0))
    kernel, spec = layer.kernel, nnx.get_partition_spec(nnx.state(layer))["kernel"]
    held = kernel.get_metadata()
    found = [held.get(k) for k in ("out_sharding", "sharding", "sharding_names") if held.get(k)]
    rows = [("linen", boxed.get_partition_spec(), jax.P("data", None)),
            ("nnx", [tuple(x) for x in found[:1]], [("data", None)]),
            ("a state of layouts", spec.get_value(), jax.P("data", None)),
            ("optimizer_sharding", spec.get_metadata().get("optimizer_sharding"), (None, "data"))]  # fmt: skip
    return differences(rows)


@check("flax/adapters.py")
def train_state_fields():
    """A TrainState is a dataclass with step, params, opt_state, tx, apply_fn and replace; fields outside of its tree
    say pytree_node=False."""
    from flax.training.train_state import TrainState

    fields = {f.name: f.metadata.get("pytree_node", True) for f in dataclasses.fields(TrainState)}
    wanted = {"step": True, "params": True, "opt_state": True, "tx": False, "apply_fn": False}
    return differences([("fields", fields, wanted), ("replace", hasattr(TrainState, "replace"), True)])


@check("activations/remat.py")
def linen_lifting():
    """flax.linen.transforms.lift_transform with flax.core.lift.checkpoint makes a class with the params of the plain
    one, whose region is a remat region."""
    import jax
    from flax import linen as nn
    from flax.core import lift
    from flax.linen.transforms import lift_transform

    lifted = lift_transform(
        lambda fn, **options: lift.checkpoint(fn, **options),
        nn.Dense,
        static_argnums=(),
        prevent_cse=False,
        policy=None,
    )
    params = [cls(4, name=None).init(jax.random.key(0), matrix()) for cls in (nn.Dense, lifted)]
    same = jax.tree.structure(params[0]) == jax.tree.structure(params[1])
    found = names(lambda x: lifted(4).apply(params[1], x), matrix())
    known = {"remat2", "remat", "checkpoint"} & set(found)
    return differences([("params", same, True), ("a remat region", bool(known) or found, True)])


@check("activations/remat.py")
def nnx_remat():
    """nnx.remat of a method is a remat region, takes policy and prevent_cse, and gradients come through it."""
    import jax
    from flax import nnx

    model = small_model()
    run = nnx.remat(lambda m, x: m(x), policy=jax.checkpoint_policies.nothing_saveable, prevent_cse=False)
    graph, state = nnx.split(model)
    eqn = equation(lambda state, x: run(nnx.merge(graph, state), x), state, matrix(3, 4),
                   named=["remat2", "remat", "checkpoint"])  # fmt: skip
    grads = nnx.value_and_grad(lambda m: run(m, matrix(3, 4)).sum())(model)[1]
    return differences(
        [("prevent_cse", eqn.params["prevent_cse"], False), ("gradients", len(jax.tree.leaves(grads)), 4)]
    )
