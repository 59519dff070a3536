"""The page docs/nine_parameters.md: up to date, its counts, its numbers against optax, what a step sends."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from scripts import DOCS, load

import jzero

PAGE = (DOCS / "nine_parameters.md").read_text(encoding="utf-8")


nine = load("make_nine_parameters")


@pytest.fixture(scope="module")
def two():
    return Mesh(np.array(jax.devices()[:2]), ("data",))


@pytest.fixture(scope="module")
def runs(two):
    return [nine.run(stage, two) for stage in nine.STAGES]


def by_hand():
    """Gradient of the whole batch, and one step of optax.adam, written out without the script's functions."""

    def loss(p):
        hidden = jnp.tanh(nine.BATCH["x"] @ p["W1"].T + p["b1"])
        return jnp.mean((hidden @ p["W2"].T + p["b2"] - nine.BATCH["y"]) ** 2)

    tx = optax.adam(0.1)
    grads = jax.grad(loss)(nine.PARAMS)
    updates, state = tx.update(grads, tx.init(nine.PARAMS), nine.PARAMS)
    new = optax.apply_updates(nine.PARAMS, updates)
    return {"param": new, "grad": grads, "m": state[0].mu, "v": state[0].nu}


def value(trees, kind, element):
    """`W1[0,1]` of the params, gradients, m or v."""
    name, index = element.rstrip("]").split("[")
    return float(trees[kind][name][tuple(map(int, index.split(",")))])


def test_the_page_is_up_to_date(two):
    assert nine.page(two) == PAGE, "run: python docs/make_nine_parameters.py"


@pytest.mark.nightly
def test_the_script_writes_it_with_two_devices_of_its_own(tmp_path):
    script = [sys.executable, str(DOCS / "make_nine_parameters.py"), str(tmp_path / "page.md")]
    subprocess.run(script, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == PAGE


def test_the_model_has_nine_parameters():
    shapes = {k: x.shape for k, x in nine.PARAMS.items()}
    assert shapes == {"W1": (2, 2), "b1": (2,), "W2": (1, 2), "b2": (1,)}
    assert (nine.PSI, len(nine.NAMES)) == (9, 9)


# stage: params, gradients, m, v on each of the two devices
ON_EACH = {0: (9, 9, 9, 9), 1: (9, 9, 5, 5), 2: (9, 5, 5, 5), 3: (5, 5, 5, 5)}
ON_BOTH = {0: 72, 1: 56, 2: 48, 3: 40}


@pytest.mark.parametrize("stage", nine.STAGES)
def test_values_held(stage, runs):
    r = runs[stage]
    expected = dict(zip(nine.KINDS, ON_EACH[stage], strict=True))
    assert r.counts(0) == r.counts(1) == expected
    assert nine.planned(r.plan) == expected
    assert sum(map(len, (v for h in r.held for v in h.values()))) == ON_BOTH[stage]
    assert jzero.estimate(r.plan).total == 4 * sum(expected.values())
    assert f"**{ON_BOTH[stage]}**" in next(x for x in PAGE.splitlines() if x.startswith(f"| stage {stage} "))
    for kind in nine.KINDS:  # together the two devices hold every value
        assert set(r.held[0][kind]) | set(r.held[1][kind]) == set(nine.NAMES)


def test_whole_tensors_to_ranks():
    assert nine.whole_tensors(nine.OWNER) == [30, 24]
    assert 9 + 9 + 2 * (4 + 2) == 30
    assert 9 + 9 + 2 * (2 + 1) == 24
    assert sorted(nine.best_packing()) == [26, 28]
    assert "| 30 | 24 | **54** |" in PAGE


def test_how_the_tensors_are_split(runs, two):
    for stage in (1, 2, 3):
        layouts = {x.keys[0]: x for x in runs[stage].plan.layouts}
        assert {k: x.state for k, x in layouts.items()} == {
            "W1": jax.P("data"), "b1": jax.P("data"), "W2": jax.P(None, "data"), "b2": jax.P()
        }  # fmt: skip
        assert layouts["b2"].reason == "no dim divisible by 2"
        assert "no dim divisible by 2" in runs[stage].plan.describe()
    whole = jzero.make_plan(nine.PARAMS, stage=3, mesh=two, min_shard_bytes=16 * 1024)
    assert all(x.stored == x.state == jax.P() and "min_shard_bytes" in x.reason for x in whole.layouts)
    default = jzero.make_plan(
        nine.PARAMS, stage=3, mesh=two
    )  # whole leaves would add more than 1 %: as on the page
    assert {x.keys[0]: x.state for x in default.layouts} == {k: x.state for k, x in layouts.items()}


@pytest.mark.parametrize("stage", nine.STAGES)
def test_numbers_are_those_of_optax_on_one_device(stage, runs):
    reference = by_hand()
    for h, kind in itertools.product(runs[stage].held, nine.KINDS):
        for element, got in h[kind].items():
            top = float(np.max(np.abs(reference[kind][element.split("[")[0]])))
            assert abs(got - value(reference, kind, element)) <= 1e-6 * top, (kind, element)


def test_parts_of_the_gradient_add_up(runs):
    reference = by_hand()
    for r in runs:
        assert r.parts[0] != r.parts[1]  # the batch is split
        for e in nine.NAMES:
            np.testing.assert_allclose(r.parts[0][e] + r.parts[1][e], value(reference, "grad", e), atol=2e-7)


def without_bias_correction(grads: dict[str, float]) -> dict[str, float]:
    """The params after the first step of an Adam that takes m and v as they are."""
    start, m, v = nine.elements(nine.PARAMS), 1 - nine.B1, 1 - nine.B2
    return {
        k: start[k] - nine.LEARNING_RATE * m * g / (math.sqrt(v * g * g) + nine.EPS) for k, g in grads.items()
    }


def test_textbook_adam_differs_by_the_bias_correction():
    reference, start = by_hand(), nine.elements(nine.PARAMS)
    textbook = without_bias_correction({e: value(reference, "grad", e) for e in nine.NAMES})
    for e in nine.NAMES:
        m, v = value(reference, "m", e), value(reference, "v", e)
        assert textbook[e] == pytest.approx(start[e] - 0.1 * m / (math.sqrt(v) + 1e-8), abs=1e-6)
        with_correction = value(reference, "param", e) - start[e]
        assert abs(with_correction) == pytest.approx(0.1, rel=1e-4)  # the learning rate
        assert (textbook[e] - start[e]) / with_correction == pytest.approx(math.sqrt(10), rel=1e-4)


def test_values_sent(runs):
    for r, expected in zip(runs, (9, 9, 9, 13), strict=True):
        assert nine.total(nine.sends(r)) == expected
        assert jzero.estimate(r.plan).wire == 4 * expected
    assert runs[1].gathers == runs[2].gathers == (0, 0)
    assert runs[3].gathers == (4, 1)  # from the compiled program: W1, b1 and W2 forward, W2 backward
