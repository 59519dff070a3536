"""`explain` on programs of the CPU backend and of a pod: numbers, totals, memory, the table, errors."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from wire_reader import sent

from jzero.proof.arguments import arguments_given
from jzero.proof.pod import pod
from jzero.proof.report import Collective, Memory, Report, Wire, argument_bytes, explain
from jzero.sharding import make_plan

WIDTH = 128
WEIGHT = WIDTH * WIDTH * 4


def cpu_mesh(**axes) -> Mesh:
    count = math.prod(axes.values())
    devices = jax.devices("cpu")
    if len(devices) < count:
        pytest.fail(f"needs {count} CPU devices: set JAX_NUM_CPU_DEVICES={count} before jax starts")
    grid = np.array(devices[:count]).reshape(tuple(axes.values()))
    return Mesh(grid, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def abstract(mesh, *spec, shape=(WIDTH, WIDTH), dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def step(weights, x):
    """Gradients of layers that are all split over `data`: one gather and one reduction for each."""

    def loss(weights):
        h = x
        for w in weights:
            h = jnp.tanh(h @ w)
        return (h**2).mean()

    grads = jax.grad(loss)(weights)
    return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)]


@pytest.fixture(scope="module")
def mesh():
    return cpu_mesh(data=8)


@pytest.fixture(scope="module")
def compiled(mesh):
    """Two layers, each weight split over 8 devices; more tokens than weights, so the weights are gathered."""
    weights = [abstract(mesh, "data")] * 2
    x = abstract(mesh, "data", shape=(64 * WIDTH, WIDTH))
    layout = [NamedSharding(mesh, P("data"))] * 2
    return jax.jit(step, donate_argnums=0, out_shardings=layout).lower(weights, x).compile()


@pytest.fixture(scope="module")
def plan(mesh):
    return make_plan([abstract(mesh)] * 2, stage=3, mesh=mesh)


def of(report, op):
    return [c for c in report.collectives if c.op == op]


@pytest.mark.unit
def test_collectives_of_a_cpu_program(compiled):
    report = explain(compiled)
    (gather,) = of(report, "all-gather")
    assert (gather.count, gather.dtype, gather.bytes, gather.wire_bytes) == (
        2,
        "f32",
        WEIGHT,
        WEIGHT * 7 // 8,
    )
    assert (gather.axes, gather.trips, gather.computation) == (("data",), 1, "entry")
    assert len(gather.names) == 2
    (reduce,) = of(report, "all-reduce")
    assert (reduce.count * reduce.parts, reduce.count * reduce.bytes) == (2, 2 * WEIGHT)
    assert (reduce.phase, reduce.sliced, reduce.overlapped) == ("backward", True, False)
    assert report.devices == 8
    assert report.mesh_shape == {"data": 8}


@pytest.mark.unit
def test_totals_are_the_sum_of_the_rows(compiled):
    report = explain(compiled)
    gathered, reduced = 2 * WEIGHT * 7 // 8, 2 * 2 * WEIGHT * 7 // 8
    assert report.wire.by_op == {"all-reduce": reduced, "all-gather": gathered}
    assert report.wire.by_axis == {"data": gathered + reduced}
    assert sum(report.wire.by_phase.values()) == report.wire.total == gathered + reduced
    assert [c.total_wire_bytes for c in report.collectives] == [reduced, gathered]


@pytest.mark.unit
def test_psi_needs_a_plan(compiled, plan):
    assert explain(compiled).wire.psi is None
    wire = explain(compiled, plan).wire
    assert wire.psi_bytes == 2 * WEIGHT * 7 // 8
    assert wire.psi == pytest.approx(3)  # an all-reduce is 2 Psi, the gathers 1


@pytest.mark.unit
def test_memory_adds_up(compiled):
    memory = explain(compiled).memory
    stats = compiled.memory_analysis()
    assert memory is not None
    assert memory.arguments == 2 * WEIGHT // 8 + 8 * WEIGHT  # two shards, an eighth of 64 x 128 rows
    assert memory.aliased == memory.outputs == 2 * WEIGHT // 8 or memory.outputs > memory.aliased
    assert memory.total == memory.arguments + memory.outputs - memory.aliased + stats.temp_size_in_bytes
    assert memory.host_total == 0
    assert (memory.params, memory.opt_state, memory.rest) == (None, None, None)


@pytest.mark.unit
def test_arguments_are_split_where_the_plan_tells_them_apart(compiled, plan):
    expected = {"params": 2 * WEIGHT // 8, "opt_state": 0, "rest": 8 * WEIGHT}
    memory = explain(compiled, plan).memory
    assert memory is not None
    assert (memory.params, memory.opt_state, memory.rest) == tuple(expected.values())
    assert sum(expected.values()) == memory.arguments


@pytest.mark.unit
def test_loops_of_a_cpu_program():
    mesh = cpu_mesh(data=4, model=2)

    def body(h, w):
        return jnp.tanh(jax.lax.with_sharding_constraint(h @ w, NamedSharding(mesh, P("data")))), None

    def forward(x, weights):
        return jax.lax.scan(body, x, weights)[0]

    weights = abstract(mesh, None, "model", shape=(5, WIDTH, WIDTH))
    x = abstract(mesh, "data", "model", shape=(64, WIDTH))
    report = explain(jax.jit(forward).lower(x, weights).compile())
    (looped,) = [c for c in report.collectives if c.loops]
    assert (looped.loops, looped.trips, looped.axes, looped.phase) == ((5,), 5, ("model",), "forward")
    assert looped.total_wire_bytes == 5 * looped.wire_bytes


@pytest.mark.unit
def test_a_branch_is_counted_and_named():
    mesh = cpu_mesh(data=8)

    def summed(x, flag):
        both = [lambda x: jax.lax.psum(x, "data"), lambda x: jax.lax.psum(x[::2], "data").repeat(2, 0)]
        return jax.lax.psum(jax.lax.cond(flag, *both, x), "data")

    run = jax.jit(jax.shard_map(summed, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False))
    program = run.lower(abstract(mesh, shape=(64, 64)), abstract(mesh, shape=(), dtype=bool)).compile()
    report = explain(program)
    assert sorted((c.bytes, c.in_branch) for c in report.collectives) == [(2**13, True), (2**14, False), (2**14, True)]
    assert report.wire.total == sent(program.as_text()) == 2 * (2**13 + 2**14 + 2**14) * 7 // 8
    assert report.is_upper_bound
    assert f"<= {report.wire.total / 1000:.2f} kB" in str(report)


def test_program_of_one_device():
    report = explain(jax.jit(lambda x: x * 2).lower(jnp.ones(8)).compile())
    assert (report.collectives, report.wire.total, report.devices, report.mesh_shape) == ((), 0, 1, None)
    assert "\n none\n" in str(report)
    assert report.memory is not None
    assert report.memory.peak is None  # what XLA gives on the CPU leaves temp out


@pytest.mark.pod
def test_program_of_a_pod():
    target = pod("h200")
    mesh = target.mesh({"data": 8})
    weights, x = [abstract(mesh, "data")] * 2, abstract(mesh, "data", shape=(64 * WIDTH, WIDTH))
    report = explain(target.compile(step, weights, x, donate_argnums=0))
    assert report.mesh_shape == {"data": 8}
    assert report.wire.by_op["all-gather"] == 2 * WEIGHT * 7 // 8
    reduced = report.wire.by_op.get("reduce-scatter", 0) + report.wire.by_op.get("all-reduce", 0) // 2
    assert reduced == 2 * WEIGHT * 7 // 8
    assert report.memory is not None
    assert report.memory.arguments == 2 * WEIGHT // 8 + 8 * WEIGHT
    assert report.memory.peak


@pytest.mark.pod
def test_host_arguments_are_no_device_bytes():
    target = pod("h200")
    mesh = target.mesh({"data": 8})
    there = NamedSharding(mesh, P("data"), memory_kind="pinned_host")
    here = NamedSharding(mesh, P("data"))
    moment = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32, sharding=there)

    def step(w, m):
        return w + jax.device_put(m, here)

    compiled = target.compile(step, abstract(mesh, "data"), moment)
    split = argument_bytes(arguments_given(compiled), ["params", "opt_state"])
    assert split == {"params": WEIGHT // 8, "opt_state": 0, "rest": 0}
    report = explain(compiled)
    assert report.memory is not None
    assert (report.memory.arguments, report.memory.host_arguments) == (WEIGHT // 8, WEIGHT // 8)
    (row,) = [line.split() for line in str(report).splitlines() if line.strip().startswith("to device")]
    assert row == ["to", "device", "8.19", "kB", "1", "8.19", "kB", "(100", "%)", "0", "B", "(0", "%)"]


@pytest.mark.unit
def test_host_bytes_are_apart():
    memory = Memory(
        arguments=10, outputs=7, aliased=6, temp=5, peak=40,
        host_arguments=20, host_outputs=20, host_aliased=19, host_temp=1,
    )  # fmt: skip
    assert (memory.total, memory.host_total) == (16, 22)


ROW = Collective(
    op="all-gather", count=3, dtype="bf16", bytes=2_000_000, wire_bytes=1_750_000, axes=("data",),
    group_size=8, loops=(4, 3), phase="update", scope="gather_params",
    asynchronous=True, compute_ops=2, compute_bytes=4096, sliced=False, parts=2, computation="body",
    names=("a", "b", "c"),
)  # fmt: skip


def table(*rows) -> list[str]:
    wire = Wire({"all-gather": 63_000_000}, {"data": 63_000_000}, {"update": 63_000_000}, 21_000_000)
    return str(Report(rows, (), None, wire, 64, {"data": 64, "model": 1})).splitlines()


@pytest.mark.unit
def test_table():
    lines = table(
        ROW,
        replace(ROW, op="all-reduce", count=1, sliced=True, asynchronous=False, scope=""),
    )
    assert lines[0] == "64 devices (64 data x 1 model)"
    words = [" ".join(line.split()) for line in lines]
    gather = "3 x all-gather bf16 2.00 MB 1.75 MB data (8 of 64) loop 4 x 3 update 4.10 kB 63.00 MB"
    assert words[words.index(gather) + 1] == "gather_params"  # text wraps, numbers never do
    reduce = "1 x all-reduce bf16 2.00 MB 1.75 MB data (8 of 64) loop 4 x 3 update sync 21.00 MB"
    assert words[words.index(reduce) + 1] == "+ slice"
    assert "over data 63.00 MB 3.000" in words
    assert words[-1] == "memory: not reported by this backend"
    assert max(map(len, lines)) <= 110


@pytest.mark.unit
def test_table_is_capped():
    assert " ... and 5 rows with less traffic" in table(*[ROW] * 45)


@pytest.mark.unit
def test_table_says_what_it_does_not_know():
    words = [
        " ".join(line.split())
        for line in table(replace(ROW, axes=(), loops=(0,), phase="", scope="", compute_ops=0))
    ]
    assert "3 x all-gather bf16 2.00 MB 1.75 MB ? (8) loop ? ? nothing 5.25 MB" in words


@pytest.mark.unit
@pytest.mark.parametrize(
    ("thing", "name"),
    [
        (jax.jit(lambda x: x), "PjitFunction"),
        (jax.jit(lambda x: x).lower(1.0), "Lowered"),
        ("HloModule", "str"),
        (None, "NoneType"),
    ],
)
def test_only_compiled_programs(thing, name):
    with pytest.raises(
        TypeError, match=rf"needs a compiled program, got {name}\.\nPass jax\.jit\(step\)\.lower"
    ):
        explain(thing)


@pytest.mark.unit
def test_compiled_program_without_text(compiled, monkeypatch):
    monkeypatch.setattr(jax.stages.Compiled, "as_text", lambda self: None)
    with pytest.raises(TypeError, match=r"no HLO text(.|\n)*Pass jax\.jit\(step\)"):
        explain(compiled)
