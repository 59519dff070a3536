"""Offload in `estimate`, `explain`, `Plan.describe` and `jzero plan`, against programs compiled for a pod of two hosts.

What leaves a program's text is compared with the compiler's own bytes of host arguments, and with sums by hand.
"""

from __future__ import annotations

import contextlib
import json
import math
import re

import jax
import optax
import pytest
from cli_model import SUBJECT
from flax.training.train_state import TrainState
from programs import QUICK, cached, gpt_step, small_gpt, tokens

import jzero
from jzero.__main__ import main
from jzero.cli.show import stage_table
from jzero.proof.hlo import parse
from jzero.proof.lifetimes import most_on_device
from jzero.proof.transfers import find_transfers

HOSTS, PER_HOST = 2, 4
CHAIN = {
    "adamw": lambda: optax.adamw(3e-4),
    "lion": lambda: optax.lion(3e-4),
    "clip": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4)),
    "lamb": lambda: optax.lamb(3e-4),
}


@cached
def compiled(stage, scan, chain, in_flight=192 * 1024, plan_only=False):
    tx, shape = CHAIN[chain](), jax.eval_shape(lambda: small_gpt(scan))

    def made():
        state = small_gpt(scan)
        return TrainState.create(apply_fn=state.apply_fn, params=state.params, tx=tx)

    assert shape.params
    pod = jzero.pod("h200", hosts=HOSTS, gpus_per_host=PER_HOST)
    offload = jzero.Offload(in_flight_bytes=in_flight)
    state = jzero.abstract(made, stage=stage, mesh=pod.mesh({"data": 8}), min_shard_bytes=0, offload=offload)
    plan = jzero.plan_of(state)
    if plan_only:
        return state, plan
    program = pod.compile(gpt_step, state, tokens(), donate_argnums=0, plan=plan, compiler_options=QUICK)
    return state, plan, program, jzero.explain(program, plan)


@pytest.mark.nightly
@pytest.mark.pod
@pytest.mark.parametrize(
    ("stage", "scan", "chain"), [(1, False, "lion"), (2, True, "clip"), (3, False, "adamw")]
)
def test_estimate_is_what_the_compiler_says(stage, scan, chain):
    state, plan, program, report = compiled(stage, scan, chain)
    stats = program.memory_analysis()
    e = jzero.estimate(plan, tx=state.tx)
    assert e.host == stats.host_argument_size_in_bytes > 0
    assert e.opt_state == report.memory.opt_state == 4  # the count of Adam and of lion
    assert e.in_flight == min(plan.in_flight_bytes, e.host)
    assert e.total == e.params + e.grads + 4 + e.in_flight
    assert e.host_per_process == e.host_per_node == PER_HOST * e.host
    assert (e.to_device, e.to_host) == (report.pcie["to_device"], report.pcie["to_host"])


@pytest.mark.nightly
@pytest.mark.pod
def test_state_that_the_chain_reads_twice():
    """Lamb takes norms of its updates, leaf by leaf: explain counts what the closed form leaves out."""
    state, plan, _, report = compiled(2, True, "lamb", in_flight=2**20)
    e = jzero.estimate(plan, tx=state.tx)
    assert report.pcie["to_host"] == e.host
    assert report.pcie["to_device"] >= e.host


@pytest.mark.pod
def test_adam_is_assumed():
    state, plan = compiled(3, False, "adamw", plan_only=True)
    counted, assumed = jzero.estimate(plan, tx=state.tx), jzero.estimate(plan)
    assert (assumed.host, assumed.opt_state) == (counted.host, 0)
    values = sum(math.prod(x.state_shape) for x in plan.layouts)
    assert assumed.host == 12 * values // 8
    assert assumed.to_device == assumed.to_host == assumed.host


@pytest.mark.pod
def test_the_printed_estimate():
    _, plan = compiled(3, False, "adamw", plan_only=True)
    text = str(jzero.estimate(plan))
    for row in (
        "in_flight",
        "host ",
        "  per process",
        "(4 devices)",
        "  per node",
        "pcie / step",
        "to device",
    ):
        assert row in text
    plain = str(jzero.estimate(jzero.make_plan({"w": jax.ShapeDtypeStruct((8, 8), "float32")})))
    assert not re.search("host|pcie|in_flight", plain)


@pytest.mark.pod
def test_transfers_of_a_program():
    _, _, program, report = compiled(2, True, "clip")
    held = program.memory_analysis().host_argument_size_in_bytes
    pieces = [t for t in report.transfers if "slice" in t.name]
    assert len(pieces) > len(report.transfers) // 3
    assert all(t.asynchronous and t.phase == "update" for t in report.transfers)
    for to in ("device", "host"):
        assert sum(t.bytes * t.trips for t in report.transfers if t.to == to) == held
    (row,) = [line for line in str(report).splitlines() if line.strip().startswith("to device")]
    back = [t for t in report.transfers if t.to == "device"]
    beside = sum(t.total_bytes for t in back if t.compute_ops) / held
    assert row.split()[-2:] == [f"({beside:.0%}"[:-1], "%)"]
    assert f" {len(back)} " in row


SLICES = """HloModule m, is_scheduled=true
%wrapped_slice (p0: f32[4,64], p1: s32[]) -> f32[1,64] {
  %p0 = f32[4,64]{1,0:S(5)} parameter(0)
  %p1 = s32[] parameter(1)
  ROOT %ds = f32[1,64]{1,0} dynamic-slice(%p0, %p1, %p1), dynamic_slice_sizes={1,64}
}
%wrapped_update (q0: f32[4,64], q1: f32[1,64], q2: s32[]) -> f32[4,64] {
  %q0 = f32[4,64]{1,0:S(5)} parameter(0)
  %q1 = f32[1,64]{1,0} parameter(1)
  %q2 = s32[] parameter(2)
  ROOT %dus = f32[4,64]{1,0:S(5)} dynamic-update-slice(%q0, %q1, %q2, %q2)
}
%kernel (r0: f32[4,64], r1: f32[4,64]) -> f32[4,64] {
  %r0 = f32[4,64]{1,0} parameter(0)
  %r1 = f32[4,64]{1,0} parameter(1)
  ROOT %sum = f32[4,64]{1,0} add(%r0, %r1)
}
%body (b: (f32[4,64], s32[])) -> (f32[4,64], s32[]) {
  %b = (f32[4,64]{1,0:S(5)}, s32[]) parameter(0)
  %h = f32[4,64]{1,0:S(5)} get-tuple-element(%b), index=0
  %i = s32[] get-tuple-element(%b), index=1
  %s = ((f32[4,64]{1,0:S(5)}, s32[]), f32[1,64]{1,0}, u32[]) fusion-start(%h, %i), kind=kLoop, calls=%wrapped_slice
  %sd = f32[1,64]{1,0} fusion-done(%s)
  %n = f32[1,64]{1,0} negate(%sd)
  %u = f32[4,64]{1,0:S(5)} fusion(%h, %n, %i), kind=kLoop, calls=%wrapped_update
  ROOT %t = (f32[4,64]{1,0:S(5)}, s32[]) tuple(%u, %i)
}
ENTRY %main (x: f32[4,64], y: f32[4,64]) -> f32[4,64] {
  %x = f32[4,64]{1,0:S(5)} parameter(0)
  %y = f32[4,64]{1,0} parameter(1)
  %z = s32[] constant(0)
  %a = (f32[4,64]{1,0:S(5)}, s32[]) tuple(%x, %z)
  %w = (f32[4,64]{1,0:S(5)}, s32[]) while(%a), body=%body, backend_config={"known_trip_count":{"n":"4"}}
  %g = f32[4,64]{1,0:S(5)} get-tuple-element(%w), index=0
  ROOT %k = f32[4,64]{1,0} fusion(%g, %y), kind=kLoop, calls=%kernel
}
"""


def test_slices_in_a_loop_and_a_kernel_that_reads_the_host():
    found = [(t.to, t.name, t.bytes, t.trips, t.asynchronous) for t in find_transfers(parse(SLICES))]
    assert sorted(found) == [
        ("device", "k", 4 * 64 * 4, 1, False),
        ("device", "s", 64 * 4, 4, True),
        ("host", "u", 64 * 4, 4, False),
    ]


def test_a_slice_of_host_memory_is_no_compute():
    """Two slices on their way at once, and 256 bytes made between start and done of the first."""
    text = SLICES.replace(
        "  %sd = ",
        "  %v = ((f32[4,64]{1,0:S(5)}, s32[]), f32[1,64]{1,0}, u32[]) fusion-start(%h, %i), kind=kLoop, "
        "calls=%wrapped_slice\n"
        "  %c = f32[64]{0} broadcast(%i), dimensions={}\n"
        "  %sd = ",
    ).replace("  %n = ", "  %vd = f32[1,64]{1,0} fusion-done(%v)\n  %n = ")
    beside = {t.name: (t.compute_ops, t.compute_bytes) for t in find_transfers(parse(text))}
    assert (beside["s"], beside["v"]) == ((1, 256), (1, 256))
    beside = {t.name: (t.compute_ops, t.compute_bytes) for t in find_transfers(parse(SLICES))}
    assert beside["s"] == (0, 0)


def test_an_element_of_a_tuple_keeps_only_itself_alive():
    """Two fetches behind one barrier: `a` is read at once, `b` after `c` has come, so that two are there."""
    fetch = "  %{0}s = (f32[8]{{0}}, f32[8]{{0:S(5)}}, u32[]) copy-start(%{0}h)\n"
    fetch += "  %{0} = f32[8]{{0}} copy-done(%{0}s)\n"
    text = "HloModule m, is_scheduled=true\nENTRY %main (ah: f32[8], bh: f32[8], ch: f32[8]) -> f32[8] {\n"
    text += "".join(f"  %{n}h = f32[8]{{0:S(5)}} parameter({k})\n" for k, n in enumerate("abc"))
    text += fetch.format("a") + fetch.format("b")
    text += "  %t = (f32[8]{0}, f32[8]{0}) tuple(%a, %b)\n"
    text += "".join(f"  %g{k} = f32[8]{{0}} get-tuple-element(%t), index={k}\n" for k in (0, 1))
    text += "  %na = f32[8]{0} negate(%g0)\n" + fetch.format("c")
    text += "  %nb = f32[8]{0} add(%g1, %c)\n  ROOT %r = f32[8]{0} add(%na, %nb)\n}\n"
    assert most_on_device(parse(text)) == 2 * 32


@pytest.mark.pod
def test_describe_names_the_leaves_on_the_host():
    state, plan = compiled(3, False, "adamw", plan_only=True)
    text = plan.describe(state.tx)
    on_host = [line for line in text.splitlines() if line.rstrip().endswith(" host")]
    here = [line for line in text.splitlines() if line.rstrip().endswith(" device")]
    assert len(on_host) == 3 * len(plan.layouts)
    assert len(here) == 1
    assert "count" in here[0]
    e = jzero.estimate(plan, tx=state.tx)
    total = jzero.core.errors.human_bytes(e.host)
    assert (
        f"{3 * len(plan.layouts)} of {len(on_host) + 1} state leaves in pinned host memory: {total}" in text
    )
    assert "memory" not in jzero.make_plan({"w": jax.ShapeDtypeStruct((8, 8), "float32")}).describe(
        optax.adamw(1e-3)
    )


@pytest.mark.nightly
def test_the_command_line(capsys):
    """Adam of a model in fp32 (no master): 8 bytes for each of 131,584 values over 8 devices leave each device."""
    flags = ["--stages", "2,3", "--no-search", "--offload", "host", "--in-flight-bytes", "16384"]
    main(["plan", *SUBJECT, *flags, "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["asked"]["fields"]["offload"] == {"tier": "host", "in_flight_bytes": 16384}
    host = 8 * (2 * 256 * 256) // 8
    for stage in answer["stages"]:
        e, c = stage["estimate"], stage["compiled"]
        assert host <= e["host"] == c["host_arguments"] == c["host_total"] <= host + 8 * 512
        assert e["host_per_node"] == c["host_per_node"] == 8 * e["host"]
        assert e["to_device"] == e["to_host"] == c["to_device"] == c["to_host"] == e["host"]
        assert e["in_flight"] == 16384
        assert stage["findings"] == []
    table = stage_table(answer["stages"], 0.75)
    assert table[0].split()[:2] == ["stage", "MB"]
    assert table[5].split() == [
        "stage",
        "MB",
        "host",
        "host/node",
        "to",
        "device",
        "to",
        "host",
        "in",
        "flight",
    ]
    shown = [f"{size / 1e6:.2f}" for size in (e["host"], 8 * e["host"], e["host"], e["host"])]
    assert [line.split()[-4:] for line in (table[7], table[9])] == [shown] * 2
    assert [line.split()[-5:] for line in (table[6], table[8])] == [[*shown, "0.02"]] * 2
    plain = [r | {"estimate": r["estimate"] | {"host": 0}, "compiled": r["compiled"] | {"host_total": 0}}
             for r in answer["stages"]]  # fmt: skip
    assert not any("host/node" in line for line in stage_table(plain, 0.75))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--offload", "disk", "--stages", "0"], "needs stage 2 or 3"),
        (["--in-flight-bytes", "4096"], "belongs to --offload host"),
        (["--offload", "host", "--in-flight-bytes", "0"], "in_flight_bytes=0"),
    ],
)
def test_the_command_line_refuses(capsys, flags, message):
    with contextlib.suppress(SystemExit):
        assert main(["plan", *SUBJECT, *flags]) == 2
    assert message in capsys.readouterr().err
