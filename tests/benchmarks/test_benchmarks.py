"""benchmarks/step.py: both programs of a pair compute the same, the page is written, the interval is right."""

from __future__ import annotations

import collections
import math
import re
import types
from typing import Any

import jax
import numpy as np
import pytest
import tyro

from benchmarks import hand, step

FLAGS = ["--sizes", "tiny", "--forms", "unrolled", "--stages", "2", "--rounds", "2", "--seconds", "0.01", "--muon"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A short run: its config, its pairs by label, the page."""
    out = ["--out", str(tmp_path_factory.mktemp("results")), "--date", "2026-01-02"]
    config = tyro.cli(step.Config, args=[*FLAGS, *out])
    pairs = step.measure(config)
    path = step.write(config, pairs, whole_below=step.MIN_SHARD_BYTES, flags=FLAGS, seconds=60.0)
    return config, {p.label: p for p in pairs}, path


@pytest.mark.nightly
def test_both_programs_compute_the_same(measured):
    pair = measured[1]["2"]
    ours, by_hand = (p.losses for p in pair.programs)
    assert len(ours) == 3
    assert ours[2] < ours[1] < ours[0], "the state moves"
    assert ours[2] == pytest.approx(by_hand[2], rel=1e-5)
    assert measured[1]["plain Flax, all devices / one"].loss_difference < 1e-5


@pytest.mark.nightly
def test_all_three_muons_are_one_and_one_has_owners(measured):
    by_hand, replicated = (measured[1][f"2, Muon / {name}"] for name in ("by hand", "replicated"))
    for pair in (by_hand, replicated):
        assert pair.loss_difference < 1e-4
    ours, gathered = by_hand.programs
    assert ours.opcodes["all-to-all"]
    assert not gathered.opcodes["all-to-all"]
    assert gathered.report.memory.temp > 2 * ours.report.memory.temp  # all matrices


@pytest.mark.nightly
def test_a_pair_is_split_as_its_stage_says(measured):
    for program in measured[1]["2"].programs:
        moment = program.state.opt_state[1][0].mu["head"]["kernel"]
        assert "data" in moment.sharding.spec
        assert program.state.params["head"]["kernel"].sharding.is_fully_replicated


@pytest.mark.nightly
def test_ratios_are_first_over_second(measured):
    for pair in measured[1].values():
        assert pair.ratios.shape == (2,)
        np.testing.assert_allclose(pair.ratios, pair.seconds[0] / pair.seconds[1])
        assert np.all(pair.ratios > 0)


@pytest.mark.nightly
def test_page_and_plot(measured):
    config, pairs, path = measured
    assert path == config.out / "2026-01-02-cpu.md"
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    page = path.read_text()
    assert f"![ratios]({path.with_suffix('.png').name})" in page
    assert f"`python benchmarks/step.py {' '.join(FLAGS)}`" in page
    assert "8 x cpu devices (simulated)" in page
    assert f"| tiny, unrolled | 2 | {pairs['2'].ms[0]:.2f} | {pairs['2'].ms[1]:.2f} |" in page
    assert "| tiny, unrolled | the same program twice |" in page
    for heading in ("Step time", "Tracing and compile time", "The two programs", "Caveats"):
        assert f"\n## {heading}" in page


@pytest.mark.nightly
def test_stage_2_is_the_program_that_is_written_by_hand(measured):
    """But for the number that all gradients wait for, made of the smallest leaf, 64 x 64 (update/sharded_update.py)."""
    ours, by_hand = measured[1]["2"].programs
    sent = [sum(c.wire_bytes * c.count for c in p.report.collectives) for p in (ours, by_hand)]
    assert 0 < sent[0] - sent[1] <= 16
    if jax.__version__.startswith("0.10"):  # newer ones fuse the two programs differently
        different = (ours.lines - by_hand.lines) | (by_hand.lines - ours.lines)
        shapes = re.findall(r"\w\d+\[([\d,]*)\]", " ".join(different))
        assert max(math.prod(map(int, filter(None, dims.split(",")))) for dims in shapes) == 64 * 64
    assert not measured[1]["plain Flax, all devices / one"].same


def test_goal_is_median_and_upper_end():
    def pair(ratios, other="b"):
        ratios = np.array(ratios)
        programs: Any = tuple(
            types.SimpleNamespace(lines=collections.Counter([line])) for line in ("a", other)
        )
        return step.Pair("m", "2", programs, (ratios, np.ones_like(ratios)))

    assert pair([0.99] * 20).met
    assert not pair([1.001] * 20).met, "the median"
    assert not pair([0.9] * 11 + [1.2] * 9).met, "the upper end"
    assert pair([1.001] * 20, "a").met, "one program is not slower than itself"


def test_bootstrap_interval():
    assert step.bootstrap(np.ones(20)) == (1.0, 1.0)
    values = np.random.default_rng(1).permutation(np.arange(20.0))
    low, high = step.bootstrap(values)
    # the exact interval of a median of 20 runs from the 6th to the 15th value
    assert 4.5 <= low <= 6.5
    assert 12.5 <= high <= 14.5
    assert step.bootstrap(values) == (low, high), "the same values give the same interval"
    narrow = step.bootstrap(values, level=0.5)
    assert low < narrow[0] < np.median(values) < narrow[1] < high
    assert step.bootstrap(values * 2) == (2 * low, 2 * high)


def test_split_spec_is_the_rule_of_the_plan():
    """The hand-written state and jzero's split the same leaves on the same dims."""
    import dataclasses

    import jax

    import jzero

    model, _ = step.SIZES["tiny"]
    for scan in (False, True):
        params = jax.eval_shape(step.creator(dataclasses.replace(model, scan=scan))).params
        by_hand = jax.tree_util.tree_map_with_path(lambda k, x: hand.split_spec(k, x, 8), params)
        plan = jzero.make_plan(params, stage=3, min_shard_bytes=hand.MIN_SHARD_BYTES)
        assert jax.tree.leaves(by_hand, is_leaf=lambda x: isinstance(x, jax.P)) == [
            x.stored for x in plan.layouts
        ]
        assert any(
            spec != jax.P() for spec in jax.tree.leaves(by_hand, is_leaf=lambda x: isinstance(x, jax.P))
        )


def test_programs_are_the_same_whatever_their_names_are():
    text = "HloModule m\n\n%add.1 (a.1: f32[], b: f32[]) -> f32[] {\n  ROOT %s.1 = f32[] add(%a.1, %b)\n}\n"
    text += "\n%body (a.1: (s32[], f32[2,3])) -> (s32[], f32[2,3]) {\n"  # of a loop
    renamed = text.replace("a.1", "x").replace("s.1", "sum").replace("add.1", "plus")
    assert step.bare_lines(text) == step.bare_lines(renamed)
    assert step.bare_lines(text) != step.bare_lines(text.replace("add(", "multiply("))
    assert step.bare_lines(text) != step.bare_lines(text.replace("b: f32[]", "b: f32[2]"))
