"""Optimizers that mix the dims of a matrix: matrices have owners, values are those of the run without jzero."""

from __future__ import annotations

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from models import max_error
from optax import contrib
from programs import program
from shampoo_soap import shampoo, soap

import jzero
from jzero.update.moment_dtype import with_moment_dtype

STEPS = 10
LARGEST = 64 * 64  # values of the largest matrix: all heads together, or one layer of the stack
SMALL = 64  # values of the longest vector, and what norms and counts are
SHAPES = {
    "a": (64, 32),
    "b": (64, 32),
    "wide": (32, 64),
    "heads": (64, 4, 16),
    "stack": (6, 32, 64),
    "odd": (33, 47),  # padded
    "bias": (40,),
    "odd_bias": (11,),
}
MATRICES = {k: s for k, s in SHAPES.items() if len(s) == 2}
Dims = contrib.MuonDimensionNumbers


def arrays(seed, shapes=SHAPES, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    return {k: jnp.asarray(rng.standard_normal(s), dtype) for k, s in shapes.items()}


def gradients(shapes=SHAPES, dtype=jnp.float32):
    return [arrays(i + 1, shapes, dtype) for i in range(STEPS)]


def dims(params):
    """What muon takes as a matrix: of `heads` one, of `stack` each layer."""
    found = {1: None, 2: Dims(), 3: Dims(1, 2)}

    def of(name, p):
        if isinstance(p, optax.MaskedNode):
            return p
        return Dims(0, (1, 2)) if name == "heads" else found[p.ndim]

    return {k: of(k, p) for k, p in params.items()}


def muon(rate=1e-2):
    return contrib.muon(rate, muon_weight_dimension_numbers=dims, weight_decay=0.1)


def only(*names):
    return lambda params: {k: k in names for k in params}


def labels(params):
    return {k: "muon" if k in ("a", "stack", "odd") else "adamw" for k in params}


TXS = {
    "muon": muon,
    "clipped before and after": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), muon(), optax.clip_by_global_norm(0.1)
    ),
    "masked": lambda: optax.chain(
        optax.masked(contrib.scale_by_muon(weight_dimension_numbers=dims), only("a", "stack", "odd")),
        optax.scale(-1e-2),
    ),
    "multi_transform": lambda: optax.multi_transform(
        {"muon": muon(), "adamw": optax.adamw(1e-2)}, labels
    ),
    "inject_hyperparams": lambda: optax.inject_hyperparams(muon)(rate=optax.linear_schedule(1e-2, 1e-3, 9)),
    "MultiSteps": lambda: optax.MultiSteps(muon(), 3).gradient_transformation(),
    "apply_if_finite": lambda: optax.apply_if_finite(muon(), 3),
}  # fmt: skip


def run(tx, params, grads, *, place=lambda x: x):
    """Params and state after the steps, and the compiled step."""
    state = jax.jit(tx.init)(params)

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    compiled = None
    for g in grads:
        g = place(g)
        compiled = compiled or step.lower(params, state, g).compile()
        params, state = compiled(params, state, g)
    return params, state, compiled


def steps_of(kind):
    """The gradients of a case: one step is not finite where that is what it is about."""
    grads = gradients()
    if kind == "apply_if_finite":
        grads[3] = {**grads[3], "stack": grads[3]["stack"].at[4, 3, 2].set(jnp.nan)}
    return grads


@functools.cache
def alone(kind):
    """Without jzero."""
    return run(TXS[kind](), arrays(0), steps_of(kind))[:2]


def sharded(tx, stage, n=8, params=None, grads=None, **fields):
    mesh = Mesh(np.array(jax.devices()[:n]), ("data",))
    params = arrays(0) if params is None else params
    plan = jzero.make_plan(params, stage=stage, mesh=mesh, min_shard_bytes=0, **fields)
    zero = jzero.zero(tx, plan)
    got, state, compiled = run(zero, plan.place(params), gradients() if grads is None else grads)
    assert [x.sharding.spec for x in jax.tree.leaves(got)] == [x.stored for x in plan.layouts]
    assert [x.sharding.spec for x in jax.tree.leaves(state)] == plan.state_specs(state)
    matrices = [x for x in jax.tree.leaves(state) if x.ndim > 1]
    assert matrices
    assert all(x.sharding.shard_shape(x.shape) != x.shape for x in matrices), "some state is whole"
    return got, jzero.unshard(state, tx=zero), compiled, plan


def sent(compiled) -> dict[str, list[int]]:
    """Of every kind of collective of the compiled step, the values of each result, the largest first."""
    found: dict[str, list[int]] = {}
    for line in compiled.as_text().splitlines():
        op = re.search(
            r"= (.*?) (all-to-all|all-gather|all-reduce|collective-permute|reduce-scatter)\(", line
        )
        if op:
            sizes = [math.prod(map(int, s.split(","))) for s in re.findall(r"\[([\d,]+)\]", op[1])]
            found[op[2]] = sorted([*found.get(op[2], []), *sizes], reverse=True)
    return found


def assert_matrices_have_owners(compiled, plan, piece=None):
    """There are all-to-alls. What is gathered are new params, and nothing else that is sent is a matrix.

    `piece`: the values that one device sends to an owner at most.
    """
    found = sent(compiled)
    assert max(found.pop("all-to-all")) <= (piece or math.inf)
    whole = [math.prod(x.state_shape) for x in plan.layouts if x.stored != x.state]
    assert sum(size for size in found.pop("all-gather", []) if size > SMALL) <= sum(whole)
    assert all(max(sizes, default=0) <= SMALL for sizes in found.values()), found


@pytest.mark.default_cases("muon-2")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", TXS)
def test_values_are_those_of_the_run_without_jzero(kind, stage):
    got, state, compiled, plan = sharded(TXS[kind](), stage, grads=steps_of(kind))
    params, plain = alone(kind)
    assert jax.tree.structure(state) == jax.tree.structure(plain)
    assert max_error(got, params) < 1e-4
    assert max_error(state, plain) < 1e-4
    assert max_error(got, arrays(0)) > 1e-3, "nothing was trained"
    assert_matrices_have_owners(compiled, plan, LARGEST // 8 + 1)


@pytest.mark.default_cases("muon")
@pytest.mark.parametrize("kind", ["muon", "multi_transform"])
def test_five_devices(kind):
    """No dim of any leaf but the bias is a multiple of five."""
    got, state, compiled, plan = sharded(TXS[kind](), 3, n=5)
    assert sum(x.padded for x in plan.layouts) == len(SHAPES) - 1
    assert max_error((got, state), alone(kind)) < 1e-4
    assert_matrices_have_owners(compiled, plan, 13 * 64 + 1)  # 64 rows are padded to 65


TENSOR = {k: P(*[None] * (len(s) - 1), "model") if k in ("a", "wide", "stack") else P() for k, s in SHAPES.items()}
MESHES = {
    "tensor parallelism": ({"data": 4, "model": 2}, {"axis": "data", "param_specs": TENSOR}),
    "hybrid": ({"replica": 2, "data": 4}, {"axis": "data", "batch_axis": ("replica", "data")}),
    "two axes": ({"outer": 2, "inner": 4}, {"axis": ("outer", "inner")}),
    "offload": ({"data": 8}, {"offload": "host"}),
}


@pytest.mark.default_cases("offload")
@pytest.mark.parametrize("kind", MESHES)
def test_beside_other_axes_and_on_the_host(kind):
    """Owners are devices of all axes that split a matrix: what only some of them compute has no collective in it."""
    axes, fields = MESHES[kind]
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(*axes.values()), tuple(axes))
    plan = jzero.make_plan(arrays(0), stage=2, mesh=mesh, min_shard_bytes=0, **fields)
    zero = jzero.zero(muon(), plan)
    got, state, compiled = run(zero, plan.place(arrays(0)), gradients())
    assert max_error((got, jzero.unshard(state, tx=zero)), alone("muon")) < 1e-4
    assert max(sent(compiled)["all-to-all"]) <= LARGEST // 4 + 1
    if kind == "offload":
        large = [x for x in jax.tree.leaves(state) if x.size > 16]
        assert {x.sharding.memory_kind for x in large} == {"pinned_host"}


def test_an_explicit_mesh():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        plan = jzero.make_plan(arrays(0), stage=3, mesh=mesh, min_shard_bytes=0)
        whole = jax.sharding.NamedSharding(mesh, P())
        place = functools.partial(jax.tree.map, lambda x: jax.device_put(x, whole))
        got, _, compiled = run(jzero.zero(muon(), plan), plan.place(arrays(0)), gradients(), place=place)
    assert max_error(jax.device_get(got), jax.device_get(alone("muon")[0])) < 1e-4
    assert max(sent(compiled)["all-to-all"]) <= LARGEST // 8 + 1


def test_a_matrix_that_no_device_has_room_for(monkeypatch):
    plan = jzero.make_plan(arrays(0), stage=2, mesh=Mesh(np.array(jax.devices()[:8]), ("data",)), min_shard_bytes=0)
    zero = jzero.zero(muon(), plan)
    state = jax.eval_shape(zero.init, arrays(0))
    monkeypatch.setattr("jzero.update.owners.device_memory", lambda device: 10_000)

    def step(params, state):
        updates, state = zero.update(params, state, params)
        return optax.apply_updates(params, updates), state

    with pytest.warns(UserWarning, match=r"takes 32.77 kB on the device that owns it.*multi_transform"):
        jax.eval_shape(step, arrays(0), state)


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_moments_in_16_bits(stage):
    fields = {"moment_dtype": "bfloat16"}
    got, state, compiled, plan = sharded(muon(), stage, **fields)
    like = run(with_moment_dtype(muon(), plan, arrays(0)), arrays(0), gradients())
    assert any(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(state))
    assert max_error(got, like[0]) < 1e-4
    assert max_error(state, like[1]) < 2.0**-7  # a step of bf16
    assert_matrices_have_owners(compiled, plan)


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_params_in_16_bits_with_masters(stage):
    half = {"params": arrays(0, dtype=jnp.bfloat16), "grads": gradients(dtype=jnp.bfloat16)}
    got, state, compiled, plan = sharded(muon(), stage, **half)
    wide = [jax.tree.map(lambda x: x.astype(jnp.float32), x) for x in (half["params"], *half["grads"])]
    params, plain, _ = run(muon(), wide[0], wide[1:])
    assert max_error(state.master, params) < 1e-4
    assert max_error(state.inner, plain) < 1e-4
    for p, m in zip(jax.tree.leaves(got), jax.tree.leaves(state.master), strict=True):
        assert p.dtype == jnp.bfloat16
        assert (np.asarray(p) == np.asarray(m.astype(p.dtype))).all()
    assert_matrices_have_owners(compiled, plan)


def test_a_sort_a_sum_and_the_matrix_of_another_leaf():
    """Each along the dim that devices share; the product of two leaves has one owner."""

    def mixed(grads, params):
        del params
        return {
            "a": grads["a"] @ (grads["b"].T @ grads["b"]) / 64,
            "b": grads["b"],
            "c": jnp.sort(grads["c"], axis=0),
            "d": jnp.cumsum(grads["d"], axis=0),
        }

    shapes = dict.fromkeys("abcd", (64, 32))
    tx = optax.chain(optax.trace(0.9), optax.stateless(mixed), optax.scale(-1e-2))
    given = {"params": arrays(0, shapes), "grads": gradients(shapes)}
    got, state, compiled, plan = sharded(tx, 3, **given)
    params, plain, _ = run(tx, given["params"], given["grads"])
    assert max_error((got, state), (params, plain)) < 1e-4
    assert_matrices_have_owners(compiled, plan)


def norms_kept():
    """A matrix over a norm of its square, which is a number of the state: made between two matmuls."""

    def update(grads, state, params):
        squares = {k: g.T @ g for k, g in grads.items()}
        norms = {k: 0.5 * state[k] + jnp.sqrt(jnp.trace(s)) for k, s in squares.items()}
        return {k: g @ (squares[k] / norms[k]) for k, g in grads.items()}, norms

    return optax.GradientTransformation(lambda params: {k: jnp.zeros(()) for k in params}, update)


def stacked():
    """Two matrices one above the other, orthogonalized together: the upper one (PRISM)."""

    def one(g, p):
        both = jnp.concatenate([g, g - p])
        if len(g) > g.shape[1]:
            both = both.T
        both = jax.lax.fori_loop(0, 5, lambda _, x: 1.5 * x - 0.5 * (x @ x.T) @ x, both / jnp.linalg.norm(both))
        both = both.T if len(g) > g.shape[1] else both
        upper = both[: len(g)]
        return upper / (1 + jnp.linalg.norm(upper))

    return optax.stateless(lambda grads, params: {k: one(g, params[k]) for k, g in grads.items()})


def medians():
    """A sort of all values, and what jnp.where broadcasts; in the body of a loop, and behind a condition."""

    def one(g):
        size, rows = jnp.abs(g), jnp.percentile(jnp.abs(g), 75.0, axis=-1, keepdims=True)
        looped = jax.lax.fori_loop(0, 2, lambda _, x: x + jnp.median(size), 0.0)
        chosen = jax.lax.cond(jnp.sum(g) > 0, lambda: jnp.median(size), lambda: jnp.quantile(size, 0.3))
        return jnp.where(size > jnp.quantile(size, 0.5), g / rows, g / (chosen + looped))

    return optax.stateless(lambda grads, params: {k: one(g) for k, g in grads.items()})


@pytest.mark.parametrize("kind", [norms_kept, stacked, medians])
def test_numbers_and_parts_of_matrices(kind):
    tx = optax.chain(optax.trace(0.9), kind(), optax.scale(-1e-2))
    shapes = {"wide": (32, 64), "tall": (64, 16)}
    given = {"params": arrays(0, shapes), "grads": gradients(shapes)}
    got, state, compiled, plan = sharded(tx, 3, **given)
    params, plain, _ = run(tx, given["params"], given["grads"])
    assert max_error((got, state), (params, plain)) < 1e-4
    assert_matrices_have_owners(compiled, plan, LARGEST // 8 + 1)


SECOND_ORDER = {"shampoo": shampoo, "soap": soap}


@pytest.mark.default_cases("soap-3")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", SECOND_ORDER)
def test_shampoo_and_soap(kind, stage):
    """Their preconditioners are square and split as well; roots and bases are computed anew at every third step."""
    tx = SECOND_ORDER[kind](1e-2, every=3)
    shapes = {**MATRICES, "bias": SHAPES["bias"]}
    given = {"params": arrays(0, shapes), "grads": gradients(shapes)}
    got, state, compiled, plan = sharded(tx, stage, **given)
    params, plain, _ = run(tx, given["params"], given["grads"])
    assert max_error(got, params) < 1e-4
    assert max_error(state, plain) < 1e-4
    assert_matrices_have_owners(compiled, plan, LARGEST // 2)


def kernels(params):
    """Of Flax's layers, one or a stack of them."""
    return jax.tree.map_with_path(
        lambda path, p: Dims(p.ndim - 2, p.ndim - 1) if path[-1].key == "kernel" else None, params
    )


MUON = contrib.muon(1e-3, muon_weight_dimension_numbers=kernels)


@pytest.mark.pod
@pytest.mark.default_cases("2")
@pytest.mark.parametrize("stage", [2, 3])
def test_what_a_gpt_sends(stage):
    """Half a Psi for bf16 params with fp32 masters: an eighth of all matrices, twice as wide, there and back."""
    size = (("scan", True), ("layers", 8), ("dim", 128), ("heads", 4), ("tx", MUON))
    compiled = program(stage=stage, size=size)
    assert stage + 0.3 < compiled.report.wire.psi < stage + 0.6
    # new params are gathered in bf16; jaxlib 0.12 names that gather after the update
    update = [c for c in compiled.report.collectives if c.phase == "update" and c.dtype != "bf16"]
    assert {c.op for c in update if c.bytes > 4096} == {"all-to-all"}
    assert sum(c.op == "all-to-all" for c in update) >= 4
    assert not [
        c
        for c in compiled.report.collectives
        if c.op in ("all-reduce", "collective-permute") and c.bytes > 16384
    ]


def test_random_keys_in_a_condition_on_one_matrix():
    """`add_noise` keeps a key: the branch has a region, and the key is none of its results."""
    noisy = optax.apply_if_finite(optax.chain(muon(), optax.add_noise(1e-3, 0.5, 3)), 3)
    params, grads = {"a": arrays(0)["a"]}, [{"a": g["a"]} for g in gradients()[:3]]
    got, _, compiled, plan = sharded(noisy, 2, params=params, grads=grads)
    want, _, _ = run(noisy, params, grads)
    assert max_error(got, want) < 2e-5
    assert_matrices_have_owners(compiled, plan)
