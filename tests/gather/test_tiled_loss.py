"""`tiled_loss`: the numbers of the plain loss, in every place where a loss may stand, and a program without logits."""

from __future__ import annotations

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from models import max_error

import jzero
from jzero.comm.token_loss_pieces import InPieces
from jzero.proof.check import findings

P = jax.P
ROWS, TIME, DIM, CLASSES = 16, 6, 16, 96
EVERY = {"label_smoothing": 0.1, "z_loss": 1e-2, "soft_cap": 4.0}


def params_of(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    shapes = {"embed": (CLASSES, DIM), "w": (DIM, DIM), "head": (DIM, CLASSES), "bias": (CLASSES,)}
    return {k: jnp.asarray(rng.standard_normal(s) / 3, dtype) for k, s in shapes.items()}


def batch_of(rows=ROWS, time=TIME):
    rng = np.random.default_rng(1)
    labels = rng.integers(0, CLASSES, (rows, time)).astype(np.int32)
    return labels, (rng.random((rows, time)) < 0.7).astype(np.float32) * 1.5


def hidden_of(p, labels):
    return jnp.tanh(p["embed"][jnp.maximum(labels, 0)] @ p["w"])


def whole(hidden, head, bias, labels, where, label_smoothing=0.0, z_loss=0.0, soft_cap=None):
    """The plain loss, from optax."""
    logits = (hidden @ head + bias).astype(jnp.float32)
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    target = optax.smooth_labels(jax.nn.one_hot(labels, CLASSES), label_smoothing)
    losses = optax.softmax_cross_entropy(logits, target) + z_loss * jax.nn.logsumexp(logits, -1) ** 2
    return (losses * where).sum() / where.sum()


def plain(p, labels, where, tied=False, **options):
    head = p["embed"].T if tied else p["head"]
    return whole(hidden_of(p, labels), head, p["bias"], labels, where, **options)


def in_tiles(p, labels, where, tied=False, tiles=3, **options):
    head = p["embed"].T if tied else p["head"]
    return jzero.tiled_loss(
        hidden_of(p, labels), head, labels, where=where, bias=p["bias"], tiles=tiles, **options
    )


@functools.cache
def wanted(**options):
    return jax.jit(jax.value_and_grad(functools.partial(plain, **options)))(params_of(), *batch_of())


def plan_of(mesh, stage=3, params=None, **fields):
    params = params_of() if params is None else params
    return jzero.make_plan(params, stage=stage, mesh=mesh, min_shard_bytes=0, **fields)


def compare(loss, plan, want, grad=None):
    fn = grad or jax.value_and_grad(jzero.gather_on_use(loss, plan))
    value, grads = jax.jit(fn)(plan.place(params_of()), *plan.place_batch(batch_of()))
    np.testing.assert_allclose(value, want[0], rtol=1e-6)
    assert max_error(grads, want[1]) < 2e-6


@pytest.fixture(params=[False, True], ids=["whole", "in pieces"])
def bound(request, monkeypatch):
    """Where heads of stage 3 are used in pieces: how many there were, and how many pieces each had."""
    made, pieces = list[int](), InPieces._each
    if request.param:
        monkeypatch.setattr(jzero.Plan, "whole_bytes", property(lambda plan: 3000))
        monkeypatch.setattr(InPieces, "_each", lambda x, *args: made.append(x.pieces.count) or pieces(x, *args))
    yield request.param
    assert not request.param or (made and min(made) > 2), "it was whole"


OPTIONS = {"plain": {}, "tied": EVERY | {"tied": True}, "recompute": {"recompute": True, **EVERY}}


@pytest.mark.default_cases("plain-0", "plain-2", "tied-1", "tied-3", "recompute-3")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_values_and_gradients_are_those_of_the_plain_loss(stage, options, mesh):
    known = {k: v for k, v in options.items() if k != "recompute"}
    compare(functools.partial(in_tiles, **options), plan_of(mesh, stage, bucket_bytes=2000), wanted(**known))


def by_scan(loss):
    """Micro-batches by hand."""

    def run(p, labels, where):
        def one(total, rows):
            return total + loss(p, *rows) * rows[1].sum(), None

        cut = [x.reshape(2, -1, TIME) for x in (labels, where)]
        return jax.lax.scan(one, 0.0, tuple(cut))[0] / where.sum()

    return run


def by_vmap(loss):
    """One example at a time."""
    return lambda p, y, m: jax.vmap(lambda y, m: loss(p, y[None], m[None]) * m.sum())(y, m).sum() / m.sum()


PLACES = {
    "remat": jax.checkpoint,
    "jit": jax.jit,
    "scan": by_scan,
    "cond": lambda loss: lambda p, *b: jax.lax.cond(b[0][0, 0] >= 0, lambda p: loss(p, *b), lambda p: 0.0, p),
    "vmap": by_vmap,
}


@pytest.mark.default_cases("remat", "scan")
@pytest.mark.parametrize("place", PLACES)
def test_it_stands_anywhere_in_a_loss(place, mesh):
    compare(PLACES[place](in_tiles), plan_of(mesh), wanted())


@pytest.mark.default_cases("plain-in pieces", "tied-in pieces")
@pytest.mark.parametrize("bound", [True], ids=["in pieces"], indirect=True)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_head_in_pieces(options, mesh, bound):
    """With several buckets; classes that devices split are cut on each of them."""
    known = {k: v for k, v in options.items() if k != "recompute"}
    compare(functools.partial(in_tiles, **options), plan_of(mesh, 3, bucket_bytes=2000), wanted(**known))


@pytest.mark.parametrize("bound", [True], ids=["in pieces"], indirect=True)
def test_both_derivatives_in_the_weights_of_tokens(mesh, bound):
    """Also where a weight is zero: that of the loss which it would add."""
    plan = plan_of(mesh)
    placed, (labels, where) = plan.place(params_of()), plan.place_batch(batch_of())

    def summed(p, where):
        options = {"where": where, "bias": p["bias"], "reduction": "sum"}
        return jzero.tiled_loss(hidden_of(p, labels), p["head"], labels, **options)

    loss = jzero.gather_on_use(summed, plan)
    grad = jax.jit(jax.grad(loss, argnums=1))(placed, where)
    along = jax.jit(lambda p, m: jax.jvp(lambda m: loss(p, m), (m,), (jnp.ones_like(m),))[1])(placed, where)
    assert bool((where == 0).any())
    np.testing.assert_allclose(grad.sum(), along, rtol=1e-5)


@pytest.mark.default_cases("whole")
def test_micro_batches(mesh, bound):
    """At stage 2 reduced once per step: there the loss runs inside of a `shard_map`."""
    for stage, reduce in ((2, "step"), (3, "auto")):
        plan = plan_of(mesh, stage)
        weight = {"weight": lambda labels, where: where.sum(), "batch_argnums": (1, 2)}
        compare(in_tiles, plan, wanted(), jzero.value_and_grad(in_tiles, plan, accumulate=2, reduce=reduce, **weight))


@pytest.mark.default_cases("whole")
def test_one_loss_per_token(mesh, bound):
    def mean(p, labels, where):
        losses = in_tiles(p, labels, where, reduction="none")
        assert losses.shape == labels.shape
        return losses.sum() / where.sum()

    compare(mean, plan_of(mesh), wanted())


@pytest.mark.default_cases("whole-4-6", "in pieces-3-5")
@pytest.mark.parametrize(("rows", "time"), [(4, TIME), (3, 5)])
def test_tokens_that_devices_do_not_divide(rows, time, mesh, bound):
    batch = batch_of(rows, time)
    want = jax.jit(jax.value_and_grad(plain))(params_of(), *batch)
    plan = plan_of(mesh)
    value, grads = jax.jit(jax.value_and_grad(jzero.gather_on_use(in_tiles, plan)))(plan.place(params_of()), *batch)
    np.testing.assert_allclose(value, want[0], rtol=1e-6)
    assert max_error(grads, want[1]) < 2e-6


@pytest.mark.default_cases("whole")
def test_a_vocabulary_that_tensor_parallelism_splits(mesh_2x4, bound):
    specs = {"embed": P(), "w": P(), "head": P(None, "model"), "bias": P("model")}
    for stage in (1, 3):
        compare(in_tiles, plan_of(mesh_2x4, stage, axis="data", param_specs=specs), wanted())


@pytest.mark.parametrize("checks", [False, True])
def test_in_a_shard_map_it_is_the_loss_of_a_devices_own_tokens(checks, mesh):
    def own(p, labels, where):
        return jax.lax.psum(in_tiles(p, labels, where, reduction="sum"), "data")

    rows = P("data")
    fn = jax.shard_map(own, mesh=mesh, in_specs=(P(), rows, rows), out_specs=P(), check_vma=checks)
    labels, where = batch_of()
    value, grads = jax.jit(jax.value_and_grad(lambda *a: fn(*a) / where.sum()))(params_of(), labels, where)
    np.testing.assert_allclose(value, wanted()[0], rtol=1e-6)
    assert max_error(grads, wanted()[1]) < 2e-6


class Module(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(CLASSES, DIM, rngs=rngs)
        self.head = nnx.Linear(DIM, CLASSES, rngs=rngs)


class Linen(nn.Module):
    """It computes its loss itself, as `init` does without a plan."""

    tiles: int | None

    @nn.compact
    def __call__(self, labels):
        hidden = nn.tanh(nn.Dense(DIM)(nn.Embed(CLASSES, DIM)(labels)))
        head = self.param("head", nn.initializers.normal(0.3), (DIM, CLASSES))
        if self.tiles:
            return jzero.tiled_loss(hidden, head, labels, tiles=self.tiles)
        return optax.softmax_cross_entropy_with_integer_labels(hidden @ head, labels).mean()


@pytest.mark.default_cases("whole")
def test_nnx_and_linen_take_the_steps_that_they_take_without_it(mesh, bound):
    labels, _ = batch_of()

    def of_module(model, labels, tiles=True):
        hidden = jnp.tanh(model.embed(labels))
        if tiles:
            return jzero.tiled_loss(hidden, model.head.kernel, labels, bias=model.head.bias, tiles=3)
        return optax.softmax_cross_entropy_with_integer_labels(model.head(hidden), labels).mean()

    want = nnx.value_and_grad(functools.partial(of_module, tiles=False))(Module(nnx.Rngs(0)), labels)
    model, optimizer = jzero.shard(
        lambda: (m := Module(nnx.Rngs(0)), nnx.Optimizer(m, optax.adam(1e-2), wrt=nnx.Param)), stage=3, mesh=mesh,
        min_shard_bytes=0,
    )  # fmt: skip
    plan = jzero.plan_of(optimizer)
    value, grads = nnx.jit(jzero.value_and_grad(of_module, plan))(model, plan.place_batch(labels))
    np.testing.assert_allclose(value, want[0], rtol=1e-6)
    assert max_error(nnx.to_pure_dict(grads), nnx.to_pure_dict(want[1])) < 2e-6

    def create(tiles):
        model = Linen(tiles)
        params = model.init(jax.random.key(0), labels[:1])["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2))

    @jax.jit
    def step(state, labels):
        value, grads = jax.value_and_grad(lambda p: state.apply_fn({"params": p}, labels))(state.params)
        return state.apply_gradients(grads=grads), value

    state, alone = jzero.shard(lambda: create(3), stage=3, mesh=mesh, min_shard_bytes=0), create(None)
    for _ in range(2):
        state, value = step(state, jzero.plan_of(state).place_batch(labels))
        alone, expected = step(alone, labels)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert max_error(jzero.unshard(state).params, alone.params) < 1e-4


def test_labels_outside_of_the_classes(mesh):
    """Without weight they count as nothing; with weight the loss is nan, whatever numpy would take an index for."""
    labels, where = batch_of()
    ignored = np.where(where > 0, labels, -100).astype(np.int32)
    plan = plan_of(mesh)
    fn = jax.jit(jax.value_and_grad(jzero.gather_on_use(in_tiles, plan)))
    value, grads = fn(plan.place(params_of()), *plan.place_batch((ignored, where)))
    np.testing.assert_allclose(value, wanted()[0], rtol=1e-6)
    assert all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(grads))
    for bad in (-1, CLASSES):
        assert np.isnan(fn(plan.place(params_of()), *plan.place_batch((labels * 0 + bad, where)))[0])


def test_labels_of_eight_bits():
    """257 classes have no numbers of their own in uint8: class 256 was class 0 once more."""
    hidden, head = jnp.eye(4)[None], jnp.asarray(np.random.default_rng(2).standard_normal((4, 257)), jnp.float32)
    labels = jnp.array([[0, 1, 2, 255]])
    want = optax.softmax_cross_entropy_with_integer_labels(hidden @ head, labels).mean()
    for dtype in (jnp.uint8, jnp.int16, jnp.int32):
        np.testing.assert_allclose(jzero.tiled_loss(hidden, head, labels.astype(dtype)), want, rtol=1e-6)


@pytest.mark.default_cases("whole")
def test_a_loss_scale_reaches_gradients_in_fp16(mesh, bound):
    """These are made in the backward pass: in the forward pass they would be rounded before they are scaled."""
    params, batch = params_of(jnp.float16), batch_of()
    plan = plan_of(mesh, params=params)

    def small(p, *batch):
        return in_tiles(p, *batch) * 1e-5

    fn = jax.jit(jzero.value_and_grad(small, plan, scale=2.0**16))
    value, grads = fn(plan.place(params), *plan.place_batch(batch))
    np.testing.assert_allclose(value * 1e5, wanted()[0], rtol=1e-3)
    assert max_error(jax.tree.map(lambda g: g * 1e5, grads), wanted()[1]) < 2e-3


def test_outside_of_a_wrapped_function_it_asks_for_the_plan(mesh):
    plan, batch = plan_of(mesh), batch_of()
    params, batch = plan.place(params_of()), plan.place_batch(batch)
    np.testing.assert_allclose(jax.jit(in_tiles)(params, *batch), wanted()[0], rtol=1e-6)  # init, metrics
    with pytest.raises(ValueError, match=r"jzero\.tiled_loss: its gradient is taken outside .* or pass plan=plan\."):
        jax.jit(jax.grad(in_tiles))(params, *batch)
    compare(None, plan, wanted(), jax.value_and_grad(functools.partial(in_tiles, plan=plan)))


def test_what_jzero_cannot_look_into_is_named(mesh):
    hidden_from = jax.custom_vjp(lambda p, *batch: in_tiles(p, *batch))
    hidden_from.defvjp(lambda p, *batch: (in_tiles(p, *batch), p), lambda p, c: (p, None, None))
    plan = plan_of(mesh)
    with pytest.raises(ValueError, match=r"jzero\.tiled_loss: it is called in a function that jzero cannot look into"):
        jax.jit(jzero.gather_on_use(hidden_from, plan))(plan.place(params_of()), *plan.place_batch(batch_of()))


@pytest.mark.default_cases("whole")
def test_second_derivatives(mesh, bound):
    """Of a wrapped loss; within one they are refused."""

    plan = plan_of(mesh)
    batch = plan.place_batch(batch_of())

    def squares(loss):
        return lambda p: sum((g**2).sum() for g in jax.tree.leaves(jax.grad(loss)(p, *batch)))

    got = jax.jit(jax.grad(squares(jzero.gather_on_use(in_tiles, plan))))(plan.place(params_of()))
    assert max_error(got, jax.jit(jax.grad(squares(plain)))(params_of())) < 2e-6
    with pytest.raises(NotImplementedError, match="no second derivative"):
        jax.jit(jax.grad(jzero.gather_on_use(lambda p: jax.grad(squares(in_tiles))(p)["w"].sum(), plan)))(params_of())


HIDDEN, LABELS = jnp.ones((4, 3, 8)), jnp.zeros((4, 3), int)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"head": jnp.ones((5, 8))}, ValueError, r"head must be \[features, classes\] = \[8, .*Pass head\.T"),
        ({"labels": jnp.zeros((4, 2), int)}, ValueError, r"labels must have the shape of hidden without its last dim"),
        ({"labels": jnp.zeros((4, 3))}, TypeError, r"labels must be an array of integers, got f32\[4,3\]"),
        ({"bias": jnp.ones(4)}, ValueError, r"bias must be \[classes\] = \[5\], got f32\[4\]"),
        ({"where": jnp.ones((4, 3, 1))}, ValueError, r"where must broadcast to the shape of labels"),
        ({"where": "all"}, TypeError, r"where must be an array of bools or of weights"),
        ({"tiles": 0}, ValueError, r"tiles must be an integer of at least 1"),
        ({"label_smoothing": 1.0}, ValueError, r"label_smoothing must be a number from 0 up to but not including 1"),
        ({"soft_cap": 0}, ValueError, r"soft_cap must be a number above 0"),
        ({"reduction": "none", "recompute": False}, ValueError, r"recompute=False, but with reduction='none'"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)  # fmt: skip
def test_bad_input(given, error, message):
    good = {"hidden": HIDDEN, "head": jnp.ones((8, 5)), "labels": LABELS}
    with pytest.raises(error, match=message):
        jzero.tiled_loss(**good | given)


def compiled(stage: int, loss, *, tied=False):
    """A step of 1024 tokens per device on 8 H200, with what is known of it."""
    mesh, tokens, width, classes = jzero.pod("h200").mesh({"data": 8}), 1024, 256, 8192

    def create():
        shapes = {"embed": (classes, width), **({} if tied else {"head": (width, classes)})}
        params = {k: jnp.zeros(s, jnp.bfloat16) for k, s in shapes.items()}
        return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))

    state = jzero.abstract(create, stage=stage, mesh=mesh)
    plan = jzero.plan_of(state)

    def step(state, labels):
        grads = jzero.value_and_grad(loss, plan)(state.params, labels)[1]
        return state.apply_gradients(grads=grads)

    labels = jax.ShapeDtypeStruct((8, tokens), jnp.int32)
    program = jzero.pod("h200").compile(step, state, labels, donate_argnums=0)
    return program, plan, jzero.estimate(plan, uses=jzero.param_uses(step, state, labels))


@pytest.mark.parametrize("stage", [2, 3])
def test_the_program_has_no_logits_and_reduces_the_head_once(stage):
    """Beside the plain loss: the same bytes on the wire, or one gather less, as `estimate` says; no array of logits."""

    def tiled(p, labels):
        return jzero.tiled_loss(p["embed"][labels], p["head"], labels, tiles=8)

    def plain(p, labels):
        logits = (p["embed"][labels] @ p["head"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    program, plan, estimate = compiled(stage, tiled)
    other, _, _ = compiled(stage, plain)
    own, its = (jzero.explain(p, plan) for p in (program, other))
    assert re.search(r"f32\[128,8192\]", program.as_text())
    assert not re.search(r"\[(1,)?1024,8192\]", program.as_text())
    assert re.search(r"\[(1,)?1024,8192\]", other.as_text()), "the plain loss has them"
    head = 256 * 8192 * 2 * 7 / 8
    assert own.wire.total == pytest.approx(its.wire.total - head * (stage == 3), rel=0.01)
    assert own.wire.total == pytest.approx(estimate.wire, rel=0.01)
    assert own.memory.temp < 0.5 * its.memory.temp
    assert not findings(program, plan)


@pytest.mark.default_cases("tied")
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_program_never_holds_a_large_head(tied, monkeypatch):
    """Its pieces are gathered twice, as `estimate` says; no array of the size of the head but its shards."""

    def tiled(p, labels):
        head = p["embed"].T if tied else p["head"]
        return jzero.tiled_loss(jnp.tanh(p["embed"][labels]), head, labels, tiles=8)

    monkeypatch.setattr(jzero.Plan, "whole_bytes", property(lambda plan: 2**20))
    program, plan, estimate = compiled(3, tiled, tied=tied)
    report = jzero.explain(program, plan)
    whole = re.compile(r"(bf16|f32)\[(256,8192|8192,256)\]\S* (all-gather|dot|while)")
    assert not whole.search(program.as_text())
    assert report.wire.total == pytest.approx(estimate.wire, rel=0.02)
    assert report.memory.temp < 8e6  # 20e6 if it is whole; with copies of zeros for each piece 14e6
    assert not findings(program, plan)
