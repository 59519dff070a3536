"""Steps of the differential generator compiled for GPUs: two readers agree on the bytes, and the estimate on both."""

from __future__ import annotations

import gzip
import warnings

import differential
import pytest
from differ import gpus, grammar
from differ.refusals import refusal
from wire_reader import sent

from jzero.proof.collectives import read_collectives
from jzero.proof.hlo import parse

SEED = 21
CASES = [case for case in (grammar.draw(SEED, i) for i in range(160)) if gpus.suits(case)]
STORED = sorted((differential.TESTS / "hlo").glob("*.txt.gz"))


@pytest.mark.pod
@pytest.mark.default_cases(*(case["id"] for case in CASES[:2]))
@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_a_step_sends_what_two_readers_and_the_estimate_say(case, tmp_path):
    try:
        with warnings.catch_warnings():  # as in a case for the CPU: what they tell is told, and costs what it costs
            warnings.simplefilter("ignore")
            wrong = gpus.wrong(case, tmp_path)
    except Exception as error:
        if refusal(error, case):
            pytest.skip(str(error).splitlines()[0])
        raise
    assert not wrong, f"{wrong}\n{differential.script(case)}"


@pytest.mark.unit
@pytest.mark.parametrize("path", STORED, ids=[path.name.removesuffix(".txt.gz") for path in STORED])
def test_stored_programs_send_what_two_readers_say(path):
    text = gzip.decompress(path.read_bytes()).decode()
    assert sum(s.wire_bytes * s.trips for s in read_collectives(parse(text))[0]) == sent(text)
