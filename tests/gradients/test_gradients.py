"""`value_and_grad`: the gradient of the whole batch from micro-batches, at every stage, in every mode."""

from __future__ import annotations

import functools
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest
from equations import equations
from flax.training.train_state import TrainState

import jzero

K, BATCH, SEQ, DIM = 4, 64, 6, 24
CLOSE = 1e-6


class Block(nn.Module):
    drop: float = 0.0

    @nn.compact
    def __call__(self, x, _=None):
        y = nn.MultiHeadDotProductAttention(num_heads=3, use_bias=False)(nn.LayerNorm()(x))
        y = nn.Dropout(self.drop, deterministic=not self.has_rng("dropout"))(y)
        return x + nn.Dense(DIM)(nn.gelu(nn.Dense(40)(y))), None


class Model(nn.Module):
    """Attention over a sequence, layers in a scan under remat: examples stay apart."""

    drop: float = 0.0

    @nn.compact
    def __call__(self, x):
        stack = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=3,
        )
        x, _ = stack(self.drop, name="layers")(nn.Dense(DIM)(x), None)
        return nn.Dense(5)(x)


@functools.partial(jax.jit, static_argnums=0)
def params_of(model):
    """Under jit: eager initialisation compiles one op at a time."""
    return model.init(jax.random.key(0), jnp.ones((1, SEQ, 7)))["params"]


def create(drop=0.0):
    model = Model(drop)
    params = params_of(model)
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2))


@functools.cache
def batch():
    rng = np.random.default_rng(3)
    x, y = (rng.standard_normal((BATCH, SEQ, d), dtype=np.float32) for d in (7, 5))
    return {"x": x, "y": y}


def loss_of(state, **apply):
    def loss(params, batch):
        return jnp.mean((state.apply_fn({"params": params}, batch["x"], **apply) - batch["y"]) ** 2)

    return loss


@functools.cache
def reference():
    state = create()
    return jax.jit(jax.value_and_grad(loss_of(state)))(state.params, batch())


AUTO = [(1, "step"), (2, "microbatch"), (3, "microbatch")]  # what "auto" means
MODES = [
    (stage, mode) for stage in range(4) for mode in ("step", "microbatch") if (stage, mode) != (3, "step")
]


def sharded(stage, mesh, **fields):
    state = models.shard(create(), mesh, stage, **fields)
    plan = jzero.plan_of(state)
    placed = plan.place_batch(batch())
    models.assert_batch_is_split(placed)
    return state, plan, placed


@pytest.mark.default_cases("1-step")
@pytest.mark.parametrize(("stage", "reduce"), MODES)
def test_equals_the_gradient_of_the_whole_batch(stage, reduce, mesh):
    state, plan, placed = sharded(stage, mesh)
    vg = jax.jit(jzero.value_and_grad(loss_of(state), plan, accumulate=K, reduce=reduce))
    loss, grads = vg(state.params, placed)
    assert float(loss) == pytest.approx(float(reference()[0]), rel=CLOSE)
    assert models.max_error(grads, reference()[1]) < CLOSE
    assert any(x.padded for x in plan.layouts) == (stage > 0)  # those come whole: no array has unequal pieces
    wanted = [x.used if x.padded else x.grad if stage > 1 and reduce == "microbatch" else x.state for x in plan.layouts]
    assert models.specs(grads) == wanted
    assert any(s != jax.P() for s in wanted) == (stage > 0)


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_micro_batches_of_optax_equal_the_whole_batch(stage, mesh):
    """`optax.microbatching.microbatch` cuts the batch so that each micro-batch lies on all devices."""
    state, plan, placed = sharded(stage, mesh)
    mean = optax.microbatching.AccumulationType.MEAN
    vg = jax.value_and_grad(loss_of(state))
    vg = jax.jit(optax.microbatching.microbatch(vg, argnums=1, microbatch_size=BATCH // K, accumulator=mean))
    program = vg.lower(state.params, placed).compile()
    loss, grads = program(state.params, placed)
    assert float(loss) == pytest.approx(float(reference()[0]), rel=CLOSE)
    assert models.max_error(grads, reference()[1]) < CLOSE
    assert "of 8)" not in str(jzero.explain(program, plan))  # no collective among some of the devices


@pytest.mark.default_cases("2")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_micro_batch_is_the_plain_path(stage, mesh):
    state, plan, placed = sharded(stage, mesh)
    vg = jzero.value_and_grad(loss_of(state), plan)
    grads = jax.jit(vg)(state.params, placed)[1]
    assert models.max_error(grads, reference()[1]) < CLOSE
    plain = jax.jit(jax.value_and_grad(loss_of(state))).lower(state.params, placed).as_text()
    assert jax.jit(vg).lower(state.params, placed).as_text() == plain or stage == 3


@pytest.mark.nightly
def test_a_train_step_with_it_equals_the_plain_run(mesh):
    state, plan, placed = sharded(2, mesh)
    plain = create()

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, batch):
        loss, grads = jzero.value_and_grad(loss_of(state), plan, accumulate=K)(state.params, batch)
        return state.apply_gradients(grads=grads), loss

    @jax.jit
    def plain_step(state, batch):
        loss, grads = jax.value_and_grad(loss_of(state))(state.params, batch)
        return state.apply_gradients(grads=grads), loss

    for _ in range(5):
        state, loss = step(state, placed)
        plain, expected = plain_step(plain, batch())
    assert step._cache_size() == 1
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    assert models.max_error(state.params, plain.params) < 1e-4
    models.assert_laid_out(state, plan)


# --- weights --------------------------------------------------------------------------------------------------


def mask():
    """Very unequal: the first device's rows, and a whole micro-batch of others, are padding."""
    m = (np.random.default_rng(5).random((BATCH, SEQ)) < 0.5).astype(np.float32)
    m[:8] = 0
    m[8:10] = 0
    return m


def masked_loss(state, divisor=lambda m: m.sum()):
    def loss(params, batch):
        errors = jnp.mean((state.apply_fn({"params": params}, batch["x"]) - batch["y"]) ** 2, -1)
        return (errors * batch["mask"]).sum() / divisor(batch["mask"])

    return loss


@functools.cache
def masked_reference():
    """In float64: the one-batch gradient in float32 is 1.0e-6 from it, those from micro-batches less than half."""
    state, full = create(), batch() | {"mask": mask()}
    with jax.enable_x64(True):
        params, full = jax.tree.map(lambda x: np.asarray(x, np.float64), (state.params, full))
        loss, grads = jax.jit(jax.value_and_grad(masked_loss(state)))(params, full)
        return float(loss), jax.tree.map(np.asarray, grads)


@pytest.mark.default_cases("3-microbatch")
@pytest.mark.parametrize(("stage", "reduce"), AUTO)
def test_weights_make_a_masked_mean_right(stage, reduce, mesh):
    state, plan, _ = sharded(stage, mesh)
    full = batch() | {"mask": mask()}
    expected, grads = masked_reference()
    vg = jzero.value_and_grad(
        masked_loss(state), plan, accumulate=K, reduce=reduce, weight=lambda b: b["mask"].sum()
    )
    loss, got = jax.jit(vg)(state.params, plan.place_batch(full))
    assert float(loss) == pytest.approx(float(expected), rel=CLOSE)
    assert models.max_error(got, grads) < CLOSE
    unweighted = jzero.value_and_grad(masked_loss(state), plan, accumulate=K, reduce=reduce, coupled="allow")
    assert (
        not abs(float(jax.jit(unweighted)(state.params, plan.place_batch(full))[0]) - float(expected)) < 1e-3
    )


def test_a_masked_mean_without_weights_is_refused(mesh):
    state, plan, _ = sharded(2, mesh)
    full = plan.place_batch(batch() | {"mask": mask()})
    for divisor in (lambda m: m.sum(), lambda m: jnp.maximum(m.sum(), 1), lambda m: m.sum() + 1e-6):
        vg = jzero.value_and_grad(masked_loss(state, divisor), plan, accumulate=K)
        with pytest.raises(ValueError, match=r"a sum over examples divided by another .* Pass weight="):
            vg(state.params, full)


# --- aux, keys, more arguments --------------------------------------------------------------------------------


@pytest.mark.default_cases("2-microbatch")
@pytest.mark.parametrize(("stage", "reduce"), AUTO)
def test_aux_is_averaged_and_counts_are_summed(stage, reduce, mesh):
    state, plan, placed = sharded(stage, mesh)

    def loss(params, batch, flag):
        out = state.apply_fn({"params": params}, batch["x"])
        value = jnp.mean((out - batch["y"]) ** 2)
        return value, {"mean": out.mean((0, 1)), "hits": (out > 0).sum(), "flag": jnp.int32(flag)}

    vg = jzero.value_and_grad(loss, plan, accumulate=K, reduce=reduce, has_aux=True)
    (value, aux), grads = jax.jit(vg, static_argnums=2)(state.params, placed, 7)
    assert int(aux["flag"]) == 7
    out = create().apply_fn({"params": create().params}, batch()["x"])
    assert float(value) == pytest.approx(float(reference()[0]), rel=CLOSE)
    np.testing.assert_allclose(aux["mean"], out.mean((0, 1)), rtol=1e-5, atol=1e-6)
    assert int(aux["hits"]) == int((out > 0).sum())
    assert models.max_error(grads, reference()[1]) < CLOSE


def test_aux_per_example_is_refused(mesh):
    state, plan, placed = sharded(2, mesh)

    def loss(params, batch):
        out = state.apply_fn({"params": params}, batch["x"])
        return jnp.mean((out - batch["y"]) ** 2), {"logits": out}

    vg = jzero.value_and_grad(loss, plan, accumulate=K, has_aux=True)
    with pytest.raises(ValueError, match=r"aux \['logits'\] \(16, 6, 5\) has one value per example"):
        vg(state.params, placed)
    for change in (lambda x: x.reshape(-1), lambda x: x.T):
        vg = jzero.value_and_grad(lambda *args, c=change: (loss(*args)[0], c(loss(*args)[1]["logits"])), plan,
                                  accumulate=K, has_aux=True)  # fmt: skip
        with pytest.raises(ValueError, match="has one value per example"):
            vg(state.params, placed)
    vg = jzero.value_and_grad(
        lambda *args: (loss(*args)[0], {"fits": loss(*args)[0] < 9}), plan, accumulate=K, has_aux=True
    )
    with pytest.raises(ValueError, match=r"aux \['fits'\] is a bool, .*an int is summed, a float averaged"):
        vg(state.params, placed)


def test_a_loss_in_fp64_stays_so(mesh):
    with jax.enable_x64(True):
        params = {"w": jnp.linspace(0.1, 1, 64, dtype=jnp.float64).reshape(16, 4)}
        plan = jzero.make_plan(params, stage=2, mesh=mesh, min_shard_bytes=0)
        x = jnp.linspace(0, 1, 512).reshape(32, 16)
        loss = jzero.value_and_grad(lambda p, x: jnp.mean((x @ p["w"]) ** 2), plan, accumulate=2)(params, x)[0]
        assert loss.dtype == jnp.float64
        assert float(loss) == pytest.approx(float(jnp.mean((x @ params["w"]) ** 2)), rel=1e-13)


@pytest.mark.default_cases("2-microbatch")
@pytest.mark.parametrize(("stage", "reduce"), AUTO)
def test_every_micro_batch_draws_its_own_dropout(stage, reduce, mesh):
    state = models.shard(create(0.5), mesh, stage)
    plan, key = jzero.plan_of(state), jax.random.key(7)
    same = np.repeat(batch()["x"][:1], BATCH, 0)  # equal examples: only the keys tell micro-batches apart
    placed = plan.place_batch({"x": same, "y": np.zeros((BATCH, SEQ, 5), np.float32)})

    def loss(params, batch, key):
        out = state.apply_fn({"params": params}, batch["x"], rngs={"dropout": key})
        return jnp.mean(out**2), jax.random.uniform(key)

    vg = jzero.value_and_grad(loss, plan, accumulate=K, reduce=reduce, rng_argnums=2, has_aux=True)
    (_, drawn), _ = jax.jit(vg)(state.params, placed, key)
    (_, again), _ = jax.jit(vg)(state.params, placed, key)
    assert float(drawn) == float(again)
    if reduce == "microbatch":
        each = [jax.random.uniform(jax.random.fold_in(key, i)) for i in range(K)]
    else:
        own = [jax.random.fold_in(key, device) for device in range(8)]
        each = [jax.random.uniform(jax.random.fold_in(k, i)) for k in own for i in range(K)]
    assert float(drawn) == pytest.approx(float(np.mean(each)), rel=1e-6)


# --- 16-bit gradients reduced in fp32 -------------------------------------------------------------------------


def test_reduce_dtype_reduces_in_fp32(mesh):
    """Local gradients 1 and 2^-9 in turn: their sum in bf16 loses the small ones, in fp32 it does not."""
    params = {"w": jnp.zeros((8, 128), jnp.bfloat16)}
    x = jnp.where(jnp.arange(8)[:, None, None] % 2, 2.0**-9, 1.0) * jnp.ones((8, 8, 128), jnp.bfloat16)

    def loss(params, x):
        return jnp.sum(params["w"] * x, dtype=jnp.float32) / x.shape[0]

    exact = (4 + 4 * 2.0**-9) / 8
    plan = jzero.make_plan(params, stage=2, mesh=mesh, min_shard_bytes=0, reduce_dtype=jnp.float32)
    placed = plan.place_batch(x.astype(jnp.bfloat16))
    _, grads = jax.jit(jzero.value_and_grad(loss, plan))(plan.place(params), placed)
    assert grads["w"].dtype == jnp.float32
    assert grads["w"].sharding.spec == plan.layouts[0].state
    np.testing.assert_allclose(np.asarray(grads["w"]), exact, rtol=1e-7)
    plain = jzero.make_plan(params, stage=2, mesh=mesh, min_shard_bytes=0)
    _, rough = jax.jit(jzero.value_and_grad(loss, plain))(plain.place(params), placed)
    assert rough["w"].dtype == jnp.bfloat16
    assert abs(float(rough["w"][0, 0]) - exact) > 1e-4


@pytest.mark.parametrize("stage", [2, 3])
def test_a_narrower_reduction(stage, mesh):
    """Matmuls and lookups: each device casts the gradient that it has made. What jzero does not make itself is said."""
    params = {"a": jnp.ones((64, 64)), "table": jnp.ones((32, 64)), "experts": jnp.ones((8, 64, 64))}
    plan = jzero.make_plan(
        params, stage=stage, mesh=mesh, min_shard_bytes=0, bucket_bytes=64, reduce_dtype=jnp.bfloat16
    )
    index = plan.place_batch(jnp.arange(64) % 32)

    def plain(p, index):
        return jnp.mean((p["table"][index] @ p["a"]) ** 2)

    def experts(p, index):
        return jnp.mean(jnp.einsum("ebd,edf->ebf", p["table"][index].reshape(8, 8, 64), p["experts"]))

    fn = jax.grad(jzero.gather_on_use(plain, plan))
    sums = [e for e in equations(jax.make_jaxpr(fn)(plan.place(params), index)) if "scatter" in e.primitive.name]
    assert {e.invars[0].aval.dtype for e in sums if e.primitive.name == "reduce_scatter"} == {jnp.dtype("bfloat16")}
    got = jax.jit(fn)(plan.place(params), index)
    assert models.max_error(got, jax.grad(plain)(params, index)) < 1e-2
    with pytest.warns(UserWarning, match=r"reduce_dtype=bfloat16 is narrower than the float32.*\(8, 64, 64\)"):
        jax.jit(jax.grad(jzero.gather_on_use(experts, plan))).lower(plan.place(params), index)


# --- losses that couple examples ------------------------------------------------------------------------------


class WithBatchNorm(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(5)(nn.BatchNorm(use_running_average=False)(nn.Dense(16)(x)))


def test_batch_norm_is_refused_and_can_be_allowed(mesh):
    model = WithBatchNorm()
    variables = model.init(jax.random.key(0), batch()["x"])
    plan = jzero.make_plan(variables["params"], stage=2, mesh=mesh, min_shard_bytes=0)

    def loss(params, batch):
        out, _ = model.apply({**variables, "params": params}, batch["x"], mutable=["batch_stats"])
        return jnp.mean((out - batch["y"]) ** 2)

    params, placed = plan.place(variables["params"]), plan.place_batch(batch())
    with pytest.raises(ValueError, match=r"couples examples \(.*normalization\.py.*BatchNorm"):
        jzero.value_and_grad(loss, plan, accumulate=K)(params, placed)
    one, _ = jzero.value_and_grad(loss, plan)(params, placed)
    allowed, _ = jzero.value_and_grad(loss, plan, accumulate=K, coupled="allow")(params, placed)
    assert abs(float(one) - float(allowed)) > 1e-5


def _returns(rows):
    """Discounted sums along the batch, as over the steps of an episode."""
    return jax.lax.scan(lambda carry, r: (0.9 * carry + r,) * 2, 0.0, rows, reverse=True)[1]


@pytest.mark.parametrize(
    ("of_rows", "says"),
    [
        (lambda rows: (_returns(rows) ** 2).mean(), "could not be checked for examples that depend on each other"),
        (lambda rows: jnp.sort(jnp.eye(4, len(rows)) @ rows)[-2:].mean(), "couples examples"),
        (lambda rows: jax.lax.scan(lambda c, r: (c + r,) * 2, 0.0, rows)[1].mean(), "could not be checked"),
        (lambda rows: jax.lax.scan(lambda c, r: (c, r**2), 0.0, rows)[1].mean(), ""),
        (lambda rows: jnp.var(jnp.outer(rows, jnp.arange(4.0)), axis=1).mean(), ""),
    ],
    ids=["returns", "sorted sums", "a running sum", "a map", "a variance of each"],
)
def test_scans_and_sorts_over_examples(of_rows, says, mesh):
    plan = jzero.make_plan({"w": jnp.ones((8, 1))}, stage=2, mesh=mesh, min_shard_bytes=0)
    rows = plan.place_batch(np.random.default_rng(0).standard_normal((64, 8), np.float32))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            loss = jzero.value_and_grad(lambda p, x: of_rows((x @ p["w"])[:, 0]), plan, accumulate=K)
            loss({"w": jnp.ones((8, 1))}, rows)
        except ValueError as error:
            caught = [*caught, error]
    texts = [str(getattr(w, "message", w)) for w in caught]
    assert any(says in text for text in texts) if says else not texts, texts


def test_complex_params_keep_their_imaginary_part(mesh):
    params = {"w": jnp.full((64, 64), 1 + 2j, jnp.complex64), "none": jnp.zeros((8, 0))}
    plan = jzero.make_plan(params, stage=2, mesh=mesh, min_shard_bytes=0, reduce_dtype="float32")
    x = np.random.default_rng(0).standard_normal((16, 64), np.float32)

    def loss(params, x):
        return (jnp.abs(x @ params["w"]) ** 2).mean()

    want = jax.grad(loss)(params, x)["w"]
    _, grads = jax.jit(jzero.value_and_grad(loss, plan))(plan.place(params), plan.place_batch(x))
    np.testing.assert_allclose(grads["w"], want, rtol=1e-5)
    tx = jzero.zero(optax.sgd(0.1), plan)
    placed = plan.place(params)
    step = jax.jit(lambda grads, state, p: optax.apply_updates(p, tx.update(grads, state, p)[0]))
    np.testing.assert_allclose(step(grads, tx.init(placed), placed)["w"], params["w"] - 0.1 * want, rtol=1e-5)


def test_the_hardest_examples_along_a_dim_that_is_not_the_last(mesh):
    plan = jzero.make_plan({"w": jnp.ones((8, 64))}, stage=2, mesh=mesh)

    def loss(axis, params, batch):
        return jax.lax.top_k((batch @ params["w"]) ** 2, 4, axis=axis)[0].mean()

    rows = plan.place_batch(np.random.default_rng(0).standard_normal((64, 8), np.float32))
    with pytest.warns(UserWarning, match=r"could not be checked for examples .* \(top_k"):
        jzero.value_and_grad(functools.partial(loss, 0), plan, accumulate=K)({"w": jnp.ones((8, 64))}, rows)
    jzero.value_and_grad(functools.partial(loss, 1), plan, accumulate=K)({"w": jnp.ones((8, 64))}, rows)


# --- bad input ------------------------------------------------------------------------------------------------


def test_bad_arguments(mesh):
    state, plan, placed = sharded(2, mesh)
    loss = loss_of(state)
    with pytest.raises(ValueError, match=r"jzero\.value_and_grad\(accumulate=0\)"):
        jzero.value_and_grad(loss, plan, accumulate=0)
    with pytest.raises(TypeError, match="must be an integer of at least 1, not bool"):
        jzero.value_and_grad(loss, plan, accumulate=True)
    with pytest.raises(ValueError, match=r"reduce='once'.*must be one of 'auto', 'step', 'microbatch'"):
        jzero.value_and_grad(loss, plan, reduce="once")
    with pytest.raises(ValueError, match=r"coupled='maybe'.*must be one of 'auto', 'refuse', 'allow'"):
        jzero.value_and_grad(loss, plan, coupled="maybe")
    with pytest.raises(ValueError, match=r"batch_argnums must be an int of at least 1, or .*Position 0 is the params"):
        jzero.value_and_grad(loss, plan, batch_argnums=0)
    with pytest.raises(ValueError, match=r"called with params alone, and 2 micro-batches.*loss_fn\(params, batch\)"):
        jzero.value_and_grad(lambda p: jnp.mean(p["w"]), plan, accumulate=2)(state.params)
    with pytest.raises(TypeError, match=r"plan must be a jzero.Plan, not dict"):
        jzero.value_and_grad(loss, {})  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"loss_fn must be a function, not int"):
        jzero.value_and_grad(3, plan)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"stage 3 gathers weights in each micro-batch"):
        jzero.value_and_grad(loss, sharded(3, mesh)[1], accumulate=2, reduce="step")
    with pytest.raises(TypeError, match=r"scale must be a jzero\.LossScale or a finite number above 0, not list"):
        jzero.value_and_grad(loss, plan, scale=[2.0])
    with pytest.raises(
        ValueError, match=r"8 devices x 3 micro-batches(.|\n)*64 = 2 x 24 \+ 16(.|\n)*multiple of 24"
    ):
        jzero.value_and_grad(loss, plan, accumulate=3)(state.params, placed)
    with pytest.raises(ValueError, match=r"jzero\.value_and_grad"):
        jzero.value_and_grad(loss, plan, accumulate=2)(placed, state.params)
    with pytest.raises(
        ValueError, match=r"name argument 2, but the function was called with params and 1 other argument"
    ):
        jzero.value_and_grad(loss, plan, accumulate=2, rng_argnums=2)(state.params, placed)


SUMS = {
    "sum": lambda p, b: jnp.sum(_out(p, b) ** 2),
    "3 * mean": lambda p, b: 3 * jnp.mean(_out(p, b) ** 2),
    "0.75 * sum": lambda p, b: 0.75 * jnp.sum(_out(p, b)),
    "sum of losses by arange": lambda p, b: -jnp.log(_out(p, b) ** 2)[jnp.arange(b["y"].shape[0]), b["y"]].sum(),
    "sum / size": lambda p, b: jnp.sum(_out(p, b)) / b["x"].shape[0],
    "sum / counted": lambda p, b: jnp.sum(_out(p, b)) / jnp.ones(b["x"].shape[0]).sum(),
    "mean + L2": lambda p, b: jnp.mean(_out(p, b)) + 0.1 * jnp.sum(p["w"] ** 2),
    "remat": lambda p, b: jax.checkpoint(lambda p: jnp.sum(_out(p, b)))(p),
    "cond": lambda p, b: jax.lax.cond(p["w"][0, 0] > 0, lambda: jnp.sum(_out(p, b)), lambda: _out(p, b).sum() / 2),
    "map": lambda p, b: jax.lax.map(lambda x: jnp.sum(jnp.tanh(x @ p["w"])), b["x"]).mean(),
}


def _out(p, b):
    return jnp.tanh(b["x"] @ p["w"])


def _sum_case(stage):
    params = {"w": jnp.asarray(np.random.default_rng(3).standard_normal((16, 4)), jnp.float32)}
    plan = jzero.make_plan(params, stage=stage, min_shard_bytes=0)
    rows = np.random.default_rng(4).standard_normal((16, 16)).astype(np.float32)
    return params, plan, {"x": rows, "y": np.arange(16) % 4}


@pytest.mark.filterwarnings("ignore:jzero.value_and_grad. the loss could not be checked")
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", SUMS)
def test_a_sum_over_examples_is_summed_and_a_mean_averaged(name, stage):
    params, plan, b = _sum_case(stage)
    want = jax.value_and_grad(SUMS[name])(params, b)
    got = jax.jit(jzero.value_and_grad(SUMS[name], plan, accumulate=2))(plan.place(params), plan.place_batch(b))
    assert models.max_error(got, want) < 1e-5


@pytest.mark.parametrize("weight", [None, lambda b: 1.0])
def test_neither_a_sum_nor_a_mean_is_refused_and_the_remedies_work(weight):
    params, plan, b = _sum_case(2)
    b = plan.place_batch(b)

    def loss(p, b):
        return jnp.sum(_out(p, b) ** 2) + 0.1 * jnp.sum(p["w"] ** 2)

    with pytest.raises(ValueError, match=r"adds up what grows with the batch .*accumulate=1 and reduce="):
        jzero.value_and_grad(loss, plan, accumulate=2, weight=weight)(params, b)
    whole = jzero.value_and_grad(loss, plan, accumulate=1, reduce="microbatch")
    assert models.max_error(jax.jit(whole)(params, b), jax.value_and_grad(loss)(params, b)) < 1e-5

    def of_examples(p, b):
        return jnp.sum(_out(p, b) ** 2) / b["x"].shape[0] + 0.1 * jnp.sum(p["w"] ** 2)

    got = jax.jit(jzero.value_and_grad(of_examples, plan, accumulate=2))(params, b)
    assert models.max_error(got, jax.value_and_grad(of_examples)(params, b)) < 1e-5


@pytest.mark.parametrize("reduce", ["step", "microbatch"])
@pytest.mark.parametrize("weighted", [False, True])
def test_each_leaf_of_aux_is_that_of_the_whole_batch(weighted, reduce):
    """Sums are not weighted, means of all examples neither; a ratio is, and what no example changes is kept."""
    params, plan, b = _sum_case(1)
    b = b | {"m": (jnp.arange(len(b["x"])) % 3 > 0).astype(jnp.float32)}

    def loss(p, b):
        out = _out(p, b)
        rows, m = (out.reshape(len(out), -1) ** 2).mean(-1), b["m"]
        masked = (rows * m).sum() / m.sum()
        aux = {"sum": out.sum(), "mean": out.mean(), "right": (out > 0).sum(), "tokens": m.sum(),
               "classes": out.mean(0), "norm": jnp.sqrt(jnp.sum(p["w"] ** 2)), "step": jnp.int32(100)}  # fmt: skip
        return (masked, aux | {"masked": (out.mean(-1) * m).sum() / m.sum()}) if weighted else (rows.mean(), aux)

    weight = (lambda b: b["m"].sum()) if weighted else None
    vg = jzero.value_and_grad(loss, plan, accumulate=2, has_aux=True, weight=weight, reduce=reduce)
    got = jax.jit(vg)(params, plan.place_batch(b))
    assert models.max_error(got, jax.value_and_grad(loss, has_aux=True)(params, b)) < 1e-5


def test_aux_that_micro_batches_change_is_named():
    params, plan, b = _sum_case(1)

    def run(aux, **options):
        def loss(p, b):
            out = _out(p, b)
            return jnp.mean(out**2), aux(out)

        jax.eval_shape(jzero.value_and_grad(loss, plan, accumulate=2, has_aux=True, **options), params, b)

    for aux in (lambda x: {"it": x.max()}, lambda x: {"it": jnp.sqrt(jnp.mean(x**2))}, lambda x: {"it": x.sum() ** 2},
                lambda x: {"it": (x * (x > 0)).sum() / (x > 0).sum()}, lambda x: {"it": x.sum() + 1.0}):  # fmt: skip
        with pytest.warns(UserWarning, match=r"aux \['it'\] is neither a mean nor a sum over examples"):
            run(aux)
    with pytest.raises(ValueError, match=r"aux \['it'\] is an integer that is not a sum over examples"):
        run(lambda x: {"it": jnp.argmax(x.sum(0)) if x.ndim > 1 else (x.max() * 10).astype(jnp.int32)})
    with pytest.raises(ValueError, match="divides by the same number for every batch, and weight="):
        run(lambda x: (), weight=lambda b: jnp.abs(b["x"]).sum())
    run(lambda x: (), weight=lambda b: b["x"].shape[0])


KEY = jax.random.key(5)


@pytest.mark.parametrize(
    ("loss", "keys", "named"),
    [
        (lambda p, b, k: _dropped(p, b, k), (KEY,), r"argument 2"),
        (lambda p, b, k: _dropped(p, b, k), (jax.random.PRNGKey(5),), r"argument 2"),
        (lambda p, b: _dropped(p, b, KEY), (), r"a key that the loss closes over"),
        (lambda p, b: _dropped(p, b, jax.random.key(1)), (), r"or makes itself"),
    ],
    ids=["typed", "raw", "closed over", "made"],
)
def test_numbers_for_each_example_from_a_key_that_is_not_split_are_refused(loss, keys, named):
    params, plan, b = _sum_case(2)
    b = plan.place_batch(b)
    with pytest.raises(ValueError, match=rf"(?s)same for all parts.*test_gradients.py:\d+.*{named}.*rng_argnums=2"):
        jzero.value_and_grad(loss, plan, accumulate=2)(params, b, *keys)
    if keys:
        jax.jit(jzero.value_and_grad(loss, plan, accumulate=2, rng_argnums=2))(params, b, *keys)


def _dropped(p, b, key):
    return jnp.mean(_out(p, b) * jax.random.bernoulli(key, 0.5, (b["x"].shape[0], 4)))


def test_numbers_that_all_examples_share_need_no_key_of_their_own():
    params, plan, b = _sum_case(2)

    def loss(p, b):
        return jnp.mean((_out(p, b) @ jax.random.normal(KEY, (4, 3))) ** 2)

    got = jax.jit(jzero.value_and_grad(loss, plan, accumulate=2))(params, plan.place_batch(b))
    assert models.max_error(got, jax.value_and_grad(loss)(params, b)) < 1e-5


@pytest.mark.parametrize("stage", [1, 2])
def test_one_reduction_of_a_dim_that_is_shared_with_tensor_parallelism(stage):
    """Its pieces are in the order of both axes, and the loop runs over one of them."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    params, x = {"w": jnp.arange(88.0).reshape(11, 8) / 88}, jnp.cos(jnp.arange(264.0)).reshape(24, 11)

    def loss(params, x):
        return (jnp.sin(x @ params["w"]) ** 2).mean()

    plan = jzero.make_plan(params, stage=stage, mesh=mesh, min_shard_bytes=0, param_specs={"w": jax.P(None, "model")})
    assert plan.layouts[0].state == jax.P(None, ("model", "data"))
    run = jax.jit(jzero.value_and_grad(loss, plan, accumulate=3, reduce="step"))
    _, grads = run(plan.place(params), plan.place_batch(x))
    assert models.max_error(grads, jax.grad(loss)(params, x)) < 1e-6
