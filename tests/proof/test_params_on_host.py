"""`Offload(params="host")` in `estimate`, `explain`, `check` and `jzero plan`, against programs compiled for H200."""

from __future__ import annotations

import contextlib
import dataclasses
import json

import jax
import optax
import pytest
from cli_model import SUBJECT
from mistakes import on_device, with_text, without_asynchronous_copies
from programs import JAXLIB, QUICK, cached, gpt_loss, gpt_state, gpt_step, tokens

import jzero
from jzero.__main__ import main
from jzero.proof.check import findings
from jzero.proof.evidence import Evidence
from jzero.proof.faults.host import transfers_waited_for
from jzero.proof.hlo import parse

pytestmark = [
    pytest.mark.pod,
    pytest.mark.skipif(JAXLIB < (0, 11, 2), reason="params in host memory need jaxlib 0.11.2 on GPUs"),
]
WITHIN = 0.02
IN_FLIGHT = 30_000  # far less than the state, as in a model that needs this


@cached
def made(scan, tied=True, n=8, clip=False, layers=3):
    """The abstract state of a small GPT with its params in host memory, its plan and its pod."""
    pod = jzero.pod("h200", gpus_per_host=n)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4)) if clip else optax.adamw(3e-4)
    state = jzero.abstract(
        lambda: gpt_state(scan, layers, dim=128, heads=4, tied=tied, tx=tx), stage=3, mesh=pod.mesh({"data": n}),
        min_shard_bytes=0, offload=jzero.Offload(params="host", in_flight_bytes=IN_FLIGHT),
    )  # fmt: skip
    return state, jzero.plan_of(state), pod


def accumulating(plan, k):
    def step(state, batch):
        grads_of = jzero.value_and_grad(lambda p, b: gpt_loss(state, p, b), plan, accumulate=k)
        loss, grads = grads_of(state.params, batch)
        return state.apply_gradients(grads=grads), loss

    return step


@cached
def compiled(scan, tied=True, n=8, clip=False, accumulate=1, layers=3):
    state, plan, pod = made(scan, tied, n, clip, layers)
    step = gpt_step if accumulate == 1 else accumulating(plan, accumulate)
    batch = tokens(n * accumulate)
    program = pod.compile(step, state, batch, donate_argnums=0, plan=plan, compiler_options=QUICK)
    return program, plan, jzero.explain(program, plan), state, jzero.param_uses(step, state, batch)


@pytest.mark.default_cases("True-True-8-True-1", "False-False-1-False-1", "True-False-8-True-2")
@pytest.mark.parametrize(
    ("scan", "tied", "n", "clip", "accumulate"),
    [
        (True, True, 8, True, 1),
        (False, True, 8, False, 1),
        (True, False, 8, False, 1),
        (False, False, 1, False, 1),
        (True, True, 1, True, 1),
        (True, False, 8, True, 2),
        (False, False, 8, False, 2),
    ],
)
def test_estimate_is_what_the_compiler_says(scan, tied, n, clip, accumulate):
    program, plan, report, state, uses = compiled(scan, tied, n, clip, accumulate)
    e, near = jzero.estimate(plan, tx=state.tx, uses=uses, accumulate=accumulate), pytest.approx
    assert report.memory.host_total == near(e.host, rel=WITHIN)
    assert report.pcie["to_device"] == near(e.to_device, rel=WITHIN)
    assert report.pcie["to_host"] == near(e.to_host, rel=WITHIN)
    assert (e.params, e.grads) == (0, 0)
    assert e.host_params == plan.param_bytes // n
    assert e.host_grads == (1 if accumulate == 1 else 3) * e.host_params  # bf16, with sums in fp32
    assert "host" in str(e)
    assert all("stay whole on every device" in f.text for f in findings(program, plan))


def test_without_an_optimizer_adam_is_assumed():
    state, plan, _ = made(True, False)
    known, assumed = jzero.estimate(plan, tx=state.tx), jzero.estimate(plan)
    for name in ("host", "to_device", "to_host"):
        assert getattr(assumed, name) == pytest.approx(getattr(known, name), rel=1e-3)
    values = plan.param_bytes // 2 // 8
    # state, two fetches, and at the update params and gradients
    assert assumed.to_device == (12 + 2 * 2 + 2 + 2) * values
    assert assumed.to_host == (12 + 2 + 2) * values


def test_transfers_have_names():
    _, plan, report, _, _ = compiled(True, True, 8, True, 1)
    moved: dict[tuple[str, str, str], int] = {}
    for t in report.transfers:
        key = (t.to, t.phase, t.scope if t.phase != "update" else "")
        moved[key] = moved.get(key, 0) + t.total_bytes
    held = plan.param_bytes // 8
    assert set(moved) == {
        ("device", "forward", "fetch_weight"), ("device", "backward", "fetch_weight"), ("device", "update", ""),
        ("host", "backward", "write_gradient"), ("host", "update", ""),
    }  # fmt: skip
    assert moved["host", "backward", "write_gradient"] == moved["device", "forward", "fetch_weight"] == held
    assert moved["host", "update", ""] == 7 * held
    assert moved["device", "update", ""] == 9 * held  # gradients twice: their norm comes first
    text = str(report)
    assert "  backward write_gradient" in text
    assert "  forward fetch_weight" in text


def whole(state, batch):
    """All params to the device at the start, as everybody writes it first, and the gradients back."""
    home = jax.tree.map(lambda p: p.sharding, made(True, layers=12)[0].params)
    here = jax.tree.map(lambda s: s.with_memory_kind("device"), home)
    apply_fn = state.apply_fn.fn

    def loss(params):
        params = jax.device_put(params, here)
        return gpt_loss(state.replace(apply_fn=apply_fn), params, batch)

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value


@pytest.mark.remedy("weights_on_device", "which fetch each weight where it is used")
def test_params_that_are_all_on_the_device():
    state, plan, pod = made(True, layers=12)
    program = pod.compile(whole, state, tokens(), donate_argnums=0, plan=plan, compiler_options=QUICK)
    found = {f.kind: f for f in findings(program, plan)}
    assert {"weights_not_gathered_on_use", "state_not_offloaded"} <= set(found)
    assert "where each should be there only for its use" in found["state_not_offloaded"].text
    assert found["state_not_offloaded"].bytes > plan.param_bytes // 8 // 2
    own, *_ = compiled(True, layers=12)
    assert findings(own, plan) == ()


@pytest.mark.remedy("transfers_waited_for", "leave XLA's asynchronous copies on")
def test_copies_that_are_waited_for():
    """The text of a program, as if XLA wrote plain copies."""
    program, plan, *_ = compiled(False, layers=2)
    attacked = with_text(program, without_asynchronous_copies(program.as_text()))
    found = {f.kind: f for f in findings(attacked, plan)}
    assert "fetches of weights and writes of gradients" in found["host_transfers_waited_for"].text
    assert findings(program, plan) == ()


def test_a_copy_that_is_waited_for():
    """The same program with its first fetches of weights made synchronous in its text."""
    program, plan, *_ = compiled(True, True, 8, True, 1)
    module = parse(program.as_text())
    evidence = Evidence(program, plan, module)
    assert list(transfers_waited_for(evidence)) == []
    evidence.__dict__["transfers"] = tuple(
        dataclasses.replace(t, asynchronous=t.scope != "write_gradient") for t in evidence.transfers
    )
    ((text, size, _),) = transfers_waited_for(evidence)
    assert "writes of gradients" in text
    assert "fetches" not in text
    assert size == plan.param_bytes // 8


def test_params_that_are_on_the_device_against_the_plan():
    state, plan, pod = made(True)
    here = state.replace(params=on_device(state.params))
    home = jax.tree.map(lambda x: x.sharding, here)
    program = pod.compile(lambda s, b: jax.device_put(s, home), here, tokens(), donate_argnums=0, plan=plan)
    (finding,) = findings(program, plan)
    assert (finding.kind, finding.bytes) == ("state_not_offloaded", plan.param_bytes // 8)
    assert "leaves of the params and the optimizer state" in finding.text


def test_params_that_are_twice_on_the_host():
    state, plan, pod = made(True)
    home = jax.tree.map(lambda x: x.sharding, state.params)

    def step(state, batch):
        here = jax.tree.map(lambda x, s: jax.device_put(x, s.with_memory_kind("device")) + 1, state.params, home)
        return state.replace(params=jax.device_put(here, home))

    kept = {"donate_argnums": (), "plan": plan}
    texts = {f.text: f for f in findings(pod.compile(step, state, tokens(), **kept), plan)}
    (twice,) = [f for text, f in texts.items() if "of host memory on top of" in text]
    assert twice.kind == "state_not_donated"
    assert twice.bytes >= plan.param_bytes // 8
    assert "params and state" in twice.text


@pytest.mark.nightly
def test_the_command_line(capsys):
    flags = ["--no-search", "--offload-params", "host", "--in-flight-bytes", "16384"]
    main(["plan", *SUBJECT, *flags, "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["asked"]["stages"] == [3]
    assert answer["asked"]["fields"]["offload"] == {"tier": "host", "params": "host", "in_flight_bytes": 16384}
    (stage,) = answer["stages"]
    e, c = stage["estimate"], stage["compiled"]
    assert e["host"] == pytest.approx(c["host_total"], rel=WITHIN)
    assert e["to_device"] == pytest.approx(c["to_device"], rel=WITHIN)
    assert stage["findings"] == []


@pytest.mark.parametrize("flags", [["plan", "--stages", "1,2"], ["explain", "--stage", "2"]])
def test_the_command_line_refuses_other_stages(capsys, flags):
    with contextlib.suppress(SystemExit):
        assert main([flags[0], *SUBJECT, *flags[1:], "--offload-params", "host"]) == 2
    assert "--offload-params host needs stage 3: below it the model reads whole params" in capsys.readouterr().err
