"""What is read from compiled texts, against numbers computed by hand: both jax versions, both backends.

`tests/hlo/make.py` holds the programs and makes the texts; its docstrings say what each program does.
"""

from __future__ import annotations

import cProfile
import gzip
import pathlib
import re

import pytest

from jzero.proof import hlo
from jzero.proof.collectives import read_collectives
from jzero.proof.groups import axes_of, parse_groups
from jzero.proof.places import phase_of
from jzero.proof.transfers import find_transfers
from jzero.proof.unread import unknown_calls

HERE = pathlib.Path(__file__).parents[1] / "hlo"
VERSIONS = ("0.10.2", "0.12.0.1")
DATA8, DATA64, DATA4_MODEL2 = {"data": 8}, {"data": 64}, {"data": 4, "model": 2}
SYNC, ASYNC = False, True

# op, dtype, tensors in it, bytes, wire bytes, axes, loops, phase, scope, asynchronous
SCAN_STAGE3 = [
    ("all-gather", "bf16", 1, 256 * 256 * 2, 256 * 256 * 2 * 63 // 64, ("data",), (6,), "forward", "", ASYNC),
    ("all-gather", "f32", 1, 256 * 256 * 4, 256 * 256 * 4 * 63 // 64, ("data",), (6,), "backward", "", SYNC),
    (
        "reduce-scatter",
        "bf16",
        1,
        256 * 256 * 2,
        256 * 256 * 2 * 63 // 64,
        ("data",),
        (6,),
        "backward",
        "",
        ASYNC,
    ),
    ("all-reduce", "f32", 1, 4, 7, ("data",), (), "forward", "", ASYNC),
]
PSI = (256 * 512 + 512 * 256 + 256 * 256) * 2  # bytes of the three bf16 weights
LOSS = ("all-reduce", "f32", 1, 4, 7, ("data",), (), "forward", "", ASYNC)
GATHER = ("all-gather", "bf16", 3, PSI, PSI * 7 // 8, ("data",), (), "update", "gather_params", ASYNC)
UNROLLED = [
    ("reduce-scatter", "bf16", 3, PSI, PSI * 7 // 8, ("data",), (), "backward", "", ASYNC),
    GATHER,
    LOSS,
]
ONE_BY_ONE = [
    ("reduce-scatter", "bf16", 1, size, size * 7 // 8, ("data",), (), "backward", "", ASYNC)
    for size in (256 * 256 * 2, 512 * 256 * 2, 256 * 512 * 2)
] + [GATHER, LOSS]
UNROLLED_CPU = [  # 16-bit widened, the loss combined with the gradients, the gathers not combined
    ("all-reduce", "f32", 4, 2 * PSI + 4, 2 * (2 * PSI + 4) * 7 // 8, ("data",), (), "backward", "", SYNC),
    *(
        ("all-gather", "f32", 1, size, size * 7 // 8, ("data",), (), "update", "gather_params", SYNC)
        for size in (256 * 512 * 4, 512 * 256 * 4, 256 * 256 * 4)
    ),
]
W = 256 * 256 * 4
ACCUMULATE = [("reduce-scatter", "f32", 1, W, W * 7 // 8, ("data",), (4, 3), "backward", "", ASYNC)]
ACCUMULATE_CPU = [("all-reduce", "f32", 1, W, 2 * W * 7 // 8, ("data",), (4, 3), "backward", "", SYNC)]
ACT, GRADS = 4 * 256 * 4, 2 * 256 * 512 * 4  # [batch 4, 256] on a device; two f32[256,512] shards


def two_axes(parts):
    """The activations over `model`, both gradients over `data`: concatenated on GPU, combined on CPU."""
    return [
        ("all-reduce", "f32", 1, ACT, 2 * ACT * 1 // 2, ("model",), (), "forward", "", SYNC),
        ("all-reduce", "f32", parts, GRADS, 2 * GRADS * 3 // 4, ("data",), (), "backward", "", SYNC),
    ]


X = 64 * 256 * 4  # f32[64,256] on each device
MANUAL = [
    ("reduce-scatter", "f32", 1, X, X * 3 // 4, ("data",), (), "forward", "", SYNC),
    ("all-gather", "f32", 1, X // 2, X // 4, ("model",), (), "forward", "", SYNC),
    ("all-to-all", "f32", 1, X // 2, X // 2 * 3 // 4, ("data",), (), "forward", "", SYNC),
    ("collective-permute", "f32", 1, X // 2, X // 2, ("model",), (), "forward", "", SYNC),
    ("all-reduce", "f32", 1, X // 2, 2 * X // 2 * 7 // 8, ("data", "model"), (), "forward", "", SYNC),
    ("all-reduce", "f32", 1, X // 2, 2 * X // 2 * 3 // 4, ("data",), (), "forward", "", SYNC),
]
W = 256 * 256 * 2  # one layer's gradient, bf16


def host_scan(asynchronous):
    grads = ("all-reduce", "bf16", 1, W, 2 * W * 7 // 8, ("data",), (6,), "backward", "", asynchronous)
    return [grads, LOSS]


EXPECTED = {
    "scan_stage3.h200": (DATA64, SCAN_STAGE3),
    "unrolled_stage2.h200": (DATA8, UNROLLED),
    "unrolled_stage2_async.h200": (DATA8, ONE_BY_ONE),
    "unrolled_stage2.cpu": (DATA8, UNROLLED_CPU),
    "accumulate.h200": (DATA8, ACCUMULATE),
    "accumulate.cpu": (DATA8, ACCUMULATE_CPU),
    "two_axes.h200": (DATA4_MODEL2, two_axes(1)),
    "two_axes.cpu": (DATA4_MODEL2, two_axes(2)),
    "manual.h200": (DATA4_MODEL2, MANUAL),
    "manual.cpu": (DATA4_MODEL2, MANUAL),
    "host_moments.h200": (DATA8, []),
    "host_scan.h200": (DATA8, {"0.10.2": host_scan(ASYNC), "0.12.0.1": host_scan(SYNC)}),
}


def find_collectives(module: hlo.Module):
    """Its collectives, all of which can be read."""
    sites, failed = read_collectives(module)
    assert not failed
    return sites


def load(name: str, version: str) -> hlo.Module:
    return hlo.parse(gzip.decompress((HERE / f"{name}.jax{version}.txt.gz").read_bytes()).decode())


def seen(site, mesh_shape):
    axes = axes_of(site.groups, mesh_shape)
    found = (site.op, site.dtype, site.tensors, site.bytes, site.wire_bytes, axes, site.loops)
    return (*found, site.phase, site.scope, site.asynchronous)


def by_size(row):
    return (row[0], row[3], row[5], row[7])


@pytest.mark.unit
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", EXPECTED)
def test_collectives_are_those_computed_by_hand(name, version):
    mesh_shape, expected = EXPECTED[name]
    expected = expected[version] if isinstance(expected, dict) else expected
    found = [seen(site, mesh_shape) for site in find_collectives(load(name, version))]
    assert sorted(found, key=by_size) == sorted(expected, key=by_size)


@pytest.mark.unit
@pytest.mark.parametrize("version", VERSIONS)
def test_every_stored_text_is_expected(version):
    stored = {path.name.split(".jax")[0] for path in HERE.glob(f"*.jax{version}.txt.gz")}
    assert stored == set(EXPECTED)


@pytest.mark.unit
@pytest.mark.parametrize("version", VERSIONS)
def test_trips_multiply(version):
    (site,) = find_collectives(load("accumulate.h200", version))
    assert site.loops == (4, 3)
    assert site.trips == 12


@pytest.mark.unit
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("name", "sliced"),
    [("unrolled_stage2.cpu", True), ("accumulate.cpu", True), ("two_axes.cpu", False), ("manual.cpu", False)],
)
def test_all_reduce_then_slice_is_marked(name, sliced, version):
    reduces = [site for site in find_collectives(load(name, version)) if site.op == "all-reduce"]
    assert reduces
    assert all(site.sliced == sliced for site in reduces)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("name", "version", "op", "expected"),
    [
        # copy bf16[4,256] and the update of bf16[6,4,256], which 0.12 starts as a fusion of its own
        ("scan_stage3.h200", "0.10.2", "all-gather", (2, 4 * 256 * 2 + 6 * 4 * 256 * 2)),
        ("scan_stage3.h200", "0.12.0.1", "all-gather", (2, 4 * 256 * 2 + 6 * 4 * 256 * 2)),
        # one matmul bf16[4,256]; the scalar loop counter does not count
        ("scan_stage3.h200", "0.10.2", "reduce-scatter", (1, 4 * 256 * 2)),
        ("scan_stage3.h200", "0.12.0.1", "reduce-scatter", (1, 4 * 256 * 2)),
        # the slice of f32[256,256] and the matmul f32[4,256]; 0.12 puts the matmul after the done
        ("accumulate.h200", "0.10.2", "reduce-scatter", (2, 256 * 256 * 4 + 4 * 256 * 4)),
        ("accumulate.h200", "0.12.0.1", "reduce-scatter", (1, 256 * 256 * 4)),
        # nothing: the done follows at once
        ("unrolled_stage2.h200", "0.10.2", "all-gather", (0, 0)),
        ("unrolled_stage2.h200", "0.12.0.1", "all-gather", (0, 0)),
    ],
)
def test_compute_between_start_and_done(name, version, op, expected):
    sites = [s for s in find_collectives(load(name, version)) if s.op == op and s.asynchronous]
    assert [(s.compute_ops, s.compute_bytes) for s in sites] == [expected]


@pytest.mark.unit
@pytest.mark.parametrize("version", VERSIONS)
def test_host_copies(version):
    down, up = find_transfers(load("host_moments.h200", version))
    shard = 256 * 256 * 4 // 8
    assert (down.to, down.bytes, down.asynchronous, down.trips) == ("device", shard, True, 1)
    assert (up.to, up.bytes, up.asynchronous, up.trips) == ("host", shard, True, 1)


@pytest.mark.unit
@pytest.mark.parametrize("version", VERSIONS)
def test_host_slices_in_loops(version):
    """The writes in the forward loop and the reads in the backward loop; that the stack is allocated moves nothing."""
    moves = [(t.to, t.bytes, t.trips, t.phase) for t in find_transfers(load("host_scan.h200", version))]
    layer = 4 * 256 * 2
    assert moves == [("host", layer, 6, "forward"), ("device", layer, 6, "backward")]


@pytest.mark.unit
def test_copies_inside_the_device_are_no_transfers():
    module = program(
        "%x = f32[8]{0} parameter(0)",
        "%start = (f32[8]{0}, f32[8]{0}, u32[]) copy-start(%x)",
        "%done = f32[8]{0} copy-done(%start)",
        "%host = f32[8]{0:S(5)} copy(%done)",
        "ROOT %same = f32[8]{0:S(5)} copy(%host)",
    )
    (only,) = find_transfers(module)
    assert (only.name, only.to, only.asynchronous) == ("host", "host", False)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("notation", "devices", "groups"),
    [
        ("{{0,1},{2,3}}", 4, ((0, 1), (2, 3))),
        ("{}", 3, ((0, 1, 2),)),
        ("[2,4]<=[8]", 8, ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[2,4]<=[4,2]T(1,0)", 8, ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("[4,2]<=[2,2,2]T(2,0,1)", 8, ((0, 2), (4, 6), (1, 3), (5, 7))),
        ("mesh['data'=4,'model'=2] {'data'}", 8, ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("mesh['data'=4,'model'=2] {'model'}", 8, ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['data'=2,'model'=2] {'model','data'}", 4, ((0, 2, 1, 3),)),
        ("mesh['axis_0'=1,'axis_1'=4] {'axis_1'}", 4, ((0, 1, 2, 3),)),
        ("mesh['a'=8] {'a':(1)2}", 8, ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=8] {'a':(4)2}", 8, ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", 8, ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", 4, ((0, 2), (1, 3))),
        ("mesh['a'=4], device_ids=([4]3,1,2,0) {'a':(2)2}", 4, ((3, 1), (2, 0))),
    ],
)
def test_replica_groups(notation, devices, groups):
    assert parse_groups(notation, devices) == groups


@pytest.mark.unit
def test_unknown_replica_groups_are_refused():
    for notation in ("ring of 8", "{{0-3},{4-7}}", "{0,1}", "mesh[data=8] {data}", "mesh['a'=8] {'a':[1]2}",
                     "[2,3]<=[8]", "[2,4]<=[8]T(1,0)"):  # fmt: skip
        with pytest.raises(ValueError, match=re.escape(f"unknown notation of replica groups: {notation!r}")):
            parse_groups(notation, 8)
    for order in ("[4]", "[2,2]", "[4]T(1,0)", "0,1,2", "0,1,2,2", "[2,2]T(1~2,0)"):
        with pytest.raises(ValueError, match="unknown notation of a mesh's devices"):
            parse_groups(f"mesh['a'=2,'b'=2], device_ids=({order}) {{'b'}}", 4)


GROUPS = r"(replica_groups=)(\[[^ ]*|mesh\[[^ ]* \S+|\{[^ ]*), "
PAIRS = r"(source_target_pairs=)(\S*), "


@pytest.mark.unit
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("backend", ["cpu", "h200"])
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (GROUPS, r"\1{{0-3},{4-7}}, ", "unknown notation of replica groups"),
        (GROUPS, r"\1\2~2, ", "no replica groups in"),
        (PAIRS, r"\1{0->1,1->0}, ", "unknown notation of source and target"),
        (PAIRS, r"\1{{0,1,2}}, ", "unknown notation of source and target"),
        (PAIRS, r"\1\2~2, ", "no replica groups in"),
    ],
)
def test_devices_in_an_unknown_notation(old, new, said, backend, version):
    """Each is named; none counts as a collective of all devices, or of none."""
    text = gzip.decompress((HERE / f"manual.{backend}.jax{version}.txt.gz").read_bytes()).decode()
    attacked, count = re.subn(old, new, text)
    sites, failed = read_collectives(hlo.parse(attacked))
    assert len(failed) == count == len(MANUAL) - len(sites) > 0
    assert all(said in why for why in failed.values())


FOREIGN = (
    "cu_ring_allreduce", "PinnedAllGather", "TopKAllToAll", "SPMDExchange", "ShardingExchange", "cublas_mp",
    "cub_exchange", "cudnn_all_reduce", "ducc_fft_exchange", "triton_kernel_call_in_ring", "__gpu_exchange",
)  # fmt: skip
LOCAL = (
    "Pin", "Unpin", "TopK", "Sharding", "SPMDFullToShardShape", "MoveToHost", "annotate_device_placement",
    "cu_threefry2x32_ffi", "cusolver_syevd_ffi", "lapack_ssyevd_ffi", "blas_strsm", "ducc_fft", "__cublas$lt$matmul",
    "__cudnn$convForward", "__gpu$xla.gpu.triton", "__onednn$matmul", "xla_ffi_python_cpu_callback",
)  # fmt: skip


@pytest.mark.unit
def test_calls_that_are_known_to_stay_on_one_device():
    """A kernel of the user whose name begins as that of one of XLA's is not known."""
    calls = (f'%c{k} = f32[8]{{0}} custom-call(%x), custom_call_target="{t}"' for k, t in enumerate(FOREIGN + LOCAL))
    assert unknown_calls(program("%x = f32[8]{0} parameter(0)", *calls)) == dict.fromkeys(FOREIGN, 1)
    for version in VERSIONS:
        assert not any(unknown_calls(load(name, version)) for name in EXPECTED)


@pytest.mark.unit
@pytest.mark.parametrize(("dtype", "unread"), [("float", 1), ("f8e4m3fn", 0)])
def test_a_collective_of_an_unknown_dtype(dtype, unread):
    line = f"ROOT %ar = ({dtype}[8]{{0}}, token[]) all-reduce(%x, %t), replica_groups={{}}, to_apply=%add"
    module = program(f"%x = {dtype}[8]{{0}} parameter(0)", "%t = token[] after-all()", line)
    sites, failed = read_collectives(module)
    assert (len(sites), len(failed)) == (1 - unread, unread)
    assert all("unknown dtype" in why for why in failed.values())


@pytest.mark.parametrize(
    ("groups", "mesh_shape", "axes"),
    [
        (((0, 2), (1, 3)), {"data": 2, "model": 2}, ("data",)),
        (((0, 1, 2, 3),), {"data": 2, "model": 2}, ("data", "model")),
        (((0, 1), (2, 3)), {"data": 4}, ("data",)),  # a part of one axis is still that axis
        (((0,), (1,)), {"data": 2}, ()),
        (((0, 1, 2, 3, 4, 5, 6, 7),), {"data": 4}, ()),  # another mesh: nothing is claimed
        (((0, 1, 2, 3), (4, 5, 6, 7)), {"pod": 2, "data": 4, "one": 1}, ("data",)),
    ],
)
def test_axes_of_groups(groups, mesh_shape, axes):
    assert axes_of(groups, mesh_shape) == axes


@pytest.mark.unit
@pytest.mark.parametrize(
    ("stack", "has_backward", "phase"),
    [
        ("jit(step)/jvp(mlp)/dot_general", True, "forward"),
        ("jit(step)/transpose(jvp(mlp))/dot_general", True, "backward"),
        ("jit(step)/while/body/checkpoint/rematted_computation/tanh", False, "backward"),
        ("jit(step)/(transpose(jvp())/dot_general:jvp()/reduce_sum)", True, "backward"),
        ("jit(step)/jzero.gather_params/sharding_constraint", False, "update"),
        ("jit(step)/jvp(jzero.gather_on_use)/sharding_constraint", True, "forward"),
        ("jit(step)/transpose", True, "update"),  # the primitive, not the transformation
        ("jit(step)/add", True, "update"),
        ("jit(predict)/add", False, "forward"),
        ("state.params['w']", True, ""),  # the name of an argument
        ("", True, ""),
    ],
)
def test_phases(stack, has_backward, phase):
    assert phase_of(stack, has_backward) == phase


def program(*lines: str, others: str = "", devices: int = 4) -> hlo.Module:
    """A module whose entry has these lines."""
    body = "\n".join(f"  {line}" for line in lines)
    return hlo.parse(
        f"HloModule m, num_partitions={devices}\n{others}\nENTRY %main (x: f32[]) -> f32[] {{\n{body}\n}}\n"
    )


@pytest.mark.unit
def test_async_start_that_calls_a_collective():
    wrapped = (
        "%wrapped (p: f32[8]) -> f32[2] {\n  %p = f32[8]{0} parameter(0)\n"
        "  ROOT %rs = f32[2]{0} reduce-scatter(%p), replica_groups=[1,4]<=[4], to_apply=%add\n}\n"
    )
    module = program(
        "%x = f32[8]{0} parameter(0)",
        "%start = ((f32[8]{0}), f32[2]{0}, u32[]) async-start(%x), calls=%wrapped, backend_config={\"is_sync\":false}",
        "%busy = f32[16]{0} fusion(%x), kind=kLoop, calls=%fused",
        "ROOT %done = f32[2]{0} async-done(%start)",
        others=wrapped,
    )
    (site,) = find_collectives(module)
    assert (site.op, site.bytes, site.wire_bytes) == ("reduce-scatter", 32, 24)
    assert (site.asynchronous, site.compute_ops, site.compute_bytes) == (True, 1, 64)


@pytest.mark.unit
def test_start_whose_done_is_in_the_next_iteration():
    module = program(
        "%x = bf16[4]{0} parameter(0)",
        "%ag = (bf16[4]{0}, bf16[16]{0}) all-gather-start(%x), replica_groups=[1,4]<=[4], dimensions={0}, "
        'backend_config={"is_sync":false}',
        "%busy = f32[16]{0} fusion(%x), kind=kLoop, calls=%fused",
        "ROOT %t = (bf16[4]{0}, bf16[16]{0}) tuple(%ag, %busy)",
    )
    (site,) = find_collectives(module)
    assert (site.bytes, site.wire_bytes, site.asynchronous, site.compute_ops) == (32, 24, True, 1)


@pytest.mark.unit
def test_loop_whose_count_is_unknown_counts_once():
    body = (
        "%body (p: f32[4]) -> f32[4] {\n  %p = f32[4]{0} parameter(0)\n"
        "  ROOT %ar = f32[4]{0} all-reduce(%p), replica_groups={}, to_apply=%add\n}\n"
        "%cond (p: f32[4]) -> pred[] {\n  ROOT %c = pred[] constant(true)\n}\n"
    )
    while_ = 'ROOT %w = f32[4]{0} while(%x), condition=%cond, body=%body, metadata={op_name="jit(f)/while"}'
    (site,) = find_collectives(program("%x = f32[4]{0} parameter(0)", while_, others=body))
    assert (site.loops, site.trips, site.group_size, site.phase) == ((0,), 1, 4, "forward")


@pytest.mark.unit
def test_both_branches_of_a_conditional_are_read():
    branch = (
        "%{n} (p{n}: f32[4]) -> f32[4] {{\n  %p{n} = f32[4]{{0}} parameter(0)\n"
        "  ROOT %ar{n} = f32[4]{{0}} all-reduce(%p{n}), replica_groups=[2,2]<=[4], to_apply=%add\n}}\n"
    )
    module = program(
        "%x = f32[4]{0} parameter(0)",
        "ROOT %c = f32[4]{0} conditional(%i, %x, %x), branch_computations={%a, %b}",
        others=branch.format(n="a") + branch.format(n="b"),
    )
    assert [site.name for site in find_collectives(module)] == ["ara", "arb"]


@pytest.mark.unit
def test_all_reduce_with_a_whole_use_beside_the_slice_is_not_sliced():
    lines = [
        "%x = f32[8]{0} parameter(0)",
        "%i = s32[] parameter(1)",
        "%ar = f32[8]{0} all-reduce(%x), replica_groups=[1,4]<=[4], to_apply=%add",
        "%scaled = f32[8]{0} multiply(%ar, %ar)",
        "%own = f32[2]{0} dynamic-slice(%scaled, %i), dynamic_slice_sizes={2}",
    ]
    assert find_collectives(program(*lines))[0].sliced
    assert not find_collectives(
        program(*lines, "%norm = f32[] reduce(%ar, %i), dimensions={0}, to_apply=%add")
    )[0].sliced
    assert not find_collectives(program(*lines, "ROOT %t = (f32[8]{0}, f32[2]{0}) tuple(%ar, %own)"))[
        0
    ].sliced
    half = "%half = f32[4]{0} dynamic-slice(%ar, %i), dynamic_slice_sizes={4}"
    assert not find_collectives(program(*lines[:3], half))[0].sliced


@pytest.mark.unit
def test_slices_inside_a_fusion():
    lines = [
        "%x = f32[8]{0} parameter(0)",
        "%ar = f32[8]{0} all-reduce(%x), replica_groups=[1,4]<=[4], to_apply=%add",
        "ROOT %f = f32[2]{0} fusion(%ar), kind=kLoop, calls=%fused",
    ]

    def fused(slice_):
        return f"%fused (p: f32[8]) -> f32[2] {{\n  %p = f32[8]{{0}} parameter(0)\n  {slice_}\n}}\n"

    own = fused("ROOT %s = f32[2]{0} dynamic-slice(%p, %p), dynamic_slice_sizes={2}")
    half = fused("ROOT %s = f32[4]{0} dynamic-slice(%p, %p), dynamic_slice_sizes={4}")
    assert find_collectives(program(*lines, others=own))[0].sliced
    assert not find_collectives(program(*lines, others=half))[0].sliced
    assert not find_collectives(program(*lines))[0].sliced  # a fusion that is not in the text


@pytest.mark.unit
def test_undifferentiated_code_is_the_update_where_there_is_a_backward_pass():
    def gather(name):
        metadata = f'metadata={{op_name="{name}"}}'
        return f"%g{len(name)} = f32[8]{{0}} all-gather(%x), replica_groups=[1,4]<=[4], {metadata}"

    gathers = gather("jit(step)/sub"), gather("jit(step)/transpose(jvp())/dot_general")
    assert [s.phase for s in find_collectives(program(*gathers))] == ["update", "backward"]
    assert [s.phase for s in find_collectives(program(gathers[0]))] == ["forward"]


@pytest.mark.unit
def test_permute_that_moves_nothing_sends_nothing():
    line = "%p = f32[4]{{0}} collective-permute(%x), source_target_pairs={}"
    still, moving = (program(line.format(pairs)) for pairs in ("{{0,0},{1,1}}", "{{0,0},{1,0}}"))
    assert find_collectives(still)[0].wire_bytes == 0
    assert find_collectives(moving)[0].wire_bytes == 16


@pytest.mark.unit
@pytest.mark.parametrize(
    ("line", "shapes"),
    [
        ("%a = s4[3]{0} parameter(0)", [("s4", (3,), 2)]),  # packed
        ("%a = f8e4m3fn[4,2]{1,0:T(8,128)(2,1)} parameter(0)", [("f8e4m3fn", (4, 2), 8)]),
        ("%a = pred[] parameter(0)", [("pred", (), 1)]),
        ("%a = c64[2]{0} parameter(0)", [("c64", (2,), 16)]),
        ("%a = f32[<=8,2]{1,0} parameter(0)", [("f32", (8, 2), 64)]),
        ("ROOT %a = (f32[2]{0}, /*index=1*/(bf16[4]{0:S(5)}, token[])) tuple(%b, /*index=1*/%c)",
         [("f32", (2,), 8), ("bf16", (4,), 8), ("token", (), 0)]),
    ],
)  # fmt: skip
def test_types_of_results(line, shapes):
    instruction = hlo.parse_instruction("  " + line)
    assert instruction is not None
    assert [(s.dtype, s.dims, s.nbytes) for s in instruction.shapes] == shapes
    assert [s.on_host for s in instruction.shapes] == ["S(5)" in line and s[0] == "bf16" for s in shapes]


@pytest.mark.unit
def test_an_instruction_in_parts():
    line = (
        r"  ROOT %f.1 = f32[2]{0} fusion(%a, /*index=1*/%b.2), kind=kLoop, calls=%fused, "
        r'metadata={op_name="jit(f)/p[\"w\"]/add" stack_frame_id=3}, backend_config={"x":"(}"}'
    )
    i = hlo.parse_instruction(line)
    assert i is not None
    assert (i.name, i.opcode, i.operands, i.is_root) == ("f.1", "fusion", ("a", "b.2"), True)
    assert i.op_name == r"jit(f)/p[\"w\"]/add"
    assert i.callees() == ("fused",)
    assert i.callees("body") == ()


@pytest.mark.unit
def test_lowered_text_is_refused():
    with pytest.raises(ValueError, match=r"must|call \.compile\(\) first"):
        hlo.parse("module @jit_f attributes {mhlo.num_partitions = 1 : i32} {}")


@pytest.mark.unit
def test_the_work_of_reading_grows_with_the_text():
    """Counted in function calls, not in seconds: four times the text, at most five times the calls."""
    entry = "\n".join(load("unrolled_stage2_async.h200", VERSIONS[-1]).computations["main.0_spmd"].lines)

    def calls(copies):
        renamed = (re.sub(r"%([\w.\-]+)", rf"%\1.c{k}", entry.replace("ROOT ", "")) for k in range(copies))
        body = "\n".join(renamed)
        text = f"HloModule m, num_partitions=8\n\nENTRY %main (x: f32[]) -> f32[] {{\n{body}\n}}\n"
        with cProfile.Profile() as profile:
            found = find_collectives(hlo.parse(text))
        assert len(found) == 5 * copies
        return sum(row.callcount for row in profile.getstats())

    assert calls(16) < 5 * calls(4)
