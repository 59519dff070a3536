"""Wrong arguments of public functions end in an error of jzero's own; the fuzz that says so can fail."""

from __future__ import annotations

import inspect
import random

import pytest
from fuzz import ACCEPTED, FINE, KINDS, RAW, REFUSED, Subject, draw, fuzz, outcome, row
from fuzz_subjects import MADE, subjects

import jzero
from jzero import checkpoint, deepspeed

OURS = subjects()


@pytest.mark.parametrize("seed", [1, 2])
def test_wrong_arguments_are_refused_in_our_words(seed):
    calls = fuzz(OURS, 250, seed)
    raw = [c for c in calls if c.outcome == RAW]
    assert len(raw) <= 0.01 * len(calls), raw
    assert sum(c.outcome == ACCEPTED for c in calls) <= 0.01 * len(calls), calls
    assert sum(c.outcome == REFUSED for c in calls) > 0.6 * len(calls)
    assert {k for c in calls for _, k in c.wrong} == {*KINDS, "dropped"}


@pytest.mark.parametrize("subject", [s for s in OURS if s.runs], ids=lambda s: s.name)
def test_the_calls_that_it_starts_from_are_valid(subject):
    assert outcome(subject, subject.valid, wrong=False) == (FINE, "")


def test_every_public_name_is_called():
    names = {s.name for s in subjects()}
    public = {f"jzero.{n}" for n in jzero.__all__ if n not in (*MADE, "checkpoint", "deepspeed")}
    public |= {
        f"jzero.checkpoint.{n}" for n in checkpoint.__all__ if n not in ("CheckpointDamaged", "FolderInUse", "Saving")
    }
    public |= {f"jzero.deepspeed.{n}" for n in deepspeed.__all__ if inspect.isfunction(getattr(deepspeed, n))}
    methods = {n for n, x in vars(jzero.Plan).items() if inspect.isfunction(x) and not n.startswith("_")}
    public |= {f"plan.{n}" for n in methods}
    assert public <= names


def test_it_finds_a_function_that_checks_nothing():
    def unchecked(size, name):
        return {"a": 1}[name] + size

    calls = fuzz([Subject("jzero.unchecked", unchecked, {"size": 1, "name": "a"}, {})], 100, 1)
    found = {c.outcome for c in calls}
    assert {RAW, ACCEPTED} <= found
    assert f"{sum(c.outcome == RAW for c in calls)} raw" in row(calls)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (TypeError("jzero.f: n must be an int"), REFUSED),
        (TypeError("f() missing 1 required positional argument: 'n'"), REFUSED),
        (TypeError("g() missing 1 required positional argument: 'n'"), RAW),
        (ValueError("zip() argument 2 is longer than argument 1"), RAW),
        (AttributeError("jzero.f: no attribute"), RAW),
    ],
)
def test_what_is_raw(error, expected):
    def f(n):
        raise error

    assert outcome(Subject("jzero.f", f, {"n": 1}, {}), {"n": 1}, wrong=True)[0] == expected


def test_a_seed_gives_the_same_calls():
    first, again = ([draw(s, random.Random(7))[1] for s in OURS] for _ in range(2))
    assert first == again
