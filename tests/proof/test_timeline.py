"""The model of a schedule: what hides behind arithmetic, worked out by hand."""

from __future__ import annotations

import pytest

from jzero.proof.collectives import read_collectives
from jzero.proof.fitting.rates import Rates
from jzero.proof.hlo import parse
from jzero.proof.timeline import rates_of_kind, waits_of

# a matmul of 2 x 64^3 FLOPs takes 0.524288 s; 3072 bytes on the wire 3.072 s within a host; memory costs nothing
RATES = Rates(flops=2e6, memory=1e12, within_host=1e3, between_hosts=5e2, pcie=1, reached=0.5)
DOT, WIRE = 0.524288, 3.072

HEAD = "HloModule jit_step, is_scheduled=true, num_partitions=4\n"
GATHER = "(f32[256]{0}, f32[1024]{0}) all-gather-start(%p1), dimensions={0}"


def program(*lines: str, before: str = "") -> str:
    body = "\n".join(
        [
            "ENTRY %main (p0: f32[64,64], p1: f32[256]) -> f32[64,64] {",
            "  %p0 = f32[64,64]{1,0} parameter(0)",
            "  %p1 = f32[256]{0} parameter(1)",
            *lines,
            "  ROOT %out = f32[64,64]{1,0} copy(%p0)",
            "}",
        ]
    )
    return f"{HEAD}\n{before}\n{body}\n"


def start(name: str, groups: str = "{{0,1,2,3}}", sync: str = "false") -> str:
    return f'  %{name} = {GATHER}, replica_groups={groups}, backend_config={{"is_sync":{sync}}}'


def done(name: str) -> str:
    return f"  %{name}.done = f32[1024]{{0}} all-gather-done(%{name})"


def dots(*names: str) -> list[str]:
    end = "dot(%p0, %p0), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    return [f"  %{name} = f32[64,64]{{1,0}} {end}" for name in names]


def modelled(text: str, hosts=(0, 0, 0, 0)):
    module = parse(text)
    sites, failed = read_collectives(module)
    assert not failed
    return waits_of(module, sites, hosts, RATES)


def waits(text: str, hosts=(0, 0, 0, 0)) -> dict[str, float]:
    return {name: w.waits for (_, name), w in modelled(text, hosts)[0].items()}


@pytest.mark.unit
def test_a_collective_hides_behind_what_stands_beside_it():
    assert waits(program(start("g"), *dots("a", "b"), done("g"))) == {"g": pytest.approx(WIRE - 2 * DOT)}
    assert waits(program(start("g"), *dots("a", "b", "c", "d", "e", "f"), done("g"))) == {"g": 0}
    assert waits(program(*dots("a"), start("g"), done("g"), *dots("b"))) == {"g": pytest.approx(WIRE)}


@pytest.mark.unit
def test_two_in_flight_share_the_link_and_what_hides_them():
    found = waits(program(start("g"), start("h"), *dots("a", "b"), done("g"), done("h")))
    assert found == {"g": pytest.approx(WIRE - 2 * DOT), "h": pytest.approx(WIRE)}


@pytest.mark.unit
def test_what_is_synchronous_hides_nothing():
    found = waits(program(start("g", sync="true"), *dots("a"), done("g")))
    assert found == {"g": pytest.approx(WIRE)}


@pytest.mark.unit
def test_a_wait_is_that_of_every_collective_on_its_way():
    """One that is started before a synchronous one is not hidden by the wait for that."""
    found, total = modelled(program(start("g"), start("h", sync="true"), done("h"), *dots("a"), done("g")))
    assert [w.waits for w in found.values()] == [pytest.approx(WIRE)] * 2
    assert total == pytest.approx(2 * WIRE)


@pytest.mark.unit
def test_a_loop_waits_in_each_round_and_an_update_in_place_writes_a_slice():
    stack = "f32[1000,64,64]{2,1,0}"
    body = "\n".join(
        [
            "%body (t: (f32[64,64], f32[256], f32[1000,64,64])) -> (f32[64,64], f32[256], f32[1000,64,64]) {",
            f"  %t = (f32[64,64]{{1,0}}, f32[256]{{0}}, {stack}) parameter(0)",
            "  %p0 = f32[64,64]{1,0} get-tuple-element(%t), index=0",
            "  %p1 = f32[256]{0} get-tuple-element(%t), index=1",
            f"  %s = {stack} get-tuple-element(%t), index=2",
            start("g"),
            *dots("a"),
            f"  %u = {stack} dynamic-update-slice(%s, %p0)",
            done("g"),
            f"  ROOT %r = (f32[64,64]{{1,0}}, f32[256]{{0}}, {stack}) tuple(%p0, %p1, %u)",
            "}",
        ]
    )
    trips = 'body=%body, backend_config={"known_trip_count":{"n":"3"}}'
    loop = f"  %w = (f32[64,64]{{1,0}}, f32[256]{{0}}, {stack}) while(%p0), {trips}"
    found, total = modelled(program(loop, before=body))
    assert [w.waits for w in found.values()] == [pytest.approx(WIRE - DOT, rel=1e-4)]
    assert total == pytest.approx(3 * (WIRE - DOT), rel=1e-4)


@pytest.mark.unit
def test_small_kernels_hide_next_to_nothing():
    small = "  %s = f32[2]{0} slice(%p1), slice={[0:2]}"
    assert waits(program(start("g"), small, done("g"))) == {"g": pytest.approx(WIRE, abs=1e-9)}


@pytest.mark.unit
def test_the_link_between_hosts_is_one_for_all_groups_of_a_host():
    """[0, 2] and [1, 3] each have a device on both hosts: two times 2048 bytes leave each."""
    pairs = "{{0,2},{1,3}}"
    inside = waits(program(start("g", pairs), done("g")))
    across = waits(program(start("g", pairs), done("g")), hosts=(0, 0, 1, 1))
    assert across["g"] == pytest.approx(4 * inside["g"])  # at half of the rate
    both = program(start("g", "{{0,1},{2,3}}"), start("h", pairs), *dots("a"), done("g"), done("h"))
    found, total = modelled(both, hosts=(0, 0, 1, 1))  # on two links at once
    by_name = {name: w.waits for (_, name), w in found.items()}
    assert by_name == {"g": pytest.approx(inside["g"] - DOT), "h": pytest.approx(across["g"] - DOT)}
    assert total == pytest.approx(across["g"] - DOT)


@pytest.mark.unit
def test_matmuls_in_fusions_and_in_calls_of_libraries_and_loops():
    fused = "\n".join(
        [
            "%fused (a: f32[64,64]) -> f32[64,64] {",
            "  %a = f32[64,64]{1,0} parameter(0)",
            "  ROOT %d = f32[64,64]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
            "}",
        ]
    )
    fusion = "  %x = f32[64,64]{1,0} fusion(%p0), kind=kCustom, calls=%fused"
    config = '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'
    library = (
        "  %y = (f32[64,64]{1,0}, s8[4]{0}) custom-call(%p0, %p0), "
        f'custom_call_target="__cublas$gemm", backend_config={config}'
    )
    text = program(start("g"), fusion, library, done("g"), before=fused)
    assert waits(text) == {"g": pytest.approx(WIRE - 2 * DOT, abs=1e-6)}


@pytest.mark.unit
def test_only_gpus_of_the_table_have_rates():
    assert rates_of_kind("NVIDIA H100 80GB HBM3")[0] == "h100"
    assert rates_of_kind("NVIDIA A100-SXM4-80GB")[0] == "a100-80gb"
    assert rates_of_kind("cpu") is None
    assert rates_of_kind("NVIDIA H20") is None
