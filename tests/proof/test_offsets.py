"""Offsets that XLA writes beside slices in loops, against their indices: stored programs of both jax versions."""

from __future__ import annotations

import gzip
import pathlib
import types

import pytest

from jzero.proof import hlo
from jzero.proof.faults.blind import slices_unread
from jzero.proof.faults.steps import slices_wrong
from jzero.proof.offsets import wrong_slices

HERE = pathlib.Path(__file__).parents[1] / "hlo"
LAYER = 4 * 256 * 2  # bytes of a layer's input on one device


def text_of(program, version):
    return gzip.decompress((HERE / f"{program}.h200.jax{version}.txt.gz").read_bytes()).decode()


def found_in(text, unread=()):
    wrong, names = wrong_slices(hlo.parse(text))
    assert names == list(unread)
    return wrong


def test_a_backward_loop_that_reads_the_host_as_a_forward_one_would():
    (found,) = found_in(text_of("host_scan", "0.10.2"))
    assert (found.written, found.needed) == ((0, LAYER), (5 * LAYER, -LAYER))
    assert (found.array.dims, found.array.on_host, found.bytes, found.trips) == ((6, 4, 256), True, LAYER, 6)


@pytest.mark.parametrize(
    "program", ["host_scan", "scan_stage3", "accumulate", "host_moments", "unrolled_stage2"]
)
@pytest.mark.parametrize("version", ["0.10.2", "0.12.0.1"])
def test_right_offsets_are_passed_over(program, version):
    if (program, version) != ("host_scan", "0.10.2"):
        assert found_in(text_of(program, version)) == []


@pytest.mark.parametrize(
    ("version", "right", "wrong"),
    [
        (
            "0.10.2",
            '"byte_offset":"655360","byte_stride":"-131072"',
            '"byte_offset":"0","byte_stride":"131072"',
        ),
        ("0.12.0.1", '"byte_offset":"10240","byte_stride":"-2048"', '"byte_offset":"0","byte_stride":"2048"'),
        ("0.12.0.1", '"byte_offset":"0","byte_stride":"2048"', '"byte_offset":"10240","byte_stride":"-2048"'),
        ("0.12.0.1", '"byte_offset":"655360","byte_stride":"-131072"', '"byte_offset":"655360"'),
    ],
)
def test_a_wrong_one_is_found_in_both_forms_read_or_written(version, right, wrong):
    text = text_of("host_scan", version)
    assert right in text
    assert len(found_in(text.replace(right, wrong))) == text.count(right) + len(found_in(text))


@pytest.mark.parametrize(
    ("old", "new"),
    [("%param_1.34 = s32[] parameter(1)", "%param_1.34 = s32[] custom-call()"), (" subtract(", " ponder(")],
)
def test_an_index_that_cannot_be_computed_is_named(old, new):
    text = text_of("host_scan", "0.10.2")
    unknown = text.replace(old, new)
    assert unknown != text
    assert found_in(unknown, unread=["dynamic-slice.2.1"]) == []
    evidence = types.SimpleNamespace(slices=wrong_slices(hlo.parse(unknown)))
    (said,) = slices_unread(evidence)
    assert "1 slice of host memory in a loop with an index that jzero cannot compute" in said
    assert "%dynamic-slice.2.1." in said
    on_device = unknown.replace(":S(5)", "")
    assert found_in(on_device) == []


def test_indices_that_are_divided():
    """Toward zero: -7 / 2 is -3, and the remainder -1."""
    config = '"loop_index":"0","byte_offset":"0","byte_stride":"4"'
    text = PROGRAM.format(config=f'backend_config={{"dynamic_slice_config":{{{config}}}}}')

    def first(*lines):
        text_of_index = "\n  ".join(f"%{line}" for line in lines)
        return found_in(text.replace("%zero =", f"{text_of_index}\n  %zero =").replace("(%x, %i,", "(%x, %index,"))

    signed = "seven = s32[] constant(-7)", "two = s32[] constant(2)", "four = s32[] constant(4)"
    for opcode, expected in (("divide", 1), ("remainder", 3)):
        (found,) = first(*signed, f"part = s32[] {opcode}(%seven, %two)", "index = s32[] add(%part, %four)")
        assert found.needed == (4 * expected, 0)


def test_layouts_and_outer_loops():
    """Column-major in memory; the index is that of the outer loop, handed through the inner one."""

    def program(level, stride):
        config = f'"loop_index":"{level}","byte_offset":"0","byte_stride":"{stride}"'
        return PROGRAM.format(config=f'backend_config={{"dynamic_slice_config":{{{config}}}}}')

    assert found_in(program(1, 4)) == []
    (found,) = found_in(program(1, 256))
    assert found.needed == (0, 4)
    (found,) = found_in(program(0, 4))
    assert found.needed == (0, 0)
    assert found_in(program(2, 4), unread=["piece"]) == []  # there are two loops
    assert found_in(program(2, 4).replace(":S(5)", "")) == []


def test_the_finding_says_where_and_the_remedy():
    def rule(version):
        evidence = types.SimpleNamespace(slices=wrong_slices(hlo.parse(text_of("host_scan", version))))
        return list(slices_wrong(evidence))

    assert rule("0.12.0.1") == []
    ((text, size, remedy),) = rule("0.10.2")
    assert "%dynamic-slice.2.1 of bf16[6,4,256] on the host begins at byte 10240 and goes on by -2048" in text
    assert size == 6 * LAYER
    assert "jaxlib >= 0.11.2" in remedy
    assert "46231" in remedy


PROGRAM = """HloModule nested, is_scheduled=true

%inner_body (p: (s32[], s32[], f32[8,64])) -> (s32[], s32[], f32[8,64]) {{
  %p = (s32[], s32[], f32[8,64]{{0,1}}) parameter(0)
  %j = s32[] get-tuple-element(%p), index=0
  %i = s32[] get-tuple-element(%p), index=1
  %x = f32[8,64]{{0,1:S(5)}} get-tuple-element(%p), index=2
  %zero = s32[] constant(0)
  %one = s32[] constant(1)
  %piece = f32[1,64]{{0,1}} dynamic-slice(%x, %i, %zero), dynamic_slice_sizes={{1,64}}, {config}
  %next = s32[] add(%j, %one)
  ROOT %out = (s32[], s32[], f32[8,64]{{0,1}}) tuple(%next, %i, %x)
}}

%outer_body (q: (s32[], f32[8,64])) -> (s32[], f32[8,64]) {{
  %q = (s32[], f32[8,64]{{0,1}}) parameter(0)
  %n = s32[] get-tuple-element(%q), index=0
  %y = f32[8,64]{{0,1:S(5)}} get-tuple-element(%q), index=1
  %nought = s32[] constant(0)
  %start = (s32[], s32[], f32[8,64]{{0,1}}) tuple(%nought, %n, %y)
  %loop = (s32[], s32[], f32[8,64]{{0,1}}) while(%start), body=%inner_body, c={{"known_trip_count":{{"n":"3"}}}}
  %unit = s32[] constant(1)
  %step = s32[] add(%n, %unit)
  ROOT %outs = (s32[], f32[8,64]{{0,1}}) tuple(%step, %y)
}}

ENTRY %main (a: f32[8,64]) -> (s32[], f32[8,64]) {{
  %a = f32[8,64]{{0,1:S(5)}} parameter(0)
  %first = s32[] constant(0)
  %begin = (s32[], f32[8,64]{{0,1}}) tuple(%first, %a)
  ROOT %all = (s32[], f32[8,64]{{0,1}}) while(%begin), body=%outer_body, c={{"known_trip_count":{{"n":"8"}}}}
}}
"""
