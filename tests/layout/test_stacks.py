"""Which dim of which params is a stack of layers: as told, as the creation function shows, else a named guess."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jzero
from jzero.layout.layer_stacks import scanned_paths

P, LAYERS, DIM = jax.P, 8, 16
EXPERTS = {"experts": {"up": (8, 4096, 14336), "down": (8, 14336, 4096)}, "router": (4096, 8)}


def shapes(tree):
    return jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, jnp.float32), tree, is_leaf=lambda s: type(s) is tuple
    )


def dims(plan):
    return {"/".join(x.keys): x.scan_dim for x in plan.layouts}


def guesses(plan):
    return {"/".join(x.keys) for x in plan.layouts if x.guessed}


def plan_of(tree, mesh, **fields):
    return jzero.make_plan(shapes(tree), stage=3, mesh=mesh, min_shard_bytes=0, **fields)


def test_the_guess_from_shapes():
    def find(tree):
        return {"/".join(k) for k in scanned_paths([(tuple(k.split("/")), s) for k, s in tree.items()])}

    stack = {"layers/dense/kernel": (8, 64, 32), "layers/dense/bias": (8, 32), "layers/norm/scale": (8, 64)}
    other = {"embed/table": (512, 64), "head/kernel": (64, 512)}
    assert find(stack | other) == set(stack)
    assert not find({"attn/q/kernel": (64, 64), "attn/k/kernel": (64, 64), "attn/o/kernel": (64, 64)})
    assert not find({"conv/kernel": (3, 3, 64, 64), "conv/bias": (64,)})
    assert not find({"dense/kernel": (64, 32), "dense/bias": (32,)})


def test_experts_pass_for_a_stack_and_the_plan_says_so(mesh):
    plan = plan_of(EXPERTS, mesh)
    assert guesses(plan) == {"experts/up", "experts/down"}
    note = plan.describe().splitlines()[-1]
    assert note.startswith(
        "note: dim 0 of 2 params is taken for a stack of layers and not split, a guess from shapes: "
    )
    assert "experts/down f32[8,14336,4096], experts/up f32[8,4096,14336]" in note
    assert 'scan_axes={"experts": 0}, or scan_axes={}' in note


@pytest.mark.parametrize("scan_axes", [{}, {"experts": None}, {"experts/*": None, "router": None}])
def test_scan_axes_overrides_the_guess(scan_axes, mesh):
    plan = plan_of(EXPERTS, mesh, scan_axes=scan_axes)
    assert set(dims(plan).values()) == {None}
    assert all(x.stored == P("data") for x in plan.layouts)
    assert "guess" not in plan.describe()


@pytest.mark.parametrize(
    ("scan_axes", "want"),
    [
        ({"experts": 0}, {"experts/up": 0, "experts/down": 0}),
        ({"experts/up": 1}, {"experts/up": 1}),
        ({"*/down": None, "experts": 2}, {"experts/up": 2}),
        ({"/experts/": 0, "*": None}, {"experts/up": 0, "experts/down": 0}),
        ({"*": 1}, {"experts/up": 1, "experts/down": 1, "router": 1}),
    ],
)
def test_the_first_pattern_that_matches_decides(scan_axes, want, mesh):
    plan = plan_of(EXPERTS, mesh, scan_axes=scan_axes)
    assert {k: d for k, d in dims(plan).items() if d is not None} == want
    for x in plan.layouts:
        assert x.scan_dim is None or x.scan_dim >= len(x.stored) or x.stored[x.scan_dim] is None
        assert x.layers * len(x.layer_shape) == (
            x.shape[x.scan_dim] * (len(x.shape) - 1) if x.scanned else len(x.shape)
        )


@pytest.mark.parametrize(
    ("error", "scan_axes", "message"),
    [
        (TypeError, ["experts"], "must map paths of params to the dim"),
        (TypeError, {0: "experts"}, "must map paths"),
        (TypeError, {"experts": True}, "must be an integer of at least 0, not bool"),
        (TypeError, {"experts": "0"}, "must be an integer of at least 0, not str"),
        (ValueError, {"experts": -1}, "must be an integer of at least 0"),
        (
            ValueError,
            {"experts": 3},
            r"experts/down has 3 dims, and no dim 3.*'experts/down': None",
        ),
        (
            ValueError,
            {"experts": 0, "expert/up": 0},
            "names 'expert/up', but no param .* Did you mean 'experts/up'",
        ),
    ],
)
def test_scan_axes_that_do_not_fit(error, scan_axes, message, mesh):
    with pytest.raises(error, match=f"(?s)jzero.make_plan.*scan_axes.*{message}"):
        plan_of(EXPERTS, mesh, scan_axes=scan_axes)


def test_a_guess_that_decides_nothing_is_not_named(mesh):
    for plan in (
        jzero.make_plan(shapes(EXPERTS), stage=0, mesh=mesh),
        jzero.make_plan(shapes(EXPERTS), stage=3, mesh=jax.make_mesh((1,), ("data",))),
    ):
        assert "guess" not in plan.describe()


# --- from the jaxpr of the creation function -----------------------------------------------------------------------


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return x + nn.Dense(DIM)(nn.Dense(2 * DIM)(x)), None


class Model(nn.Module):
    """Scanned layers beside two experts of the same leading size."""

    axis: int = 0

    @nn.compact
    def __call__(self, x):
        kw = {"variable_axes": {"params": self.axis}, "split_rngs": {"params": True}, "length": LAYERS}
        x = nn.scan(Block, **kw)(name="layers")(x, None)[0]
        normal = nn.initializers.normal()
        up, down = (self.param(n, normal, (LAYERS, DIM, DIM)) for n in ("up", "down"))
        return jnp.einsum("bd,edf,efg->bg", x, up, down)


TX = optax.adam(1e-3)
MODELS = {axis: Model(axis) for axis in (0, 1)}
EXPERTS_IN_BODY = {"body/up", "body/down"}
CALLS = []


def creator(axis, dtype=jnp.float32):
    def create():
        CALLS.append(axis)
        params = MODELS[axis].init(jax.random.key(0), jnp.ones((2, DIM)))["params"]
        params = {"body": jax.tree.map(lambda x: x.astype(dtype), params)}
        apply_fn = lambda v, x: MODELS[axis].apply({"params": v["params"]["body"]}, x)  # noqa: E731
        return TrainState.create(apply_fn=apply_fn, params=params, tx=TX)

    return create


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("axis", [0, 1])
def test_what_a_scan_has_stacked_is_known(axis, dtype, mesh):
    CALLS.clear()
    plan = jzero.plan_of(jzero.abstract(creator(axis, dtype), stage=3, mesh=mesh, min_shard_bytes=0))
    assert len(CALLS) == 1  # one trace for the shapes and the jaxpr
    known = {k for k, d in dims(plan).items() if d == axis}
    layers = {k for k in dims(plan) if k.startswith("body/layers/")}
    assert known - EXPERTS_IN_BODY == layers
    assert guesses(plan) == EXPERTS_IN_BODY  # by their shape alone


def test_told_wins_over_known_and_known_over_the_guess(mesh):
    fields = {"stage": 3, "mesh": mesh, "min_shard_bytes": 0}
    assert set(dims(jzero.plan_of(jzero.abstract(creator(1), scan_axes={}, **fields))).values()) == {None}
    # all leaves below `body` share their leading size
    existing = jzero.plan_of(jzero.abstract(jax.eval_shape(creator(0)), **fields))
    assert guesses(existing) == set(dims(existing))
    assert dims(existing)["body/up"] == 0


def test_a_state_is_laid_out_again_with_the_stacks_of_its_first_plan(mesh):
    state = jzero.shard(creator(1), stage=2, mesh=mesh, min_shard_bytes=0)
    again = jzero.shard(state, stage=3, min_shard_bytes=0)
    assert dims(jzero.plan_of(again)) == dims(jzero.plan_of(state))
    assert guesses(jzero.plan_of(again)) == EXPERTS_IN_BODY
    told = jzero.shard(again, stage=3, min_shard_bytes=0, scan_axes={"body": 0})
    assert set(dims(jzero.plan_of(told)).values()) == {0}
    known = {"body/layers": 1, "body": 0}
    born = jzero.shard(creator(1), stage=3, mesh=mesh, min_shard_bytes=0, scan_axes=known)
    assert jzero.plan_of(born) == jzero.plan_of(again)


def test_a_guess_does_not_make_plans_unequal(mesh):
    tree = {"layers": {"up": (8, 64, 32), "down": (8, 32, 64)}}
    assert plan_of(tree, mesh) == plan_of(tree, mesh, scan_axes={"layers": 0})
    assert plan_of(tree, mesh) != plan_of(tree, mesh, scan_axes={})


def test_nnx_layers_stacked_by_vmap_are_a_guess_and_by_scan_are_known(mesh):
    class Layers(nnx.Module):
        def __init__(self, rngs):
            self.up, self.down = nnx.Linear(DIM, 2 * DIM, rngs=rngs), nnx.Linear(2 * DIM, DIM, rngs=rngs)

    def pair(stacked):
        model = nnx.Dict(blocks=stacked(nnx.Rngs(0)))
        return model, nnx.Optimizer(model, TX, wrt=nnx.Param)

    @nnx.split_rngs(splits=LAYERS)
    @nnx.vmap
    def by_vmap(rngs):
        return Layers(rngs)

    @nnx.split_rngs(splits=LAYERS)
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def scanned(carry, rngs):
        return carry, Layers(rngs)

    for stacked, known in ((by_vmap, False), (lambda rngs: scanned(0, rngs)[1], True)):
        plan = jzero.plan_of(jzero.abstract(lambda s=stacked: pair(s), stage=3, mesh=mesh, min_shard_bytes=0))
        assert set(dims(plan).values()) == {0}
        assert bool(guesses(plan)) != known


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("axis", [0, 1])
def test_a_step_with_layers_along_any_dim(axis, mesh):
    """The values are those without jzero, along whichever dim the layers are stacked."""
    state = jzero.shard(creator(axis), stage=3, mesh=mesh, min_shard_bytes=0)
    plan = jzero.plan_of(state)

    def step(state, x):
        def loss(params):
            return jnp.mean(state.apply_fn({"params": params}, x) ** 2)

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    x = jax.random.normal(jax.random.key(1), (16, DIM))
    plain_state, plain = jax.jit(step)(creator(axis)(), x)
    new, value = jax.jit(step)(state, plan.place_batch(x))
    assert float(value) == pytest.approx(float(plain), rel=1e-5)
    for a, b in zip(jax.tree.leaves(new.params), jax.tree.leaves(plain_state.params), strict=True):
        assert jnp.max(jnp.abs(a - jax.device_put(b, a.sharding))) < 1e-5
