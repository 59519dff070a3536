"""Gather on use of a function of an NNX module: values, what it changes in the module, and the compiled program."""

from __future__ import annotations

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models import assert_batch_is_split, max_error, specs
from nnx_losses import create, data, loss_of, sharded, values

import jzero
from jzero.proof.check import findings

P = jax.P
KINDS = ["list", "scan", "list remat", "scan remat", "list tied", "list cond"]


def compare(plain_fn, fn, kind, mesh, plan, model, calls=2):
    """Both functions of (model, x), twice: results, and all that they leave in the module."""
    plain, before = create(kind)[0], values(model)
    for seed in range(calls):
        batch = plan.place_batch(data(seed))
        assert_batch_is_split(batch)
        want, got = plain_fn(plain, data(seed)), fn(model, batch)
        assert max_error(values(got), values(want)) < 2e-6
        assert max_error(values(model), values(plain)) < 1e-6
    after = values(model)
    assert specs(values(nnx.state(model, nnx.Param))) == [x.stored for x in plan.layouts]
    assert any(s != P() for s in specs(after))
    assert jax.tree.structure(after) == jax.tree.structure(before)
    assert max_error(after, before) > 0, "neither statistics nor key counts have changed"


@pytest.mark.default_cases("list", "scan")
@pytest.mark.parametrize("kind", KINDS)
def test_loss_gradients_statistics_and_keys(kind, mesh):
    model, _, plan = sharded(kind, mesh)
    fn = nnx.jit(nnx.value_and_grad(jzero.gather_on_use(loss_of, plan)))
    compare(nnx.jit(nnx.value_and_grad(loss_of)), fn, kind, mesh, plan, model)


@pytest.mark.default_cases("scan remat")
@pytest.mark.parametrize("kind", KINDS)
def test_kept_weights_leave_the_module_as_they_were(kind, mesh):
    """`reshard_after_forward=False`: each transform of NNX hands the module's weights on, and none leaves whole."""
    model, _, plan = sharded(kind, mesh, reshard_after_forward=False)
    fn = nnx.jit(nnx.value_and_grad(jzero.gather_on_use(loss_of, plan)))
    compare(nnx.jit(nnx.value_and_grad(loss_of)), fn, kind, mesh, plan, model, calls=1)


def with_aux(model, x, scale=1.0):
    out = model(x)
    return (out**2).mean() * scale, {"out": out, "name": "kept as it is"}


WAYS = {
    "aux": lambda f: nnx.value_and_grad(f, has_aux=True),
    "grad": lambda f: nnx.grad(f, has_aux=True),
    "some of the params": lambda f: nnx.value_and_grad(
        f, has_aux=True, argnums=nnx.DiffState(0, nnx.PathContains("kernel"))
    ),
    "keywords": lambda f: lambda m, x: nnx.value_and_grad(f, has_aux=True)(m, x=x, scale=2.0),
    "called": lambda f: f,
}


@pytest.mark.default_cases("aux-True", "called-False")
@pytest.mark.parametrize("jitted", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_ways_to_call(way, jitted, mesh):
    model, _, plan = sharded("list", mesh)

    def run(fn):
        def call(model, x):
            out = WAYS[way](fn)(model, x)
            return jax.tree.map(lambda x: None if isinstance(x, str) else x, out)

        return nnx.jit(call) if jitted else call

    compare(run(with_aux), run(jzero.gather_on_use(with_aux, plan)), "list", mesh, plan, model, 1)


@pytest.mark.parametrize("grad", [nnx.value_and_grad, jax.value_and_grad], ids=["nnx", "jax"])
def test_modules_as_plain_trees(grad, mesh):
    """`jax.value_and_grad` of a module without keys and statistics, and flax's mode without graphs."""
    make = lambda: nnx.Sequential(*(nnx.Linear(32, 32, rngs=nnx.Rngs(i)) for i in range(2)))  # noqa: E731
    model = make()
    plan = jzero.make_plan(nnx.as_pure(nnx.state(model)), stage=3, mesh=mesh, min_shard_bytes=0)
    nnx.update(model, plan.place(nnx.as_pure(nnx.state(model))))
    grad = grad if grad is jax.value_and_grad else functools.partial(grad, graph=False)
    loss, grads = jax.jit(grad(jzero.gather_on_use(loss_of, plan)))(model, plan.place_batch(data()))
    want_loss, want = grad(loss_of)(make(), data())
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    assert max_error(values(grads), values(want)) < 2e-6


@pytest.mark.default_cases("scan remat-True")
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("kind", ["list", "scan remat"])
def test_five_steps_in_place(kind, reshard, mesh):
    """A whole step under `nnx.jit`, compiled once: the layouts do not drift, and the params equal the plain ones."""
    model, optimizer, plan = sharded(kind, mesh, reshard_after_forward=reshard)
    plain = create(kind)
    traced = []

    def make(fn):
        @nnx.jit
        def step(model, optimizer, x):
            traced.append(fn)
            loss, grads = nnx.value_and_grad(fn)(model, x)
            optimizer.update(model, grads)
            return loss

        return step

    ours, theirs, fn = make(gathered := jzero.gather_on_use(loss_of, plan)), make(loss_of), gathered
    for seed in range(5):
        loss = ours(model, optimizer, plan.place_batch(data(seed)))
        np.testing.assert_allclose(loss, theirs(*plain, data(seed)), rtol=1e-5)
    assert traced.count(fn) == 1
    assert specs(values(nnx.state(model, nnx.Param))) == [x.stored for x in plan.layouts]
    assert max_error(values(model), values(plain[0])) < 1e-4


class Frozen(nnx.Variable):
    """Neither trained nor in the plan."""


def bits(tree):
    """The values of a module by path, bit for bit; not its keys and their counts."""
    flat = jax.tree_util.tree_leaves_with_path(values(tree))
    floating = [(jax.tree_util.keystr(k), x) for k, x in flat if jnp.issubdtype(x.dtype, jnp.floating)]
    return {k: (str(x.dtype), np.asarray(x).tobytes()) for k, x in floating}


@pytest.mark.nightly
@pytest.mark.parametrize("compute", [None, "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_leaves_params_and_frozen_values_as_they_are(kind, compute, mesh):
    """Bit for bit, also those that are cast on their shards: the module gets back what it had, not the casts."""

    def made():
        pair = create(kind, dim=64)
        pair[0].shift = Frozen(jnp.full((64,), 1 / 3))
        return pair

    def loss_fn(model, x):
        return loss_of(model, x + model.shift[...].astype(x.dtype))

    model, optimizer = jzero.shard(made(), stage=3, mesh=mesh, min_shard_bytes=0, compute_dtype=compute)
    plan, x = jzero.plan_of((model, optimizer)), data(dim=64)
    grad, before = nnx.jit(nnx.value_and_grad(jzero.gather_on_use(loss_fn, plan))), bits(model)
    model.eval()
    grad(model, plan.place_batch(x))
    assert bits(model) == before
    model.train()
    _, grads = grad(model, plan.place_batch(x))
    assert {x.dtype for x in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
    after = bits(model)
    assert {k for k in before if after[k] != before[k]} == {"['norm']['mean']", "['norm']['var']"}
    assert {k: v[0] for k, v in after.items()} == {k: v[0] for k, v in before.items()}
    assert specs(values(nnx.state(model, nnx.Param))) == [x.stored for x in plan.layouts]
    optimizer.update(model, grads)


def test_sown_values_and_modules_that_come_back(mesh):
    """What the function adds to the module is there afterwards, and a module that it returns is that module."""
    model, _, plan = sharded("list", mesh)
    plain = create("list")[0]

    def fn(model, x):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # outside of `nnx.capture`
            model.sow(nnx.Intermediate, "hidden", model(x))
        return model

    assert jzero.gather_on_use(fn, plan)(model, plan.place_batch(data())) is model
    fn(plain, data())
    assert max_error(values(model), values(plain)) < 1e-6
    assert len(nnx.pop(model, nnx.Intermediate)) == 1


def test_a_second_module_is_no_weight(mesh):
    """A teacher in another argument is used as it is, and changed as it would be; it is not taken for a batch."""
    model, _, plan = sharded("list", mesh)
    plain, teacher, plain_teacher = create("list")[0], create("scan")[0], create("scan")[0]

    def fn(model, teacher, x):
        return ((model(x) - teacher(x)) ** 2).mean()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = jzero.gather_on_use(fn, plan)(model, teacher, plan.place_batch(data()))
    np.testing.assert_allclose(got, fn(plain, plain_teacher, data()), rtol=1e-6)
    assert max_error(values(teacher), values(plain_teacher)) < 1e-6


def test_a_function_that_does_not_take_the_module_first(mesh):
    model, _, plan = sharded("list", mesh)
    fn = jzero.gather_on_use(lambda x, model: loss_of(model, x), plan)
    with pytest.raises(ValueError, match=r"none of the plan's params.*or the nnx.Module first"):
        fn(plan.place_batch(data()), model)


def test_another_module(mesh):
    plan = sharded("list", mesh)[2]
    other = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="none of the plan's params"):
        jzero.gather_on_use(lambda m, x: m(x), plan)(other, plan.place_batch(jnp.ones((8, 4))))


# --- the program compiled for 64 H100 ---------------------------------------------------------------------------

LAYERS, DIM, TOKENS = 6, 2048, 128  # a layer has 67 MB of weights, a device activations of 0.5 MB
WIDE = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16, "dropout": 0.0}


def compiled(kind, wrapped=True):
    pod = jzero.pod("h100", hosts=8)
    pair = jzero.abstract(
        lambda: create(kind, DIM, layers=LAYERS, **WIDE),
        stage=3,
        mesh=pod.mesh({"data": 64}),
    )
    plan = jzero.plan_of(pair)
    loss_fn = jzero.gather_on_use(loss_of, plan) if wrapped else loss_of

    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(loss_fn)(model, x)
        optimizer.update(model, grads)
        return loss

    x = jax.ShapeDtypeStruct((64 * TOKENS, DIM), jnp.bfloat16)
    program = pod.compile(nnx.jit(step, donate_argnums=(0, 1)), *pair, x)
    return plan, program, jzero.explain(program, plan)


@pytest.mark.default_cases("scan")
@pytest.mark.pod
@pytest.mark.parametrize("kind", ["list", "scan", "list remat", "scan remat"])
def test_weights_are_gathered_one_by_one(kind):
    """3 Psi on the wire, a few weights at once, nothing for `check` to find; donated state is taken over."""
    plan, program, report = compiled(kind)
    assert report.wire.psi == pytest.approx(3, rel=0.02)
    layer = sum(x.nbytes for x in plan.layouts if "layers" in x.name) // LAYERS
    kept = (2 if "remat" in kind else 24) * LAYERS * TOKENS * DIM * 2  # for the backward pass, and some more
    assert report.memory.temp < 3 * layer + kept + 2**22  # two gathered layers and a gradient; not all six
    assert report.memory.arguments - report.memory.aliased <= TOKENS * DIM * 2 + 4096
    assert findings(program, plan) == ()


@pytest.mark.nightly
@pytest.mark.pod
def test_without_gather_on_use_check_says_so():
    plan, program, _ = compiled("list", wrapped=False)
    assert any("no weight is gathered where it is used" in f.text for f in findings(program, plan))
