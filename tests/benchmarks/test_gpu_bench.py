"""benchmarks/gpu.py: every part leaves rows, one that fails leaves the others, the page says what was not done."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import jzero
from benchmarks import gpu  # puts its folder on the path

# isort: split
from gpu_parts import PARTS, cost, machine, page, peaks, streams, switches

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks/gpu.py"


def printed(out: Path, *flags: str) -> tuple[str, list[dict]]:
    """The page and the rows of a run in the short form."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    command = [sys.executable, str(SCRIPT), "--tiny", "--out", str(out), *flags]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    (path,) = out.glob("*-gpu-cpu-short.md")
    rows = [json.loads(line) for line in path.with_suffix(".jsonl").read_text().splitlines()]
    return path.read_text(), rows


@pytest.mark.nightly
def test_every_part_leaves_rows(tmp_path):
    text, events = printed(tmp_path, "--minutes", "20")
    assert [e for e in events if "failed" in e] == []
    for name in PARTS:
        assert any(e["part"] == name and "cannot" not in e.get("row", {"cannot": 0}) for e in events), name
    assert "No GPU has run this page" in text
    assert f"jax {jax.__version__}" in text
    assert "`python benchmarks/gpu.py --tiny" in text
    limits = text[text.index("## Could not do") :]
    assert "`memory_stats`" in limits
    assert all(e["row"]["ok"] for e in events if e["part"] == "numbers" and "ok" in e.get("row", {}))


@pytest.mark.nightly
def test_a_part_that_crashes_or_hangs_leaves_the_others(tmp_path):
    """It raises, its process dies, it hangs: three cases, a line for each, and the part behind it runs."""
    flags = ["--parts", "--also", "gpu_bench_broken", "gpu_bench_well", "--minutes", "0.4"]
    text, events = printed(tmp_path, *flags)
    failed = {e["case"]: e["failed"] for e in events if "failed" in e}
    assert failed["raises"] == "ValueError: on purpose"
    assert "ended with 7" in failed["dies"]
    assert re.search(r"ended after the part's \d+ s", failed["hangs"])
    rows = [(e["part"], e["row"]) for e in events if "row" in e]
    assert rows == [
        ("gpu_bench_broken", {"value": 1}),  # of the case that raised after it
        ("gpu_bench_broken", {"value": 2}),
        ("gpu_bench_well", {"value": 3, "ok": True}),
    ]
    limits = text[text.index("## Could not do") :]
    assert "gpu_bench_broken, dies: its process ended with 7; last words: dying" in limits
    assert "gpu_bench_broken: no time for 1 of 5 cases: never" in limits
    assert "peak: not asked for" in limits
    assert "| gpu_bench_well |" in text
    assert "| 3 | pass |" in text


def test_budget_is_a_share_of_what_is_left():
    weights = [3.0, 1.0, 2.0]
    assert gpu.budget(60, weights) == 30
    assert gpu.budget(50, weights[1:]) == pytest.approx(50 / 3)  # the first needed 10 of its 30: 50 are left
    assert gpu.budget(33, weights[2:]) == 33
    assert gpu.budget(-1, weights) == 0


def test_page_of_a_run_that_was_cut_short():
    part = {
        "name": "peak", "title": "Peak", "asked": "Within 3 %.", "budget": 100.4, "seconds": 98.7, "finished": 1,
        "cases": ["a", "b", "c"], "left": "no time for 1 of 3 cases: c", "findings": ["1 of 1 within 3 %"],
    }  # fmt: skip
    events = [
        {"part": "peak", "case": "a", "begun": True},
        {
            "part": "peak",
            "case": "a",
            "row": {"stage": 2, "compiled, GB": 1.23456, "off, %": None, "ok": False},
        },
        {"part": "peak", "case": "a", "row": {"stage": 3, "": "a | b", "ok": True}},
        {"part": "peak", "case": "a", "row": {"cannot": "a thing"}},
        {"part": "peak", "case": "a", "row": {"cannot": "a thing"}},
        {"part": "peak", "case": "b", "failed": "out of memory"},
    ]
    machine = {
        "platform": "cuda",
        "kind": "NVIDIA H200",
        "count": 2,
        "python": "3.12.3",
        "versions": {"jax": "0.11.2"},
    }
    run = {
        "date": "2026-01-02", "command": "python benchmarks/gpu.py", "minutes": 9.0, "took": 120.0, "machine": machine,
        "driver": "Driver 1.", "environment": {"XLA_FLAGS": "--x"}, "parts": ["peak", "cost", "rate"],
        "asked": ["peak", "cost"],
    }  # fmt: skip
    text = page.page(run, [part], events)
    assert text.startswith("# What compiling cannot settle: 2 x NVIDIA H200, 2026-01-02\n")
    assert "No GPU has run this page" not in text
    for line in (
        "| stage | compiled, GB | off, % | ok |  |",
        "| 2 | 1.235 |  | FAIL |  |",
        "| 3 |  |  | pass | a \\| b |",
        "| peak | 100 | 99 | 1 of 3 |",
        "- 1 of 1 within 3 %",
    ):
        assert f"\n{line}\n" in text
    assert text.endswith(
        "## Could not do\n\n- peak: a thing\n- peak, b: out of memory\n- peak: no time for 1 of 3 cases: c\n"
        "- cost: not run yet\n- rate: not asked for\n"
    )


def test_every_switch_finds_what_it_replaces():
    for switch in switches.SWITCHES:
        places = [switches.owner_of(where) for where, _ in switch.patches]
        before = [getattr(*place) for place in places]
        with switches.off(switch):
            assert all(getattr(*place) is not old for place, old in zip(places, before, strict=True))
        assert [getattr(*place) for place in places] == before
        assert switch.patches or switch.fields
        tier = {"in_flight_bytes"} & dict(switch.fields).keys()
        jzero.ZeroConfig(stage=switch.stages[-1], **{k: v for k, v in switch.fields if k not in tier})
    assert {s.name for s in switches.of(1, True)} == {s.name for s in switches.SWITCHES if s.offload}
    with pytest.raises(AttributeError, match="sharded_update:gone is gone"):
        switches.owner_of("jzero.update.sharded_update:gone")


def test_what_is_a_candidate_for_deletion():
    assert cost.candidate(0.95, 0.01, 100, 100)
    assert not cost.candidate(0.95, 0.01, 100, 120), "it saves memory"
    assert not cost.candidate(0.95, 0.06, 100, 100), "the noise is more than that"
    assert not cost.candidate(0.995, 0.0, 100, 100), "less than a hundredth"
    assert not cost.candidate(1.1, 0.01, 100, 100), "it saves time"


def test_peaks_are_compared_where_the_step_has_raised_them():
    columns = peaks.compared(1000, 900, 1020)
    assert columns["off, %"] == pytest.approx(2)
    assert columns["ok"] is True
    assert peaks.compared(1000, 900, 1040)["ok"] is False
    assert peaks.compared(1000, 1100, 1100)["ok"] is None, "what came before took more"
    assert peaks.compared(1000, None, None)["ok"] is None, "a CPU"


def test_rates_of_known_devices():
    assert machine.flops_limit("NVIDIA H100 80GB HBM3") == 989e12
    assert machine.flops_limit("NVIDIA H100 PCIe") == 756e12
    assert machine.flops_limit("NVIDIA L40S") == 362e12
    assert machine.flops_limit("NVIDIA L4") == 121e12
    assert machine.flops_limit("cpu") is None


def test_intervals_of_streams():
    up, down = streams.union([(5, 7), (0, 2), (1, 3)]), streams.union([(2, 6)])
    assert up == [(0, 3), (5, 7)]
    assert streams.both(up, down) == [(2, 3), (5, 6)]
    assert streams.both(up, [(3, 5)]) == []
    assert streams.length(up) == 5
