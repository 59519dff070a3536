"""`check` on Flax NNX: layers in a Python list and under `nnx.scan`, each fault that a pair can have, and none.

The model has a BatchNorm: its statistics are shaped like biases, and are reduced over the batch in the forward pass.
"""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from mistakes import BOTH, constrained, in_a_loop, in_host_memory, unrolled_by_python, whole
from programs import QUICK

import jzero
from jzero.proof.check import findings

pytestmark = pytest.mark.pod

LAYERS, DIM, ROWS = 3, 128, 64


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(DIM, rngs=rngs)
        self.up, self.down = nnx.Linear(DIM, 2 * DIM, rngs=rngs), nnx.Linear(2 * DIM, DIM, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.relu(self.up(self.norm(x))))


class Net(nnx.Module):
    def __init__(self, rngs, scan):
        self.first, self.norm = nnx.Linear(DIM, DIM, rngs=rngs), nnx.BatchNorm(DIM, rngs=rngs)
        stacked = nnx.split_rngs(splits=LAYERS)(nnx.vmap(Layer, in_axes=0, out_axes=0))
        self.layers = stacked(rngs) if scan else nnx.List([Layer(rngs) for _ in range(LAYERS)])

    def __call__(self, x):
        x = nnx.relu(self.norm(self.first(x)))
        if isinstance(self.layers, Layer):
            run = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            return run(x, self.layers)
        for layer in self.layers:
            x = layer(x)
        return x


def create(scan):
    model = Net(nnx.Rngs(0), scan)
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


def loss_of(model, x):
    return (model(x) ** 2).mean()


def train_step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(loss_of)(model, x)
    optimizer.update(model, grads)
    return loss


def pure(model, loss_of=loss_of):
    """The model's params, its other state, and its loss as a function of both."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss_fn(params, rest, x):
        merged = nnx.merge(graph, params, rest, copy=True)
        return loss_of(merged, x), nnx.state(merged, nnx.Not(nnx.Param))

    return params, rest, loss_fn


def pair_of(stage, scan, **fields):
    fields = {"mesh": jzero.pod("h200").mesh({"data": 8}), "min_shard_bytes": 0, **fields}
    pair = jzero.abstract(lambda: create(scan), stage=stage, **fields)
    return pair, jzero.plan_of(pair)


def found_in(pair, plan, step=train_step, *, donate=(0, 1), batch=None, rows=ROWS):
    x = jax.ShapeDtypeStruct((rows, DIM), jnp.float32, sharding=batch or plan.batch)
    jitted = nnx.jit(step, donate_argnums=donate)
    compiled = jzero.pod("h200").compile(jitted, *pair, x, compiler_options=QUICK)
    return {f.kind: f for f in findings(compiled, plan)}


@pytest.mark.default_cases("scan-2")
@pytest.mark.parametrize("stage", [0, 1, 2])
@BOTH
def test_clean(stage, scan):
    assert found_in(*pair_of(stage, scan)) == {}


def gathering(plan):
    """A step of stage 3: `gather_on_use` round the loss of pure params, by hand."""

    def step(model, optimizer, x):
        params, rest, loss_fn = pure(model)
        gathered = jzero.gather_on_use(loss_fn, plan)
        (loss, rest), grads = jax.value_and_grad(gathered, has_aux=True)(params, rest, x)
        nnx.update(model, rest)
        optimizer.update(model, grads)
        return loss

    return step


def gathering_module(plan):
    """The same, round a loss of the module."""

    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(jzero.gather_on_use(loss_of, plan))(model, x)
        optimizer.update(model, grads)
        return loss

    return step


@pytest.mark.default_cases("scan-gathering_module")
@pytest.mark.parametrize("make", [gathering, gathering_module])
@BOTH
def test_clean_stage_3_with_gather_on_use(scan, make):
    pair, plan = pair_of(3, scan)
    assert found_in(pair, plan, make(plan)) == {}


def tensor_parallel(path, x):
    """Megatron's layout: column, then row."""
    name = jax.tree_util.keystr(path)
    entries = {"up": (None, "model"), "down": ("model", None)}
    found = [e for k, e in entries.items() if f"'{k}'" in name and "kernel" in name]
    return P(*[None] * (x.ndim - 2), *found[0]) if found else P()


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [2, 3])
@BOTH
def test_clean_with_tensor_parallelism(stage, scan):
    model, _ = nnx.eval_shape(lambda: create(scan))
    specs = jax.tree_util.tree_map_with_path(tensor_parallel, nnx.as_pure(nnx.state(model, nnx.Param)))
    pair, plan = pair_of(stage, scan, mesh=jzero.pod("h200").mesh({"model": 2, "data": 4}), param_specs=specs)
    assert any(x.used != P() for x in plan.layouts)
    assert found_in(pair, plan, gathering(plan) if stage == 3 else train_step) == {}


@pytest.mark.default_cases("scan")
@BOTH
def test_no_gather_on_use_and_activations_moved(scan):
    pair, plan = pair_of(3, scan)
    found = found_in(pair, plan)
    assert set(found) == {"weights_not_gathered_on_use", "activations_moved"}
    split = [x for x in plan.layouts if x.stored != x.used]  # vectors, too
    assert f"{len(split)} params are stored split" in found["weights_not_gathered_on_use"].text
    assert found["weights_not_gathered_on_use"].bytes == sum(x.nbytes for x in split)
    assert found["activations_moved"].bytes > 0.02 * plan.param_bytes


@pytest.mark.default_cases("scan")
@BOTH
def test_batch_not_split(scan):
    pair, plan = pair_of(2, scan)
    found = found_in(pair, plan, batch=plan.sharding(P()))
    assert found["batch_not_split"].bytes == ROWS * DIM * 4


@pytest.mark.nightly
@BOTH
def test_gradients_all_reduced(scan):
    pair, plan = pair_of(2, scan)

    def step(model, optimizer, x):
        grads = whole(nnx.grad(loss_of)(model, x), plan.mesh)
        norms = jax.tree.map(lambda g: 1 + jnp.sqrt(jnp.sum(g**2)), grads)  # of the whole gradient
        optimizer.update(model, jax.tree.map(jnp.divide, grads, norms))

    found = found_in(pair, plan, step)
    assert set(found) == {"gradients_all_reduced"}
    assert found["gradients_all_reduced"].bytes >= 0.9 * plan.param_bytes


@pytest.mark.default_cases("scan-3")
@pytest.mark.parametrize("stage", [2, 3])
@BOTH
def test_state_whole(stage, scan):
    pair, plan = pair_of(stage, scan)

    def step(model, optimizer, x):
        train_step(model, optimizer, x)
        for part in (model, optimizer) if stage == 3 else (optimizer,):
            nnx.update(part, whole(nnx.state(part), plan.mesh))

    finding = found_in(pair, plan, step)["state_too_large"]
    copies = sum(x.nbytes for x in plan.layouts if not x.reason) * (3 if stage == 3 else 2)
    assert finding.bytes == copies * 7 // 8
    assert "comes back" in finding.text


@pytest.mark.default_cases("scan")
@BOTH
def test_state_not_donated(scan):
    found = found_in(*pair_of(2, scan), donate=())
    assert set(found) == {"state_not_donated"}


@pytest.mark.nightly
@BOTH
def test_replicated_leaves(scan):
    found = found_in(*pair_of(2, scan, min_shard_bytes=100_000 if scan else 2**20))
    assert "stay whole on every device" in found["state_too_large"].text
    assert "['first']['kernel']" in found["state_too_large"].text


@pytest.mark.default_cases("scan")
@BOTH
def test_weights_gathered_first_of_all(scan):
    pair, plan = pair_of(3, scan)

    def step(model, optimizer, x):
        params, rest, loss_fn = pure(model)
        on_whole = lambda p: loss_fn(whole(p, plan.mesh), rest, x)  # noqa: E731
        grads, rest = jax.grad(on_whole, has_aux=True)(params)
        nnx.update(model, rest)
        optimizer.update(model, grads)

    found = found_in(pair, plan, step, rows=1024)
    finding = found["weights_not_gathered_on_use"]
    assert ("gathered whole" if scan else "still there in the backward pass") in finding.text
    assert finding.bytes >= 0.5 * plan.param_bytes


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("scan", "accumulate"), [(True, in_a_loop), (False, in_a_loop), (True, unrolled_by_python)]
)
def test_reduction_per_microbatch(scan, accumulate):
    pair, plan = pair_of(2, scan)

    def step(model, optimizer, x):
        params, rest, loss_fn = pure(model)
        parts = constrained(x.reshape(4, -1, DIM), lambda _: plan.sharding(P(None, "data")))
        zeros = jax.tree.map(jnp.zeros_like, params)
        grads_of = lambda part: jax.grad(loss_fn, has_aux=True)(params, rest, part)[0]  # noqa: E731
        optimizer.update(model, accumulate(grads_of, zeros, parts))

    finding = found_in(pair, plan, step, rows=4 * ROWS)["reduction_per_microbatch"]
    assert re.search(r"reduced (3\.[6-9]|4\.\d) times", finding.text)


@pytest.mark.default_cases("scan")
@BOTH
def test_offloaded_state_on_device(scan):
    (model, optimizer), plan = pair_of(2, scan)
    moments = nnx.optimizer.OptState
    nnx.update(optimizer, in_host_memory(nnx.state(optimizer, moments)))
    home = jax.tree.map(lambda x: x.sharding, nnx.state(optimizer, moments))

    def step(model, optimizer, x):
        nnx.update(optimizer, jax.device_put(nnx.state(optimizer, moments), jax.memory.Space.Device))
        train_step(model, optimizer, x)
        nnx.update(optimizer, jax.device_put(nnx.state(optimizer, moments), home))

    found = found_in((model, optimizer), plan, step)
    assert set(found) == {"state_not_offloaded"}
    assert found["state_not_offloaded"].bytes >= 0.9 * 2 * plan.param_bytes // 8


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.table, self.hidden = nnx.Embed(2048, DIM, rngs=rngs), nnx.Linear(DIM, DIM, rngs=rngs)

    def __call__(self, tokens):
        return self.table.attend(nnx.relu(self.hidden(self.table(tokens))))


@pytest.mark.remedy("more_than_closed_form", "at every stage it adds the gradients of a lookup")
@pytest.mark.default_cases("2")
@pytest.mark.parametrize("stage", [1, 2])
def test_a_tied_table_whose_gradients_nobody_adds(stage):
    """The remedy is one clause, and works; and the closed form is what is sent then."""
    pod = jzero.pod("h200")

    def tied():
        model = Tied(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    model, optimizer = jzero.abstract(tied, stage=stage, mesh=pod.mesh({"data": 8}))
    plan = jzero.plan_of(optimizer)
    tokens = jax.ShapeDtypeStruct((ROWS, 128), jnp.int32, sharding=plan.batch)

    def loss_fn(model, tokens):
        return optax.softmax_cross_entropy_with_integer_labels(model(tokens), tokens).mean()

    def program(loss_fn):
        @functools.partial(nnx.jit, donate_argnums=(0, 1))
        def step(model, optimizer, tokens):
            optimizer.update(model, nnx.grad(loss_fn)(model, tokens))

        return pod.compile(step, model, optimizer, tokens, plan=plan, compiler_options=QUICK)

    (finding,) = findings(program(loss_fn), plan)
    assert finding.kind == "more_than_closed_form"
    assert "['table']['embedding'][2048,128]" in finding.remedy
    remedy, *_ = finding.remedy.removeprefix("loss_fn = ").partition(", or ")
    found = findings(program(eval(remedy, {"jzero": jzero, "loss_fn": loss_fn, "plan": plan})), plan)
    assert (found, found.notes) == ((), ())


class Average(nnx.Variable):
    """Of a param; not trained."""


def test_a_step_that_never_updates_a_model_with_an_average():
    """Without an update params are known by their shapes alone, which are those of the average too."""
    pod = jzero.pod("h200")

    def averaged():
        model, optimizer = create(False)
        params = nnx.as_pure(nnx.state(model, nnx.Param))
        model.average = nnx.data(jax.tree.map(Average, params))
        return model, optimizer

    pair = jzero.abstract(averaged, stage=2, mesh=pod.mesh({"data": 8}), min_shard_bytes=0)
    plan = jzero.plan_of(pair)

    def step(model, optimizer, x):
        return jzero.value_and_grad(loss_of, plan, accumulate=2)(model, x)[0]

    x = jax.ShapeDtypeStruct((ROWS, DIM), jnp.float32)
    program = pod.compile(jzero.jit(step, plan), *pair, x, compiler_options=QUICK)
    (finding,) = findings(program, plan)
    assert finding.kind == "not_trained"
    assert "never updates" in finding.text
