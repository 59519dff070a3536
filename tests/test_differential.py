"""A fixed sample of the differential generator's cases, chosen to cover; and that the generator can fail.

Fresh cases are run by hand and nightly: `python tests/differential.py`.
"""

from __future__ import annotations

import collections
import json

import differential
import pytest
from differ import compare, grammar, refusals

SAMPLE, GROUPS = 30, 6


@pytest.fixture(scope="module")
def sample():
    return differential.covering(SAMPLE, seed=4)


@pytest.mark.parametrize("group", range(GROUPS))
def test_a_sample_of_cases_is_as_plain(sample, group):
    """In a process of their own, as in every run of the generator: a crash is one case's failure."""
    cases = sample[group::GROUPS]
    outcomes = list(differential.run(cases, 1, "default" if group == 0 else "light"))
    failed = [f"{case['id']}: {why}\n{differential.script(case)}" for case, kind, why in outcomes if kind == "FAILED"]
    assert not failed, "\n\n".join(failed)
    assert len(outcomes) == len(cases)
    assert sum(kind == "refused" for _, kind, _ in outcomes) <= len(cases) // 2, outcomes


FOUND = [json.loads(line) for line in (differential.TESTS / "differ" / "found.jsonl").read_text().splitlines()]


@pytest.mark.default_cases("1001/82", "36281126/159")
@pytest.mark.parametrize("case", FOUND, ids=[case["id"] for case in FOUND])
def test_cases_that_failed_once_are_as_plain(case):
    """A case is kept here with the mend of its fault: what `draw` makes of its seed changes with the grammar."""
    ((_, kind, why),) = differential.run([case], 1, "light")
    assert kind == "equal", why


@pytest.mark.unit
def test_the_sample_covers_every_tier_event_flavour_and_stage(sample):
    covered = collections.defaultdict(set)
    for case in sample:
        for kind, name in grammar.features(case):
            covered[kind].add(name)
    assert covered["tier"] == set(grammar.TIERS)
    assert covered["event"] >= set(grammar.EVENTS) - {"skip"}
    assert covered["flavour"] == set(grammar.FLAVOURS)
    assert covered["stage"] == set("0123")
    assert covered["mesh"] == set(grammar.MESHES)
    assert len(covered["optimizer"]) >= 20
    assert len(covered["layer"]) >= 25


@pytest.mark.unit
def test_a_case_is_a_function_of_seed_and_index_and_plain_data():
    cases = [grammar.draw(3, i) for i in range(50)]
    assert cases == [grammar.draw(3, i) for i in range(50)] == json.loads(json.dumps(cases))
    assert len({json.dumps(case | {"id": ""}) for case in cases}) == 50


@pytest.mark.unit
def test_the_shares_of_a_nightly_run_can_be_reached():
    cases = [grammar.draw(1, i) for i in range(2000)]
    assert differential.missing(cases, len(cases)) == {}
    few = cases[:520]
    assert differential.missing(few, len(few))
    more = differential.filling(few, cases[520:])
    assert len(more) < 40
    assert differential.missing(few + more, len(few + more)) == {}


@pytest.mark.unit
def test_only_a_documented_refusal_of_ours_passes():
    case = {"step": "jit", "wraps": [], "flavour": "linen"}
    text = "offload under a mesh of Explicit axes: use Auto axes"
    assert refusals.refusal(NotImplementedError(text), case) == "offload under an Explicit mesh"
    assert refusals.refusal(RuntimeError(text), case) is None
    assert refusals.refusal(ValueError("zip() argument 2 is longer than argument 1"), case) is None
    sort = RuntimeError("HLO all-to-all has operands with different shapes")
    assert refusals.refusal(sort, case) is None
    assert refusals.refusal(sort, case | {"wraps": ["median"]})
    padded = ValueError("implies that array axis 0 is partitioned 6 times")
    assert refusals.refusal(padded, case) is None
    assert refusals.refusal(padded, case | {"step": "eager"})
    closed_over = ValueError("a key that is the same for all parts of the batch")
    assert refusals.refusal(closed_over, case)
    assert refusals.refusal(closed_over, case | {"flavour": "nnx"}) is None


@pytest.mark.unit
def test_what_the_comparison_lets_pass_and_what_not():
    case = grammar.draw(1, 0) | {"dtype": "float32", "compute": None, "fed": True, "optimizer": "adam"}
    case["config"] = {"stage": 2, "tier": "device"}
    near = compare.Tolerances(case)
    near.started = [compare.np.zeros(4, "float32")]
    one = compare.np.ones(4, "float32")
    near.values([one * (1 + 1e-6)], [one], "params", [0.0])
    near.values([one * 1.001], [one], "params", [2e-4])  # rounding alone moves it as far
    one_off = compare.np.float32([1, 1, 1, 2])
    signs = compare.Tolerances(case | {"optimizer": "lion", "compute": "bfloat16"})
    signs.started = near.started
    signs.values([one_off], [one], "params", [0.0])  # the sign of a sum in 16 bits
    sums = compare.Tolerances(case | {"wraps": ["multi_steps"], "config": {"moment_dtype": "bfloat16"}})
    sums.started = near.started
    sums.values([one_off], [one], "params", [0.0])  # a sum of gradients that cancel, kept in bf16
    for off in (one_off * 1.5, one_off * compare.np.nan, one_off * 3 - 2):
        for loose in (signs, sums):
            with pytest.raises(compare.Differs):
                loose.values([off], [one], "params", [0.0])
    none = lambda: None  # noqa: E731
    near.gradients([one * (1 + 1e-6)], [one], "gradients", [one], none, none)
    rounds, exact = compare.Tolerances(case | {"compute": "bfloat16"}), lambda: [one * 1.08]
    rounds.gradients([one * 1.2], [one], "gradients", [one], exact, none)  # the plain run is as far from the truth
    codes = compare.Tolerances(case | {"config": {"reduce_dtype": "int8", "stage": 2}})
    codes.gradients([one * 1.03], [one], "gradients", [one], none, lambda: [4.0])  # a device's part was larger
    near.state([one, compare.np.int32(3)], [one, compare.np.int32(3)], "state", [0.0, 0.0])
    for wrong in (
        lambda: near.values([one * 1.001], [one], "params", [0.0]),
        lambda: near.values([one * 1.1], [one], "params", [1.0]),  # far more than rounding may
        lambda: near.values([one * float("nan")], [one], "params", [0.0]),
        lambda: near.gradients([one * 1.01], [one], "gradients", [one], none, none),
        lambda: near.gradients([one[:2]], [one], "gradients", [one], none, none),
        lambda: rounds.gradients([one * 1.4], [one], "gradients", [one], exact, none),
        lambda: codes.gradients([one * 1.1], [one], "gradients", [one], none, lambda: [4.0]),
        lambda: near.state([one * 1.01], [one], "state", [0.0]),
        lambda: near.state([compare.np.int32(2)], [compare.np.int32(3)], "state", [0.0]),
        lambda: near.state([], [one], "state", [0.0]),
        lambda: near.loss(1.001, 1.0, "loss"),
    ):
        with pytest.raises(compare.Differs):
            wrong()
