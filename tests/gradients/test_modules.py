"""`value_and_grad` of NNX modules: gradients, and all that a loss changes in a module, are those of a plain loop."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from models import max_error, specs

import jzero
from jzero.core.dependence import passed_on
from jzero.core.jaxprs import trace

K, ROWS, DIM = 2, 32, 16


class Layer(nnx.Module):
    def __init__(self, rngs, statistics):
        self.norm = nnx.BatchNorm(DIM, rngs=rngs) if statistics else nnx.LayerNorm(DIM, rngs=rngs)
        self.dense = nnx.Linear(DIM, DIM, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        return x + self.drop(nnx.gelu(self.dense(self.norm(x))))


class Net(nnx.Module):
    """A stack of layers under scan and remat; each of them has keys, and statistics where asked for."""

    def __init__(self, statistics):
        rngs = nnx.Rngs(0, dropout=1)
        make = functools.partial(Layer, statistics=statistics)
        self.layers = nnx.split_rngs(splits=2)(nnx.vmap(make, in_axes=0, out_axes=0))(rngs)
        self.last = nnx.Linear(DIM, 5, rngs=rngs)

    def __call__(self, x):
        one = nnx.remat(lambda layer, x: layer(x), prevent_cse=False)
        run = nnx.scan(lambda x, layer: one(layer, x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.last(run(x, self.layers))


def create(statistics, wrt=nnx.Param):
    model = Net(statistics)
    return model, nnx.Optimizer(model, optax.sgd(0.5, momentum=0.9), wrt=wrt)


def sharded(statistics, stage, mesh, wrt=nnx.Param, **fields):
    pair = create(statistics, wrt)
    model, optimizer = jzero.shard(pair, stage=stage, mesh=mesh, min_shard_bytes=0, **fields)
    return model, optimizer, jzero.plan_of(optimizer)


def data(seed=0):
    return np.random.default_rng(seed).standard_normal((ROWS, DIM), dtype=np.float32)


def loss_of(model, x):
    return (model(x) ** 2).mean()


def values(tree):
    return nnx.as_pure(nnx.state(tree))


def plain_step(plan):
    """The loop that `value_and_grad` stands for."""

    def step(model, optimizer, x):
        runs = [nnx.value_and_grad(loss_of)(model, part) for part in plan.micro_batches(x, K)]
        grads = jax.tree.map(lambda *g: sum(g) / K, *[g for _, g in runs])
        optimizer.update(model, grads)
        return sum(loss for loss, _ in runs) / K, grads

    return nnx.jit(step)


@pytest.mark.default_cases("keys-2")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["keys", "statistics"])
def test_steps_of_micro_batches_are_those_of_a_plain_loop(kind, stage, mesh):
    """Loss, gradients, params, statistics, counts; below stage 2 keys differ by device, unless there are statistics."""
    statistics = kind == "statistics"
    model, optimizer, plan = sharded(statistics, stage, mesh)
    plain, plain_optimizer = create(statistics)
    theirs = plain_step(plan)
    reduce = "auto" if statistics or stage > 1 else "microbatch"

    def step(model, optimizer, x):
        loss, grads = jzero.value_and_grad(loss_of, plan, accumulate=K, reduce=reduce)(model, x)
        optimizer.update(model, grads)
        return loss, grads

    ours = jzero.jit(step, plan)
    for seed in range(2):
        want, want_grads = theirs(plain, plain_optimizer, data(seed))
        loss, grads = ours(model, optimizer, data(seed))
        np.testing.assert_allclose(loss, want, rtol=1e-6)
        assert jax.tree.structure(grads) == jax.tree.structure(want_grads)
        assert max_error(nnx.as_pure(grads), nnx.as_pure(want_grads)) < 1e-6
    assert max_error(values(model), values(plain)) < 1e-6
    assert specs(nnx.as_pure(nnx.state(model, nnx.Param))) == [x.stored for x in plan.layouts]
    assert int(model.layers.drop.rngs.count[...].max()) == 2 * K


@pytest.mark.default_cases("3-microbatch")
@pytest.mark.parametrize(("stage", "reduce"), [(1, "step"), (2, "microbatch"), (3, "microbatch")])
def test_weights_of_micro_batches_and_aux(stage, reduce, mesh):
    """Of a masked mean, as with a tree of params: the loss and the gradient of one batch, and counts are summed."""
    model, _, plan = sharded(False, stage, mesh)
    model.eval()  # no dropout
    mask = (np.random.default_rng(5).random(ROWS) < 0.5).astype(np.float32)
    mask[:3] = 0

    def loss(model, batch):
        out = model(batch["x"])
        return ((out**2).mean(-1) * batch["mask"]).sum() / batch["mask"].sum(), {"hits": (out > 0).sum()}

    options = {"has_aux": True, "weight": lambda batch: batch["mask"].sum(), "reduce": reduce}
    vg = nnx.jit(jzero.value_and_grad(loss, plan, accumulate=K, **options))
    batch = {"x": data(), "mask": mask}
    (value, aux), grads = vg(model, plan.place_batch(batch))
    plain = create(False)[0]
    plain.eval()
    (want, want_aux), want_grads = nnx.jit(nnx.value_and_grad(loss, has_aux=True))(plain, batch)
    assert float(value) == pytest.approx(float(want), rel=1e-6)
    assert int(aux["hits"]) == int(want_aux["hits"])
    assert max_error(nnx.as_pure(grads), nnx.as_pure(want_grads)) < 1e-6


class Noisy(nnx.Module):
    """Returns what it draws."""

    def __init__(self):
        self.w, self.rngs = nnx.Param(jnp.ones((DIM, 8))), nnx.Rngs(dropout=1)

    def __call__(self, x):
        return x @ self.w[...], jax.random.uniform(self.rngs.dropout())


@pytest.mark.parametrize(("stage", "reduce"), [(1, "step"), (2, "microbatch")])
def test_each_micro_batch_and_with_one_reduction_each_device_draws_its_own_numbers(stage, reduce, mesh):
    model = Noisy()
    key = model.rngs.dropout.key[...]
    pair = jzero.shard((model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)), stage=stage, mesh=mesh)
    plan = jzero.plan_of(pair)

    def loss(model, x):
        out, drawn = model(x)
        return out.mean(), drawn

    vg = nnx.jit(jzero.value_and_grad(loss, plan, accumulate=K, has_aux=True))
    (_, drawn), _ = vg(model, plan.place_batch(data()))
    keys = [key] if reduce == "microbatch" else [jax.random.fold_in(key, device) for device in range(8)]
    each = [jax.random.uniform(jax.random.fold_in(k, i)) for k in keys for i in range(K)]
    assert float(drawn) == pytest.approx(float(np.mean(each)), rel=1e-6)
    assert int(model.rngs.dropout.count[...]) == K
    assert model.rngs.dropout.key[...] == key


class Asked(nnx.Module):
    """Draws from what the caller gives it, and counts its calls in another object."""

    def __init__(self):
        self.w = nnx.Param(jnp.ones((DIM, 8)))

    def __call__(self, x, rngs):
        return nnx.Dropout(0.5)(x @ self.w[...], rngs=rngs)


@pytest.mark.parametrize("accumulate", [1, K])
def test_objects_in_other_arguments_advance_and_keywords_arrive(accumulate, mesh):
    """Not jitted; the params are a module, or a tree."""
    plan = jzero.make_plan({"w": jnp.ones((DIM, 8))}, stage=2, mesh=mesh, min_shard_bytes=0)
    rngs, calls = nnx.Rngs(dropout=3), nnx.Variable(jnp.int32(0))
    counter = nnx.Dict(calls=calls, table=nnx.Variable(jnp.ones((8, 8))))  # whole on every device, and no batch

    def loss(model, x, rngs, counter, *, scale):
        counter.calls.set_value(counter.calls[...] + 1)
        out = model(x, rngs) if isinstance(model, Asked) else nnx.Dropout(0.5)(x @ model["w"], rngs=rngs)
        return (out**2).mean() * scale

    for params in (Asked(), {"w": jnp.ones((DIM, 8))}):
        start = int(rngs.dropout.count[...])
        vg = jzero.value_and_grad(loss, plan, accumulate=accumulate, scale=8.0)
        loss_, grads = vg(params, plan.place_batch(data()), rngs, counter, scale=2.0)
        twin = nnx.Rngs(dropout=3)
        twin.dropout.count.set_value(jnp.uint32(start))
        other = nnx.Dict(calls=nnx.Variable(jnp.int32(0)))
        parts = plan.micro_batches(plan.place_batch(data()), accumulate)
        want = [loss(Asked(), x, twin, other, scale=2.0) for x in parts]
        assert float(loss_) == pytest.approx(float(np.mean(want)), rel=1e-6)
        assert jax.tree.leaves(grads)[0].shape == (DIM, 8)
        assert int(rngs.dropout.count[...]) == start + accumulate
    assert int(calls[...]) == 2 * accumulate


def test_gradients_of_those_params_that_the_optimizer_trains(mesh):
    model, optimizer, plan = sharded(True, 2, mesh, wrt=nnx.All(nnx.Param, nnx.PathContains("last")))
    before = values(model.layers)["dense"]
    _, grads = jzero.value_and_grad(loss_of, plan, accumulate=K)(model, plan.place_batch(data()))
    assert set(grads) == {"last"}
    optimizer.update(model, grads)
    assert max_error(values(model.layers)["dense"], before) == 0


def test_frozen_params_of_a_tree_have_no_gradient(mesh):
    params = {"w": jnp.ones((DIM, 8)), "base": jnp.ones((DIM, 8))}
    plan = jzero.make_plan(params, stage=3, mesh=mesh, min_shard_bytes=0, trainable={"w": True, "base": False})

    def loss(params, x, rngs):
        return (nnx.Dropout(0.5)(x @ (params["w"] + params["base"]), rngs=rngs) ** 2).mean()

    for accumulate in (1, K):
        vg = jzero.value_and_grad(loss, plan, accumulate=accumulate)
        _, grads = vg(plan.place(params), plan.place_batch(data()), nnx.Rngs(dropout=3))
        assert grads["base"] is None
        assert grads["w"].shape == (DIM, 8)


def test_random_numbers_that_a_loss_keeps_are_those_of_all_devices(mesh):
    plan = jzero.make_plan({"w": jnp.ones((DIM, 8))}, stage=1, mesh=mesh, min_shard_bytes=0)
    noise = nnx.Variable(jnp.zeros(4))

    def loss(params, x, rngs, kept):
        kept["noise"].set_value(rngs.noise.uniform((4,)))
        return ((x @ params["w"]) ** 2).mean()

    vg = {how: jzero.value_and_grad(loss, plan, accumulate=K, reduce=how) for how in ("step", "auto")}
    given = {"w": jnp.ones((DIM, 8))}, plan.place_batch(data()), nnx.Rngs(noise=3)
    says = r"(?s)keeps random numbers in the module:.*\['noise'\].*different values.*Leave reduce out"
    with pytest.raises(ValueError, match=says):
        vg["step"](*given, nnx.Dict(noise=noise))
    vg["auto"](*given, nnx.Dict(noise=noise))
    assert len({np.asarray(s.data).tobytes() for s in noise[...].addressable_shards}) == 1
    assert np.asarray(noise[...]).any()
    with pytest.raises(ValueError, match=r"sets an nnx.Variable that is an argument by itself.*nnx.Dict"):
        vg["auto"](*given, {"noise": noise})


def sow(model, x):
    model.seen = nnx.Intermediate(model(x).mean())
    return loss_of(model, x)


def set_param(model, x):
    model.last.bias.set_value(model.last.bias[...] * 0.5)
    return loss_of(model, x)


def narrow(model, x):
    loss = loss_of(model, x)
    model.layers.norm.mean.set_value(model.layers.norm.mean[...].astype(jnp.bfloat16))
    return loss


def new_keys(model, x):
    keys = model.layers.drop.rngs.key
    keys.set_value(jax.vmap(lambda k: jax.random.fold_in(k, 1))(keys[...]))
    return loss_of(model, x)


def contrastive(model, x):
    y = model(x)
    return -jnp.diag(jax.nn.log_softmax(y @ y.T)).mean()


def one_key(model, x):
    return (model(x) * jax.random.bernoulli(model.layers.drop.rngs.key[0], 0.5, x.shape[:1])[:, None]).mean()


STEP = {"reduce": "step"}


@pytest.mark.parametrize(
    ("loss", "statistics", "options", "says"),
    [
        (loss_of, True, STEP, r'\(reduce="step"\): the loss changes state of the module based on .*mean.*rows'),
        (loss_of, True, {"coupled": "refuse"}, r"couples examples"),
        (contrastive, False, {}, r"couples examples \(dot_general.*coupled=\"allow\""),
        (sow, False, {}, r"value_and_grad: the loss adds, removes or replaces the Variables \['seen'\].*as aux"),
        (set_param, False, {}, r"sets 1 of the 6 params that it trains"),
        (narrow, True, {}, r"\['layers'\]\['norm'\]\['mean'\]  f32\[2,16\]  becomes bf16\[2,16\]"),
        (new_keys, False, STEP, r"replaces random keys of the module:\n  \['layers'\]\['drop'\]\['rngs'\]\['key'\]"),
        (one_key, False, {"reduce": "microbatch"}, r"same for all parts.*the module.*counts advance"),
    ],
    ids=["step", "refuse", "contrastive", "sow", "params", "dtype", "keys", "one key"],
)  # fmt: skip
def test_what_micro_batches_of_a_module_cannot_do(loss, statistics, options, says, mesh):
    model, _, plan = modules(statistics, mesh)
    with pytest.raises(ValueError, match=f"(?s){says}"):
        jzero.value_and_grad(loss, plan, accumulate=K, **options)(model, plan.place_batch(data()))
    assert max_error(values(model), values(create(statistics)[0])) == 0


def masked(model, x):
    return (model(x) ** 2).sum() / (x > 0).sum()


def with_decay(model, x):
    return (model(x) ** 2).sum() + 0.1 * (model.last.kernel[...] ** 2).sum()


def softmax_over_the_batch(model, x):
    y = model(x)
    e = jnp.exp(y - jax.lax.stop_gradient(y).max(0))
    return (e / e.sum(0) * y).sum(0).mean()


def log_of_mean(model, x):
    return jnp.log(jnp.exp(model(x)).mean())


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (masked, "Pass weight="), (with_decay, "adds up what grows with the b"),
        (contrastive, r"couples examples \(dot_general"), (softmax_over_the_batch, "couples examples"),
        (log_of_mean, "couples examples"),
    ],
)  # fmt: skip
def test_kept_statistics_excuse_no_other_loss(loss, says, mesh):
    """Batch statistics couple examples, and no more is accepted of a module that has some, or keeps the loss."""
    for statistics in (False, True)[: 1 if loss is with_decay else 2]:  # jzero cannot tell how BatchNorm grows
        _refused_with_counters(*modules(statistics, mesh)[::2], loss, says)


def _refused_with_counters(model, plan, loss, says):
    def counted(model, x, count):
        value = loss(model, x)
        count["seen"].set_value(count["seen"][...] + x.sum())
        count["loss"].set_value(0.9 * count["loss"][...] + 0.1 * value)
        return value

    count = nnx.Dict(seen=nnx.Variable(jnp.float32(0)), loss=nnx.Variable(jnp.float32(0)))
    with pytest.raises(ValueError, match=says):
        jzero.value_and_grad(counted, plan, accumulate=K)(model, plan.place_batch(data()), count)
    assert count["seen"][...] == 0


class Normed(nnx.Module):
    """Statistics of three kinds: a variance computed around a mean that is not kept, a covariance, a maximum."""

    def __init__(self):
        self.w = nnx.Param(jnp.ones((DIM, DIM)))
        self.mean, self.var, self.top = (nnx.BatchStat(jnp.zeros(DIM)) for _ in range(3))
        self.cov = nnx.BatchStat(jnp.eye(DIM))

    def __call__(self, x):
        x = x @ self.w[...]
        mean, var, top = x.mean(0), jnp.var(x, 0), jnp.abs(x).max(0)
        for kept, new in ((self.mean, mean), (self.var, var), (self.top, top)):
            kept.set_value(0.9 * kept[...] + 0.1 * new)
        self.cov.set_value(x.T @ x / len(x))
        return (x - mean) / jnp.sqrt(var + 1e-5) / top @ jnp.linalg.cholesky(self.cov[...] + jnp.eye(DIM))


def test_examples_may_be_coupled_by_all_statistics_that_a_module_keeps(mesh):
    model = Normed()
    pair = jzero.shard((model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)), stage=2, mesh=mesh)

    def run(model, x, coupled):
        vg = jzero.value_and_grad(loss_of, jzero.plan_of(pair), accumulate=K, coupled=coupled)
        return vg(model, x)[0]

    nnx.eval_shape(functools.partial(run, coupled="auto"), pair[0], data())
    with pytest.raises(ValueError, match="couples examples"):
        nnx.eval_shape(functools.partial(run, coupled="refuse"), pair[0], data())


def test_one_micro_batch_may_couple_examples(mesh):
    """With `reduce_dtype` at stage 2 a loss that changes state of the batch is reduced in each micro-batch: in one."""
    model = Normed()
    pair = jzero.shard((model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)), stage=2, mesh=mesh,
                       reduce_dtype="bfloat16")  # fmt: skip

    def run(model, x):
        return jzero.value_and_grad(contrastive, jzero.plan_of(pair))(model, x)[0]

    nnx.eval_shape(run, pair[0], data())


@pytest.mark.parametrize("stage", [1, 2])
def test_what_may_couple_examples_sees_whole_micro_batches_at_every_stage(stage, mesh):
    model, _, plan = sharded(False, stage, mesh)
    model.eval()  # no dropout
    x = plan.place_batch(data())
    loss, _ = jzero.value_and_grad(contrastive, plan, accumulate=K, coupled="allow")(model, x)
    assert float(loss) == pytest.approx(sum(float(contrastive(model, part)) for part in plan.micro_batches(x, K)) / K)


@functools.cache
def modules(statistics, mesh):
    return sharded(statistics, 1, mesh)


def test_arguments_of_the_wrong_kind(mesh):
    model, _, plan = modules(False, mesh)
    vg, x = jzero.value_and_grad(loss_of, plan, accumulate=K), plan.place_batch(data())
    with pytest.raises(TypeError, match=r"params in several nnx.Modules. Pass one that holds them"):
        vg({"a": model}, x)
    with pytest.raises(ValueError, match=r"(?s)not the one that the plan was made for.*\['last'\]\['kernel'\].*absent"):
        vg(Noisy(), x)
    with pytest.raises(ValueError, match=r"(?s)cannot split the batch evenly:\n  an NNX object  no array"):
        vg(model, Noisy())
    with pytest.raises(ValueError, match=r"rng_argnums names argument 2, an NNX object.*leave it out"):
        jzero.value_and_grad(lambda m, x, r: loss_of(m, x), plan, accumulate=K, rng_argnums=2)(model, x, nnx.Rngs(0))
    narrow_plan = sharded(True, 1, mesh, reduce_dtype="float32")
    with pytest.raises(ValueError, match=r"stage 1 does not support reduce_dtype. Pass stage=2"):
        jzero.value_and_grad(loss_of, narrow_plan[2], accumulate=K)(narrow_plan[0], x)


def test_results_that_are_arguments():
    """Through remat, branches and loops; a value that changes once is not passed on."""

    def fn(a, b, c):
        def body(carry, x):
            return (carry[0], carry[1] + 1.0), x

        (kept, grown), stack = jax.lax.scan(body, (a, b), c)
        same = jax.lax.cond(b.sum() > 0, lambda: (kept, a), lambda: (kept, b))
        turned = jax.lax.fori_loop(0, 2, lambda i, s: (s[1], s[0], s[2]), (a, b, stack))
        return [*jax.checkpoint(lambda a, b: (b, a * 1.0))(a, b), kept, grown, stack, *same, *turned]

    jaxpr, consts = trace(fn, *(jnp.ones(3),) * 2, jnp.ones((2, 3)))
    assert passed_on(jaxpr, consts) == [1, None, 0, None, 2, 0, None, None, None, 2]
