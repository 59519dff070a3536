"""`jzero.fit`: what it chooses fits, what it says is too large is, and its closed forms are those of the pieces."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jzero
from jzero.proof.fitting.candidates import Candidate, Task
from jzero.proof.fitting.fit import Search, choice
from jzero.proof.fitting.flops import flops_of
from jzero.proof.fitting.options import Option, layouts, options, smaller
from jzero.proof.fitting.rates import GPUS
from jzero.proof.fitting.seconds import Seconds

WIDTH, LAYERS = 512, 4
PARAMS = LAYERS * 8 * WIDTH**2
ROWS = 2048
"""Of a device in a step."""


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        hidden = nn.gelu(nn.Dense(4 * WIDTH, use_bias=False, param_dtype=jnp.bfloat16)(x))
        return x + nn.Dense(WIDTH, use_bias=False, param_dtype=jnp.bfloat16)(hidden)


class Net(nn.Module):
    remat: bool

    @nn.compact
    def __call__(self, x):
        for _ in range(LAYERS):
            x = (nn.remat(Block) if self.remat else Block)()(x)
        return x


@functools.cache
def net(remat):
    return Net(remat)


ADAM = optax.adamw(1e-3)


def create_state(*, remat=True):
    params = net(remat).init(jax.random.key(0), jnp.ones((1, WIDTH), jnp.bfloat16))["params"]
    return TrainState.create(apply_fn=net(remat).apply, params=params, tx=ADAM)


def step(state, batch, *, accumulate=1):
    def loss_of(params, batch):
        return (state.apply_fn({"params": params}, batch["x"]).astype(jnp.float32) ** 2).mean()

    loss, grads = jzero.value_and_grad(loss_of, jzero.plan_of(state), accumulate=accumulate)(state.params, batch)
    return state.apply_gradients(grads=grads), loss


@functools.cache
def pod(hosts=1):
    return jzero.pod("h100", hosts=hosts)


def batch_of(machine, rows=ROWS):
    return {"x": jax.ShapeDtypeStruct((rows * len(machine.devices), WIDTH), jnp.bfloat16)}


def fit(memory, hosts=1, create=create_state, train=step, **options):
    machine = pod(hosts)
    return jzero.fit(create, train, batch_of(machine), pod=machine, memory_bytes=memory, **options)


def compiled(found, candidate):
    """Bytes of a device, as a user compiles it from the printed choice."""
    option = candidate.option
    mesh = found.pod.mesh(option.axes)
    state = jzero.abstract(functools.partial(create_state, **option.offered), option.config, mesh=mesh)
    train = functools.partial(step, accumulate=option.accumulate)
    program = found.pod.compile(train, state, batch_of(found.pod), donate_argnums=0)
    return jzero.explain(program, jzero.plan_of(state)).memory.total


def test_with_much_memory_it_chooses_the_simplest():
    found = fit(60 * 10**9)
    option = found.best.option
    assert (option.config, option.accumulate, dict(option.offered)) == (jzero.ZeroConfig(stage=1), 1, {"remat": False})
    assert found.refused == ()
    assert len(found.compiled) == 1
    assert "jzero.ZeroConfig(stage=1)" in str(found)
    assert "create_state(remat=False)" in str(found)


def test_what_it_chooses_fits_and_what_it_refuses_does_not():
    """Also when a user compiles both; each compile corrects what is known of the activations."""
    found = fit(40 * 10**6, compiles=3)
    assert len(found.compiled) > 3
    assert "more than 3 programs were compiled" in str(found)
    assert compiled(found, found.best) <= found.limit
    assert found.predicted(found.best) == pytest.approx(compiled(found, found.best), rel=0.01)
    assert len(found.refused) == 3
    assert all(c.seconds.total < found.best.seconds.total for c in found.refused)
    assert compiled(found, found.refused[0]) > found.limit
    assert "faster, but too large:" in str(found)


@pytest.mark.nightly
def test_where_nothing_fits_it_says_how_many_are_enough():
    found = fit(14 * 10**6)
    assert found.best is None
    assert found.needed in (16, 32, 64)
    assert f"by the closed forms {found.needed} h100 are enough." in str(found)
    with pytest.raises(ValueError, match=r"jzero\.fit: nothing fits"):
        _ = found.config


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, WIDTH, param_dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.up(x))


def nnx_pair():
    model = Layer(nnx.Rngs(0))
    return model, nnx.Optimizer(model, ADAM, wrt=nnx.Param)


def nnx_step(model, optimizer, batch):
    def loss_of(model, batch):
        return (model(batch["x"]) ** 2).mean()

    loss, grads = jzero.value_and_grad(loss_of, jzero.plan_of(optimizer))(model, batch)
    optimizer.update(model, grads)
    return loss


def test_an_nnx_pair_whose_functions_offer_nothing():
    found = fit(60 * 10**9, create=nnx_pair, train=nnx_step)
    assert found.config.stage == 1
    assert not found.best.option.offered
    assert "model, optimizer = jzero.shard(create_state, config, mesh=mesh)" in str(found)


def task(hosts=1, **fields):
    return Task(create_state, step, (batch_of(pod(hosts)),), pod(hosts), GPUS["h100"], **fields)


@pytest.mark.unit
def test_flops_are_those_of_the_matmuls():
    """Two per weight and row forward, four backward, two more under remat."""
    rows = ROWS * 8
    flops = {remat: task()._traced((("remat", remat),)).flops for remat in (False, True)}
    first = 2 * rows * WIDTH * 4 * WIDTH  # of the input there is no gradient
    assert flops[False] == pytest.approx(6 * rows * PARAMS - first)
    again = flops[True] - flops[False]
    assert again == rows * PARAMS  # of each block the first matmul

    def looped(x, kernel):
        y = jax.lax.scan(lambda h, w: (h @ w, None), x, jnp.ones((3, 8, 8)))[0]
        return jax.lax.conv_general_dilated(y[None, :, :, None], kernel, (1, 1), "SAME", dimension_numbers=DIMS)

    jaxpr = jax.make_jaxpr(looped)(jnp.ones((4, 8)), jnp.ones((3, 3, 1, 5)))
    assert flops_of(jaxpr.jaxpr) == 3 * 2 * 4 * 8 * 8 + 2 * 4 * 8 * 5 * 9


DIMS = ("NHWC", "HWIO", "NHWC")


@pytest.mark.unit
def test_the_time_is_the_formula():
    time = Seconds(math=4.0, wire=2.0, update=0.5, pcie=0.25, hidden=0.9)
    assert time.total == pytest.approx(4.0 + 0.1 * 2.0 + 0.5 + 0.25)
    assert dataclasses.replace(time, wire=8.0).total == pytest.approx(8.0 + 0.1 * 4.0 + 0.75)


@pytest.mark.unit
def test_time_comes_from_the_closed_forms_of_the_option():
    this = task(hosts=2)
    (one,) = (c for c in this.candidates() if str(c.option) == "stage 3, 2 micro-batches, remat")
    state = this.state(one.option.config, one.option.axes, one.option.offered)
    args = (state, batch_of(pod(2)))
    uses = jzero.param_uses(functools.partial(step, accumulate=2), *args)
    estimate = jzero.estimate(jzero.plan_of(state), tx=ADAM, uses=uses)
    rates = GPUS["h100"]
    wire = estimate.wire_seconds(within_host=rates.within_host, between_hosts=rates.between_hosts)
    assert one.seconds.wire == pytest.approx(wire, rel=1e-3)
    assert one.seconds.update == pytest.approx(2 * (12 + 4) * PARAMS / 16 / rates.memory, rel=0.01)
    (away,) = (c for c in this.smaller([one], lower_precision=False) if str(c.option) == MOVED)
    assert away.seconds.pcie == pytest.approx(12 * PARAMS / 16 / rates.pcie, rel=0.01)
    assert away.estimate.opt_state < one.estimate.opt_state / 100


MOVED = "stage 3, state on the host, 2 micro-batches, remat"


@pytest.mark.unit
def test_options_are_what_configs_accept():
    (stage_0, *_), kinds = list(options(2, 8, [1], [])), {str(o) for o in options(2, 8, [1], [])}
    assert {"stage 0", "stage 2", "stage 3, weights kept", "stage 3, hpZ", "stage 2, HSDP"} <= kinds
    assert len(list(layouts(1, 8))) == 5, "one host needs no axis over hosts"
    assert not any(o.config.params_on_host for o in smaller(stage_0, lower_precision=False)), "stage 3 alone fetches"
    (some,) = (o for o in options(1, 8, [1], [], [10**9]) if o.config.kept_gathered_bytes)
    assert str(some) == "stage 3, 1.00 GB of weights kept"
    lower = {str(o.config.moment_dtype) for o in smaller(stage_0, lower_precision=True)}
    assert lower == {"None", "bfloat16", "int8"}


@pytest.mark.unit
def test_odd_numbers_of_examples_and_what_is_fixed():
    """Three examples per device have no two micro-batches; what a partial fixes does not vary."""
    fixed = functools.partial(create_state, remat=True)
    this = Task(fixed, step, (batch_of(pod(), rows=3),), pod(), GPUS["h100"])
    assert this.accumulates == [1, 3]
    assert this.offers == ()
    assert {c.examples for c in this.candidates()} == {1, 3}


@pytest.mark.unit
def test_weights_stay_in_steps_between_none_and_all():
    """Of eight equal kernels two, four and six; each step is faster by its gathers, and larger by them."""
    task = Task(create_state, step, (batch_of(pod()),), pod(), GPUS["h100"])
    kernel = 2 * 4 * WIDTH**2
    assert task.kept == [4_200_000, 8_390_000, 12_600_000]  # 2, 4, 6 kernels of 2,097,152 bytes
    plain = [c for c in task.candidates() if c.option.config.stage == 3 and c.option.config.reshard_after_forward]
    plain = [c for c in plain if not c.option.offered["remat"] and c.examples == ROWS]
    found = {c.option.config.kept_gathered_bytes: c for c in plain}
    sizes = [found[n].estimate.working for n in (0, *task.kept)]
    assert [b - a for a, b in itertools.pairwise(sizes)] == [2 * kernel] * 3
    wires = [found[n].estimate.wire_psi for n in (0, *task.kept)]
    # the first kernel, whose input has no gradient, is gathered once in any case
    assert wires == pytest.approx([2.875, 2.75, 2.5, 2.25], rel=0.02)


@pytest.mark.unit
def test_of_those_within_two_percent_the_simplest_is_chosen():
    def one(total, *complexity):
        some = types.SimpleNamespace
        return some(seconds=some(total=total), option=some(complexity=complexity))

    fast, simple, slow = one(101.9, 2), one(102.1, 1), one(105.0, 0)
    assert choice([slow, fast, simple]) is simple
    assert choice([]) is None


@pytest.mark.unit
def test_what_it_prints_can_be_pasted():
    every = smaller(next(options(1, 8, [1], [])), lower_precision=True)
    (option,) = (o for o in every if str(o) == "stage 0, moments int8")
    assert option.fields() == {"stage": 0, "moment_dtype": "int8"}
    assert jzero.ZeroConfig(**option.fields()) == option.config


@pytest.mark.unit
@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"create": 3}, TypeError, r"jzero\.fit: create_state must be a function"),
        ({"train": 3}, TypeError, r"jzero\.fit\(step=3\): step must be a function"),
        ({"pod": "h100"}, TypeError, "pod must be a jzero.Pod, from"),
        ({"memory_bytes": -1}, ValueError, "memory_bytes must be an integer of at least 1"),
        ({"rates": {"network": 1e9}}, ValueError, r"jzero\.fit: rates has no 'network'"),
        ({"rates": {"reached": 1.5}}, ValueError, r"jzero\.fit: rates: reached must be a number above 0 and at most 1"),
        ({"batch": {"x": jnp.ones((64, WIDTH)), "rate": 0.1}}, TypeError, "the batch must hold arrays"),
        ({"batch": jax.ShapeDtypeStruct((12, WIDTH), jnp.bfloat16)}, ValueError, "must be multiples of the pod's 8"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)  # fmt: skip
def test_bad_input(given, error, message):
    good = {"create": create_state, "train": step, "batch": batch_of(pod()), "pod": pod()} | given
    with pytest.raises(error, match=message):
        jzero.fit(good.pop("create"), good.pop("train"), good.pop("batch"), **good)


@pytest.mark.unit
def test_stage_3_is_tried_before_it_is_called_too_large():
    """What a program of stage 2 took beyond its estimate may be what stage 3 does not hold."""
    took = {(2, False): 300, (2, True): 80, (3, False): 90}

    def candidate(stage, remat, seconds):
        estimate = types.SimpleNamespace(total=40, host_per_node=0, params=1, opt_state=1)
        option = Option(jzero.ZeroConfig(stage=stage), {"data": 8}, 1, {"remat": remat})
        return Candidate(option, types.SimpleNamespace(total=seconds), 1, lambda: estimate)

    known = [candidate(2, False, 0.7), candidate(2, True, 1.0), candidate(3, False, 0.75)]
    task = types.SimpleNamespace(
        candidates=lambda: known, smaller=lambda large, lower_precision: [],
        compiled_bytes=lambda o: took[o.config.stage, o.offered["remat"]],
        pod=types.SimpleNamespace(devices=[0] * 8, gpu="h100"),
    )  # fmt: skip
    search = Search(task, 100, 0, 4, lambda text: None, lower_precision=False)
    search.run()
    assert search.best() is known[2]
    assert list(search.compiled) == known
