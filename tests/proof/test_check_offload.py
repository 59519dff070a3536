"""`check`: optimizer state in host memory, fetched all at once (found) and leaf by leaf (clean)."""

from __future__ import annotations

import dataclasses
import functools

import cli_model
import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState
from mistakes import BOTH, in_host_memory, on_device
from programs import QUICK, cached, gpt_loss, gpt_step, small_gpt, small_state, tokens

import jzero
from jzero.proof.check import findings
from jzero.proof.evidence import Evidence
from jzero.proof.hlo import parse

pytestmark = pytest.mark.pod


def at_once(state, batch, plan, home):
    """What everybody writes first."""
    here = jax.tree.map(lambda s: s.with_memory_kind("device"), home)
    state = state.replace(opt_state=jax.device_put(state.opt_state, here))
    state, loss = gpt_step(state, batch)
    return state.replace(opt_state=jax.device_put(state.opt_state, home)), loss


def leaf_by_leaf(state, batch, plan, home):
    """Adam by hand: the fetch of a leaf waits for the result of the leaf before."""
    loss, grads = jax.value_and_grad(lambda p: gpt_loss(state, p, batch))(state.params)
    adam, tree = state.opt_state.inner[0], jax.tree.structure(state.params)
    trees = (grads, adam.mu, adam.nu, state.opt_state.master)
    params, new, before = [], [], [jax.tree.leaves(grads)[0]]
    for x, g, *hosted in zip(plan.layouts, *map(jax.tree.leaves, trees), strict=True):
        *hosted, before[0] = jax.lax.optimization_barrier((*hosted, before[0]))  # its second output is used
        m, v, w = (jax.device_put(h, plan.sharding(x.state)) for h in hosted)
        g = plan.constrain(g, x.state).astype(jnp.float32)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        w = w - 1e-3 * m / (jnp.sqrt(v) + 1e-8)
        params.append(plan.constrain(plan.constrain(w.astype(x.dtype), x.state), x.stored))
        before = [m, v, w]
        new.append(before)
    mu, nu, master = (jax.tree.unflatten(tree, values) for values in zip(*new, strict=True))
    inner = (adam._replace(mu=mu, nu=nu), *state.opt_state.inner[1:])
    opt_state = state.opt_state._replace(inner=inner, master=master)
    return state.replace(
        params=jax.tree.unflatten(tree, params), opt_state=jax.device_put(opt_state, home)
    ), loss


def clipped(tx):
    return optax.chain(optax.clip_by_global_norm(1.0), tx)


def offloaded(stage, scan, *, clip=False, chain=None, in_flight=192 * 1024):
    """A state that jzero offloads, and its plan."""
    chain = chain or (clipped if clip else lambda tx: tx)

    def made():
        state = small_gpt(scan)
        return TrainState.create(apply_fn=state.apply_fn, params=state.params, tx=chain(optax.adamw(3e-4)))

    offload = jzero.Offload(in_flight_bytes=in_flight)
    mesh = jzero.pod("h200").mesh({"data": 8})
    state = jzero.abstract(made, stage=stage, mesh=mesh, min_shard_bytes=0, offload=offload)
    return state, jzero.plan_of(state)


def compiled_step(state, plan, step=gpt_step, donate=0):
    return jzero.pod("h200").compile(
        step, state, tokens(), donate_argnums=donate, plan=plan, compiler_options=QUICK
    )


@cached
def own_program(stage, scan, clip=False):
    state, plan = offloaded(stage, scan, clip=clip)
    return compiled_step(state, plan), plan


@functools.cache
def program(step, scan):
    state, plan = small_state(2, scan=scan)
    state = state.replace(opt_state=in_host_memory(state.opt_state))
    home = jax.tree.map(lambda x: x.sharding, state.opt_state)
    compiled = jzero.pod("h200").compile(
        lambda s, b: step(s, b, plan, home),
        state,
        tokens(),
        donate_argnums=0,
        plan=plan,
        compiler_options=QUICK,
    )
    return compiled, plan


@pytest.mark.remedy("offloaded_on_device", "fetch leaf by leaf, and tie each fetch")
@pytest.mark.default_cases("scan")
@BOTH
def test_fetched_at_once(scan):
    compiled, plan = program(at_once, scan)
    (finding,) = findings(compiled, plan)
    hosted = compiled.memory_analysis().host_argument_size_in_bytes
    assert finding.kind == "state_not_offloaded"
    assert 0.9 * hosted <= finding.bytes <= hosted
    assert compiled.memory_analysis().temp_size_in_bytes >= finding.bytes  # the compiler holds it too
    assert "optimization_barrier" in finding.remedy
    assert findings(*program(leaf_by_leaf, scan)) == ()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("stage", "scan", "clip"),
    [(1, False, True), (3, False, True), (2, True, True), (3, True, True)],
)
def test_own_programs_are_clean(stage, scan, clip):
    compiled, plan = own_program(stage, scan, clip)
    assert compiled.memory_analysis().host_argument_size_in_bytes > 3 * plan.in_flight_bytes
    assert findings(compiled, plan) == ()


def test_state_that_is_not_offloaded():
    """The plan says host, the arguments and the results say device: a third of it, then all."""
    state, plan = offloaded(2, True, clip=True)
    compiled, _ = own_program(2, True, clip=True)
    everything = compiled.memory_analysis().host_argument_size_in_bytes
    part = state.replace(opt_state=state.opt_state._replace(master=on_device(state.opt_state.master)))
    home = jax.tree.map(lambda x: x.sharding, part)

    def step(state, batch):
        return jax.device_put(state, home), jnp.zeros(())

    (finding,) = findings(compiled_step(part, plan, step), plan)
    assert finding.kind == "state_not_offloaded"
    assert finding.bytes == everything // 3  # master, m and v are one size
    assert "8 of 24 leaves" in finding.text

    fields = {"stage": 2, "min_shard_bytes": 0}
    held = jzero.abstract(lambda: small_gpt(True), **fields, mesh=plan.mesh)
    program = compiled_step(held, jzero.plan_of(held))
    assert findings(program, jzero.plan_of(held)) == ()
    (finding,) = findings(program, plan)
    assert (finding.kind, finding.bytes) == ("state_not_offloaded", everything)


@pytest.mark.remedy("state_not_offloaded", "state = jzero.shard(state, plan.config, mesh=mesh)")
def test_on_the_cpu_backend_arguments_alone_tell(mesh):
    state = jzero.shard(cli_model.create, stage=2, mesh=mesh, offload="host")
    plan = jzero.plan_of(state)
    x = plan.place_batch({"x": jnp.ones((32, 256)), "y": jnp.ones((32, 256))})
    lower = jax.jit(cli_model.step, donate_argnums=0).lower
    plain = jzero.shard(cli_model.create, stage=2, mesh=mesh)
    assert [f.kind for f in findings(lower(plain, x).compile(), plan)] == ["state_not_offloaded"]
    assert findings(lower(state, x).compile(), plan) == ()
    assert findings(lower(jzero.shard(plain, plan.config, mesh=mesh), x).compile(), plan) == ()


@pytest.mark.remedy("offloaded_copied", "nnx.jit and jzero.jit take the same option")
@pytest.mark.nightly
def test_state_that_is_twice_on_the_host():
    state, plan = offloaded(2, True)
    program = compiled_step(state, plan, donate=())
    device, host = findings(program, plan)
    stats = program.memory_analysis()
    assert device.kind == host.kind == "state_not_donated"
    assert stats.host_alias_size_in_bytes == 0
    assert "of host memory on top of" in host.text
    assert host.bytes == stats.host_output_size_in_bytes + stats.host_temp_size_in_bytes
    assert "donate_argnums=0" in host.remedy
    assert device.bytes <= stats.output_size_in_bytes
    assert findings(*own_program(2, True)) == ()


@pytest.mark.remedy("offloaded_copied", "optax.apply_if_finite in the chain in place of jzero.select")
@pytest.mark.nightly
def test_a_select_round_the_step():
    state, plan = offloaded(2, True, clip=True)

    def step(state, batch):
        new, loss = gpt_step(state, batch)
        return jzero.select(jnp.isfinite(loss), new, state), loss

    found = findings(compiled_step(state, plan, step), plan)
    assert [f.kind for f in found] == ["state_not_donated", "state_not_offloaded"]
    state, plan = offloaded(2, True, chain=lambda tx: optax.apply_if_finite(tx, 3))
    assert findings(compiled_step(state, plan), plan) == ()


@pytest.mark.nightly
@pytest.mark.remedy("offloaded_on_device", "no device_put of it")
def test_a_log_that_fetches_all_masters():
    state, plan = offloaded(2, True, clip=True)
    here = jax.tree.map(lambda x: x.sharding.with_memory_kind("device"), state.opt_state.master)

    def step(state, batch):
        state, loss = gpt_step(state, batch)
        return state, (loss, optax.global_norm(jax.device_put(state.opt_state.master, here)))

    (found,) = findings(compiled_step(state, plan, step), plan)
    assert found.kind == "state_not_offloaded"
    assert "were asked for (in_flight_bytes)" in found.text
    assert findings(*own_program(2, True, clip=True)) == ()


def test_state_that_is_donated_and_not_written_in_place():
    """A master that goes back in 16 bits has no buffer to take: the old one stays beside it."""
    state, plan = offloaded(2, True, clip=True)
    home = jax.tree.map(lambda x: x.sharding, state.opt_state.master)

    def rounded(x, s):
        return jax.device_put(jax.device_put(x, s.with_memory_kind("device")).astype(jnp.bfloat16), s)

    def step(state, batch):
        master = jax.tree.map(rounded, state.opt_state.master, home)
        return state.replace(opt_state=state.opt_state._replace(master=master)), jnp.zeros(())

    program = compiled_step(state, plan, step)
    stats = program.memory_analysis()
    (found,) = [f for f in findings(program, plan) if "of host memory on top of" in f.text]
    assert found.bytes == stats.host_argument_size_in_bytes // 3 // 2
    assert stats.host_alias_size_in_bytes == 2 * stats.host_argument_size_in_bytes // 3
    assert "own sharding" in found.remedy


def test_bound_that_was_asked_for():
    """Of its own program the bytes in flight and one more piece may be on the device, one byte less is a fault."""
    compiled, plan = program(leaf_by_leaf, False)
    evidence = Evidence(compiled, plan, parse(compiled.as_text()))
    least = evidence.fetched_at_once - evidence.largest_transfer
    for asked, found in ((least, []), (least - 1, ["state_not_offloaded"])):
        config = dataclasses.replace(plan.config, offload=jzero.Offload(in_flight_bytes=asked))
        assert [f.kind for f in findings(compiled, dataclasses.replace(plan, config=config))] == found


FETCH = (
    "%{0}s = (f32[8], f32[8]{{0:S(5)}}, u32[]) copy-start(%{0}h)",
    "%{0}d = f32[8] copy-done(%{0}s)",
    "%{0} = f32[8] bitcast(%{0}d)",
)
UPDATE = ("%{0}n = f32[8] negate(%{0})",)
STORE = (
    "%{0}m = f32[8] bitcast(%{0}n)",
    "%{0}t = (f32[8]{{0:S(5)}}, f32[8], u32[]) copy-start(%{0}m)",
    "%{0}o = f32[8]{{0:S(5)}} copy-done(%{0}t)",
)
LOOP = ("%w = (f32[8]{{0:S(5)}}) while(%z), body=%body",)


@pytest.mark.parametrize(
    ("schedule", "arrays"),
    [
        ([("a", FETCH), ("b", FETCH), ("a", UPDATE), ("a", STORE), ("b", UPDATE), ("b", STORE)], 2),
        ([("a", FETCH), ("a", UPDATE), ("a", STORE), ("b", FETCH), ("b", UPDATE), ("b", STORE)], 1),
        ([("a", FETCH), ("a", UPDATE), ("b", FETCH), ("a", STORE), ("b", UPDATE), ("b", STORE)], 2),
        ([("a", FETCH), ("a", UPDATE), ("b", FETCH), ("b", UPDATE), ("b", STORE), ("a", STORE)], 2),
        ([("a", LOOP)], 1),
        ([("a", FETCH), ("a", LOOP), ("a", UPDATE), ("a", STORE)], 2),
        ([("a", FETCH), ("a", UPDATE), ("a", STORE), ("a", LOOP)], 1),
    ],
)
def test_lifetimes_in_a_schedule(schedule, arrays):
    def lines(schedule):
        return [f"  {line.format(name)}" for name, what in schedule for line in what]

    body = lines([("x", FETCH), ("x", UPDATE), ("x", STORE)])
    text = ["HloModule m, is_scheduled=true", "%body (p: f32[8]) -> f32[8] {", *body, "}"]
    text += ["ENTRY %main (p: f32[8]) -> f32[8] {", *lines(schedule), "}"]
    evidence = Evidence(None, None, parse("\n".join(text)))  # pyright: ignore
    assert evidence.fetched_at_once == 32 * arrays
