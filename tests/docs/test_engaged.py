"""docs/engaged.md: its code runs, it prints what the page shows, and the kinds it lists are those of `check`."""

from __future__ import annotations

import functools
import re

import jax
import pytest
from scripts import load

from jzero.proof.faults import KINDS
from jzero.proof.faults.blind import NOT_CHECKED

pytestmark = pytest.mark.pod

make = load("make_engaged")
TEXT = make.PAGE.read_text(encoding="utf-8")


@functools.cache
def printed():
    return make.outputs(TEXT)


def test_headlines():
    naive, error, gathered = printed()
    assert re.search(r"1 x all-gather +bf16 8.39 MB .* once ", naive)
    assert "all-to-all" in naive
    assert "gather_weight" not in naive
    assert re.search(r"all-gather +bf16 .* forward gather_weight", gathered)
    assert re.search(r"all-gather +bf16 .* backward gather_weight", gathered)
    assert re.search(r"reduce-scatter +bf16 4.19 MB +3.67 MB", gathered)
    assert "all-to-all" not in gathered
    assert "1. weights_not_gathered_on_use (8.39 MB)" in error
    assert "2. activations_moved" in error


def test_the_page_is_up_to_date():
    if f"(jax {jax.__version__};" not in TEXT:
        pytest.skip(f"the page was printed by {make.VERSION.search(TEXT)[0]}, this is jax {jax.__version__}")
    assert make.page(TEXT, printed()) == TEXT, "run: python docs/make_engaged.py"


def test_numbers_in_the_text_are_in_the_tables():
    text = make.BLOCK.sub("", TEXT.split("## What to look for")[0])
    numbers = re.findall(r"[\d.]+ [kM]B|[\d.]+ Psi", text)
    assert len(numbers) >= 6
    shown = "\n".join(make.tables(TEXT))
    for number in numbers:
        value, unit = number.split()
        assert number in shown or (unit == "Psi" and re.search(rf" {value}0*\b", shown)), number


def test_every_kind_is_listed():
    rows = re.findall(r"^\| `(\w+)` \| .+ \| (?:yes|no|in part) \|$", TEXT, re.MULTILINE)
    assert rows == [*KINDS, NOT_CHECKED]


def test_an_output_too_many():
    with pytest.raises(ValueError, match=r"engaged\.md: 1 blocks print, but 3 outputs are shown"):
        make.page(TEXT, ["one"])
