"""The page of a step: memory along the schedule is XLA's own, rows add up, nothing comes from a network, it renders."""

from __future__ import annotations

import html
import itertools
import json
import re
import shutil
import subprocess

import jax
import jax.numpy as jnp
import pytest
from programs import gpt_step, program, tokens

import jzero
from jzero.core.compile_only import buffers_of
from jzero.proof.buffers import read_buffers
from jzero.proof.page import page_of, program_of

pytestmark = pytest.mark.pod
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
HOST = jzero.Offload(tier="host")


def made(**fields):
    """A small GPT at stage 3, compiled with its buffers."""
    return program(**{"stage": 3, "buffers": True, **fields})


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The file of its page."""
    path = tmp_path_factory.mktemp("page") / "step.html"
    one = made()
    jzero.write_html(path, one.program, one.plan, title="A small </script> GPT")
    return path


def data_of(path):
    """What the page shows of its program, and all strings by number."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(), re.DOTALL)
    (only,) = json.loads(text)["programs"]
    return only, only["strings"]


def buffers(one):
    return read_buffers(buffers_of(one.program))


@pytest.mark.default_cases("fields0")
@pytest.mark.parametrize(
    "fields", [{}, {"stage": 2, "size": (("scan", True),)}, {"offload": HOST}, {"n": 64, "stage": 1}, {"quick": False}]
)
def test_the_highest_point_is_the_peak_that_xla_counts(fields):
    """With what is in host memory, which XLA adds."""
    one = made(**fields)
    in_use, memory = max(buffers(one).in_use()), one.report.memory
    assert abs(in_use + memory.host_total - memory.peak) < 1000
    assert (memory.host_total > 0) == ("offload" in fields)


def test_no_two_slots_share_a_byte_at_one_time():
    """So the view by address shows what is there."""
    found = buffers(made())
    for at in range(len(found.schedule)):
        rows = sorted((s.offset, s.size) for s in found.slots if s.start <= at <= s.end)
        assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(rows))
    most = max(s.offset + s.size for s in found.slots)
    assert 0 <= found.reserved - most < 1024


def test_rows_add_up_to_the_curve_and_to_the_report(page):
    data, strings = data_of(page)
    line, one = data["timeline"], made()
    rows = [*line["held"], *line["slots"]]
    for k in (0, line["points"].index(line["peak_at"]), len(line["points"]) // 2):
        at = line["points"][k]
        listed = [0] * len(line["kinds"])
        for _, kind, size, _, start, end, *_ in rows:
            listed[kind] += size if start <= at <= end else 0
        for kind, series, known in zip(line["kinds"], line["series"], listed, strict=True):
            assert 0 <= series[k] - known < 0.01 * line["peak"], kind
    at_peak = line["points"].index(line["peak_at"])
    assert sum(series[at_peak] for series in line["series"]) == line["peak"]
    by_kind = {kind: series[0] for kind, series in zip(line["kinds"], line["series"], strict=True)}
    memory = one.report.memory
    assert (by_kind["params"], by_kind["optimizer state"]) == (memory.params, memory.opt_state)
    assert sum(row[4] for row in data["collectives"]) == one.report.wire.total
    assert {strings[row[6]] for row in data["collectives"]} == {"data"}
    assert [row[0] for row in data["leaves"]] == [x.name for x in one.plan.layouts]


def test_weights_are_gathered_and_named_by_their_line(page):
    """A program that splits nothing has no such slots."""
    data, strings = data_of(page)
    line = data["timeline"]
    gathered = [row for row in line["slots"] if line["kinds"][row[1]] == "gathered weights"]
    kernel = made().plan.layouts[-1]
    assert max(row[2] for row in gathered) >= kernel.nbytes > 0
    lines = {strings[row[8]].partition(":")[0] for row in gathered}
    assert lines <= {"tests/programs.py", ""}
    assert "tests/programs.py" in lines
    params = {strings[row[0]] for row in line["held"] if row[1] == 0}
    assert any("Dense_0" in name for name in params), params
    whole = {strings[row[0]]: row[2] for row in line["held"] if row[1] == 0}
    stored = {x.name: x.nbytes // 8 for x in made().plan.layouts if not x.reason}
    assert sorted(whole.values())[-8:] == sorted(stored.values())[-8:]


def test_saved_values_and_gradients_are_told_apart(page):
    data, _ = data_of(page)
    line = data["timeline"]
    most = {kind: max(series) for kind, series in zip(line["kinds"], line["series"], strict=True)}
    for kind in ("saved for the backward pass", "backward pass", "gradients, until the update"):
        assert most[kind] > 0, kind
    assert most["gradients, until the update"] >= made().plan.param_bytes // 8


def test_the_page_needs_no_network(page):
    """No address, nothing to load; a name that looks like markup stays a text."""
    text = page.read_text()
    assert not re.findall(r"https?:|//[a-z]+\.[a-z]|@import|\bsrc\s*=|fetch\(|XMLHttpRequest|import\(", text)
    assert re.findall(r'<link[^>]*href="([^"]*)"', text) == ["data:,"]
    assert text.count("</script>") == 2
    assert "@DATA@" not in text


def test_a_program_of_the_cpu_has_no_memory_along_the_schedule(tmp_path):
    plan = jzero.make_plan({"w": jnp.ones((64, 64))}, stage=0)
    step = jax.jit(lambda params, x: (x @ params["w"]).sum())
    compiled = step.lower(plan.shapes, jnp.ones((8, 64))).compile()
    path = tmp_path / "cpu.html"
    jzero.write_html(str(path), compiled, plan)
    data, _ = data_of(path)
    assert data["timeline"] is None
    assert data["memory"]["arguments"] == 4 * (64 * 64 + 8 * 64)


def test_what_cannot_be_written_is_refused_first(tmp_path):
    one = made()
    with pytest.raises(FileNotFoundError, match="no folder"):
        jzero.write_html(tmp_path / "none" / "a.html", one.program, one.plan)
    with pytest.raises(TypeError, match="path must be a string or a path, got int"):
        jzero.write_html(3, one.program, one.plan)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="plan"):
        jzero.write_html(tmp_path / "a.html", one.program, None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="needs a compiled program, got str"):
        jzero.write_html(tmp_path / "a.html", "text", one.plan)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_buffers_and_files_of_xla_do_not_go_together(tmp_path):
    one = made()
    with pytest.raises(ValueError, match="leave out xla_dump_to"):
        jzero.pod("h200").compile(
            gpt_step, one.state, tokens(), plan=one.plan, compiler_options={"xla_dump_to": str(tmp_path)}, buffers=True
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.unit
@pytest.mark.parametrize(
    "text", ["", "BufferAssignment:\n", "  InstructionSequence:\n    0:a\nBufferAssignment:\n value?"]
)
def test_text_that_is_not_known_is_said(text):
    with pytest.raises(ValueError, match="jzero: "):
        read_buffers(text)


def rendered(page, hash_: str, tmp_path) -> str:
    """The page as a browser has built it, without a network."""
    if CHROMIUM is None:
        pytest.skip("no Chromium here: `apt-get install chromium`")
    offline = ["--proxy-server=127.0.0.1:9", f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=5000"]
    command = [CHROMIUM, *FLAGS, *offline, "--dump-dom", f"{page.as_uri()}#{hash_}"]
    return html.unescape(subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout)


def rows_of(dom: str, table: str) -> list[list[str]]:
    (body,) = re.findall(rf'<table id="{table}">.*?<tbody>(.*?)</tbody>', dom, re.DOTALL)
    return [re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL) for row in re.findall(r"<tr.*?</tr>", body, re.DOTALL)]


def test_a_browser_renders_it_and_filters(page, tmp_path):
    data, _ = data_of(page)
    dom = rendered(page, "a=params&c=reduce-scatter&l=dense_1", tmp_path)
    assert "<b>A small" not in dom
    assert re.search(r'<h1 id="title">A small </script> GPT</h1>', dom)
    alive, collectives, leaves = (rows_of(dom, name) for name in ("alive", "collectives", "leaves"))
    assert alive
    assert all(row[3] == "params" for row in alive)
    assert collectives
    assert {row[0] for row in collectives} == {"reduce-scatter"}
    assert leaves
    assert len(leaves) < len(data["leaves"])
    assert all("Dense_1" in row[0] for row in leaves)
    assert re.search(r'id="alive-title">In use at the peak: \d', dom)
    (note,) = re.findall(r'<p id="memory-note">(.*?)</p>', dom)
    assert note.startswith("From XLA's own buffer assignment")
    assert "Beware" not in note


@pytest.mark.nightly
def test_a_browser_shows_another_place_and_all_rows(page, tmp_path):
    data, strings = data_of(page)
    line = data["timeline"]
    dom = rendered(page, "at=0&v=address", tmp_path)
    assert 'id="alive-title">In use at 0: ' in dom
    assert re.search(r'<button id="by-address" aria-pressed="true"', dom)
    names = {strings[row[0]] for row in [*line["held"], *line["slots"]] if row[4] == 0}
    assert {row[0] for row in rows_of(dom, "alive")} == {name or "(no name)" for name in names}
    assert len(rows_of(dom, "collectives")) == len(data["collectives"])


@pytest.mark.nightly
def test_a_page_of_unrolled_layers_is_small():
    """Its size follows the number of instructions; 36 layers, as in a GPT of 7.5B, take 0.7 MB."""
    one = made(size=(("layers", 10), ("dim", 128), ("heads", 4)))
    shown = program_of(one.program, one.plan, one.report, jzero.findings(one.program, one.plan))
    assert len(page_of([shown], title="10 layers")) < 400_000
