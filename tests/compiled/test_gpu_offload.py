"""Offloaded state in programs compiled for H200: what is on the device at once, in place on the host, beside what."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from gpu_states import BOUND, abstract_state
from programs import QUICK, cached, gpt_step, small_state, tokens

import jzero
from jzero.proof.hlo import parse
from jzero.proof.lifetimes import most_on_device
from jzero.proof.transfers import find_transfers

pytestmark = pytest.mark.pod

SHAPES = [(1024, 4096), (4096, 2048), (2048, 1024), (8192, 1024), (4096, 1536), (768,)]


def labels(name):
    return "slow" if name.endswith(("1", "4")) else "fast"


CHAINS = {
    "adam": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "if finite": lambda: optax.apply_if_finite(CHAINS["adam"](), 3),
    "steps": lambda: optax.MultiSteps(optax.adamw(1e-3), 4).gradient_transformation(),
    "lion": lambda: optax.lion(1e-3),
    "adafactor": lambda: optax.adafactor(1e-3),
    "hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(1e-3, 0, 100)),
    "several": lambda: optax.multi_transform(
        {"fast": optax.adamw(1e-3), "slow": optax.sgd(0.01, 0.9)},
        lambda params: {k: labels(k) for k in params},
    ),
    "clipped updates": lambda: optax.chain(optax.adam(1e-3), optax.clip_by_global_norm(1.0)),
}


def plan_for(count, stage, wider=1, **fields):
    shapes = [SHAPES[i % len(SHAPES)] for i in range(count)]
    params = {
        f"w{i:02}": jax.ShapeDtypeStruct((s[0] * wider, *s[1:]), jnp.bfloat16) for i, s in enumerate(shapes)
    }
    mesh = jzero.pod("h200").mesh({"data": 8})
    tier = jzero.Offload(in_flight_bytes=BOUND, **fields)
    return jzero.make_plan(params, stage=stage, mesh=mesh, offload=tier)


@cached
def program(count, chain, *, stage=3, wider=1, **fields):
    """An update alone: params, gradients and state as arguments, split as the stage says."""
    plan = plan_for(count, stage, wider, **fields)
    tx = jzero.zero(CHAINS[chain](), plan)

    def update(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    args = (plan.shapes, abstract_state(tx, plan), plan.shapes)
    return jzero.pod("h200").compile(update, *args, donate_argnums=(0, 1, 2)), plan


@cached
def creation(count, wider=1):
    plan = plan_for(count, 3, wider)
    tx = jzero.zero(CHAINS["adam"](), plan)
    return jzero.pod("h200").compile(tx.init.trace, plan.shapes), plan


def group_bytes(plan, per_value=12):
    """Bytes of the state of the largest param on one device."""
    return max(per_value * math.prod(x.state_shape) // 8 for x in plan.layouts)


@pytest.mark.nightly
@pytest.mark.parametrize("chain", CHAINS)
def test_what_is_on_the_device_does_not_grow_with_the_leaves(chain):
    for count in (12, 48) if chain in ("adam", "steps") else (48,):
        compiled, plan = program(count, chain)
        memory = compiled.memory_analysis()
        assert memory.temp_size_in_bytes <= BOUND + group_bytes(plan)
        assert memory.host_argument_size_in_bytes >= sum(
            4 * math.prod(x.state_shape) // 8 for x in plan.layouts
        )
        assert memory.host_alias_size_in_bytes == memory.host_argument_size_in_bytes
        assert memory.host_output_size_in_bytes == memory.host_argument_size_in_bytes
        assert memory.host_temp_size_in_bytes == 0


@pytest.mark.nightly
@pytest.mark.parametrize(("chain", "per_value"), [("adam", 12), ("adafactor", 4)])
def test_a_large_leaf_is_taken_in_pieces(chain, per_value):
    compiled, plan = program(4, chain, wider=32)
    memory = compiled.memory_analysis()
    grads = sum(
        2 * math.prod(x.state_shape) // 8 for x in plan.layouts
    )  # an argument cannot be filled in place
    assert group_bytes(plan, per_value) >= 2 * BOUND
    assert memory.temp_size_in_bytes <= grads + (1.5 if chain == "adam" else 1) * BOUND
    assert most_on_device(parse(compiled.as_text())) <= BOUND
    assert memory.host_temp_size_in_bytes == 0
    assert memory.host_alias_size_in_bytes == memory.host_argument_size_in_bytes


def rolled():
    """Moments that no piece of can be computed alone."""

    def update(updates, state, params=None):
        new = jax.tree.map(lambda g, m: 0.9 * m[::-1] + 0.1 * g, updates, state)
        return new, new

    return optax.GradientTransformation(lambda p: jax.tree.map(jnp.zeros_like, p), update)


def test_leaves_that_cannot_be_cut_are_not_there_together(monkeypatch):
    monkeypatch.setitem(CHAINS, "rolled", rolled)
    compiled, plan = program(4, "rolled", wider=8)  # 32, 64, 16 and 64 MiB
    assert group_bytes(plan, 8) == BOUND
    assert most_on_device(parse(compiled.as_text())) <= BOUND
    assert compiled.memory_analysis().host_temp_size_in_bytes == 0


@pytest.mark.parametrize(("count", "wider"), [(12, 1), (48, 1), (4, 32)])
def test_the_creation_of_the_state_is_bounded_too(count, wider):
    compiled, plan = creation(count, wider)
    memory = compiled.memory_analysis()
    assert memory.host_output_size_in_bytes >= 12 * sum(math.prod(x.state_shape) for x in plan.layouts) // 8
    assert memory.temp_size_in_bytes <= BOUND
    assert memory.host_temp_size_in_bytes == 0


@pytest.mark.parametrize(("chain", "times"), [("adam", 1), ("clipped updates", 2)])
def test_every_byte_crosses_once_each_way_asynchronously(chain, times):
    compiled, _ = program(12, chain)
    held = compiled.memory_analysis().host_argument_size_in_bytes
    found = find_transfers(parse(compiled.as_text()))
    moved = {to: sum(t.total_bytes for t in found if t.to == to) for to in ("device", "host")}
    assert moved["host"] == held
    # a norm of the updates reads the moments, and not the masters, once more
    assert moved["device"] == pytest.approx(held * (1 if times == 1 else 5 / 3), rel=0.01)
    assert all(t.asynchronous for t in found)


def overlaps(compiled) -> tuple[int, int]:
    """How many fetches there are, and how many begin while something is being written to the host."""
    module = parse(compiled.as_text())
    entry = module.computations[module.entry]
    to = {t.name: t.to for t in find_transfers(module)}
    writing, fetches, beside = set(), 0, 0
    for i in entry.schedule:
        if to.get(i.name) == "host":
            writing.add(i.name)
        elif to.get(i.name) == "device":
            fetches, beside = fetches + 1, beside + bool(writing)
        elif i.opcode.endswith("-done"):
            writing -= set(i.operands)
    return fetches, beside


@pytest.mark.default_cases("12-adam-1-3")
@pytest.mark.parametrize(
    ("count", "chain", "wider", "arrays"),
    [
        (12, "adam", 1, 3),
        (4, "adam", 32, 3),
        (48, "if finite", 1, 3),
        (48, "steps", 1, 4),
        (48, "lion", 1, 2),
        (48, "hyperparams", 1, 3),
        (48, "several", 1, 2),
    ],
)
def test_fetches_begin_while_the_unit_before_is_written(count, chain, wider, arrays):
    compiled, _ = program(count, chain, wider=wider)
    fetches, beside = overlaps(compiled)
    assert fetches >= arrays * count
    # the others begin beside a fetch, or while the one write left is tied to them
    assert beside >= fetches / 4
    assert all(t.asynchronous for t in find_transfers(parse(compiled.as_text())))


def gpt(stage, scan, **fields):
    state, plan = small_state(stage, scan=scan, **fields)
    compiled = jzero.pod("h200").compile(gpt_step, state, tokens(), donate_argnums=0, compiler_options=QUICK)
    return compiled, plan


@pytest.mark.default_cases("2-True")
@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_train_step_communicates_as_without(stage, scan):
    there, plan = gpt(stage, scan, offload="host")
    here, plain = gpt(stage, scan)
    report, without = jzero.explain(there, plan), jzero.explain(here, plain)
    assert report.wire.total == pytest.approx(without.wire.total, rel=0.01)
    ops = [{c.op for c in r.collectives if c.bytes > 10**5} for r in (report, without)]
    assert ops[0] == ops[1]
    state = there.memory_analysis().host_argument_size_in_bytes
    assert state == there.memory_analysis().host_alias_size_in_bytes
    assert report.memory.arguments <= without.memory.arguments - 0.99 * state
    assert there.memory_analysis().host_temp_size_in_bytes == 0
    jzero.check(there, plan)


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [2, 3])
def test_a_stack_of_as_many_layers_as_devices_is_taken_in_pieces(stage):
    """The state of a stack is split on another dim than its layers, which the devices divide as well."""
    compiled, plan = gpt(stage, True, offload=jzero.Offload(in_flight_bytes=2**20), layers=8)
    moved = jzero.explain(compiled, plan).pcie
    state = compiled.memory_analysis().host_argument_size_in_bytes
    assert state > 2 * 2**20
    assert moved["to_device"] == moved["to_host"] == state
    jzero.check(compiled, plan)


@pytest.mark.nightly
def test_steps_in_a_scan_keep_the_state_in_place():
    state, plan = small_state(2, scan=False, offload=jzero.Offload(in_flight_bytes=2**18))
    batches = {"tokens": jax.ShapeDtypeStruct((4, *tokens()["tokens"].shape), jnp.int32)}
    batches = jax.tree.map(lambda x: x.update(sharding=plan.sharding(jax.P(None, "data"))), batches)

    def steps(state, batches):
        return jax.lax.scan(gpt_step, state, batches)

    compiled = jzero.pod("h200").compile(steps, state, batches, donate_argnums=0, compiler_options=QUICK)
    memory = compiled.memory_analysis()
    held = memory.host_argument_size_in_bytes
    assert held > 2 * 2**18
    assert memory.host_alias_size_in_bytes == held
    assert memory.host_temp_size_in_bytes == 0
    assert jzero.explain(compiled, plan).pcie == {"to_device": 4 * held, "to_host": 4 * held}


@pytest.mark.nightly
@pytest.mark.parametrize("prefetch", [False, True])
def test_state_is_fetched_before_the_gradients_only_when_asked_for(prefetch):
    compiled, _ = gpt(2, False, offload=jzero.Offload(prefetch=prefetch))
    module = parse(compiled.as_text())
    schedule = module.computations[module.entry].schedule
    fetched = {t.name for t in find_transfers(module) if t.to == "device"}
    first = min(n for n, i in enumerate(schedule) if i.name in fetched)
    backward = max(n for n, i in enumerate(schedule) if "transpose(jvp" in i.op_name)
    assert (first < backward) == prefetch


def test_select_keeps_state_on_the_host():
    plan = plan_for(12, 3)
    state = abstract_state(jzero.zero(CHAINS["lion"](), plan), plan)
    pred = jax.ShapeDtypeStruct((), jnp.bool_)
    memory = jzero.pod("h200").compile(jzero.select, pred, state, state).memory_analysis()
    assert memory.host_output_size_in_bytes == memory.host_argument_size_in_bytes // 2
    assert memory.temp_size_in_bytes <= 6 * 2 * 4 * np.prod((1024, 4096)) // 8
